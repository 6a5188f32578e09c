"""The memory that ranks of a node stage in: one segment of slots, made by the lowest rank, mapped by all."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from loader_service.agreement.node_mesh import Mesh
from loader_service.errors import LoadCancelledError
from loader_service.memory.allocators import HostBuffer
from loader_service.memory.shared import SharedMemory
from loader_service.sharing.handing import shared_memory

T = TypeVar("T")

_INSTEAD: Final = "set reads.sharing to page_cache or none"


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
    shared = await shared_memory(mesh, ranks, nbytes, within_s, _INSTEAD)
    start = sum(counts[:place]) * slot_bytes
    memory = await _map(shared, start, start + counts[place] * slot_bytes, in_thread)
    return Segment(memory, tuple(ranks), tuple(counts), slot_bytes)


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
