"""This rank and the others of its node in one session: how they meet, and that none of them dies unseen.

Nothing of it outlives the session but a word of farewell.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence

from loader_service import logs
from loader_service.agreement.messages import JSON
from loader_service.agreement.node import MEET_WAIT_S, Card, Door, memory_device, own_process
from loader_service.agreement.node_connect import connect
from loader_service.agreement.node_mesh import Mesh
from loader_service.agreement.session import Session
from loader_service.engine import Engine
from loader_service.errors import LoaderError
from loader_service.reading.threads import ReadPool

log = logs.logger("loader_service.load")

_GOODBYE_WAIT_S = 1.0


class Neighbours:
    """Meets the ranks of this node: shows a card with the configuration, then connects with all whose cards fit.

    From then on `mesh` carries messages between them, and a rank whose process ends is named to all ranks at once.
    """

    def __init__(
        self, engine: Engine, session: Session, on_failure: Callable[[LoaderError], None] | None = None
    ) -> None:
        """`on_failure` gets what goes wrong here with a message of another rank; it is logged in any case."""
        self._on_failure = on_failure
        self._engine = engine
        self._session = session
        self._door: Door | None = None
        # Not the engine's: what a rank does there would keep its node waiting, and others' meetings each other.
        self._thread = ReadPool(1, name="loader-node")
        self._stopped = threading.Event()
        self.mesh: Mesh | None = None

    @property
    def connected(self) -> tuple[int, ...]:
        """The other ranks that this one can share memory with."""
        return self.mesh.connected if self.mesh is not None else ()

    async def card(self) -> JSON:
        """What this rank tells of itself; nothing where it is alone."""
        if self._engine.group.world_size == 1:
            return None
        await self._in_thread(self._open_door)
        assert self._door is not None
        return self._door.card.as_json()

    async def meet(self, told: Sequence[object] | None) -> None:
        """Connects with the ranks whose cards were told, by rank. Who cannot be reached is left out."""
        if self._door is None:
            return
        facts = [each if isinstance(each, Mapping) else {} for each in told or ()]
        cards = [Card.from_json(rank, each.get("card")) for rank, each in enumerate(facts)]
        await self._in_thread(lambda: self._connect(cards))
        if self.mesh is not None:
            self.mesh.start(self._session.saw_die, self._on_failure)

    def stop(self) -> None:
        """Ends the waiting for others, from any thread: the ranks' verdict has come."""
        self._stopped.set()

    async def close(self) -> None:
        """After the session was closed: this rank's own end is no death to anybody any more."""
        self._stopped.set()
        grace_s = self._engine.config.agreement.grace_s
        if not self._thread.stopped and (self._door is not None or self._thread.in_flight()):
            await asyncio.wait([asyncio.wrap_future(self._thread.submit(self._close_door))], timeout=grace_s)
        self._thread.stop()
        mesh, self.mesh = self.mesh, None
        if mesh is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await mesh.close(min(_GOODBYE_WAIT_S, grace_s))

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await asyncio.wrap_future(self._thread.submit(work))

    # What threads make is kept here by themselves, and so is closed: nobody may wait for them any more.

    def _open_door(self) -> None:
        self._door = Door(self._engine.group.rank, self._engine.node, memory_device(), own_process())

    def _connect(self, cards: Sequence[Card]) -> None:
        assert self._door is not None
        wait_s = min(MEET_WAIT_S, self._engine.config.agreement.timeout_s / 2)
        mesh = self.mesh = connect(self._door, cards, self._stopped.is_set, wait_s)
        self._close_door()
        here = [card.rank for card in cards if card.rank != self._door.card.rank and card.may_share(self._door.card)]
        if (missing := sorted({*here} - {*mesh.connected, *mesh.ended})) and not self._stopped.is_set():
            log.warning(
                "ranks %s of this node did not come within %g s, or are not reached: this one shares nothing with them",
                ", ".join(map(str, missing)),
                wait_s,
            )

    def _close_door(self) -> None:
        if self._door is not None:
            self._door.close()
