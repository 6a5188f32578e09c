"""Memory that ranks of one node share: an anonymous memory file, which has no name and ends with its last user.

Nothing of it is found in /dev/shm, no limit of that file system binds it, and a killed process leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Callable, Sequence

from loader_service import logs
from loader_service.errors import OUT_OF_FILES, MemoryLimitError
from loader_service.memory.admission import Room, free_in_words, memory_rooms
from loader_service.memory.allocators import HUGE_PAGE_BYTES, HostBuffer, collapse_shared, map_private, map_shared
from loader_service.sizes import format_size

_log = logs.logger(__name__)

_OUT_OF_MEMORY = frozenset({errno.ENOSPC, errno.ENOMEM})
_ADVICE = {
    **OUT_OF_FILES,
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
}
_UNKNOWN_TO_THE_SYSTEM = "this system, or the container's seccomp profile, gives no memory files (memfd_create)"
_F_SEAL_FUTURE_WRITE = 0x10  # Python does not name it
_RESERVE_STEP_BYTES = 64 << 20
_NOT_SHARED = "do not share: layout per_rank for a table, sharing page_cache or none for a load"


class SharedMemory:
    """A memory file of `nbytes`. What is reserved of it can be touched without failing. Owns its descriptor.

    What `map` gives outlives `close`, and so do the mappings of other processes that were given the descriptor.
    `collapsed_bytes`: how much of what was reserved by this object was made huge pages by asking the kernel for them.
    """

    def __init__(self, descriptor: int, nbytes: int, instead: str = _NOT_SHARED) -> None:
        self.descriptor = descriptor
        self._instead = instead
        self.nbytes = nbytes
        self.collapsed_bytes = 0
        self._collapses = True  # as far as is known

    @classmethod
    def create(cls, nbytes: int, *, may_freeze: bool = False, instead: str = _NOT_SHARED) -> SharedMemory:
        """A memory file whose size nobody can change any more. Nothing is reserved yet.

        `may_freeze`: `freeze` will be called. Raises MemoryLimitError if it cannot be had, which says what to do
        `instead`.
        """
        if not sys.platform.startswith("linux"):
            raise MemoryLimitError(f"memory that ranks share needs Linux: {instead}")
        try:
            return cls(_memory_file(nbytes, may_freeze=may_freeze), nbytes, instead)
        except OSError as error:
            raise _refused(nbytes, error, memory_rooms(), instead) from error

    @classmethod
    def received(cls, descriptor: int, nbytes: int) -> SharedMemory:
        """Takes over a descriptor that another process handed on; raises MemoryLimitError unless it holds `nbytes`."""
        memory = cls(descriptor, nbytes)
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:  # no memory file at all
            seals = 0
        size = os.fstat(descriptor).st_size
        if size < nbytes or not seals & fcntl.F_SEAL_SHRINK:
            memory.close()
            kept = "" if seals & fcntl.F_SEAL_SHRINK else ", which may shrink"
            raise MemoryLimitError(f"shared memory of {nbytes} bytes was announced, but what came has {size}{kept}")
        return memory

    @property
    def reserved_bytes(self) -> int:
        """What is resident of it, whoever has reserved that."""
        return os.fstat(self.descriptor).st_blocks * 512

    def reserve(self, start: int, stop: int, stopped: Callable[[], bool] = lambda: False) -> None:
        """Makes the bytes [start, stop) of it resident, zeroed, on huge pages where the kernel gives them. Ranks
        reserve their own parts at the same time. Blocks, until `stopped`.

        Raises MemoryLimitError, with what is wanted and what is there. It looks first, and again every 64 MiB: the
        kernel would kill this process, or another, rather than refuse.
        """
        while start < stop and not stopped():
            end = min(stop, (start // _RESERVE_STEP_BYTES + 1) * _RESERVE_STEP_BYTES)
            rooms = memory_rooms()
            if any(room.free_bytes < stop - start for room in rooms):
                short = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
                raise _refused(stop - start, short, rooms, self._instead)
            try:
                self._make_huge(start, end)
                os.posix_fallocate(self.descriptor, start, end - start)
            except OSError as error:
                raise _refused(stop - start, error, rooms, self._instead) from error
            start = end

    def _make_huge(self, start: int, stop: int) -> None:
        """Reserves the whole huge pages within [start, stop), as far as the kernel gives any.

        A memory file gets none of itself unless the system is configured so (shmem_enabled), but small pages that are
        there may be collapsed. One in each is enough: 3 GiB by 4 ranks in 0.12 s, zeroed, where reserving them in pages
        of 4 KiB takes 0.8, zeroing them at first touch as long again, and collapsing all of those 0.3 to 3 s more.
        """
        first, last = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, stop // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if not self._collapses or first >= last:
            return
        for page in range(first, last, HUGE_PAGE_BYTES):
            os.posix_fallocate(self.descriptor, page, 1)
        code = collapse_shared(self.descriptor, first, last)
        if code == 0:
            self.collapsed_bytes += last - first
        elif code == errno.EINVAL:  # other refusals are of the moment, and cost a few ms
            self._collapses = False
            _log.debug("no shared memory is collapsed: the kernel gives huge pages by itself, or none")

    def freeze(self) -> None:
        """From now on nobody can map it to write to it, but for the mappings that there are. Private ones can be had:
        what is written there stays there. A kernel that does not know this (before 5.1) leaves it as it is."""
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)

    def map(self) -> HostBuffer:
        """The memory, in this process, for as long as anything refers to it."""
        return map_shared(self.descriptor, self.nbytes)

    def map_private(self) -> HostBuffer:
        """As `map`, but what is written there is this mapping's own."""
        return map_private(self.descriptor, self.nbytes)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _memory_file(nbytes: int, *, may_freeze: bool = False) -> int:
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | (0 if may_freeze else fcntl.F_SEAL_SEAL)
    descriptor = os.memfd_create("loader-service", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def refusal_of_shared(nbytes: int) -> str | None:
    """Why this process can have no shared memory of that size, whatever is free; None: it can. Nothing is kept."""
    if not sys.platform.startswith("linux"):
        return "memory that ranks share needs Linux"
    try:
        os.close(_memory_file(nbytes))
    except OSError as error:
        return _why_refused(nbytes, error, memory_rooms())
    return None


def _refused(nbytes: int, error: OSError, rooms: Sequence[Room], instead: str) -> MemoryLimitError:
    return MemoryLimitError(f"{_why_refused(nbytes, error, rooms)}, or {instead}", errno=error.errno)


def _why_refused(nbytes: int, error: OSError, rooms: Sequence[Room]) -> str:
    if error.errno in _OUT_OF_MEMORY:
        advice = f"{free_in_words(rooms)}; load less on this node or raise its limit"
    else:
        advice = _ADVICE.get(error.errno or 0, _UNKNOWN_TO_THE_SYSTEM)
    return f"{format_size(nbytes)} of shared memory cannot be had ({os.strerror(error.errno or 0)}): {advice}"
