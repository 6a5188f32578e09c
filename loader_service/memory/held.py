"""Byte ranges of files, and the memory that holds them, as sorted columns: a checkpoint may have 200,000.

Pure bookkeeping, without locks: `cache.py` has them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, eq=False)
class ByteRanges:
    """Half-open byte ranges of one file in order; none is empty, none touches the next."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    @classmethod
    def merged(cls, starts: ArrayLike, stops: ArrayLike) -> ByteRanges:
        """What the ranges [starts[i], stops[i]), in any order, cover together."""
        begins, ends = np.asarray(starts, dtype=np.int64), np.asarray(stops, dtype=np.int64)
        order = np.argsort(begins, kind="stable")
        order = order[ends[order] > begins[order]]
        begins, reached = begins[order], np.maximum.accumulate(ends[order])
        apart = begins[1:] > reached[:-1]
        filled = np.ones(min(1, len(order)), dtype=bool)
        return cls(begins[np.concatenate([filled, apart])], reached[np.concatenate([apart, filled])])

    @property
    def nbytes(self) -> int:
        return int((self.stops - self.starts).sum())

    def joined(self, others: ByteRanges) -> ByteRanges:
        """They and `others`."""
        return ByteRanges.merged([*self.starts, *others.starts], [*self.stops, *others.stops])

    def stretch(self, first: int, last: int) -> ByteRanges:
        """Of all their bytes, in order, number `first` to number `last`, the latter not included."""
        moved = self.starts - np.concatenate([[0], np.cumsum(self.stops - self.starts)[:-1]]).astype(np.int64)
        starts, stops = np.maximum(self.starts, moved + first), np.minimum(self.stops, moved + last)
        kept = starts < stops
        return ByteRanges(starts[kept], stops[kept])

    def without(self, others: ByteRanges) -> ByteRanges:
        """What of them is in none of `others`."""
        edges = np.unique(np.concatenate([self.starts, self.stops, others.starts, others.stops]))
        starts, stops = edges[:-1], edges[1:]
        rest = (self.overlap_bytes(starts, stops) > 0) & (others.overlap_bytes(starts, stops) == 0)
        return ByteRanges.merged(starts[rest], stops[rest])

    def overlap_bytes(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many bytes of each range [starts[i], stops[i]) are among these."""
        return self._bytes_below(stops) - self._bytes_below(starts)

    def _bytes_below(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        below = np.concatenate([[0], np.cumsum(self.stops - self.starts)])
        begun = np.searchsorted(self.starts, offsets)
        last_stops = np.concatenate([[0], self.stops])[begun]
        found: NDArray[np.int64] = below[begun] - np.maximum(0, last_stops - offsets)
        return found


class HeldRange(NamedTuple):
    """Bytes [start, stop) of a file in `memory`, and what its fingerprint was when they were put there."""

    start: int
    stop: int
    memory: memoryview
    fingerprint: int


class Segment(NamedTuple):
    """Bytes [start, stop) of a file. `memory` is shared: others read it, and nobody may write to it."""

    start: int
    stop: int
    memory: memoryview


class HeldRanges:
    """What is held of one file: disjoint ranges in order. `used` numbers say which was used last."""

    def __init__(self) -> None:
        self._starts, self._stops, self._used, self._fingerprints = (array("q") for _ in range(4))
        self._memories: list[memoryview] = []

    def __len__(self) -> int:
        return len(self._memories)

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.array(self._starts, dtype=np.int64)

    @property
    def stops(self) -> NDArray[np.int64]:
        return np.array(self._stops, dtype=np.int64)

    @property
    def sizes(self) -> NDArray[np.int64]:
        return self.stops - self.starts

    @property
    def used(self) -> NDArray[np.int64]:
        return np.array(self._used, dtype=np.int64)

    def covering(self, start: int, stop: int) -> list[HeldRange] | None:
        """The ranges that together hold [start, stop), in order; None unless all of it is held. Not for empty ones."""
        found: list[HeldRange] = []
        at = max(0, bisect_right(self._starts, start) - 1)
        while start < stop:
            if at == len(self) or not self._starts[at] <= start < self._stops[at]:
                return None
            found.append(HeldRange(self._starts[at], self._stops[at], self._memories[at], self._fingerprints[at]))
            start = self._stops[at]
            at += 1
        return found

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that are not held, in order."""
        parts: list[tuple[int, int]] = []
        at = bisect_right(self._stops, start)
        while start < stop:
            held_from = self._starts[at] if at < len(self) else stop
            if start < held_from:
                parts.append((start, min(stop, held_from)))
            if held_from >= stop:
                break
            start = self._stops[at]
            at += 1
        return parts

    def add(self, held: HeldRange, used: int) -> None:
        """Takes a range of which nothing is held yet."""
        at = bisect_left(self._starts, held.start)
        self._starts.insert(at, held.start)
        self._stops.insert(at, held.stop)
        self._fingerprints.insert(at, held.fingerprint)
        self._used.insert(at, used)
        self._memories.insert(at, held.memory)

    def use(self, held: HeldRange, used: int) -> None:
        """Notes that a range was used, if it is still the one that is held."""
        at = self._place(held)
        if at is not None:
            self._used[at] = used

    def drop(self, held: HeldRange) -> bool:
        """Lets go of a range; False if it is not held any more."""
        at = self._place(held)
        if at is None:
            return False
        for column in (self._starts, self._stops, self._fingerprints, self._used, self._memories):
            del column[at]
        return True

    def drop_all(self, doomed: NDArray[np.bool_]) -> list[memoryview]:
        """Lets go of the ranges at these places and returns their memory, for the caller to drop."""
        kept = ~doomed
        for column in (self._starts, self._stops, self._fingerprints, self._used):
            column[:] = array("q", np.array(column, dtype=np.int64)[kept].tobytes())
        dropped = list(compress(self._memories, doomed.tolist()))
        self._memories = list(compress(self._memories, kept.tolist()))
        return dropped

    def _place(self, held: HeldRange) -> int | None:
        at = bisect_left(self._starts, held.start)
        return at if at < len(self) and self._memories[at] is held.memory else None


def clipped(held: HeldRange, start: int, stop: int) -> Segment:
    """What of a range is within [start, stop)."""
    start, stop = max(start, held.start), min(stop, held.stop)
    if (start, stop) == (held.start, held.stop):
        return Segment(start, stop, held.memory)
    return Segment(start, stop, held.memory[start - held.start : stop - held.start])


def copy_segments(segments: Sequence[Segment], view: memoryview) -> None:
    """Copies segments that follow each other to memory of their size. Other threads run meanwhile."""
    at = 0
    for segment in segments:
        stop = at + segment.stop - segment.start
        np.copyto(np.frombuffer(view[at:stop], np.uint8), np.frombuffer(segment.memory, np.uint8))
        at = stop
