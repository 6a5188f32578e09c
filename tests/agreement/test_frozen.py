"""Rank processes that are stopped and go on later: the others name them and end, and they then see the same FINAL."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import TypeAlias

import pytest

from loader_service.agreement.messages import Phase
from tests.agreement.conftest import serving_agent
from tests.agreement.meeting import Found, Gathering, impatient, meet, stand_at, until, wait_until_gone
from tests.support.ranks import Rank, run_teams

pytestmark = pytest.mark.processes

RANKS = 3
TIMEOUT_S = 6.0
CASES = ((2, True), (0, True), (0, False), (2, False))  # who is stopped, and whether an agent serves the store
All: TypeAlias = dict[tuple[int, bool], list[Found]]


def freeze_in_read(rank: Rank, victim: int, agent: str | None) -> None:
    """All come to the read phase, where the test stops the victim; it goes on once the others have ended."""
    stand_at(rank, Phase.READ, withhold=rank.rank == victim)

    async def main() -> None:
        group = meet(rank, impatient(TIMEOUT_S), agent=agent)
        session = group.session("load")
        session.report_progress(f"shard {rank.rank}")
        try:
            await until(session, Phase.FINISH)
        finally:
            await session.close()
            group.close()

    asyncio.run(main())


@pytest.fixture(scope="module")
def seen() -> All:
    """What each rank of each case saw. All cases run at once, so that they cost one silence."""
    thaws: list[threading.Thread] = []

    def freeze(team: int, pids: list[int]) -> None:
        victim = CASES[team][0]
        os.kill(pids[victim], signal.SIGSTOP)
        thaws.append(threading.Thread(target=thaw, args=(pids, victim)))
        thaws[-1].start()

    def thaw(pids: list[int], victim: int) -> None:
        wait_until_gone([pid for rank, pid in enumerate(pids) if rank != victim])
        os.kill(pids[victim], signal.SIGCONT)

    gathering = Gathering(lambda _: Phase.READ, lambda _: set(range(RANKS)), freeze)
    with serving_agent() as agent:
        cases = [(victim, agent.address if by_agent else None) for victim, by_agent in CASES]
        teams = run_teams(freeze_in_read, RANKS, cases, on_mark=gathering.mark)
    for thread in thaws:
        thread.join()
    return {case: [Found.of(outcome) for outcome in outcomes] for case, outcomes in zip(CASES, teams, strict=True)}


@pytest.mark.parametrize("victim", [2, 0], ids=["member", "leader"])
def test_a_frozen_rank_is_named_by_all_and_sees_the_same_when_it_goes_on(seen: All, victim: int) -> None:
    for found in seen[victim, True]:
        assert (found.error, found.rank, found.phase, found.cause) == ("RankFailure", victim, "read", "LostRank")
        assert f"last progress: shard {victim}" in found.message
        assert found.message == seen[victim, True][1].message


def test_a_frozen_rank_that_serves_the_store_is_named_by_all_and_sees_the_same_when_it_goes_on(seen: All) -> None:
    """The others have left it the verdict in a store that did not answer them."""
    for found in seen[0, False]:
        assert (found.error, found.rank, found.phase, found.cause) == ("RankFailure", 0, "read", "LostStore")
        assert found.message == seen[0, False][1].message


def test_a_frozen_rank_blames_itself_where_the_store_has_gone_with_the_others(seen: All) -> None:
    for found in seen[2, False]:
        assert (found.error, found.rank, found.phase, found.cause) == ("RankFailure", 2, "read", "LostRank")
