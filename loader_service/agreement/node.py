"""Ranks of one node that can share memory: how they find each other, and how one hands memory to the others.

Ranks exchange cards through the store (with the configuration's records). Those with the same kernel, /dev/shm, network
namespace and user are candidates; which of them truly reach each other is tried: each connects to the lowest one over
an abstract Unix socket. Such a socket has no file, so no crash leaves anything behind; who connects must be the same
user and show the token of its card.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loader_service.agreement.messages import JSON
from loader_service.errors import OUT_OF_FILES, LoaderError, MemoryLimitError

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - nothing is put there
NETWORK: Final = Path("/proc/self/ns/net")
PROCESSES: Final = Path("/proc/self/ns/pid")
BOOT_ID_PATH: Final = "/proc/sys/kernel/random/boot_id"
MEET_WAIT_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.1
WELCOME: Final = b"welcome"
MOST_BYTES: Final = 4096
_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group

Stopped = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Card:
    """What a rank tells of itself. `node` names the kernel (a boot id), `memory` what of it the rank sees (see
    `memory_device`); `token` is a secret of the group; `process` is where to look whether it has ended."""

    rank: int
    node: str
    memory: str
    token: str
    process: str = ""

    def as_json(self) -> JSON:
        return {"node": self.node, "memory": self.memory, "token": self.token, "process": self.process}

    @classmethod
    def from_json(cls, rank: int, told: object) -> Card:
        """Another rank's card; one without a token for what is none: nobody shares with it."""
        facts: Mapping[object, object] = told if isinstance(told, Mapping) else {}
        return cls(rank, *(str(facts.get(name, "")) for name in ("node", "memory", "token", "process")))

    def may_share(self, other: Card) -> bool:
        known = all((self.token, other.token, self.node, self.memory))
        return known and (self.node, self.memory) == (other.node, other.memory)


def node_name() -> str:
    """This host, as ranks compare it: the boot id, which containers on one host share, else the host's name."""
    try:
        with open(BOOT_ID_PATH, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def memory_device() -> str:
    """Which /dev/shm and network namespace this process sees, as which user: equal ones of one kernel can share memory.

    The last two only spare the waiting for those whom no socket reaches. Empty where there is no /dev/shm.
    """
    try:
        return f"{SHARED_MEMORY.stat().st_dev} {NETWORK.stat().st_ino} {os.geteuid()}"
    except OSError:
        return ""


def own_process() -> str:
    """This process, by its number in its process namespace; empty where that cannot be told."""
    try:
        return f"{PROCESSES.stat().st_ino} {os.getpid()}"
    except OSError:
        return ""


def has_ended(process: str) -> bool:
    """Whether the process of a card of this kernel has ended. False where that cannot be known, as in another process
    namespace, or where the number is another's by now."""
    namespace, _, number = process.partition(" ")
    if not namespace or namespace != own_process().partition(" ")[0]:
        return False
    try:
        descriptor = os.pidfd_open(int(number))
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(descriptor)


class Door:
    """This rank's listening socket, open from before its card is shown until the ranks have met: for one `meet`, or for
    one `node_connect.connect`, which needs `own_process` to see ends. Raises LoaderError where no socket can be had."""

    def __init__(self, rank: int, node: str, memory: str, process: str = "") -> None:
        token = secrets.token_hex(16) if memory and hasattr(socket, "SO_PEERCRED") else ""
        self.card = Card(rank, node, memory, token, process)
        self.listening: socket.socket | None = None
        if token:
            with sockets():
                self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                try:
                    self.listening.bind(address_of(token))
                    self.listening.listen(1024)
                except BaseException:
                    self.close()
                    raise

    def meet(self, cards: Sequence[Card], stopped: Stopped, wait_s: float = MEET_WAIT_S) -> NodeGroup:
        """Connects this rank with those that it can share memory with. Blocks, at most `wait_s`.

        A rank that reaches nobody is a group of its own; `stopped` ends the waiting early. The host's list is right
        once all ranks have told whom they reached.
        """
        candidates = [card for card in cards if card.may_share(self.card)] or [self.card]
        host = min(candidates, key=lambda card: card.rank)
        deadline_s = time.monotonic() + wait_s
        if host.rank == self.card.rank:
            others = {card.rank: card.token for card in candidates if card.rank != host.rank}
            return NodeGroup(host.rank, self._welcome(others, deadline_s, stopped))
        connection = self._knock(host, deadline_s, stopped)
        if connection is None:
            return NodeGroup(self.card.rank, {})
        return NodeGroup(host.rank, {host.rank: connection})

    def close(self) -> None:
        if self.listening is not None:
            self.listening.close()

    def _welcome(self, tokens: dict[int, str], deadline_s: float, stopped: Stopped) -> dict[int, socket.socket]:
        found: dict[int, socket.socket] = {}
        visitors: list[socket.socket] = []  # who have not told yet who they are: nobody waits for a single one of them
        try:
            while self.listening is not None and len(found) < len(tokens) and not stopped():
                arrived = readable((self.listening, *visitors), deadline_s)
                if not arrived and time.monotonic() >= deadline_s:
                    break
                for connection in arrived:
                    if connection is self.listening:
                        with sockets():
                            visitors.append(connection.accept()[0])
                        continue
                    visitors.remove(connection)
                    rank = visitor_of(connection, tokens)
                    if rank is None or rank in found:
                        connection.close()
                        continue
                    found[rank] = connection
                    with contextlib.suppress(OSError):
                        connection.send(WELCOME)
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
        finally:
            for connection in visitors:
                connection.close()
        return found

    def _knock(self, host: Card, deadline_s: float, stopped: Stopped) -> socket.socket | None:
        with sockets():
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(address_of(host.token))
            if peer(connection)[1] == os.geteuid():
                connection.send(knock(self.card))
                while not stopped() and time.monotonic() < deadline_s:
                    if readable((connection,), deadline_s):
                        if connection.recv(MOST_BYTES) == WELCOME:
                            return connection
                        break
        except OSError:  # another network namespace: nobody listens under that name here
            pass
        connection.close()
        return None


class NodeGroup:
    """The ranks that this one shares memory with, by way of the lowest, the `host`. Owns the connections."""

    def __init__(self, host: int, connections: dict[int, socket.socket]) -> None:
        self.host = host
        self._connections = connections

    def hand_over(self, descriptor: int, ranks: Sequence[int]) -> None:
        """The host gives its group a descriptor. Raises LoaderError for a rank that said it is here and is not."""
        for rank in ranks:
            connection = self._connections.get(rank)
            try:
                if connection is None:
                    raise ConnectionError("it is not connected")
                socket.send_fds(connection, [b"memory"], [descriptor])
            except OSError as error:
                raise LoaderError(f"shared memory could not be handed to rank {rank} on this node: {error}") from error

    def receive(self, stopped: Stopped) -> int | None:
        """The descriptor that the host hands over; None if `stopped` before. Blocks. LoaderError if it is gone,
        MemoryLimitError if the descriptor was lost on the way."""
        (connection,) = self._connections.values()
        while not stopped():
            if not readable((connection,), time.monotonic() + _LOOK_EVERY_S):
                continue
            try:
                data, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 1)
            except OSError as error:
                raise self._host_is_gone() from error
            if not data:
                raise self._host_is_gone()
            if descriptors:
                # It came inheritable (`recv_fds` drops the flag against that): programs started here would keep it.
                os.set_inheritable(descriptors[0], False)
                return descriptors[0]
            raise lost_on_the_way(self.host)
        return None

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _host_is_gone(self) -> LoaderError:
        return LoaderError(f"rank {self.host} has left before it handed over the memory that this node shares")


def lost_on_the_way(host: int) -> MemoryLimitError:
    """What a rank raises whom `host` has handed memory, and for which the kernel found no descriptor here."""
    return MemoryLimitError(
        f"the memory that rank {host} hands to the ranks of this node did not arrive, since this process may open no "
        f"more files: {OUT_OF_FILES[errno.EMFILE]}",
        errno=errno.EMFILE,
    )


@contextlib.contextmanager
def sockets() -> Iterator[None]:
    """Where sockets are made: what the system refuses is told in words."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise LoaderError(
            f"no socket can be had to meet the ranks of this node ({why}): raise the limit of open files (ulimit -n)",
            errno=error.errno,
        ) from error


def address_of(token: str) -> str:
    """Where the door of that token is. Every user of the machine can read such names; the token they cannot."""
    return f"\0loader-service-{hashlib.sha256(token.encode()).hexdigest()[:32]}"


def readable(connections: Sequence[socket.socket], deadline_s: float) -> list[socket.socket]:
    """Those that can be read from, after waiting for one a little, at most until the deadline."""
    wait_s = min(_LOOK_EVERY_S, max(0.0, deadline_s - time.monotonic()))
    poll = select.poll()
    by_number = {connection.fileno(): connection for connection in connections}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(wait_s * 1000)]


def knock(card: Card) -> bytes:
    """What a rank says at another's door."""
    return json.dumps({"rank": card.rank, "token": card.token}).encode()


def visitor_of(connection: socket.socket, tokens: Mapping[int, str]) -> int | None:
    """Which rank has told that it is here; None for anybody else."""
    try:
        if peer(connection)[1] != os.geteuid():
            return None
        told = json.loads(connection.recv(MOST_BYTES, socket.MSG_DONTWAIT))
        rank, token = told["rank"], told["token"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if type(rank) is not int or rank not in tokens:
        return None
    return rank if secrets.compare_digest(tokens[rank].encode(), str(token).encode()) else None


def peer(connection: socket.socket) -> tuple[int, int]:
    """(process, user) at the other end; the process is 0 where its number means nothing here."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(told)
    return process, user
