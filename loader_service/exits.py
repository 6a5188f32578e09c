"""The end of the process while daemon threads of the loader are at work.

A thread that comes back from a call of torch's while the interpreter is being taken down aborts the process.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterable
from typing import Protocol
from weakref import WeakSet

_WAIT_S = 1.0


class Pool(Protocol):
    """Threads that are given work again and again."""

    def let_end(self) -> Iterable[threading.Thread]:
        """No more work is begun, or taken; returns the threads, each of which ends after what it does. Blocks not."""
        ...


_running: WeakSet[threading.Thread] = WeakSet()
_pools: WeakSet[Pool] = WeakSet()
_lock = threading.Lock()


def wait_at_exit(thread: threading.Thread) -> None:
    """The end of the process gives this thread a moment, if it runs then."""
    with _lock:
        _running.add(thread)


def end_at_exit(pool: Pool) -> None:
    """The end of the process ends the pool, and gives what its threads do then a moment."""
    with _lock:
        _pools.add(pool)


def let_threads_end() -> None:
    """Threads that are on their way out get a moment. One that waits on a store or a disk without an answer is left."""
    until_s = time.monotonic() + _WAIT_S
    with _lock:
        pools, threads = list(_pools), list(_running)
    for thread in [thread for pool in pools for thread in pool.let_end()] + threads:
        thread.join(max(0.0, until_s - time.monotonic()))


atexit.register(let_threads_end)
