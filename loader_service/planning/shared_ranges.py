"""Which bytes several ranks of one node want: a sweep over what each of them reads.

The node's bytes are cut where the set of ranks that want them changes. What two or more want is shared, and with it
what would cost more to read apart: small neighbours that one rank wants (the first and the last row of a column slice),
and gaps that lie between shared bytes and that some rank's plan reads over anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loader_service.checkpoint.catalog import Catalog
from loader_service.planning.rank_plan import RankPlan

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]


class Line:
    """All shards one behind the other, in plan order: one number for a shard and an offset.

    Ranges of two shards never touch on it, since every shard begins with its header.
    """

    def __init__(self, catalog: Catalog) -> None:
        sizes = [shard.identity.size_bytes for shard in catalog.shards]
        self.shard_start: Int64s = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))

    def at(self, shard: npt.NDArray[np.int32], offset: Int64s) -> Int64s:
        found: Int64s = self.shard_start[shard] + offset
        return found

    def shards(self, start: Int64s) -> npt.NDArray[np.int32]:
        """The shards in which ranges start."""
        return (np.searchsorted(self.shard_start, start, side="right") - 1).astype(np.int32)

    def fragments(self, plan: RankPlan) -> tuple[Int64s, Int64s]:
        """Starts and stops of a plan's fragments, ascending and disjoint."""
        return self.at(plan.fragment_shard, plan.fragment_start), self.at(plan.fragment_shard, plan.fragment_stop)

    def extents(self, plan: RankPlan) -> tuple[Int64s, Int64s]:
        """Starts and stops of a plan's extents, ascending and disjoint."""
        return self.at(plan.extent_shard, plan.extent_start), self.at(plan.extent_shard, plan.extent_stop)


@dataclass(frozen=True, slots=True)
class Segments:
    """Segment s is [bounds[s], bounds[s + 1]) of the line; bit r of `wants[s]` says that plan r wants all of it.

    Neighbours differ in `wants`; where it is 0 nobody wants anything. `bounds` has one item more, or none.
    """

    bounds: Int64s
    wants: Uint64s

    @property
    def nbytes(self) -> Int64s:
        return np.diff(self.bounds)

    def wanted_within(self, start: Int64s, stop: Int64s) -> Uint64s:
        """For each range, none of them empty, the plans that want any of it."""
        first = np.searchsorted(self.bounds, start, side="right") - 1
        last = np.searchsorted(self.bounds, stop, side="left")
        pairs = np.stack((first, last), axis=1).ravel()
        closed = np.append(self.wants, np.uint64(0))  # the last range may end with the last segment
        found: Uint64s = np.bitwise_or.reduceat(closed, pairs)[::2] if len(pairs) else closed[:0]
        return found


def segments_of(line: Line, plans: Sequence[RankPlan]) -> Segments:
    """The node's bytes by who wants them. Counts what fragments hold, not the gaps between them."""
    bounds: list[Int64s] = []
    bits: list[Uint64s] = []
    for place, plan in enumerate(plans):
        start, stop = line.fragments(plan)
        if len(start):
            apart = start[1:] != stop[:-1]
            bounds += (start[np.append(True, apart)], stop[np.append(apart, True)])
            bits.append(np.full(2 * (1 + np.count_nonzero(apart)), 1 << place, dtype=np.uint64))
    if not bounds:
        return Segments(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64))
    events, toggled = np.concatenate(bounds), np.concatenate(bits)
    order = np.argsort(events, kind="stable")
    events, toggled = events[order], toggled[order]
    first = np.flatnonzero(np.append(True, events[1:] != events[:-1]))
    wants = np.bitwise_xor.accumulate(np.bitwise_xor.reduceat(toggled, first))
    return Segments(events[first], wants[:-1])


def shared_ranges(
    line: Line, plans: Sequence[RankPlan], segments: Segments, *, fringe_bytes: int
) -> tuple[Int64s, Int64s]:
    """(starts, stops) of what is read once for several ranks, ascending; ranges do not touch.

    A segment that one rank wants is taken along if it touches a shared one and has at most `fringe_bytes`.
    """
    wants = segments.wants
    several = wants & (wants - np.uint64(1)) != 0
    fringe = (wants != 0) & (segments.nbytes <= fringe_bytes) & _beside(several)
    taken = several | fringe
    between = np.flatnonzero((wants[1:-1] == 0) & taken[:-2] & taken[2:]) + 1
    taken[between[_read_over(line, plans, segments.bounds[between])]] = True
    edges = np.diff(np.concatenate(([False], taken, [False])).astype(np.int8))
    return segments.bounds[np.flatnonzero(edges == 1)], segments.bounds[np.flatnonzero(edges == -1)]


def _beside(taken: Bools) -> Bools:
    """Which segments have a taken one before or after them."""
    found: Bools = np.append(False, taken[:-1]) | np.append(taken[1:], False)
    return found


def _read_over(line: Line, plans: Sequence[RankPlan], at: Int64s) -> Bools:
    """Which gaps, given by where they start, lie in an extent of any plan."""
    found = np.zeros(len(at), dtype=np.bool_)
    for plan in plans:
        start, stop = line.extents(plan)
        if len(start):
            extent = np.searchsorted(start, at, side="right") - 1
            found |= (extent >= 0) & (at < stop[np.maximum(extent, 0)])
    return found
