"""What storage, page cache and memory give at best: small programs that do nothing else.

The rings read every byte of some files into a few recycled huge-page buffers. Nothing is kept, parsed or handed over,
and no fresh memory is touched. Memory is copied and touched on one thread a core. All of it blocks.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loader_service.memory.allocators import HostBuffer, allocate_host
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage
from loader_service.reading.positioned import DIRECT_BLOCK_BYTES, read_fully

CHUNK_BYTES = 16 << 20
DIRECT_THREADS = 4
BLOCK_BYTES = DIRECT_BLOCK_BYTES
COPY_BYTES = 64 << 20  # a thread's source, and its destination: more than caches hold

_GIB = 1 << 30


class StoppedError(Exception):
    """The measuring was told to stop."""


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes [start, stop) of one file; `start` is a multiple of `BLOCK_BYTES`."""

    path: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Rate:
    """What one measurement moved: bytes, seconds, and the process's processor time meanwhile."""

    nbytes: int
    seconds: float
    cpu_s: float

    @property
    def gib_per_s(self) -> float:
        return self.nbytes / _GIB / self.seconds if self.seconds > 0 else 0.0

    @property
    def cpu_s_per_gib(self) -> float:
        return self.cpu_s / (self.nbytes / _GIB) if self.nbytes else 0.0


def timed(work: Callable[[], int]) -> Rate:
    """Runs `work`, which returns how many bytes it moved."""
    cpu_s, start_s = time.process_time(), time.perf_counter()
    nbytes = work()
    return Rate(nbytes, time.perf_counter() - start_s, time.process_time() - cpu_s)


# -- files ------------------------------------------------------------------------------------------------------------


def parts_of(files: Sequence[str | Path], most_bytes: int | None = None) -> list[Part]:
    """The files from their first byte on, in order, up to `most_bytes` together. Raises OSError."""
    found: list[Part] = []
    left_bytes = most_bytes
    for path in files:
        size_bytes = Path(path).stat().st_size
        take_bytes = size_bytes if left_bytes is None else min(size_bytes, left_bytes)
        if take_bytes > 0:
            found.append(Part(os.fspath(path), 0, take_bytes))
        if left_bytes is not None:
            left_bytes -= take_bytes
    return found


def can_read_direct(path: str | Path) -> bool:
    """Whether the file system takes O_DIRECT."""
    storage = LocalStorage()
    try:
        file = storage.open(os.fspath(path), direct=True)
    except OSError:
        return False
    try:
        file.read_into([allocate_host(BLOCK_BYTES).memoryview], 0)
    except OSError:
        return False
    finally:
        file.close()
    return True


def read_direct(files: Sequence[str | Path]) -> int:
    """O_DIRECT: past the page cache. Returns the bytes read."""
    return read_parts(parts_of(files), direct=True, threads=DIRECT_THREADS)


def read_buffered(files: Sequence[str | Path]) -> int:
    """Through the page cache, one thread a core: more only contend. Returns the bytes read."""
    return read_parts(parts_of(files), direct=False, threads=os.cpu_count() or 1)


def read_part(path: str | Path, start: int, stop: int, *, direct: bool, threads: int) -> int:
    """The bytes [start, stop) of one file, for rings of several processes. Returns the bytes read, whole blocks."""
    start -= start % BLOCK_BYTES
    return read_parts([Part(os.fspath(path), start, stop)], direct=direct, threads=threads)


def read_parts(
    parts: Sequence[Part],
    *,
    direct: bool,
    threads: int,
    chunk_bytes: int = CHUNK_BYTES,
    within_s: float | None = None,
    stop: threading.Event | None = None,
) -> int:
    """Reads the parts once, `threads` chunks at a time, into as many buffers. Returns the bytes read.

    After `within_s` no more is read: slow storage is known by then. Raises what reading raises (ReadError,
    EndOfFileError, CheckpointError), MemoryLimitError, and StoppedError once `stop` is set.
    """
    chunks = _chunks(parts, chunk_bytes)
    until_s = None if within_s is None else time.monotonic() + within_s
    lock = threading.Lock()
    handles = HandleCache(LocalStorage())
    counts: list[int] = []

    def work() -> None:
        buffer = allocate_host(chunk_bytes).memoryview
        while until_s is None or time.monotonic() < until_s:
            _check(stop)
            with lock:
                chunk = next(chunks, None)
            if chunk is None:
                return
            # O_DIRECT wants whole blocks; at the file's end the read is short.
            spare = -chunk.nbytes % BLOCK_BYTES if direct else 0
            view = buffer[: chunk.nbytes + spare]
            read_fully(handles, chunk.path, None, chunk.start, [view], retries=0, direct=direct, spare=(0, spare))
            counts.append(chunk.nbytes)

    try:
        _run_in_threads(work, threads)
    finally:
        handles.close()
    return sum(counts)


def _chunks(parts: Sequence[Part], chunk_bytes: int) -> Iterator[Part]:
    for part in parts:
        for start in range(part.start, part.stop, chunk_bytes):
            yield Part(part.path, start, min(part.stop, start + chunk_bytes))


# -- memory -----------------------------------------------------------------------------------------------------------


def copy_memory(
    nbytes: int, *, threads: int, copy_bytes: int = COPY_BYTES, stop: threading.Event | None = None
) -> Rate:
    """Copies from huge pages to huge pages, each thread between two buffers of its own that were touched before: at
    least `nbytes`, in whole buffers."""
    rounds = max(1, -(-nbytes // (copy_bytes * threads)))
    buffers = [(allocate_host(copy_bytes), allocate_host(copy_bytes)) for _ in range(threads)]
    for pair in buffers:
        for buffer in pair:
            _touch(buffer)
    waiting = iter(buffers)
    lock = threading.Lock()

    def work() -> None:
        with lock:
            source, destination = next(waiting)
        for _ in range(rounds):
            _check(stop)
            ctypes.memmove(destination.address, source.address, copy_bytes)

    def copy() -> int:
        _run_in_threads(work, threads)
        return rounds * copy_bytes * threads

    return timed(copy)


def touch_fresh(nbytes: int, *, threads: int, huge: bool, stop: threading.Event | None = None) -> Rate:
    """Touches memory that nobody has touched before, on huge or on ordinary pages: `nbytes`, less what does not go
    evenly among the threads. Giving it back is not measured."""
    share_bytes = max(1, nbytes // threads)
    held: list[HostBuffer] = []  # all at once: what is freed in between would be used again

    def work() -> None:
        left_bytes = share_bytes
        while left_bytes > 0:
            _check(stop)
            buffer = allocate_host(min(left_bytes, COPY_BYTES), huge=huge)
            _touch(buffer)
            held.append(buffer)
            left_bytes -= buffer.nbytes

    def touch() -> int:
        _run_in_threads(work, threads)
        return sum(buffer.nbytes for buffer in held)

    return timed(touch)


def _touch(buffer: HostBuffer) -> None:
    ctypes.memset(buffer.address, 1, buffer.nbytes)  # lets other threads run meanwhile


def _check(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise StoppedError


def _run_in_threads(work: Callable[[], None], count: int) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below, by the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, name=f"loader-limit-{number}", daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
