"""Images: memory in which bytes lie as they lie in the file, so that one read fills all that is in it, past the page
cache too.

The memory of an image begins in its block where the file's bytes begin in theirs, and its blocks are its own: what is
read from a disk in whole blocks may be read there in place, at both ends as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BLOCK_BYTES = 4096  # of memory and file: a page, and a multiple of what any disk reads at once


@dataclass(frozen=True, slots=True)
class Image:
    """Bytes [start, stop) of a shard, all of one extent, from `offset` of their memory on, a whole number of blocks.

    `offset` and `start` leave the same rest by the size of a block, and no block of memory is another image's too.
    `memory` is the number of the unit's buffer. The fragments in it end at `stops` in the file, for `tensors`.
    """

    shard: int
    start: int
    stop: int
    memory: int
    offset: int
    stops: Sequence[int]
    tensors: Sequence[int]

    def tensor_at(self, position: int) -> int:
        """The tensor that has this byte of the file, or the first one behind it."""
        return self.tensors[bisect_right(self.stops, position)]


def block_floor(position: int) -> int:
    """Where the block of a position begins."""
    return position - position % BLOCK_BYTES


def block_ceil(position: int) -> int:
    """Where the blocks of all before a position end."""
    return position + -position % BLOCK_BYTES


def chunks(start: int, stop: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Cuts file bytes [start, stop) into equal parts of at most `chunk_bytes`, between whole blocks of the file unless
    a chunk is less than one."""
    if chunk_bytes < BLOCK_BYTES:
        first, step = start, chunk_bytes
    else:
        first = block_floor(start)
        count = -(-(stop - first) // block_floor(chunk_bytes))
        step = block_ceil(-(-(stop - first) // count))
    for end in range(first + step, stop, step):
        yield start, end
        start = end
    yield start, stop
