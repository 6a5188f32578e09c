"""A storage with scripted faults, for tests of everything that reads.

It wraps another storage, fails as told, and records every call. Faults are matched by path and operation, and counted
by themselves: `nth` is the first matching call (from 0) that a fault acts on, `times` how many in a row (None: all).
Patterns match the whole path or its last component, case-sensitively; an exact path always matches itself.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from loader_service.reading.faults import Fault, Gate, Operation, disguise, matches, room_for
from loader_service.reading.partial import read_part
from loader_service.reading.reader import DirectoryEntry, FileIdentity, OpenFile, Storage


class ReadCall(NamedTuple):
    """One call of `read_into` that came back: `wanted_bytes` is the size of its views, `nbytes` what it returned,
    `direct` whether it went past the page cache."""

    path: str
    offset: int
    nbytes: int
    wanted_bytes: int
    direct: bool = False


class FakeStorage:
    """A `Storage` over another one, with scripted faults and a record of all calls. Thread-safe.

    Faults act in the order in which they were scripted; `clear` forgets them all and releases whoever waits.
    """

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._calls: Counter[tuple[str, str]] = Counter()
        self._reads: list[ReadCall] = []
        self._drops: list[tuple[str, int, int]] = []
        self._read_aheads: list[tuple[str, int, int]] = []
        self._cached: list[tuple[str, Callable[[int, int], int | None]]] = []
        self._block_bytes = 1
        self._in_flight = 0
        self._max_in_flight = 0
        self._open_now = 0
        self._max_open = 0

    # What goes wrong.

    def fail(
        self,
        pattern: str,
        error: int | Callable[[], BaseException],
        *,
        operation: Operation = "read",
        nth: int = 0,
        times: int | None = 1,
        within: tuple[int, int] | None = None,
    ) -> None:
        """The call raises OSError with this errno, or whatever `error()` makes. `within`: reads that touch [a, b)."""
        make = (lambda: OSError(error, os.strerror(error))) if isinstance(error, int) else error
        self._script(Fault(pattern, (operation,), nth, times, within, error=make))

    def shorten(self, pattern: str, most_bytes: int, *, nth: int = 0, times: int | None = None) -> None:
        """Reads return at most `most_bytes` (at least 1)."""
        self._script(Fault(pattern, ("read", "read direct"), nth, times, None, most_bytes=max(1, most_bytes)))

    def truncate(self, pattern: str, at: int, *, nth: int = 0) -> None:
        """Reads see the file end at byte `at`; its identity stays as it is."""
        self._script(Fault(pattern, ("read", "read direct"), nth, None, None, ends_at=at))

    def replace(
        self,
        pattern: str,
        *,
        inode: int | None = None,
        size_bytes: int | None = None,
        mtime_ns: int | None = None,
        operations: tuple[Operation, ...] = ("identify", "open", "open direct"),
        nth: int = 0,
    ) -> None:
        """From the `nth` look on the file seems to be another: its identity is changed in what is given."""
        given = {"inode": inode, "size_bytes": size_bytes, "mtime_ns": mtime_ns}
        changes = {name: value for name, value in given.items() if value is not None}
        self._script(Fault(pattern, operations, nth, None, None, identity=changes))

    def block(
        self,
        pattern: str,
        *,
        operation: Operation = "read",
        nth: int = 0,
        times: int | None = 1,
        within: tuple[int, int] | None = None,
    ) -> Gate:
        """The call stops at the returned gate, never to return until `gate.release()`."""
        gate = Gate()
        self._script(Fault(pattern, (operation,), nth, times, within, gate=gate))
        return gate

    def delay(self, pattern: str, seconds: float, *, operation: Operation = "read", times: int | None = None) -> None:
        """The call takes so much longer: for demonstrations of slow storage, not to synchronise tests (`block`)."""
        self._script(Fault(pattern, (operation,), 0, times, None, delay_s=seconds))

    def align(self, block_bytes: int) -> None:
        """Direct reads whose offset, addresses or sizes are no multiples of a device's block are refused: EINVAL."""
        self._block_bytes = block_bytes

    def cache(self, pattern: str, held: Callable[[int, int], int | None]) -> None:
        """What `cached_bytes(offset, nbytes)` answers for matching files, and how much `read_cached` gets then; the
        latest one that matches counts."""
        with self._lock:
            self._cached.insert(0, (pattern, held))

    def clear(self) -> None:
        """Forgets all faults and releases all gates; the record stays."""
        with self._lock:
            faults, self._faults = self._faults, []
        for fault in faults:
            if fault.gate is not None:
                fault.gate.release()

    # What was called.

    @property
    def reads(self) -> list[ReadCall]:
        """All reads that came back, in the order in which they did."""
        with self._lock:
            return list(self._reads)

    def reads_of(self, pattern: str = "*", *, from_byte: int = 0) -> list[ReadCall]:
        """The reads of matching files that got bytes at or after `from_byte` (a shard's payload begins after 8 + N)."""
        return [read for read in self.reads if matches(pattern, read.path) and read.offset + read.nbytes > from_byte]

    @property
    def drops(self) -> list[tuple[str, int, int]]:
        """(path, offset, bytes) of every `drop_cached`."""
        with self._lock:
            return list(self._drops)

    def bytes_read(self, pattern: str = "*") -> int:
        """The bytes that reads of matching files returned."""
        return sum(read.nbytes for read in self.reads_of(pattern))

    @property
    def read_aheads(self) -> list[tuple[str, int, int]]:
        """(path, offset, bytes) of every `read_ahead` that came back."""
        with self._lock:
            return list(self._read_aheads)

    def opens(self, pattern: str = "*") -> int:
        """How many times matching files were opened, either way."""
        return self._count("open", pattern) + self._count("open direct", pattern)

    def closes(self, pattern: str = "*") -> int:
        """How many times matching files were closed."""
        return self._count("close", pattern)

    def lists(self, pattern: str = "*") -> int:
        """How many times matching folders were listed, failures included."""
        return self._count("list", pattern)

    def identifies(self, pattern: str = "*") -> int:
        """How many times matching paths were looked at, failures included."""
        return self._count("identify", pattern)

    @property
    def in_flight(self) -> int:
        """Reads that have begun and not come back."""
        return self._in_flight

    @property
    def max_in_flight(self) -> int:
        """The most reads that were in flight at once."""
        return self._max_in_flight

    @property
    def open_now(self) -> int:
        """Files opened and not closed."""
        return self._open_now

    @property
    def max_open(self) -> int:
        """The most files that were open at once."""
        return self._max_open

    # The storage.

    def list_directory(self, path: str) -> list[DirectoryEntry]:
        self._record("list", path)
        self._act("list", path)
        return self._inner.list_directory(path)

    def identify(self, path: str) -> FileIdentity:
        self._record("identify", path)
        faults = self._act("identify", path)
        return disguise(self._inner.identify(path), faults)

    def open(self, path: str, *, direct: bool = False) -> FakeFile:
        operation: Operation = "open direct" if direct else "open"
        faults = self._act(operation, path)
        inner = self._inner.open(path, direct=direct)
        with self._lock:
            self._calls[operation, path] += 1
            self._open_now += 1
            self._max_open = max(self._max_open, self._open_now)
        return FakeFile(self, path, inner, disguise(inner.identity, faults), direct=direct)

    def _script(self, fault: Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def _record(self, operation: str, path: str) -> None:
        with self._lock:
            self._calls[operation, path] += 1

    def _count(self, operation: str, pattern: str) -> int:
        with self._lock:
            calls = tuple(self._calls.items())
        return sum(count for (name, path), count in calls if name == operation and matches(pattern, path))

    def _act(self, operation: Operation, path: str, start: int = 0, stop: int = 0) -> list[Fault]:
        """Lets the faults of one call act; returns them for what they change in its result."""
        with self._lock:
            faults = [fault for fault in self._faults if fault.takes(operation, path, start, stop)]
        for fault in faults:
            fault.act()
        return faults

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            self._in_flight += 1
            self._max_in_flight = max(self._max_in_flight, self._in_flight)
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1

    def _read(self, file: FakeFile, views: Sequence[memoryview], offset: int, *, cached: bool = False) -> int:
        wanted_bytes = sum(view.nbytes for view in views)
        with self._reading():
            faults = self._act("read direct" if file.direct else "read", file.path, offset, offset + wanted_bytes)
            if file.direct:
                self._check_aligned(views, offset)
            room = room_for(faults, offset, wanted_bytes)
            held = self._held_by(file.path) if cached else None
            if cached and held is None:
                got = file.inner.read_cached(views[0][:room], offset)
            else:
                room = min(room, held(offset, wanted_bytes) or 0) if held is not None else room
                got = read_part(file.inner, views, offset, room, whole_blocks=file.direct)
        with self._lock:
            self._reads.append(ReadCall(file.path, offset, got, wanted_bytes, file.direct))
        return got

    def _check_aligned(self, views: Sequence[memoryview], offset: int) -> None:
        addresses = [np.frombuffer(view, np.uint8).ctypes.data for view in views]
        numbers = [offset, *addresses, *(view.nbytes for view in views)]
        if any(number % self._block_bytes for number in numbers):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def _held(self, file: FakeFile, offset: int, nbytes: int) -> int | None:
        scripted = self._held_by(file.path)
        return file.inner.cached_bytes(offset, nbytes) if scripted is None else scripted(offset, nbytes)

    def _held_by(self, path: str) -> Callable[[int, int], int | None] | None:
        with self._lock:
            return next((held for pattern, held in self._cached if matches(pattern, path)), None)

    def _drop(self, file: FakeFile, offset: int, nbytes: int) -> None:
        with self._lock:
            self._drops.append((file.path, offset, nbytes))
        self._act("drop", file.path, offset, offset + nbytes)
        file.inner.drop_cached(offset, nbytes)

    def _read_ahead(self, file: FakeFile, offset: int, nbytes: int) -> None:
        self._act("read ahead", file.path, offset, offset + nbytes)
        file.inner.read_ahead(offset, nbytes)
        with self._lock:
            self._read_aheads.append((file.path, offset, nbytes))

    def _closed(self, path: str) -> None:
        with self._lock:
            self._calls["close", path] += 1
            self._open_now -= 1


class FakeFile:
    """What `FakeStorage.open` returns."""

    __slots__ = ("_is_open", "_storage", "direct", "identity", "inner", "path")

    def __init__(
        self, storage: FakeStorage, path: str, inner: OpenFile, identity: FileIdentity, *, direct: bool = False
    ) -> None:
        self._storage = storage
        self._is_open = True
        self.path = path
        self.inner = inner
        self.identity = identity
        self.direct = direct

    def read_into(self, views: Sequence[memoryview], offset: int) -> int:
        return self._storage._read(self, views, offset)  # noqa: SLF001 - two halves of one fake

    def cached_bytes(self, offset: int, nbytes: int) -> int | None:
        return self._storage._held(self, offset, nbytes)  # noqa: SLF001 - see above

    def read_cached(self, view: memoryview, offset: int) -> int:
        return self._storage._read(self, [view], offset, cached=True)  # noqa: SLF001 - see above

    def drop_cached(self, offset: int, nbytes: int) -> None:
        self._storage._drop(self, offset, nbytes)  # noqa: SLF001 - see above

    def read_only_what_is_asked(self, only: bool) -> None:
        self.inner.read_only_what_is_asked(only)

    def read_ahead(self, offset: int, nbytes: int) -> None:
        self._storage._read_ahead(self, offset, nbytes)  # noqa: SLF001 - see above

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._storage._closed(self.path)  # noqa: SLF001 - see above
        self.inner.close()
