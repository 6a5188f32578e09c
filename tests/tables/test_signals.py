"""SIGINT and SIGTERM to a rank's process in each phase of a table, in both faces and layouts: what it raises, what the
others do, and that nothing is left; then all of them fill the table."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import loader_service as ls
from loader_service.agreement.messages import PHASES, Phase
from loader_service.config.schema import ServiceConfig
from tests.conftest import _descriptors, _unfinished_threads
from tests.e2e.doors import Hold
from tests.e2e.test_signals_by_phase import mark_when
from tests.support.checkpoints import Checkpoint
from tests.support.ranks import Rank, run_teams
from tests.tables.making import (
    QUICK,
    WEIGHT,
    assert_table,
    config_of,
    left_behind,
    opened_since,
    rules,
    shares,
)

pytestmark = pytest.mark.processes

RANKS = 2
Case: TypeAlias = tuple[str, str, signal.Signals, int]  # face, layout, signal, who
CASES: list[Case] = [  # each value of one together with each of any other
    ("async", "per_rank", signal.SIGINT, 0),
    ("async", "shared", signal.SIGTERM, 1),
    ("blocking", "per_rank", signal.SIGTERM, 1),
    ("blocking", "shared", signal.SIGINT, 1),
    ("blocking", "shared", signal.SIGTERM, 0),
]
Told: TypeAlias = tuple[str, str, list[str]]  # the error, what is known of all ranks, shared memory and sockets left


def told(error: BaseException | None) -> Told:
    """Of an error, and of what is left while somebody keeps it."""
    notes = getattr(error, "__notes__", [])
    known = str(error) if isinstance(error, ls.RankFailure) else "".join(notes).removeprefix("verdict of all ranks: ")
    return type(error).__name__, known, left_behind()


class Terminated(BaseException):
    pass


def terminate(*_: object) -> None:
    raise Terminated


@dataclass(frozen=True)
class Filling:
    """One rank that fills the table, in a service of its own each time. Where a phase is named, `who` stands still in
    it, and says so."""

    rank: Rank
    checkpoint: Checkpoint
    layout: str
    who: int

    @property
    def arguments(self) -> tuple[ServiceConfig, ls.Rendezvous]:
        config = config_of(self.checkpoint, rules(self.layout), RANKS, agreement={**QUICK, "timeout_s": 20})
        return config, ls.Rendezvous(self.rank.address, self.rank.rank, RANKS, "signals")

    def prepare(self, service: ls.LoaderService | ls.BlockingLoaderService, phase: Phase | None) -> None:
        if phase is not None and self.rank.rank == self.who:
            mark_when(Hold(service, phase).reached, self.rank, phase)

    def check(self, table: ls.HostTable) -> None:
        assert_table(table, self.checkpoint, WEIGHT, shares("equal", RANKS)[self.rank.rank], self.layout)

    def blocking(self, phase: Phase | None) -> Told:
        signal.signal(signal.SIGTERM, terminate)
        with ls.LoaderService.blocking(*self.arguments) as service:
            self.prepare(service, phase)
            try:
                self.check(service.host_table("target", WEIGHT))
            except BaseException as error:
                return told(error)
        return told(None)

    async def asynchronous(self, phase: Phase | None, found: list[Told]) -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        async with ls.LoaderService(*self.arguments) as service:
            self.prepare(service, phase)
            try:
                self.check(await service.host_table("target", WEIGHT))
            except BaseException as error:
                found.append(told(error))
                return
        found.append(told(None))


def be_signalled_in_each_phase(
    rank: Rank, given: tuple[Path, dict[str, Any], dict[str, str]], face: str, layout: str, _: int, who: int
) -> tuple[list[Told], list[str], list[str]]:
    """A whole table, then one in each phase of which `who` is signalled, then a whole one.

    What came of each; threads and descriptors that are there afterwards and were not after the first.
    """
    filling = Filling(rank, Checkpoint(*given), layout, who)
    found: list[Told] = []
    before: dict[int, str] = {}
    for phase in (None, *PHASES, None):
        if face == "blocking":
            found.append(filling.blocking(phase))
        else:
            try:
                asyncio.run(filling.asynchronous(phase, found))
            except KeyboardInterrupt:  # asyncio.run's own, after its task was cancelled
                assert rank.rank == who
        threads = [thread.name for thread in _unfinished_threads(set())]
        before = before or _descriptors()
    if opened_since(before):
        gc.collect()
    return found, threads, opened_since(before)


def test_a_signal_in_each_phase(checkpoint: Checkpoint) -> None:
    given = (checkpoint.folder, dict(checkpoint.tensors), dict(checkpoint.shard_of))

    def interrupt(team: int, rank: int, _text: str, pids: list[int]) -> None:
        assert rank == CASES[team][3]
        os.kill(pids[rank], CASES[team][2])

    cases = [(given, *case) for case in CASES]
    teams = run_teams(be_signalled_in_each_phase, RANKS, cases, on_mark=interrupt, timeout_s=90)
    for (face, layout, number, who), outcomes in zip(CASES, teams, strict=True):
        own = "CancelledError" if face == "async" else "KeyboardInterrupt" if number == signal.SIGINT else "Terminated"
        ended = [outcome.get() for outcome in outcomes]
        for at, phase in enumerate(PHASES, start=1):
            results = [found[at] for found, _, _ in ended]
            what = (face, layout, number.name, who, phase, results)
            assert [error for error, _, _ in results] == [own if rank == who else "RankFailure" for rank in range(2)], (
                what
            )
            assert len({known for _, known, _ in results}) == 1, what
            assert results[0][1].startswith(f"rank {who} failed in phase {phase}: LoadCancelledError: "), what
            assert [left for _, _, left in results] == [[], []], what
        for found, threads, opened in ended:
            assert (found[0], found[-1]) == (("NoneType", "", []), ("NoneType", "", [])), (face, layout, number, who)
            assert (threads, opened) == ([], []), (face, layout, number, who)
