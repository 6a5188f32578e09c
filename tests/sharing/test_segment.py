"""The memory that a node's ranks stage in: how each gets it, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import pytest

from loader_service.agreement.node_mesh import Mesh
from loader_service.errors import LoadCancelledError, LoaderError, MemoryLimitError
from loader_service.memory import shared
from loader_service.memory.allocators import HUGE_PAGE_BYTES, allocate_host
from loader_service.memory.shared import SharedMemory
from loader_service.sharing.handing import CHANNEL
from loader_service.sharing.segment import InThread, Segment, obtain
from tests.reading.making import PATIENCE_S
from tests.sharing.staging import SLOT_BYTES, connected
from tests.support.descriptors import no_descriptor_is_free

pytestmark = pytest.mark.usefixtures("no_leaked_descriptors", "no_leaked_tasks")
T = TypeVar("T")


async def in_thread(work: Callable[[], T], *, what: str) -> T:
    return await asyncio.to_thread(work)


@contextlib.asynccontextmanager
async def meshes(count: int) -> AsyncIterator[list[Mesh]]:
    found = await asyncio.to_thread(connected, count)
    for mesh in found:
        mesh.start(lambda rank: None)
    yield found
    await asyncio.gather(*(mesh.close(PATIENCE_S) for mesh in found))


def test_slots_lie_one_behind_the_other_by_place() -> None:
    segment = Segment(allocate_host(6 * SLOT_BYTES), (0, 3, 7), (2, 1, 3), SLOT_BYTES)
    places = [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    starts = [segment.slot(*place).address - segment.memory.address for place in places]
    assert starts == [number * SLOT_BYTES for number in range(6)]
    assert {segment.slot(*place).nbytes for place in places} == {SLOT_BYTES}


@pytest.mark.parametrize("count", [1, 3])
async def test_all_ranks_have_the_same_memory_and_keep_no_descriptor(count: int) -> None:
    async with meshes(count) as ranks:
        counts = tuple(range(1, count + 1))
        found = await asyncio.gather(*(obtain(mesh, range(count), counts, SLOT_BYTES, in_thread) for mesh in ranks))
        for number, segment in enumerate(found):
            assert (segment.ranks, segment.counts) == (tuple(range(count)), counts)
            segment.slot(number, 0).memoryview[:3] = b"%03d" % number
        for segment in found:
            told = [bytes(segment.slot(number, 0).memoryview[:3]) for number in range(count)]
            assert told == [b"%03d" % number for number in range(count)]


async def test_each_rank_has_its_own_slots_on_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def collapse(descriptor: int, start: int, stop: int) -> int:
        asked.append((start, stop))
        return 0

    monkeypatch.setattr(shared, "collapse_shared", collapse)
    async with meshes(2) as ranks:
        await asyncio.gather(
            *(obtain(mesh, range(2), (2, 1), HUGE_PAGE_BYTES, in_thread) for mesh in ranks),
        )
        assert sorted(asked) == [(0, 2 * HUGE_PAGE_BYTES), (2 * HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES)]


class Waiting:
    """Threads that begin when they are told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.work: Callable[[], object] | None = None

    def __call__(self, work: Callable[[], T], *, what: str) -> Awaitable[T]:
        self.work = work
        self.asked.set()
        never: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        return never


async def test_who_gives_up_before_its_thread_begins_leaves_nothing() -> None:
    async with meshes(1) as (mesh,):
        threads = Waiting()
        obtaining = asyncio.create_task(obtain(mesh, [0], [1], SLOT_BYTES, threads))
        await threads.asked.wait()
        obtaining.cancel()
        await asyncio.wait([obtaining])
        assert threads.work is not None
        with pytest.raises(LoadCancelledError):
            threads.work()


async def test_who_gives_up_while_its_thread_is_at_work_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def reserve(self: SharedMemory, start: int, stop: int, stopped: Callable[[], bool], **how: object) -> None:
        begun.set()
        while not stopped():
            pass
        os.fstat(self.descriptor)
        ended.set()

    monkeypatch.setattr(SharedMemory, "reserve", reserve)
    async with meshes(1) as (mesh,):
        obtaining = asyncio.create_task(obtain(mesh, [0], [1], SLOT_BYTES, in_thread))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        obtaining.cancel()
        await asyncio.wait([obtaining])
        assert await asyncio.to_thread(ended.wait, PATIENCE_S)


async def test_who_gives_up_before_memory_is_handed_over_leaves_nothing() -> None:
    async with meshes(2) as ranks:
        obtaining = asyncio.create_task(obtain(ranks[1], [0, 1], [1, 1], SLOT_BYTES, in_thread))
        await asyncio.sleep(0)
        obtaining.cancel()
        await asyncio.wait([obtaining])
        await obtain(ranks[0], [0, 1], [1, 1], SLOT_BYTES, in_thread)
        heard = asyncio.Event()
        ranks[1].listen(CHANNEL + 1, lambda rank, data, descriptor: heard.set())
        ranks[0].send(1, CHANNEL + 1, b"behind it")
        await asyncio.wait_for(heard.wait(), PATIENCE_S)


async def test_what_comes_from_another_than_the_lowest_rank_is_not_taken() -> None:
    async with meshes(3) as ranks:
        other = SharedMemory.create(3 * SLOT_BYTES)
        ranks[2].send(1, CHANNEL, b"memory", other.descriptor)
        ranks[0].send(1, CHANNEL, b"without a descriptor")
        other.close()
        found = await asyncio.gather(*(obtain(mesh, [0, 1], [1, 1], SLOT_BYTES, in_thread) for mesh in ranks[:2]))
        found[0].memory.memoryview[0] = 7
        assert found[1].memory.memoryview[0] == 7
        ranks[2].ignore(CHANNEL)


async def test_memory_that_is_too_small_is_refused() -> None:
    async with meshes(2) as ranks:
        small = SharedMemory.create(SLOT_BYTES)
        ranks[0].send(1, CHANNEL, b"memory", small.descriptor)
        small.close()
        with pytest.raises(MemoryLimitError):
            await obtain(ranks[1], [0, 1], [1, 1], SLOT_BYTES, in_thread)


async def test_who_may_open_nothing_more_says_so_and_does_not_wait() -> None:
    async with meshes(2) as ranks:
        obtaining = asyncio.create_task(obtain(ranks[1], [0, 1], [1, 1], SLOT_BYTES, in_thread))
        await obtain(ranks[0], [0, 1], [1, 1], SLOT_BYTES, holding_back(obtaining))
        with pytest.raises(MemoryLimitError, match=r"rank 0 hands .* \(ulimit -n\)$") as caught:
            await obtaining
        assert caught.value.errno == errno.EMFILE


def holding_back(other: asyncio.Task[Segment]) -> InThread:
    """Threads of the rank that hands over, which begin when the other rank has ended; until then nothing is opened."""

    async def run(work: Callable[[], T], *, what: str) -> T:
        with no_descriptor_is_free():
            await asyncio.wait([other], timeout=PATIENCE_S)
        return await in_thread(work, what=what)

    return run


async def test_the_wait_for_what_never_comes_has_an_end() -> None:
    async with meshes(2) as ranks:
        with pytest.raises(LoaderError, match="rank 0 has not handed over the memory"):
            await obtain(ranks[1], [0, 1], [1, 1], SLOT_BYTES, in_thread, 0.05)


async def test_memory_that_cannot_be_handed_over_is_an_error_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Mesh, rank: int, channel: int, data: bytes, descriptor: int | None = None) -> bool:
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))

    async with meshes(2) as ranks:
        monkeypatch.setattr(Mesh, "send", refuse)
        with pytest.raises(MemoryLimitError, match="could not be handed over") as caught:
            await obtain(ranks[0], [0, 1], [1, 1], SLOT_BYTES, in_thread)
        assert caught.value.errno == errno.ETOOMANYREFS
