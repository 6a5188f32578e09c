"""One rank fails, by every door, in every phase and layout, in both faces: all ranks end, with one cause, and nothing
of the table is left; then all of them fill it."""

from __future__ import annotations

import asyncio
import gc
from functools import partial

import pytest

import loader_service as ls
from loader_service.agreement.messages import PHASES, Phase
from loader_service.config.schema import ServiceConfig
from loader_service.memory.allocators import _Pages
from loader_service.memory.pinning import FakePinner
from tests.e2e.seats import Seat, all_of, make_seats, values
from tests.support.checkpoints import Checkpoint
from tests.tables.doors import FACES, Door, Place, Result, Service, doors_of, leave_by, stands_before
from tests.tables.making import LAYOUTS, QUICK, WEIGHT, assert_table, config_of, left_behind, rules, shares

RANKS = 3
ROWS = shares("equal", RANKS)

pytestmark = [
    pytest.mark.usefixtures("no_leaked_tasks", "nothing_is_left_of_all"),
    pytest.mark.parametrize("who", [0, 2], ids=["leader", "member"]),
    pytest.mark.parametrize("layout", LAYOUTS),
    pytest.mark.parametrize("face", list(FACES)),
]


def config(checkpoint: Checkpoint, layout: str) -> ServiceConfig:
    return config_of(
        checkpoint,
        rules(layout),
        RANKS,
        reads={"access": "buffered", "chunk_bytes": 100, "retries": 0},  # more chunks than are queued at once
        staging={"pin": "required"},
        agreement={**QUICK, "timeout_s": 20},
        memory={"reserve_bytes": 0},
    )


def check(results: list[Result], who: int, door: Door, what: str) -> None:
    """`who` has raised its own error, the others a RankFailure that names it; all know the same."""
    texts = set()
    for rank, error in enumerate(results):
        assert isinstance(error, BaseException), (what, rank)
        if rank == who or door.cause is None:
            assert type(error) is door.own, (what, rank, error)
            if isinstance(error, ls.LoaderError):
                assert (error.rank, error.phase) == (rank, door.phase), what
            cancelled = error.__cause__ if door.then == "timeout" else error
            (note,) = getattr(cancelled, "__notes__", ["none"])
            texts.add(note.removeprefix("verdict of all ranks: "))
        else:
            assert isinstance(error, ls.RankFailure), (what, rank, error)
            assert (error.rank, error.phase) == (who, door.phase), what
            assert type(error.__cause__) is door.cause, (what, error.__cause__)
            texts.add(str(error))
    (text,) = texts
    first = 0 if door.cause is None else who
    assert text.startswith(f"rank {first} failed in phase {door.phase}: "), (what, text)
    assert door.says in text, (what, text)


def nothing_left() -> list[str]:
    """Of shared memory and sockets. A collection at most is between a failed call and that."""
    if left_behind():
        gc.collect()
    return left_behind()


def mappings() -> int:
    """How many pieces of host memory this process holds, of whatever kind."""
    return sum(issubclass(type(thing), _Pages) for thing in gc.get_objects())


async def test_a_rank_that_fails_by_each_door(checkpoint: Checkpoint, face: str, layout: str, who: int) -> None:
    """One service for each rank goes through all of them."""
    doors = doors_of(face, layout)
    results: dict[str, list[Result]] = {what: [] for what in doors}
    left: dict[str, list[str]] = {}
    in_step = asyncio.Barrier(RANKS)
    held = mappings()

    async def through(seat: Seat, service: Service, pinner: FakePinner, what: str) -> tuple[str, int, Result]:
        place = Place(seat, service, pinner, checkpoint, ROWS[who])
        leaving = leave_by(doors[what], FACES[face], place) if seat.rank == who else FACES[face].call(service)
        return what, seat.rank, await leaving

    async def work(seat: Seat) -> list[tuple[str, int, Result]]:
        pinner = FakePinner()
        service = await FACES[face].open(config(checkpoint, layout), seat, pinner)
        found = []
        try:
            for what in doors:
                found.append(await through(seat, service, pinner, what))
                await in_step.wait()
                left[what] = nothing_left()
                assert not pinner.locked, what
                await in_step.wait()
            table = await FACES[face].call(service)
            assert isinstance(table, ls.HostTable), table
            assert_table(table, checkpoint, WEIGHT, ROWS[seat.rank], layout)
        except BaseException:
            await in_step.abort()
            raise
        finally:
            await FACES[face].close(service)
        return found

    for found in values(await all_of(make_seats(RANKS), work)):
        for what, _, result in found:
            results[what].append(result)
    for what, door in doors.items():
        check(results[what], who, door, what)
    assert not any(left.values()), left
    if mappings() > held:
        gc.collect()
    assert mappings() <= held, "errors that somebody keeps do not keep memory"


async def test_a_service_that_closes_while_it_fills_a_table(
    checkpoint: Checkpoint, face: str, layout: str, who: int
) -> None:
    """In each phase, by another task or thread of that rank."""
    seats = make_seats(RANKS)
    results: dict[Phase, list[Result]] = {phase: [] for phase in PHASES}

    async def closes(seat: Seat, service: Service, phase: Phase) -> Result:
        place = Place(seat, service, FakePinner(), checkpoint, ROWS[who])
        with stands_before(phase, place) as stand:
            filling = asyncio.ensure_future(FACES[face].call(service))
            assert await asyncio.to_thread(stand.reached.wait, 30)
            await FACES[face].close(service)
        return await filling

    async def in_phase(seat: Seat, phase: Phase) -> tuple[Result]:  # wrapped: it is no failure of the test's own rank
        service = await FACES[face].open(config(checkpoint, layout), seat, FakePinner())
        if seat.rank == who:
            return (await closes(seat, service, phase),)
        try:
            return (await FACES[face].call(service),)
        finally:
            await FACES[face].close(service)

    for phase in PHASES:
        results[phase] = [result for (result,) in values(await all_of(seats, partial(in_phase, phase=phase)))]
        assert nothing_left() == [], phase
        door = Door(phase, partial(stands_before, phase), ls.StateError, ls.LoadCancelledError, "was closed")
        check(results[phase], who, door, f"closed in {phase}")
