"""Where a rank process stands still while it fills a table, so that the test can end it right there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from loader_service import neighbours
from loader_service.agreement.messages import Phase, PhaseRecord, Verdict
from loader_service.agreement.node_mesh import Mesh
from loader_service.agreement.session import Session
from loader_service.memory.shared import SharedMemory
from loader_service.reading.ranges import RangeReader
from loader_service.tables import TableRun
from tests.support.ranks import Rank

STANDS = "stands"
WORK: dict[str, tuple[Any, str]] = {
    "meet": (neighbours, "connect"),
    "hand over": (Mesh, "send"),
    "receive": (SharedMemory, "received"),
    "reserve": (SharedMemory, "reserve"),
    "reading": (RangeReader, "read"),
    "pin": (TableRun, "_pin"),
}


def stand_at(rank: Rank, point: str) -> None:
    """From now on this process stands still in a kind of work, or before the exchange of a phase, and says so."""
    if point in WORK:
        owner, name = WORK[point]
        setattr(owner, name, _standing(rank, getattr(owner, name)))
        return
    exchange = Session.exchange

    async def held(session: Session, phase: Phase, record: PhaseRecord) -> Verdict:
        if phase == point:
            rank.mark(STANDS)
            await asyncio.Event().wait()
        return await exchange(session, phase, record)

    Session.exchange = held  # type: ignore[method-assign, assignment]


def _standing(rank: Rank, work: Callable[..., Any]) -> Callable[..., Any]:
    first = threading.Lock()

    def stand(*_: object, **__: object) -> None:
        if first.acquire(blocking=False):  # threads that read come here side by side: the test is told once
            rank.mark(STANDS)
        threading.Event().wait()

    assert callable(work)
    return stand
