"""Where owned tensors lie in memory: small ones as in the file, in arenas, large ones in memory of their own.

Pure. An arena is an image of consecutive bytes of the file, so that one read fills all tensors in it. It is small,
since one tensor that is kept keeps all of it. Work is done by arena, not by tensor: there may be hundreds of thousands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from loader_service.checkpoint.dtypes import DTYPE_LIST
from loader_service.checkpoint.slices import numbers_of
from loader_service.planning.images import BLOCK_BYTES, Image, block_ceil, block_floor
from loader_service.planning.plan import RankPlan
from loader_service.planning.units import extents_of_fragments, fragments_of_tensors

ARENA_BYTES = 1 << 20  # what one kept small tensor keeps alive at most; larger tensors own their memory alone
MOST_IN_PARTS = 256  # tensors of a unit that are read in parts, each of which costs as much as many that are not
_PACKED_BYTES = 64  # what tensors in shared memory are aligned to: a cache line, a multiple of any element's size


@dataclass(frozen=True, slots=True)
class OwnedLayout:
    """Tensors [first, stop) of a rank's plan, and memory for them.

    `buffers` are the bytes of each piece of memory; tensor `first + k` is in buffer `buffer_of[k]` from `offset_of[k]`
    on (buffer -1: no bytes). `images` fill tensors, by whole buffers; the tensors `in_parts` are filled fragment by
    fragment. `nbytes` is the memory of all buffers, in whole blocks.
    """

    first: int
    stop: int
    nbytes: int
    buffers: list[int]
    buffer_of: list[int]
    offset_of: list[int]
    images: list[Image]
    in_parts: list[int]


class _Item(NamedTuple):
    """Tensors [first, stop) that get memory together: those of an arena, or one alone.

    With `extent` >= 0 they are an image of `shard`, from `start` on, and tensor `first + k` ends at `stops[k]`. A
    tensor with -1 is read in parts, since its bytes do not lie together in the file, or not as the memory of a large
    tensor needs them; `lead` is then where memory of its own begins in its block.
    """

    first: int
    stop: int
    nbytes: int
    extent: int
    shard: int
    starts: list[int]
    stops: list[int]
    lead: int


def owned_units(plan: RankPlan, *, unit_bytes: int, max_tensors: int) -> Iterator[OwnedLayout]:
    """Consecutive tensors with up to `unit_bytes` of memory (at least a block) and `max_tensors` a unit; a larger
    tensor is alone."""
    most_bytes = max(unit_bytes, BLOCK_BYTES)
    layout = _Layout(0)
    for item in _items(plan, min(ARENA_BYTES, most_bytes), max_tensors):
        full = layout.nbytes + layout.more_bytes(item) > most_bytes or len(layout.in_parts) >= MOST_IN_PARTS
        if item.first > layout.first and (full or item.stop - layout.first > max_tensors):
            yield layout.finish(item.first)
            layout = _Layout(item.first)
        layout.add(item)
    if layout.first < len(plan):
        yield layout.finish(len(plan))


def needs_copies(plan: RankPlan) -> bool:
    """Whether elements of any owned tensor are copied to their place: from blocks with gaps, or to shared memory."""
    several = plan.fragment_tensor[1:][plan.fragment_tensor[1:] == plan.fragment_tensor[:-1]]
    return bool((plan.fragment_dst < 0).any() or (plan.tensor_nbytes[several] < ARENA_BYTES).any())


class _Layout:
    """The unit that is being laid out."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.nbytes = 0
        self.in_parts: list[int] = []
        self._buffers: list[int] = []
        self._buffer_of: list[int] = []
        self._offset_of: list[int] = []
        self._images: list[Image] = []
        self._packed = -1  # the buffer that small tensors read in parts share

    def more_bytes(self, item: _Item) -> int:
        """What the item adds to `nbytes`."""
        if item.nbytes == 0:
            return 0
        if item.extent >= 0:
            return block_ceil(item.stops[-1]) - block_floor(item.starts[0])
        if item.nbytes >= ARENA_BYTES:
            return block_ceil(item.lead + item.nbytes)
        held = self._buffers[self._packed] if self._packed >= 0 else 0
        offset = self._packed_offset(item.nbytes)
        return block_ceil(offset + item.nbytes) - (block_ceil(held) if offset else 0)

    def add(self, item: _Item) -> None:
        self.nbytes += self.more_bytes(item)
        if item.nbytes == 0:
            self._place(-1, 0)
        elif item.extent >= 0:
            self._add_image(item)
        else:
            self.in_parts.append(item.first)
            self._add_in_parts(item)

    def _add_image(self, item: _Item) -> None:
        start, stop = item.starts[0], item.stops[-1]
        base, memory = block_floor(start), len(self._buffers)
        self._buffers.append(block_ceil(stop) - base)
        self._buffer_of += [memory] * len(item.starts)
        self._offset_of += [start - base for start in item.starts]
        tensors = range(item.first, item.stop)
        self._images.append(Image(item.shard, start, stop, memory, start - base, item.stops, tensors))

    def _add_in_parts(self, item: _Item) -> None:
        if item.nbytes >= ARENA_BYTES:
            self._buffers.append(item.lead + item.nbytes)
            self._place(len(self._buffers) - 1, item.lead)
            return
        offset = self._packed_offset(item.nbytes)
        if offset == 0:
            self._packed = len(self._buffers)
            self._buffers.append(0)
        self._buffers[self._packed] = offset + item.nbytes
        self._place(self._packed, offset)

    def _place(self, buffer: int, offset: int) -> None:
        self._buffer_of.append(buffer)
        self._offset_of.append(offset)

    def _packed_offset(self, nbytes: int) -> int:
        """Where in the shared buffer so many bytes go; 0: at the beginning of a new one."""
        held = self._buffers[self._packed] if self._packed >= 0 else 0
        offset = held + -held % _PACKED_BYTES
        return offset if offset + nbytes <= ARENA_BYTES else 0

    def finish(self, stop: int) -> OwnedLayout:
        places = (self._buffer_of, self._offset_of)
        return OwnedLayout(self.first, stop, self.nbytes, self._buffers, *places, self._images, self.in_parts)


def _items(plan: RankPlan, arena_bytes: int, max_tensors: int) -> Iterator[_Item]:
    extents, shards, starts, leads = _columns(plan)
    stops = starts + plan.tensor_nbytes
    small = (extents >= 0) & (plan.tensor_nbytes < ARENA_BYTES)
    # An arena ends before the next tensor that is not small, and with its extent.
    ends = np.flatnonzero(~(small[1:] & small[:-1] & (extents[1:] == extents[:-1]))) + 1
    first = 0
    for run_stop in numbers_of(np.append(ends, len(plan))):
        while first < run_stop:
            stop = first + 1
            if run_stop - first > 1:  # block_ceil(stop) <= most exactly where stop <= most, a whole block
                most = block_floor(int(starts[first])) + arena_bytes - arena_bytes % BLOCK_BYTES
                fitting = first + int(np.searchsorted(stops[first:run_stop], most, side="right"))
                stop = min(max(stop, fitting), first + max_tensors)
            place = (int(extents[first]), int(shards[first]))
            columns = (starts[first:stop].tolist(), stops[first:stop].tolist())
            yield _Item(first, stop, int(plan.tensor_nbytes[first:stop].sum()), *place, *columns, int(leads[first]))
            first = stop


def _columns(plan: RankPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For each tensor its extent, shard, first byte and lead, as in `_Item`. A tensor without bytes has extent -1."""
    bounds = fragments_of_tensors(plan)
    filled = np.flatnonzero(plan.tensor_nbytes)
    first = bounds[filled]
    extent, shard, start, lead = (np.full(len(plan), value) for value in (-1, 0, 0, 0))
    start[filled], shard[filled] = plan.fragment_start[first], plan.fragment_shard[first]
    dst = plan.fragment_dst[first]
    itemsizes = np.array([max(1, dtype.bits // 8) for dtype in DTYPE_LIST])
    aligned = start[filled] % itemsizes[plan.catalog.dtype_ids[plan.tensor_ids[filled]]] == 0
    small = plan.tensor_nbytes[filled] < ARENA_BYTES
    together = (np.diff(bounds)[filled] == 1) & (dst == 0) & (aligned | small)
    extent[filled] = np.where(together, extents_of_fragments(plan)[first], -1)
    lead[filled] = np.where(aligned & (dst >= 0), (start[filled] - dst) % BLOCK_BYTES, 0)
    return extent, shard, start, lead
