"""The state that a measurement begins in: what the page cache holds of files, and memory that the machine really has.

A virtual machine hands idle free memory back to its host, so that the first touch of a page costs more or less
depending on what ran before. And a benchmark of reading that does not know what is cached measures nothing. All of it
blocks.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from loader_service.measuring.limits import CHUNK_BYTES, Part, parts_of, read_parts
from loader_service.memory.admission import Room, memory_rooms, reserve_of
from loader_service.memory.allocators import allocate_host
from loader_service.reading.page_cache import cached_bytes

DROP_CALL_BYTES = 64 << 20  # smaller, unaligned calls leave large folios in the page cache
_TOUCH_BYTES = 1 << 30


def drop_from_cache(files: Sequence[str | Path]) -> None:
    """Has the page cache forget these files, and no others. What is dirty is written first."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            for offset in range(0, os.fstat(descriptor).st_size, DROP_CALL_BYTES):
                os.posix_fadvise(descriptor, offset, DROP_CALL_BYTES, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_into_cache(parts: Sequence[Part], *, stop: threading.Event | None = None) -> None:
    """Reads through the page cache, in order, by one thread, as read-ahead likes it."""
    read_parts(parts, direct=False, threads=1, stop=stop)


def cached_share(files: Sequence[str | Path]) -> float | None:
    """The share of the files' bytes that the page cache holds, 0 to 1; None where the system cannot say."""
    held = total = 0
    for part in parts_of(files):
        found = _cached(part)
        if found is None:
            return None
        held, total = held + found, total + part.nbytes
    return held / total if total else 0.0


def cached_parts(parts: Sequence[Part]) -> list[Part]:
    """Of the parts, what lies wholly in the page cache, by chunks."""
    chunks = [
        Part(part.path, start, min(part.stop, start + CHUNK_BYTES))
        for part in parts
        for start in range(part.start, part.stop, CHUNK_BYTES)
    ]
    return [chunk for chunk in chunks if _cached(chunk) == chunk.nbytes]


def _cached(part: Part) -> int | None:
    descriptor = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return cached_bytes(descriptor, part.start, part.nbytes)
    finally:
        os.close(descriptor)


def spare_memory(rooms: Sequence[Room] | None = None) -> int:
    """How much memory may be taken for measuring: what the machine and every control group of this process leave free,
    less a tenth that stays so, and no more than half of what a limit of addresses (ulimit -v) leaves."""
    found = memory_rooms() if rooms is None else rooms
    spare_bytes = max(0, min((room.free_bytes - reserve_of(room, "auto") for room in found), default=0))
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes == resource.RLIM_INFINITY:
        return spare_bytes
    return max(0, min(spare_bytes, (limit_bytes - psutil.Process().memory_info().vms) // 2))


def condition_memory(nbytes: int, *, spare_bytes: int | None = None) -> int:
    """Touches and frees up to so many bytes, so that the next user of memory meets pages that the host has given.

    Returns how many it touched: less where that would leave others too little.
    """
    nbytes = max(0, min(nbytes, spare_memory() if spare_bytes is None else spare_bytes))
    touched = []  # all at once: memory that is freed in between would be used again
    for start in range(0, nbytes, _TOUCH_BYTES):
        touched.append(allocate_host(min(_TOUCH_BYTES, nbytes - start)))
        ctypes.memset(touched[-1].address, 1, touched[-1].nbytes)
    return nbytes
