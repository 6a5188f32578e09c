"""A worker's connection to the resident services of its node: what they keep, and what they are told.

Blocking, called on threads, but for `tell`, which never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from loader_service import logs
from loader_service.agreement.node import peer
from loader_service.config.schema import ServiceConfig
from loader_service.errors import AttachError, LoaderError, MemoryLimitError
from loader_service.keeping import wire
from loader_service.keeping.index import PROTOCOL, KeptIndex
from loader_service.keeping.view import HandedOver, KeptBytes, KeptHeaders, KeptRangeReader, KeptView
from loader_service.memory.shared import SharedMemory
from loader_service.planning.plan import RankPlan
from loader_service.reading.file_range import Drop
from loader_service.reading.handles import HandleCache
from loader_service.reading.ranges import RangeReader
from loader_service.report import PolicyOutcome

log = logs.logger("loader_service.attach")

_ANSWER_S: Final = 10.0  # a service that fills says so every second
_LOOK_S: Final = 0.1
_STUCK: Final = "it is stuck; start it anew"
_WATCH_EVERY_S: Final = 1.0


class Attachment:
    """To all services of this node, or to none. `connect` again after they have ended."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._kept: list[HandedOver] = []
        self._ended = False
        self.headers: KeptHeaders | None = None
        self.progress = ""  # of `connect`, in words
        self.outcome = self._absent("nothing was loaded yet")

    def _absent(self, why: str) -> PolicyOutcome:
        return PolicyOutcome(self._config.serve.if_absent, "read", why)

    @property
    def where(self) -> str:
        """The services, in words."""
        return f"the service on {wire.shown(wire.address_of(self._config, 0))}"

    @property
    def is_attached(self) -> bool:
        """Whether all services are there, now."""
        return bool(self._connections) and all(map(_is_open, self._connections))

    def connect(self) -> None:
        """Attaches, once the services have everything, for which it waits at most `agreement.start_timeout_s`.

        Raises AttachError where none answers and `serve.if_absent` is error; otherwise files are read, with a warning.
        """
        self._let_go()
        try:
            self._connect_all()
        except LoaderError as error:
            self._do_without(error)

    def _do_without(self, error: LoaderError) -> None:
        """Goes on without the services; raises where that is not wanted."""
        self._let_go()
        if self._ended or self._config.serve.if_absent == "error":
            raise error
        if self.outcome.reason != error.message:  # again and again, with each load
            log.warning("%s; files are read here (serve.if_absent: read)", error.message)
        self.outcome = self._absent(error.message)

    def _connect_all(self) -> None:
        began_s, number, services = time.monotonic(), 0, 1
        while number < services:
            services = self._connect(wire.address_of(self._config, number), began_s)
            number += 1
        self.headers = KeptHeaders(KeptView(self._kept), self._kept)
        self.outcome = PolicyOutcome(self._config.serve.if_absent, "attached", f"to {self.where}")
        log.info("attached to %s", self.where)

    def _connect(self, address: wire.Address, began_s: float) -> int:
        """Returns how many services the node has."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connections.append(connection)
        name = wire.shown(address)
        try:
            self._reach(connection, address)
            if not wire.is_trusted(user := peer(connection)[1]):
                advice = "start the service as this user, or give both another `serve.socket`"
                raise AttachError(f"what listens on {name} is a process of user {user}, not trusted: {advice}")
            wire.send(connection, {"protocol": PROTOCOL, "process": os.getpid()})
            return self._receive(connection, name, began_s)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            advice = "start `loader-service serve` on this node, as this user and in this network namespace"
            raise AttachError(f"no resident service answers on {name} ({reason}): {advice}") from error

    def _reach(self, connection: socket.socket, address: wire.Address) -> None:
        """Connects. A service that is stuck lets so many wait, and then nobody any more."""
        connection.setblocking(False)
        until_s = time.monotonic() + _ANSWER_S
        while True:
            try:
                connection.connect(address)
            except BlockingIOError:
                if time.monotonic() > until_s or self._ended:
                    why = f"has taken nobody for {_ANSWER_S:g} s: {_STUCK}"
                    raise AttachError(f"the service on {wire.shown(address)} {why}") from None
                time.sleep(_LOOK_S)
            else:
                return

    def _receive(self, connection: socket.socket, name: str, began_s: float) -> int:
        heard_s = time.monotonic()
        arriving = select.poll()
        arriving.register(connection, select.POLLIN)
        says = "nothing yet"
        while not self._ended:
            now_s = time.monotonic()
            waited_s = now_s - began_s
            # Not the same twice: that the service is stuck is found here, and not by whoever watches this thread.
            self.progress = f"waiting for the service on {name} for {waited_s:.1f} s, which says: {says}"
            if not arriving.poll(1000 * _LOOK_S):
                if now_s - heard_s > _ANSWER_S:
                    raise AttachError(f"the service on {name} has said nothing for {_ANSWER_S:g} s: {_STUCK}")
                continue
            heard_s = now_s
            message, descriptors = wire.receive(connection)
            if message is not None and message.get("state") == "ready":
                services, kept = _handed_over(message, descriptors)
                self._kept.append(kept)
                return services
            if message is None or message.get("state") != "waiting":
                why = (message or {}).get("why", "it has ended, or failed: see its log")
                raise AttachError(f"the service on {name} does not attach this worker: {why}")
            says = str(message.get("progress"))
            if waited_s > (limit_s := self._config.agreement.start_timeout_s):
                text = f"the service on {name} is not ready: {says}, after {limit_s:g} s (agreement.start_timeout_s)"
                raise AttachError(text)
        raise AttachError("the worker's service was closed")

    def view(self) -> KeptView | None:
        """Fresh mappings of what is kept; None while not attached. Where there is no room for them, it is as if no
        service were there."""
        try:
            with self._lock:
                return KeptView(self._kept) if self._kept else None
        except MemoryLimitError as error:
            self._do_without(error)
            return None

    def bytes_of(self, plan: RankPlan) -> KeptBytes | None:
        """What is kept of a plan; None while not attached."""
        view = self.view()
        return KeptBytes(view, plan, self.outcome.requested, self.where) if view is not None else None

    def range_reader(self, handles: HandleCache, *, drop: Drop) -> RangeReader | None:
        """A reader that copies what is kept, and reads the rest; None while not attached."""
        view, reads = self.view(), self._config.reads
        if view is None:
            return None
        return KeptRangeReader(view, handles, access=reads.access, retries=reads.retries, drop=drop, by_tensor=True)

    def tell(self, message: Mapping[str, object]) -> None:
        """Tells the first service of a load here. Never waits: what it does not take at once is lost."""
        with contextlib.suppress(IndexError):
            wire.send(self._connections[0], message)

    def close(self) -> None:
        """Ends the connections, and a `connect` that waits. Mappings stay."""
        self._ended = True
        self._let_go()

    async def watch(self, ended: Callable[[], object]) -> None:
        """Calls `ended` once a service has: from then on its memory is only in the way of one that starts anew."""
        while self.is_attached:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(_WATCH_EVERY_S)
        ended()

    def let_go_of_ended(self) -> None:
        """On the thread that also calls `connect`."""
        if not self.is_attached:
            self._let_go()

    def _let_go(self) -> None:
        self.headers = None
        with self._lock:
            connections, self._connections = self._connections, []
            kept, self._kept = self._kept, []
        for connection in connections:
            connection.close()
        for each in kept:
            each.close()


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _handed_over(message: Mapping[str, object], descriptors: list[int]) -> tuple[int, HandedOver]:
    """How many services the node has, and what this one keeps, of its last message: the index is in the first memory
    file. Takes the descriptors over."""
    left = list(descriptors)
    memories: list[SharedMemory] = []
    try:
        services, index_bytes = _announced(message, len(left))
        with contextlib.closing(SharedMemory.received(left.pop(0), index_bytes)) as memory:
            index = KeptIndex.decode(os.pread(memory.descriptor, memory.nbytes, 0), segments=len(left))
        memories.extend(SharedMemory.received(left.pop(0), nbytes) for nbytes in index.segments)
    except BaseException:
        for memory in memories:
            memory.close()
        raise
    finally:
        for descriptor in left:
            os.close(descriptor)
    return services, HandedOver(index, memories)


def _announced(message: Mapping[str, object], descriptors: int) -> tuple[int, int]:
    """(how many services the node has, size of the index), if all descriptors have come."""
    services, index_bytes, count = (message.get(key) for key in ("services", "index_bytes", "descriptors"))
    if not (isinstance(services, int) and isinstance(index_bytes, int) and isinstance(count, int)):
        raise AttachError("what the service told of itself cannot be read: is it one of this loader's?")
    if not descriptors or descriptors != count:
        raise AttachError(
            "memory that the service has handed over was lost on the way: raise the limit of open files (ulimit -n)"
        )
    return services, index_bytes
