"""Reads that are made to come back short, for the scripted storage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loader_service.reading.positioned import DIRECT_BLOCK_BYTES
from loader_service.reading.reader import OpenFile


def read_part(
    file: OpenFile, views: Sequence[memoryview], offset: int, most_bytes: int, *, whole_blocks: bool = False
) -> int:
    """One read that fills at most the first `most_bytes` of the views, and nothing behind them.

    `whole_blocks`: the file takes no less, so all is read into other memory and a part of it kept.
    """
    wanted_bytes = sum(view.nbytes for view in views)
    if most_bytes >= wanted_bytes or not whole_blocks:
        return file.read_into(_cut(views, most_bytes), offset)
    memory = np.empty(wanted_bytes + DIRECT_BLOCK_BYTES, np.uint8)
    skip = -memory.ctypes.data % DIRECT_BLOCK_BYTES
    got = min(most_bytes, file.read_into([memory[skip : skip + wanted_bytes].data], offset))
    kept = memory[skip : skip + got].tobytes()
    for view in _cut(views, got):
        view[:], kept = kept[: view.nbytes], kept[view.nbytes :]
    return got


def _cut(views: Sequence[memoryview], room: int) -> list[memoryview]:
    """The views' first `room` bytes."""
    kept: list[memoryview] = []
    for view in views:
        kept.append(view[:room])
        room -= kept[-1].nbytes
        if room <= 0:
            break
    return kept
