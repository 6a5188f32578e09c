"""The raw weight cache in whole loads: what one load leaves, the next ones get without a file being opened."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import loader_service as ls
from loader_service.config.schema import ServiceConfig
from loader_service.memory.process_cache import clear_weight_cache, weight_cache
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from tests.e2e.seats import Seat, all_of, make_seats, values
from tests.e2e.test_sharing import FORMS, STAGING, check, take
from tests.support.checkpoints import Checkpoint, write_checkpoint

MIB = 1 << 20
DRAFT = ("mtp.0.",)


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    clear_weight_cache()
    yield
    clear_weight_cache()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Large and small tensors; the draft's lie in one of three shards."""
    body = {f"layers.{i}.w": ("BF16", (600, 1000)) for i in range(3)} | {
        f"layers.{i}.n": ("F32", (37,)) for i in range(9)
    }
    draft = {
        "mtp.0.w": ("BF16", (700, 1000)),
        "mtp.0.n": ("F32", (5,)),
        "mtp.0.odd": ("U8", (3,)),
        "mtp.0.unaligned": ("F32", (300, 1000)),
        "tail": ("F32", (9,)),
    }
    return write_checkpoint(
        tmp_path / "checkpoint", {"a.safetensors": body, "b.safetensors": draft, "c.safetensors": body_of("z")}
    )


def body_of(prefix: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {f"{prefix}.{i}": ("F32", (100, 20)) for i in range(4)}


def config_of(checkpoint: Checkpoint, *, capacity: object = "64MiB", **sections: Any) -> ServiceConfig:
    loads = {"target": {}, "draft": {"key_prefixes": list(DRAFT)}}
    sections = {"reads": {"chunk_bytes": "256KiB"}, "staging": {"capacity_bytes": "2MiB"}, **sections}
    return ls.config_from_dict(
        {
            "checkpoint": {"path": str(checkpoint.folder)},
            "loads": loads,
            "cache": {"capacity_bytes": capacity},
            **sections,
        }
    )


def wanted_of(checkpoint: Checkpoint, load: str) -> Mapping[str, torch.Tensor]:
    names = [name for name in checkpoint.tensors if load == "target" or name.startswith(DRAFT)]
    return {name: checkpoint.tensor(name) for name in names}


async def run(config: ServiceConfig, checkpoint: Checkpoint, load: str, form: str) -> tuple[ls.LoadReport, FakeStorage]:
    storage = FakeStorage(LocalStorage())
    wanted = wanted_of(checkpoint, load)
    async with ls.LoaderService(config, "solo", storage=storage) as service, service.open(load) as opened:
        found = await take(opened, form, wanted)
    check(found, wanted)
    return opened.report, storage


@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("first", FORMS)
async def test_a_draft_is_served_from_what_its_target_left_without_opening_a_file(
    checkpoint: Checkpoint, first: str, second: str
) -> None:
    config = config_of(checkpoint)
    target, _ = await run(config, checkpoint, "target", first)
    assert target.read_bytes >= target.payload_bytes
    entries = weight_cache().statistics().entries
    draft, storage = await run(config, checkpoint, "draft", second)

    assert storage.opens() == 0
    assert (draft.read_bytes, draft.files_opened, draft.files_read) == (0, 0, ())
    assert draft.policies["cache"].effective == "on"
    assert weight_cache().statistics().entries == entries
    assert weight_cache().statistics().reserved_bytes == 0


async def test_tensors_of_the_cache_are_shared(checkpoint: Checkpoint) -> None:
    config = config_of(checkpoint)
    pointers = []
    for _ in range(2):
        async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
            kept = {name: tensor async for name, tensor in load}
        aligned = [
            tensor for name, tensor in kept.items() if name not in ("mtp.0.odd", "mtp.0.unaligned", "tail")
        ]  # the others are copies
        pointers.append([tensor.data_ptr() for tensor in aligned])
        names = list(kept)
    assert names
    assert pointers[0] == pointers[1]


async def test_a_change_in_place_is_found_and_the_range_read_anew(checkpoint: Checkpoint) -> None:
    config = config_of(checkpoint)
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        async for name, tensor in load:
            if name == "mtp.0.w":
                tensor.view(torch.uint8)[0, 0] += 1
    draft, storage = await run(config, checkpoint, "draft", "owned")

    assert draft.files_read == ("b.safetensors",)
    assert 0 < draft.read_bytes < draft.payload_bytes * 1.01
    assert storage.opens("*b.safetensors") >= 1
    assert weight_cache().statistics().changed == 1
    again, storage = await run(config, checkpoint, "draft", "owned")
    assert (again.read_bytes, storage.opens()) == (0, 0)


async def test_a_file_that_was_replaced_is_read_anew(checkpoint: Checkpoint) -> None:
    config = config_of(checkpoint)
    await run(config, checkpoint, "target", "owned")
    path = checkpoint.folder / "b.safetensors"
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    draft, _ = await run(config, checkpoint, "draft", "owned")
    assert draft.files_read == ("b.safetensors",)


@pytest.mark.parametrize("anew", [True, False], ids=["another file", "in place"])
async def test_a_file_that_looks_as_before_but_for_the_time_of_its_change_is_read_anew(
    checkpoint: Checkpoint, anew: bool
) -> None:
    """The same size, a restored modification time, often the same inode: as archives and `rsync -t` leave them."""
    config = config_of(checkpoint)
    path = checkpoint.folder / "b.safetensors"
    os.utime(path, ns=(10**18, 10**18))
    async with ls.LoaderService(config, "solo") as service, service.open("draft") as load:
        before = {name: tensor.clone() async for name, tensor in load}
    content = path.read_bytes()
    if anew:
        path.unlink()
    path.write_bytes(content[:-400_000] + bytes(255 - byte for byte in content[-400_000:]))
    os.utime(path, ns=(10**18, 10**18))
    async with ls.LoaderService(config, "solo") as service, service.open("draft") as load:
        after = {name: tensor async for name, tensor in load}
    assert load.report.read_bytes > 0
    assert not torch.equal(raw(before["mtp.0.unaligned"]), raw(after["mtp.0.unaligned"]))


async def collect(load: ls.Load) -> list[str]:
    return [name async for name, _ in load]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


@pytest.mark.parametrize("form", ["batches", "into"])
async def test_what_leaves_nothing_drives_nothing_out(checkpoint: Checkpoint, tmp_path: Path, form: str) -> None:
    """What these forms take from memory that the node shares is not kept."""
    other = write_checkpoint(tmp_path / "other", {"x.safetensors": {"x": ("F32", (MIB,))}})
    capacity = max(checkpoint.payload_bytes, other.payload_bytes) + MIB
    await run(config_of(checkpoint, capacity=capacity), checkpoint, "target", "owned")
    held_bytes = weight_cache().statistics().held_bytes
    reads = {"chunk_bytes": "64KiB", "sharing": "staging"}
    config = other.config(reads=reads, staging=STAGING, cache={"capacity_bytes": capacity})
    wanted = {"x": other.tensor("x")}

    async def work(seat: Seat) -> ls.LoadReport:
        async with seat.service(config) as service, service.open("target") as load:
            check(await take(load, form, wanted), wanted)
        return load.report

    for report in values(await all_of(make_seats(2), work)):
        assert report.policies["sharing"].effective == "staging"
        assert report.policies["cache"].effective == "reuse only"
        assert "is not kept" in report.policies["cache"].reason
    statistics = weight_cache().statistics()
    assert (statistics.held_bytes, statistics.evictions, statistics.reserved_bytes) == (held_bytes, 0, 0)


async def test_what_was_used_last_long_ago_goes_before_the_new_load_is_read(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", {"x.safetensors": {"x": ("F32", (MIB,))}})
    capacity = checkpoint.payload_bytes + MIB
    await run(config_of(checkpoint, capacity=capacity), checkpoint, "target", "owned")
    config = other.config(cache={"capacity_bytes": capacity})
    storage = FakeStorage(LocalStorage())
    async with ls.LoaderService(config, "solo", storage=storage) as service, service.open("target") as load:
        gate = storage.block("*x.safetensors")
        taking = asyncio.ensure_future(collect(load))
        await asyncio.to_thread(gate.reached.wait)
        assert weight_cache().statistics().held_bytes <= capacity - 4 * MIB, "before anything is read"
        gate.release()
        assert await taking == ["x"]
    assert weight_cache().statistics().held_bytes <= capacity


async def test_a_load_larger_than_the_cache_leaves_it_as_it_is_and_is_warned_of_once(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    await run(config_of(checkpoint), checkpoint, "draft", "owned")
    before = weight_cache().statistics()
    assert not caplog.records
    target, _ = await run(config_of(checkpoint, capacity="3MiB"), checkpoint, "target", "owned")
    assert target.policies["cache"].effective == "reuse only"
    assert weight_cache().statistics().held_bytes == before.held_bytes
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("load 'target' leaves nothing in the raw weight cache: ")
    assert "cache.capacity_bytes, 3.00 MiB; it takes " in said
    enough = int(said.split("it takes ")[1].split()[0])
    clear_weight_cache()
    fits, _ = await run(config_of(checkpoint, capacity=enough), checkpoint, "target", "owned")
    assert fits.policies["cache"].effective == "on"
    clear_weight_cache()
    lacks, _ = await run(config_of(checkpoint, capacity=enough - 1), checkpoint, "target", "owned")
    assert lacks.policies["cache"].effective == "reuse only"


async def test_it_is_off_unless_asked_for(checkpoint: Checkpoint) -> None:
    report, _ = await run(config_of(checkpoint, capacity=0), checkpoint, "target", "owned")
    assert "cache" not in report.policies
    assert weight_cache().statistics().entries == 0


@pytest.mark.parametrize("way", ["none", "page_cache", "staging"])
async def test_a_rank_that_finds_all_and_one_that_finds_nothing_go_through_the_same_phases(
    checkpoint: Checkpoint, way: str
) -> None:
    """In one process ranks share the cache, so the second is given a copy of the files, which nothing is held of."""
    wanted = wanted_of(checkpoint, "target")
    config = config_of(checkpoint, reads={"chunk_bytes": "64KiB", "sharing": way}, staging=STAGING)

    async def work(seat: Seat) -> ls.LoadReport:
        async with seat.service(config) as service, service.open("target") as load:
            check(await take(load, "owned", wanted), wanted)
        return load.report

    first = values(await all_of(make_seats(2), work))
    assert sum(report.read_bytes + report.striped_bytes for report in first) > 0
    second = values(await all_of(make_seats(2), work))
    for report in second:
        assert report.read_bytes + report.striped_bytes == 0
        assert report.files_opened == 0
        assert report.payload_bytes == checkpoint.payload_bytes


def test_it_also_works_without_a_running_loop(checkpoint: Checkpoint) -> None:
    config = config_of(checkpoint)
    asyncio.run(run(config, checkpoint, "target", "owned"))
    with ls.LoaderService.blocking(config, "solo") as service:
        check(dict(service.iter_weights("draft")), wanted_of(checkpoint, "draft"))
