"""What the page cache holds of a file: Linux's `cachestat`, and probes that do not wait where it is refused."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import resource
import sys
from pathlib import Path

_CACHESTAT = 451  # the same number on every architecture; glibc has no wrapper for it yet
_PROBE_BYTES = 4096
_OVERLAY = 0x794C7630


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


_SHORT_BYTES = 16 << 20  # a look at so many takes 0.1 ms


def is_overlay(descriptor: int) -> bool:
    """Whether the file is on an overlay file system. Network file systems may ask their server for it."""
    calls = _system_calls()
    return calls is not None and calls.file_system(descriptor) == _OVERLAY


def cached_bytes(descriptor: int, offset: int, nbytes: int, *, overlay: bool | None = None) -> int | None:
    """How many of the bytes [offset, offset + nbytes) the page cache holds, in whole pages; None if unknown.

    `cachestat` costs some 5 us for each MiB that is held and reads nothing ahead. It is refused for files of another
    owner and by kernels before 6.5: then both ends are probed with reads that must not wait, and all that lies between
    is taken to be as they are. An overlay file system answers 0 although the lower file is cached: unknown. Not given,
    `overlay` is asked for.
    """
    if nbytes <= 0:
        return 0
    calls = _system_calls()
    if calls is None or (is_overlay(descriptor) if overlay is None else overlay):
        return None
    counted = calls.cachestat(descriptor, offset, nbytes)
    if counted is not None:
        return min(counted, nbytes)
    ends = (offset, max(offset, offset + nbytes - _PROBE_BYTES))
    found = [_probe(descriptor, end) for end in ends]
    if None in found:
        return None
    return sum(nbytes // 2 for held in found if held) if not all(found) else nbytes


@functools.cache
def read_ahead_bytes(device: int) -> int:
    """What the kernel reads ahead at most when told what will be needed, of files on `device` (their `st_dev`): it
    drops the rest of a request without a word. 0 where it does not say, or reads nothing ahead."""
    number = f"{os.major(device)}:{os.minor(device)}"
    block = Path("/sys/dev/block") / number
    # A partition has no queue of its own; network file systems have no block device.
    places = (block / "queue", block.resolve().parent / "queue", Path("/sys/class/bdi") / number)
    for place in places:
        try:
            return int((place / "read_ahead_kb").read_text(encoding="ascii")) << 10
        except (OSError, ValueError):
            continue
    return 0


def copy_cached(descriptor: int, view: memoryview, offset: int) -> int:
    """Fills `view` as far as the page cache holds the file from `offset` on without a gap; returns how far that is.

    Does not wait for the disk, but where it meets a gap the kernel begins to read ahead, 8 MiB as a rule.
    """
    no_wait = _no_wait()
    if no_wait is None:
        return 0
    try:
        return os.preadv(descriptor, [view], offset, no_wait)
    except OSError:  # EAGAIN: nothing is held; EOPNOTSUPP: the file system does not know how
        return 0


def _no_wait() -> int | None:
    flag: int | None = getattr(os, "RWF_NOWAIT", None)
    return flag


def _probe(descriptor: int, offset: int) -> bool | None:
    no_wait = _no_wait()
    if no_wait is None:
        return None
    try:
        os.preadv(descriptor, [bytearray(1)], offset, no_wait)
    except OSError as error:
        return False if error.errno == errno.EAGAIN else None
    return True


class _SystemCalls:
    """What the standard library does not offer, through ctypes, which lets other threads run meanwhile: but for looks
    that take less than getting the interpreter's lock back would."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._at_once = ctypes.PyDLL(None, use_errno=True)

    def file_system(self, descriptor: int) -> int:
        """The type of the file system, as `statfs` numbers them; 0 if it does not say."""
        answer = (ctypes.c_long * 32)()  # the type is the first word of a structure of at most 15
        return 0 if self._libc.fstatfs(ctypes.c_int(descriptor), answer) else int(answer[0])

    def cachestat(self, descriptor: int, offset: int, nbytes: int) -> int | None:
        pages = _Pages()
        libc = self._at_once if nbytes <= _SHORT_BYTES else self._libc
        failed = libc.syscall(
            ctypes.c_long(_CACHESTAT),
            ctypes.c_int(descriptor),
            ctypes.byref(_Range(offset, nbytes)),
            ctypes.byref(pages),
            ctypes.c_uint(0),
        )
        return None if failed else int(pages.cached) * resource.getpagesize()


@functools.cache
def _system_calls() -> _SystemCalls | None:
    return _SystemCalls() if sys.platform.startswith("linux") else None
