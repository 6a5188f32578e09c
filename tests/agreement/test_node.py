"""Ranks of one node find each other and hand memory over: real processes, real namespaces, real users, real deaths."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loader_service.agreement.node import Card, Door, NodeGroup, address_of, memory_device
from loader_service.errors import LoaderError, MemoryLimitError
from loader_service.memory.shared import SharedMemory
from tests.agreement.folders import PATIENCE_S, exchange, heard, told
from tests.support.descriptors import no_descriptor_is_free
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


# -- sharing


def share(rank: Rank, folder: str, nbytes: int) -> object:
    """Meets, gets the host's memory, writes its own part of it; returns (host, members, all parts)."""
    door = Door(rank.rank, "kernel", memory_device())
    group = door.meet(exchange(folder, rank, door.card), never)
    if group.host == rank.rank:
        memory = SharedMemory.create(nbytes * rank.world_size)
        group.hand_over(memory.descriptor, [r for r in range(rank.world_size) if r != rank.rank])
    else:
        descriptor = group.receive(never)
        assert descriptor is not None
        assert not os.get_inheritable(descriptor), "programs that this rank starts would keep the memory"
        memory = SharedMemory.received(descriptor, nbytes * rank.world_size)
    buffer = memory.map()
    memory.close()
    members = sorted(group._connections)
    group.close()
    door.close()
    memory_start = rank.rank * nbytes
    buffer.memoryview[memory_start : memory_start + nbytes] = bytes([rank.rank + 1]) * nbytes
    told(folder, f"wrote{rank.rank}")
    for r in range(rank.world_size):
        heard(folder, f"wrote{r}")
    return group.host, members, bytes(buffer.memoryview[::nbytes])


@pytest.mark.processes
def test_eight_ranks_of_a_node_share_what_the_lowest_hands_over(folder: str) -> None:
    found = values(run_ranks(share, 8, folder, 100_000))
    assert found == [(0, list(range(1, 8)) if rank == 0 else [0], bytes(range(1, 9))) for rank in range(8)]
    assert not [name for name in os.listdir("/dev/shm") if "loader" in name]


def test_a_rank_alone_is_a_group_of_its_own_at_once() -> None:
    door = Door(0, "kernel", memory_device())
    group = door.meet([door.card], never, wait_s=PATIENCE_S)
    assert (group.host, group._connections) == (0, {})
    group.hand_over(0, [])
    group.close()
    door.close()


def test_no_socket_to_be_had_is_an_error_that_says_what_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    door = Door(1, "kernel", memory_device())
    monkeypatch.setattr(socket, "socket", refuse)
    for ask in (
        lambda: Door(0, "kernel", memory_device()),
        lambda: door.meet([Card(0, "kernel", memory_device(), "t"), door.card], never),
    ):
        with pytest.raises(LoaderError, match=r"no socket can be had .*Too many open files.*ulimit -n") as caught:
            ask()
        assert caught.value.errno == errno.EMFILE
    door.close()


def test_ranks_of_other_nodes_or_without_shared_memory_are_not_waited_for() -> None:
    door = Door(1, "kernel", "shm")
    others = [Card(0, "other kernel", "shm", "t"), Card(2, "kernel", "other shm", "t"), Card(3, "kernel", "shm", "")]
    group = door.meet([*others, door.card], never, wait_s=PATIENCE_S)
    assert (group.host, group._connections) == (1, {})
    door.close()
    group.close()


@pytest.mark.parametrize(("node", "memory"), [("", "shm"), ("kernel", "")])
def test_what_does_not_know_where_it_is_shares_with_nobody(node: str, memory: str) -> None:
    door = Door(0, node, memory)
    assert not door.card.may_share(door.card)
    group = door.meet([door.card, Card(1, node, memory, "t")], never, wait_s=PATIENCE_S)
    assert (group.host, group._connections) == (0, {})
    door.close()


# -- namespaces and users


def split(rank: Rank, folder: str, how: str, pretend: bool) -> object:
    """Rank 1 goes elsewhere first; `pretend`: its card says that it did not. Returns (host, members)."""
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
    group = door.meet(cards, never, wait_s=1.0 if pretend else PATIENCE_S)
    told(folder, f"met{rank.rank}")
    for r in range(rank.world_size):
        heard(folder, f"met{r}")
    door.close()
    found = group.host, sorted(group._connections)
    group.close()
    return found


@needs_root
@pytest.mark.processes
@pytest.mark.parametrize("how", ["network", "memory", "user"])
def test_who_is_elsewhere_is_a_group_of_its_own_and_nobody_waits(folder: str, how: str) -> None:
    found = values(run_ranks(split, 3, folder, how, False, timeout_s=PATIENCE_S - 5))
    assert found == [(0, [2]), (1, []), (0, [0])]


@needs_root
@pytest.mark.processes
@pytest.mark.parametrize("how", ["network", "user"])
def test_who_only_seems_to_be_here_is_found_out(folder: str, how: str) -> None:
    found = values(run_ranks(split, 3, folder, how, True))
    assert found == [(0, [2]), (1, []), (0, [0])]


@needs_root
@pytest.mark.processes
def test_ranks_elsewhere_together_are_a_group(folder: str) -> None:
    found = values(run_ranks(split_in_pairs, 4, folder))
    assert found == [(0, [1]), (0, [0]), (2, [3]), (2, [2])]


def split_in_pairs(rank: Rank, folder: str) -> object:
    """Ranks 2 and 3 are as another user."""
    if rank.rank >= 2:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    door = Door(rank.rank, "kernel", memory_device())
    group = door.meet(exchange(folder, rank, door.card), never)
    door.close()
    found = group.host, sorted(group._connections)
    group.close()
    return found


# -- strangers


def connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(PATIENCE_S)
    connection.connect(address)
    return connection


def say(*words: object) -> Callable[[socket.socket], None]:
    def talk(connection: socket.socket) -> None:
        for word in words:
            connection.send(word if isinstance(word, bytes) else json.dumps(word).encode())

    return talk


STRANGERS: dict[str, Callable[[socket.socket], None]] = {
    "silent": lambda connection: None,
    "gone": lambda connection: connection.close(),
    "garbage": say(b"\xff\x00{"),
    "no object": say([1, 2]),
    "a number": say(7),
    "no token": say({"rank": 1}),
    "a wrong token": say({"rank": 1, "token": "0" * 32}),
    "an empty token": say({"rank": 1, "token": ""}),
    "an unknown rank": say({"rank": 9, "token": ""}),
    "a rank that is none": say({"rank": "1", "token": "x"}),
    "the host itself": say({"rank": 0, "token": ""}),
    "a list for a rank": say({"rank": [1], "token": {}}),
    "a truth value": say({"rank": True, "token": ""}),
    "odd letters": say({"rank": 1, "token": "\u00fc"}),
    "deep": say(b"[" * 4000),
    "long": say(b"x" * 20_000),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_at_the_door_is_not_let_in_and_keeps_nobody_waiting(name: str) -> None:
    host, member = Door(0, "kernel", "shm"), Door(1, "kernel", "shm")
    cards = [host.card, member.card]
    stranger = connected(address_of(host.card.token))
    STRANGERS[name](stranger)
    found: dict[int, NodeGroup] = {}

    def meet(door: Door) -> None:
        found[door.card.rank] = door.meet(cards, never, wait_s=10 * PATIENCE_S)

    threads = [threading.Thread(target=meet, args=(door,), daemon=True) for door in (host, member)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "it waits for the stranger"
    assert found[1].host == 0
    assert sorted(found[0]._connections) == [1]
    reading, writing = os.pipe()
    found[0].hand_over(reading, [1])
    received = found[1].receive(never)
    assert received is not None
    os.write(writing, b"to the member")
    assert os.read(received, 20) == b"to the member"
    if name != "gone":
        assert stranger.recv(10) == b"", "it was shown the door"
    for descriptor in (reading, writing, received):
        os.close(descriptor)
    stranger.close()
    for group in found.values():
        group.close()
    for door in (host, member):
        door.close()


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
    found: dict[int, NodeGroup] = {}

    def meet(door: Door) -> None:
        found[door.card.rank] = door.meet([host.card, member.card], never, wait_s=10 * PATIENCE_S)

    threads = [threading.Thread(target=meet, args=(door,), daemon=True) for door in (host, member)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    out, _ = stranger.communicate(timeout=PATIENCE_S)
    assert out == "b''\n", "it was shown the door"
    assert found[1].host == 0
    assert sorted(found[0]._connections) == [1]
    for one in found.values():
        one.close()
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


# -- deaths


def die(rank: Rank, folder: str, victim: int) -> object:
    """The victim is killed between the meeting and the handing over; returns what the others are told."""
    door = Door(rank.rank, "kernel", memory_device())
    group = door.meet(exchange(folder, rank, door.card), never)
    told(folder, f"met{rank.rank}")
    for r in range(rank.world_size):
        heard(folder, f"met{r}")
    if rank.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if group.host == rank.rank:
            group._connections[victim].settimeout(PATIENCE_S)
            assert group._connections[victim].recv(1) == b"", "it is dead"
            with tempfile.TemporaryFile() as file:
                group.hand_over(file.fileno(), [1, 2])
        elif victim == 0:
            group.receive(never)
        else:
            heard(folder, "handed")
    except LoaderError as error:
        return str(error)
    finally:
        told(folder, "handed")
        group.close()
        door.close()
    return None


@pytest.mark.processes
def test_a_host_that_dies_before_it_hands_over_is_named(folder: str) -> None:
    outcomes = run_ranks(die, 3, folder, 0)
    assert outcomes[0].exitcode == -signal.SIGKILL
    for outcome in outcomes[1:]:
        assert outcome.get() == "rank 0 has left before it handed over the memory that this node shares"


@pytest.mark.processes
def test_a_member_that_dies_is_named(folder: str) -> None:
    outcomes = run_ranks(die, 3, folder, 1)
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert str(outcomes[0].get()).startswith("shared memory could not be handed to rank 1 on this node: ")


def test_a_rank_that_said_it_is_here_and_is_not_is_named() -> None:
    group = NodeGroup(0, {})
    with pytest.raises(LoaderError, match="handed to rank 3 on this node: it is not connected"):
        group.hand_over(0, [3])


# -- stopped


def met() -> tuple[Door, Door, NodeGroup, NodeGroup]:
    host, member = Door(0, "kernel", "shm"), Door(1, "kernel", "shm")
    groups: list[NodeGroup] = []
    thread = threading.Thread(target=lambda: groups.append(host.meet([host.card, member.card], never)), daemon=True)
    thread.start()
    group = member.meet([host.card, member.card], never)
    thread.join(PATIENCE_S)
    return host, member, groups[0], group


@pytest.mark.usefixtures("no_leaked_descriptors")
def test_waiting_for_memory_ends_when_it_is_told_to() -> None:
    host, member, groups, group = met()
    looks = iter([False, False, True])
    assert group.receive(lambda: next(looks)) is None
    for one in (host, member, groups, group):
        one.close()


@pytest.mark.usefixtures("no_leaked_descriptors")
@pytest.mark.parametrize("rank", [0, 1])
def test_meeting_ends_when_it_is_told_to(rank: int) -> None:
    doors = [Door(0, "kernel", "shm"), Door(1, "kernel", "shm")]
    cards = [door.card for door in doors]
    looks = iter([False, False, True])
    group = doors[rank].meet(cards, lambda: next(looks, True), wait_s=10 * PATIENCE_S)
    assert (group.host, group._connections) == (rank, {})
    for door in doors:
        door.close()


def test_meeting_ends_after_its_time_where_nobody_comes() -> None:
    door = Door(0, "kernel", "shm")
    group = door.meet([door.card, Card(1, "kernel", "shm", "t")], never, wait_s=0.05)
    assert (group.host, group._connections) == (0, {})
    door.close()


def test_a_host_that_has_closed_its_door_is_not_waited_for() -> None:
    host, member = Door(0, "kernel", "shm"), Door(1, "kernel", "shm")
    host.close()
    group = member.meet([host.card, member.card], never, wait_s=10 * PATIENCE_S)
    assert (group.host, group._connections) == (1, {})
    member.close()


def test_a_descriptor_for_which_there_is_no_number_is_an_error_and_not_waited_for() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    group = NodeGroup(0, {0: here})
    NodeGroup(0, {1: there}).hand_over(0, [1])
    with no_descriptor_is_free(), pytest.raises(MemoryLimitError, match=r"rank 0 hands .* \(ulimit -n\)$"):
        group.receive(never)
    there.close()
    group.close()
