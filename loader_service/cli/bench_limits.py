"""What `bench` measures of a node: one round of limits after another, on its first rank, in a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from loader_service.errors import ReadError
from loader_service.measuring.conditions import (
    cached_parts,
    condition_memory,
    drop_from_cache,
    read_into_cache,
    spare_memory,
)
from loader_service.measuring.limits import (
    CHUNK_BYTES,
    COPY_BYTES,
    Part,
    Rate,
    can_read_direct,
    copy_memory,
    parts_of,
    read_parts,
    timed,
    touch_fresh,
)
from loader_service.measuring.verdict import LEAST_BYTES
from loader_service.sizes import format_size

CacheState = Literal["cold", "warm", "as-is"]

WITHIN_S = 10.0  # a ring reads no longer: slow storage is known by then
_COPY_TOTAL_BYTES = 1 << 30  # or `max_bytes`, where that is less
_TOUCH_TOTAL_BYTES = 512 << 20
_CACHED_BYTES = 1 << 30  # of the files, for copying from the page cache
_LEAST_MEMORY_BYTES = 64 << 20

LABELS: Mapping[str, str] = {
    "direct_one": "O_DIRECT, 1 read in flight",
    "direct": "O_DIRECT, {threads} in flight",
    "direct_more": "O_DIRECT, {more} in flight",
    "buffered": "through the page cache, cold",
    "cache_copy": "copy from the page cache",
    "memory_copy": "copy from memory to memory",
    "touch_huge": "first touch, huge pages",
    "touch_ordinary": "first touch, 4 KiB pages",
}


class NotMeasured(Exception):  # noqa: N818 - a reason, not an error
    """Why a limit was not measured."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What limits are measured with. `threads` is how many reads the ranks of this node have in flight together."""

    files: Sequence[str]
    cache: CacheState
    threads: int
    cores: int
    max_bytes: int

    @property
    def workers(self) -> int:
        """Threads that copy and touch memory: the loader's, but no more than one a core."""
        return max(1, min(self.threads, self.cores))


class LimitBench:
    """Measures all limits once a round, each round in another order. Blocking; `stop` ends it soon."""

    def __init__(self, conditions: Conditions, *, within_s: float = WITHIN_S) -> None:
        self._conditions = conditions
        self._within_s = within_s
        self._stop = threading.Event()
        self._direct = bool(conditions.files) and can_read_direct(conditions.files[0])
        self.rates: dict[str, list[Rate]] = {name: [] for name in LABELS}
        self.left_out: dict[str, str] = {}

    def stop(self) -> None:
        self._stop.set()

    def round(self, number: int) -> None:
        """Measures every limit once. What cannot be measured is in `left_out`, with the reason. Raises what reading
        raises, and StoppedError."""
        measures: dict[str, Callable[[], Rate]] = {
            "direct_one": lambda: self._ring(1),
            "direct": lambda: self._ring(self._conditions.threads),
            "direct_more": lambda: self._ring(2 * self._conditions.threads),
            "buffered": self._buffered,
            "cache_copy": self._cache_copy,
            "memory_copy": self._memory_copy,
            "touch_huge": lambda: self._touch(huge=True),
            "touch_ordinary": lambda: self._touch(huge=False),
        }
        names = list(measures)
        for name in names if number % 2 == 0 else reversed(names):
            try:
                self.rates[name].append(measures[name]())
            except NotMeasured as reason:
                self.left_out[name] = str(reason)

    def label(self, name: str) -> str:
        threads = self._conditions.threads
        return LABELS[name].format(threads=threads, more=2 * threads)

    # Files

    def _parts(self, most_bytes: int) -> list[Part]:
        try:
            parts = parts_of(self._conditions.files, most_bytes)
        except OSError as error:
            raise ReadError(f"{error.filename}: {error.strerror}", path=error.filename, errno=error.errno) from error
        total_bytes = sum(part.nbytes for part in parts)
        if total_bytes < LEAST_BYTES:
            raise NotMeasured(f"{format_size(total_bytes)} of files is too little to measure")
        return parts

    def _ring(self, threads: int) -> Rate:
        if not self._direct:
            raise NotMeasured("the file system refuses O_DIRECT")
        return self._read(self._parts(self._conditions.max_bytes), direct=True, threads=threads)

    def _buffered(self) -> Rate:
        if self._direct:
            raise NotMeasured("O_DIRECT says what storage gives")
        if self._conditions.cache != "cold":
            raise NotMeasured("only with --cache cold are the files dropped from the page cache")
        parts = self._parts(self._conditions.max_bytes)
        drop_from_cache(self._conditions.files)
        return self._read(parts, direct=False, threads=self._conditions.threads)

    def _cache_copy(self) -> Rate:
        parts = self._parts(min(self._conditions.max_bytes, max(LEAST_BYTES, min(_CACHED_BYTES, spare_memory() // 2))))
        if self._conditions.cache == "as-is":
            parts = cached_parts(parts)
            if sum(part.nbytes for part in parts) < LEAST_BYTES:
                raise NotMeasured("the page cache holds too little of the files, and --cache as-is leaves it so")
        else:
            read_into_cache(parts, stop=self._stop)
        return self._read(parts, direct=False, threads=self._conditions.workers)

    def _read(self, parts: Sequence[Part], *, direct: bool, threads: int) -> Rate:
        condition_memory(2 * threads * CHUNK_BYTES)
        return timed(
            lambda: read_parts(parts, direct=direct, threads=threads, within_s=self._within_s, stop=self._stop)
        )

    # Memory

    def _memory_copy(self) -> Rate:
        threads = self._conditions.workers
        room_bytes = self._room(2 * threads * COPY_BYTES)
        copy_bytes = room_bytes // (2 * threads)
        total_bytes = min(_COPY_TOTAL_BYTES, self._conditions.max_bytes)
        return copy_memory(total_bytes, threads=threads, copy_bytes=copy_bytes, stop=self._stop)

    def _touch(self, *, huge: bool) -> Rate:
        room_bytes = self._room(_TOUCH_TOTAL_BYTES)
        return touch_fresh(room_bytes, threads=self._conditions.workers, huge=huge, stop=self._stop)

    def _room(self, wanted_bytes: int) -> int:
        """How much memory is taken, conditioned: a quarter of what is to spare at most."""
        spare_bytes = spare_memory()
        wanted_bytes = min(wanted_bytes, max(_LEAST_MEMORY_BYTES, self._conditions.max_bytes))
        room_bytes = min(wanted_bytes, spare_bytes // 4)
        if room_bytes < _LEAST_MEMORY_BYTES:
            raise NotMeasured(f"only {format_size(spare_bytes)} of memory is to spare")
        return condition_memory(room_bytes, spare_bytes=spare_bytes)


def prepare_files(files: Sequence[str], cache: CacheState, stop: threading.Event) -> None:
    """Brings the page cache into the state that a load begins with. Raises ReadError where a file cannot be read."""
    try:
        if cache == "cold":
            drop_from_cache(files)
        elif cache == "warm":
            read_into_cache(parts_of(files), stop=stop)
    except OSError as error:
        path = os.fspath(error.filename) if error.filename is not None else None
        raise ReadError(f"{path}: {error.strerror} while its cached pages are prepared", path=path) from error
