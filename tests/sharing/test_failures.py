"""Failures of one rank while ranks share reads: all end with one cause, nothing is left, and they load again."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest

import loader_service as ls
from loader_service import node_sharing
from loader_service.agreement import node_mesh
from loader_service.agreement.messages import PHASES, Phase
from loader_service.agreement.node_mesh import Mesh
from loader_service.errors import FailureRecord
from loader_service.reading.faults import Gate
from loader_service.sharing.protocol import Action, Message, Staging
from loader_service.sharing.segment import Segment, obtain
from tests.conftest import _unfinished_threads
from tests.e2e.doors import (
    FORMS,
    Hold,
    Left,
    Oops,
    blocking_service,
    check_failed,
    destinations,
    in_thread,
    located,
    use,
    use_blocking,
)
from tests.e2e.forty import payload_of
from tests.e2e.seats import Seat, all_of, make_seats, values
from tests.sharing.failing import (
    FIRST,
    PATIENCE_S,
    SLOT_BYTES,
    WAYS,
    all_at_once,
    config_of,
    go_through,
    mappings,
    take_all,
    until,
    write,
)
from tests.support.checkpoints import Checkpoint

pytestmark = pytest.mark.usefixtures("no_leaked_tasks", "nothing_is_left", "nothing_is_left_of_all")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write(tmp_path_factory.mktemp("failures"))


# In a consumer's body -------------------------------------------------------------------------------------------------

BODIES = [(who, form, at) for (who, form), at in zip(product((0, 2), FORMS), (0, 1, 0, 7, 4, 0), strict=True)]


@pytest.mark.parametrize("way", WAYS)
async def test_an_error_in_one_ranks_body_is_that_of_all(checkpoint: Checkpoint, way: str) -> None:
    config = config_of(checkpoint, way)

    async def check(case: tuple[int, str, int]) -> None:
        who, form, at = case
        raised = Oops(at, wanted=form)

        def body(seat: Seat, taken: int) -> None:
            if seat.rank == who and taken == at:
                raise raised

        async def work(seat: Seat) -> tuple[Left, Left]:
            async with seat.service(config) as service:
                failed = await use(service, checkpoint, form, lambda taken: body(seat, taken))
                return failed, await use(service, checkpoint, form)

        results = values(await all_of(make_seats(3), work))
        record = located(FailureRecord("Oops", str(raised)), who)
        check_failed([failed for failed, _ in results], who, raised, record)
        assert all(again.complete for _, again in results), results

    await all_at_once(BODIES, check)


@pytest.mark.parametrize("way", WAYS)
async def test_an_interrupt_of_a_blocking_consumer_is_the_cause_of_all(checkpoint: Checkpoint, way: str) -> None:
    config = config_of(checkpoint, way)

    async def check(case: tuple[int, str, int]) -> None:
        who, form, at = case
        raised = KeyboardInterrupt() if form == "iterate" else SystemExit(3)

        def body(seat: Seat, taken: int) -> None:
            if seat.rank == who and taken == at:
                raise raised

        def work(seat: Seat) -> tuple[Left, Left]:
            with blocking_service(seat, config) as service:
                failed = use_blocking(service, checkpoint, form, lambda taken: body(seat, taken))
                return failed, use_blocking(service, checkpoint, form)

        results = values(await all_of(make_seats(3), in_thread(work)))
        text = f"interrupted by {type(raised).__name__}" + (" (3)" if form != "iterate" else "")
        record = located(FailureRecord("LoadCancelledError", text), who)
        check_failed([failed for failed, _ in results], who, raised, record)
        assert all(again.complete for _, again in results), results

    await all_at_once(BODIES, check)


# Cancellation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_a_rank_that_is_cancelled_in_any_phase(checkpoint: Checkpoint, way: str) -> None:
    """It is at work there while the other one waits for it, or waits for one that is."""
    config = config_of(checkpoint, way)

    async def check(case: tuple[Phase, bool]) -> None:
        phase, itself = case
        who = (phase.position + itself + WAYS.index(way)) % 2
        holding: dict[int, Hold] = {}
        entered = asyncio.Barrier(3)
        slow = who if itself else 1 - who

        async def work(seat: Seat) -> Left:
            async with seat.service(config) as service:
                holding[seat.rank] = Hold(service, phase, holds=seat.rank == slow)
                await entered.wait()
                told = holding[slow].release if seat.rank == who and not itself else None
                result = await use(service, checkpoint, told=told)
                assert (await use(service, checkpoint)).complete
                return result

        tasks = [asyncio.ensure_future(work(seat)) for seat in make_seats(2)]
        await entered.wait()
        for hold in holding.values():
            await until(hold.reached.is_set)
        tasks[who].cancel("enough")
        results = await asyncio.gather(*tasks)
        assert isinstance(results[who].error, asyncio.CancelledError)
        check_failed(results, who, None, FailureRecord("LoadCancelledError", "enough", who, phase))

    await all_at_once(list(product(PHASES, (True, False))), check)


@pytest.mark.parametrize("what", ["is cancelled", "gets no memory", "waits"])
async def test_ranks_that_wait_for_the_nodes_memory_are_not_left_waiting(
    checkpoint: Checkpoint, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0, which makes it, never hands it over: it is cancelled, it fails, or another rank is cancelled."""
    config = config_of(checkpoint, "staging")
    arrived = threading.Semaphore(0)
    refused = ls.MemoryLimitError("4 bytes of shared memory cannot be had")

    async def obtaining(mesh: Mesh, *rest: Any) -> Segment:
        arrived.release()
        if mesh.rank == 0 and what == "gets no memory":
            raise refused
        if mesh.rank == 0:
            await asyncio.Event().wait()
        return await obtain(mesh, *rest)

    async def work(seat: Seat) -> Left:
        async with seat.service(config) as service:
            return await use(service, checkpoint)

    monkeypatch.setattr(node_sharing, "obtain", obtaining)
    tasks = [asyncio.ensure_future(work(seat)) for seat in make_seats(3)]
    async with asyncio.timeout(PATIENCE_S):
        for _ in tasks:
            await until(lambda: arrived.acquire(blocking=False))
        who = 2 if what == "waits" else 0
        if what != "gets no memory":
            tasks[who].cancel("enough")
        results = await asyncio.gather(*tasks)
    error = FailureRecord("LoadCancelledError", "enough") if what != "gets no memory" else refused.record()
    check_failed(results, who, refused if what == "gets no memory" else None, located(error, who, "open"))


async def test_a_message_that_this_rank_breaks_at_is_its_failure(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = Staging.receive

    def broken(self: Staging, place: int, message: Message) -> list[Action]:
        if self.place == 1:
            raise ZeroDivisionError("broken")
        return receive(self, place, message)

    async def work(seat: Seat) -> Left:
        async with seat.service(config_of(checkpoint, "staging")) as service:
            return await use(service, checkpoint)

    monkeypatch.setattr(Staging, "receive", broken)
    monkeypatch.setattr(node_mesh._log.logger, "disabled", True)
    results = values(await all_of(make_seats(2), work))
    verdict = results[1].verdict
    assert verdict is not None
    assert (verdict.error, verdict.rank) == ("LoaderError", 1)
    assert verdict.message == "a message of rank 0 could not be handled: ZeroDivisionError: broken"
    assert type(results[1].error) is ls.LoaderError
    check_failed(results, 1, None, verdict)


async def test_where_the_system_gives_no_shared_memory_ranks_do_without_it(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = {}

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    async def work(seat: Seat) -> Left:
        async def body(load: ls.Load) -> None:
            reports[seat.rank] = load
            await take_all(load)

        async with seat.service(config_of(checkpoint, "staging")) as service:
            return await go_through(service, body)

    monkeypatch.setattr("loader_service.memory.shared.os.memfd_create", refuse)
    for result in values(await all_of(make_seats(2), work)):
        assert (result.error, result.complete) == (None, True)
    for load in reports.values():
        report = load.report
        assert report.policies["sharing"].effective == "none"
        (line,) = report.fallbacks
        assert line.startswith("sharing: none instead of staging: rank 0: ")
        assert "memfd_create" in line


# While reading --------------------------------------------------------------------------------------------------------

OWNERS: list[tuple[str, int, str, Callable[[], BaseException]]] = [
    ("takes", 0, "iterate", lambda: OSError(errno.EIO, "broken")),
    ("takes", 1, "batches", MemoryError),
    ("takes", 1, "into", lambda: OSError(errno.EACCES, "refused")),
    ("has not begun", 0, "batches", lambda: OSError(errno.EIO, "broken")),
    ("has not begun", 1, "iterate", SystemExit),
    ("never begins", 1, "iterate", lambda: OSError(errno.EIO, "broken")),
    ("is busy", 1, "iterate", lambda: OSError(errno.EIO, "broken")),
    ("is busy", 1, "batches", ZeroDivisionError),
    ("fails itself", 1, "iterate", lambda: OSError(errno.EIO, "broken")),
    ("has left", 1, "iterate", lambda: OSError(errno.ENXIO, "gone")),
    ("has left", 0, "batches", lambda: OSError(errno.EIO, "broken")),
]


class Owner:
    """A rank one of whose reads for its node fails at a certain time of its own consumer, which stands still until the
    verdict is there."""

    def __init__(self, consumer: str, form: str, gate: Gate) -> None:
        self.raised = Oops(5, wanted="what comes too late")
        self._consumer = consumer
        self._form = form
        self._gate = gate
        self._later: asyncio.Future[None] | None = None

    async def take_part(self, checkpoint: Checkpoint, load: ls.Load) -> None:
        if self._consumer == "takes":
            self._gate.release()
        if self._consumer in ("has not begun", "never begins"):
            await self._fail(load)
        if self._consumer == "has left":
            self._later = asyncio.ensure_future(self._fail_once_left(load))
        elif self._form == "into":
            await load.into(destinations(checkpoint))
        elif self._form == "batches":
            async for batch in load.batches():
                with batch:
                    await self._step(load)
        elif self._consumer != "never begins":
            async for _ in load:
                await self._step(load)

    async def _step(self, load: ls.Load) -> None:
        if not self._gate.go.is_set():
            await self._fail(load)
        if self._consumer == "fails itself":
            raise self.raised

    async def _fail(self, load: ls.Load) -> None:
        await until(self._gate.reached.is_set)
        self._gate.release()
        await until(lambda: load.failure is not None)

    async def _fail_once_left(self, load: ls.Load) -> None:
        await until(lambda: load._run._leaving)
        await self._fail(load)


async def test_a_read_for_the_node_that_fails_reaches_all_whatever_its_owners_consumer_does(
    checkpoint: Checkpoint,
) -> None:
    config = config_of(checkpoint, "staging", reads={"retries": 0})

    async def check(case: tuple[str, int, str, Callable[[], BaseException]]) -> None:
        consumer, who, form, error = case
        seats = make_seats(3)
        storage = seats[who].storage
        start = who * SLOT_BYTES if who else payload_of(checkpoint, FIRST)[0]  # in the first block that it reads
        owner = Owner(consumer, form, storage.block(f"*{FIRST}", within=(start, start + 1), times=None))
        storage.fail(f"*{FIRST}", error, within=(start, start + 1), times=None)

        async def work(seat: Seat) -> Left:
            async with seat.service(config) as service:
                if seat.rank == who:
                    found = await go_through(service, partial(owner.take_part, checkpoint))
                else:
                    found = await use(service, checkpoint, form)
                seat.storage.clear()
                assert (await use(service, checkpoint)).complete
                return found

        results = values(await all_of(seats, work))
        verdict, mine = results[who].verdict, results[who].error
        kind = "MemoryLimitError" if error is MemoryError else "ReadError"
        assert verdict is not None
        assert (verdict.error, verdict.rank, verdict.phase) == (kind, who, "read")
        assert verdict.path == str(checkpoint.folder / FIRST)
        if consumer != "fails itself":
            assert type(mine).__name__ == kind
            assert mine is not None
            assert type(mine.__cause__) is type(error())
        check_failed(results, who, owner.raised if consumer == "fails itself" else None, verdict)

    await all_at_once(OWNERS, check)


async def take_one(raised: Oops | None, load: ls.Load) -> None:
    async for batch in load.batches():
        with batch:
            break
    if raised is not None:
        raise raised


@pytest.mark.parametrize("way_out", ["the end", "a break", "an error"])
def test_the_memory_of_a_load_is_back_when_it_is_left_and_not_when_garbage_is_collected(
    checkpoint: Checkpoint, way_out: str
) -> None:
    """Although the loads are kept, as for their reports."""
    loads: list[ls.Load] = []

    async def work(seat: Seat) -> None:
        raised = Oops(0, wanted="all") if seat.rank == 1 and way_out == "an error" else None

        async def body(load: ls.Load) -> None:
            loads.append(load)
            await (take_all(load) if way_out == "the end" else take_one(raised, load))

        async with seat.service(config_of(checkpoint, "staging")) as service:
            result = await go_through(service, body)
        assert isinstance(result.error, ls.RankFailure | Oops) == (way_out == "an error")

    gc.collect()
    gc.disable()
    try:
        values(asyncio.run(all_of(make_seats(2), work)))
        _unfinished_threads(set())
        assert not mappings()
    finally:
        gc.enable()
    assert all(load.report.policies["sharing"].effective == "staging" for load in loads)
