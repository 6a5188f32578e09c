"""The end of the process while threads may still be in a store's call."""

from __future__ import annotations

import atexit
import threading
import time
from weakref import WeakSet

_WAIT_S = 1.0

_running: WeakSet[threading.Thread] = WeakSet()
_lock = threading.Lock()


def wait_at_exit(thread: threading.Thread) -> None:
    """The end of the process gives this thread a moment, if it runs then."""
    with _lock:
        _running.add(thread)


def let_threads_end() -> None:
    """A thread that comes back from a store's call while the interpreter is being taken down aborts the process, so
    those that are on their way out get a moment. One that waits on a store without an answer is left."""
    until_s = time.monotonic() + _WAIT_S
    with _lock:
        threads = list(_running)
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))


atexit.register(let_threads_end)
