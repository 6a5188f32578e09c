"""A node's mesh: real sockets, real processes, real deaths; on both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop

from loader_service.agreement import node, node_connect
from loader_service.agreement.node import Door, address_of, has_ended, knock, memory_device, own_process
from loader_service.agreement.node_connect import connect, groups
from loader_service.agreement.node_mesh import GOODBYE, MAX_MESSAGE_BYTES, Mesh, Peer
from loader_service.errors import LoaderError
from tests.agreement.folders import PATIENCE_S, all_told, exchange, heard, told
from tests.support.descriptors import no_descriptor_is_free
from tests.support.ranks import Rank, run_ranks

CHANNEL, OTHER_CHANNEL = 7, 8
NEW_NETWORK = 0x40000000


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> None:
    """But for the fork server's own, where processes are started."""
    if request.node.get_closest_marker("processes") is None:
        request.getfixturevalue("no_leaked_descriptors")


def never() -> bool:
    return False


def on_both_loops(test: Callable[[], Coroutine[object, object, None]]) -> Callable[..., None]:
    @pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
    def run(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(test())

    run.__name__ = test.__name__
    return run


def doors(count: int) -> list[Door]:
    return [Door(rank, "kernel", "shm") for rank in range(count)]


def meshes(opened: Sequence[Door], **options: Any) -> list[Mesh]:
    """Every rank's, connected from threads, each of which closes its door at the end."""
    cards = [door.card for door in opened]
    with ThreadPoolExecutor(len(opened)) as pool:
        found = list(pool.map(lambda door: connect(door, cards, never, **options), opened))
    for door in opened:
        door.close()
    return found


class Heard:
    """What one rank's mesh was told."""

    def __init__(self, mesh: Mesh, *, listens: bool = True) -> None:
        self.mesh = mesh
        self.messages: list[tuple[int, bytes]] = []
        self.descriptors: list[int] = []
        self.deaths: list[int] = []
        self.something = asyncio.Event()
        mesh.start(self.died)
        if listens:
            mesh.listen(CHANNEL, self.take)

    def take(self, rank: int, data: bytes, descriptor: int | None) -> None:
        self.messages.append((rank, data))
        if descriptor is not None:
            self.descriptors.append(descriptor)
        self.something.set()

    def died(self, rank: int) -> None:
        self.deaths.append(rank)
        self.something.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.something.clear()
                await self.something.wait()


@contextlib.asynccontextmanager
async def joined(count: int) -> AsyncIterator[list[Heard]]:
    found = [Heard(mesh) for mesh in await asyncio.to_thread(meshes, doors(count))]
    yield found
    await asyncio.gather(*(one.mesh.close(PATIENCE_S) for one in found))


def hold_up(one: Heard, rank: int) -> None:
    """It reads nothing of `rank`, until it starts again."""
    assert one.mesh._loop is not None
    one.mesh._loop.remove_reader(one.mesh._peers[rank].connection.fileno())


async def left(one: Heard, rank: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while rank in one.mesh._peers:
            one.mesh._sent.clear()
            await one.mesh._sent.wait()


# -- messages


@on_both_loops
async def test_every_rank_reaches_every_other_and_the_order_is_kept() -> None:
    async with joined(3) as three:
        for one in three:
            assert one.mesh.connected == tuple(rank for rank in range(3) if rank != one.mesh.rank)
            for rank in one.mesh.connected:
                for number in range(50):
                    assert one.mesh.send(rank, CHANNEL, b"%d to %d: %d" % (one.mesh.rank, rank, number))
        for one in three:
            await one.until(lambda one=one: len(one.messages) == 100)  # type: ignore[misc]
            for rank in one.mesh.connected:
                told = [data for sender, data in one.messages if sender == rank]
                assert told == [b"%d to %d: %d" % (rank, one.mesh.rank, number) for number in range(50)]


@on_both_loops
async def test_what_comes_before_anybody_listens_is_kept_by_channel() -> None:
    async with joined(2) as two:
        first, second = two
        for number in range(3):
            first.mesh.send(1, OTHER_CHANNEL, b"other %d" % number)
            first.mesh.send(1, CHANNEL, b"%d" % number)
        await second.until(lambda: len(second.messages) == 3)
        late: list[bytes] = []
        second.mesh.listen(OTHER_CHANNEL, lambda rank, data, descriptor: late.append(data))
        assert late == [b"other 0", b"other 1", b"other 2"]
        assert second.messages == [(0, b"0"), (0, b"1"), (0, b"2")]


@on_both_loops
async def test_what_has_no_room_is_sent_later_in_order() -> None:
    """Nobody reads until all are sent, which is far more than a socket takes."""
    async with joined(2) as two:
        first, second = two
        hold_up(second, 0)
        count = 5000
        for number in range(count):
            assert first.mesh.send(1, CHANNEL, b"%d" % number)
        queued = len(first.mesh._peers[1].outbox)
        assert count // 2 < queued < count - 100, "bounded by what the kernel takes"
        early = [second.mesh._peers[0].receive() for _ in range(10)]
        assert early == [(bytes((CHANNEL,)) + b"%d" % number, None) for number in range(10)]
        assert first.mesh.send(1, CHANNEL, b"%d" % count), "there is room now, and others are before it"
        second.mesh.start(second.died)
        await second.until(lambda: len(second.messages) == count + 1 - 10)
        assert second.messages == [(0, b"%d" % number) for number in range(10, count + 1)]


@on_both_loops
async def test_a_descriptor_goes_along_also_where_there_is_no_room_and_is_not_inherited() -> None:
    async with joined(2) as two:
        first, second = two
        hold_up(second, 0)
        while not first.mesh._peers[1].outbox:
            first.mesh.send(1, CHANNEL, b"x")
        reading, writing = os.pipe()
        first.mesh.send(1, CHANNEL, b"a pipe", reading)
        os.close(reading)
        second.mesh.start(second.died)
        await second.until(lambda: bool(second.descriptors))
        assert second.messages[-1] == (0, b"a pipe")
        os.write(writing, b"through it")
        os.close(writing)
        (received,) = second.descriptors
        assert not os.get_inheritable(received)
        assert os.read(received, 20) == b"through it"
        os.close(received)


@on_both_loops
async def test_descriptors_that_nobody_wants_are_closed() -> None:
    """In a message that is kept for good, on a channel that is ignored, and with one that is too long."""
    async with joined(2) as two:
        first, second = two
        second.mesh.ignore(OTHER_CHANNEL)
        for channel in (OTHER_CHANNEL, 99):
            first.mesh.send(1, channel, b"x", 0)
        raw = first.mesh._peers[1].connection
        socket.send_fds(raw, [bytes((CHANNEL,)) + b"two"], [0, 0])
        socket.send_fds(raw, [bytes((CHANNEL,)) + b"x" * MAX_MESSAGE_BYTES], [0])
        socket.send_fds(raw, [GOODBYE + b"no good-bye"], [0])
        first.mesh.send(1, CHANNEL, b"last")
        await second.until(lambda: second.messages[-1:] == [(0, b"last")])
        for descriptor in second.descriptors:
            os.close(descriptor)
        assert (0, b"x" * MAX_MESSAGE_BYTES) not in second.messages


@on_both_loops
async def test_a_descriptor_for_which_there_is_no_number_is_told_as_missing_and_its_message_arrives() -> None:
    async with joined(2) as two:
        first, second = two
        with no_descriptor_is_free():
            first.mesh.send(1, CHANNEL, b"a file", 0)
            await second.until(lambda: bool(second.messages))
        first.mesh.send(1, CHANNEL, b"another", 0)
        await second.until(lambda: len(second.messages) == 2)
        assert second.messages == [(0, b"a file"), (0, b"another")]
        (received,) = second.descriptors
        os.close(received)


@pytest.mark.parametrize(("channel", "data"), [(0, b""), (256, b""), (1, b"x" * MAX_MESSAGE_BYTES)])
async def test_what_cannot_be_a_message_is_refused(channel: int, data: bytes) -> None:
    async with joined(2) as two:
        with pytest.raises(ValueError, match="a message of"):
            two[0].mesh.send(1, channel, data)


async def test_a_listener_that_breaks_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with joined(2) as two:
        first, second = two

        def broken(rank: int, data: bytes, descriptor: int | None) -> None:
            raise RuntimeError("broken")

        errors: list[LoaderError] = []
        second.mesh.start(second.died, errors.append)
        second.mesh.listen(OTHER_CHANNEL, broken)
        first.mesh.send(1, OTHER_CHANNEL, b"x")
        first.mesh.send(1, CHANNEL, b"y")
        await second.until(lambda: second.messages == [(0, b"y")])
        assert "a message of rank 0 could not be handled" in caplog.text
        assert [str(error) for error in errors] == ["a message of rank 0 could not be handled: RuntimeError: broken"]
        assert isinstance(errors[0].__cause__, RuntimeError)


# -- leaving


@on_both_loops
async def test_who_says_goodbye_is_not_dead_and_gets_no_more() -> None:
    async with joined(2) as two:
        first, second = two
        first.mesh.send(1, CHANNEL, b"last")
        await first.mesh.close(PATIENCE_S)
        await left(second, 0)
        assert second.messages == [(0, b"last")]
        assert second.deaths == []
        assert not second.mesh.send(0, CHANNEL, b"x")


@on_both_loops
async def test_a_goodbye_is_heard_although_what_was_sent_there_was_never_read() -> None:
    """The kernel tells who sent it of a reset connection, before what lies there to be read."""
    async with joined(2) as two:
        first, second = two
        hold_up(first, 1)
        second.mesh.send(0, CHANNEL, b"never read")
        first.mesh.abandon()
        await left(second, 0)
        assert second.deaths == []


@on_both_loops
async def test_a_goodbye_counts_also_where_the_end_of_the_process_is_seen_first() -> None:
    async with joined(2) as two:
        first, second = two
        hold_up(second, 0)
        first.mesh.send(1, CHANNEL, b"last")
        first.mesh.abandon()
        second.mesh._process_ended(0)
        assert second.messages == [(0, b"last")]
        assert second.deaths == []


@on_both_loops
async def test_both_leave_at_once_with_more_queued_than_there_is_room_for() -> None:
    async with joined(2) as two:
        for one in two:
            other = 1 - one.mesh.rank
            while not one.mesh._peers[other].outbox:
                one.mesh.send(other, CHANNEL, b"x")
        await asyncio.gather(*(one.mesh.close(PATIENCE_S) for one in two))
        assert [one.deaths for one in two] == [[], []]


@on_both_loops
async def test_leaving_does_not_wait_longer_than_it_may_for_who_does_not_read() -> None:
    async with joined(2) as two:
        first, second = two
        hold_up(second, 0)
        while not first.mesh._peers[1].outbox:
            first.mesh.send(1, CHANNEL, b"x")
        await first.mesh.close(0.01)
        assert first.mesh._peers == {}


@on_both_loops
async def test_a_mesh_that_was_never_started_says_goodbye() -> None:
    pair = await asyncio.to_thread(meshes, doors(2))
    pair[0].abandon()
    other = Heard(pair[1])
    await left(other, 0)
    assert other.deaths == []
    for _ in range(2):
        await pair[1].close(PATIENCE_S)
        pair[0].abandon()


@on_both_loops
async def test_a_connection_that_ends_without_goodbye_is_no_death_while_the_process_lives() -> None:
    """As where the process starts another program."""
    async with joined(2) as two:
        first, second = two
        raw = first.mesh._peers[1].connection
        hold_up(first, 1)
        raw.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(PATIENCE_S):
            while not second.mesh._peers[0].over:  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0)
        assert second.deaths == []
        assert not second.mesh.send(0, CHANNEL, b"x")


# -- meeting


def test_a_rank_alone_has_an_empty_mesh_at_once() -> None:
    (mesh,) = meshes(doors(1))
    assert mesh.connected == ()
    mesh.abandon()


@pytest.mark.parametrize(("node", "memory"), [("", "shm"), ("kernel", ""), ("another", "shm")])
def test_who_cannot_share_is_not_waited_for(node: str, memory: str) -> None:
    opened = [*doors(1), Door(1, node, memory)]
    assert [mesh.connected for mesh in meshes(opened, wait_s=10 * PATIENCE_S)] == [(), ()]


def test_a_rank_whose_door_is_closed_is_not_waited_for_by_those_above_it() -> None:
    opened = doors(3)
    opened[0].close()
    cards = [door.card for door in opened]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda door: connect(door, cards, never, wait_s=10 * PATIENCE_S), opened[1:]))
    assert [mesh.connected for mesh in found] == [(2,), (1,)]
    for mesh in found:
        mesh.abandon()
    for door in opened:
        door.close()


def test_a_knock_at_a_door_that_closes_before_it_is_opened_connects_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = doors(2)
    readable = node.readable

    def closes_first(connections: Sequence[socket.socket], deadline_s: float) -> list[socket.socket]:
        opened[0].close()
        return readable(connections, deadline_s)

    monkeypatch.setattr(node_connect, "readable", closes_first)
    mesh = connect(opened[1], [door.card for door in opened], never, wait_s=10 * PATIENCE_S)
    assert mesh.connected == ()
    opened[1].close()


def test_a_rank_that_does_not_come_in_time_is_left_out_on_all_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the others have gone: none of its knocks is answered, and it waits for nobody either."""
    opened = doors(3)
    cards = [door.card for door in opened]
    ends: list[Peer] = []  # of connections that both sides have said yes to

    def found(connection: socket.socket, process: int | None) -> Peer:
        ends.append(Peer(connection, process))
        return ends[-1]

    def have_met() -> bool:
        return len(ends) == 2

    monkeypatch.setattr(node_connect, "Peer", found)
    with ThreadPoolExecutor(2) as pool:
        early = list(pool.map(lambda door: connect(door, cards, have_met, wait_s=10 * PATIENCE_S), opened[::2]))
    assert [mesh.connected for mesh in early] == [(2,), (0,)]
    for door in opened[::2]:
        door.close()
    late = connect(opened[1], cards, never, wait_s=10 * PATIENCE_S)
    assert late.connected in ((), (2,)), "rank 2 has knocked, and has said good-bye since"
    assert groups([(2,), late.connected, (0,)]) == [(0, 2), (1,)]
    opened[1].close()
    for mesh in (*early, late):
        mesh.abandon()


@pytest.mark.parametrize("rank", [0, 1])
def test_meeting_ends_when_it_is_told_to(rank: int) -> None:
    opened = doors(2)
    looks = iter([False, False, True])
    mesh = connect(opened[rank], [door.card for door in opened], lambda: next(looks, True), wait_s=10 * PATIENCE_S)
    assert mesh.connected == ()
    mesh.abandon()
    for door in opened:
        door.close()


@pytest.mark.parametrize(
    ("connected", "found"),
    [
        ([], []),
        ([()], [(0,)]),
        ([(1, 2), (0, 2), (0, 1)], [(0, 1, 2)]),
        ([(1,), (0,), (3,), (2,)], [(0, 1), (2, 3)]),
        ([(1, 2), (0,), (0,)], [(0, 1), (2,)]),
        ([(1,), ()], [(0,), (1,)]),
        ([(1, 2), (0, 2), (0,)], [(0, 1), (2,)]),
        ([(1, 9), (0,)], [(0, 1)]),
    ],
)
def test_groups_are_ranks_that_all_reach_each_other(
    connected: list[tuple[int, ...]], found: list[tuple[int, ...]]
) -> None:
    assert groups(connected) == found


def connected_to(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(PATIENCE_S)
    connection.connect(address)
    return connection


STRANGERS: dict[str, object] = {
    "garbage": b"\xff\x00{",
    "no object": [1, 2],
    "a number": 7,
    "no token": {"rank": 1},
    "a wrong token": {"rank": 1, "token": "0" * 32},
    "an empty token": {"rank": 1, "token": ""},
    "an unknown rank": {"rank": 9, "token": ""},
    "a rank that is none": {"rank": "1", "token": "x"},
    "a lower rank": {"rank": 0, "token": ""},
    "a list for a rank": {"rank": [1], "token": {}},
    "a truth value": {"rank": True, "token": ""},
    "odd letters": {"rank": 1, "token": "\u00fc"},
    "deep": b"[" * 4000,
    "long": b"x" * 20_000,
}


@pytest.mark.parametrize("name", [*STRANGERS, "silent", "gone"])
def test_a_stranger_at_the_door_is_not_let_in_and_keeps_nobody_waiting(name: str) -> None:
    opened = doors(2)
    stranger = connected_to(address_of(opened[0].card.token))
    if (word := STRANGERS.get(name)) is not None:
        stranger.send(word if isinstance(word, bytes) else json.dumps(word).encode())
    if name == "gone":
        stranger.close()
    found = meshes(opened, wait_s=10 * PATIENCE_S)
    assert [mesh.connected for mesh in found] == [(1,), (0,)]
    if name != "gone":
        assert stranger.recv(100) in (b"", GOODBYE)
    stranger.close()
    for mesh in found:
        mesh.abandon()


def test_who_knocks_and_goes_away_in_order_is_not_waited_for() -> None:
    opened = doors(2)
    visitor = connected_to(address_of(opened[0].card.token))
    visitor.send(knock(opened[1].card))
    found: list[Mesh] = []
    cards = [door.card for door in opened]
    thread = threading.Thread(target=lambda: found.append(connect(opened[0], cards, never, wait_s=10 * PATIENCE_S)))
    thread.start()
    assert visitor.recv(100) == b"welcome"
    visitor.send(GOODBYE)
    visitor.close()
    thread.join(PATIENCE_S)
    assert found[0].connected == ()
    found[0].abandon()
    for door in opened:
        door.close()


def test_who_is_not_waited_for_any_longer_hears_goodbye() -> None:
    opened = doors(2)
    visitor = connected_to(address_of(opened[0].card.token))
    visitor.send(knock(opened[1].card))

    def welcomed() -> bool:
        return bool(select.select([visitor], [], [], 0)[0])

    mesh = connect(opened[0], [door.card for door in opened], welcomed, wait_s=10 * PATIENCE_S)
    assert [visitor.recv(100) for _ in range(2)] == [b"welcome", GOODBYE]
    assert mesh.connected == ()
    visitor.close()
    for door in opened:
        door.close()


def test_a_rank_is_let_in_once() -> None:
    opened = doors(2)
    visitors = [connected_to(address_of(opened[0].card.token)) for _ in range(2)]
    for visitor in visitors:
        visitor.send(knock(opened[1].card))
    visitors[0].send(b"here")
    mesh = connect(opened[0], [door.card for door in opened], never, wait_s=10 * PATIENCE_S)
    assert mesh.connected == (1,)
    assert visitors[0].recv(100) == b"welcome"
    mesh.abandon()
    for visitor in visitors:
        assert visitor.recv(100) in (GOODBYE, b"")
        visitor.close()
    for door in opened:
        door.close()


_KNOCKS = """
import socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(chr(0) + sys.argv[1])
connection.send(sys.argv[2].encode())
print(connection.recv(100), flush=True)
connection.recv(100)
"""


@on_both_loops
async def test_a_rank_that_is_killed_while_it_connects_is_seen_to_die() -> None:
    opened = doors(2)
    cards = [door.card for door in opened]
    words = (address_of(opened[0].card.token)[1:], knock(opened[1].card).decode())
    process = await asyncio.to_thread(
        lambda: subprocess.Popen([sys.executable, "-c", _KNOCKS, *words], stdout=subprocess.PIPE)
    )
    connecting = asyncio.create_task(asyncio.to_thread(connect, opened[0], cards, never, 10 * PATIENCE_S))
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == b"b'welcome'\n"
    process.kill()
    one = Heard(await connecting)
    await one.until(lambda: one.deaths == [1])
    await asyncio.to_thread(process.communicate)
    await one.mesh.close(PATIENCE_S)
    for door in opened:
        door.close()


# -- processes


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="mesh-") as path:
        yield path


def meet(rank: Rank, folder: str) -> Mesh:
    door = Door(rank.rank, "kernel", memory_device())
    mesh = connect(door, exchange(folder, rank, door.card), never, PATIENCE_S)
    door.close()
    all_told(folder, rank, "met")
    return mesh


def end(rank: Rank, folder: str, how: str, watch: str) -> object:
    """The last rank ends in some way; returns the deaths that the others saw until the test says that it is over."""
    if watch != "descriptors of the socket":
        node_connect._SO_PEERPIDFD = 9999  # type: ignore[misc]
    if watch == "the end of the file":
        os.pidfd_open = lambda *args: (_ for _ in ()).throw(OSError("refused"))
    victim = rank.world_size - 1
    loop = uvloop.new_event_loop() if rank.rank else asyncio.new_event_loop()
    with contextlib.closing(loop):
        return loop.run_until_complete(_end(rank, folder, how, rank.rank == victim))


async def _end(rank: Rank, folder: str, how: str, is_victim: bool) -> object:
    mesh = await asyncio.to_thread(meet, rank, folder)
    if not is_victim:
        told_me = None if how == "killed early" else Heard(mesh)
        rank.mark("watches")
        await asyncio.to_thread(heard, folder, "over")
        told_me = told_me or Heard(mesh)
        if how.startswith("killed") or how == "exits":
            await told_me.until(lambda: bool(told_me.deaths))
        await asyncio.sleep(0)
        deaths = list(told_me.deaths)
        await mesh.close(PATIENCE_S)
        return deaths
    mesh.start(lambda rank: None)
    if how == "killed, a child lives":
        rank.fork_child()
    for other in mesh.connected:
        mesh.send(other, CHANNEL, b"alive")
    rank.mark("victim")
    if how == "says goodbye":
        await mesh.close(PATIENCE_S)
    if how in ("says goodbye", "exits"):
        heard(folder, "go")
        sys.stdout.flush()
        os._exit(0)
    await asyncio.to_thread(heard, folder, "over")
    if how == "stopped":
        await mesh.close(PATIENCE_S)
    return None


@pytest.mark.processes
@pytest.mark.parametrize("watch", ["descriptors of the socket", "descriptors by number", "the end of the file"])
@pytest.mark.parametrize("how", ["killed", "killed early", "killed, a child lives", "stopped", "says goodbye", "exits"])
def test_a_process_that_ends_without_goodbye_is_seen_and_no_other(folder: str, how: str, watch: str) -> None:
    if watch == "the end of the file" and how == "killed, a child lives":
        pytest.skip("without descriptors of processes nobody can see that")
    marks: list[str] = []

    def on_mark(rank: int, text: str, processes: list[int]) -> None:
        marks.append(text)
        if len(marks) < 3:
            return
        victim = processes[2]
        if how.startswith("killed"):
            os.kill(victim, signal.SIGKILL)
        elif how == "stopped":
            os.kill(victim, signal.SIGSTOP)
        told(folder, "go")
        if how != "stopped":
            wait_until_ended(victim)
        told(folder, "over")
        if how == "stopped":
            os.kill(victim, signal.SIGCONT)

    outcomes = run_ranks(end, 3, folder, how, watch, on_mark=on_mark)
    died = how.startswith("killed") or how == "exits"
    assert [outcome.get() for outcome in outcomes[:2]] == ([[2], [2]] if died else [[], []])


def wait_until_ended(pid: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.005)
    raise AssertionError(f"process {pid} does not end")


# -- deaths before ranks are connected


def ended_process() -> str:
    """Of a child that has ended, and that nobody has asked for yet."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    return f"{own_process().partition(' ')[0]} {child}"


def test_a_process_that_has_ended_is_known_to_have() -> None:
    process = ended_process()
    assert has_ended(process)
    assert not has_ended("1 " + process.partition(" ")[2]), "another process namespace"
    os.waitpid(int(process.partition(" ")[2]), 0)
    assert has_ended(process)
    assert not has_ended(own_process())
    for unknown in ("", "x", "x y", f"{own_process().partition(' ')[0]} {1 << 70}"):
        assert not has_ended(unknown)


@pytest.mark.parametrize("who", [0, 2], ids=["the lower one", "the higher one"])
async def test_a_rank_that_ended_before_it_came_is_a_death_and_not_waited_for(who: int) -> None:
    process = await asyncio.to_thread(ended_process)
    gone, own = await asyncio.to_thread(lambda: (Door(who, "kernel", "shm", process), Door(1, "kernel", "shm")))
    gone.close()
    deaths: list[int] = []
    mesh = await asyncio.to_thread(connect, own, [gone.card, own.card], never, 1e6)
    own.close()
    mesh.start(deaths.append)
    assert (mesh.connected, deaths) == ((), [who])
    await mesh.close(PATIENCE_S)
    await asyncio.to_thread(os.waitpid, int(process.partition(" ")[2]), 0)


@pytest.mark.parametrize("who", [0, 2], ids=["the lower one", "the higher one"])
def test_a_rank_that_has_given_up_is_no_death(who: int) -> None:
    gone, own = Door(who, "kernel", "shm", own_process()), Door(1, "kernel", "shm")
    gone.close()
    mesh = connect(own, [gone.card, own.card], never, 0.3)
    own.close()
    assert (mesh.connected, mesh.ended) == ((), ())


def test_a_rank_that_may_open_nothing_more_says_so_and_keeps_nothing() -> None:
    """It has found one other rank by then."""
    found, refused, lost = Door(0, "kernel", "shm"), Door(1, "kernel", "shm"), Door(2, "kernel", "shm")
    cards = [found.card, refused.card, lost.card]
    with ThreadPoolExecutor(2) as pool, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late:
        connecting = pool.submit(connect, refused, cards, never, PATIENCE_S)
        mesh = pool.submit(connect, found, cards[:2], never, PATIENCE_S).result()
        with no_descriptor_is_free():
            late.connect(address_of(refused.card.token))
            with pytest.raises(LoaderError, match=r"\(Too many open files\): raise the limit of open files"):
                connecting.result(PATIENCE_S)
    mesh.abandon()
    for door in (found, refused, lost):
        door.close()
