"""Rank processes whose store is frozen or gone are held by nothing: also their interpreters end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from loader_service.agreement.messages import Phase
from loader_service.errors import LoaderError
from tests.agreement.conftest import serving_agent
from tests.agreement.meeting import Gathering, assert_quiet, impatient, meet, until, wait_for_final
from tests.support.ranks import Rank, run_teams

pytestmark = pytest.mark.processes

RANKS = 2
TIMEOUT_S = 6.0


def catch_and_end(rank: Rank, agent: str) -> None:
    async def main() -> None:
        group = meet(rank, impatient(TIMEOUT_S), agent=agent)
        session = group.session("load")
        try:
            await until(session, Phase.OPEN)
            rank.mark("reads")
            await wait_for_final(session)
        except LoaderError as error:
            record = error.record()
            rank.mark(f"{type(error).__name__} {record.error} {record.rank} {record.phase}")
        finally:
            await session.close()
            group.close()

    asyncio.run(main())
    rank.end()


def test_processes_end_after_their_store_was_frozen_or_killed() -> None:
    """Their threads have failed, or are inside a call of the store for good."""
    ends = [signal.SIGSTOP, signal.SIGKILL]
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(serving_agent()) for _ in ends]
        all_read = Gathering(
            lambda _: "reads", lambda _: set(range(RANKS)), lambda team, _: os.kill(agents[team].pid, ends[team])
        )
        teams = run_teams(catch_and_end, RANKS, [(agent.address,) for agent in agents], on_mark=all_read.mark)
    for outcomes in teams:
        assert [outcome.marks for outcome in outcomes] == [
            ("reads", "RankFailure LostStore None read"),
            ("reads", "RankFailure LostStore 0 read"),
        ]
        for outcome in outcomes:
            assert outcome.exitcode == 0, outcome.stderr
            assert_quiet(outcome.stderr)
