"""A connection that the network has forgotten: nothing ends it, nothing comes over it. Heartbeats make up for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import cast

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

from loader_service.agreement.messages import PHASES, PhaseRecord
from loader_service.agreement.protocol import Limits
from loader_service.agreement.session import Session
from loader_service.agreement.store_carrier import StoreCarrier
from loader_service.agreement.store_clients import ClientPool, Meeting, Store
from loader_service.errors import RankFailure, ReadError

LIMITS = Limits(timeout_s=10, start_timeout_s=30, grace_s=5, heartbeat_s=0.2, suspect_s=5)


@pytest.fixture(params=["_follow", "_collect", "_await_alarm"])
def forgotten(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The thread of every rank that would be woken over that connection waits for nothing until the test has ended."""
    ended = threading.Event()
    monkeypatch.setattr(StoreCarrier, request.param, lambda self, store: ended.wait(60))
    yield request.param
    ended.set()


def make_sessions(count: int) -> list[Session]:
    server = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)

    def make(rank: int) -> Session:
        carrier = StoreCarrier(
            meeting=Meeting(ClientPool(lambda: cast(Store, server)), "test", rank, keep=False),
            rank=rank,
            world_size=count,
            heartbeat_s=LIMITS.heartbeat_s,
            host_rank=None,
            where="in this process",
        )
        return Session("load", carrier, rank=rank, world_size=count, limits=LIMITS)

    return [make(rank) for rank in range(count)]


async def test_a_load_succeeds_a_few_heartbeats_later(forgotten: str) -> None:
    made = make_sessions(2)
    for phase in PHASES:
        await asyncio.gather(*(session.exchange(phase, PhaseRecord("same")) for session in made))
    assert all(session.succeeded for session in made)
    await asyncio.gather(*(session.close() for session in made))


async def test_a_failure_is_told_a_few_heartbeats_later(forgotten: str) -> None:
    made = make_sessions(2)
    for phase in PHASES[:2]:
        await asyncio.gather(*(session.exchange(phase, PhaseRecord("same")) for session in made))
    waiting = asyncio.ensure_future(made[0].exchange(PHASES[2], PhaseRecord("same")))
    final = await made[1].fail(ReadError("it broke"), PHASES[2])
    assert final is not None
    with pytest.raises(RankFailure) as caught:
        await waiting
    assert caught.value.rank == 1
    await asyncio.gather(*(session.close() for session in made))
