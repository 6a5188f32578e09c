"""Headers and indexes of checkpoints that were read before, for loads that would read the same bytes again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

HEADERS_BYTES: Final = 128 << 20
"""The most that is kept, beside `cache.capacity_bytes`. The 48 headers of a checkpoint of 527 GB have 19 MiB."""


class HeaderCache:
    """Whole headers and indexes by path, one state of a file each, least recently used out first. Thread-safe.

    Whoever asks has looked at the file (its state now), and opens it only where the answer is None.
    """

    def __init__(self, capacity_bytes: int = HEADERS_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[Hashable, bytes]] = OrderedDict()
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    def get(self, path: str, state: Hashable) -> bytes | None:
        """What was kept of the file in this very state."""
        with self._lock:
            found = self._kept.get(path)
            if found is None or found[0] != state:
                return None
            self._kept.move_to_end(path)
            return found[1]

    def keep(self, path: str, state: Hashable, raw: bytes) -> None:
        """Keeps what was read of a file that was in this state before the reading, instead of any other state's."""
        with self._lock:
            self._drop(path)
            if len(raw) > self._capacity_bytes:
                return
            while self._kept_bytes + len(raw) > self._capacity_bytes:
                self._drop(next(iter(self._kept)))
            self._kept[path] = (state, raw)
            self._kept_bytes += len(raw)

    def clear(self) -> None:
        """Forgets all of them."""
        with self._lock:
            self._kept.clear()
            self._kept_bytes = 0

    def _drop(self, path: str) -> None:
        dropped = self._kept.pop(path, None)
        if dropped is not None:
            self._kept_bytes -= len(dropped[1])
