"""A service that has closed holds nothing of the caller's: torch's groups end their threads with the last reference."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

import loader_service as ls
from tests.support.checkpoints import Checkpoint, write_checkpoint
from tests.support.ranks import Rank, run_ranks

pytestmark = pytest.mark.processes


def references_to_the_group(rank: Rank, folder: str, given: bool) -> tuple[int, int]:
    """To the default process group, before a service was made and after it has closed, while a load is still held."""
    import torch.distributed as dist

    rank.init_process_group()
    group = dist.group.WORLD
    gc.disable()  # the service's parts refer to one another: only the collector frees them
    before = sys.getrefcount(group)
    with ls.LoaderService.blocking(Checkpoint(Path(folder), {}, {}).config(), group if given else None) as service:
        with service.open("target") as load:
            assert len(list(load)) == 1
    del service
    after = sys.getrefcount(group)
    assert load.report.complete
    dist.destroy_process_group()
    return before, after


@pytest.mark.parametrize("given", [False, True], ids=["default", "given"])
def test_a_closed_service_does_not_keep_the_process_group_alive(given: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a.safetensors": {"w": ("U8", (8,))}})
    for outcome in run_ranks(references_to_the_group, 2, str(tmp_path), given):
        before, after = outcome.get()
        assert after == before
