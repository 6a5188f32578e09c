"""How streamed bytes come off the disk: what is cached from the cache, the rest once, past it where that can be."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import loader_service as ls
from loader_service.config.schema import ServiceConfig
from loader_service.reading.fake import FakeStorage
from loader_service.reading.faults import Operation
from loader_service.reading.local import LocalStorage
from tests.e2e import parallel
from tests.reading.disk import MIB, PAGE, disk_bytes, disk_folder, forget, uncache, warm
from tests.support.checkpoints import Checkpoint, awkward_checkpoint, write_checkpoint

FORMS = ["owned", "batches", "into"]
ACCESSES = ["auto", "direct", "buffered"]
COLUMNS = {"rules": [{"match": "*.columns", "split": {"axis": "tp", "dim": 1}}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with disk_folder(tmp_path_factory.mktemp("access")) as folder:
        yield folder


@pytest.fixture(scope="module")
def large(folder: Path) -> Checkpoint:
    """Two shards of 4 MiB, each beginning anywhere in a block: tensors of 2.5 MiB, of 700 KiB, of 3 KiB and less."""
    files = {
        f"{file}.safetensors": {
            f"{file}.first": ("BF16", (7,)),
            f"{file}.big": ("BF16", (1280, 1024)),
            **{f"{file}.middle.{n}": ("F32", (175, 1024)) for n in range(2)},
            **{f"{file}.small.{n}": ("BF16", (3, 517)) for n in range(60)},
            f"{file}.odd": ("U8", (3,)),
        }
        for file in "ab"
    }
    return on_disk(write_checkpoint(folder / "large", files))


@pytest.fixture(scope="module")
def awkward(folder: Path) -> Checkpoint:
    """Tiny and empty tensors, scalars, F4, unaligned payload, tensors above the slot and above the budget."""
    return on_disk(awkward_checkpoint(folder / "awkward"))


@pytest.fixture(scope="module")
def cut(folder: Path) -> Checkpoint:
    """Tensors for every way to cut."""
    return on_disk(parallel.write(folder / "parallel"))


@pytest.fixture(scope="module")
def wide(folder: Path) -> Checkpoint:
    """A matrix of which columns are taken."""
    return on_disk(write_checkpoint(folder / "columns", {"m.safetensors": {"m.columns": ("BF16", (1024, 3000))}}))


def on_disk(checkpoint: Checkpoint) -> Checkpoint:
    """Written out, so that the page cache can forget it at once."""
    for path in shards(checkpoint):
        uncache(path)
    return checkpoint


def shards(checkpoint: Checkpoint) -> list[str]:
    return [str(path) for path in sorted(checkpoint.folder.iterdir())]


def size_of(path: str) -> int:
    return Path(path).stat().st_size


@dataclass(frozen=True)
class Loaded:
    tensors: dict[str, torch.Tensor]
    report: ls.LoadReport
    from_disk_bytes: int


async def load(
    config: ServiceConfig,
    form: str,
    wanted: dict[str, torch.Tensor],
    *,
    cached: float = 0.0,
    storage: FakeStorage | None = None,
    coords: dict[str, int] | None = None,
) -> Loaded:
    """One load after the headers were read and so much of each shard, in MiB from its beginning, was cached."""
    found = {name: torch.zeros_like(tensor).contiguous() for name, tensor in wanted.items()}
    async with ls.LoaderService(config, "solo", coords, storage=storage) as service:
        plan = await service.plan("target")
        for shard in plan.catalog.shards:
            forget(shard.path)
            size = shard.identity.size_bytes
            warm(shard.path, 0, size if cached == 1 else int(cached * size) // MIB * MIB)
        before = disk_bytes()
        async with service.open("target") as opened:
            if form == "owned":
                found = {name: tensor async for name, tensor in opened}
            elif form == "into":
                await opened.into(found)
            else:
                async for batch in opened.batches():
                    with batch, torch.no_grad():
                        for piece in batch:
                            found[piece.name][piece.index].copy_(piece.tensor)
        return Loaded(found, opened.report, disk_bytes() - before)


def assert_tensors(loaded: Loaded, wanted: dict[str, torch.Tensor]) -> None:
    assert list(loaded.tensors) == list(wanted)
    for name, tensor in loaded.tensors.items():
        assert (tensor.shape, tensor.dtype) == (wanted[name].shape, wanted[name].dtype), name
        assert torch.equal(raw(tensor), raw(wanted[name])), name


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def whole(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: checkpoint.tensor(name) for name in checkpoint.tensors}


@pytest.mark.parametrize("cached", [0, 0.25, 0.5, 1])
@pytest.mark.parametrize("access", ACCESSES)
@pytest.mark.parametrize("form", FORMS)
async def test_no_byte_comes_off_the_disk_twice_or_though_it_is_cached(
    large: Checkpoint, form: str, access: str, cached: float
) -> None:
    wanted = whole(large)
    config = large.config(reads={"access": access}, staging={"capacity_bytes": "8MiB"})
    loaded = await load(config, form, wanted, cached=cached)
    assert_tensors(loaded, wanted)
    sizes = [size_of(path) for path in shards(large)]
    there = 0 if access == "direct" else sum(size if cached == 1 else int(cached * size) // MIB * MIB for size in sizes)
    missing = sum(sizes) - there
    most = missing * 1.05
    assert missing * 0.99 - 2 * PAGE <= loaded.from_disk_bytes <= most
    assert loaded.report.read_bytes == loaded.report.payload_bytes == large.payload_bytes
    outcome = loaded.report.policies["access"]
    assert outcome.requested == access
    assert loaded.report.fallbacks == ()
    if access == "buffered" or (cached == 1 and access == "auto"):
        assert outcome.effective == "buffered"
    else:
        assert outcome.effective == ("mixed" if cached and access == "auto" else "direct")
        if form != "into":
            assert "copied over" not in outcome.reason, "whole blocks are read in place"


@pytest.mark.parametrize("access", ["auto", "direct"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("capacity", "chunk"), [(20_000, 5000), ("1GiB", "16MiB")])
async def test_awkward_tensors_come_out_whole(
    awkward: Checkpoint, form: str, access: str, capacity: int | str, chunk: int | str
) -> None:
    wanted = whole(awkward)
    config = awkward.config(reads={"access": access, "chunk_bytes": chunk}, staging={"capacity_bytes": capacity})
    storage = FakeStorage(LocalStorage())
    storage.align(512)
    loaded = await load(config, form, wanted, storage=storage)
    assert_tensors(loaded, wanted)
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in loaded.tensors.values())
    assert loaded.report.fallbacks == ()
    assert loaded.report.peak_staging_bytes <= config.staging.capacity_bytes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("coords", parallel.COORDS, ids=str)
async def test_every_way_to_cut_is_read_past_the_page_cache(cut: Checkpoint, coords: dict[str, int], form: str) -> None:
    parts = {name: parallel.expected(name, cut.tensor(name), coords["pp"], coords["tp"]) for name in cut.tensors}
    wanted = {name: part for name, part in parts.items() if part is not None}
    config = cut.config(
        {"rules": parallel.RULES},
        mesh=parallel.MESH,
        reads={"access": "direct", "chunk_bytes": 300},
        staging={"capacity_bytes": "64KiB"},
    )
    loaded = await load(config, form, wanted, coords=coords)
    assert_tensors(loaded, wanted)
    assert loaded.report.policies["access"].effective == "direct"


@pytest.mark.parametrize("form", FORMS)
async def test_column_slices_come_off_the_disk_once(wide: Checkpoint, form: str) -> None:
    wanted = {"m.columns": wide.tensor("m.columns")[:, 1500:2250]}
    config = wide.config(COLUMNS, mesh={"tp": 4}, staging={"capacity_bytes": "4MiB"})
    loaded = await load(config, form, wanted, coords={"tp": 2})
    assert_tensors(loaded, wanted)
    assert loaded.from_disk_bytes <= 1.05 * wide.payload_bytes
    assert loaded.report.policies["access"].effective == "direct"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("operation", "nth"),
    [
        pytest.param("open direct", 0, id="at opening"),
        pytest.param("read direct", 0, id="at the first read"),
        pytest.param("read direct", 3, id="at a later one"),
    ],
)
async def test_a_shard_that_refuses_is_read_through_the_cache_and_told_of(
    large: Checkpoint, form: str, operation: Operation, nth: int
) -> None:
    storage = FakeStorage(LocalStorage())
    path = shards(large)[1]
    storage.fail(path, errno.EINVAL, operation=operation, nth=nth, times=None)
    config = large.config(reads={"threads": 1, "chunk_bytes": "1MiB"})
    loaded = await load(config, form, whole(large), storage=storage)
    assert_tensors(loaded, whole(large))
    assert storage._faults[0].seen == nth + 1, "not asked again"
    assert loaded.report.fallbacks == (f"{path}: read through the page cache: EINVAL",)
    outcome = loaded.report.policies["access"]
    assert outcome.effective == "mixed"
    assert f"{path}: EINVAL" in outcome.reason
    assert loaded.from_disk_bytes <= 1.05 * large.payload_bytes


@pytest.mark.parametrize("form", FORMS)
async def test_short_reads_past_the_cache_are_gone_on_with(large: Checkpoint, form: str) -> None:
    storage = FakeStorage(LocalStorage())
    storage.shorten("*", 100 * PAGE + 77)
    loaded = await load(large.config(), form, whole(large), storage=storage)
    assert_tensors(loaded, whole(large))
    assert loaded.report.fallbacks == ()


@pytest.mark.parametrize("form", FORMS)
async def test_an_error_past_the_cache_is_tried_again_and_then_names_the_tensor(large: Checkpoint, form: str) -> None:
    storage = FakeStorage(LocalStorage())
    path = shards(large)[0]
    config = large.config(reads={"access": "direct", "retries": 1, "threads": 1})
    storage.fail(path, errno.EIO, operation="read direct", times=1)
    assert_tensors(await load(config, form, whole(large), storage=storage), whole(large))
    storage.fail(path, errno.EIO, operation="read direct", times=None)
    with pytest.raises(ls.ReadError) as caught:
        await load(config, form, whole(large), storage=storage)
    assert (caught.value.path, caught.value.errno) == (path, errno.EIO)
    assert (caught.value.tensor or "").startswith("a.")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("within", [PAGE // 2, PAGE])
async def test_a_shard_that_ends_early_is_told_of(large: Checkpoint, form: str, within: int) -> None:
    storage = FakeStorage(LocalStorage())
    path = shards(large)[1]
    ends_at = size_of(path) // PAGE * PAGE - 7 * PAGE + within
    async with ls.LoaderService(large.config(), "solo", storage=storage) as service:
        await service.plan("target")
        forget(path)
        storage.truncate(path, ends_at)
        with pytest.raises(ls.EndOfFileError, match=f"the file ends at byte {ends_at} ") as caught:
            async with service.open("target") as opened:
                if form == "into":
                    await opened.into({name: torch.empty_like(tensor) for name, tensor in whole(large).items()})
                elif form == "batches":
                    async for batch in opened.batches():
                        batch.release()
                else:
                    async for _ in opened:
                        pass
    assert caught.value.path == path
    assert caught.value.tensor is not None
