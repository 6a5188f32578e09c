"""`host_table` as it is called: between loads and within one, in what order, with what memory, and what it refuses."""

from __future__ import annotations

import asyncio
import gc
import re
from typing import Any

import pytest
import torch

import loader_service as ls
from loader_service.memory.admission import Room
from loader_service.memory.pinning import FakePinner
from tests.e2e.seats import Seat, all_of, errors, make_seats, payload_reads, values
from tests.support.checkpoints import Checkpoint
from tests.tables.making import (
    DEEP,
    EMPTY,
    LAYOUTS,
    ROWS,
    SCALE,
    TABLES,
    WEIGHT,
    assert_table,
    config_of,
    place_of,
    rules,
    service_of,
    shares,
)

BUFFERED = {"access": "buffered"}
GIB = 1 << 30


# -- order


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_tables_before_within_and_after_a_load(checkpoint: Checkpoint, layout: str) -> None:
    seats = make_seats(2)

    async def work(seat: Seat) -> None:
        own = shares("equal", 2)[seat.rank]
        async with service_of(seat, config_of(checkpoint, rules(layout), 2)) as service:
            before = await service.host_table("target", WEIGHT)
            async with service.open("target") as load:
                within, taken = [], 0
                async for name, value in load:
                    taken += 1
                    if isinstance(value, ls.RowSource):
                        within.append((name, await service.host_table("target", name)))
                assert taken == len(checkpoint.tensors)
            after = await service.host_table("target", WEIGHT)
            for name, table in [(WEIGHT, before), *within, (WEIGHT, after)]:
                assert_table(table, checkpoint, name, own if name != EMPTY else (0, 0), layout)
            assert [name for name, _ in within] == [WEIGHT, SCALE, EMPTY, DEEP]

    values(await all_of(seats, work))


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_several_tables_asked_for_at_once_and_a_load_beside_them(checkpoint: Checkpoint, layout: str) -> None:
    """Each waits for its turn, in the order of the calls, which is the same on all ranks."""
    seats = make_seats(3)

    async def work(seat: Seat) -> None:
        async with service_of(seat, config_of(checkpoint, rules(layout), 3)) as service:

            async def load() -> int:
                return len([name async for name, _ in service.iter_weights("target")])

            asked = [service.host_table("target", name) for name in (SCALE, WEIGHT)]
            found = await asyncio.gather(*asked, load(), service.host_table("target", DEEP))
            own = shares("equal", 3)[seat.rank]
            for name, table in zip((SCALE, WEIGHT, DEEP), (found[0], found[1], found[3]), strict=True):
                assert isinstance(table, ls.HostTable)
                assert_table(table, checkpoint, name, own, layout)
            assert found[2] == len(checkpoint.tensors)

    values(await all_of(seats, work))


async def test_the_blocking_face(checkpoint: Checkpoint) -> None:
    (seat,) = make_seats(1)

    def work() -> ls.HostTable:
        config = config_of(checkpoint, rules("shared"), 1)
        with ls.LoaderService.blocking(config, seat.group, storage=seat.storage) as service:
            return service.host_table("target", SCALE)

    assert_table(await asyncio.to_thread(work), checkpoint, SCALE, (0, ROWS), "shared")


async def test_a_service_that_closes_ends_a_table_that_is_being_filled(checkpoint: Checkpoint) -> None:
    (seat,) = make_seats(1)
    gate = seat.storage.block("*.safetensors", within=place_of(checkpoint, WEIGHT)[1:])
    async with service_of(seat, config_of(checkpoint, rules("shared"), 1, reads=BUFFERED)) as service:
        filling = asyncio.ensure_future(service.host_table("target", WEIGHT))
        await asyncio.to_thread(gate.reached.wait)
        asyncio.get_running_loop().call_later(0.2, gate.release)
    with pytest.raises(ls.StateError, match="the service was closed before"):
        await filling


# -- ranks that differ, names that are no tables


async def test_ranks_that_ask_for_different_tables_are_told_both_names(checkpoint: Checkpoint) -> None:
    seats = make_seats(2)

    async def work(seat: Seat) -> None:
        async with service_of(seat, config_of(checkpoint, rules("shared"), 2)) as service:
            await service.host_table("target", (WEIGHT, SCALE)[seat.rank])

    for error in errors(await all_of(seats, work)):
        assert type(error) is ls.AgreementError
        assert f'table is "{WEIGHT}" on rank 0 and "{SCALE}" on rank 1' in str(error)
        assert "ranks 0 and 1 differ in config" in str(error)


async def test_a_rank_that_opens_the_load_instead_is_told(checkpoint: Checkpoint) -> None:
    seats = make_seats(2)

    async def work(seat: Seat) -> None:
        async with service_of(seat, config_of(checkpoint, rules("shared"), 2)) as service:
            if seat.rank == 0:
                await service.host_table("target", WEIGHT)
            else:
                async with service.open("target"):
                    pass

    for error in errors(await all_of(seats, work)):
        assert type(error) is ls.AgreementError
        assert f'table is "{WEIGHT}" on rank 0 and not set on rank 1' in str(error)


async def test_ranks_with_different_layouts_are_told_both(checkpoint: Checkpoint) -> None:
    seats = make_seats(2)

    async def work(seat: Seat) -> None:
        async with service_of(seat, config_of(checkpoint, rules(LAYOUTS[seat.rank]), 2)) as service:
            await service.host_table("target", WEIGHT)

    for error in errors(await all_of(seats, work)):
        assert type(error) is ls.AgreementError
        assert 'host_resident.layout is "per_rank" on rank 0 and "shared" on rank 1' in str(error)


@pytest.mark.parametrize("name", ["a.first", "nowhere", ""])
async def test_a_name_that_is_no_table_is_refused_on_all_ranks(checkpoint: Checkpoint, name: str) -> None:
    seats = make_seats(3)

    async def work(seat: Seat) -> None:
        async with service_of(seat, config_of(checkpoint, rules("shared"), 3)) as service:
            with pytest.raises(ls.ConfigError, match=f"'{name}' is no host-resident table") as caught:
                await service.host_table("target", name)
            assert (caught.value.tensor, caught.value.rank) == (name, seat.rank)
            await service.host_table("target", SCALE)

    values(await all_of(seats, work))


async def test_a_load_that_is_none(checkpoint: Checkpoint) -> None:
    seats = make_seats(2)

    async def work(seat: Seat) -> None:
        async with service_of(seat, config_of(checkpoint, rules("shared"), 2)) as service:
            await service.host_table("other", WEIGHT)

    for error in errors(await all_of(seats, work)):
        assert "other" in str(error)
        assert ls.ConfigError in (type(error), type(error.__cause__))


# -- what one gets


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_table_outlives_its_service_and_ends_with_its_tensor(checkpoint: Checkpoint, layout: str) -> None:
    seats = make_seats(2)
    pinners = [FakePinner(), FakePinner()]

    async def work(seat: Seat) -> ls.HostTable:
        config = config_of(checkpoint, rules(layout), 2)
        async with service_of(seat, config, pinners[seat.rank]) as service:
            return await service.host_table("target", WEIGHT)

    tables = values(await all_of(seats, work))
    own_bytes = [18 * 96, 19 * 96] if layout == "per_rank" else [ROWS * 96] * 2
    for rank, table in enumerate(tables):
        assert_table(table, checkpoint, WEIGHT, shares("equal", 2)[rank], layout)
        assert (table.pinned, table.pin.effective) == (True, "pinned")
        ((address, nbytes),) = pinners[rank].locked.items()
        assert address <= table.tensor.data_ptr() < table.tensor.data_ptr() + own_bytes[rank] <= address + nbytes
    views = [table.tensor[1:] for table in tables]
    del tables, table
    await asyncio.sleep(0)  # the loop forgets what the ranks' tasks returned
    gc.collect()
    assert all(pinner.locked for pinner in pinners), "a view keeps it"
    del views
    gc.collect()
    assert not any(pinner.locked for pinner in pinners)


@pytest.mark.parametrize(
    ("pin", "pinner", "pinned", "reason"),
    [
        ("never", FakePinner(), False, "the configuration says never"),
        ("auto", FakePinner(reason="no device"), False, "no device"),
        ("auto", FakePinner(refuse_from=0), False, "was refused"),
        ("required", FakePinner(), True, ""),
    ],
)
async def test_pinning(checkpoint: Checkpoint, pin: str, pinner: FakePinner, pinned: bool, reason: str) -> None:
    (seat,) = make_seats(1)
    for layout in LAYOUTS:
        config = config_of(checkpoint, rules(layout), 1, staging={"pin": pin})
        async with service_of(seat, config, pinner) as service:
            table = await service.host_table("target", WEIGHT)
        assert table.pinned == pinned
        assert (table.pin.requested, table.pin.effective) == (pin, "pinned" if pinned else "pageable")
        assert reason in table.pin.reason
        assert_table(table, checkpoint, WEIGHT, (0, ROWS), layout)


async def test_a_rank_without_rows_has_nothing_to_pin(checkpoint: Checkpoint) -> None:
    """CUDA refuses to lock no bytes at all, which is no failure of what is required."""

    class Strict(FakePinner):
        def register(self, address: int, nbytes: int) -> None:
            if nbytes == 0:
                raise ls.MemoryLimitError("invalid argument")
            super().register(address, nbytes)

    seats = make_seats(3)
    load = {
        "rules": [{"match": "engram.*", "host_resident": {"layout": "per_rank"}, "assign": {"axis": "tp", "to": [1]}}]
    }
    config = config_of(checkpoint, load, 3, staging={"pin": "required"})

    async def work(seat: Seat) -> list[ls.HostTable]:
        async with service_of(seat, config, Strict()) as service:
            return [await service.host_table("target", name) for name in (WEIGHT, EMPTY)]

    for tables in values(await all_of(seats, work)):
        assert [(table.pinned, table.pin.effective) for table in tables] == [(True, "pinned")] * 2


# -- the page cache and the way of reading


async def dropped(checkpoint: Checkpoint, load: dict[str, Any], ranks: int, **sections: Any) -> list[int]:
    """How many bytes of WEIGHT each rank asked the system to forget."""
    seats = make_seats(ranks)
    for seat in seats:
        seat.storage.cache("*.safetensors", lambda *_: 0)
    config = config_of(checkpoint, load, **{"ranks": ranks, **sections})

    async def work(seat: Seat) -> None:
        async with service_of(seat, config) as service:
            await service.host_table("target", WEIGHT)

    values(await all_of(seats, work))
    path, start, stop = place_of(checkpoint, WEIGHT)
    for seat in seats:
        assert all(
            start <= offset and offset + nbytes <= stop for at, offset, nbytes in seat.storage.drops if at == path
        )
    return [sum(nbytes for at, _, nbytes in seat.storage.drops if at == path) for seat in seats]


async def test_the_page_cache_is_dropped_where_no_other_rank_needs_it(checkpoint: Checkpoint) -> None:
    assert await dropped(checkpoint, rules("per_rank"), 2, reads=BUFFERED) == [18 * 96, 19 * 96]
    assert await dropped(checkpoint, rules("shared"), 2, reads=BUFFERED) == [0, 0]
    assert await dropped(checkpoint, rules("per_rank"), 2, reads={**BUFFERED, "drop_page_cache": "never"}) == [0, 0]
    always = {**BUFFERED, "drop_page_cache": "always"}
    assert await dropped(checkpoint, rules("per_rank"), 2, reads=always) == [18 * 96, 19 * 96]
    assert await dropped(checkpoint, rules("shared"), 2, reads=always) == [0, 0]


async def test_rows_that_replicas_read_too_stay_in_the_page_cache(checkpoint: Checkpoint) -> None:
    mesh = {"replica": 2, "tp": 1}
    assert await dropped(checkpoint, rules("per_rank"), 2, mesh=mesh, reads=BUFFERED) == [0, 0]
    whole = {"rules": [{"match": "engram.*", "host_resident": {"layout": "per_rank"}}]}
    assert await dropped(checkpoint, whole, 2, reads=BUFFERED) == [0, 0]
    one = {
        "rules": [{"match": "engram.*", "host_resident": {"layout": "per_rank"}, "assign": {"axis": "tp", "to": [0]}}]
    }
    assert await dropped(checkpoint, one, 2, reads=BUFFERED) == [ROWS * 96, 0]


async def test_sources_of_a_load_drop_by_the_same_rule(checkpoint: Checkpoint) -> None:
    for layout, mesh, expected in (
        ("per_rank", {"tp": 2}, [18 * 96, 19 * 96]),
        ("shared", {"tp": 2}, [0, 0]),
        ("per_rank", {"replica": 2, "tp": 1}, [0, 0]),
    ):
        seats = make_seats(2)
        config = config_of(checkpoint, rules(layout), 2, mesh=mesh, reads=BUFFERED)

        async def work(seat: Seat, config: Any = config) -> int:
            async with service_of(seat, config) as service, service.open("target") as load:
                source = load.tables[WEIGHT]
                start, stop = source.rows
                await source.aread_rows_into(torch.empty((stop - start, 96), dtype=source.dtype), start)
                return sum(nbytes for _, _, nbytes in seat.storage.drops)

        assert values(await all_of(seats, work)) == expected


async def test_the_way_of_reading_is_told(checkpoint: Checkpoint) -> None:
    """What the page cache does not hold is read past it, straight into memory that is congruent with the file."""
    for layout in LAYOUTS:
        for access in ("auto", "buffered"):
            seats = make_seats(2)
            for seat in seats:
                seat.storage.cache("*.safetensors", lambda *_: 0)

            async def work(seat: Seat, layout: str = layout, access: str = access) -> ls.HostTable:
                config = config_of(checkpoint, rules(layout), 2, reads={"access": access})
                async with service_of(seat, config) as service:
                    return await service.host_table("target", WEIGHT)

            for seat, table in zip(seats, values(await all_of(seats, work)), strict=True):
                assert_table(table, checkpoint, WEIGHT, shares("equal", 2)[seat.rank], layout)
                assert table.access.requested == access
                copied = int((re.search(r"\((\d+) copied over\)", table.access.reason) or ["", "0"])[1])
                assert copied < 2 * 4096
                reads = [read for read in payload_reads(seat.storage) if read.direct]
                refused = "safetensors: E" in table.access.reason  # a file system that knows no direct reads
                assert bool(reads) == (access != "buffered" and not refused), table.access


# -- memory


def room(free: int, place: str = "", limit: int = 100 * GIB) -> Room:
    return Room(place, limit, free)


def has_rooms(service: ls.LoaderService, *rooms: Room) -> None:
    assert service._engine is not None
    service._engine.memory_rooms = lambda: rooms


async def refused(checkpoint: Checkpoint, layout: str, rooms: list[list[Room]], **sections: Any) -> list[str]:
    """What each rank is told, the same on all of them; nothing was read or allocated."""
    seats = make_seats(len(rooms))
    config = config_of(checkpoint, rules(layout), **{"ranks": len(rooms), **sections})

    async def work(seat: Seat) -> str:
        async with service_of(seat, config) as service:
            has_rooms(service, *rooms[seat.rank])
            with pytest.raises(ls.MemoryLimitError) as caught:
                await service.host_table("target", WEIGHT)
            assert (caught.value.tensor, caught.value.exit_code) == (WEIGHT, 6)
            has_rooms(service, room(90 * GIB))
            assert not payload_reads(seat.storage)
            await service.host_table("target", WEIGHT)
            return str(caught.value)

    return values(await all_of(seats, work))


async def test_memory_that_is_not_there_is_refused_on_all_ranks_together_with_figures(checkpoint: Checkpoint) -> None:
    free = 10 * GIB + 3000  # a tenth of the limit stays free: 3000 bytes are left, and two ranks want 3552
    for layout in LAYOUTS:
        told = await refused(checkpoint, layout, [[room(90 * GIB)], [room(free)]])
        assert len(set(told)) == 1
        assert f"host table '{WEIGHT}': 2 ranks (lowest: 0) want 3552 bytes of host memory" in told[0]
        assert "the machine has 10.00 GiB free of 100.00 GiB, of which 10.00 GiB are to stay so" in told[0]


async def test_the_tightest_cgroup_decides(checkpoint: Checkpoint) -> None:
    rooms = [room(90 * GIB), room(1700, "/sys/fs/cgroup/a", 2000)]
    told = await refused(checkpoint, "per_rank", [rooms, [room(90 * GIB)]])
    assert "rank 0 wants 1728 bytes of host memory, but cgroup /sys/fs/cgroup/a has 1700 bytes free of 2000" in told[0]


async def test_the_reserve_can_be_configured(checkpoint: Checkpoint) -> None:
    rooms = [[room(4000)], [room(4000)]]
    told = await refused(checkpoint, "per_rank", rooms, memory={"reserve_bytes": 1000})
    assert "of which 1000 bytes are to stay so" in told[0]
    seats = make_seats(2)

    async def work(seat: Seat) -> None:
        config = config_of(checkpoint, rules("per_rank"), 2, memory={"reserve_bytes": 448})
        async with service_of(seat, config) as service:
            has_rooms(service, room(4000))
            await service.host_table("target", WEIGHT)

    values(await all_of(seats, work))


async def test_a_shared_segment_that_cannot_be_had_is_an_error_before_anything_is_read(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the memory went to somebody else after all had agreed."""
    monkeypatch.setattr("loader_service.memory.shared.memory_rooms", lambda: (room(1000),))
    seats = make_seats(2)

    async def work(seat: Seat) -> None:
        async with service_of(seat, config_of(checkpoint, rules("shared"), 2)) as service:
            await service.host_table("target", WEIGHT)

    found = errors(await all_of(seats, work))
    assert {type(error) for error in found} <= {ls.MemoryLimitError, ls.RankFailure}
    assert any("of shared memory cannot be had" in str(error) for error in found)
    assert not any(payload_reads(seat.storage) for seat in seats)
    assert len(TABLES) == 4
