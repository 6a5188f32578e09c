"""Where workers attach to a resident service: it hands over what it keeps, and hears of their loads.

Runs on the service's loop. A worker that comes early is told once a second how far the service is.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from loader_service import logs
from loader_service.agreement.node import peer
from loader_service.keeping import wire
from loader_service.keeping.index import PROTOCOL
from loader_service.keeping.status import WorkerLoad
from loader_service.memory.shared import SharedMemory

log = logs.logger("loader_service.serve")

_TELL_EVERY_S: Final = 1.0
_HELLO_S: Final = 10.0
_MOST_LOADS: Final = 1000  # whose newest news is kept, each of at most a packet
_LOST: Final = "LostWorker"


class Reception:
    """Of one service. `services` on this node have one each. `progress` says how far the service is, in words."""

    def __init__(self, listening: socket.socket, services: int, progress: Callable[[], str]) -> None:
        """Takes over a listening socket."""
        self.attached_total = self.failed_total = 0
        self._services = services
        self._progress = progress
        self._loads: dict[tuple[str, int], WorkerLoad] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._attached = 0
        self._refused: set[int] = set()  # users
        self._index: SharedMemory | None = None
        self._listening = listening
        self._ready: asyncio.Future[tuple[Mapping[str, object], list[int]]] = asyncio.get_running_loop().create_future()
        self._accepting = asyncio.ensure_future(self._accept())

    @property
    def attached(self) -> int:
        """How many workers are attached now."""
        return self._attached

    @property
    def loads(self) -> tuple[WorkerLoad, ...]:
        """The newest load of each name on each rank."""
        return tuple(self._loads.values())

    def open(self, index: SharedMemory, segments: Sequence[SharedMemory]) -> None:
        """Everything is there: whoever is or comes gets it. Takes the index over, and closes it."""
        self._index = index
        descriptors = [index.descriptor, *(segment.descriptor for segment in segments)]
        message = {
            "state": "ready",
            "services": self._services,
            "index_bytes": index.nbytes,
            "descriptors": len(descriptors),
        }
        self._ready.set_result((message, descriptors))

    async def close(self) -> None:
        """Attaches nobody any more, and ends all connections: that is how workers learn of it."""
        tasks = (self._accepting, *self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._listening.close()
        if self._index is not None:
            self._index.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except OSError as error:  # no descriptor is free; who waits is taken later
                log.warning("a worker cannot be attached now: %s", error)
                await asyncio.sleep(_TELL_EVERY_S)
                continue
            connection.setblocking(False)
            task = asyncio.ensure_future(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with contextlib.closing(connection), contextlib.suppress(OSError):
            process, user = peer(connection)
            if not wire.is_trusted(user):
                if user not in self._refused:  # whoever may not attach can try without end
                    self._refused.add(user)
                    log.warning("process %d of user %d may not attach, nor may others of that user", process, user)
                return
            async with asyncio.timeout(_HELLO_S):
                hello = await self._hear(connection)
            if hello is None:
                return
            if hello.get("protocol") != PROTOCOL:
                why = f"it speaks version {hello.get('protocol')} of the protocol, the service {PROTOCOL}: install the "
                wire.send(connection, {"state": "refused", "why": why + "same version of the loader for both"})
                return
            if await self._hand_over(connection):
                await self._listen_to(connection, process)

    async def _hand_over(self, connection: socket.socket) -> bool:
        """Whether the worker has got what is kept, once that is there."""
        while not self._ready.done():
            if not wire.send(connection, {"state": "waiting", "progress": self._progress()}):
                return False
            await asyncio.wait((self._ready,), timeout=_TELL_EVERY_S)
        message, descriptors = self._ready.result()
        return wire.send(connection, message, descriptors)

    async def _listen_to(self, connection: socket.socket, process: int) -> None:
        self.attached_total += 1
        self._attached += 1
        log.info("worker attached: process %d", process)
        running: set[tuple[str, int]] = set()
        try:
            while (message := await self._hear(connection)) is not None:
                self._note(message, running)
        finally:
            self._attached -= 1
            log.info("worker gone: process %d", process)
            self.failed_total += len(running)
            lost = {"error": _LOST, "message": f"process {process} has gone while it loaded"}
            for key in running & self._loads.keys():  # some may have given way to newer ones
                self._loads[key] = replace(self._loads[key], failure=lost)

    async def _hear(self, connection: socket.socket) -> dict[str, object] | None:
        """The next message; None at the end."""
        return wire.decode(await asyncio.get_running_loop().sock_recv(connection, wire.MOST_BYTES))

    def _note(self, message: Mapping[str, object], running: set[tuple[str, int]]) -> None:
        """Keeps what a worker tells of a load; `running` are those of the same worker that have not ended."""
        try:
            load = WorkerLoad.from_json(message)
        except ValueError as error:  # what makes no sense says nothing
            log.debug("a worker has told %s", error)
            return
        key = load.load, load.rank
        self._loads.pop(key, None)
        self._loads[key] = load
        if len(self._loads) > _MOST_LOADS:
            del self._loads[next(iter(self._loads))]  # the one that was told of longest ago
        if load.failure is not None:
            self.failed_total += 1
        (running.add if load.report is None and load.failure is None else running.discard)(key)
