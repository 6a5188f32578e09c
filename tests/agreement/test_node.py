"""Ranks of one node find each other, and nobody else: real processes, real namespaces, real users."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loader_service.agreement.node import Card, Door, address_of, memory_device
from loader_service.agreement.node_connect import connect
from loader_service.errors import LoaderError
from tests.agreement.folders import PATIENCE_S, all_told, exchange
from tests.support.ranks import Outcome, Rank, run_ranks

NOBODY = 65534
NEW_MOUNTS, NEW_NETWORK = 0x00020000, 0x40000000
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make namespaces and become others")


def never() -> bool:
    return False


@pytest.fixture
def folder() -> Iterator[str]:
    """Where ranks of any user can leave files."""
    with tempfile.TemporaryDirectory(prefix="node-") as path:
        Path(path).chmod(0o777)
        yield path


def values(outcomes: list[Outcome]) -> list[object]:
    return [outcome.get() for outcome in outcomes]


# -- meeting


def test_no_socket_to_be_had_is_an_error_that_says_what_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    door = Door(1, "kernel", memory_device())
    monkeypatch.setattr(socket, "socket", refuse)
    for ask in (
        lambda: Door(0, "kernel", memory_device()),
        lambda: connect(door, [Card(0, "kernel", memory_device(), "t"), door.card], never),
    ):
        with pytest.raises(LoaderError, match=r"no socket can be had .*Too many open files.*ulimit -n") as caught:
            ask()
        assert caught.value.errno == errno.EMFILE
    door.close()


def test_ranks_of_other_nodes_or_without_shared_memory_are_not_waited_for() -> None:
    door = Door(1, "kernel", "shm")
    others = [Card(0, "other kernel", "shm", "t"), Card(2, "kernel", "other shm", "t"), Card(3, "kernel", "shm", "")]
    assert connect(door, [*others, door.card], never, wait_s=10 * PATIENCE_S).connected == ()
    door.close()


@pytest.mark.parametrize(("node", "memory"), [("", "shm"), ("kernel", "")])
def test_what_does_not_know_where_it_is_shares_with_nobody(node: str, memory: str) -> None:
    door = Door(0, node, memory)
    assert not door.card.may_share(door.card)
    assert connect(door, [door.card, Card(1, node, memory, "t")], never, wait_s=10 * PATIENCE_S).connected == ()
    door.close()


# -- namespaces and users


def split(rank: Rank, folder: str, how: str, pretend: bool) -> object:
    """Rank 1 goes elsewhere first; `pretend`: its card says that it did not. Returns whom it is connected with."""
    here = memory_device()
    if rank.rank == 1:
        libc = ctypes.CDLL(None, use_errno=True)
        if how == "network":
            assert libc.unshare(NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
        elif how == "memory":
            assert libc.unshare(NEW_MOUNTS) == 0, os.strerror(ctypes.get_errno())
            assert libc.mount(b"none", b"/", None, ctypes.c_ulong(0x40000 | 0x4000), None) == 0  # private, recursively
            assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), b"size=1m") == 0
        else:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
    door = Door(rank.rank, "kernel", here if pretend else memory_device())
    cards = exchange(folder, rank, door.card)
    mesh = connect(door, cards, never, wait_s=5.0 if pretend else PATIENCE_S)
    all_told(folder, rank, "met")
    door.close()
    mesh.abandon()
    return mesh.connected


@needs_root
@pytest.mark.processes
@pytest.mark.parametrize("how", ["network", "memory", "user"])
def test_who_is_elsewhere_is_a_group_of_its_own_and_nobody_waits(folder: str, how: str) -> None:
    found = values(run_ranks(split, 3, folder, how, False, timeout_s=PATIENCE_S - 5))
    assert found == [(2,), (), (0,)]


@needs_root
@pytest.mark.processes
@pytest.mark.parametrize("how", ["network", "user"])
def test_who_only_seems_to_be_here_is_found_out(folder: str, how: str) -> None:
    found = values(run_ranks(split, 3, folder, how, True))
    assert found == [(2,), (), (0,)]


@needs_root
@pytest.mark.processes
def test_ranks_elsewhere_together_are_a_group(folder: str) -> None:
    found = values(run_ranks(split_in_pairs, 4, folder))
    assert found == [(1,), (0,), (3,), (2,)]


def split_in_pairs(rank: Rank, folder: str) -> object:
    """Ranks 2 and 3 are as another user."""
    if rank.rank >= 2:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    door = Door(rank.rank, "kernel", memory_device())
    mesh = connect(door, exchange(folder, rank, door.card), never, wait_s=PATIENCE_S)
    all_told(folder, rank, "met")
    door.close()
    mesh.abandon()
    return mesh.connected


# -- strangers


_OTHER_USER = """
import json, os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(chr(0) + sys.argv[1])
connection.send(json.dumps({"rank": 1, "token": sys.argv[2]}).encode())
print("told", flush=True)
try:
    print(connection.recv(100), flush=True)
except ConnectionResetError:  # closed without a look at what was sent
    print(b"", flush=True)
"""


@needs_root
def test_another_user_is_not_let_in_whatever_it_knows() -> None:
    host, member = Door(0, "kernel", "shm"), Door(1, "kernel", "shm")
    known = (address_of(host.card.token)[1:], member.card.token)
    stranger = subprocess.Popen([sys.executable, "-c", _OTHER_USER, *known], stdout=subprocess.PIPE, text=True)
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == "told\n"
    with ThreadPoolExecutor(2) as pool:
        cards = [host.card, member.card]
        found = list(pool.map(lambda door: connect(door, cards, never, wait_s=10 * PATIENCE_S), (host, member)))
    out, _ = stranger.communicate(timeout=PATIENCE_S)
    assert out == "b''\n", "it was shown the door"
    assert [mesh.connected for mesh in found] == [(1,), (0,)]
    for mesh in found:
        mesh.abandon()
    for door in (host, member):
        door.close()


def test_names_that_every_user_can_read_tell_no_secret() -> None:
    door = Door(0, "kernel", "shm")
    names = Path("/proc/net/unix").read_text()
    assert f"@{address_of(door.card.token)[1:]}" in names
    assert door.card.token not in names
    door.close()
    assert f"@{address_of(door.card.token)[1:]}" not in Path("/proc/net/unix").read_text()


def test_tokens_are_never_the_same() -> None:
    doors = [Door(rank, "kernel", "shm") for rank in range(20)]
    assert len({door.card.token for door in doors}) == 20
    assert min(len(door.card.token) for door in doors) == 32
    for door in doors:
        door.close()


@pytest.mark.parametrize(
    "told_card", [None, 5, "x", [], {}, {"node": 1}, {"node": "kernel", "memory": "shm", "token": ""}]
)
def test_a_card_that_is_none_shares_with_nobody(told_card: object) -> None:
    card = Card.from_json(1, told_card)
    assert card.rank == 1
    assert not card.may_share(Card(0, "kernel", "shm", "t"))


def test_a_card_goes_through_json() -> None:
    card = Card(3, "kernel", "shm", "t")
    assert Card.from_json(3, json.loads(json.dumps(card.as_json()))) == card
    assert card.may_share(Card(4, "kernel", "shm", "u"))
