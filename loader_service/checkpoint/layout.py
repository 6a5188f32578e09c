"""Where a header's tensors lie in the payload: they must tile it without a hole, in some order, to the last byte.

The usual header is proven with a handful of numpy operations; whatever they do not prove is looked at again with
Python's exact integers, which find the tensor to blame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from loader_service.checkpoint.dtypes import DTYPE_IDS, DTYPES
from loader_service.checkpoint.refusal import refusal, shown
from loader_service.checkpoint.slices import column_of
from loader_service.checkpoint.strict import U64_LIMIT, Entries
from loader_service.errors import CheckpointError

_SHOWN_DIMENSIONS: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Columns over a header's tensors in the order of (begin, end, name); begins and ends count from the payload."""

    names: list[str]
    dtype_ids: NDArray[np.uint8]
    shapes: list[tuple[int, ...]]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]


def _total_bits(code: str, shape: tuple[int, ...]) -> int | None:
    count = element_count(shape)
    bits = None if count is None else count * DTYPES[code].bits
    return bits if bits is not None and bits < U64_LIMIT else None


def element_count(shape: tuple[int, ...]) -> int | None:
    """The product of the dimensions as a u64 multiplied from left to right; None where that overflows.

    The order matters: [2^63, 4, 0] overflows before the zero, [0, 2^63, 4] never does.
    """
    count = 1
    for size in shape:
        if not 0 <= size < U64_LIMIT:
            return None
        count *= size
        if count >= U64_LIMIT:
            return None
    return count


class _Kinds(dict[tuple[str, tuple[int, ...]], int]):
    """Numbers for pairs of (code, shape), whose bytes and dtype are worked out once per distinct pair.

    A checkpoint has 200,000 tensors and a dozen such pairs, so exact integers cost nothing here.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.dtype_ids: list[int] = []
        self.possible = True

    def __missing__(self, kind: tuple[str, tuple[int, ...]]) -> int:
        code, shape = kind
        bits = _total_bits(code, shape)
        self.possible = self.possible and bits is not None and bits % 8 == 0
        self.sizes.append((bits or 0) // 8)
        self.dtype_ids.append(DTYPE_IDS[code])
        self[kind] = number = len(self)
        return number


def proven_layout(entries: Entries, payload_bytes: int) -> Layout | None:
    """The sorted columns where the entries tile a payload of `payload_bytes`; None exactly where something is wrong."""
    n = len(entries.names)
    if not n:
        empty = np.zeros(0, dtype=np.int64)
        return Layout([], np.zeros(0, dtype=np.uint8), [], empty, empty) if payload_bytes == 0 else None
    try:
        begins = column_of(entries.begins, np.int64)
        ends = column_of(entries.ends, np.int64)
    except OverflowError:  # beyond 2^63, where no file reaches
        return None
    kinds = _Kinds()
    numbers = column_of([kinds[kind] for kind in zip(entries.codes, entries.shapes, strict=True)], np.int64)
    names, shapes = entries.names, entries.shapes
    sizes, dtype_ids = np.array(kinds.sizes)[numbers], np.array(kinds.dtype_ids, dtype=np.uint8)[numbers]
    # What ends before it begins is no difference of 64 bits; what follows each other from 0 on is not negative.
    if not kinds.possible or (ends < begins).any() or (ends - begins != sizes).any():
        return None
    # Ranges that touch in the header's own order and are not empty are sorted already: what every writer does.
    if not (sizes.all() and (begins[1:] == ends[:-1]).all()):
        order = _order(names, begins, ends)
        names, shapes = [names[i] for i in order], [shapes[i] for i in order]
        dtype_ids, begins, ends = dtype_ids[order], begins[order], ends[order]
    if begins[0] != 0 or ends[-1] != payload_bytes or (begins[1:] != ends[:-1]).any():
        return None
    return Layout(names, dtype_ids, shapes, begins, ends)


def _order(names: list[str], begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions sorted by (begin, end, name): the name gives empty tensors at one offset a stable place."""
    order = np.lexsort((ends, begins))
    tied = (begins[order[1:]] == begins[order[:-1]]) & (ends[order[1:]] == ends[order[:-1]])
    if tied.any():
        keys = list(zip(begins.tolist(), ends.tolist(), names, strict=True))
        order = np.array(sorted(range(len(names)), key=keys.__getitem__), dtype=np.int64)
    return order.astype(np.int64, copy=False)


def fault_of(entries: Entries, payload_bytes: int, path: str) -> CheckpointError:
    """The first fault in offset order of entries that have no proven layout: what to raise."""
    rows = zip(entries.begins, entries.ends, entries.names, entries.codes, entries.shapes, strict=True)
    reached = 0
    before: str | None = None
    for begin, end, name, code, shape in sorted(rows):
        if end < begin:
            return refusal(path, f"its data_offsets [{begin}, {end}] are reversed", tensor=name)
        if begin != reached:
            after = f"tensor {shown(before)} ends" if before is not None else "the payload starts"
            fault = f"{begin - reached} bytes belong to no tensor" if begin > reached else "they overlap"
            return refusal(path, f"it begins at {begin} where {after} at {reached}: {fault}", tensor=name)
        fault_of_size = _fault_of_size(code, shape, end - begin)
        if fault_of_size is not None:
            return refusal(path, fault_of_size, tensor=name)
        reached, before = end, name
    return _wrong_length(reached, payload_bytes, path)


def _fault_of_size(code: str, shape: tuple[int, ...], range_bytes: int) -> str | None:
    bits = _total_bits(code, shape)
    kind = f"{code} [{', '.join(map(str, shape[:_SHOWN_DIMENSIONS]))}{', ...' * (len(shape) > _SHOWN_DIMENSIONS)}]"
    if bits is None:
        return f"the size of {kind} overflows 64 bits"
    if bits % 8:
        return f"{kind} has {bits} bits, not a whole number of bytes"
    return None if bits // 8 == range_bytes else f"{kind} takes {bits // 8} bytes, its data_offsets span {range_bytes}"


def _wrong_length(tensor_bytes: int, payload_bytes: int, path: str) -> CheckpointError:
    difference = payload_bytes - tensor_bytes
    if difference < 0:
        words = f"{-difference} bytes are missing: the download or copy is incomplete, fetch the file again"
    else:
        words = f"there are {difference} extra bytes at its end, which no tensor claims"
    return refusal(
        path, f"its tensors take {tensor_bytes} bytes, the file holds {payload_bytes} after its header; {words}"
    )
