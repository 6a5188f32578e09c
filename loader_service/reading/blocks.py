"""Whole blocks of files in windows of memory: what can be read past the page cache in place. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loader_service.reading.file_range import Window
from loader_service.reading.positioned import DIRECT_BLOCK_BYTES


class Blocks(NamedTuple):
    """Whole blocks [start, stop) of a file, in `views`; a block that two windows have is read into the first of them
    and copied: (where to, from where)."""

    start: int
    stop: int
    views: list[memoryview]
    twice: list[tuple[memoryview, memoryview]]


def neighbours(parts: Sequence[tuple[int, Window]]) -> Blocks | None:
    """The blocks of windows, (start in the file, window) each; None if they are not all whole, or do not follow each
    other."""
    begin = end = parts[0][0] - parts[0][1].lead
    before = parts[0][1].memory
    views: list[memoryview] = []
    twice: list[tuple[memoryview, memoryview]] = []
    for start, window in parts:
        memory, first = window.memory, start - window.lead
        if address_of(memory) % DIRECT_BLOCK_BYTES or len(memory) % DIRECT_BLOCK_BYTES or first % DIRECT_BLOCK_BYTES:
            return None
        if first == end - DIRECT_BLOCK_BYTES and end > begin:
            twice.append((memory[:DIRECT_BLOCK_BYTES], before[-DIRECT_BLOCK_BYTES:]))
            memory, first = memory[DIRECT_BLOCK_BYTES:], end
        if first != end:
            return None
        if memory:
            views.append(memory)
        before, end = window.memory, first + len(memory)
    return Blocks(begin, end, views, twice)


def whole_blocks(start: int, window: Window) -> tuple[int, int]:
    """Which bytes [first, last) of the file are read straight into the window, in whole blocks: those that it has room
    for. What is wanted before `first` and from `last` on is less than a block each; without any whole block both are
    the end of the wanted bytes' first block, at most that of the wanted bytes."""
    stop = start + window.nbytes
    begun, next_begun = start - start % DIRECT_BLOCK_BYTES, start + -start % DIRECT_BLOCK_BYTES
    ended, next_ended = stop - stop % DIRECT_BLOCK_BYTES, stop + -stop % DIRECT_BLOCK_BYTES
    first = begun if start - begun <= window.lead else next_begun
    last = next_ended if next_ended - stop <= len(window.memory) - window.lead - window.nbytes else ended
    if first >= stop or last <= start:
        first = last = min(stop, next_begun)
    return first, last


def address_of(view: memoryview) -> int:
    """Where the memory begins."""
    address: int = np.frombuffer(view, np.uint8).ctypes.data
    return address
