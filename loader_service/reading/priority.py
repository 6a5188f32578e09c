"""How reading threads stand back behind the threads of those for whom they read.

While as many of them as there are cores copied from the page cache, a caller's event loop that had something to do
waited for a core up to 8 ms, on Linux 6.18 with two cores. Threads of a lower priority, which ask for a core for a
tenth of a millisecond at a time, let it have one in 5.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import sys
import threading
from typing import Final

NICE: Final = 5
"""Added to what the process has."""

SLICE_NS: Final = 100_000
"""The shortest that Linux knows (from 6.12 on; older ones do not look at it)."""

_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}  # glibc has had a wrapper since 2.41 only


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


def stand_back() -> None:
    """For the thread that calls it, on Linux, where each has a priority of its own. A process that is not scheduled in
    the ordinary way stays as it is, and so does one in a sandbox that refuses."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread) + NICE
        os.setpriority(os.PRIO_PROCESS, thread, nice)
        _ask_for_short_slices(os.getpriority(os.PRIO_PROCESS, thread))


def _ask_for_short_slices(nice: int) -> None:
    number = _SCHED_SETATTR.get(platform.machine())
    if number is not None:
        asked = _Attributes(ctypes.sizeof(_Attributes), nice=nice, runtime_ns=SLICE_NS)
        _libc().syscall(ctypes.c_long(number), ctypes.c_int(0), ctypes.byref(asked), ctypes.c_uint(0))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
