"""Batches: leased memory, pieces that fill every tensor exactly, and when a buffer may be used again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import loader_service as ls
from loader_service.memory.events import FakeDeviceEvent
from tests.support.checkpoints import Checkpoint, assert_same, awkward_checkpoint, sha256, write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return awkward_checkpoint(tmp_path_factory.mktemp("awkward"))


def empty_parameters(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Parameters filled with a byte that a forgotten piece would leave behind."""
    params = {name: torch.empty_like(checkpoint.tensor(name)) for name in checkpoint.tensors}
    for tensor in params.values():
        if tensor.numel():
            tensor.reshape(-1).view(torch.uint8).fill_(0xA5)
    return params


@pytest.mark.parametrize("capacity", [4096, 9999, "64KiB", "1MiB", "1GiB"])
async def test_pieces_fill_every_tensor_exactly_once(checkpoint: Checkpoint, capacity: int | str) -> None:
    config = checkpoint.config(staging={"capacity_bytes": capacity}, reads={"chunk_bytes": "64KiB"})
    params = empty_parameters(checkpoint)
    order: list[str] = []
    elements = dict.fromkeys(params, 0)
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        async for batch in load.batches():
            with batch, torch.no_grad():
                for piece in batch:
                    params[piece.name][piece.index].copy_(piece.tensor)
                    assert piece.tensor.data_ptr() % piece.tensor.element_size() == 0
                    elements[piece.name] += piece.tensor.numel()
                    if not order or order[-1] != piece.name:
                        order.append(piece.name)
    assert order == list(checkpoint.tensors), "plan order, empty tensors too"
    for name, tensor in params.items():
        assert_same(tensor, checkpoint.tensor(name), name)
        assert elements[name] == tensor.numel(), f"{name}: an element came twice or never"
    assert load.report.complete
    assert load.report.payload_bytes == load.report.read_bytes == checkpoint.payload_bytes
    assert load.report.tensors == len(checkpoint.tensors)
    assert load.report.peak_staging_bytes <= config.staging.capacity_bytes


def test_blocking_batches_fill_every_tensor(checkpoint: Checkpoint) -> None:
    params = empty_parameters(checkpoint)
    config = checkpoint.config(staging={"capacity_bytes": 32_000})
    with ls.LoaderService.blocking(config, "solo") as service, service.open("target") as load:
        for batch in load.batches():
            with batch, torch.no_grad():
                for piece in batch:
                    params[piece.name][piece.index].copy_(piece.tensor)
    for name, tensor in params.items():
        assert_same(tensor, checkpoint.tensor(name), name)


async def test_use_after_leaving_a_batch_raises(checkpoint: Checkpoint) -> None:
    async with ls.LoaderService(checkpoint.config(), "solo") as service, service.open("target") as load:
        batch = await anext(load.batches())
        with batch:
            piece = next(iter(batch))
            assert piece.tensor is not None
        uses: list[Callable[[], object]] = [
            lambda: piece.tensor,
            lambda: list(batch),
            lambda: len(batch),
            batch.__enter__,
            lambda: batch.hold_until(FakeDeviceEvent()),
        ]
        for use in uses:
            with pytest.raises(ls.StateError, match="given back"):
                use()


async def test_a_kept_batch_is_not_overwritten(checkpoint: Checkpoint) -> None:
    config = checkpoint.config(staging={"capacity_bytes": "256KiB"}, reads={"chunk_bytes": "16KiB"})
    params = empty_parameters(checkpoint)
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        stream = load.batches()
        kept = await anext(stream)
        async for batch in stream:
            with batch, torch.no_grad():
                for piece in batch:
                    params[piece.name][piece.index].copy_(piece.tensor)
        with kept, torch.no_grad():
            for piece in kept:
                params[piece.name][piece.index].copy_(piece.tensor)
    for name, tensor in params.items():
        assert_same(tensor, checkpoint.tensor(name), name)


async def test_memory_that_a_device_still_reads_is_not_reused(checkpoint: Checkpoint) -> None:
    """A late event: the piece's bytes stay as they are while the rest of the load goes through the other slots."""
    config = checkpoint.config(staging={"capacity_bytes": "64KiB"}, reads={"chunk_bytes": "16KiB"})
    event = FakeDeviceEvent()
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        stream = load.batches()
        first = await anext(stream)
        with first:
            piece = next(iter(first))
            view, before = piece.tensor, sha256(piece.tensor)
            name, index = piece.name, piece.index
            first.hold_until(event)
        async for batch in stream:
            with batch:
                pass
            assert sha256(view) == before, "the slot was reused under the device"
        assert event.queries > 0
        assert before == sha256(checkpoint.tensor(name)[index])
        event.complete()


async def test_a_consumer_that_keeps_all_memory_is_told_so(checkpoint: Checkpoint) -> None:
    config = checkpoint.config(staging={"capacity_bytes": "16KiB"}, reads={"chunk_bytes": "4KiB", "stuck_after_s": 2})
    kept: list[ls.Batch] = []
    async with ls.LoaderService(config, "solo") as service:
        with pytest.raises(ls.StateError, match="keeps 4 batches"):
            async with service.open("target") as load:
                async for batch in load.batches():
                    kept.append(batch)
        for batch in kept:
            batch.release()


async def test_a_consumer_that_was_busy_for_long_and_gives_all_memory_back_goes_on(checkpoint: Checkpoint) -> None:
    """Although a device uses it a moment longer: what counts is how long nothing went on on both sides."""
    config = checkpoint.config(staging={"capacity_bytes": "16KiB"}, reads={"chunk_bytes": "4KiB", "stuck_after_s": 2})
    event = FakeDeviceEvent()
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        stream = load.batches()
        kept = [await anext(stream) for _ in range(4)]
        await asyncio.sleep(2.5)  # it is busy
        for batch in kept:
            batch.hold_until(event)
            batch.release()
        asyncio.get_running_loop().call_later(1.0, event.complete)
        async for batch in stream:
            batch.release()
    assert load.report.complete


async def test_a_dropped_batch_warns_and_gives_its_memory_back(checkpoint: Checkpoint) -> None:
    config = checkpoint.config({"skip": ["empty.*"]}, staging={"capacity_bytes": "16KiB"})
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        stream = load.batches()
        for _ in range(12):  # three times what the capacity holds
            batch: ls.Batch | None = await anext(stream)
            with pytest.warns(ResourceWarning, match="dropped without being left"):
                batch = None
        assert batch is None


async def test_other_threads_may_give_batches_back(checkpoint: Checkpoint) -> None:
    config = checkpoint.config(staging={"capacity_bytes": "16KiB"}, reads={"chunk_bytes": "4KiB"})
    pieces = 0
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        async for batch in load.batches():
            pieces += len(batch)
            await asyncio.to_thread(batch.release)
    assert load.report.complete
    assert pieces >= len(checkpoint.tensors)


async def test_rows_larger_than_the_capacity_come_in_pieces(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(
        tmp_path, {"m.safetensors": {"wide": ("F32", (3, 5000)), "deep": ("BF16", (2, 3, 4001))}}
    )
    params = empty_parameters(checkpoint)
    config = checkpoint.config(staging={"capacity_bytes": 4096})
    forms = set()
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        async for batch in load.batches():
            with batch, torch.no_grad():
                for piece in batch:
                    forms.add(tuple(type(part) for part in piece.index))
                    params[piece.name][piece.index].copy_(piece.tensor)
    for name, tensor in params.items():
        assert_same(tensor, checkpoint.tensor(name), name)
    assert forms == {(int, slice), (int, int, slice)}, "integers and one slice"
