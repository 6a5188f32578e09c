"""Groups a rank's plan into units: what is leased, read and handed over together, in plan order.

Pure. A unit never crosses the end of the plan's order, so filling units one after the other and handing them over in
that order is all that a consumer's guarantees need. Unlike extents, units depend on how much memory a rank gives
(`staging.capacity_bytes`), so ranks need not agree on them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from loader_service.checkpoint.slices import AT_ONCE
from loader_service.planning.fragments import View, subdivide
from loader_service.planning.images import BLOCK_BYTES, Image, block_ceil
from loader_service.planning.plan import RankPlan


@dataclass(frozen=True, slots=True)
class TensorUnit:
    """Tensors [first, stop) of a rank's plan, read into memory of their own. `nbytes` is the sum of their bytes."""

    first: int
    stop: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A contiguous file range [start, stop) of one fragment, at `slot_offset` of its unit's staging slot.

    A zero-size tensor is a Placed without bytes (`fragment` -1).
    """

    tensor: int
    fragment: int
    start: int
    stop: int
    slot_offset: int
    views: tuple[View, ...]


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """What lies in one staging slot, and the images that fill it, in plan order; none if all of it is empty, or if the
    slot is a block that ranks of a node share, whose number is `block`."""

    placed: list[Placed] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    block: int | None = None


def tensor_units(nbytes: np.ndarray, *, unit_bytes: int, max_tensors: int) -> Iterator[TensorUnit]:
    """Consecutive tensors up to `unit_bytes` and `max_tensors` a unit; a larger tensor is a unit alone."""
    first, held = 0, 0
    for i, size in enumerate(nbytes.tolist()):
        if i > first and (held + size > unit_bytes or i - first >= max_tensors):
            yield TensorUnit(first, i, held)
            first, held = i, 0
        held += size
    if first < len(nbytes):
        yield TensorUnit(first, len(nbytes), held)


def fragments_of_tensors(plan: RankPlan) -> np.ndarray:
    """int64[T+1]: tensor i's fragments are [result[i], result[i+1]); none for a zero-size tensor."""
    return np.searchsorted(plan.fragment_tensor, np.arange(len(plan.tensor_ids) + 1))


def extents_of_fragments(plan: RankPlan) -> np.ndarray:
    """int64[F]: the extent that each fragment lies in."""
    return np.repeat(np.arange(len(plan.extent_start)), np.diff(plan.extent_first_fragment))


def slot_units(plan: RankPlan, *, slot_bytes: int, max_pieces: int = sys.maxsize) -> Iterator[SlotLayout]:
    """Everything that a rank takes, cut and packed into staging slots of `slot_bytes` and a block, in plan order.

    A tensor larger than `slot_bytes` comes in several units; a slot takes at most `max_pieces` ranges of the file. What
    a slot has of one extent is one image, with the gaps of that extent.
    """
    slot = SlotBuilder(plan, slot_bytes + BLOCK_BYTES)
    for tensor, fragment, extent in _fragments_in_order(plan):
        if fragment < 0:
            slot.layout.placed.append(empty_place(plan, tensor))
            continue
        for sub in subdivide(plan, fragment, slot_bytes):
            if len(slot.layout.placed) >= max_pieces or not slot.takes(extent, sub.start, sub.stop):
                yield slot.finish()
            offset = slot.add(extent, fragment, tensor, sub.start, sub.stop)
            slot.layout.placed.append(Placed(tensor, fragment, sub.start, sub.stop, offset, sub.views))
    if slot.layout.placed:
        yield slot.finish()


def _fragments_in_order(plan: RankPlan) -> Iterator[tuple[int, int, int]]:
    """(tensor, fragment, extent) in plan order; (tensor, -1, -1) for a zero-size tensor."""
    bounds, extents = fragments_of_tensors(plan), extents_of_fragments(plan)
    for at in range(0, len(plan), AT_ONCE):
        own = bounds[at : at + AT_ONCE + 1].tolist()
        of_fragment = extents[own[0] : own[-1]].tolist()
        for tensor, (first, stop) in enumerate(pairwise(own), at):
            if first == stop:
                yield tensor, -1, -1
            for fragment in range(first, stop):
                yield tensor, fragment, of_fragment[fragment - own[0]]


class SlotBuilder:
    """The slot that is being laid out: what is in it, and the image that may still grow."""

    def __init__(self, plan: RankPlan, nbytes: int) -> None:
        self._plan = plan
        self._nbytes = nbytes
        self._begin()

    def _begin(self) -> None:
        self.layout = SlotLayout()
        self._used = 0
        self._extent = -1
        self._begin_image(0, 0, 0)

    def _begin_image(self, shard: int, start: int, offset: int) -> None:
        self._shard, self._start, self._offset = shard, start, offset
        self._stops: list[int] = []
        self._tensors: list[int] = []

    def takes(self, extent: int, start: int, stop: int) -> bool:
        return self._place(extent, start) + stop - start <= self._nbytes

    def add(self, extent: int, fragment: int, tensor: int, start: int, stop: int) -> int:
        """Where in the slot the bytes go."""
        offset = self._place(extent, start)
        if extent != self._extent:
            self._end_image()
            self._extent = extent
            self._begin_image(int(self._plan.fragment_shard[fragment]), start, offset)
        self._stops.append(stop)
        self._tensors.append(tensor)
        self._used = offset + stop - start
        return offset

    def finish(self) -> SlotLayout:
        """The layout; what comes next goes to another slot."""
        self._end_image()
        layout = self.layout
        self._begin()
        return layout

    def _place(self, extent: int, start: int) -> int:
        if extent == self._extent:
            return self._offset + start - self._start
        return block_ceil(self._used) + start % BLOCK_BYTES

    def _end_image(self) -> None:
        if self._stops:
            of_file = (self._shard, self._start, self._stops[-1])
            self.layout.images.append(Image(*of_file, 0, self._offset, self._stops, self._tensors))


def empty_place(plan: RankPlan, tensor: int) -> Placed:
    """The place of a zero-size tensor."""
    shape = plan.storage_shape(tensor)
    strides = tuple(np.cumprod((1, *shape[:0:-1]))[::-1].tolist()) if shape else ()
    return Placed(tensor, -1, 0, 0, 0, (View(0, shape, strides, ()),))
