"""Ranks that missed each other (one failed before it came, one died, all died) meet again in the next load."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]  # public, but not in its __all__

from loader_service.agreement.group import Group, Rendezvous, join_group
from loader_service.agreement.messages import PHASES, PhaseRecord
from loader_service.agreement.protocol import Limits
from loader_service.agreement.store_clients import ClientPool, Meeting
from loader_service.errors import LoaderError
from tests.agreement.conftest import Agent
from tests.e2e.seats import serve
from tests.support.ranks import Outcome, Rank, run_ranks

BRIEF = SimpleNamespace(timeout_s=2.0, start_timeout_s=1.0, grace_s=0.2)
PATIENT = SimpleNamespace(timeout_s=20.0, start_timeout_s=30.0, grace_s=5.0)
WATCHDOG_S = 12.0
_nonces = itertools.count()


class Store:
    """Where two ranks of one process meet, and what the first keys of a session look like from outside."""

    def __init__(self) -> None:
        self.nonce = f"again {next(_nonces)}"
        self.store: Any = serve()

    def group(self, rank: int, settings: Any = PATIENT) -> Group:
        return join_group(Rendezvous(self.store, rank, 2, self.nonce), settings=settings, environ={})

    def begun(self, rank: int) -> int:
        """How far rank `rank` has come in asking the store for its place."""
        return PrefixStore(f"loader_service/{self.nonce}", self.store).add(f"sessions/{rank}", 0)

    async def until_begun(self, rank: int, after: int) -> None:
        async with asyncio.timeout(WATCHDOG_S):
            while self.begun(rank) <= after:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def load(group: Group, name: str = "load") -> str:
    """All phases; "met", or the error's text."""
    session = group.session(name)
    try:
        async with asyncio.timeout(WATCHDOG_S):
            for phase in PHASES:
                await session.exchange(phase, PhaseRecord(name))
    except LoaderError as error:
        return str(error)
    finally:
        await session.close()
    return "met"


@asynccontextmanager
async def closing(*groups: Group) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for group in groups:
            group.close()


async def both(store: Store, first: int, groups: dict[int, Group]) -> list[str]:
    """Rank `first` begins, the other one follows once that is at work."""
    before = store.begun(first)
    ahead = asyncio.ensure_future(load(groups[first]))
    await store.until_begun(first, before)
    behind = await load(groups[1 - first])
    return [await ahead, behind]


@pytest.mark.parametrize("first", [0, 1], ids=["leader first", "member first"])
@pytest.mark.parametrize("absent", [0, 1], ids=["leader absent", "member absent"])
@pytest.mark.parametrize("services", ["one", "new ones"])
async def test_a_rank_that_did_not_come_meets_the_others_the_next_time(absent: int, first: int, services: str) -> None:
    """However often it was missed, and whoever comes first then."""
    store = Store()
    groups = {rank: store.group(rank, BRIEF) for rank in range(2)}
    async with closing(*groups.values()):
        waits = 1 - absent
        for _ in range(2):
            assert "arrive within 1 s" in await load(groups[waits])
            if services == "new ones":
                groups[waits].close()
                groups[waits] = store.group(waits, BRIEF)
        for rank, group in groups.items():
            if services == "new ones":
                group.close()
                groups[rank] = store.group(rank)
            else:
                group._limits = Limits.of(PATIENT)
        for _ in range(2):
            assert await both(store, first, groups) == ["met", "met"]


async def test_a_rank_that_comes_after_the_end_and_finds_nobody_takes_that_end_for_its_own() -> None:
    store = Store()
    groups = [store.group(rank, BRIEF if rank == 0 else PATIENT) for rank in range(2)]
    async with closing(*groups):
        assert "did not arrive within 1 s" in await load(groups[0])
        assert "did not arrive within 1 s" in await load(groups[1])
        groups[0]._limits = Limits.of(PATIENT)
        assert list(await asyncio.gather(load(groups[0]), load(groups[1]))) == ["met", "met"]


async def test_loads_in_different_orders_end_at_once_and_the_same_order_then_works() -> None:
    store = Store()
    groups = [store.group(rank) for rank in range(2)]
    async with closing(*groups):
        for names in (("target", "draft"), ("draft", "target")):
            found = await asyncio.gather(*(load(group, name) for group, name in zip(groups, names, strict=True)))
            assert all("ranks 0 and 1 differ in config" in text for text in found)
        assert await asyncio.gather(*(load(group) for group in groups)) == ["met", "met"]


# Processes that come again -------------------------------------------------------------------------------------------


def come(rank: Rank, address: str, dies: list[int], number: int | None = None) -> str:
    """Meets at a store that outlives the ranks; those in `dies` are killed in an open load, the others then come again.

    `number` is for a rank that is started again, alone: it comes for the load that the others enter next.
    """

    async def main() -> str:
        place = rank.rank if number is None else number
        settings = SimpleNamespace(timeout_s=4.0, start_timeout_s=40.0, grace_s=0.2)
        group = join_group(Rendezvous(address, place, 3, "job", served=True), settings=settings, environ={})
        async with closing(group):
            if dies:
                session = group.session("load")
                for phase in PHASES[:4]:
                    await session.exchange(phase, PhaseRecord("load"))
                if rank.rank in dies:
                    rank.mark("dies")
                    os.kill(os.getpid(), signal.SIGKILL)
                with pytest.raises(LoaderError):
                    await session.exchange(PHASES[4], PhaseRecord("load"))
                await session.close()
            return await load(group)

    return asyncio.run(main())


@pytest.mark.processes
def test_ranks_that_all_died_meet_again_in_a_store_that_survived(agent: Agent) -> None:
    for outcome in run_ranks(come, 3, agent.address, [0, 1, 2]):
        assert outcome.exitcode == -signal.SIGKILL
    assert [outcome.get() for outcome in run_ranks(come, 3, agent.address, [])] == ["met"] * 3


@pytest.mark.processes
@pytest.mark.parametrize("who", [0, 2], ids=["leader", "member"])
def test_a_rank_that_is_started_again_alone_meets_the_others(agent: Agent, who: int) -> None:
    found: list[Outcome] = []

    def start_again() -> None:
        found.extend(run_ranks(come, 1, agent.address, [], who))

    again = threading.Thread(target=start_again)
    outcomes = run_ranks(come, 3, agent.address, [who], on_mark=lambda *_: again.start())
    again.join()
    others = [outcome for outcome in outcomes if outcome.rank != who]
    assert [outcome.get() for outcome in [*found, *others]] == ["met"] * 3


def test_calls_get_their_sessions_in_the_order_of_their_tickets() -> None:
    """Whichever comes to the store first: a cancelled one may say so before those ahead of it have connected."""
    store = HashStore()
    meeting = Meeting(ClientPool(lambda: cast(Any, store)), "tickets", 1, keep=False)
    first, second, third = (meeting.ticket() for _ in range(3))
    for ticket in (second, first, third):
        meeting.session(cast(Any, store), ticket)(cast(Any, store)).set("who", str(ticket))
    assert [store.get(f"tickets/{number}/who") for number in (1, 2, 3)] == [b"0", b"1", b"2"]
