"""A rank that fails, or is cancelled, while a table is filled: all leave with one cause, and the next table works."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

import pytest

import loader_service as ls
from loader_service.agreement.messages import PHASES, Phase
from loader_service.agreement.node import NodeGroup
from loader_service.config.schema import ServiceConfig
from loader_service.reading.fake import FakeStorage
from tests.e2e.doors import Hold
from tests.e2e.seats import WATCHDOG_S, Seat, all_of, make_seats, values
from tests.support.checkpoints import Checkpoint
from tests.tables.making import (
    LAYOUTS,
    QUICK,
    WEIGHT,
    assert_table,
    config_of,
    left_behind,
    place_of,
    rows_range,
    rules,
    service_of,
    shares,
)

RANKS = 3
BUFFERED = {"access": "buffered", "chunk_bytes": 200, "retries": 0}
Result = tuple[ls.HostTable | BaseException]  # what came out, wrapped: it is no failure of the test's own rank


def config(checkpoint: Checkpoint, layout: str, **sections: object) -> ServiceConfig:
    return config_of(checkpoint, rules(layout), RANKS, **{"reads": BUFFERED, **sections})


async def fill(service: ls.LoaderService) -> Result:
    try:
        return (await service.host_table("target", WEIGHT),)
    except BaseException as error:
        return (error,)


def check(results: list[Result], who: int, phase: Phase, cause: type[BaseException], own: type[BaseException]) -> None:
    """`who` has raised its own error, the others a RankFailure that names it; all know the same."""
    texts = set()
    for rank, (result,) in enumerate(results):
        if rank == who:
            assert type(result) is own, result
            assert isinstance(result, BaseException)
            (note,) = result.__notes__
            texts.add(note.removeprefix("verdict of all ranks: "))
        else:
            assert isinstance(result, ls.RankFailure), result
            assert (result.rank, result.phase, type(result.__cause__)) == (who, phase, cause)
            texts.add(str(result))
    assert len(texts) == 1


# -- cancelled


@pytest.mark.parametrize("who", [0, 2], ids=["host", "member"])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_rank_that_is_cancelled_in_each_phase(checkpoint: Checkpoint, layout: str, who: int) -> None:
    seats = make_seats(RANKS)

    async def work(seat: Seat) -> list[tuple[Result, list[str]]]:
        found = []
        for phase in PHASES:
            async with service_of(seat, config(checkpoint, layout)) as service:
                hold = Hold(service, phase) if seat.rank == who else None
                filling = asyncio.ensure_future(fill(service))
                if hold is not None:
                    await asyncio.to_thread(hold.reached.wait)
                    filling.cancel()
                found.append((await filling, left_behind()))
                assert_table(await service.host_table("target", WEIGHT), checkpoint, WEIGHT, own[seat.rank], layout)
        return found

    own = shares("equal", RANKS)
    by_rank = values(await all_of(seats, work))
    for number, phase in enumerate(PHASES):
        results = [found[number][0] for found in by_rank]
        check(results, who, phase, ls.LoadCancelledError, asyncio.CancelledError)


STOPS = [(Phase.PLAN, "meeting"), (Phase.OPEN, "the segment"), (Phase.OPEN, "reserving")]


@pytest.mark.parametrize("who", [0, 2], ids=["host", "member"])
async def test_a_rank_that_fails_where_the_memory_is_shared(checkpoint: Checkpoint, who: int) -> None:
    """While the others wait for it at their sockets."""
    own = shares("equal", RANKS)
    for phase, where in STOPS:
        seats = make_seats(RANKS)
        breaks = [True]

        async def work(seat: Seat, breaks: list[bool] = breaks, where: str = where) -> Result:
            async with service_of(seat, config(checkpoint, "shared")) as service:
                if seat.rank == who:
                    fail_at(service, where, breaks)
                result = await fill(service)
                breaks[0] = False
                assert_table(await service.host_table("target", WEIGHT), checkpoint, WEIGHT, own[seat.rank], "shared")
            return result

        check(values(await all_of(seats, work)), who, phase, ls.LoaderError, OSError)


def fail_at(service: ls.LoaderService, where: str, breaks: list[bool]) -> None:
    """This rank's thread for blocking work fails at one kind of it, once."""
    assert service._engine is not None
    engine = service._engine
    in_thread = engine.in_thread
    whats = {"meeting": "meeting the other", "the segment": "allocating shared", "reserving": "reserving shared"}

    async def failing(work: Callable[[], object], *, what: str, **options: object) -> object:
        def fail() -> object:
            raise OSError(errno.ENOMEM, f"no {where}")

        fails = breaks[0] and what.startswith(whats[where])
        return await in_thread(fail if fails else work, what=what, **options)  # type: ignore[arg-type]

    engine.in_thread = failing  # type: ignore[method-assign, assignment]


# -- reads that fail


def read_error(storage: FakeStorage, path: str, rows: tuple[int, int]) -> None:
    storage.fail(path, errno.EIO, within=rows, times=None)


def early_end(storage: FakeStorage, path: str, rows: tuple[int, int]) -> None:
    storage.truncate(path, rows[0] + 3)


def another_file(storage: FakeStorage, path: str, rows: tuple[int, int]) -> None:
    storage.replace(path, inode=1, operations=("identify",))


FAULTS = {
    "read error": (read_error, ls.ReadError),
    "early end": (early_end, ls.EndOfFileError),
    "changed file": (another_file, ls.CheckpointError),
}


@pytest.mark.parametrize("who", [0, 2], ids=["host", "member"])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_rank_whose_reads_fail(checkpoint: Checkpoint, layout: str, who: int) -> None:
    own = shares("equal", RANKS)
    path = place_of(checkpoint, WEIGHT)[0]
    for name, (fault, cause) in FAULTS.items():
        seats = make_seats(RANKS)

        async def work(seat: Seat, fault: Callable[..., None] = fault) -> Result:
            async with service_of(seat, config(checkpoint, layout)) as service:
                if seat.rank == who:
                    await service.plan("target")
                    fault(seat.storage, path, rows_range(checkpoint, WEIGHT, own[who]))
                result = await fill(service)
                seat.storage.clear()
                assert_table(await service.host_table("target", WEIGHT), checkpoint, WEIGHT, own[seat.rank], layout)
            return result

        results = values(await all_of(seats, work))
        check(results, who, Phase.READ, cause, cause)
        (failed,) = results[who]
        assert isinstance(failed, ls.LoaderError), name
        assert (failed.path, failed.exit_code) == (path, {"changed file": 3}.get(name, 5))


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_the_others_reads_stop_when_one_rank_fails(checkpoint: Checkpoint, layout: str) -> None:
    """What is queued is dropped, and what runs is waited for: nothing writes to memory that was given back."""
    seats = make_seats(2)
    ranges = [rows_range(checkpoint, WEIGHT, rows) for rows in shares("equal", 2)]
    path = place_of(checkpoint, WEIGHT)[0]
    gate = seats[0].storage.block(path, within=ranges[0])
    hold = seats[1].storage.block(path, within=ranges[1])
    seats[1].storage.fail(path, errno.EIO, within=ranges[1], times=None)
    settings = config_of(checkpoint, rules(layout), 2, reads={**BUFFERED, "threads": 1})
    told = asyncio.Event()

    async def work(seat: Seat) -> Result:
        async with service_of(seat, settings) as service:
            filling = asyncio.ensure_future(fill(service))
            if seat.rank == 0:
                await told.wait()
                assert not filling.done(), "a read is still running"
                gate.release()
                return await filling
            await asyncio.to_thread(gate.reached.wait)
            hold.release()
            await filling
            told.set()
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


async def test_a_host_that_lets_go_without_a_word_is_given_up(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank waits for ever for memory that nobody hands over, even if no verdict ever names the host."""

    def hang_up(group: NodeGroup, _descriptor: int, _ranks: object) -> None:
        group.close()

    monkeypatch.setattr(NodeGroup, "hand_over", hang_up)
    seats = make_seats(2)
    quick = {"timeout_s": 2, "start_timeout_s": 30, "grace_s": 5}
    settings = config_of(checkpoint, rules("shared"), 2, agreement=quick)

    async def work(seat: Seat) -> Result:
        async with service_of(seat, settings) as service:
            return await fill(service)

    (first,), (second,) = values(await all_of(seats, work))
    assert type(second) is ls.LoaderError
    assert "rank 0 has left before it handed over the memory" in str(second)
    assert isinstance(first, ls.RankFailure)
    assert first.rank == 1
