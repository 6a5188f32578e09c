"""Ranks of one node that can share memory: what each tells of itself, and the door at which the others knock.

Ranks exchange cards through the store (with the configuration's records). Those with the same kernel, /dev/shm, network
namespace and user are candidates; which of them truly reach each other is tried, over abstract Unix sockets (see
`node_connect`). Such a socket has no file, so no crash leaves anything behind; who connects must be the same user and
show the token of its card.
"""

from __future__ import annotations

import contextlib
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
from loader_service.errors import LoaderError

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
    """This rank's listening socket, open from before its card is shown until the ranks have met, in
    `node_connect.connect`. Raises LoaderError where no socket can be had."""

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

    def close(self) -> None:
        if self.listening is not None:
            self.listening.close()


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
