"""Rank processes that are killed, in every phase: all others name the one that died, and end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import pytest

from loader_service.agreement.messages import PHASES, Phase
from tests.agreement.conftest import Agent
from tests.agreement.meeting import Found, Gathering, impatient, meet, stand_at, through
from tests.support.ranks import Rank, run_teams

pytestmark = pytest.mark.processes

RANKS = 3
BOUND_S = 30.0  # within which survivors must have ended: far more than they need, far less than the watchdog
TIMEOUT_S = 6.0
FORKED = "has a child"


def die_in(rank: Rank, phase: Phase, victim: int, agent: str | None, _leaves_child: bool) -> None:
    """All come to `phase`; the test kills the victim there, whose record the others wait for."""
    stand_at(rank, phase, withhold=rank.rank == victim)

    def fork(*_: object) -> None:
        rank.fork_child()
        rank.mark(FORKED)

    signal.signal(signal.SIGUSR1, fork)

    async def main() -> None:
        group = meet(rank, impatient(TIMEOUT_S), agent=agent)
        session = group.session("load")
        session.report_progress(f"shard {rank.rank}")
        try:
            await through(session, PHASES)
        finally:
            await session.close()
            group.close()

    asyncio.run(main())


Case: TypeAlias = tuple[Phase, int, str | None, bool]


def kill_in_each_phase(cases: Sequence[Case]) -> Iterator[tuple[Phase, Found]]:
    """The phase in which a victim was killed and what a survivor saw, for all survivors. All cases run at once."""
    killed_at_s: dict[int, float] = {}

    def kill(team: int, pids: list[int]) -> None:
        killed_at_s[team] = time.monotonic()
        os.kill(pids[cases[team][1]], signal.SIGKILL)

    def end(team: int, pids: list[int]) -> None:
        """All have come, so that a child inherits all connections of the victim."""
        _, victim, _, leaves_child = cases[team]
        if leaves_child:
            os.kill(pids[victim], signal.SIGUSR1)
        else:
            kill(team, pids)

    come = Gathering(lambda team: cases[team][0], lambda _: set(range(RANKS)), end)
    forked = Gathering(lambda _: FORKED, lambda team: {cases[team][1]}, kill)

    def on_mark(team: int, rank: int, text: str, pids: list[int]) -> None:
        come.mark(team, rank, text, pids)
        forked.mark(team, rank, text, pids)

    teams = run_teams(die_in, RANKS, cases, on_mark=on_mark)
    for team, ((phase, victim, _, _), outcomes) in enumerate(zip(cases, teams, strict=True)):
        assert outcomes[victim].exitcode == -signal.SIGKILL
        assert max(outcome.ended_s for outcome in outcomes) - killed_at_s[team] < BOUND_S
        yield from ((phase, Found.of(outcome)) for outcome in outcomes if outcome.rank != victim)


@pytest.mark.parametrize(("victim", "odd"), [(1, 0), (0, 1)], ids=["member", "leader"])
def test_a_killed_rank_is_named_in_every_phase(agent: Agent, victim: int, odd: int) -> None:
    """In every other phase it leaves a child that keeps its connections open."""
    cases = [(phase, victim, agent.address, phase.position % 2 == odd) for phase in PHASES]
    for phase, found in kill_in_each_phase(cases):
        assert (found.error, found.rank, found.phase, found.cause) == ("RankFailure", victim, phase, "LostRank")
        assert f"last progress: shard {victim}" in found.message


@pytest.mark.parametrize("leaves_child", [False, True], ids=["end of file", "silence of its child"])
def test_a_killed_rank_that_served_the_store_is_named_in_every_phase(leaves_child: bool) -> None:
    """With a child that keeps all connections open nobody tells and nobody answers. In the first phase silence says
    nothing before `start_timeout_s` is over: ranks may still connect, which can hold a store up."""
    cases = [(phase, 0, None, leaves_child) for phase in PHASES[1 if leaves_child else 0 :]]
    for phase, found in kill_in_each_phase(cases):
        assert (found.error, found.rank, found.phase, found.cause) == ("RankFailure", 0, phase, "LostStore")
        assert "lost the store (at 127.0.0.1:" in found.message
        assert ("no answer for" in found.message) == leaves_child
