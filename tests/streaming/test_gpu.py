"""The real device paths; skipped where there is no CUDA device.

Copies are made late on purpose: a device that is kept busy for some milliseconds first would find a slot overwritten
or a destination untouched, if anything in the loader relied on luck.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import loader_service as ls
from loader_service.memory.pinning import CudaPinner
from tests.support.checkpoints import Checkpoint, assert_same, awkward_checkpoint
from tests.support.devices import CountingPinner, busy

pytestmark = pytest.mark.gpu

PATIENCE_S = 90.0
PIECE_MS = 10.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return awkward_checkpoint(tmp_path_factory.mktemp("awkward"))


@pytest.fixture
def stream() -> Iterator[torch.cuda.Stream]:
    """One that waits for no other; idle again at the end."""
    made = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    yield made
    made.synchronize()


def on_device(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(checkpoint.tensor(name), device="cuda") for name in checkpoint.tensors}


def strided(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Device memory with other strides: transposed, or every other element."""
    params = {}
    for name, tensor in on_device(checkpoint).items():
        if tensor.dim() >= 2:
            params[name] = tensor.transpose(0, -1).contiguous().transpose(0, -1)
        else:
            params[name] = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype, device="cuda")[..., 0]
    assert not params["big.weight"].is_contiguous()
    assert not params["odd"].is_contiguous()
    return params


def assert_arrived(checkpoint: Checkpoint, params: dict[str, torch.Tensor]) -> None:
    torch.cuda.synchronize()
    for name, tensor in params.items():
        assert_same(tensor, checkpoint.tensor(name), name)


def copy(batch: ls.Batch, params: dict[str, torch.Tensor]) -> None:
    for piece in batch:
        params[piece.name][piece.index].copy_(piece.tensor, non_blocking=True)


@pytest.mark.parametrize("pin", ["required", "auto", "never"])
async def test_batches_copied_without_waiting_arrive_whole(checkpoint: Checkpoint, pin: str) -> None:
    """Slots come back while copies are still queued: only the recorded events keep them from being overwritten."""
    config = checkpoint.config(staging={"capacity_bytes": "64KiB", "pin": pin}, reads={"chunk_bytes": "16KiB"})
    params = on_device(checkpoint)
    pinned = set()
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        async for batch in load.batches():
            with batch, torch.no_grad():
                copy(batch, params)
                pinned |= {piece.tensor.is_pinned() for piece in batch if piece.name == "big.weight"}
    assert_arrived(checkpoint, params)
    assert pinned == {pin != "never"}
    assert load.report.policies["pin"].effective == ("pageable" if pin == "never" else "pinned")


async def test_a_slot_is_not_filled_again_before_a_late_copy_has_read_it(checkpoint: Checkpoint) -> None:
    config = checkpoint.config(
        staging={"capacity_bytes": "1MiB", "pin": "required"}, reads={"chunk_bytes": "256KiB", "threads": 2}
    )
    params = on_device(checkpoint)
    held = 0
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        pool = service._opened()[1]._pool
        assert pool is not None
        async for batch in load.batches():
            with batch, torch.no_grad():
                busy(PIECE_MS)
                copy(batch, params)
            held = max(held, pool.statistics().leases_held)
    assert_arrived(checkpoint, params)
    assert held > 1, "batches were left while their copies were still to come"


def test_copies_on_another_stream_are_held(checkpoint: Checkpoint, stream: torch.cuda.Stream) -> None:
    """The current stream is idle, so that only the event given to `hold_until` keeps a slot; in the blocking face."""
    config = checkpoint.config(staging={"capacity_bytes": "1MiB", "pin": "required"}, reads={"chunk_bytes": "256KiB"})
    params = on_device(checkpoint)
    torch.cuda.synchronize()
    with ls.LoaderService.blocking(config, "solo") as service, service.open("target") as load:
        for batch in load.batches():
            with batch, torch.no_grad():
                with torch.cuda.stream(stream):
                    busy(PIECE_MS)
                    copy(batch, params)
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record()
                batch.hold_until(event)
    assert_arrived(checkpoint, params)


@pytest.mark.parametrize("pin", ["required", "never"])
@pytest.mark.parametrize("make", [on_device, strided])
@pytest.mark.parametrize("capacity", ["64KiB", "1GiB"])
async def test_into_fills_device_memory(
    checkpoint: Checkpoint, make: Callable[[Checkpoint], dict[str, torch.Tensor]], capacity: str, pin: str
) -> None:
    params = make(checkpoint)
    places = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in params.items()}
    config = checkpoint.config(staging={"capacity_bytes": capacity, "pin": pin}, reads={"chunk_bytes": "64KiB"})
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        await load.into(params)
    assert_arrived(checkpoint, params)
    assert {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in params.items()} == places
    assert load.report.payload_bytes == checkpoint.payload_bytes


@pytest.mark.parametrize("rank", [0, 1])
async def test_into_fills_column_slices_parameters_and_inference_tensors(checkpoint: Checkpoint, rank: int) -> None:
    """Half of the columns: of each block of the file only the wanted elements go to the device."""
    rules = [{"match": "*.weight", "split": {"axis": "tp", "dim": 1}}]
    config = checkpoint.config({"rules": rules}, mesh={"tp": 2}, staging={"capacity_bytes": "64KiB"})
    params: dict[str, torch.Tensor] = {
        "big.weight": torch.nn.Parameter(torch.zeros(640, 350, device="cuda")),
        "scale": torch.zeros((), device="cpu"),
    }
    with torch.inference_mode():
        params["embed.weight"] = torch.zeros(150, 500, dtype=torch.bfloat16, device="cuda").t()
    async with ls.LoaderService(config, "solo", {"tp": rank}) as service, service.open("target") as load:
        await load.into(params)
    assert_same(params["scale"], checkpoint.tensor("scale"))
    for name in ("big.weight", "embed.weight"):
        assert_same(params[name], checkpoint.tensor(name).chunk(2, dim=1)[rank], name)


@pytest.mark.parametrize("make", [on_device, strided])
async def test_into_keeps_its_place_in_the_work_of_the_callers_stream(
    checkpoint: Checkpoint, make: Callable[[Checkpoint], dict[str, torch.Tensor]], stream: torch.cuda.Stream
) -> None:
    """What the caller queued on its stream before, comes before; what it queues there afterwards, finds the bytes."""
    params = make(checkpoint)
    found = on_device(checkpoint)
    torch.cuda.synchronize()
    async with ls.LoaderService(checkpoint.config(), "solo") as service, service.open("target") as load:
        with torch.cuda.stream(stream):
            busy(200.0)
            for tensor in params.values():
                tensor.zero_()
            await load.into(params)
            for name, tensor in params.items():
                found[name].copy_(tensor)
    assert_arrived(checkpoint, found)


async def test_memory_that_was_locked_is_unlocked_at_the_end(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    pinner = CountingPinner()
    config = checkpoint.config(staging={"capacity_bytes": "1MiB", "pin": "required"}, reads={"chunk_bytes": "256KiB"})
    params = on_device(checkpoint)
    with caplog.at_level(logging.WARNING, logger="loader_service"):
        async with ls.LoaderService(config, "solo", pinner=pinner) as service:
            for _ in range(2):
                async with service.open("target") as load:
                    async for batch in load.batches():
                        with batch, torch.no_grad():
                            copy(batch, params)
            assert pinner.locked, "slots stay locked between loads"
    assert pinner.locked == {}
    assert 0 < pinner.registrations <= 4, "slots are used again, within the capacity"
    assert caplog.messages == []
    assert_arrived(checkpoint, params)


async def test_a_view_that_was_kept_stays_locked_until_it_is_dropped(checkpoint: Checkpoint) -> None:
    pinner = CountingPinner()
    config = checkpoint.config(staging={"capacity_bytes": "16MiB", "pin": "required"})
    async with ls.LoaderService(config, "solo", pinner=pinner) as service, service.open("target") as load:
        async for batch in load.batches():
            with batch:
                kept = {piece.name: piece.tensor for piece in batch if piece.name == "big.weight"}
            if kept:
                break
    tensor = kept.pop("big.weight")
    assert len(pinner.locked) == 1
    assert tensor.is_pinned()
    del batch, tensor
    assert pinner.locked == {}


class RefusingPinner(CudaPinner):
    """Asks CUDA, from the second time on, for memory that nobody has: it is CUDA that refuses."""

    calls = 0

    def register(self, address: int, nbytes: int) -> None:
        self.calls += 1
        super().register(address if self.calls == 1 else 1 << 46, nbytes)


async def test_auto_goes_on_with_pageable_memory_where_cuda_refuses(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    pinner = RefusingPinner()
    config = checkpoint.config(staging={"capacity_bytes": "1MiB", "pin": "auto"}, reads={"chunk_bytes": "256KiB"})
    params = on_device(checkpoint)
    with caplog.at_level(logging.WARNING, logger="loader_service"):
        async with ls.LoaderService(config, "solo", pinner=pinner) as service:
            for _ in range(2):
                async with service.open("target") as load:
                    async for batch in load.batches():
                        with batch, torch.no_grad():
                            copy(batch, params)
    assert_arrived(checkpoint, params)
    assert pinner.calls == 2, "it is not tried again"
    assert len(caplog.messages) == 1
    assert load.report.policies["pin"].effective == "pageable"
    assert "cudaHostRegister returned" in load.report.policies["pin"].reason


async def test_required_fails_the_load_where_cuda_refuses(checkpoint: Checkpoint) -> None:
    config = checkpoint.config(staging={"capacity_bytes": "1MiB", "pin": "required"}, reads={"chunk_bytes": "256KiB"})
    async with ls.LoaderService(config, "solo", pinner=RefusingPinner()) as service:
        with pytest.raises(
            ls.MemoryLimitError, match=r"staging\.pin is required, .*cudaHostRegister returned"
        ) as caught:
            async with service.open("target") as load:
                async for batch in load.batches():
                    batch.release()
    assert caught.value.exit_code == 6
    assert torch.zeros(4, device="cuda").sum().item() == 0, "the device is as usable as before"


def in_a_process_of_its_own(scene: str, folder: Path) -> tuple[dict[str, object], str]:
    """What one scene of device_process.py reports, and what it wrote to stderr; it must end by itself, well."""
    command = [sys.executable, "-m", "tests.streaming.device_process", scene, str(folder)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return report, done.stderr


def test_cuda_is_left_alone_in_a_process_that_has_not_chosen_its_device(checkpoint: Checkpoint) -> None:
    report, _ = in_a_process_of_its_own("not_initialised", checkpoint.folder)
    assert report["effective"] == "pageable"
    assert "torch.cuda.set_device" in str(report["reason"])
    assert "torch.cuda.set_device" in str(report["required"])
    assert report["initialised"] is False


@pytest.mark.parametrize("when", ["noticed", "unnoticed"])
def test_a_device_that_fails_ends_the_load_and_nothing_hangs(checkpoint: Checkpoint, when: str) -> None:
    """An assertion on the device spoils its context: events cannot be asked or recorded, memory not unlocked."""
    report, stderr = in_a_process_of_its_own(f"device_fails_{when}", checkpoint.folder)
    assert report["error"] in {"AcceleratorError", "RuntimeError"}
    assert "Fatal" not in stderr
    assert report["leases_out"] == 0, "what the device may still read is written off, not lost"
    assert report["leases_held"] == 0


def test_a_process_may_end_while_it_holds_locked_memory(checkpoint: Checkpoint) -> None:
    report, stderr = in_a_process_of_its_own("ends_holding", checkpoint.folder)
    assert report["pinned"] is True
    assert "Fatal" not in stderr
    assert "Traceback" not in stderr
