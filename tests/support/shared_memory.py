"""What lies in the machine's shared memory, where others put things too."""

from __future__ import annotations

import os
import time

_WAIT_S = 10.0


def names() -> set[str]:
    return set(os.listdir("/dev/shm"))


def assert_nothing_new(before: set[str]) -> None:
    """Nothing stays there that was not there before. What others put there for a moment goes again."""
    until_s = time.monotonic() + _WAIT_S
    while (new := names() - before) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not new
