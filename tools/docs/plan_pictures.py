"""docs/draft.svg and docs/sharing.svg: the plans of a small demo checkpoint on 4 ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from loader_service.cli.demo_checkpoint import make_demo_checkpoint
from loader_service.cli.plan_figures import figures_of
from loader_service.cli.plan_picture import standalone
from loader_service.cli.plans import plan_of
from loader_service.config.yaml_file import config_from_dict
from loader_service.memory.budget import slot_bytes_of
from tools.docs import ROOT

CHECKPOINT_BYTES = 20_000_000
RANKS = 4
CHUNK = "256KiB"  # so that a small checkpoint has several blocks
BINS = 320


def pictures(folder: Path) -> Mapping[str, str]:
    """The pictures by their names. `folder` is empty; the checkpoint is made there."""
    make_demo_checkpoint(folder / "checkpoint", total_bytes=CHECKPOINT_BYTES)
    document = yaml.safe_load((ROOT / "loader_service/cli/demo.yaml").read_text(encoding="utf-8"))
    config = config_from_dict(document | {"mesh": {"tp": RANKS}, "reads": {"chunk_bytes": CHUNK}}, base_dir=str(folder))
    target, draft = plan_of(config, "target", RANKS), plan_of(config, "draft", RANKS)
    slot_bytes = slot_bytes_of(config.reads.chunk_bytes, config.staging.capacity_bytes)
    drawn = figures_of(draft, slot_bytes=None, most_bins=BINS, most_titles=1)
    shared = figures_of(target, slot_bytes=slot_bytes, sharing="staging", draft=draft, most_bins=BINS, most_titles=1)
    return {
        "draft.svg": standalone(drawn, f"A draft load on {RANKS} ranks: who reads what"),
        "sharing.svg": standalone(shared, f"Its target on {RANKS} ranks of one node: who reads what, and who for all"),
    }
