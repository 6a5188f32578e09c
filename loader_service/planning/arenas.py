"""Where owned tensors lie in memory: small ones as in the file, in arenas, large ones in memory of their own.

Pure. An arena is an image of consecutive bytes of the file, so that one read fills all tensors in it. It is small,
since one tensor that is kept keeps all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from loader_service.checkpoint.dtypes import DTYPE_LIST
from loader_service.planning.images import BLOCK_BYTES, Image, block_ceil, block_floor
from loader_service.planning.plan import RankPlan
from loader_service.planning.units import extents_of_fragments, fragments_of_tensors

ARENA_BYTES = 1 << 20  # what one kept small tensor keeps alive at most; larger tensors own their memory alone
_PACKED_BYTES = 64  # what tensors in shared memory are aligned to: a cache line, a multiple of any element's size
_AT_ONCE = 1024  # tensors whose columns become lists together: bounds how long that takes


@dataclass(frozen=True, slots=True)
class OwnedLayout:
    """Tensors [first, stop) of a rank's plan, and memory for them.

    `buffers` are the bytes of each piece of memory, `places` the buffer of each tensor and the offset in it (buffer -1:
    no bytes). `images` fill tensors, by whole buffers; the tensors `in_parts` are filled fragment by fragment. `nbytes`
    is the memory of all buffers, in whole blocks.
    """

    first: int
    stop: int
    nbytes: int
    buffers: list[int]
    places: list[tuple[int, int]]
    images: list[Image]
    in_parts: list[int]


class _Part(NamedTuple):
    """A tensor's bytes. `extent` -1: they are read in parts, since they do not lie together in the file, or not as the
    memory of a large tensor needs them; `lead` is then where memory of its own begins in its block."""

    nbytes: int
    extent: int
    shard: int
    start: int
    lead: int


def owned_units(plan: RankPlan, *, unit_bytes: int, max_tensors: int) -> Iterator[OwnedLayout]:
    """Consecutive tensors with up to `unit_bytes` of memory (at least a block) and `max_tensors` a unit; a larger
    tensor is alone."""
    most_bytes = max(unit_bytes, BLOCK_BYTES)
    layout = _Layout(0)
    for tensor, part in enumerate(_parts(plan)):
        full = layout.nbytes + layout.more_bytes(part) > most_bytes
        if tensor > layout.first and (full or tensor - layout.first >= max_tensors):
            yield layout.finish(tensor)
            layout = _Layout(tensor)
        layout.add(tensor, part)
    if layout.first < len(plan):
        yield layout.finish(len(plan))


def needs_copies(plan: RankPlan) -> bool:
    """Whether elements of any owned tensor are copied to their place: from blocks with gaps, or to shared memory."""
    several = plan.fragment_tensor[1:][plan.fragment_tensor[1:] == plan.fragment_tensor[:-1]]
    return bool((plan.fragment_dst < 0).any() or (plan.tensor_nbytes[several] < ARENA_BYTES).any())


class _Layout:
    """The unit that is being laid out, and its arena that may still grow."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.nbytes = 0
        self._buffers: list[int] = []
        self._places: list[tuple[int, int]] = []
        self._images: list[Image] = []
        self._in_parts: list[int] = []
        self._packed = -1  # the buffer that small tensors read in parts share
        self._begin_image(-1, 0, 0)

    def _begin_image(self, extent: int, shard: int, start: int) -> None:
        self._extent, self._shard, self._start = extent, shard, start
        self._base = block_floor(start)
        self._stops: list[int] = []
        self._tensors: list[int] = []

    def more_bytes(self, part: _Part) -> int:
        """What the tensor adds to `nbytes`."""
        if part.nbytes == 0:
            return 0
        if self._in_arena(part):
            return block_ceil(part.start + part.nbytes) - block_ceil(self._stops[-1])
        if part.extent >= 0:
            return block_ceil(part.start + part.nbytes) - block_floor(part.start)
        if part.nbytes >= ARENA_BYTES:
            return block_ceil(part.lead + part.nbytes)
        held = self._buffers[self._packed] if self._packed >= 0 else 0
        offset = self._packed_offset(part)
        return block_ceil(offset + part.nbytes) - (block_ceil(held) if offset else 0)

    def add(self, tensor: int, part: _Part) -> None:
        more_bytes = self.more_bytes(part)
        self.nbytes += more_bytes
        if part.nbytes == 0:
            self._places.append((-1, 0))
        elif part.extent >= 0:
            if not self._in_arena(part):
                self._end_image()
                self._begin_image(part.extent, part.shard, part.start)
                self._buffers.append(0)
            self._buffers[-1] += more_bytes
            self._places.append((len(self._buffers) - 1, part.start - self._base))
            self._stops.append(part.start + part.nbytes)
            self._tensors.append(tensor)
            if part.nbytes >= ARENA_BYTES:
                self._end_image()
        else:
            self._end_image()
            self._in_parts.append(tensor)
            self._add_in_parts(part)

    def _add_in_parts(self, part: _Part) -> None:
        if part.nbytes >= ARENA_BYTES:
            self._buffers.append(part.lead + part.nbytes)
            self._places.append((len(self._buffers) - 1, part.lead))
            return
        offset = self._packed_offset(part)
        if offset == 0:
            self._packed = len(self._buffers)
            self._buffers.append(0)
        self._buffers[self._packed] = offset + part.nbytes
        self._places.append((self._packed, offset))

    def finish(self, stop: int) -> OwnedLayout:
        self._end_image()
        return OwnedLayout(self.first, stop, self.nbytes, self._buffers, self._places, self._images, self._in_parts)

    def _in_arena(self, part: _Part) -> bool:
        """Whether it lies in the open arena, which stays small."""
        if part.extent != self._extent or part.extent < 0 or part.nbytes >= ARENA_BYTES:
            return False
        return block_ceil(part.start + part.nbytes) - self._base <= ARENA_BYTES

    def _packed_offset(self, part: _Part) -> int:
        """Where in the shared buffer it goes; 0: at the beginning of a new one."""
        held = self._buffers[self._packed] if self._packed >= 0 else 0
        offset = held + -held % _PACKED_BYTES
        return offset if offset + part.nbytes <= ARENA_BYTES else 0

    def _end_image(self) -> None:
        if self._stops:
            of_file = (self._shard, self._start, self._stops[-1])
            image = Image(*of_file, len(self._buffers) - 1, self._start - self._base, self._stops, self._tensors)
            self._images.append(image)
        self._begin_image(-1, 0, 0)


def _parts(plan: RankPlan) -> Iterator[_Part]:
    bounds = fragments_of_tensors(plan)
    filled = np.flatnonzero(plan.tensor_nbytes)
    first = np.zeros(len(plan), dtype=np.int64)
    first[filled] = bounds[filled]
    if not len(filled):
        yield from (_Part(0, -1, 0, 0, 0) for _ in range(len(plan)))
        return
    start, dst = plan.fragment_start[first], plan.fragment_dst[first]
    itemsizes = np.array([max(1, dtype.bits // 8) for dtype in DTYPE_LIST])
    aligned = start % itemsizes[plan.catalog.dtype_ids[plan.tensor_ids]] == 0
    together = (np.diff(bounds) == 1) & (dst == 0) & (aligned | (plan.tensor_nbytes < ARENA_BYTES))
    extent = np.where(together, extents_of_fragments(plan)[first], -1)
    lead = np.where(aligned & (dst >= 0), (start - dst) % BLOCK_BYTES, 0)
    columns = (plan.tensor_nbytes, extent, plan.fragment_shard[first], start, lead)
    for at in range(0, len(plan), _AT_ONCE):
        # As lists: an element of an array costs three times as much, and there may be hundreds of thousands.
        lists = (column[at : at + _AT_ONCE].tolist() for column in columns)
        yield from map(_Part._make, zip(*lists, strict=True))
