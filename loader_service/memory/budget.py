"""The arithmetic of the staging pool: who may have how many bytes now. Pure state, no threads and no memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


def slot_bytes_of(chunk_bytes: int, capacity_bytes: int) -> int:
    """A staging slot: a chunk, but at most a quarter of the capacity, so that reading and consuming overlap."""
    slot = min(max(chunk_bytes, 1024), capacity_bytes // 4)
    return slot if slot < 4096 else slot // 4096 * 4096


@dataclass(slots=True)
class Budget:
    """`capacity_bytes` shared by reservations (any size) and leases (slots of `slot_bytes`).

    A slot that was leased and came back stays allocated (idle), so it counts until it is freed. All methods decide and
    account at once; the caller then does what was decided. Held bytes never exceed the capacity, with one exception: a
    reservation larger than it is granted when nothing else is held, and then nothing else is until it comes back.
    """

    capacity_bytes: int
    slot_bytes: int
    reserved_bytes: int = 0
    leased: int = 0
    idle: int = 0
    freeing: int = 0
    peak_bytes: int = 0

    @property
    def out_bytes(self) -> int:
        """Bytes that somebody has: reservations and leased slots."""
        return self.reserved_bytes + self.leased * self.slot_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes out, idle, or on their way back to the system."""
        return self.out_bytes + (self.idle + self.freeing) * self.slot_bytes

    def try_lease(self) -> Literal["idle", "new"] | None:
        """One slot more is leased: an idle one, or a new one to be allocated; None: not now."""
        if self.idle:
            self.idle -= 1
            self.leased += 1
            return "idle"
        if self.held_bytes + self.slot_bytes > self.capacity_bytes:
            return None
        self.leased += 1
        self._note_peak()
        return "new"

    def try_reserve(self, nbytes: int) -> bool:
        """So many bytes more are reserved; False: not now (see `idle_to_free`)."""
        if self.held_bytes + nbytes > self.capacity_bytes and (nbytes <= self.capacity_bytes or self.held_bytes):
            return False
        self.reserved_bytes += nbytes
        self._note_peak()
        return True

    def idle_to_free(self, nbytes: int) -> int:
        """How many idle slots to free so that a reservation can be granted; they count as freeing from now on.

        None while bytes that are out stand in its way anyway: slots that will be used again are not freed early.
        """
        room_bytes = max(0, self.capacity_bytes - nbytes)
        if self.out_bytes > room_bytes:
            return 0
        excess_bytes = self.held_bytes - self.freeing * self.slot_bytes - room_bytes
        count = min(self.idle, max(0, -(-excess_bytes // self.slot_bytes)))
        self.idle -= count
        self.freeing += count
        return count

    def restart_peak(self) -> None:
        """From now on the peak is the most since now."""
        self.peak_bytes = self.held_bytes

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
