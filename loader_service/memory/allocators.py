"""Host memory for destinations and staging: anonymous, private, huge pages, congruent with the file offset.

Why not torch's or numpy's allocator: a cold read into 4 KiB pages reaches 1.5 GiB/s where huge pages reach 2.2, and
first touch costs three times the CPU. Why not Python's `mmap`: its mapping is shared by default and then gets no huge
pages whatever is advised, its `madvise` holds the interpreter lock (up to 222 ms measured), and it cannot give back
the ends that alignment leaves over.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import resource
from collections.abc import Callable, Sequence
from errno import ENOMEM
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import psutil

from loader_service import logs
from loader_service.errors import ConfigError, MemoryLimitError
from loader_service.memory.admission import free_in_words, memory_rooms
from loader_service.sizes import format_size

if TYPE_CHECKING:
    import torch

_log = logs.logger(__name__)

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20

_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10  # Python does not name it
_MAP_NORESERVE = 0x4000  # Python names it from 3.13 on
_MADV_DONTNEED_LOCKED = 24  # Linux 5.18; Python names neither this
_MADV_COLLAPSE = 25  # Linux 6.1; nor this
_REGION_BYTES = 64 << 20


class _AtItsEnd(functools.partial[int]):
    """A call into the system whose end is that call: in C throughout. A finalizer in Python would swallow an interrupt
    that comes meanwhile, and a consumer that drops what it takes spends much of its time here."""

    __del__ = functools.partial.__call__

    def move(self, address: int, nbytes: int) -> None:
        """Is about these bytes from now on."""
        # What pickle calls: the one way to give a partial other arguments.
        self.__setstate__((self.func, (address, nbytes, *self.args[2:]), {}, self.__dict__))  # type: ignore[attr-defined]


class _Pages(_AtItsEnd):
    """Owns whole pages of a mapping: their memory goes back when the last array, memoryview or tensor over them is
    gone, and the mapping (`munmap`) when nothing has pages of it any more.

    The memory first: the kernel refuses to unmap a part of what it takes for one mapping where the process has
    vm.max_map_count of them (65,530) already, and nobody would hear of it.
    """

    mapping: _AtItsEnd

    def __init__(self, _advise: Callable[[int, int, int], int], address: int, nbytes: int, _advice: int) -> None:
        # numpy makes an array over this memory that holds a reference to this object.
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


class _HookedPages(_Pages):
    """Pages after `HostBuffer.before_unmap`."""

    before_unmap: Callable[[], None]

    def __del__(self) -> None:  # type: ignore[override]
        try:
            self.before_unmap()
        finally:
            self()


class HostBuffer:
    """`nbytes` of writable memory from `address` on, uninitialised (zero at first use).

    The memory lives as long as this object or any tensor, array or memoryview made over it, and is given back to the
    system at once when the last of them is gone. Parts share the memory of the whole.
    """

    __slots__ = ("_array", "_pages", "_tensor", "address", "nbytes")

    def __init__(self, pages: _Pages, array: npt.NDArray[np.uint8], address: int) -> None:
        self._pages = pages
        self._array = array
        self._tensor: torch.Tensor | None = None
        self.address = address
        self.nbytes = array.nbytes

    @property
    def memoryview(self) -> memoryview:
        """The bytes, writable, format "B", one dimension."""
        return self._array.data

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes as a `torch.uint8` tensor of one dimension (imports torch at the first use)."""
        if self._tensor is None:
            import torch

            self._tensor = torch.from_numpy(self._array)
        return self._tensor

    def part(self, start: int, stop: int) -> HostBuffer:
        """The bytes [start, stop) of this buffer, over the same memory."""
        return HostBuffer(self._pages, self._array[start:stop], self.address + start)

    def before_unmap(self, action: Callable[[], None]) -> None:
        """What is done just before the memory goes back to the system, e.g. ending its registration with a device."""
        self._pages.__class__ = _HookedPages
        cast(_HookedPages, self._pages).before_unmap = action


def allocate_host(nbytes: int, *, congruent_to: int = 0, huge: bool = True) -> HostBuffer:
    """Fresh memory whose first byte has `address % 4096 == congruent_to % 4096` (give the file offset it is read from).

    From 2 MiB on, the mapping begins at a multiple of 2 MiB and asks for huge pages. Nothing is touched, so nothing is
    resident yet: what becomes so are `nbytes` rounded up to pages. Thread-safe, does not block, holds no lock of the
    interpreter in system calls. Raises MemoryLimitError if the system refuses. Without `huge` the system is asked for
    ordinary pages instead, to measure what they cost.
    """
    if nbytes < 0 or congruent_to < 0:
        raise ConfigError(f"cannot allocate {nbytes} bytes congruent to offset {congruent_to}: both must be >= 0")
    head_bytes = congruent_to % PAGE_BYTES
    length = _whole_pages(head_bytes + nbytes)
    address = _map(length, nbytes)
    if not huge:
        _advise(address, length, "MADV_NOHUGEPAGE")
    return _buffer(address, length, head_bytes, nbytes, _unmapping(address, length))


class HostRegion:
    """Buffers side by side, for which the system is asked once in a while: 64 MiB of addresses at a time.

    A call that changes what is mapped waits for the page faults of the threads that read next to it. One for each
    buffer kept the service's loop from submitting reads: a load of 3 GiB from the page cache took a tenth longer. A
    process that locks all that it will map (mlockall) gets memory with the addresses: so no more than that at once.
    Where addresses are limited (ulimit -v) others want them, too: just those of the buffers are taken.

    Each buffer has pages of its own and gives their memory back by itself. One that is kept keeps, until the system
    needs memory, the rest of the huge pages that it shares with its neighbours: less than 4 MiB; and the addresses of
    all buffers beside it: unmapped one by one, every other buffer would be a mapping of its own, of which a process may
    have 65,530 (vm.max_map_count). Where addresses are limited, or memory is locked and the kernel too old to take it
    back without them, each buffer gives its own back. What no buffer has taken is unmapped before more is mapped: else
    the last buffer would be filled into a huge page that goes beyond it. Not thread-safe; buffers are.
    """

    def __init__(self, expected_bytes: int) -> None:
        """`expected_bytes`: what all buffers will have together, or less; no more addresses than that are taken."""
        self._expected_bytes = expected_bytes
        self._mapping: _AtItsEnd | None = None  # of what buffers have taken; None where each unmaps its own
        self._rest = _unmapping(0, 0)  # what none has taken
        self._advice = mmap.MADV_DONTNEED
        self._first = self._next = self._stop = 0

    def allocate(self, sizes: Sequence[int]) -> list[HostBuffer]:
        """Buffers of so many bytes each, from a page on. Raises MemoryLimitError if the system refuses."""
        lengths = [_whole_pages(nbytes) for nbytes in sizes]
        needed_bytes = sum(lengths)
        if needed_bytes > self._stop - self._next:
            self._map_more(needed_bytes, sum(sizes))
        self._expected_bytes -= needed_bytes
        address, self._next = self._next, self._next + needed_bytes
        self._rest.move(self._next, self._stop - self._next)
        if self._mapping is not None:
            self._mapping.move(self._first, self._next - self._first)
        buffers = []
        for nbytes, length in zip(sizes, lengths, strict=True):
            mapping = self._mapping or _unmapping(address, length)
            buffers.append(_buffer(address, length, 0, nbytes, mapping, self._advice))
            address += length
        return buffers

    def _map_more(self, needed_bytes: int, wanted_bytes: int) -> None:
        """Lets the rest go."""
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        limited = soft != resource.RLIM_INFINITY
        length = max(needed_bytes, min(_whole_pages(self._expected_bytes), 0 if limited else _REGION_BYTES))
        address = _map(length, wanted_bytes)
        advice = None if limited else _advice_that_gives_back(address)
        self._rest, self._mapping = _unmapping(address, length), None
        if advice is not None:
            self._mapping, self._advice = _unmapping(address, 0), advice
        self._first, self._next, self._stop = address, address, address + length


def map_shared(descriptor: int, nbytes: int) -> HostBuffer:
    """The first `nbytes` of a memory file (see `shared`), shared with every process that maps it. Keeps them alive."""
    length = _whole_pages(nbytes)
    address = _map(length, nbytes, descriptor)
    return _buffer(address, length, 0, nbytes, _unmapping(address, length))


def map_private(descriptor: int, nbytes: int) -> HostBuffer:
    """The first `nbytes` of a memory file as they are: what is written to them is this mapping's own, and costs memory
    only then. As `map_shared` apart from that."""
    length = _whole_pages(nbytes)
    address = _map(length, nbytes, descriptor, private=True)
    return _buffer(address, length, 0, nbytes, _unmapping(address, length))


def collapse_shared(descriptor: int, start: int, stop: int) -> int:
    """Makes huge pages of the bytes [start, stop) of a memory file, whole ones, each of which has some memory already.

    What is there is kept, what is missing becomes zeros. Blocks. Returns 0, or why not all of it could be done: EINVAL
    where the kernel does not know how, is told not to, or has given huge pages already; else it has none just now.
    """
    address = _map(stop - start, stop - start, descriptor, start)
    failed: int = _libc().madvise(address, stop - start, _MADV_COLLAPSE)
    code = ctypes.get_errno() if failed else 0
    _libc().munmap(address, stop - start)
    return code


def _map(
    length: int, wanted_bytes: int, descriptor: int | None = None, offset: int = 0, *, private: bool = False
) -> int:
    """The address of `length` new bytes, or of a memory file's from `offset` on; from 2 MiB on a multiple of 2 MiB.
    `private`: a memory file's bytes, on which the system sets no memory aside for writing."""
    libc = _libc()
    huge = length >= HUGE_PAGE_BYTES
    slack = HUGE_PAGE_BYTES - PAGE_BYTES if huge else 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    access = mmap.PROT_READ | mmap.PROT_WRITE
    found: int | None = libc.mmap(None, length + slack, access, flags, -1, 0)
    if found is None or found == _MAP_FAILED:
        raise _refused(wanted_bytes, ctypes.get_errno(), shared=descriptor is not None)
    if descriptor is not None:
        address = _round_up(found, HUGE_PAGE_BYTES) if huge else found
        how = (mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED) | _MAP_FIXED
        if libc.mmap(address, length, access, how, descriptor, offset) != address:
            code = ctypes.get_errno()
            libc.munmap(found, length + slack)
            raise _refused(wanted_bytes, code, shared=True)
    if not huge:
        return found
    address = _round_up(found, HUGE_PAGE_BYTES)
    # The ends are given back: an advised end would become resident with the data beside it, up to 2 MiB a buffer.
    if address > found:
        libc.munmap(found, address - found)
    if found + slack > address:
        libc.munmap(address + length, found + slack - address)
    _advise(address, length, "MADV_HUGEPAGE")
    return address


def _advise(address: int, length: int, name: str) -> None:
    advice = getattr(mmap, name, None)
    if advice is not None and _libc().madvise(address, length, advice):
        _log.debug("%s is refused (%s): the system decides about pages", name, os.strerror(ctypes.get_errno()))


def _advice_that_gives_back(address: int) -> int | None:
    """What has the kernel take memory back without the addresses, asked of a fresh page; None where it does not."""
    for advice in (_MADV_DONTNEED_LOCKED, mmap.MADV_DONTNEED):
        if _libc().madvise(address, PAGE_BYTES, advice) == 0:
            return advice
    return None


def _buffer(
    address: int, length: int, head_bytes: int, nbytes: int, mapping: _AtItsEnd, advice: int = mmap.MADV_DONTNEED
) -> HostBuffer:
    """Owns the pages [address, address + length) of a mapping, of which the first `head_bytes` are not used."""
    pages = _pages(address, length, mapping, advice)
    return HostBuffer(pages, np.asarray(pages)[head_bytes : head_bytes + nbytes], address + head_bytes)


def _pages(address: int, length: int, mapping: _AtItsEnd, advice: int) -> _Pages:
    pages = _Pages(_libc().madvise, address, length, advice)
    pages.mapping = mapping
    return pages


def _unmapping(address: int, length: int) -> _AtItsEnd:
    return _AtItsEnd(_libc().munmap, address, length)


def _whole_pages(nbytes: int) -> int:
    """At least one."""
    return _round_up(max(1, nbytes), PAGE_BYTES)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@functools.cache
def _libc() -> ctypes.CDLL:
    """The C library; calls through it release the interpreter lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.mmap.restype = pointer
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    return libc


def _mappings() -> tuple[int, float]:
    """How many mappings this process has, and may have: infinitely many where the system does not say."""
    try:
        with open("/proc/sys/vm/max_map_count", encoding="ascii") as limit, open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps), int(limit.read())
    except (OSError, ValueError):
        return 0, math.inf


def _refused(wanted_bytes: int, code: int, *, shared: bool) -> MemoryLimitError:
    mappings, most = _mappings()
    if code == ENOMEM and mappings >= most:
        return MemoryLimitError(
            f"{format_size(wanted_bytes)} of memory cannot be had ({os.strerror(code)}): this process has {mappings} "
            f"mappings, all that vm.max_map_count ({most}) allows: raise it (sysctl -w vm.max_map_count={4 * most}), "
            f"or let go of memory that lies scattered, such as a few tensors kept of many",
            errno=code,
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits = free_in_words(memory_rooms())
    if soft != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError):
            used = psutil.Process().memory_info().vms
            limits += f", {format_size(max(0, soft - used))} is left of the address space limit (ulimit -v, RLIMIT_AS)"
    what = "memory that ranks of this node share, all of which each maps," if shared else "memory"
    less = "lower staging.capacity_bytes, load less on this rank"
    if shared:
        less = "do not share it (layout per_rank for a table, reads.sharing for a load), load less on this node"
    return MemoryLimitError(
        f"{format_size(wanted_bytes)} of {what} cannot be had ({os.strerror(code)}): {limits}; "
        f"{less}, or raise the limit (with memory to spare: "
        "vm.max_map_count or vm.overcommit_memory)",
        errno=code,
    )
