"""Groups a rank's plan into units: what is leased, read and handed over together, in plan order.

Pure. A unit never crosses the end of the plan's order, so filling units one after the other and handing them over in
that order is all that a consumer's guarantees need. Unlike extents, units depend on how much memory a rank gives
(`staging.capacity_bytes`), so ranks need not agree on them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from loader_service.planning.fragments import View, subdivide
from loader_service.planning.plan import RankPlan

ALIGNMENT_BYTES = 64  # of tensors within shared memory: a cache line, and a multiple of every element's size


@dataclass(frozen=True, slots=True)
class TensorUnit:
    """Tensors [first, stop) of a rank's plan, read into memory of their own. `nbytes` is the sum of their bytes."""

    first: int
    stop: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A contiguous file range [start, stop) of one fragment, at `slot_offset` of its unit's staging slot.

    The `gap_bytes` of the file just before it belong to the same extent, are read, and are thrown away.
    A zero-size tensor is a Placed without bytes (`fragment` -1).
    """

    tensor: int
    fragment: int
    start: int
    stop: int
    gap_bytes: int
    slot_offset: int
    views: tuple[View, ...]


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


def gaps_before(plan: RankPlan) -> np.ndarray:
    """For each fragment, the bytes between it and the fragment before it in the same extent (int64[F])."""
    gaps = np.zeros(len(plan.fragment_start), dtype=np.int64)
    if len(gaps) > 1:
        gaps[1:] = plan.fragment_start[1:] - plan.fragment_stop[:-1]
        gaps[plan.extent_first_fragment[:-1]] = 0
    return gaps


def fragments_of_tensors(plan: RankPlan) -> np.ndarray:
    """int64[T+1]: tensor i's fragments are [result[i], result[i+1]); none for a zero-size tensor."""
    return np.searchsorted(plan.fragment_tensor, np.arange(len(plan.tensor_ids) + 1))


def slot_units(plan: RankPlan, *, slot_bytes: int, max_pieces: int = sys.maxsize) -> Iterator[list[Placed]]:
    """Everything that a rank takes, cut and packed into staging slots of `slot_bytes`, in plan order.

    A tensor larger than a slot comes in several units; a slot takes at most `max_pieces` ranges of the file. Bytes keep
    their address modulo 64 from the file, so that what lies aligned in the file lies aligned in memory.
    """
    bounds = fragments_of_tensors(plan).tolist()
    reached = (plan.fragment_start - gaps_before(plan)).tolist()
    unit: list[Placed] = []
    used = 0
    for tensor in range(len(plan.tensor_ids)):
        if bounds[tensor] == bounds[tensor + 1]:
            unit.append(_empty(plan, tensor))
        for fragment in range(bounds[tensor], bounds[tensor + 1]):
            before = reached[fragment]
            for sub in subdivide(plan, fragment, slot_bytes - ALIGNMENT_BYTES):
                offset = used + (sub.start - used) % ALIGNMENT_BYTES
                if offset + sub.stop - sub.start > slot_bytes or len(unit) >= max_pieces:
                    yield unit
                    unit, offset = [], sub.start % ALIGNMENT_BYTES
                unit.append(Placed(tensor, fragment, sub.start, sub.stop, sub.start - before, offset, sub.views))
                used = offset + sub.stop - sub.start
                before = sub.stop
    if unit:
        yield unit


def _empty(plan: RankPlan, tensor: int) -> Placed:
    shape = plan.storage_shape(tensor)
    strides = tuple(np.cumprod((1, *shape[:0:-1]))[::-1].tolist()) if shape else ()
    return Placed(tensor, -1, 0, 0, 0, 0, (View(0, shape, strides, ()),))
