"""The limits that a loader is measured against: every byte of the files read into a few recycled huge-page buffers.

Nothing is kept, parsed or handed over, and no fresh memory is touched: what disk or page cache give at best.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common import MIB, huge_buffer

CHUNK_BYTES = 16 * MIB
DIRECT_THREADS = 4
BLOCK_BYTES = 4096


def read_direct(files: Sequence[Path]) -> int:
    """O_DIRECT: past the page cache. Returns the bytes read."""
    return _read(files, os.O_DIRECT, DIRECT_THREADS)


def can_read_direct(path: Path) -> bool:
    """Whether the file system takes O_DIRECT."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        os.preadv(descriptor, [huge_buffer(BLOCK_BYTES)], 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def read_buffered(files: Sequence[Path]) -> int:
    """Through the page cache, one thread a core: more only contend. Returns the bytes read."""
    return _read(files, 0, os.cpu_count() or 1)


def _read(files: Sequence[Path], flags: int, threads: int) -> int:
    opened = [os.open(path, os.O_RDONLY | flags) for path in files]
    try:
        sizes = [os.fstat(descriptor).st_size for descriptor in opened]
        chunks = iter(
            [
                (descriptor, offset, min(CHUNK_BYTES, size - offset))
                for descriptor, size in zip(opened, sizes, strict=True)
                for offset in range(0, size, CHUNK_BYTES)
            ]
        )
        lock = threading.Lock()
        counts: list[int] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                buffer = huge_buffer(CHUNK_BYTES)
                while True:
                    with lock:
                        chunk = next(chunks, None)
                    if chunk is None:
                        return
                    counts.append(_read_chunk(*chunk, buffer))
            except BaseException as error:  # noqa: BLE001 - raised below, by the caller's thread
                errors.append(error)

        _run_in_threads(work, threads)
        if errors:
            raise errors[0]
        return sum(counts)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _read_chunk(descriptor: int, offset: int, nbytes: int, buffer: memoryview) -> int:
    done = 0
    while done < nbytes:
        # O_DIRECT wants whole blocks; at the file's end the read is short.
        stop = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        got = os.preadv(descriptor, [buffer[done:stop]], offset + done)
        if got == 0:
            raise EOFError(f"the file ends at byte {offset + done}")
        done += got
    return done


def _run_in_threads(work: Callable[[], None], count: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
