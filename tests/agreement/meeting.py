"""Ranks of tests that meet in a store and go from phase to phase, and how a test learns how far each has come."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from loader_service.agreement.group import Group, Rendezvous, join_group
from loader_service.agreement.messages import PHASES, Phase, PhaseRecord, record_key
from loader_service.agreement.participant import Participant
from loader_service.agreement.session import Session
from loader_service.agreement.store_carrier import StoreCarrier
from tests.support.ranks import Outcome, Rank

PATIENT = SimpleNamespace(timeout_s=60.0, start_timeout_s=60.0, grace_s=10.0)
SAME = PhaseRecord("same", counted={"node": "n"})
ENDED = "has ended"
GONE_WITHIN_S = 60.0


def impatient(timeout_s: float) -> Any:
    return SimpleNamespace(timeout_s=timeout_s, start_timeout_s=60.0, grace_s=4.0)


def meet(rank: Rank, settings: Any = PATIENT, *, agent: str | None = None) -> Group:
    """At an agent's store, or at one that rank 0 serves."""
    meeting = Rendezvous(agent or rank.address, rank.rank, rank.world_size, f"{rank.team}", served=agent is not None)
    return join_group(meeting, settings=settings, environ={})


async def until(session: Session, last: Phase) -> None:
    """Goes through all phases up to `last`."""
    await through(session, PHASES[: last.position + 1])


async def through(session: Session, phases: tuple[Phase, ...]) -> None:
    for phase in phases:
        await session.exchange(phase, SAME)


def stand_at(rank: Rank, phase: Phase, *, withhold: bool) -> None:
    """Marks `phase` once this rank has come to it and has said there that it lives; to be called before it starts.

    `withhold` keeps its record of that phase back for good: it lives, and never comes any further.
    """
    posted = threading.Event()
    beats = itertools.count()
    post, status = StoreCarrier.post, Participant.status

    def watched_post(carrier: StoreCarrier, key: str, data: bytes) -> None:
        if key == record_key(phase, 0, rank.rank):
            posted.set()
            if withhold:
                return
        post(carrier, key, data)

    def watched_status(participant: Participant) -> bytes:
        if posted.is_set() and next(beats) == 1:  # so the one before has been written
            rank.mark(str(phase))
        return status(participant)

    StoreCarrier.post = watched_post  # type: ignore[method-assign, assignment]
    Participant.status = watched_status  # type: ignore[method-assign, assignment]


async def wait_for_final(session: Session, phase: Phase = Phase.READ) -> None:
    """Works at `phase` without end, as far as the others can see."""
    ended = asyncio.Event()
    session.on_final(lambda verdict: ended.set())
    await ended.wait()
    await session.exchange(phase, SAME)


@dataclass(frozen=True)
class Found:
    """What a rank saw of a load that failed."""

    error: str
    rank: int | None
    phase: str | None
    cause: str
    message: str

    @classmethod
    def of(cls, outcome: Outcome) -> Found:
        assert outcome.error is not None, outcome
        record = outcome.error.record
        assert record is not None, outcome.error.traceback
        assert outcome.exitcode == 0, "the process has ended by itself"
        assert_quiet(outcome.stderr)
        return cls(outcome.error.name, record.rank, record.phase, record.error, outcome.error.message)


def assert_quiet(stderr: str) -> None:
    """Nothing in a process was torn down under a thread that still ran."""
    for cry in ("Fatal Python error", "terminate called", "Segmentation fault", "Aborted", "Traceback"):
        assert cry not in stderr, stderr


class Gathering:
    """Counts marks by team: `action(team, pids)` is called once all of `who` in a team have said `text`."""

    def __init__(self, text: Callable[[int], str], who: Callable[[int], set[int]], action: Callable[..., None]) -> None:
        self._text = text
        self._who = who
        self._action = action
        self._come: dict[int, set[int]] = {}

    def mark(self, team: int, rank: int, text: str, pids: list[int]) -> None:
        if text != self._text(team) or rank not in self._who(team):
            return
        come = self._come.setdefault(team, set())
        come.add(rank)
        if come == self._who(team):
            self._action(team, pids)


def wait_until_gone(pids: list[int]) -> None:
    """The processes have ended (and whoever started them knows it, or they are nobody's)."""
    deadline_s = time.monotonic() + GONE_WITHIN_S
    left = list(pids)
    while left:
        assert time.monotonic() < deadline_s, f"processes {left} do not end"
        left = [pid for pid in left if os.path.exists(f"/proc/{pid}") and not _is_zombie(pid)]
        time.sleep(0.01)


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:  # gone, before or while it was read
        return True
