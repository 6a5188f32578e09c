"""Files on a disk that knows O_DIRECT, what the page cache holds of them, and memory at a wanted address."""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loader_service.memory.allocators import HostBuffer, allocate_host
from loader_service.reading.page_cache import cached_bytes

PAGE = 4096
MIB = 1 << 20
_MADV_POPULATE_READ = 22  # Linux 5.14; Python does not name it


@contextmanager
def disk_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder where O_DIRECT means something: tmp_path, or one in the checkout where that is tmpfs or an overlay."""
    bring_code_in()
    if _is_disk(tmp_path):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=Path(__file__).parents[2], prefix=".disk-") as folder:
        if not _is_disk(Path(folder)):
            pytest.skip("neither the folder for tests nor the checkout lies on a disk that tells what is cached")
        yield Path(folder)


def _is_disk(folder: Path) -> bool:
    probe = folder / "probe"
    probe.write_bytes(bytes(2 * PAGE))
    uncache(str(probe))
    try:
        descriptor = os.open(probe, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        os.preadv(descriptor, [bytearray(100)], 1)
    except OSError:
        return cached_bytes(descriptor, 0, 2 * PAGE) == 0
    else:
        return False  # tmpfs: any alignment will do
    finally:
        os.close(descriptor)
        probe.unlink()


def uncache(path: str) -> None:
    """Writes the file out and takes it from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def forget(path: str) -> None:
    """Takes a file that was written out before from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def warm(path: str, start: int, stop: int) -> None:
    """Brings exactly the pages of these bytes into the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
    os.pread(descriptor, stop - start, start)
    os.close(descriptor)


def held(path: str, start: int = 0, nbytes: int | None = None) -> int:
    """How many bytes of the file the page cache holds."""
    descriptor = os.open(path, os.O_RDONLY)
    found = cached_bytes(descriptor, start, os.fstat(descriptor).st_size - start if nbytes is None else nbytes)
    os.close(descriptor)
    assert found is not None
    return found


@functools.cache
def bring_code_in() -> None:
    """Maps all pages of this process's libraries: what it runs for the first time would else come from the disk while a
    test counts what does."""
    libc = ctypes.CDLL(None)
    for mapping in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_, path = mapping.split(maxsplit=5)
        if path.startswith("/") and rights.startswith("r"):
            start, stop = (int(address, 16) for address in span.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_POPULATE_READ)


def disk_bytes() -> int:
    """What this process has had read from disks so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def memory(nbytes: int, congruent_to: int, *, moved: int = 0) -> HostBuffer:
    """Memory congruent with a file offset, or `moved` bytes away from that; full of a byte that no one reads."""
    buffer = allocate_host(nbytes, congruent_to=congruent_to + moved)
    buffer.memoryview[:] = b"\xee" * nbytes
    return buffer
