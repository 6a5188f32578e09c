"""How the ranks of a node get a mesh: each knocks at the doors of the lower ones and opens to the higher ones.

One loop for all of them, so that nobody waits for a single one. Three words: the visitor says who it is, is welcomed,
and says that it has heard so. Who gives up says good-bye, and is then no rank whose connection broke.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Collection, Sequence
from typing import Final

from loader_service.agreement.node import (
    MEET_WAIT_S,
    MOST_BYTES,
    WELCOME,
    Card,
    Door,
    Stopped,
    address_of,
    has_ended,
    knock,
    peer,
    readable,
    sockets,
    visitor_of,
)
from loader_service.agreement.node_mesh import GOODBYE, Mesh, Peer

_HERE: Final = b"here"
_SO_PEERPIDFD: Final = 77  # Linux 6.5; Python does not name it
_DESCRIPTOR: Final = struct.Struct("i")
_ENDING_S: Final = 0.1  # a process that ends closes its files a moment before it has ended


def connect(door: Door, cards: Sequence[Card], stopped: Stopped, wait_s: float = MEET_WAIT_S) -> Mesh:
    """Connects this rank with each one that it can share memory with. Blocks, at most `wait_s`, or until `stopped`.

    Who did not come in time is not in `Mesh.connected`. Two ranks are connected if both say so: exchange what each
    says, and `groups` then tells, alike on every rank, who can act together. Raises LoaderError where the system gives
    this rank no socket: it has none for files either.
    """
    connecting = _Connecting(door, cards)
    try:
        return Mesh(door.card.rank, connecting.run(time.monotonic() + wait_s, stopped), connecting.ended)
    except BaseException:
        connecting.drop()
        raise
    finally:
        connecting.close()


def groups(connected: Sequence[Collection[int]]) -> list[tuple[int, ...]]:
    """The ranks, in groups of which all are connected with each other. `connected[rank]` is what that rank says."""
    found: list[list[int]] = []
    for rank in range(len(connected)):
        for group in found:
            if all(rank in connected[other] and other in connected[rank] for other in group):
                group.append(rank)
                break
        else:
            found.append([rank])
    return [tuple(group) for group in found]


class _Visit:
    """A connection that is not yet one of the mesh. `rank` is at the other end; None: it has not told yet."""

    def __init__(self, connection: socket.socket, rank: int | None = None) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.rank = rank
        self.process: int | None = None
        self.welcomes = False  # this end is the one that welcomes

    def watch(self) -> None:
        """Before anything is heard that tells that the process lives: its number cannot be another's then."""
        self.process = process_of(self.connection)

    def say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(word, socket.MSG_NOSIGNAL)

    def hear(self) -> bytes:
        """Nothing (b"") at the end, which may come before the last words if something lay there unread."""
        with contextlib.suppress(OSError):
            try:
                return self.connection.recv(MOST_BYTES)
            except ConnectionResetError:
                return self.connection.recv(MOST_BYTES)
        return b""

    def peer(self) -> Peer:
        return Peer(self.connection, self.process)

    def close(self) -> None:
        self.connection.close()
        if self.process is not None:
            os.close(self.process)


class _Connecting:
    def __init__(self, door: Door, cards: Sequence[Card]) -> None:
        self._door = door
        others = [card for card in cards if card.rank != door.card.rank and card.may_share(door.card)]
        self._cards = {card.rank: card for card in others}
        self._missing = set(self._cards)
        self._visits: dict[socket.socket, _Visit] = {}
        self._found: dict[int, Peer] = {}
        self.ended: set[int] = set()  # ranks whose process has ended before they came

    def run(self, deadline_s: float, stopped: Stopped) -> dict[int, Peer]:
        listening, own = self._door.listening, self._door.card
        if listening is None:
            return {}
        for rank, card in self._cards.items():
            if rank < own.rank:
                self._knock(card)
        while self._missing and not stopped() and time.monotonic() < deadline_s:
            arrived = readable((listening, *self._visits), deadline_s)
            for connection in arrived:
                if connection is listening:
                    with sockets():
                        visitor = listening.accept()[0]
                    self._visits[visitor] = _Visit(visitor)
                else:
                    self._hear(self._visits.pop(connection))
            if not arrived:
                for rank in list(self._missing):
                    self._note_end(rank)
        return self._found

    def drop(self) -> None:
        """Lets go of whom it has found."""
        for found in self._found.values():
            found.close()

    def close(self) -> None:
        """Tells those that are still awaited."""
        for visit in self._visits.values():
            visit.say(GOODBYE)
            visit.close()
        self._visits.clear()

    def _knock(self, card: Card) -> None:
        with sockets():
            visit = _Visit(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), card.rank)
        try:
            visit.connection.connect(address_of(card.token))
            if peer(visit.connection)[1] != os.geteuid():
                raise ConnectionRefusedError
            visit.watch()
            visit.connection.send(knock(self._door.card), socket.MSG_NOSIGNAL)
        except OSError:  # it has gone, or is in another network namespace: nobody listens under that name here
            visit.close()
            self._missing.discard(card.rank)
            self._note_end(card.rank)
            return
        self._visits[visit.connection] = visit

    def _note_end(self, rank: int) -> None:
        if has_ended(self._cards[rank].process):
            self._missing.discard(rank)
            self.ended.add(rank)
            for visit in [
                visit for visit in self._visits.values() if visit.rank == rank
            ]:  # a child of it holds it open
                del self._visits[visit.connection]
                visit.close()

    def _hear(self, visit: _Visit) -> None:
        """Takes a visit one word further."""
        if visit.rank is None:
            self._open(visit)
            return
        heard = visit.hear()
        if heard == (_HERE if visit.welcomes else WELCOME):
            if not visit.welcomes:
                visit.say(_HERE)
        elif heard or visit.process is None or not _ends(visit.process):
            self._missing.discard(visit.rank)  # it has given up
            visit.close()
            return
        self._missing.discard(visit.rank)  # it is connected, or its end will be seen
        self._found[visit.rank] = visit.peer()

    def _open(self, visit: _Visit) -> None:
        tokens = {rank: card.token for rank, card in self._cards.items() if rank > self._door.card.rank}
        known = {other.rank for other in self._visits.values()} | self._found.keys()
        rank = visitor_of(visit.connection, tokens)
        if rank is None or rank in known:
            visit.close()
            return
        visit.rank, visit.welcomes = rank, True
        visit.watch()
        visit.say(WELCOME)
        self._visits[visit.connection] = visit


def process_of(connection: socket.socket) -> int | None:
    """A descriptor that becomes readable when the process at the other end has ended; None where none can be had."""
    try:
        told = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, _DESCRIPTOR.size)
        descriptor: int = _DESCRIPTOR.unpack(told)[0]
    except OSError:
        number = peer(connection)[0]
        try:
            return os.pidfd_open(number) if number else None
        except OSError:
            return None
    return descriptor


def _ends(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(_ENDING_S * 1000))
