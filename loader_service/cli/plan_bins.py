"""Ranges of a checkpoint's bytes, counted and laid over equal parts of its files. Pure; all files are one `Line`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from loader_service.planning.shared_ranges import Line

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Ranges = tuple[Int64s, Int64s]
"""Starts and stops on the line, ascending and disjoint."""

NOTHING: Final[Ranges] = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Bins:
    """Every file in equal parts, to scale: the longest has `most` of them, a short one at least one.

    Bins [first[s], first[s + 1]) are those of shard s; bin b is bytes [start[b], stop[b]) of the line.
    """

    first: Int64s
    start: Int64s
    stop: Int64s

    @classmethod
    def of(cls, line: Line, most: int) -> Bins:
        sizes = np.diff(line.shard_start)
        counts = np.rint(sizes * (most / max(1, int(sizes.max(initial=1))))).astype(np.int64)
        counts = np.minimum(np.maximum(counts, 1), np.maximum(sizes, 1))
        first = np.concatenate(([0], np.cumsum(counts)))
        shard = np.repeat(np.arange(len(sizes)), counts)
        number = np.arange(len(shard)) - first[shard]
        begin, size, count = line.shard_start[shard], sizes[shard], counts[shard]
        return cls(first, begin + size * number // count, begin + size * (number + 1) // count)

    def __len__(self) -> int:
        return len(self.start)

    def count(self, shard: int) -> int:
        """How many bins a shard has."""
        return int(self.first[shard + 1] - self.first[shard])

    def share(self, ranges: Ranges) -> Floats:
        """Which part of each bin lies in the ranges, 0 to 1."""
        found: Floats = self.bytes_in(ranges) / np.maximum(self.stop - self.start, 1)
        return found

    def bytes_in(self, ranges: Ranges) -> Int64s:
        """How many bytes of each bin lie in the ranges."""
        return below(ranges, self.stop) - below(ranges, self.start)

    def together(self, most: int) -> tuple[Bins, Int64s]:
        """(Wider bins, at most `most` a shard, each of whole bins of these; the first bin of each, and the end)."""
        counts = np.diff(self.first)
        wide = np.minimum(counts, most)
        first = np.concatenate(([0], np.cumsum(wide)))
        shard = np.repeat(np.arange(len(counts)), wide)
        number = np.arange(len(shard)) - first[shard]
        own = np.append(self.first[:-1][shard] + counts[shard] * number // wide[shard], len(self))
        return Bins(first, self.start[own[:-1]], self.stop[own[1:] - 1]), own


def below(ranges: Ranges, at: Int64s) -> Int64s:
    """How many bytes of the ranges lie before each place."""
    start, stop = ranges
    if not len(start):
        return np.zeros(len(at), dtype=np.int64)
    sums = np.concatenate(([0], np.cumsum(stop - start)))
    reached = np.searchsorted(start, at, side="right")
    found: Int64s = sums[reached] - np.where(reached > 0, np.maximum(stop[np.maximum(reached, 1) - 1] - at, 0), 0)
    return found


def nbytes(ranges: Ranges) -> int:
    """How many bytes the ranges have together."""
    return int((ranges[1] - ranges[0]).sum())


def at_least(parts: Sequence[tuple[Ranges, int]], *least: int) -> list[Ranges]:
    """For each of `least`, what so many have: `parts` are ranges, and how many have them. Ranges that touch are one."""
    at = np.concatenate([bound for (start, stop), _ in parts for bound in (start, stop)] or [NOTHING[0]])
    by = np.concatenate([np.repeat([many, -many], len(start)) for (start, _), many in parts] or [NOTHING[0]])
    order = np.argsort(at, kind="stable")
    at, counts = at[order], np.cumsum(by[order])
    last = np.append(at[1:] != at[:-1], True)[: len(at)]  # of what begins and ends at one place, after all of it
    at, counts = at[last], counts[last]
    found = []
    for number in least:
        edges = np.diff(np.concatenate(([False], counts >= number)).astype(np.int8))
        found.append((at[edges == 1], at[edges == -1]))
    return found


def union(parts: Sequence[Ranges]) -> Ranges:
    """What any of them has."""
    (found,) = at_least([(part, 1) for part in parts], 1)
    return found
