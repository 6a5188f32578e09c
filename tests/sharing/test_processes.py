"""Ranks as real processes that share reads, one of which is killed or stopped: what the others see, what is left."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import loader_service as ls
from loader_service import neighbours
from loader_service.agreement.messages import Phase, PhaseRecord, Verdict
from loader_service.agreement.session import Session
from loader_service.memory.shared import SharedMemory
from loader_service.reading.local import LocalFile
from loader_service.reading.ranges import RangeReader
from tests.e2e.doors import check_logs
from tests.e2e.seats import serve
from tests.sharing.failing import Seen, config_of, go_through, seen, take_in_steps, with_remains, write, written
from tests.support import shared_memory
from tests.support.checkpoints import Checkpoint
from tests.support.ranks import Outcome, Rank, run_teams

pytestmark = pytest.mark.processes

RANKS = 3
WATCHDOG_S = 60.0
PATIENT: dict[str, Any] = {"timeout_s": 120, "start_timeout_s": 120, "grace_s": 5}  # nobody ends because of silence
IMPATIENT: dict[str, Any] = {"timeout_s": 4, "start_timeout_s": 120, "grace_s": 5}
BODY = "in the body"
AT = 4  # items: its own slots and some of others' are in use then


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write(tmp_path_factory.mktemp("processes"))


@dataclass(frozen=True)
class Blow:
    """Which rank is killed or stopped in a load, where, and whether a child of it lives on. `serves`: it is rank 0, and
    the store where the ranks meet ends with it."""

    way: str
    where: str
    who: int
    child: bool = False
    form: str = "batches"
    serves: bool = False


WORK: dict[str, tuple[Any, str]] = {
    "connecting": (neighbours, "connect"),
    "obtaining memory": (SharedMemory, "reserve"),
    "reading": (RangeReader, "read_within"),
    "reading ahead": (LocalFile, "read_ahead"),
}


def fall_at(where: str, fall: Callable[[], None]) -> None:
    """From now on this process falls in a kind of work, or before the exchange of a phase."""
    if where in WORK:
        owner, name = WORK[where]
        work = getattr(owner, name)

        def fall_first(*args: Any, **kwargs: Any) -> Any:
            fall()
            return work(*args, **kwargs)

        setattr(owner, name, fall_first)
        return
    exchange = Session.exchange

    async def held(session: Session, phase: Phase, record: PhaseRecord) -> Verdict:
        if phase == where:
            fall()
        return await exchange(session, phase, record)

    Session.exchange = held  # type: ignore[method-assign, assignment]


def be_struck(rank: Rank, address: str, folder: str, blow: Blow, number: signal.Signals) -> Seen:
    checkpoint = written(folder)
    agreement = PATIENT if number == signal.SIGKILL else IMPATIENT
    config = config_of(checkpoint, blow.way, agreement=agreement)
    where = rank.address if blow.serves else address
    group = ls.Rendezvous(where, rank.rank, RANKS, rank.address, served=not blow.serves)
    fallen: list[bool] = []
    woken = threading.Event()
    signal.signal(signal.SIGCONT, lambda *_: woken.set())

    def fall() -> None:
        if fallen or rank.rank != blow.who:
            return
        fallen.append(True)
        if blow.child:
            rank.fork_child()
        rank.mark("falls")
        os.kill(os.getpid(), number)
        woken.wait()  # a stop comes a moment later to this thread than to others

    def step(taken: int) -> None:
        if blow.where == BODY and taken == AT:
            fall()

    async def main() -> Seen:
        async with ls.LoaderService(config, group) as service:
            return seen(await go_through(service, lambda load: take_in_steps(load, blow.form, checkpoint, step)))

    fall_at(blow.where, fall)
    found = asyncio.run(main())
    if rank.rank != blow.who:
        rank.mark("ended")
    return with_remains(found)


def strike(checkpoint: Checkpoint, blows: Sequence[Blow], number: signal.Signals) -> list[list[Outcome]]:
    """Each blow falls on a team of its own. Who was stopped goes on when all others have ended."""
    ended = [0] * len(blows)

    def on_mark(team: int, _rank: int, text: str, pids: list[int]) -> None:
        ended[team] += text == "ended"
        if text == "ended" and ended[team] == RANKS - 1 and number == signal.SIGSTOP:
            os.kill(pids[blows[team].who], signal.SIGCONT)

    address = f"127.0.0.1:{serve().port}"
    cases = [(address, str(checkpoint.folder), blow, number) for blow in blows]
    return run_teams(be_struck, RANKS, cases, on_mark=on_mark, timeout_s=WATCHDOG_S)


def check_struck(blow: Blow, outcomes: Sequence[Outcome], ranks: Sequence[int]) -> None:
    """These ranks name the one that fell, all alike, and have nothing left."""
    assert outcomes[blow.who].marks == ("falls",), blow
    found: list[Seen] = [outcomes[rank].get() for rank in ranks]
    for one in found:
        assert one.error == "RankFailure", (blow, one)
        assert one.verdict is not None
        assert one.verdict == found[0].verdict, (blow, one)
        assert one.verdict.rank == blow.who, (blow, one)
        assert one.verdict.error == ("LostStore" if blow.serves else "LostRank"), (blow, one)
        assert one.left == (), (blow, one)
    check_logs([one.log for one in found])


KILLED = [
    Blow("staging", "connecting", 2),
    Blow("page_cache", "connecting", 0, child=True),
    Blow("page_cache", Phase.CATALOG, 2, child=True),
    Blow("staging", Phase.CATALOG, 0),
    Blow("page_cache", Phase.PLAN, 0),
    Blow("staging", Phase.PLAN, 1, child=True),
    Blow("page_cache", Phase.OPEN, 1, child=True),
    Blow("staging", Phase.OPEN, 2),
    Blow("staging", "obtaining memory", 0, child=True),
    Blow("page_cache", "reading ahead", 0),
    Blow("page_cache", "reading", 2, child=True),
    Blow("staging", "reading", 2, form="iterate"),
    Blow("page_cache", BODY, 0, form="iterate"),
    Blow("staging", BODY, 1, child=True),
    Blow("staging", BODY, 0, serves=True),
    Blow("staging", Phase.READ, 0, form="iterate"),
    Blow("page_cache", Phase.READ, 2),
    Blow("staging", Phase.FINISH, 2, child=True),
    Blow("page_cache", Phase.FINISH, 0),
]


def test_a_rank_that_is_killed_in_any_phase_is_named_at_once_by_all_others(checkpoint: Checkpoint) -> None:
    before = shared_memory.names()
    for blow, outcomes in zip(KILLED, strike(checkpoint, KILLED, signal.SIGKILL), strict=True):
        assert outcomes[blow.who].exitcode == -signal.SIGKILL, blow
        check_struck(blow, outcomes, [rank for rank in range(RANKS) if rank != blow.who])
    shared_memory.assert_nothing_new(before)


STOPPED = [
    Blow("staging", "connecting", 1),
    Blow("page_cache", Phase.CATALOG, 2),
    Blow("staging", Phase.PLAN, 0),
    Blow("page_cache", Phase.OPEN, 0),
    Blow("staging", "obtaining memory", 0),
    Blow("staging", "reading", 1, form="iterate"),
    Blow("page_cache", "reading ahead", 1),
    Blow("staging", BODY, 2),
    Blow("staging", BODY, 0, form="iterate"),
    Blow("staging", Phase.READ, 1),
    Blow("page_cache", Phase.FINISH, 1),
]


def test_a_rank_that_is_stopped_in_any_phase_is_found_lost_and_woken_fails_with_the_same_cause(
    checkpoint: Checkpoint,
) -> None:
    for blow, outcomes in zip(STOPPED, strike(checkpoint, STOPPED, signal.SIGSTOP), strict=True):
        check_struck(blow, outcomes, range(RANKS))
