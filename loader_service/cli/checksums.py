"""CRC-32 of a tensor's parts, cut along each dimension, so that a rank with a slice of it can check what it has. Pure.

One checksum of a whole tensor says nothing of half of it. So each dimension is cut into equal parts by itself, and each
part, all that lies at its indices, has a checksum: rows are a range of the file, columns a piece of every row. A slice
along one dimension then consists of whole parts, wherever the number of ranks divides that of the parts.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

FEW_PARTS: Final = 48
MANY_PARTS: Final = 192
"""Of a tensor of `MANY_FROM_BYTES`. 2, 3, 4, 6, 8, 12, 16, 24 and 48 ranks divide both, 32, 64 and 96 the latter."""
MANY_FROM_BYTES: Final = 48 << 20
MOST_DIMS: Final = 3  # each is one more pass over the bytes where a manifest is made
ALL_BELOW_BYTES: Final = 1 << 20
"""Smaller tensors have a checksum of all of it, too: checking 48 parts of each of 20,000 took 0.7 s more."""
ALL: Final = -1  # in place of a dimension

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Cuts:
    """Dimension `dim` of a tensor, of `size` elements, in `parts` parts; or `ALL` of it as one part.

    In memory and in the file the tensor is `outer` times `size` times `inner_bytes`.
    """

    dim: int
    size: int
    outer: int
    inner_bytes: int
    parts: int

    def edge(self, part: int) -> int:
        """The index at which a part begins; of `parts` the one behind the last."""
        return self.size * part // self.parts

    def within(self, start: int, stop: int) -> range:
        """The parts that lie in the indices [start, stop) whole."""
        first = -(-start * self.parts // self.size)
        last = min(self.parts, ((stop + 1) * self.parts - 1) // self.size)
        return range(first, max(first, last))


def cuts_of(shape: Sequence[int], itemsize: int) -> tuple[Cuts, ...]:
    """How a tensor of storage elements is cut: not at all if it is small, and along the first dimensions longer than 1.
    In the first of these ways parts are ranges of the file. Nothing where it has no bytes."""
    nbytes = math.prod(shape) * itemsize
    if not nbytes:
        return ()
    dims = [dim for dim, size in enumerate(shape) if size > 1][:MOST_DIMS]
    whole = [Cuts(ALL, 1, 1, nbytes, 1)] if nbytes < ALL_BELOW_BYTES or not dims else []
    most = MANY_PARTS if nbytes >= MANY_FROM_BYTES else FEW_PARTS
    return (
        *whole,
        *(
            Cuts(dim, size, math.prod(shape[:dim]), math.prod(shape[dim + 1 :]) * itemsize, parts=min(most, size))
            for dim, size in ((dim, shape[dim]) for dim in dims)
        ),
    )


class RunningParts:
    """Checksums of parts whose bytes come bit by bit: of every period of `period_bytes`, a part has what lies between
    two neighbouring edges. What lies before the first edge and behind the last is passed over."""

    def __init__(self, edges: Sequence[int], period_bytes: int) -> None:
        self.edges = edges
        self.period_bytes = period_bytes
        self.values = [0] * (len(edges) - 1)

    def update(self, data: Bytes, at: int, parts: range) -> None:
        """Takes bytes from `at` on into account, for some of the parts: each must see all bytes in order. Parts may be
        worked on side by side; the interpreter lock is released where they are large."""
        period = self.period_bytes
        head = data[: min(-at % period, len(data))]
        rows = (len(data) - len(head)) // period
        body = data[len(head) : len(head) + rows * period].reshape(rows, period)
        tail = data[len(head) + rows * period :]
        for part in parts:
            start, stop = self.edges[part], self.edges[part + 1]
            value = self.values[part]
            if len(head):
                value = zlib.crc32(_overlap(head, at % period, start, stop).data, value)
            if rows:
                value = zlib.crc32(np.ascontiguousarray(body[:, start:stop]).data, value)
            if len(tail):
                value = zlib.crc32(_overlap(tail, 0, start, stop).data, value)
            self.values[part] = value


def running_parts(cuts: Cuts, parts: range, first_index: int, indices: int) -> RunningParts:
    """For those parts of a slice that has `indices` of the dimension, from `first_index` on."""
    edges = [(cuts.edge(part) - first_index) * cuts.inner_bytes for part in range(parts.start, parts.stop + 1)]
    return RunningParts(edges, indices * cuts.inner_bytes)


def _overlap(data: Bytes, at: int, start: int, stop: int) -> Bytes:
    """What of bytes that begin at `at` lies in [start, stop)."""
    return data[max(0, start - at) : max(0, stop - at)]
