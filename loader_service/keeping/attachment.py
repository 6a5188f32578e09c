"""A worker's connection to the resident services of its node: what they keep, and what they are told.

Blocking, called on threads, but for `tell`, which never waits.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import Final, cast

from loader_service import logs
from loader_service.config.schema import ServiceConfig
from loader_service.errors import AttachError, LoaderError
from loader_service.keeping import wire
from loader_service.keeping.index import PROTOCOL, KeptIndex
from loader_service.keeping.view import Kept, KeptBytes, KeptHeaders, KeptRangeReader, KeptView
from loader_service.memory.shared import SharedMemory
from loader_service.planning.plan import RankPlan
from loader_service.reading.file_range import Drop
from loader_service.reading.handles import HandleCache
from loader_service.reading.ranges import RangeReader
from loader_service.report import PolicyOutcome

log = logs.logger("loader_service.attach")

_ANSWER_S: Final = 10.0  # a service that fills says so every second
_LOOK_S: Final = 0.1


class Attachment:
    """To all services of this node, or to none. `connect` again after they have ended."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._kept: list[Kept] = []
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
            self._connect_all(time.monotonic() + self._config.agreement.start_timeout_s)
        except LoaderError as error:
            self._let_go()
            if self._ended or self._config.serve.if_absent == "error":
                raise
            if self.outcome.reason != error.message:  # again and again, with each load
                log.warning("%s; files are read here (serve.if_absent: read)", error.message)
            self.outcome = self._absent(error.message)

    def _connect_all(self, deadline_s: float) -> None:
        number = services = 0
        while number == 0 or number < services:
            services = self._connect(wire.address_of(self._config, number), deadline_s)
            number += 1
        self.headers = KeptHeaders(KeptView(self._kept), self._kept)
        self.outcome = PolicyOutcome(self._config.serve.if_absent, "attached", f"to {self.where}")
        log.info("attached to %s", self.where)

    def _connect(self, address: wire.Address, deadline_s: float) -> int:
        """Returns how many services the node has."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connections.append(connection)
        name = wire.shown(address)
        try:
            connection.connect(address)
            connection.setblocking(False)  # from here on it is asked before, or nobody waits for it
            if not wire.is_trusted(user := wire.peer(connection)[1]):
                raise AttachError(f"what listens on {name} is a process of user {user}: it is not trusted")
            wire.send(connection, {"protocol": PROTOCOL, "process": os.getpid()})
            return self._receive(connection, name, deadline_s)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            advice = "start `loader-service serve` on this node, as this user and in this network namespace"
            raise AttachError(f"no resident service answers on {name} ({reason}): {advice}") from error

    def _receive(self, connection: socket.socket, name: str, deadline_s: float) -> int:
        heard_s = time.monotonic()
        while not self._ended:
            now_s = time.monotonic()
            if not select.select([connection], [], [], _LOOK_S)[0]:
                if now_s - heard_s > _ANSWER_S:
                    raise AttachError(f"the service on {name} has said nothing for {_ANSWER_S:g} s: it is stuck")
                continue
            heard_s = now_s
            message, descriptors = wire.receive(connection)
            if message.get("state") == "ready":
                self._kept.append(_kept_of(message, descriptors))
                return cast(int, message["services"])
            if message.get("state") != "waiting":
                why = message.get("why", "it has ended, or failed: see its log")
                raise AttachError(f"the service on {name} does not attach this worker: {why}")
            self.progress = f"the service on {name} is not ready: {message.get('progress')}"
            if now_s > deadline_s:
                limit_s = self._config.agreement.start_timeout_s
                raise AttachError(f"{self.progress}, after {limit_s:g} s (agreement.start_timeout_s)")
        raise AttachError("the worker's service was closed")

    def view(self) -> KeptView | None:
        """Fresh mappings of what is kept; None while not attached."""
        with self._lock:
            return KeptView(self._kept) if self._kept else None

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


def _kept_of(message: Mapping[str, object], descriptors: list[int]) -> Kept:
    """What a service keeps, of its last message: the index is in the first memory file. Takes the descriptors over."""
    left = list(descriptors)
    memories: list[SharedMemory] = []
    try:
        _check_count(message, left)
        with contextlib.closing(SharedMemory.received(left.pop(0), cast(int, message["index_bytes"]))) as memory:
            index = KeptIndex.decode(os.pread(memory.descriptor, memory.nbytes, 0))
        memories.extend(SharedMemory.received(left.pop(0), nbytes) for nbytes in index.segments)
    except BaseException:
        for memory in memories:
            memory.close()
        raise
    finally:
        for descriptor in left:
            os.close(descriptor)
    return Kept(index, memories)


def _check_count(message: Mapping[str, object], descriptors: list[int]) -> None:
    if len(descriptors) != message["descriptors"]:
        raise AttachError(
            "memory that the service has handed over was lost on the way: raise the limit of open files (ulimit -n)"
        )
