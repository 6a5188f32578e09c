"""What services keep, in a worker's memory: bytes of files that are there, instead of being read.

A view maps the services' memory anew. Where workers do not share it to write, what is written to a tensor is that
worker's own, and costs memory only then: the next view has the file's bytes again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from loader_service import logs
from loader_service.checkpoint.catalog import Shard
from loader_service.keeping.index import KeptFile, KeptIndex
from loader_service.memory.allocators import PAGE_BYTES, HostBuffer
from loader_service.memory.fingerprints import fingerprint
from loader_service.memory.held import ByteRanges, HeldRange, HeldRanges, Segment, clipped, copy_segments
from loader_service.memory.shared import SharedMemory
from loader_service.planning.plan import RankPlan
from loader_service.planning.tables import TablePart
from loader_service.reading.file_range import Access, Drop, FileRange, Window
from loader_service.reading.handles import HandleCache
from loader_service.reading.ranges import RangeReader
from loader_service.report import PolicyOutcome
from loader_service.sizes import format_size

_log = logs.logger(__name__)


class HandedOver:
    """What one service keeps, and the memory files that it has handed over. Owns their descriptors."""

    def __init__(self, index: KeptIndex, segments: Sequence[SharedMemory]) -> None:
        self.index = index
        self.segments = segments

    def close(self) -> None:
        for segment in self.segments:
            segment.close()


class KeptView:
    """Fresh mappings of what services keep, by the state of a file. Thread-safe. Raises MemoryLimitError if they cannot
    be had."""

    def __init__(self, services: Iterable[HandedOver]) -> None:
        self._held: dict[Hashable, HeldRanges] = {}
        self._shared: dict[Hashable, list[tuple[KeptFile, HostBuffer]]] = {}
        self._states: dict[str, set[Hashable]] = {}
        for kept in services:
            shared = kept.index.shared
            buffers = [
                segment.map() if number in shared else segment.map_private()
                for number, segment in enumerate(kept.segments)
            ]
            for file in kept.index.files:
                self._take(file, buffers[file.segment], shared=file.segment in shared)

    def _take(self, file: KeptFile, buffer: HostBuffer, *, shared: bool) -> None:
        held = self._held.setdefault(file.state, HeldRanges())
        self._states.setdefault(file.path, set()).add(file.state)
        columns = (file.ranges.starts, file.ranges.stops, file.ranges.offsets)
        for number, (start, stop, offset) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            memory = buffer.memoryview[offset : offset + stop - start]
            if file.fingerprints and fingerprint(memory) != file.fingerprints[number]:
                _log.warning(
                    "%s: bytes [%d, %d) were changed in memory that workers share, and are read anew: nobody may write "
                    "to a shared host table of the resident service",
                    file.path,
                    start,
                    stop,
                )
                return
            for first, last in held.missing(start, stop):  # another service may have some of it
                held.add(HeldRange(first, last, memory[first - start : last - start], 0), 0)
        if shared:
            self._shared.setdefault(file.state, []).append((file, buffer))

    def held(self, state: Hashable, start: int, stop: int) -> list[Segment] | None:
        """The bytes [start, stop) of the file in that state, if all of them are kept."""
        ranges = self._held.get(state)
        found = ranges.covering(start, stop) if ranges is not None else None
        return None if found is None else [clipped(held, start, stop) for held in found]

    def kept_bytes(self, state: Hashable, wanted: ByteRanges) -> int:
        """How many of these bytes are kept."""
        held = self._held.get(state)
        return 0 if held is None else int(wanted.overlap_bytes(held.starts, held.stops).sum())

    def is_outdated(self, path: str, state: Hashable) -> bool:
        """Whether the file is kept, but in another state than this, in which it is now."""
        return state not in self._states.get(path, {state})

    def table(self, part: TablePart, shard: Shard) -> HostBuffer | None:
        """Memory of a whole shared host table, from the beginning of the page on that it begins in. None where it is
        not kept, or lies unaligned in its file."""
        if part.start % part.itemsize:
            return None
        for file, buffer in self._shared.get(shard.identity.state, ()):
            columns = (file.ranges.starts, file.ranges.stops, file.ranges.offsets)
            for start, stop, offset in zip(*(c.tolist() for c in columns), strict=True):
                if start <= part.start and part.start + part.nbytes <= stop:
                    first = offset + part.start - start
                    return buffer.part(first - part.start % PAGE_BYTES, first + part.nbytes)
        return None


class KeptHeaders:
    """Headers and indexes that services keep, for discovery; see `checkpoint.discovery.Kept`."""

    def __init__(self, view: KeptView, services: Iterable[HandedOver]) -> None:
        self._view = view
        self._head_bytes: dict[Hashable, int] = {
            file.state: file.head_bytes for kept in services for file in kept.index.files if file.head_bytes
        }

    def get(self, path: str, state: Hashable) -> bytes | None:  # noqa: ARG002 - a file is known by its state
        nbytes = self._head_bytes.get(state)
        segments = self._view.held(state, 0, nbytes) if nbytes is not None else None
        return None if segments is None else b"".join(segment.memory for segment in segments)

    def keep(self, path: str, state: Hashable, raw: bytes) -> None:
        """Nothing: it is the service's to keep."""

    def clear(self) -> None:
        """None of them is believed any more."""
        self._head_bytes.clear()


class KeptBytes:
    """What services keep of one load: see `filling.HeldBytes`. Tensors are made over it where they lie whole in it."""

    policy = "service"
    grows = False
    adds = False

    def __init__(self, view: KeptView, plan: RankPlan, requested: str, where: str) -> None:
        self._view: KeptView | None = view
        self._states = [shard.identity.state for shard in plan.catalog.shards]
        wanted = _wanted(plan)
        wanted_bytes = sum(ranges.nbytes for ranges in wanted.values())
        self.kept_bytes = sum(view.kept_bytes(self._states[shard], ranges) for shard, ranges in wanted.items())
        self.everything = self.kept_bytes == wanted_bytes
        reason = f"{format_size(self.kept_bytes)} of {format_size(wanted_bytes)} are kept by {where}"
        shards = [plan.catalog.shards[shard] for shard in wanted]
        if outdated := [shard.path for shard in shards if view.is_outdated(shard.path, shard.identity.state)]:
            more = f" and {len(outdated) - 1} more" if len(outdated) > 1 else ""
            what = f"{outdated[0]}{more} changed since it was read: start the service again"
            reason = f"{reason}; {what}"
            _log.warning("%s does not serve what it keeps of old files: %s", where, what)
        self.outcome = PolicyOutcome(requested, "kept" if self.everything else "partly kept", reason)

    def held(self, shard: int, start: int, stop: int) -> list[Segment] | None:
        view = self._view
        return None if view is None else view.held(self._states[shard], start, stop)

    def make_room(self) -> None: ...

    def leave_nothing(self, why: str) -> None: ...

    def insert(self, shard: int, start: int, memory: memoryview) -> None: ...

    def close(self) -> None:
        """Keeps no mapping: what is left of them is the tensors'."""
        self._view = None


def _wanted(plan: RankPlan) -> Mapping[int, ByteRanges]:
    """By shard, what the plan reads."""
    shards = plan.extent_shard
    found = {}
    for shard in set(shards.tolist()):
        here = shards == shard
        found[shard] = ByteRanges.merged(plan.extent_start[here], plan.extent_stop[here])
    return found


class KeptRangeReader(RangeReader):
    """A reader of ranges that copies what services keep. That counts as nothing read."""

    def __init__(
        self, view: KeptView, handles: HandleCache, *, access: Access, retries: int, drop: Drop, by_tensor: bool
    ) -> None:
        super().__init__(handles, access=access, retries=retries, drop=drop, by_tensor=by_tensor)
        self._view = view

    def read_within(self, where: FileRange, window: Window) -> int:
        state = where.expected.state if where.expected is not None else None
        held = self._view.held(state, where.start, where.start + window.nbytes)
        if held is None:
            return super().read_within(where, window)
        copy_segments(held, window.view)
        self._count(where, kept_bytes=window.nbytes)
        return 0
