"""A node's ranks, each connected with every other: small messages, descriptors, and whose process has ended.

Abstract sockets, which leave no file. A process that has ended is seen by its descriptor, also where a child of it
holds its connections open; where there is none, by the end of its connection. Who has said good-bye before has left.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, TypeAlias

from loader_service import logs
from loader_service.errors import LoaderError, name_of, text_of

_log = logs.logger("loader_service.agreement")

GOODBYE: Final = b"\0"  # where else the number of a channel stands
MAX_MESSAGE_BYTES: Final = 4096
_MESSAGES_A_TURN: Final = 64  # of one connection, before others on the loop have theirs
_DESCRIPTOR_BYTES: Final = array.array("i").itemsize

OnMessage: TypeAlias = Callable[[int, bytes, int | None], None]
"""(rank, message, descriptor): a descriptor that came with it belongs to who is called. None also for one that was lost
on the way, because this process may open no more."""
OnError: TypeAlias = Callable[[LoaderError], None]


class Peer:
    """The connection with one rank, and a descriptor of its process where there is one. Owns both."""

    def __init__(self, connection: socket.socket, process: int | None) -> None:
        self.connection = connection
        self.process = process
        self.over = False  # it sends nothing any more
        self.outbox: deque[tuple[bytes, int | None]] = deque()

    def receive(self) -> tuple[bytes, int | None] | None:
        """A message and what came with it; (b"", None) at the end, None if nothing is there now."""
        space = socket.CMSG_SPACE(_DESCRIPTOR_BYTES)
        while True:
            try:
                data, about, flags, _ = self.connection.recvmsg(MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return None
            except ConnectionResetError:  # it has left something unread; what it said before is still there
                continue
            except OSError as error:
                _log.debug("the connection with another rank broke: %s", error)
                return b"", None
            descriptors = list(_descriptors(about))
            if flags & socket.MSG_TRUNC:
                _log.warning("a message of another rank is too long: it is dropped")
                _close(descriptors)
                continue
            if flags & socket.MSG_CTRUNC:  # the kernel drops what it finds no number for in this process
                _log.warning("a descriptor from another rank was lost: raise the limit of open files (ulimit -n)")
                _close(descriptors)
                return data, None
            _close(descriptors[1:])
            return data, descriptors[0] if descriptors else None

    def send(self, data: bytes, descriptor: int | None) -> bool:
        """False if there is no room now."""
        about = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        try:
            self.connection.sendmsg([data], about, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self.connection.close()
        process, self.process = self.process, None
        _close([number for _, number in self.outbox] + [process])
        self.outbox.clear()


class Mesh:
    """This rank's connections with the others of its node. After `start` everything happens on that loop.

    Messages of one rank to another keep their order. They travel on channels, numbers from 1 to 255; what comes on one
    before anybody listens there is kept. Nothing here blocks or waits for another rank, except `close`, bounded.
    `ended`: ranks whose process had ended before they were connected.
    """

    def __init__(self, rank: int, peers: dict[int, Peer], ended: Collection[int] = ()) -> None:
        self.rank = rank
        self.connected = tuple(sorted(peers))
        self.ended = tuple(sorted(ended))
        self._peers = dict(peers)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_death: Callable[[int], None] = _say_nothing
        self._on_error: OnError = _say_nothing
        self._closing = False
        self._listeners: dict[int, OnMessage] = {}
        self._kept: dict[int, list[tuple[int, bytes, int | None]]] = {}
        self._sent = asyncio.Event()

    def start(self, on_death: Callable[[int], None], on_error: OnError | None = None) -> None:
        """Begins to receive. `on_death(rank)` is called once for each rank whose process ends without a good-bye, or
        has ended so already; `on_error` with what a listener raises."""
        self._loop = loop = asyncio.get_running_loop()
        self._on_death = on_death
        self._on_error = on_error or _say_nothing
        for rank in self.ended:
            on_death(rank)
        for rank, peer in self._peers.items():
            loop.add_reader(peer.connection.fileno(), self._readable, rank)
            if peer.process is not None:
                loop.add_reader(peer.process, self._process_ended, rank)

    def listen(self, channel: int, on_message: OnMessage) -> None:
        """From now on messages of this channel go to `on_message`; those that came before do so now."""
        self._listeners[channel] = on_message
        for rank, data, descriptor in self._kept.pop(channel, ()):
            self._tell(on_message, rank, data, descriptor)

    def ignore(self, channel: int) -> None:
        """Drops what comes on this channel from now on."""
        self.listen(channel, _drop)

    def send(self, rank: int, channel: int, data: bytes, descriptor: int | None = None) -> bool:
        """Sends, or queues where there is no room now. False if `rank` has left, has ended, or was never connected.

        At most `MAX_MESSAGE_BYTES` - 1. The descriptor stays the caller's, who may close it at once.
        """
        if not 0 < channel < 256 or len(data) >= MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes on channel {channel}")
        peer = self._peers.get(rank)
        if peer is None or peer.over:
            return False
        return self._post(rank, peer, bytes((channel,)) + data, descriptor)

    async def close(self, within_s: float) -> None:
        """Says good-bye behind what is still queued, and closes; waits at most `within_s` for ranks that have no room.

        To be called after the session was closed: this rank's later end is then no death to anybody.
        """
        self._closing, self._on_death, self._on_error = True, _say_nothing, _say_nothing
        for rank, peer in list(self._peers.items()):
            self._post(rank, peer, GOODBYE, None)
        try:
            async with asyncio.timeout(within_s):
                while any(peer.outbox for peer in self._peers.values()):
                    self._sent.clear()
                    await self._sent.wait()
        except TimeoutError:
            _log.warning("ranks of this node did not hear this one's good-bye: they do not receive")
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Says good-bye where there is room, and closes, at once. On the loop, if `start` was called."""
        for peer in self._peers.values():
            if not peer.outbox:
                with contextlib.suppress(OSError):
                    peer.send(GOODBYE, None)
            self._unwatch(peer)
            peer.close()
        self._peers.clear()
        for kept in self._kept.values():
            _close([descriptor for _, _, descriptor in kept])
        self._kept.clear()

    # -- sending

    def _post(self, rank: int, peer: Peer, data: bytes, descriptor: int | None) -> bool:
        try:
            if not peer.outbox and peer.send(data, descriptor):
                return True
        except ConnectionError:
            return False
        peer.outbox.append((data, None if descriptor is None else os.dup(descriptor)))
        if len(peer.outbox) == 1:
            loop = self._loop or asyncio.get_running_loop()
            self._loop = loop
            loop.add_writer(peer.connection.fileno(), self._writable, rank)
        return True

    def _writable(self, rank: int) -> None:
        peer = self._peers.get(rank)
        while peer is not None and peer.outbox:
            data, descriptor = peer.outbox[0]
            try:
                if not peer.send(data, descriptor):
                    return
            except ConnectionError:
                _close([number for _, number in peer.outbox])
                peer.outbox.clear()
                break
            peer.outbox.popleft()
            _close([descriptor])
        if peer is not None and self._loop is not None:
            self._loop.remove_writer(peer.connection.fileno())
        self._sent.set()

    # -- receiving

    def _readable(self, rank: int) -> None:
        self._drain(rank, _MESSAGES_A_TURN)

    def _drain(self, rank: int, most: int | None = None) -> None:
        """Takes in what has come, at most so many messages."""
        peer, count = self._peers.get(rank), 0
        while peer is not None and not peer.over and (most is None or count < most):
            message = peer.receive()
            if message is None:
                return
            data, descriptor = message
            count += 1
            if not data:
                self._end_of_file(rank, peer)
            elif data == GOODBYE:
                self._forget(rank)
            else:
                self._take(rank, data[0], data[1:], descriptor)
            peer = self._peers.get(rank)  # it may have left, or who was called has closed this mesh

    def _take(self, rank: int, channel: int, data: bytes, descriptor: int | None) -> None:
        on_message = _drop if self._closing else self._listeners.get(channel)
        if on_message is None:
            self._kept.setdefault(channel, []).append((rank, data, descriptor))
        else:
            self._tell(on_message, rank, data, descriptor)

    def _tell(self, on_message: OnMessage, rank: int, data: bytes, descriptor: int | None) -> None:
        try:
            on_message(rank, data, descriptor)
        except Exception as error:  # noqa: BLE001 - what is broken there must not hide who dies
            _log.exception("rank %d: a message of rank %d could not be handled", self.rank, rank)
            failure = LoaderError(f"a message of rank {rank} could not be handled: {name_of(error)}: {text_of(error)}")
            failure.__cause__ = error
            self._on_error(failure)

    def _end_of_file(self, rank: int, peer: Peer) -> None:
        """Its end is near, or it started another program: its process tells."""
        peer.over = True
        assert self._loop is not None
        self._loop.remove_reader(peer.connection.fileno())
        if peer.process is None:
            self._forget(rank)
            self._on_death(rank)

    def _process_ended(self, rank: int) -> None:
        self._drain(rank)
        if rank in self._peers:  # it has said no good-bye
            self._forget(rank)
            self._on_death(rank)

    # -- ending

    def _forget(self, rank: int) -> None:
        peer = self._peers.pop(rank)
        self._unwatch(peer)
        peer.close()
        self._sent.set()

    def _unwatch(self, peer: Peer) -> None:
        if self._loop is None:
            return
        if peer.process is not None:
            self._loop.remove_reader(peer.process)
        self._loop.remove_reader(peer.connection.fileno())
        self._loop.remove_writer(peer.connection.fileno())


def _descriptors(about: Sequence[tuple[int, int, bytes]]) -> Iterator[int]:
    for level, kind, data in about:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            yield from numbers


def _close(descriptors: Sequence[int | None]) -> None:
    for descriptor in descriptors:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _drop(rank: int, data: bytes, descriptor: int | None) -> None:  # noqa: ARG001
    _close([descriptor])


def _say_nothing(_: object) -> None:
    pass
