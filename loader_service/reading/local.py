"""Positioned reads from files of the operating system. Nothing here maps a file or moves a file position."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from loader_service.reading.page_cache import cached_bytes, copy_cached, is_overlay, read_ahead_bytes
from loader_service.reading.reader import NOT_REGULAR, DirectoryEntry, FileIdentity

_LEADS_NOWHERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


_LARGE_READ_AHEAD_BYTES = 1 << 20  # below, a thread that touches has too little in flight
_WINDOWS = 4  # of read-ahead: farther than the kernel reads behind what is asked for
_TOUCHED_BYTES = 64 << 10  # apart, each in a folio of its own
_BEGINNING_BYTES = 4 << 20


class LocalStorage:
    """The `Storage` of files that the kernel can open. Stateless, shared by all threads."""

    def list_directory(self, path: str) -> list[DirectoryEntry]:
        with os.scandir(path) as entries:
            return sorted(map(_describe, entries), key=lambda entry: entry.name)

    def identify(self, path: str) -> FileIdentity:
        return _identity(Path(path).stat())

    def open(self, path: str, *, direct: bool = False) -> LocalFile:
        # Looked at first because opening a named pipe would wait for its writer.
        mode = os.stat(path).st_mode  # noqa: PTH116 - a Path costs as much as the call
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, NOT_REGULAR, path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (_direct_flag() if direct else 0))
        try:
            return LocalFile(descriptor, _identity(os.fstat(descriptor)))
        except BaseException:
            os.close(descriptor)
            raise


class LocalFile:
    """One descriptor of a regular file; `LocalStorage.open` makes it, the handle cache closes it."""

    __slots__ = ("_descriptor", "_overlay", "identity")

    def __init__(self, descriptor: int, identity: FileIdentity) -> None:
        self._descriptor = descriptor
        self._overlay: bool | None = None
        self.identity = identity

    def read_into(self, views: Sequence[memoryview], offset: int) -> int:
        if offset < 0:
            raise OSError(errno.EINVAL, f"negative file offset {offset}")
        return os.preadv(self._descriptor, views, offset)

    def cached_bytes(self, offset: int, nbytes: int) -> int | None:
        if self._overlay is None:
            self._overlay = is_overlay(self._descriptor)
        return cached_bytes(self._descriptor, offset, nbytes, overlay=self._overlay)

    def read_cached(self, view: memoryview, offset: int) -> int:
        return copy_cached(self._descriptor, view, offset)

    def drop_cached(self, offset: int, nbytes: int) -> None:
        if not hasattr(os, "posix_fadvise"):
            raise OSError(errno.EOPNOTSUPP, "this system has no posix_fadvise")
        os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def read_only_what_is_asked(self, only: bool) -> None:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM if only else os.POSIX_FADV_NORMAL)

    def read_ahead(self, offset: int, nbytes: int) -> None:
        step_bytes = read_ahead_bytes(self.identity.device)
        if step_bytes == 0 or not hasattr(os, "posix_fadvise"):
            raise OSError(errno.EOPNOTSUPP, "this system does not say how much it reads ahead")
        end = offset + nbytes
        touched = self._touch(offset, end - _WINDOWS * step_bytes) if step_bytes >= _LARGE_READ_AHEAD_BYTES else offset
        for start in range(touched, end, step_bytes):
            step = min(step_bytes, end - start)
            os.posix_fadvise(self._descriptor, start, step, os.POSIX_FADV_WILLNEED)

    def _touch(self, start: int, stop: int) -> int:
        """Reads a byte here and there, so that the kernel reads ahead in order: in large folios, at a third of the
        processor time that advice costs, which fills pages one by one. Returns where advice has to go on: the kernel
        would read on behind the last byte that is touched."""
        if start >= stop:
            return start
        # A description of its own: the kernel keeps for each where it reads ahead.
        descriptor = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            begun = min(stop, start + _BEGINNING_BYTES)  # read in order, so that the kernel sees that there is one
            whole, byte = [bytearray(_TOUCHED_BYTES)], [bytearray(1)]
            for at in range(start, stop, _TOUCHED_BYTES):
                os.preadv(descriptor, whole if at < begun else byte, at)
        finally:
            os.close(descriptor)
        return stop

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _direct_flag() -> int:
    flag: int | None = getattr(os, "O_DIRECT", None)
    if flag is None:
        raise OSError(errno.EOPNOTSUPP, "this system has no O_DIRECT")
    return flag


def _identity(status: os.stat_result) -> FileIdentity:
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _describe(entry: os.DirEntry[str]) -> DirectoryEntry:
    target = os.readlink(entry.path) if entry.is_symlink() else None  # noqa: PTH115 - the link's own text
    return DirectoryEntry(entry.name, _kind(entry), target)


def _kind(entry: os.DirEntry[str]) -> Literal["file", "directory", "dangling", "other"]:
    try:
        mode = entry.stat().st_mode if entry.is_symlink() else 0
    except OSError as error:
        return "dangling" if error.errno in _LEADS_NOWHERE else "file"
    if stat.S_ISREG(mode) or entry.is_file(follow_symlinks=False):
        return "file"
    if stat.S_ISDIR(mode) or entry.is_dir(follow_symlinks=False):
        return "directory"
    return "other"
