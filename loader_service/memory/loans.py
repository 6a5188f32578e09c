"""What the staging pool hands out. Each loan ends once, from whatever thread ends it first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loader_service.errors import StateError
from loader_service.memory.allocators import HostBuffer
from loader_service.memory.events import DeviceEvent


@dataclass(slots=True, eq=False)
class Slot:
    """One recycled buffer of the pool: `slot_bytes` and a page more, so that a loan can be congruent to any offset."""

    buffer: HostBuffer
    pinned: bool


class Reservation:
    """`nbytes` of the budget for memory that the holder allocates itself."""

    __slots__ = ("_ended", "_lock", "_returned", "nbytes")

    def __init__(self, nbytes: int, returned: Callable[[int], None]) -> None:
        self.nbytes = nbytes
        self._returned = returned
        self._lock = threading.Lock()
        self._ended = False

    def release(self) -> None:
        """Gives the bytes back; from any thread, a second call does nothing."""
        with self._lock:
            ended, self._ended = self._ended, True
        if not ended:
            self._returned(self.nbytes)


class Lease:
    """A buffer on loan. The first of `release`, `release_when` and `abandon` ends it; later calls do nothing.

    All three may be called from any thread, during and after the pool's closing, and never block.
    """

    __slots__ = ("_abandoned", "_buffer", "_lock", "_returned", "_slot", "nbytes")

    def __init__(
        self,
        slot: Slot,
        buffer: HostBuffer,
        *,
        returned: Callable[[Slot, Sequence[DeviceEvent]], None],
        abandoned: Callable[[], None],
    ) -> None:
        self.nbytes = buffer.nbytes
        self._slot: Slot | None = slot
        self._buffer: HostBuffer | None = buffer
        self._returned = returned
        self._abandoned = abandoned
        self._lock = threading.Lock()

    @property
    def buffer(self) -> HostBuffer:
        """The memory, `nbytes` of it; raises StateError once the lease has ended."""
        buffer = self._buffer
        if buffer is None:
            raise StateError("this buffer was given back: use it only until its lease is released")
        return buffer

    @property
    def whole(self) -> HostBuffer:
        """All memory of the slot behind the buffer, in whole pages but for the last; StateError as for `buffer`."""
        slot = self._slot
        if slot is None:
            raise StateError("this buffer was given back: use it only until its lease is released")
        return slot.buffer

    def release(self) -> None:
        """Gives the buffer back; nothing may be using it any more."""
        self.release_when(())

    def release_when(self, events: Sequence[DeviceEvent]) -> None:
        """Gives the buffer back as soon as every event's `query()` is true; until then it counts as out.

        If asking an event fails, the buffer is abandoned.
        """
        slot = self._end()
        if slot is not None:
            self._returned(slot, events)

    def abandon(self) -> None:
        """Gives the bytes back to the budget but never uses the buffer again: a stuck read may still write to it."""
        if self._end() is not None:
            self._abandoned()

    def _end(self) -> Slot | None:
        with self._lock:
            slot, self._slot, self._buffer = self._slot, None, None
        return slot
