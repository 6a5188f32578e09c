"""What is in memory before a load reads, as that load uses it: what is held is not read; what is read, the raw weight
cache may keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from loader_service.checkpoint.catalog import Shard
from loader_service.memory.allocators import allocate_host
from loader_service.memory.cache import Admission, FileState, WeightCache
from loader_service.memory.held import ByteRanges, Segment, copy_segments
from loader_service.planning.plan import RankPlan
from loader_service.planning.units import extents_of_fragments, fragments_of_tensors
from loader_service.reading.file_range import FileRange, Window
from loader_service.reading.ranges import RangeReader
from loader_service.report import PolicyOutcome


def cacheable(plan: RankPlan) -> tuple[dict[int, ByteRanges], bool]:
    """By shard, what the cache can hold of a load: tensors whose bytes lie together in the file, with the gaps that are
    read between them. And whether that is all of it."""
    bounds = fragments_of_tensors(plan)
    alone = bounds[:-1][np.diff(bounds) == 1]
    alone = alone[plan.fragment_dst[alone] == 0]
    start, stop, shard = plan.fragment_start[alone], plan.fragment_stop[alone].copy(), plan.fragment_shard[alone]
    extent = extents_of_fragments(plan)[alone]
    joined = np.flatnonzero((np.diff(alone) == 1) & (np.diff(extent) == 0))
    stop[joined] = start[joined + 1]
    numbers = np.flatnonzero(np.bincount(shard)).tolist()
    ranges = {each: ByteRanges.merged(start[shard == each], stop[shard == each]) for each in numbers}
    return ranges, len(alone) == len(plan.fragment_start)


class HeldBytes(Protocol):
    """What of one load's bytes is in memory before it reads, and whether it leaves some there. Thread-safe.

    `policy` names it in the load's report. `everything`: all that the load wants was held when it was planned.
    `grows`: the load may leave bytes there, once it has made room.
    """

    policy: str
    grows: bool
    everything: bool

    @property
    def adds(self) -> bool:
        """Whether the load leaves what it reads there."""
        ...

    @property
    def outcome(self) -> PolicyOutcome:
        """The policy, for the report."""
        ...

    def make_room(self) -> None:
        """For what the load will read. Blocks."""
        ...

    def leave_nothing(self, why: str) -> None:
        """Nothing that is read is left there, so nothing has to make room for it."""
        ...

    def held(self, shard: int, start: int, stop: int) -> list[Segment] | None:
        """The bytes, if all of them are held."""
        ...

    def insert(self, shard: int, start: int, memory: memoryview) -> None:
        """Holds memory that is filled with the bytes from `start` on, and that nobody changes any more."""
        ...

    def close(self) -> None:
        """The load is over."""
        ...


class CachedBytes:
    """One load's part of the raw weight cache: see `HeldBytes`."""

    policy = "cache"
    grows = True

    def __init__(self, cache: WeightCache, plan: RankPlan, shards: Sequence[Shard], capacity_bytes: int) -> None:
        """Keeps what is held for it from being evicted."""
        self._cache = cache
        self._states = [FileState(shard.path, shard.identity.state) for shard in shards]
        wanted, complete = cacheable(plan)
        by_state = {self._states[shard]: ranges for shard, ranges in wanted.items()}
        self._admission: Admission = cache.claim(by_state, capacity_bytes)
        self.everything = complete and self._admission.lacking_bytes == 0

    @property
    def adds(self) -> bool:
        return self._admission.admitted

    @property
    def outcome(self) -> PolicyOutcome:
        return self._admission.outcome

    def make_room(self) -> None:
        """What was not used for longest goes."""
        self._admission.make_room()

    def leave_nothing(self, why: str) -> None:
        outcome = self._admission.outcome
        if outcome.effective != "on":
            self._admission.outcome = replace(outcome, reason=f"{outcome.reason}; {why}")

    def held(self, shard: int, start: int, stop: int) -> list[Segment] | None:
        return self._cache.held(self._states[shard], start, stop)

    def insert(self, shard: int, start: int, memory: memoryview) -> None:
        self._admission.insert(self._states[shard], start, memory)

    def close(self) -> None:
        self._admission.close()


class CachingReader:
    """Copies what is in memory, and reads the rest, into the consumer's memory: the cache keeps a copy, if `keeps`."""

    def __init__(self, ranges: RangeReader, in_memory: HeldBytes, shards: Sequence[Shard], *, keeps: bool) -> None:
        self._ranges = ranges
        self._in_memory = in_memory
        self._numbers = {shard.path: number for number, shard in enumerate(shards)}
        self._keeps = keeps

    def read_within(self, where: FileRange, window: Window) -> int:
        shard, start = self._numbers[where.path], where.start
        held = self._in_memory.held(shard, start, start + window.nbytes)
        if held is not None:
            copy_segments(held, window.view)
            return 0
        read_bytes = self._ranges.read_within(where, window)
        if self._keeps and self._in_memory.adds:
            kept = allocate_host(window.nbytes).memoryview
            np.copyto(np.frombuffer(kept, np.uint8), np.frombuffer(window.view, np.uint8))
            self._in_memory.insert(shard, start, kept)
        return read_bytes

    def read_parts(self, where: FileRange, parts: Sequence[tuple[int, Window]]) -> int:
        return sum(self.read_within(where.moved(start - where.start), window) for start, window in parts)
