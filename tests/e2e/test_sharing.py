"""Ranks of one node that share reads: every rank's bytes, every form, both ways; what is read, and by whom."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import loader_service as ls
from loader_service.config.schema import ServiceConfig
from loader_service.memory.pinning import FakePinner
from tests.e2e import parallel
from tests.e2e.seats import Seat, all_of, make_seats, payload_bytes_read, values
from tests.support.checkpoints import Checkpoint, assert_same, awkward_checkpoint

SMALL: dict[str, Any] = {"chunk_bytes": "64KiB"}
STAGING: dict[str, Any] = {"capacity_bytes": "512KiB"}
FORMS = ["owned", "batches", "into"]
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return awkward_checkpoint(tmp_path_factory.mktemp("large"))


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return parallel.write(tmp_path_factory.mktemp("cut"))


def config_of(
    checkpoint: Checkpoint, way: str, load: Mapping[str, object] | None = None, **sections: Any
) -> ServiceConfig:
    reads = {**SMALL, "sharing": way, **sections.pop("reads", {})}
    return checkpoint.config(load, reads=reads, **{"staging": STAGING, **sections})


async def take(load: ls.Load, form: str, wanted: Tensors) -> dict[str, torch.Tensor]:
    """What one rank gets, in memory of the test's own."""
    if form == "owned":
        return {name: tensor async for name, tensor in load}
    found = {name: torch.zeros_like(tensor).contiguous() for name, tensor in wanted.items()}
    if form == "into":
        await load.into(found)
        return found
    async for batch in load.batches():
        with batch, torch.no_grad():
            for piece in batch:
                found[piece.name][piece.index].copy_(piece.tensor)
    return found


async def load_all(
    config: ServiceConfig, seats: list[Seat], form: str, wanted: Sequence[Tensors]
) -> list[tuple[dict[str, torch.Tensor], ls.LoadReport]]:
    async def run(seat: Seat) -> tuple[dict[str, torch.Tensor], ls.LoadReport]:
        async with seat.service(config) as service, service.open("target") as load:
            found = await take(load, form, wanted[seat.rank])
        return found, load.report

    return values(await all_of(seats, run))


def check(found: Tensors, wanted: Tensors) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert_same(found[name], tensor, name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [2, 4])
async def test_what_all_want_is_read_once_for_the_node_by_turns(large: Checkpoint, form: str, ranks: int) -> None:
    seats = make_seats(ranks)
    wanted = {name: large.tensor(name) for name in large.tensors}
    results = await load_all(config_of(large, "staging"), seats, form, [wanted] * ranks)

    reports = [report for _, report in results]
    for found, report in results:
        check(found, wanted)
        assert report.policies["sharing"].effective == "staging"
        assert report.payload_bytes == large.payload_bytes
        assert report.read_bytes == 0
    assert sum(report.striped_bytes for report in reports) == large.payload_bytes
    assert sum(payload_bytes_read(seat.storage) for seat in seats) <= large.payload_bytes * 1.05
    assert all(report.striped_bytes > large.payload_bytes / ranks / 2 for report in reports)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["staging", "page_cache", "none"])
async def test_every_rank_gets_its_parts_whatever_is_shared(cut: Checkpoint, form: str, way: str) -> None:
    whole = {name: cut.tensor(name) for name in cut.tensors}
    wanted = []
    for coords in parallel.COORDS:
        every = {name: parallel.expected(name, tensor, coords["pp"], coords["tp"]) for name, tensor in whole.items()}
        wanted.append({name: part for name, part in every.items() if part is not None})
    config = config_of(cut, way, {"rules": parallel.RULES}, mesh=parallel.MESH)
    results = await load_all(config, make_seats(4), form, wanted)

    for (found, report), parts in zip(results, wanted, strict=True):
        check(found, parts)
        assert report.policies["sharing"].effective == way
        assert report.fallbacks == ()


async def test_one_slot_a_rank_is_enough(large: Checkpoint) -> None:
    wanted = {name: large.tensor(name) for name in large.tensors}
    config = config_of(large, "staging", staging={"capacity_bytes": "256KiB"})
    for found, report in await load_all(config, make_seats(3), "owned", [wanted] * 3):
        check(found, wanted)
        assert report.peak_staging_bytes <= 256 << 10


@pytest.mark.parametrize("form", ["owned", "batches"])
async def test_a_rank_that_leaves_early_reads_on_for_the_others(large: Checkpoint, form: str) -> None:
    seats = make_seats(3)
    wanted = {name: large.tensor(name) for name in large.tensors}

    async def run(seat: Seat) -> dict[str, torch.Tensor]:
        async with seat.service(config_of(large, "staging")) as service, service.open("target") as load:
            if seat.rank == 1:
                return {}
            if seat.rank == 2:
                async for _ in load:
                    break
                return {}
            return await take(load, form, wanted)

    results = values(await all_of(seats, run))
    check(results[0], wanted)


async def test_target_and_draft_of_one_service_share_one_after_the_other(large: Checkpoint) -> None:
    wanted = {name: large.tensor(name) for name in large.tensors}
    config = config_of(large, "staging")

    async def run(seat: Seat) -> list[list[str]]:
        names = []
        async with seat.service(config) as service:
            for _ in range(2):
                async with service.open("target") as load:
                    names.append(list(await take(load, "owned", wanted)))
        return names

    assert values(await all_of(make_seats(2), run)) == [[list(wanted)] * 2] * 2


@pytest.mark.parametrize("access", ["auto", "direct", "buffered"])
async def test_striping_reads_ahead_through_the_page_cache_whatever_the_access(large: Checkpoint, access: str) -> None:
    seats = make_seats(2)
    wanted = {name: large.tensor(name) for name in large.tensors}
    config = config_of(large, "page_cache", reads={"access": access})
    for found, report in await load_all(config, seats, "owned", [wanted] * 2):
        check(found, wanted)
        assert report.policies["sharing"].effective == "page_cache"
        assert report.policies["access"].requested == access
        assert report.policies["access"].effective == "buffered"
        assert "what ranks of a node share is read through the page cache, once" in report.policies["access"].reason
        assert report.read_bytes == large.payload_bytes


async def test_where_nothing_is_shared_the_access_does_not_say_that_it_is(large: Checkpoint) -> None:
    wanted = {name: large.tensor(name) for name in large.tensors}
    for _, report in await load_all(config_of(large, "none"), make_seats(2), "owned", [wanted] * 2):
        reason = report.policies["access"].reason
        assert reason.startswith("ranks of a node want the same bytes, so these are read through the page cache; ")
        assert "share" not in reason
        assert "once" not in reason


async def test_a_batch_that_is_kept_while_the_load_is_left_is_named(large: Checkpoint) -> None:
    async def run(seat: Seat) -> None:
        with contextlib.ExitStack() as kept:
            async with seat.service(config_of(large, "staging")) as service, service.open("target") as load:
                async for batch in load.batches():
                    if seat.rank == 1:
                        kept.enter_context(batch)
                        break
                    with batch:
                        pass

    results = await all_of(make_seats(2), run)
    assert isinstance(results[1], ls.StateError)
    assert "1 batches in use" in str(results[1])
    assert isinstance(results[0], ls.RankFailure)


def test_a_slot_is_no_larger_than_any_rank_of_the_node_can_give(large: Checkpoint, tmp_path: Path) -> None:
    wanted = {name: large.tensor(name) for name in large.tensors}
    configs = [config_of(large, "staging", staging={"capacity_bytes": capacity}) for capacity in ("512KiB", "2MiB")]

    async def run(seat: Seat) -> list[str]:
        async with seat.service(configs[seat.rank]) as service, service.open("target") as load:
            return list(await take(load, "batches", wanted))

    assert values(asyncio.run(all_of(make_seats(2), run))) == [list(wanted)] * 2


async def test_each_rank_pins_the_shared_memory_for_itself_and_lets_go_of_it(large: Checkpoint) -> None:
    pinners = [FakePinner(), FakePinner()]

    async def run(seat: Seat) -> ls.LoadReport:
        config, pinner = config_of(large, "staging"), pinners[seat.rank]
        async with ls.LoaderService(config, seat.group, pinner=pinner) as service, service.open("target") as load:
            async for batch in load.batches():
                with batch:
                    assert max(pinner.locked.values()) == 2 * 4 * 64 * 1024  # ranks, slots, bytes
        return load.report

    for report in values(await all_of(make_seats(2), run)):
        assert report.policies["pin"].effective == "pinned"
    gc.collect()
    assert [pinner.locked for pinner in pinners] == [{}, {}]
