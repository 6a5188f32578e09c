"""`plan`: who would read what. Nothing runs and no ranks meet."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from loader_service.cli.catalogs import read_headers
from loader_service.cli.output import print_document
from loader_service.config.schema import ServiceConfig
from loader_service.config.yaml_file import load_config
from loader_service.errors import EXIT_OK, ConfigError
from loader_service.planning.mesh import Mesh
from loader_service.planning.plan import LoadPlan, make_plan


def show_plan(config_path: Path, load: str, ranks: int | None, *, as_json: bool) -> int:
    """Prints a load's plan for all ranks. Returns the exit code."""
    config = load_config(config_path)
    plan = plan_of(config, load, ranks)
    if as_json:
        print_document(plan.as_json())
    else:
        from loader_service.cli.render import show_load_plan

        show_load_plan(plan)
    return EXIT_OK


def plan_of(config: ServiceConfig, load: str, ranks: int | None) -> LoadPlan:
    """A load's plan, from the checkpoint's headers. `ranks` None: as many as `planned_ranks` says."""
    checkpoint = config.checkpoint_of(load)
    mesh = Mesh.row_major(config.mesh, planned_ranks(config, os.environ) if ranks is None else ranks)
    catalog = read_headers(checkpoint, retries=config.reads.retries)
    return make_plan(catalog, load, config.load(load), mesh, coalesce_gap_bytes=config.reads.coalesce_gap_bytes)


def planned_ranks(config: ServiceConfig, environ: Mapping[str, str]) -> int:
    """How many ranks to plan for: the mesh's product, else WORLD_SIZE, else 1."""
    if config.mesh is not None:
        return math.prod(config.mesh.values())
    text = environ.get("WORLD_SIZE") or "1"
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE is {text!r}, which is no number of ranks: unset it, or pass --ranks")
    return int(text)
