"""Staging between real processes: the memory, what each rank sees in it, deaths, and that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import uvloop

from loader_service.agreement.node import Door, memory_device
from loader_service.agreement.node_connect import connect
from loader_service.agreement.node_mesh import Mesh
from loader_service.errors import FailureRecord, LoaderError, RankFailure
from loader_service.reading.fake import FakeStorage
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage
from loader_service.reading.ranges import RangeReader
from loader_service.reading.threads import ReadPool
from loader_service.sharing.block_reads import ReadingMeans
from loader_service.sharing.segment import Segment, obtain
from loader_service.sharing.stage import Stage
from tests.agreement.folders import PATIENCE_S, all_told, exchange, heard, told
from tests.sharing.staging import BLOCK_BYTES, SLOT_BYTES, Contents, contents
from tests.support.ranks import Outcome, Rank, run_ranks

pytestmark = pytest.mark.processes

BLOCKS = 30
RANKS = 3
COUNTS = {"one slot": (1, 1, 1), "several slots": (2, 1, 3)}
T = TypeVar("T")


async def in_thread(work: Callable[[], T], *, what: str) -> T:
    return await asyncio.to_thread(work)


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="staging-") as path:
        yield path


def what_is_left() -> list[str]:
    """Descriptors, mappings and threads that staging has and nothing else in these processes."""
    gc.collect()
    found, sockets = [], set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            link = os.readlink(f"/proc/self/fd/{number}")
            if "memfd:loader" in link or "pidfd" in link or ".safetensors" in link:
                found.append(link)
            if link.startswith("socket:"):
                sockets.add(link[len("socket:[") : -1])
    for line in Path("/proc/net/unix").read_text().splitlines():
        if "loader-service" in line and line.split()[6] in sockets:
            found.append(line)
    found += [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:loader" in line]
    return found + [thread.name for thread in threading.enumerate() if thread.name.startswith("loader-")]


class Staged:
    """One rank's staging in one process, from meeting to leaving."""

    def __init__(self, rank: Rank, folder: str, how: str) -> None:
        self.rank = rank
        self.folder = folder
        self.things: Contents = contents(Path(folder, str(rank.rank)), [(1 << rank.world_size) - 1] * BLOCKS, RANKS)
        self.how = how
        self.storage = FakeStorage(LocalStorage())
        self.handles = HandleCache(self.storage, 8)
        self.threads = ReadPool(2)
        self.died = asyncio.Event()
        self.deaths: list[int] = []
        self.failures: list[LoaderError] = []
        self.stage: Stage | None = None

    def meet(self) -> Mesh:
        door = Door(self.rank.rank, "kernel", memory_device())
        mesh = connect(door, exchange(self.folder, self.rank, door.card), lambda: False, PATIENCE_S)
        all_told(self.folder, self.rank, "met")
        door.close()
        return mesh

    def saw_die(self, rank: int) -> None:
        """What the ranks' verdict does in a load."""
        self.deaths.append(rank)
        self.died.set()
        if self.stage is not None:
            self.stage.fail(RankFailure(FailureRecord("LostRank", "its process has ended", rank, "read")))

    async def segment(self, mesh: Mesh, counts: tuple[int, ...]) -> Segment | None:
        """None if a rank has died meanwhile."""
        obtaining = asyncio.create_task(obtain(mesh, range(self.rank.world_size), counts, SLOT_BYTES, in_thread))
        dying = asyncio.create_task(self.died.wait())
        await asyncio.wait((obtaining, dying), return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if obtaining.done():
            return await obtaining
        obtaining.cancel()
        await asyncio.wait([obtaining])
        return None

    async def run(self, counts: tuple[int, ...]) -> object:
        mesh = await asyncio.to_thread(self.meet)
        mesh.start(self.saw_die)
        if self.how == "the host dies first" and self.rank.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        segment = await self.segment(mesh, counts)
        seen: list[str] = []
        error: LoaderError | None = None
        if segment is not None:
            await asyncio.to_thread(all_told, self.folder, self.rank, "mapped")
            means = ReadingMeans(RangeReader(self.handles, access="auto", retries=0), self.threads, 4096, PATIENCE_S)
            self.stage = Stage(
                mesh, segment, self.things.blocks, [self.things.shard], means, on_failure=self.failures.append
            )
            self.stage.start()
            try:
                seen = await self.take()
                await self.stage.served()
            except LoaderError as caught:
                error = caught
                if self.how == "a read fails":
                    told(self.folder, "failed")
            read_bytes = self.stage.statistics.read_bytes
            assert await self.stage.stop(PATIENCE_S) == []
            self.stage = None
        else:
            read_bytes = 0
        await mesh.close(PATIENCE_S)
        self.threads.shutdown(PATIENCE_S)
        self.handles.close()
        del segment, mesh
        return seen, read_bytes, self.deaths, None if error is None else str(error)

    async def take(self) -> list[str]:
        assert self.stage is not None
        number, seen = self.rank.rank, []
        if self.how == "a read fails" and number == 1:
            self.storage.fail("*", errno.EIO, within=(10 * SLOT_BYTES, 20 * SLOT_BYTES), times=None)
        for block in range(BLOCKS):
            waiting = asyncio.create_task(self.stage.block(block))
            if self.how == "a read fails" and number != 1 and block == 10:
                await asyncio.to_thread(heard, self.folder, "failed")
                self.stage.fail(RankFailure(FailureRecord("ReadError", "EIO", 1, "read")))
            slot = await waiting
            seen.append(self.things.digest(block, slot))
            if self.how == "one dies" and number == 2 and block == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "one leaves" and number == 2 and block == 5:
                self.stage.leave()
                return seen
            del slot
            self.stage.done(block)
        return seen


def stage_on(rank: Rank, folder: str, how: str, counts: tuple[int, ...]) -> object:
    staged = Staged(rank, folder, how)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if rank.rank else asyncio.new_event_loop) as runner:
        found = runner.run(staged.run(counts))
    del staged
    return found, what_is_left()


def expected(folder: str) -> list[str]:
    things = contents(Path(folder), [1] * BLOCKS, RANKS)
    return [things.expected(block) for block in range(BLOCKS)]


def run(folder: str, how: str, counts: tuple[int, ...] = (2, 1, 3)) -> list[Outcome]:
    for rank in range(RANKS):
        Path(folder, str(rank)).mkdir()
    return run_ranks(stage_on, RANKS, folder, how, counts)


@pytest.mark.parametrize("counts", COUNTS)
def test_all_ranks_see_the_same_bytes_and_each_is_read_once(folder: str, counts: str) -> None:
    found = [outcome.get() for outcome in run(folder, "all goes well", COUNTS[counts])]
    for (seen, read_bytes, deaths, error), left in found:
        assert seen == expected(folder)
        assert read_bytes == BLOCKS // RANKS * BLOCK_BYTES
        assert (deaths, error, left) == ([], None, [])


def test_a_rank_that_leaves_early_is_no_loss_to_the_others(folder: str) -> None:
    found = [outcome.get() for outcome in run(folder, "one leaves")]
    for rank, ((seen, _, deaths, error), left) in enumerate(found):
        assert seen == (expected(folder) if rank != 2 else expected(folder)[:6])
        assert (deaths, error, left) == ([], None, [])


def test_a_rank_that_is_killed_with_a_block_in_use_ends_the_others_and_leaves_nothing(folder: str) -> None:
    outcomes = run(folder, "one dies")
    assert outcomes[2].exitcode == -signal.SIGKILL
    for outcome in outcomes[:2]:
        (seen, _, deaths, error), left = outcome.get()
        assert (deaths, seen, left) == ([2], [], [])
        assert error == "rank 2 failed in phase read: LostRank: its process has ended"
    assert not [name for name in os.listdir("/dev/shm") if "loader" in name]


def test_a_host_that_is_killed_before_it_hands_memory_over_ends_the_waiting(folder: str) -> None:
    outcomes = run(folder, "the host dies first")
    assert outcomes[0].exitcode == -signal.SIGKILL
    for outcome in outcomes[1:]:
        assert outcome.get() == (([], 0, [0], None), [])


def test_an_error_of_a_read_ends_its_rank_and_the_verdict_the_others(folder: str) -> None:
    outcomes = run(folder, "a read fails")
    for rank, outcome in enumerate(outcomes):
        (_, _, deaths, error), left = outcome.get()
        assert (deaths, left) == ([], [])
        assert ("Input/output error" in error) if rank == 1 else error.startswith("rank 1 failed in phase read")
