"""Coalescing: which fragments of a shard are read together with the bytes between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

EXTRA_PERCENT = 5
"""Of a plan's payload: the most bytes that lie in gaps between fragments and are read all the same."""


@dataclass(frozen=True, slots=True)
class ExtentColumns:
    """Extents in file order. Extent e is bytes [start[e], stop[e]) of `shard[e]`; fragments [first[e], first[e + 1])
    lie in it (`first_fragment` has one item more than there are extents).
    """

    start: Int64s
    stop: Int64s
    shard: npt.NDArray[np.int32]
    first_fragment: Int64s


def coalesce(
    start: Int64s,
    stop: Int64s,
    shard: npt.NDArray[np.int32],
    *,
    payload_bytes: int,
    gap_bytes: int,
    apart: npt.NDArray[np.bool_] | None = None,
) -> ExtentColumns:
    """Joins fragments, sorted by (shard, start), that touch or lie closer than `gap_bytes`.

    The gaps taken, smallest first and equal ones in file order, sum to at most 5 % of `payload_bytes`. `apart[i]`: that
    between fragments i and i + 1 is not taken, whatever its size.
    """
    count = len(start)
    if count == 0:
        empty = np.empty(0, dtype=np.int64)
        return ExtentColumns(empty, empty, np.empty(0, dtype=np.int32), np.zeros(1, dtype=np.int64))
    gaps = start[1:] - stop[:-1]
    same_shard = shard[1:] == shard[:-1]
    joined = same_shard & (gaps == 0)
    near = same_shard & (gaps > 0) & (gaps < gap_bytes)
    candidates = np.flatnonzero(near if apart is None else near & ~apart)
    if len(candidates):
        smallest_first = candidates[np.argsort(gaps[candidates], kind="stable")]
        affordable = np.cumsum(gaps[smallest_first]) <= payload_bytes * EXTRA_PERCENT // 100
        joined[smallest_first[affordable]] = True
    heads = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    first_fragment = np.concatenate((heads, [count]))
    return ExtentColumns(start[heads], stop[first_fragment[1:] - 1], shard[heads], first_fragment)
