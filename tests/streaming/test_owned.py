"""Owned tensors: whatever the consumer keeps, complete, in order, within the budget."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open

import loader_service as ls
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from tests.support.checkpoints import Checkpoint, assert_same, awkward_checkpoint, sha256, write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return awkward_checkpoint(tmp_path_factory.mktemp("awkward"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Its largest tensor is above most budgets too, and not 30,000 of the smallest chunks."""
    return awkward_checkpoint(tmp_path_factory.mktemp("small"), columns=70)


@pytest.mark.parametrize("capacity", [4096, 10_000, "64KiB", "1MiB", "1GiB"])
@pytest.mark.parametrize("chunk", [64, 5000, "16MiB"])
async def test_everything_comes_out_whole_through_any_budget(
    checkpoint: Checkpoint, small: Checkpoint, capacity: int | str, chunk: int | str
) -> None:
    checkpoint = small if chunk == 64 else checkpoint
    config = checkpoint.config(staging={"capacity_bytes": capacity}, reads={"chunk_bytes": chunk})
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        items = [item async for item in load]
    assert [name for name, _ in items] == list(checkpoint.tensors), "plan order: file name, then offset"
    for name, tensor in items:
        assert_same(tensor, checkpoint.tensor(name), name)
    report = load.report
    assert report.complete
    assert report.tensors == len(checkpoint.tensors)
    assert report.payload_bytes == report.read_bytes == checkpoint.payload_bytes
    assert report.peak_staging_bytes <= config.staging.capacity_bytes
    assert report.files_opened == 2
    assert set(report.files_read) == set(checkpoint.shard_of.values())


@pytest.mark.parametrize("form", ["owned", "batches", "into"])
@pytest.mark.parametrize("nbytes", [16_383, 16_384, 16_385, 65_535, 65_536, 65_537, 300_001])
async def test_tensors_around_and_above_the_budget(tmp_path: Path, nbytes: int, form: str) -> None:
    shapes = {"before": ("U8", (5,)), "tight": ("U8", (nbytes,)), "after": ("U8", (7,))}
    checkpoint = write_checkpoint(tmp_path, {"model.safetensors": shapes})
    config = checkpoint.config(staging={"capacity_bytes": 65_536})
    found = {name: torch.zeros_like(checkpoint.tensor(name)) for name in shapes}
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        if form == "owned":
            found = {name: tensor async for name, tensor in load}
        elif form == "into":
            await load.into(found)
        else:
            async for batch in load.batches():
                with batch:
                    for piece in batch:
                        found[piece.name][piece.index].copy_(piece.tensor)
    for name, tensor in found.items():
        assert_same(tensor, checkpoint.tensor(name), name)
    assert load.report.peak_staging_bytes <= 65_536


async def test_the_peak_of_column_slices_counts_whole_slots_beside_the_tensors(tmp_path: Path) -> None:
    """Two a reading thread are kept for the whole load. A tensor's memory is whole blocks, as it lies in the file."""
    slot_bytes, rows = 64 << 10, 4096
    checkpoint = write_checkpoint(tmp_path, {"model.safetensors": {"w": ("U8", (rows, 100))}})
    reads = {"chunk_bytes": slot_bytes, "threads": 2}
    for columns, rule in ((100, {}), (50, {"rules": [{"match": "w", "split": {"axis": "tp", "dim": 1}}]})):
        loads = {"target": rule}
        config = checkpoint.config(
            mesh={"tp": 2}, loads=loads, reads=reads, staging={"capacity_bytes": 16 * slot_bytes}
        )
        async with ls.LoaderService(config, "solo", coords={"tp": 0}) as service, service.open("target") as load:
            _ = [item async for item in load]
        scratch_bytes = 4 * slot_bytes if rule else 0
        assert load.report.payload_bytes == rows * columns
        assert 0 <= load.report.peak_staging_bytes - (rows * columns + scratch_bytes) <= 2 * 4096


async def test_tensors_equal_safetensors_own_reading(checkpoint: Checkpoint) -> None:
    async with ls.LoaderService(checkpoint.config(), "solo") as service, service.open("target") as load:
        ours = {name: tensor async for name, tensor in load}
    for file in sorted(set(checkpoint.shard_of.values())):
        with safe_open(checkpoint.folder / file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a dict
                assert_same(ours[name], shard.get_tensor(name), name)


async def test_kept_tensors_are_never_written_again(checkpoint: Checkpoint) -> None:
    config = checkpoint.config(staging={"capacity_bytes": 8192})
    kept: list[tuple[str, torch.Tensor, str]] = []
    async with ls.LoaderService(config, "solo") as service:
        for _ in range(2):
            async with service.open("target") as load:
                async for name, tensor in load:
                    kept.append((name, tensor, sha256(tensor)))
    assert all(sha256(tensor) == digest for _, tensor, digest in kept)
    assert len({tensor.data_ptr() for _, tensor, _ in kept if tensor.numel()}) == sum(
        tensor.numel() > 0 for _, tensor, _ in kept
    ), "no two kept tensors share memory"


def test_one_kept_small_tensor_keeps_little_memory(tmp_path: Path) -> None:
    small = {f"t{i:04}": ("U8", (100_000,)) for i in range(640)}
    checkpoint = write_checkpoint(tmp_path, {"model.safetensors": small})
    process = psutil.Process()
    items = dict(ls.iter_weights(checkpoint.config(), "target", group="solo"))
    held = process.memory_info().rss
    assert all(tensor.untyped_storage().nbytes() == 100_000 for tensor in items.values()), "savers see exact storages"
    assert all(tensor._base is None for tensor in items.values()), "and no views of others"
    kept = items.pop("t0320")
    items.clear()
    freed = held - process.memory_info().rss
    assert freed > 640 * 100_000 - (4 << 20), f"one kept tensor kept {640 * 100_000 - freed} bytes of its neighbours'"
    assert_same(kept, checkpoint.tensor("t0320"))


async def test_unaligned_payload_is_delivered_aligned(checkpoint: Checkpoint) -> None:
    async with ls.LoaderService(checkpoint.config(), "solo") as service, service.open("target") as load:
        async for name, tensor in load:
            assert tensor.data_ptr() % tensor.element_size() == 0, name


async def test_small_neighbours_are_read_together(tmp_path: Path) -> None:
    small = {f"t{i:04}": ("U8", (1000,)) for i in range(900)}
    checkpoint = write_checkpoint(tmp_path, {"model.safetensors": small})
    storage = FakeStorage(LocalStorage())
    config = checkpoint.config()
    async with ls.LoaderService(config, "solo", storage=storage) as service, service.open("target") as load:
        assert len([name async for name, _ in load]) == 900
    header_end = (checkpoint.folder / "model.safetensors").stat().st_size - checkpoint.payload_bytes
    payload_reads = [read for read in storage.reads if read.offset >= header_end]
    assert len(payload_reads) == 1, "one read an arena"
    assert storage.opens(str(checkpoint.folder / "model.safetensors")) == 1, "one open from header to payload"


def test_blocking_face_gives_the_same(checkpoint: Checkpoint) -> None:
    config = checkpoint.config(staging={"capacity_bytes": 20_000})
    items = list(ls.iter_weights(config, "target", group="solo"))
    assert [name for name, _ in items] == list(checkpoint.tensors)
    for name, tensor in items:
        assert_same(tensor, checkpoint.tensor(name), name)


@pytest.mark.may_block
async def test_blocking_face_works_under_a_running_loop(checkpoint: Checkpoint) -> None:
    with ls.LoaderService.blocking(checkpoint.config(), "solo") as service:
        assert sum(1 for _ in service.iter_weights("target")) == len(checkpoint.tensors)
        assert service.plan("target").for_rank(0).payload_bytes == checkpoint.payload_bytes
