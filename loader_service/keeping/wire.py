"""How a service and its workers find and hear each other: a Unix socket of one user, on one node.

A message is a JSON object in one packet. What is large, memory and the index of it, travels as descriptors of memory
files. By default the socket is abstract: it has no file, so that no crash leaves one behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from loader_service.config.schema import ServiceConfig
from loader_service.errors import ConfigError

MOST_BYTES: Final = 64 << 10
MOST_DESCRIPTORS: Final = 250  # the kernel takes 253 with one packet
_BACKLOG: Final = 1024
_LOCK_WAIT_S: Final = 2.0
_LOOK_EVERY_S: Final = 0.01
_INT: Final = struct.Struct("i")
_MSG_CMSG_CLOEXEC: Final = 0x40000000  # Python does not name it: a program that is started meanwhile gets none of them

Address = str | bytes


def address_of(config: ServiceConfig, number: int) -> Address:
    """Where the service `number` of a node is found: a path, or an abstract name (bytes that begin with zero)."""
    name = config.serve.socket
    if name == "auto":
        name = f"@loader-service-{os.geteuid()}-{_digest(config)}"
    if number:
        name += f".{number}"
    return b"\0" + name[1:].encode() if name.startswith("@") else name


def shown(address: Address) -> str:
    """An address as it is written in the YAML file."""
    return address if isinstance(address, str) else "@" + address[1:].decode()


def _digest(config: ServiceConfig) -> str:
    """Of what is read: the same for a service and its workers, whose configurations may differ in how they read."""
    paths = [config.checkpoint_of(load).path for load in config.loads]
    return hashlib.sha256(json.dumps(sorted(map(str, paths))).encode()).hexdigest()[:16]


def listen(address: Address) -> socket.socket:
    """A listening socket. A file at its path is the owner's alone; one that a killed service left there is replaced.

    Raises ConfigError if the address cannot be had.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.setblocking(False)
    try:
        if isinstance(address, bytes):
            listening.bind(address)
            listening.listen(_BACKLOG)
        else:
            _listen_at_file(listening, address)
    except OSError as error:
        listening.close()
        advice = "give another `serve.socket`, or end the service that has it"
        reason = os.strerror(error.errno or 0)
        if error.errno == errno.EADDRINUSE:
            is_other = isinstance(address, str) and not Path(address).is_socket()
            reason = "something else lies there" if is_other else "another service listens there"
        raise ConfigError(f"serve.socket: {shown(address)} cannot be had: {reason}; {advice}") from error
    except BaseException:
        listening.close()
        raise
    return listening


def _listen_at_file(listening: socket.socket, path: str) -> None:
    with _alone_at(path):  # a socket that is bound and does not listen yet looks like one that was left behind
        _remove_dead(path)
        before = os.umask(0o177)  # from its first moment; threads of this process make no files meanwhile
        try:
            listening.bind(path)
        finally:
            os.umask(before)
        listening.listen(_BACKLOG)


def unlink(address: Address) -> None:
    """Removes a socket's file, if it has one, and nobody listens there any more."""
    if isinstance(address, str):
        with _alone_at(address), contextlib.suppress(OSError):
            _remove_dead(address)


def _remove_dead(path: str) -> None:
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
        except OSError:
            pass


@contextlib.contextmanager
def _alone_at(path: str) -> Iterator[None]:
    """Services that come to one path at once do so one after the other: each locks the folder, as far as that is
    possible; whoever else has locked it is waited for a moment."""
    try:
        folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # to bind there tells why
        yield
        return
    try:
        deadline_s = time.monotonic() + _LOCK_WAIT_S
        while time.monotonic() < deadline_s:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOOK_EVERY_S)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(folder)


def is_trusted(user: int) -> bool:
    """Whether a user may be at the other end: this process's own alone."""
    return user == os.geteuid()


def decode(packet: bytes) -> dict[str, object] | None:
    """A packet's message, empty for what is none; None for no packet at all, the end of the connection."""
    if not packet:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        message = json.loads(packet)
        if isinstance(message, dict):
            return message
    return {}


def send(connection: socket.socket, message: Mapping[str, object], descriptors: Sequence[int] = ()) -> bool:
    """Sends without waiting; False if the other end does not take it."""
    packet = json.dumps(message, separators=(",", ":")).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
    try:
        connection.sendmsg([packet], rights if descriptors else [], socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
    except OSError:
        return False
    return True


def receive(connection: socket.socket) -> tuple[dict[str, object] | None, list[int]]:
    """One message with its descriptors; None at the end of the connection. Blocks as the socket does.

    Raises OSError. Descriptors that the system dropped on the way, for want of free ones, are missing.
    """
    room = socket.CMSG_SPACE(MOST_DESCRIPTORS * _INT.size)
    packet, ancillary, _, _ = connection.recvmsg(MOST_BYTES, room, _MSG_CMSG_CLOEXEC)
    descriptors = [
        number
        for level, kind, data in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (number,) in _INT.iter_unpack(data[: len(data) - len(data) % _INT.size])
    ]
    return decode(packet), descriptors
