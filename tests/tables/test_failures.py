"""What happens while a rank fails that fills a table: who hears of it when, which reads stop, who is given up."""

from __future__ import annotations

import asyncio
import errno
import threading

import pytest

import loader_service as ls
from loader_service.reading.chunked import Reading
from tests.e2e.seats import WATCHDOG_S, Seat, all_of, make_seats, values
from tests.support.checkpoints import Checkpoint
from tests.tables.making import (
    LAYOUTS,
    QUICK,
    WEIGHT,
    assert_table,
    config_of,
    place_of,
    rows_range,
    rules,
    service_of,
    shares,
)

BUFFERED = {"access": "buffered", "chunk_bytes": 200, "retries": 0}
Result = tuple[ls.HostTable | BaseException]  # what came out, wrapped: it is no failure of the test's own rank


async def fill(service: ls.LoaderService) -> Result:
    try:
        return (await service.host_table("target", WEIGHT),)
    except BaseException as error:
        return (error,)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_the_others_reads_stop_when_one_rank_fails(
    checkpoint: Checkpoint, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is queued is dropped, and what runs is waited for: nothing writes to memory that was given back."""
    seats = make_seats(2)
    ranges = [rows_range(checkpoint, WEIGHT, rows) for rows in shares("equal", 2)]
    path = place_of(checkpoint, WEIGHT)[0]
    gate = seats[0].storage.block(path, within=ranges[0])
    hold = seats[1].storage.block(path, within=ranges[1])
    seats[1].storage.fail(path, errno.EIO, within=ranges[1], times=None)
    settings = config_of(checkpoint, rules(layout), 2, reads={**BUFFERED, "threads": 1})
    dropped = threading.Event()
    drop = Reading.cancel

    def cancel(reading: Reading) -> None:
        drop(reading)
        if ranges[0][0] <= reading._where.start < ranges[0][1]:
            dropped.set()

    monkeypatch.setattr(Reading, "cancel", cancel)

    async def work(seat: Seat) -> Result:
        async with service_of(seat, settings) as service:
            filling = asyncio.ensure_future(fill(service))
            if seat.rank == 0:
                await asyncio.to_thread(dropped.wait, WATCHDOG_S)
                assert not filling.done(), "a read is still running"
                gate.release()
                return await filling
            await asyncio.to_thread(gate.reached.wait)
            hold.release()
            return await filling

    (first,), (second,) = values(await all_of(seats, work))
    assert isinstance(first, ls.RankFailure)
    assert isinstance(second, ls.ReadError)
    reads = [read for read in seats[0].storage.reads_of(path) if ranges[0][0] <= read.offset < ranges[0][1]]
    assert [read.nbytes for read in reads] == [200], "one chunk of nine"


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_the_others_hear_of_a_failure_before_the_failed_rank_has_cleaned_up(
    checkpoint: Checkpoint, layout: str
) -> None:
    """One of its reads fails while another does not come back."""
    seats = make_seats(2)
    start, stop = rows_range(checkpoint, WEIGHT, shares("equal", 2)[0])
    path = place_of(checkpoint, WEIGHT)[0]
    gate = seats[0].storage.block(path, within=(start, start + 1))
    seats[0].storage.fail(path, errno.EIO, within=(stop - 1, stop), times=None)
    patient = {**QUICK, "grace_s": 2 * WATCHDOG_S}  # so long it would wait for its own read
    settings = config_of(checkpoint, rules(layout), 2, reads={**BUFFERED, "threads": 2}, agreement=patient)
    told = asyncio.Event()

    async def work(seat: Seat) -> Result:
        async with service_of(seat, settings) as service:
            filling = asyncio.ensure_future(fill(service))
            if seat.rank == 1:
                await filling
                told.set()
            else:
                try:
                    async with asyncio.timeout(20):
                        await told.wait()
                    assert not filling.done(), "its own read has not come back"
                finally:
                    gate.release()
            return await filling

    (first,), (second,) = values(await all_of(seats, work))
    assert isinstance(first, ls.ReadError)
    assert isinstance(second, ls.RankFailure)
    assert second.rank == 0


async def test_a_read_that_never_returns_is_named_on_all_ranks_and_left_with_its_memory(checkpoint: Checkpoint) -> None:
    seats = make_seats(2)
    path = place_of(checkpoint, WEIGHT)[0]
    gate = seats[1].storage.block(path, within=rows_range(checkpoint, WEIGHT, shares("equal", 2)[1]))
    sections = {"reads": {**BUFFERED, "stuck_after_s": 2}, "agreement": {**QUICK, "grace_s": 2}}
    settings = config_of(checkpoint, rules("per_rank"), 2, **sections)

    async def work(seat: Seat) -> Result:
        async with service_of(seat, settings) as service:
            result = await fill(service)
            assert service._engine is not None
            assert len(service._engine.threads.stuck()) == seat.rank, "its thread is left behind"
            table = await service.host_table("target", WEIGHT)
            gate.release()
            assert_table(table, checkpoint, WEIGHT, shares("equal", 2)[seat.rank], "per_rank")
            return result

    (first,), (second,) = values(await all_of(seats, work))
    assert isinstance(second, ls.ReadError)
    assert "has not returned" in str(second)
    assert isinstance(first, ls.RankFailure)
    assert (first.rank, first.phase, first.path, first.tensor) == (1, "read", path, WEIGHT)
    assert type(first.__cause__) is ls.ReadError
