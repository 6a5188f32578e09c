"""Errors and cancellation by which a rank leaves a load, in both faces: what it raises, what the others raise."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from itertools import product

import pytest
import torch

import loader_service as ls
from loader_service.agreement.messages import PHASES, Phase
from loader_service.errors import FailureRecord
from tests.e2e import forty
from tests.e2e.doors import (
    AHEAD,
    FORMS,
    QUICK,
    Hold,
    Left,
    Oops,
    blocking_service,
    check_failed,
    in_thread,
    located,
    use,
    use_blocking,
)
from tests.e2e.forty import LAST, consume, fail_payload, payload_of
from tests.e2e.seats import Seat, all_of, make_seats, values
from tests.support.checkpoints import Checkpoint

pytestmark = pytest.mark.usefixtures("no_leaked_tasks", "nothing_is_left_of_all")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return forty.write(tmp_path_factory.mktemp("doors"))


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class Halved(ls.ReadError):
    """A subclass of the caller's that never calls the loader's own __init__."""

    def __init__(self, one: int, two: int) -> None:
        self.one, self.two = one, two


class Numbered(ls.CheckpointError):
    """A subclass of the caller's that does."""


DOORS: dict[str, tuple[Callable[[], BaseException], FailureRecord]] = {
    "own": (
        lambda: Oops(3, wanted="nothing"),
        FailureRecord("Oops", "layer 3 does not fit nothing"),
    ),
    "os error": (
        lambda: OSError(errno.ENOSPC, "full", "/mine"),
        FailureRecord("OSError", f"[Errno {errno.ENOSPC}] full: '/mine'", path="/mine", errno=errno.ENOSPC),
    ),
    "interrupt": (KeyboardInterrupt, FailureRecord("LoadCancelledError", "interrupted by KeyboardInterrupt")),
    "exit": (lambda: SystemExit(3), FailureRecord("LoadCancelledError", "interrupted by SystemExit (3)")),
    "cancelled": (
        asyncio.CancelledError,
        FailureRecord("LoadCancelledError", "the load was cancelled (CancelledError)"),
    ),
    "group": (
        lambda: ExceptionGroup("two tasks", [ValueError(1), KeyError(2)]),
        FailureRecord("ExceptionGroup", "two tasks (2 sub-exceptions)"),
    ),
    "loader's": (
        lambda: ls.EndOfFileError("short", path="/here", tensor="w"),
        FailureRecord("EndOfFileError", "short", path="/here", tensor="w"),
    ),
    "subclass": (lambda: Numbered("seven", errno=7), FailureRecord("Numbered", "seven", errno=7)),
    "half a subclass": (lambda: Halved(1, 2), FailureRecord("Halved", "Halved, which cannot be put into words")),
    "speechless": (Speechless, FailureRecord("Speechless", "Speechless, which cannot be put into words")),
    "no number": (lambda: OSError("E1", b"odd"), FailureRecord("OSError", "[Errno E1] b'odd'")),
    "no text": (lambda: ValueError("\udcff\0\N{SNOWMAN}"), FailureRecord("ValueError", "\udcff\0\N{SNOWMAN}")),
}


@pytest.mark.parametrize("blocking", [False, True], ids=["async", "blocking"])
@pytest.mark.parametrize("who", [0, 2], ids=["leader", "member"])
async def test_an_error_of_any_kind_in_one_ranks_body(checkpoint: Checkpoint, who: int, blocking: bool) -> None:
    """One service for each rank goes through all kinds, one load each, and loads at the end."""
    config = checkpoint.config(**QUICK)
    raised = {name: make() for name, (make, _) in DOORS.items()}

    def body(seat: Seat, door: str) -> Callable[[int], None]:
        def fail(taken: int) -> None:
            if seat.rank == who and taken == 5:
                raise raised[door]

        return fail

    def work(seat: Seat) -> list[Left]:
        with blocking_service(seat, config) as service:
            found = [use_blocking(service, checkpoint, body=body(seat, door)) for door in DOORS]
            return [*found, use_blocking(service, checkpoint)]

    async def awork(seat: Seat) -> list[Left]:
        async with seat.service(config) as service:
            found = [await use(service, checkpoint, body=body(seat, door)) for door in DOORS]
            return [*found, await use(service, checkpoint)]

    by_rank = values(await all_of(make_seats(3), in_thread(work) if blocking else awork))
    for number, (door, (_, record)) in enumerate(DOORS.items()):
        check_failed([found[number] for found in by_rank], who, raised[door], located(record, who))
    assert all(found[-1].error is None and found[-1].complete for found in by_rank)


@pytest.mark.parametrize("blocking", [False, True], ids=["async", "blocking"])
@pytest.mark.parametrize("form", FORMS)
async def test_an_error_in_every_form_of_consumption(checkpoint: Checkpoint, form: str, blocking: bool) -> None:
    """Also before anything was consumed, and inside `with batch`, whose memory comes back. A new service each time."""
    config = checkpoint.config(**QUICK)
    cases = list(product((0, 1), (0, 1)))  # who, after how many items
    raised = {case: Oops(case[1], wanted=form) for case in cases}

    def body(seat: Seat, case: tuple[int, int]) -> Callable[[int], None]:
        who, after = case

        def fail(taken: int) -> None:
            if seat.rank == who and (taken == after or form == "into"):
                raise raised[case]

        return fail

    def work(seat: Seat) -> list[Left]:
        found = []
        for case in cases:
            with blocking_service(seat, config) as service:
                found.append(use_blocking(service, checkpoint, form, body(seat, case)))
        with blocking_service(seat, config) as service:
            return [*found, use_blocking(service, checkpoint, form)]

    async def awork(seat: Seat) -> list[Left]:
        found = []
        for case in cases:
            async with seat.service(config) as service:
                found.append(await use(service, checkpoint, form, body(seat, case)))
        async with seat.service(config) as service:
            return [*found, await use(service, checkpoint, form)]

    by_rank = values(await all_of(make_seats(2), in_thread(work) if blocking else awork))
    for number, case in enumerate(cases):
        record = located(FailureRecord("Oops", str(raised[case])), case[0])
        check_failed([found[number] for found in by_rank], case[0], raised[case], record)
    assert all(found[-1].error is None and found[-1].complete for found in by_rank)


async def test_a_destination_that_cannot_be_written_fails_all(checkpoint: Checkpoint) -> None:
    """It passes every check, and refuses the copy, in a reading thread."""

    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.Tensor.copy_:
                raise RuntimeError("the device is gone")
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    async def work(seat: Seat) -> Left:
        async with seat.service(checkpoint.config(**QUICK)) as service:
            load, caught = service.open("target"), None
            try:
                async with load:
                    wide = torch.zeros((50, 82), dtype=torch.bfloat16)
                    wide = wide.as_subclass(Refusing) if seat.rank == 1 else wide
                    await load.into({"s2.w07": wide[:, ::2]})
            except ls.LoaderError as error:
                caught = error
            assert (await use(service, checkpoint)).complete
            return Left(caught, load.failure.record() if load.failure else None, False, 0)

    other, own = values(await all_of(make_seats(2), work))
    assert isinstance(own.error, ls.ReadError)
    assert isinstance(own.error.__cause__, RuntimeError)
    path = str(checkpoint.folder / LAST)
    record = FailureRecord("ReadError", str(own.error), 1, "read", path, "s2.w07", None)
    assert "the device is gone" in record.message
    assert own.verdict == other.verdict == record
    assert isinstance(other.error, ls.RankFailure)
    assert type(other.error.__cause__) is ls.ReadError


@pytest.mark.parametrize("blocking", [False, True], ids=["async", "blocking"])
async def test_an_error_of_the_load_that_the_body_swallows_fails_all_nevertheless(
    checkpoint: Checkpoint, blocking: bool
) -> None:
    seats = make_seats(2)
    fail_payload(seats[1].storage, checkpoint, errno.EIO)
    swallowed: list[ls.ReadError] = []

    async def awork(seat: Seat) -> None:
        async with seat.service(checkpoint.config(**QUICK)) as service, service.open("target") as load:
            try:
                async for _ in load:
                    pass
            except ls.ReadError as error:
                swallowed.append(error)

    def work(seat: Seat) -> None:
        with blocking_service(seat, checkpoint.config(**QUICK)) as service, service.open("target") as load:
            try:
                for _ in load:
                    pass
            except ls.ReadError as error:
                swallowed.append(error)

    other, own = await all_of(seats, in_thread(work) if blocking else awork)
    assert [own] == swallowed
    assert isinstance(other, ls.RankFailure)
    assert (other.rank, other.errno) == (1, errno.EIO)


# Cancellation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", ["itself", "another"])
@pytest.mark.parametrize("who", [0, 1], ids=["leader", "member"])
async def test_a_rank_that_is_cancelled_in_any_phase(checkpoint: Checkpoint, who: int, held: str) -> None:
    """It is at work there while the other one waits for it, or waits for one that is (and goes on when all is told).

    All phases at once, each with a service for each rank, which then loads.
    """
    config = checkpoint.config(**QUICK)

    async def in_phase(phase: Phase) -> None:
        seats = make_seats(2)
        holding: dict[int, Hold] = {}
        entered = asyncio.Barrier(3)
        slow = who if held == "itself" else 1 - who

        async def work(seat: Seat) -> Left:
            async with seat.service(config) as service:
                holding[seat.rank] = Hold(service, phase, holds=seat.rank == slow)
                await entered.wait()
                told = holding[slow].release if seat.rank == who and slow != who else None
                result = await use(service, checkpoint, told=told)
                again = await use(service, checkpoint)
                assert again.error is None, again
                return result

        tasks = [asyncio.ensure_future(work(seat)) for seat in seats]
        await entered.wait()
        for hold in holding.values():
            assert await asyncio.to_thread(hold.reached.wait, 30)
        tasks[who].cancel("enough")
        results = await asyncio.gather(*tasks)
        assert isinstance(results[who].error, asyncio.CancelledError)
        record = FailureRecord("LoadCancelledError", "enough", who, phase)
        check_failed(results, who, None, record)

    async with asyncio.timeout(60):
        await asyncio.gather(*map(in_phase, PHASES))


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "member"])
async def test_a_rank_whose_time_is_up(checkpoint: Checkpoint, who: int) -> None:
    """asyncio.timeout around the load, with a read in flight that comes back only when the other rank knows."""
    seats = make_seats(2)
    gate = seats[who].storage.block(f"*{LAST}", within=payload_of(checkpoint, LAST))

    async def work(seat: Seat) -> Left:
        async with seat.service(checkpoint.config(**QUICK)) as service:
            if seat.rank != who:
                return await use(service, checkpoint, told=gate.release)
            load, taken = service.open("target"), 0
            try:
                async with asyncio.timeout(None) as limit, load:
                    async for _ in load:
                        taken += 1
                        if taken == AHEAD and await asyncio.to_thread(gate.reached.wait, 30):
                            limit.reschedule(0)
            except TimeoutError as error:
                return Left(error, load.failure.record() if load.failure else None, False, 0)
            raise AssertionError

    results = values(await all_of(seats, work))
    assert isinstance(results[who].error, TimeoutError)
    assert isinstance(results[1 - who].error, ls.RankFailure)
    record = FailureRecord("LoadCancelledError", "the load was cancelled (CancelledError)", who, "read")
    assert [result.verdict for result in results] == [record, record]


@pytest.mark.parametrize("times", [1, 2, 3, 6])
async def test_an_impatient_caller_leaves_nothing_behind(checkpoint: Checkpoint, times: int) -> None:
    """Cancelled again and again with a read in flight: all is told and cleaned up, if need be without the caller."""
    seats = make_seats(2)
    gate = seats[1].storage.block(f"*{LAST}", within=payload_of(checkpoint, LAST))
    services: list[ls.LoaderService] = []
    told = asyncio.Event()

    async def work(seat: Seat) -> Left:
        async with seat.service(checkpoint.config(**QUICK)) as service:
            services.append(service)
            return await use(service, checkpoint, told=told.set if seat.rank == 0 else None)

    tasks = [asyncio.ensure_future(work(seat)) for seat in seats]
    async with asyncio.timeout(60):
        assert await asyncio.to_thread(gate.reached.wait, 30)
        loops = [service._loop for service in services]
        for _ in range(times):
            tasks[1].cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await told.wait()
        gate.release()
        other, _ = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(other, Left)
        assert isinstance(other.error, ls.RankFailure)
        assert (other.error.rank, other.error.phase) == (1, "read")
        assert isinstance(other.error.__cause__, ls.LoadCancelledError)
        for loop in loops:
            assert loop is not None
            await asyncio.wrap_future(loop._ended)
        assert seats[1].storage.in_flight == 0

        async def again(seat: Seat) -> ls.LoadReport:
            async with seat.service(checkpoint.config(**QUICK)) as service:
                return await consume(service, checkpoint)

        assert all(report.complete for report in values(await all_of(seats, again)))


# Root cause before its consequences -----------------------------------------------------------------------------------


async def test_a_cancellation_that_another_ranks_error_has_caused_is_not_the_cause(checkpoint: Checkpoint) -> None:
    """Rank 0 is cancelled and says so first; the error of rank 3, which was behind it, comes after: 3 is named."""
    told = threading.Event()
    behind = Oops(7, wanted="rank 3")

    async def work(seat: Seat) -> Left:
        async with seat.service(checkpoint.config(**QUICK)) as service:

            def body(taken: int) -> None:
                if seat.rank == 0 and taken == 3:
                    session = service._engine.open_load._session  # type: ignore[union-attr]
                    fail = session.fail

                    async def telling(error: BaseException, phase: Phase) -> object:
                        loop = asyncio.get_running_loop()
                        loop.call_later(0.1, told.set)  # rank 0's has surely come in by then
                        return await fail(error, phase)

                    session.fail = telling
                    raise asyncio.CancelledError("a collective of the caller's has failed")

            if seat.rank != 3:
                return await use(service, checkpoint, body=body)
            load, caught = service.open("target"), None
            try:
                async with load:
                    await asyncio.to_thread(told.wait, 30)
                    raise behind
            except Oops as error:
                caught = error
            return Left(caught, load.failure.record() if load.failure else None, False, 0)

    results = values(await all_of(make_seats(4), work))
    record = FailureRecord("Oops", str(behind), 3, "read")
    assert [result.verdict for result in results] == [record] * 4
    assert results[3].error is behind
    assert isinstance(results[0].error, asyncio.CancelledError)
    note = f"verdict of all ranks: rank 3 failed in phase read: Oops: {behind}"
    assert results[0].notes == results[3].notes == [note]
    for result in results[1:3]:
        assert isinstance(result.error, ls.RankFailure)
        assert result.error.rank == 3
