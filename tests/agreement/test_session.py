"""Sessions on an event loop: ranks of one loop over each carrier (one suite for all), and one rank alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from loader_service import exits
from loader_service.agreement.carriers import Carrier
from loader_service.agreement.group import join_group
from loader_service.agreement.memory_carrier import MemoryBoard
from loader_service.agreement.messages import PHASES, Failure, Phase, PhaseRecord, Verdict
from loader_service.agreement.protocol import Limits
from loader_service.agreement.session import Session
from loader_service.agreement.store_carrier import StoreCarrier
from loader_service.agreement.store_clients import ClientPool, Meeting, Store
from loader_service.errors import (
    AgreementError,
    CheckpointError,
    FailureRecord,
    LoadCancelledError,
    RankFailure,
    ReadError,
    StateError,
)

SETTINGS = SimpleNamespace(timeout_s=60.0, start_timeout_s=600.0, grace_s=10.0)
LIMITS = Limits.of(SETTINGS)
SAME = PhaseRecord("same")
OPEN: list[Session] = []
MADE: list[Callable[[int, int, float], Carrier]] = []


@pytest.fixture(autouse=True, params=["memory", "store"])
async def carriers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """What makes the carrier of (rank, world size, heartbeat); closes what a test leaves open."""
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")  # a store's server asks for each peer's name
    MADE[:] = [memory_carriers() if request.param == "memory" else store_carriers()]
    yield
    await asyncio.gather(*(session.close() for session in OPEN))
    OPEN.clear()


def memory_carriers() -> Callable[[int, int, float], Carrier]:
    boards: dict[int, MemoryBoard] = {}

    def make(rank: int, world_size: int, heartbeat_s: float) -> Carrier:
        board = boards.setdefault(world_size, MemoryBoard(world_size, asyncio.get_running_loop()))
        return board.carrier(rank, heartbeat_s=heartbeat_s)

    return make


def store_carriers() -> Callable[[int, int, float], Carrier]:
    server: list[TCPStore] = []

    def connect() -> Store:
        if not server:
            server.append(TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False))
        return cast(Store, server[0])

    def make(rank: int, world_size: int, heartbeat_s: float) -> Carrier:
        connect()
        return StoreCarrier(
            meeting=Meeting(ClientPool(connect), "test", rank, keep=False),
            rank=rank,
            world_size=world_size,
            heartbeat_s=heartbeat_s,
            host_rank=None,
            where="in this process",
        )

    return make


def sessions(count: int, limits: Limits = LIMITS) -> list[Session]:
    made = [
        Session(
            "load",
            MADE[0](rank, count, limits.heartbeat_s),
            rank=rank,
            world_size=count,
            limits=limits,
            describe=dict.fromkeys(PHASES, lambda a, b, who: f"{a} is not {b}"),
        )
        for rank in range(count)
    ]
    OPEN.extend(made)
    return made


def solo() -> Session:
    session = join_group("solo", settings=SETTINGS).session("load")
    OPEN.append(session)
    return session


async def together(made: list[Session], phase: Phase) -> list[Verdict]:
    return await asyncio.gather(*(session.exchange(phase, SAME) for session in made))


MAKERS: list[Callable[[], list[Session]]] = [lambda: [solo()], lambda: sessions(2), lambda: sessions(4)]


@pytest.mark.parametrize("make", MAKERS, ids=["solo", "two", "four"])
async def test_all_phases_end_in_success(make: Callable[[], list[Session]]) -> None:
    made = make()
    for phase in PHASES:
        assert not any(session.succeeded for session in made)
        verdicts = await together(made, phase)
        assert {(verdict.phase, verdict.action) for verdict in verdicts} == {(phase, "go")}
    for session in made:
        assert session.succeeded
        assert session.final is None
        assert session.verdict_log == made[0].verdict_log
    await asyncio.gather(*(session.close() for session in made))


@pytest.mark.parametrize("make", MAKERS, ids=["solo", "two", "four"])
async def test_fail_returns_the_final_and_the_others_raise_its_cause(make: Callable[[], list[Session]]) -> None:
    made = make()
    await together(made, Phase.CONFIG)
    own = ReadError("EIO", path="/a", errno=5)
    others = [asyncio.ensure_future(session.exchange(Phase.CATALOG, SAME)) for session in made[:-1]]
    final = await made[-1].fail(own, Phase.CATALOG)
    assert final is not None
    assert final.final
    for session, other in zip(made, others, strict=False):
        with pytest.raises(RankFailure, match="EIO") as caught:
            await other
        assert (caught.value.rank, caught.value.phase) == (made[-1].rank, "catalog")
        assert (caught.value.path, caught.value.errno) == ("/a", 5)
        assert isinstance(caught.value.__cause__, ReadError)
        assert session.final == final
        with pytest.raises(RankFailure):
            await session.exchange(Phase.CATALOG, SAME)
    assert await made[-1].fail(ValueError("another"), Phase.CATALOG) == final, "only the first one counts"


async def test_a_retry_verdict_is_returned_and_the_phase_exchanged_again() -> None:
    made = sessions(2)
    await together(made, Phase.CONFIG)
    cause = CheckpointError("gone", rank=1).record()
    first = await asyncio.gather(
        made[0].exchange(Phase.CATALOG, SAME),
        made[1].exchange(Phase.CATALOG, PhaseRecord(outcome="retry", failure=cause)),
    )
    assert [verdict.action for verdict in first] == ["retry", "retry"]
    assert [verdict.action for verdict in await together(made, Phase.CATALOG)] == ["go", "go"]


async def test_a_disagreement_raises_on_every_rank() -> None:
    made = sessions(3)
    records = [PhaseRecord(f"{rank // 2}", body=partial("body {}".format, rank)) for rank in range(3)]
    results = await asyncio.gather(
        *(session.exchange(Phase.CONFIG, record) for session, record in zip(made, records, strict=True)),
        return_exceptions=True,
    )
    for result in results:
        assert isinstance(result, AgreementError)
        assert "ranks 0 and 2 differ in config: body 0 is not body 2" in str(result)


async def test_on_final_is_called_once_also_by_who_asks_late() -> None:
    made = sessions(2)
    seen: list[tuple[str, Verdict]] = []
    made[0].on_final(lambda verdict: seen.append(("early", verdict)))
    await together(made, Phase.CONFIG)
    await asyncio.gather(*(session.fail(ValueError("x"), Phase.CATALOG) for session in made))
    made[0].on_final(lambda verdict: seen.append(("late", verdict)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [who for who, _ in seen] == ["early", "late"]
    assert made[0].final is not None
    assert all(verdict == made[0].final for _, verdict in seen)


async def test_fail_works_in_a_cancelled_task_and_while_it_is_cancelled_again() -> None:
    made = sessions(2)
    await together(made, Phase.CONFIG)
    failing = asyncio.Event()

    async def load() -> None:
        try:
            await made[1].exchange(Phase.CATALOG, SAME)
        except asyncio.CancelledError as error:
            failing.set()
            await made[1].fail(error, Phase.CATALOG)
            raise

    task = asyncio.ensure_future(load())
    other = asyncio.ensure_future(made[0].exchange(Phase.CATALOG, replace(SAME, digest="never compared")))
    other.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await failing.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made[1].final is not None, "it waited for the FINAL before it gave in"
    assert made[1].final.failure is not None
    assert made[1].final.failure.kind == "cancelled"
    assert made[1].final.failure.record.error == LoadCancelledError.__name__


async def test_a_fail_wakes_the_leader_long_before_the_next_heartbeat() -> None:
    made = sessions(2, replace(LIMITS, heartbeat_s=40.0))
    for phase in PHASES[:4]:
        await together(made, phase)
    arrived = asyncio.Event()
    made[0].on_final(lambda verdict: arrived.set())
    async with asyncio.timeout(20):  # a watchdog: it takes the window, 0.75 s
        await made[1].fail(ReadError("EIO"), Phase.READ)
        await arrived.wait()


class LostStore:
    """A store whose connections are closed, except that one call comes back only when it is let."""

    def __init__(self) -> None:
        self.waiting = threading.Event()
        self.let = threading.Event()

    def clone(self) -> LostStore:
        return self

    def wait(self, *args: object) -> None:
        self.waiting.set()
        self.let.wait()
        raise ConnectionError("closed")

    def set(self, *args: object) -> None:
        self.waiting.wait()
        raise ConnectionError("closed")


def lost_session(store: LostStore, **limits: float) -> tuple[Session, StoreCarrier]:
    meeting = Meeting(ClientPool(lambda: cast(Store, store)), "test", 1, keep=False)
    meeting.session = lambda client, ticket: lambda in_session: in_session  # type: ignore[method-assign]
    carrier = StoreCarrier(meeting=meeting, rank=1, world_size=2, heartbeat_s=0.05, host_rank=0, where="nowhere")
    return Session("load", carrier, rank=1, world_size=2, limits=replace(LIMITS, **limits)), carrier


async def test_closing_waits_for_a_thread_that_is_still_in_a_lost_store() -> None:
    """It would come back into an interpreter that is being taken down, and abort the process."""
    store = LostStore()
    session, carrier = lost_session(store)
    with pytest.raises(RankFailure, match="lost the store"):
        await session.exchange(Phase.CONFIG, SAME)
    closing = asyncio.ensure_future(session.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    store.let.set()
    await closing
    assert carrier._threads == 0


async def test_closing_does_not_wait_for_threads_that_have_ended_or_never_will(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loader_service.agreement.session._STOP_WAIT_S", 0.2)
    stuck = LostStore()
    session, _ = lost_session(stuck)
    with pytest.raises(RankFailure, match="lost the store"):
        await session.exchange(Phase.CONFIG, SAME)
    async with asyncio.timeout(20):  # a watchdog
        await session.close()
    stuck.let.set()

    monkeypatch.setattr("loader_service.agreement.session._STOP_WAIT_S", 3600.0)
    store = LostStore()
    store.let.set()
    session, carrier = lost_session(store)
    with pytest.raises(RankFailure, match="lost the store"):
        await session.exchange(Phase.CONFIG, SAME)
    for thread in list(exits._running):
        await asyncio.to_thread(thread.join, 20)
    async with asyncio.timeout(20):
        await session.close()
    assert carrier._threads == 0


def test_the_end_of_the_process_waits_for_threads_on_their_way_out_and_not_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck, late = threading.Event(), threading.Event()
    threads = [threading.Thread(target=event.wait, daemon=True) for event in (stuck, late)]
    monkeypatch.setattr(exits, "_running", set(threads))
    for thread in threads:
        thread.start()
    threading.Timer(0.05, late.set).start()
    exits.let_threads_end()
    assert [thread.is_alive() for thread in threads] == [True, False]
    stuck.set()


async def test_the_verdict_stays_for_a_rank_that_was_found_dead_and_may_only_have_been_stopped() -> None:
    made = sessions(3, replace(LIMITS, grace_s=5.0))
    tidied: list[bool] = []
    stop = made[0]._carrier.stop

    def stopping(*, tidy: bool, stopped: Callable[[], None]) -> None:
        tidied.append(tidy)
        stop(tidy=tidy, stopped=stopped)

    made[0]._carrier.stop = stopping  # type: ignore[method-assign]
    await together(made, Phase.CONFIG)
    leader = made[0]._participant
    assert leader is not None
    assert leader.leader is not None
    leader.leader._failures[2] = Failure("died", FailureRecord("LostRank", "silent", 2))
    await asyncio.gather(*(session.fail(ReadError("x"), Phase.CATALOG) for session in made[:2]))
    await made[1].close()
    await made[0].close()
    assert tidied == [False]


@pytest.mark.parametrize("victim", [0, 2])
async def test_a_death_that_one_rank_saw_is_raised_by_all_others_at_once(victim: int) -> None:
    made = sessions(4)
    await together(made, Phase.CONFIG)
    living = [session for session in made if session.rank != victim]
    waiting = [asyncio.ensure_future(session.exchange(Phase.CATALOG, SAME)) for session in living]
    made[1].saw_die(victim)
    for other in waiting:
        with pytest.raises(RankFailure, match="its process has ended") as caught:
            await other
        assert (caught.value.rank, caught.value.phase) == (victim, "catalog")
    assert len({repr(session.final) for session in living}) == 1
    if victim != 0:  # the leader clears away behind a rank that is dead, which this one only is to the others
        await made[victim].close()


async def test_a_death_that_is_seen_after_success_or_after_leaving_is_nothing() -> None:
    made = sessions(2)
    for phase in PHASES:
        await together(made, phase)
    made[1].saw_die(0)
    made[0].saw_die(1)
    await asyncio.gather(*(session.close() for session in made))
    made[1].saw_die(0)
    assert all(session.succeeded and session.final is None for session in made)
    (never_begun,) = sessions(1)
    await never_begun.close()
    never_begun.saw_die(0)


async def test_order_is_enforced() -> None:
    session = solo()
    with pytest.raises(StateError, match="next is config"):
        await session.exchange(Phase.READ, SAME)
    for phase in PHASES:
        await session.exchange(phase, SAME)
    with pytest.raises(StateError, match="next is none"):
        await session.exchange(Phase.CONFIG, SAME)
    await session.close()
    await session.close()
    with pytest.raises(StateError, match="has ended"):
        await session.exchange(Phase.CONFIG, SAME)


async def test_a_record_that_is_too_large_is_this_ranks_own_error() -> None:
    made = sessions(2)
    with pytest.raises(AgreementError, match="rank 1: the record is"):
        await made[1].exchange(Phase.CONFIG, PhaseRecord("x" * (1 << 20)))
    other = asyncio.ensure_future(made[0].exchange(Phase.CONFIG, SAME))
    await made[1].fail(AgreementError("too large"), Phase.CONFIG)
    with pytest.raises(RankFailure, match="too large"):
        await other


async def test_closing_in_the_middle_fails_the_others() -> None:
    made = sessions(2)
    await together(made, Phase.CONFIG)
    other = asyncio.ensure_future(made[1].exchange(Phase.CATALOG, SAME))
    await asyncio.gather(made[0].close(), made[1].close())
    with pytest.raises(RankFailure, match="left in the middle"):
        await other


async def test_the_leader_leaves_after_the_byes_and_not_before() -> None:
    made = sessions(3)
    for phase in PHASES:
        await together(made, phase)
    leaving = asyncio.ensure_future(made[0].close())
    await made[1].close()
    await asyncio.sleep(0.05)
    assert not leaving.done(), "rank 2 may still read"
    await made[2].close()
    started_s = time.monotonic()
    await leaving
    assert time.monotonic() - started_s < LIMITS.grace_s / 2


async def test_the_leader_does_not_wait_longer_than_grace_for_a_bye() -> None:
    made = sessions(2, replace(LIMITS, grace_s=0.2))
    for phase in PHASES:
        await together(made, phase)
    async with asyncio.timeout(10):  # a watchdog; the member never says BYE
        await made[0].close()


async def test_progress_may_be_reported_from_any_thread_and_only_changes_count() -> None:
    session = solo()
    threads = [threading.Thread(target=session.report_progress, args=("same",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    session.report_progress(7)
    session.report_progress(7)
    assert session._progress == (2, "7")


def test_alone_neither_torch_nor_a_thread_is_needed() -> None:
    code = """
import asyncio, sys, threading
from types import ModuleType, SimpleNamespace
package = ModuleType("loader_service"); package.__path__ = [sys.argv[1]]; sys.modules["loader_service"] = package
from loader_service.agreement.group import join_group
from loader_service.agreement.messages import PHASES, PhaseRecord
async def main():
    group = join_group(None, settings=SimpleNamespace(timeout_s=60, start_timeout_s=600, grace_s=10), environ={})
    session = group.session("load")
    for phase in PHASES:
        await session.exchange(phase, PhaseRecord("d"))
    assert threading.active_count() == 1
    await session.close()
asyncio.run(main())
assert "torch" not in sys.modules
"""
    from loader_service import agreement

    folder = str(agreement.__path__[0]).removesuffix("/agreement")
    subprocess.run([sys.executable, "-W", "error", "-c", code, folder], check=True, timeout=60)
