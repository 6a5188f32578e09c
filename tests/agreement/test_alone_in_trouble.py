"""One rank alone in trouble: a connection of its own, a thread that it cannot start, a failure before the leader comes.

The others, and their store, live: they hear who it is, and nobody blames the leader.
"""

from __future__ import annotations

import asyncio
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from loader_service.agreement import store_carrier
from loader_service.agreement.group import Group, Rendezvous, join_group
from loader_service.agreement.messages import PHASES, Phase, PhaseRecord
from loader_service.errors import ConfigError, LoaderError, RankFailure
from tests.e2e.seats import serve
from tests.support.ranks import Outcome, Rank, run_ranks

SETTINGS = SimpleNamespace(timeout_s=20.0, start_timeout_s=40.0, grace_s=2.0)
SAME = PhaseRecord("same", counted={"node": "n"})


def by_address(rank: Rank) -> Group:
    """Rank 0 serves the store."""
    return join_group(Rendezvous(rank.address, rank.rank, rank.world_size, "alone"), settings=SETTINGS, environ={})


def break_a_connection(rank: Rank) -> None:
    """Of rank 1, and only the one by which it follows the log."""

    def broken(carrier: Any, store: Any) -> None:
        reached.wait(30)
        raise RuntimeError("Connection reset by peer")

    reached = threading.Event()
    if rank.rank == 1:
        store_carrier.StoreCarrier._follow = broken  # type: ignore[method-assign,assignment]

    async def main() -> None:
        group = by_address(rank)
        session = group.session("load")
        try:
            await session.exchange(Phase.CONFIG, SAME)
            reached.set()
            await session.exchange(Phase.CATALOG, SAME)
            if rank.rank == 1:
                ended = asyncio.Event()
                session.on_final(lambda verdict: ended.set())
                await ended.wait()
            await session.exchange(Phase.PLAN, SAME)
        finally:
            await session.close()
            group.close()

    asyncio.run(main())


def refuse_a_thread(rank: Rank) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "loader-agreement-log":
            raise RuntimeError("can't start new thread")
        start(thread)

    if rank.rank == 1:
        threading.Thread.start = refused  # type: ignore[method-assign,assignment]

    async def main() -> None:
        group = by_address(rank)
        session = group.session("load")
        try:
            for phase in PHASES:
                await session.exchange(phase, SAME)
        finally:
            await session.close()
            group.close()

    asyncio.run(main())


def causes(outcomes: list[Outcome]) -> set[tuple[str, int | None, str]]:
    found = set()
    for outcome in outcomes:
        assert outcome.error is not None, outcome
        record = outcome.error.record
        assert record is not None
        found.add((record.error, record.rank, record.message))
    return found


@pytest.mark.processes
def test_a_rank_that_loses_one_connection_is_named_by_all_and_the_living_leader_is_not() -> None:
    ((error, rank, message),) = causes(run_ranks(break_a_connection, 3))
    assert (error, rank) == ("LostStore", 1)
    assert "although the store lives" in message


@pytest.mark.processes
def test_a_rank_whose_thread_cannot_start_is_named_by_all_with_what_to_raise() -> None:
    ((error, rank, message),) = causes(run_ranks(refuse_a_thread, 3))
    assert (error, rank) == ("MemoryLimitError", 1)
    assert "ulimit -u" in message


async def test_a_failure_before_the_leader_is_there_is_told_to_those_who_are_and_to_the_leader_when_it_comes() -> None:
    """Nobody answers the FAIL; without an end, rank 2 would wait for the limit of the first meeting."""
    settings = SimpleNamespace(timeout_s=4.0, start_timeout_s=60.0, grace_s=0.2)

    async def wait(rank: int) -> tuple[str, int | None]:
        group = join_group(Rendezvous(serve(), rank, 3, "early"), settings=settings, environ={})
        session = group.session("load")
        try:
            with pytest.raises(RankFailure) as caught:
                await session.exchange(Phase.CONFIG, SAME)
            assert isinstance(caught.value.__cause__, ConfigError)
            return caught.value.cause_record.error, caught.value.rank
        finally:
            await session.close()
            group.close()

    group = join_group(Rendezvous(serve(), 1, 3, "early"), settings=settings, environ={})
    session = group.session("load")
    async with asyncio.timeout(30):
        waiting = asyncio.ensure_future(wait(2))
        verdict = await session.fail(ConfigError("a key is wrong"), Phase.CONFIG)
        assert verdict is not None
        assert verdict.final
        assert await waiting == ("ConfigError", 1)
        await session.close()
        group.close()
        assert await wait(0) == ("ConfigError", 1)


def fork_after_a_load(rank: Rank) -> list[str]:
    """The child shares nothing with its parent: both load, at the same address, at the same time."""

    async def load(nonce: str) -> str:
        meeting = Rendezvous(rank.address, rank.rank, 2, nonce)
        group = join_group(meeting, settings=SETTINGS, environ={})
        session = group.session("load")
        try:
            for phase in PHASES:
                await session.exchange(phase, SAME)
        except LoaderError as error:
            return str(error)
        finally:
            await session.close()
            group.close()
        return "met"

    said = [asyncio.run(load("before"))]
    child = os.fork()
    if child == 0:
        try:
            ended = asyncio.run(load("of the children"))
            os._exit(0 if ended == "met" else 3)
        finally:
            os._exit(4)
    said.append(asyncio.run(load("of the parents")))
    _, status = os.waitpid(child, 0)
    return [*said, str(os.waitstatus_to_exitcode(status))]


@pytest.mark.processes
def test_a_forked_child_meets_over_connections_of_its_own() -> None:
    for outcome in run_ranks(fork_after_a_load, 2):
        assert outcome.get() == ["met", "met", "0"]
