"""How a tensor's bytes are seen as elements: the shape that memory and files share, where the header's may differ.

A dtype of whole bytes keeps its shape. F4 packs two elements in a byte, as torch sees it: its last dimension is halved.
What torch cannot hold (F6, and F4 with an odd last dimension) is bytes: the last dimension counts them, or the tensor
is flat where its rows are no whole bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loader_service.checkpoint.dtypes import DType
from loader_service.planning.cuts import Interval

RAW_CODE = "U8"


@dataclass(frozen=True, slots=True)
class StorageForm:
    """A tensor in storage elements of `itemsize` bytes. `dtype_code` is U8 where it is handed over as raw bytes."""

    shape: tuple[int, ...]
    itemsize: int
    dtype_code: str
    flat: bool


def needs_raw(dtype: DType, shape: Sequence[int]) -> bool:
    """Whether torch cannot hold such a tensor, so that only raw bytes of it can be handed over."""
    return dtype.torch_name is None or (dtype.bits < 8 and (not shape or shape[-1] * dtype.bits % 8 != 0))


def storage_form(dtype: DType, shape: tuple[int, ...]) -> StorageForm:
    """The form in which a tensor of the header's `shape` is stored and handed over."""
    if dtype.bits >= 8:
        return StorageForm(shape, dtype.bits // 8, dtype.code, flat=False)
    code = RAW_CODE if needs_raw(dtype, shape) else dtype.code
    if shape and shape[-1] * dtype.bits % 8 == 0:
        return StorageForm((*shape[:-1], shape[-1] * dtype.bits // 8), 1, code, flat=False)
    return StorageForm((math.prod(shape) * dtype.bits // 8,), 1, code, flat=True)


def splits_a_byte(dtype: DType, shape: Sequence[int], dim: int, edges: Sequence[int]) -> bool:
    """Whether cutting dimension `dim` at `edges` (in the header's elements) cuts through a byte."""
    inner_bits = math.prod(shape[dim + 1 :]) * dtype.bits
    return any(edge * inner_bits % 8 for edge in edges)


def stored_intervals(
    dtype: DType, shape: tuple[int, ...], intervals: Sequence[Sequence[Interval]]
) -> list[Sequence[Interval]]:
    """Intervals of each of the header's dimensions as intervals of each of the stored ones.

    None of them may split a byte; of a flat form only the first dimension that is longer than 1 may be cut.
    """
    form = storage_form(dtype, shape)
    if dtype.bits >= 8:
        return list(intervals)
    if not form.flat:
        return [*intervals[:-1], [(a * dtype.bits // 8, b * dtype.bits // 8) for a, b in intervals[-1]]]
    if not all(any(start < stop for start, stop in dim) for dim in intervals):
        return [()]
    dim = first_long_dim(shape)
    inner_bits = math.prod(shape[dim + 1 :]) * dtype.bits
    return [[(a * inner_bits // 8, b * inner_bits // 8) for a, b in intervals[dim]]]


def first_long_dim(shape: Sequence[int]) -> int:
    """The first dimension of another length than 1; the last one if there is none."""
    return next((dim for dim, size in enumerate(shape) if size != 1), len(shape) - 1)
