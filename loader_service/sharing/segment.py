"""The memory that ranks of a node stage in: one segment of slots, made by the lowest rank, mapped by all."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from loader_service.agreement.node import lost_on_the_way
from loader_service.agreement.node_mesh import Mesh
from loader_service.errors import LoadCancelledError, LoaderError, MemoryLimitError
from loader_service.memory.allocators import HostBuffer
from loader_service.memory.shared import SharedMemory

T = TypeVar("T")

CHANNEL: Final = 1  # of the mesh
_HANDED: Final = b"segment"


class InThread(Protocol):
    """Runs blocking work beside the loop; `what` it is, for messages."""

    def __call__(self, work: Callable[[], T], *, what: str) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that `ranks`, ascending, share: `counts[p]` slots of `slot_bytes` for the rank at place p, one behind the
    other, place by place."""

    memory: HostBuffer
    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    slot_bytes: int

    def slot(self, place: int, slot: int) -> HostBuffer:
        start = (sum(self.counts[:place]) + slot) * self.slot_bytes
        return self.memory.part(start, start + self.slot_bytes)


async def obtain(
    mesh: Mesh,
    ranks: Sequence[int],
    counts: Sequence[int],
    slot_bytes: int,
    in_thread: InThread,
    within_s: float = 60.0,
) -> Segment:
    """Collective over `ranks`, which `mesh` connects; `counts` by place. This rank's own slots are resident then.

    The others' are once those have come so far: that is to be agreed on before the whole is pinned for a device, not
    before this rank reads into its own. The memory lives as long as any process maps it, and nothing else of it is
    left. Raises MemoryLimitError, and LoaderError if the lowest rank has not handed it over `within_s`. If another rank
    fails or dies, this waits until it is cancelled.
    """
    place, nbytes = ranks.index(mesh.rank), sum(counts) * slot_bytes
    if place == 0:
        shared = SharedMemory.create(nbytes)
        _hand_over(mesh, ranks[1:], shared)
    else:
        shared = SharedMemory.received(await _handed_over(mesh, ranks[0], within_s), nbytes)
    start = sum(counts[:place]) * slot_bytes
    memory = await _map(shared, start, start + counts[place] * slot_bytes, in_thread)
    return Segment(memory, tuple(ranks), tuple(counts), slot_bytes)


def _hand_over(mesh: Mesh, ranks: Sequence[int], shared: SharedMemory) -> None:
    try:
        for rank in ranks:  # one that is gone is found out by its death
            mesh.send(rank, CHANNEL, _HANDED, shared.descriptor)
    except BaseException as error:
        shared.close()
        if isinstance(error, OSError):
            raise MemoryLimitError(
                f"memory that ranks of this node share could not be handed over ({error.strerror}): raise the limit of "
                "open files (ulimit -n), or set reads.sharing to page_cache or none",
                errno=error.errno,
            ) from error
        raise


async def _handed_over(mesh: Mesh, host: int, within_s: float) -> int:
    handed: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def take(rank: int, data: bytes, descriptor: int | None) -> None:
        expected = rank == host and data == _HANDED and not handed.done()
        if expected and descriptor is not None:
            handed.set_result(descriptor)
        elif expected:
            handed.set_exception(lost_on_the_way(host))
        elif descriptor is not None:
            os.close(descriptor)

    mesh.listen(CHANNEL, take)
    try:
        async with asyncio.timeout(within_s):
            return await handed
    except BaseException as error:
        if handed.done() and not handed.cancelled() and handed.exception() is None:
            os.close(handed.result())
        if isinstance(error, TimeoutError):
            text = f"rank {host} has not handed over the memory that ranks of this node share for {within_s:g} s"
            raise LoaderError(f"{text}: set reads.sharing to page_cache or none") from None
        raise
    finally:
        mesh.ignore(CHANNEL)


async def _map(memory: SharedMemory, start: int, stop: int, in_thread: InThread) -> HostBuffer:
    """The descriptor is closed by the thread, or, if that never came so far, by who gives up waiting for it."""
    mine, stopped = threading.Lock(), threading.Event()

    def reserve_and_map() -> HostBuffer:
        if not mine.acquire(blocking=False):
            raise LoadCancelledError("nobody waits for the shared segment any more")
        try:
            memory.reserve(start, stop, stopped.is_set)
            return memory.map()
        finally:
            memory.close()

    try:
        return await in_thread(reserve_and_map, what="reserving memory that the ranks of this node share")
    except BaseException:
        stopped.set()
        if mine.acquire(blocking=False):
            memory.close()
        raise
