"""Cuts ranges of the checkpoint and packs them into blocks of one slot each, in plan order.

A range lies in its slot where its offset in the file is, modulo the page, so that it can be read past the page cache in
place; no two ranges have a page of the slot in common, so that each can be read in whole pages. Cuts fall between
elements, between tensors or rows where those are small against the slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from loader_service.checkpoint.catalog import Catalog
from loader_service.checkpoint.dtypes import DTYPE_LIST
from loader_service.checkpoint.slices import numbers_of
from loader_service.planning.shared_ranges import Line
from loader_service.planning.storage import storage_form

Int64s = npt.NDArray[np.int64]

PAGE_BYTES: Final = 4096
LEAST_SLOT_BYTES: Final = 2 * PAGE_BYTES
"""Of which a range that starts anywhere in a page has at least a page."""

_SMALL_PART = 16  # a sixteenth of a slot is small against it: left empty rather than cutting a tensor or a row


@dataclass(frozen=True, slots=True)
class Packed:
    """Ranges [start, stop) of the line, at `offset` of their slot; block b has ranges [first[b], first[b + 1])."""

    start: Int64s
    stop: Int64s
    offset: Int64s
    first: Int64s


def pack(line: Line, catalog: Catalog, start: Int64s, stop: Int64s, *, slot_bytes: int) -> Packed:
    """The ranges, ascending and not touching, cut into blocks. `slot_bytes` is at least LEAST_SLOT_BYTES."""
    capacity = slot_bytes // PAGE_BYTES * PAGE_BYTES
    small = capacity // _SMALL_PART
    cuts = _Cuts(line, catalog, small)
    starts: list[int] = []
    stops: list[int] = []
    offsets: list[int] = []
    first = [0]
    used = 0
    shard_start = line.shard_start[line.shards(start)]
    for at, end, offset_0 in zip(*map(numbers_of, (start, stop, shard_start)), strict=True):
        while at < end:
            offset = -(-used // PAGE_BYTES) * PAGE_BYTES + (at - offset_0) % PAGE_BYTES
            reach = min(end, at + capacity - offset)
            if reach < end:
                reach = cuts.before(at, reach) if not used or capacity - offset >= small else at
                if reach <= at:
                    first.append(len(starts))
                    used = 0
                    continue
            starts.append(at)
            stops.append(reach)
            offsets.append(offset)
            used = offset + reach - at
            at = reach
    if len(starts) > first[-1]:
        first.append(len(starts))
    return Packed(*(np.array(column, dtype=np.int64) for column in (starts, stops, offsets, first)))


class _Cuts:
    """Where a range may be cut."""

    def __init__(self, line: Line, catalog: Catalog, small_bytes: int) -> None:
        held = np.flatnonzero(catalog.stops > catalog.starts)
        self._catalog = catalog
        self._small_bytes = small_bytes
        self._ids = held
        self._start = line.at(catalog.shard_ids[held], catalog.starts[held])
        self._steps: dict[tuple[int, tuple[int, ...]], int] = {}

    def before(self, start: int, limit: int) -> int:
        """Where to cut a range from `start` that may reach `limit`; `start` or less where nothing can be cut off."""
        number = int(np.searchsorted(self._start, limit, side="right")) - 1
        tensor_start = int(self._start[number])
        if start < tensor_start and limit - tensor_start < self._small_bytes:
            return tensor_start
        step = self._step(int(self._ids[number]))
        return tensor_start + (limit - tensor_start) // step * step

    def _step(self, tensor: int) -> int:
        """Bytes of the largest unit of a tensor that is small: rows of its first dimension, or of a later one."""
        key = int(self._catalog.dtype_ids[tensor]), self._catalog.shapes[tensor]
        step = self._steps.get(key)
        if step is None:
            form = storage_form(DTYPE_LIST[key[0]], key[1])
            step = form.itemsize
            for size in reversed(form.shape[1:]):
                if step * size > self._small_bytes:
                    break
                step *= size
            self._steps[key] = step
        return step
