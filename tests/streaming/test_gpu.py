"""The real device paths; skipped where there is no CUDA device."""

from __future__ import annotations

import pytest
import torch

import loader_service as ls
from tests.support.checkpoints import Checkpoint, assert_same, awkward_checkpoint

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return awkward_checkpoint(tmp_path_factory.mktemp("awkward"))


def on_device(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(checkpoint.tensor(name), device="cuda") for name in checkpoint.tensors}


@pytest.mark.parametrize("pin", ["required", "never"])
async def test_batches_copied_without_waiting_arrive_whole(checkpoint: Checkpoint, pin: str) -> None:
    """Slots come back while copies are still queued: only the recorded events keep them from being overwritten."""
    config = checkpoint.config(staging={"capacity_bytes": "64KiB", "pin": pin}, reads={"chunk_bytes": "16KiB"})
    params = on_device(checkpoint)
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        async for batch in load.batches():
            with batch, torch.no_grad():
                for piece in batch:
                    params[piece.name][piece.index].copy_(piece.tensor, non_blocking=True)
    torch.cuda.synchronize()
    for name, tensor in params.items():
        assert_same(tensor, checkpoint.tensor(name), name)
    assert load.report.policies["pin"].effective == ("pinned" if pin == "required" else "pageable")


async def test_copies_on_another_stream_are_held(checkpoint: Checkpoint) -> None:
    config = checkpoint.config(staging={"capacity_bytes": "64KiB"}, reads={"chunk_bytes": "16KiB"})
    params = on_device(checkpoint)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        async for batch in load.batches():
            with batch, torch.no_grad(), torch.cuda.stream(stream):
                for piece in batch:
                    params[piece.name][piece.index].copy_(piece.tensor, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(stream)
                batch.hold_until(event)
    torch.cuda.synchronize()
    for name, tensor in params.items():
        assert_same(tensor, checkpoint.tensor(name), name)


async def test_into_fills_device_memory(checkpoint: Checkpoint) -> None:
    params = on_device(checkpoint)
    config = checkpoint.config(staging={"capacity_bytes": "64KiB"})
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        await load.into(params)
    for name, tensor in params.items():
        assert_same(tensor, checkpoint.tensor(name), name)
