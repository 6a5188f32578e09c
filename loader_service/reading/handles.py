"""A bounded set of open files, shared by all reading threads, with the identity checked at every opening."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from loader_service import logs
from loader_service.errors import CheckpointError, ConfigError, LoaderError, ReadError, StateError
from loader_service.reading.forked import starts_anew_in_children
from loader_service.reading.reader import FileIdentity, OpenFile, Storage, describe_change

_log = logs.logger(__name__)

_MOST_HANDLES = 256
_OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})


Key: TypeAlias = tuple[str, bool]  # a path, and whether reads go past the page cache


@dataclass(slots=True)
class _Handle:
    key: Key
    file: OpenFile
    users: int = 0
    retired: bool = False


class HandleCache:
    """Open files by path, least recently used closed first. Thread-safe; every method but `opens` may block.

    Never more than `limit` files are open while at most `limit` threads borrow one at a time (`check_threads` asserts
    that); a borrower beyond that opens one more, which is closed when it comes back, so nobody ever waits for another
    borrower and nothing can deadlock. A handle in use is never closed. Threads that want one path share its
    descriptor, and if they come at once it is opened once.

    `limit` None: half of the descriptors that RLIMIT_NOFILE leaves, 256 at most.
    """

    def __init__(self, storage: Storage, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ConfigError(f"a handle cache needs room for one open file, not {limit}")
        self._storage = storage
        self._limit = limit
        self._lock = threading.RLock()  # entered by itself: through a condition that takes twice as long
        self._changed = threading.Condition(self._lock)
        self._handles: OrderedDict[Key, _Handle] = OrderedDict()
        self._opening: set[Key] = set()
        self._open_now = 0
        self._opens = 0
        self._closed = False
        starts_anew_in_children(self)

    def start_anew(self) -> None:
        """In a forked child nobody uses or opens a file yet, and the lock may be that of a thread that is not here."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._opening.clear()
        self._open_now = len(self._handles)
        for handle in self._handles.values():
            handle.users = 0

    @property
    def storage(self) -> Storage:
        """The storage that files are opened through."""
        return self._storage

    @property
    def limit(self) -> int:
        """How many files may be open at once; without one given it is measured at the first use (reads /proc)."""
        if self._limit is None:
            self._limit = _default_limit()
        return self._limit

    @property
    def opens(self) -> int:
        """How many times a file was opened so far."""
        return self._opens

    @property
    def open_now(self) -> int:
        """Descriptors held now, in use or idle."""
        return self._open_now

    def check_threads(self, threads: int) -> None:
        """Raises ConfigError if so many reading threads could hold more files open than the limit allows."""
        if threads > self.limit:
            raise ConfigError(
                f"{threads} reading threads need as many open files, but only {self.limit} are to be had: "
                "lower reads.threads or raise the limit of open files (ulimit -n)"
            )

    @contextmanager
    def borrow(self, path: str, expected: FileIdentity | None, *, direct: bool = False) -> Iterator[OpenFile]:
        """The open file of `path`, for the time of the `with` block; borrow one at a time a thread.

        `direct` ones are other handles of the same path, opened to read past the page cache.

        A cached handle that is not of the identity `expected` is set aside and the path opened anew. Raises
        CheckpointError if what is opened is not `expected` (None: anything goes), OSError as the storage raised it,
        StateError after `close`.
        """
        handle = self._take((path, direct), expected)
        try:
            yield handle.file
        finally:
            self._give_back(handle)

    def verify(self, path: str, expected: FileIdentity) -> None:
        """Raises CheckpointError unless the path still leads to the file `expected`; called when a load ends."""
        try:
            found = self._storage.identify(path)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise CheckpointError(
                    f"{path}: changed under the reader: the file is gone; do not move a checkpoint while it is loaded",
                    path=path,
                    errno=error.errno,
                ) from error
            raise ReadError(
                f"{path}: cannot be examined again after reading: {error.strerror or error}; check the file system",
                path=path,
                errno=error.errno,
            ) from error
        if found != expected:
            raise _changed(path, expected, found)

    def invalidate(self, path: str, file: OpenFile | None = None) -> None:
        """Forgets the handles of `path` (only the one that is still `file`, when given): it is opened anew."""
        idle: list[_Handle] = []
        with self._lock:
            for direct in (False, True):
                handle = self._handles.get((path, direct))
                if handle is not None and (file is None or handle.file is file):
                    idle += self._retire(handle)
        self._close_all(idle)

    def close(self) -> None:
        """Closes all idle files and refuses new borrowers; files in use are closed when they come back."""
        with self._lock:
            self._closed = True
            idle = [gone for handle in tuple(self._handles.values()) for gone in self._retire(handle)]
            self._changed.notify_all()
        self._close_all(idle)

    def _take(self, key: Key, expected: FileIdentity | None) -> _Handle:
        limit = self.limit
        with self._lock:
            handle = self._find(key, expected)
            if handle is not None:
                return handle
            self._opening.add(key)
            stale = self._handles.get(key)
            doomed = self._retire(stale) if stale is not None else []
            self._make_room(limit, doomed)
            # Counted before what makes room is closed: the count may be above the truth for a moment, never below.
            self._open_now += 1
        try:
            self._close_all(doomed)
            file = self._open(key, expected)
        except BaseException:
            with self._lock:
                self._open_now -= 1
                self._opening.discard(key)
                self._changed.notify_all()
            raise
        with self._lock:
            handle = _Handle(key, file, users=1, retired=self._closed)
            if not self._closed:
                self._handles[key] = handle
            self._opening.discard(key)
            self._changed.notify_all()
        return handle

    def _find(self, key: Key, expected: FileIdentity | None) -> _Handle | None:
        """A cached handle to use, or None when the caller is the one to open the path."""
        while True:
            if self._closed:
                text = f"{key[0]}: cannot be read any more: its source, or the service it is of, was closed"
                raise StateError(text, path=key[0])
            handle = self._handles.get(key)
            if handle is not None and (expected is None or handle.file.identity == expected):
                handle.users += 1
                self._handles.move_to_end(key)
                return handle
            if key not in self._opening:
                return None
            self._changed.wait()

    def _make_room(self, limit: int, doomed: list[_Handle]) -> None:
        """Adds idle handles, the least recently used first, to what the caller will close, until one more fits."""
        if self._open_now - len(doomed) < limit:
            return
        for handle in tuple(self._handles.values()):
            doomed += self._take_idle(handle)
            if self._open_now - len(doomed) < limit:
                return

    def _retire(self, handle: _Handle) -> list[_Handle]:
        """Takes the handle out of the cache; returns it if nobody uses it, for the caller to close unlocked."""
        if self._handles.get(handle.key) is handle:
            del self._handles[handle.key]
        handle.retired = True
        return [] if handle.users else [handle]

    def _open(self, key: Key, expected: FileIdentity | None) -> OpenFile:
        path, direct = key
        try:
            file = self._storage.open(path, direct=direct)
        except OSError as error:
            if error.errno not in _OUT_OF_DESCRIPTORS:
                raise
            # Others in this process took descriptors that were free when the limit was measured.
            with self._lock:
                idle = [gone for handle in tuple(self._handles.values()) for gone in self._take_idle(handle)]
            if not idle:
                raise
            self._close_all(idle)
            file = self._storage.open(path, direct=direct)
        self._opens += 1
        if expected is not None and file.identity != expected:
            _close_quietly(path, file)
            raise _changed(path, expected, file.identity)
        return file

    def _take_idle(self, handle: _Handle) -> list[_Handle]:
        return [] if handle.users else self._retire(handle)

    def _give_back(self, handle: _Handle) -> None:
        limit = self.limit
        with self._lock:
            handle.users -= 1
            if handle.users or not (handle.retired or self._open_now > limit):
                return
            self._retire(handle)
        self._close_all([handle])

    def _close_all(self, handles: Iterable[_Handle]) -> None:
        for handle in handles:
            _close_quietly(handle.key[0], handle.file)
            with self._lock:
                self._open_now -= 1


def _close_quietly(path: str, file: OpenFile) -> None:
    """Closing after reading can fail (EIO on network mounts) but never makes bytes wrong, and others must close too."""
    try:
        file.close()
    except Exception as error:  # noqa: BLE001 - whatever a storage raises
        _log.debug("%s: closing failed: %s", path, error)


def _changed(path: str, expected: FileIdentity, found: FileIdentity) -> LoaderError:
    return CheckpointError(
        f"{path}: changed under the reader: {describe_change(expected, found)}; "
        "load again when nothing writes to the checkpoint any more",
        path=path,
    )


def _default_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_HANDLES
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = 64
    return max(1, min(_MOST_HANDLES, (soft - used) // 2))
