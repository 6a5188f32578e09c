"""What a rank takes where ranks of its node share: which bytes come from which block, and the units of its slots.

Pure. As `units`, but bytes that the node shares are not read by the rank: they lie in a block, which is a unit's slot.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from loader_service.checkpoint.slices import AT_ONCE
from loader_service.planning.boxes import views_within
from loader_service.planning.fragments import PartGeometry, SubRange, subdivide
from loader_service.planning.images import BLOCK_BYTES
from loader_service.planning.plan import RankPlan
from loader_service.planning.sharing import PRIVATE, NodeBlocks, Portions, portions
from loader_service.planning.units import Placed, SlotBuilder, SlotLayout, empty_place, extents_of_fragments

_SMALL_PART = 16  # of a range: whole rows are cut where a row is smaller


class Stretch(NamedTuple):
    """Bytes [start, stop) of a shard, at `offset` of the slot of `block`; both -1 where the rank reads for itself."""

    start: int
    stop: int
    block: int
    offset: int


class SharedRanges:
    """Where bytes come from: looked up by file range. `shared_bytes` of the node's lie in blocks."""

    def __init__(self, blocks: NodeBlocks) -> None:
        bounds = np.searchsorted(blocks.range_shard, np.arange(int(blocks.range_shard.max(initial=-1)) + 2))
        numbers = np.repeat(np.arange(len(blocks)), np.diff(blocks.first_range))
        columns = (blocks.range_start, blocks.range_stop, numbers, blocks.range_offset)
        self._bounds: list[int] = bounds.tolist()
        self._start, self._stop, self._block, self._offset = (column.tolist() for column in columns)

    def within(self, shard: int, start: int, stop: int) -> Iterator[Stretch]:
        """[start, stop) of a shard, cut where shared ranges begin and end; in file order, all of it once."""
        if start == stop:
            return
        first, last = self._bounds[shard : shard + 2] if shard + 1 < len(self._bounds) else (0, 0)
        at = bisect_right(self._stop, start, first, last)
        for i in range(at, bisect_left(self._start, stop, at, last)):
            if start < self._start[i]:
                yield Stretch(start, self._start[i], PRIVATE, -1)
                start = self._start[i]
            end = min(stop, self._stop[i])
            yield Stretch(start, end, self._block[i], self._offset[i] + start - self._start[i])
            start = end
        if start < stop:
            yield Stretch(start, stop, PRIVATE, -1)


def shared_slot_units(plan: RankPlan, blocks: NodeBlocks, *, slot_bytes: int, max_pieces: int) -> Iterator[SlotLayout]:
    """As `slot_units`: what the node shares is in layouts with a block, which fills them; the rest as ever."""
    slots = _Slots(plan, slot_bytes, max_pieces)
    for tensor, fragment, extent, stretch in _stretches(plan, portions(plan, blocks)):
        if stretch is None:
            slots.layout.placed.append(empty_place(plan, tensor))
        elif stretch.block == PRIVATE:
            yield from slots.add_private(fragment, extent, stretch)
        else:
            yield from slots.add_shared(fragment, stretch)
    yield from slots.finish()


def _stretches(plan: RankPlan, found: Portions) -> Iterator[tuple[int, int, int, Stretch | None]]:
    """(tensor, fragment, extent, stretch) of every portion, in plan order; a zero-size tensor has no stretch.

    As lists, an element of an array costs three times as much; in slices, so that no list takes long to make.
    """
    bounds = np.searchsorted(plan.fragment_tensor, np.arange(len(plan) + 1))
    first = np.searchsorted(found.fragment, np.arange(len(plan.fragment_start) + 1))
    extents = extents_of_fragments(plan)
    for at in range(0, len(plan), AT_ONCE):
        fragments = bounds[at : at + AT_ONCE + 1].tolist()
        own = slice(fragments[0], fragments[-1] + 1)
        portion, extent = first[own].tolist(), extents[own].tolist()
        within = slice(portion[0], portion[-1])
        columns = (column[within].tolist() for column in (found.start, found.stop, found.block, found.offset))
        stretches = list(map(Stretch, *columns))
        for tensor, (begin, end) in enumerate(itertools.pairwise(fragments), at):
            if begin == end:
                yield tensor, -1, -1, None
            for i in range(begin - own.start, end - own.start):
                for stretch in stretches[portion[i] - within.start : portion[i + 1] - within.start]:
                    yield tensor, own.start + i, extent[i], stretch


def cut_within(plan: RankPlan, fragment: int, start: int, stop: int, most_bytes: int) -> Iterator[SubRange]:
    """Bytes [start, stop) of a fragment in ranges of at most `most_bytes`, with the views of what is wanted of each."""
    if start == plan.fragment_start[fragment] and stop == plan.fragment_stop[fragment]:
        yield from subdivide(plan, fragment, most_bytes)
        return
    geometry, _, first_byte = plan.origin(fragment)
    step = _step_of(geometry, most_bytes)
    for at in range(start, stop, step):
        end = min(at + step, stop)
        yield SubRange(at, end, views_within(geometry, at - first_byte, end - first_byte))


def _step_of(geometry: PartGeometry, most_bytes: int) -> int:
    """How many bytes to take at a time: whole rows where they are small, whole elements at least."""
    row_bytes = int(np.prod(geometry.full_shape[1:], dtype=np.int64)) * geometry.itemsize
    unit = row_bytes if 0 < row_bytes <= most_bytes // _SMALL_PART else geometry.itemsize
    return max(unit, most_bytes - most_bytes % unit)


class _Slots:
    """Lays out slots of the rank's own, and slots that blocks are, as portions come."""

    def __init__(self, plan: RankPlan, slot_bytes: int, max_pieces: int) -> None:
        self._plan = plan
        self._slot_bytes = slot_bytes
        self._max_pieces = max_pieces
        self._own = SlotBuilder(plan, slot_bytes + BLOCK_BYTES)
        self._shared: SlotLayout | None = None
        self._stretch = 0  # counts up wherever an image of the rank's own must not go on
        self._extent = -1

    @property
    def layout(self) -> SlotLayout:
        """What is laid out now, for what has no bytes."""
        return self._shared if self._shared is not None else self._own.layout

    def add_shared(self, fragment: int, stretch: Stretch) -> Iterator[SlotLayout]:
        plan = self._plan
        self._stretch += 1
        geometry, _, first_byte = plan.origin(fragment)
        views = views_within(geometry, stretch.start - first_byte, stretch.stop - first_byte)
        if not views:
            return
        if self._shared is None:
            yield from self._finish_own()
        elif self._shared.block != stretch.block or len(self._shared.placed) >= self._max_pieces:
            yield self._shared
            self._shared = None
        if self._shared is None:
            self._shared = SlotLayout(block=stretch.block)
        tensor = int(plan.fragment_tensor[fragment])
        self._shared.placed.append(Placed(tensor, fragment, stretch.start, stretch.stop, stretch.offset, views))

    def add_private(self, fragment: int, extent: int, stretch: Stretch) -> Iterator[SlotLayout]:
        if self._shared is not None:
            yield self._shared
            self._shared = None
        if extent != self._extent:
            self._extent = extent
            self._stretch += 1
        tensor = int(self._plan.fragment_tensor[fragment])
        for sub in cut_within(self._plan, fragment, stretch.start, stretch.stop, self._slot_bytes):
            full = len(self._own.layout.placed) >= self._max_pieces
            if full or not self._own.takes(self._stretch, sub.start, sub.stop):
                yield self._own.finish()
            offset = self._own.add(self._stretch, fragment, tensor, sub.start, sub.stop)
            self._own.layout.placed.append(Placed(tensor, fragment, sub.start, sub.stop, offset, sub.views))

    def finish(self) -> Iterator[SlotLayout]:
        if self._shared is not None:
            yield self._shared
        yield from self._finish_own()

    def _finish_own(self) -> Iterator[SlotLayout]:
        if self._own.layout.placed:
            yield self._own.finish()
