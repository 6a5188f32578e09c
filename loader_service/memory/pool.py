"""Staging memory on loan: one byte budget, first come first served, with buffers that are used again.

Leases are taken before reads are submitted, so the pool bounds what is read ahead of the consumer.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from loader_service.errors import ConfigError, MemoryLimitError, StateError
from loader_service.memory.allocators import PAGE_BYTES, allocate_host
from loader_service.memory.budget import Budget
from loader_service.memory.caretaker import Caretaker
from loader_service.memory.events import DeviceEvent
from loader_service.memory.loans import Lease, Reservation, Slot
from loader_service.memory.pinning import PinMode, Pinner, PinPolicy
from loader_service.report import PolicyOutcome

__all__ = ["Lease", "PoolStatistics", "Reservation", "StagingPool"]


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """The pool at one moment.

    `out_bytes` is what leases and reservations have, `idle_bytes` allocated and free for the next lease, `peak_bytes`
    the most of both together so far. `leases_out` and `reservations_out` were not given back yet; `leases_held` were,
    and wait for a device. `abandoned_bytes` sums what was abandoned, `waiting` counts requests in the queue.
    """

    capacity_bytes: int
    out_bytes: int
    idle_bytes: int
    peak_bytes: int
    abandoned_bytes: int
    leases_out: int
    leases_held: int
    reservations_out: int
    waiting: int


@dataclass(slots=True, eq=False)
class _Request:
    """One caller in the queue; `nbytes` None asks for a slot. `granted` is set together with the accounting,
    `over` when the caller has gone without what was granted."""

    nbytes: int | None
    granted: bool = False
    over: bool = False
    slot: Slot | None = None
    wakeup: asyncio.Future[None] | None = None


class StagingPool:
    """Reservations and leases from one budget of `capacity_bytes`; one first-in first-out queue for both.

    `reserve`, `lease` and `close` are awaited on one event loop and never block it; everything else is thread-safe.
    Leases have up to `slot_bytes`, `capacity_bytes // slot_bytes` of them fit; each slot has one page more than is
    counted. Idle slots are freed when a reservation needs their bytes. A cancelled waiter leaves nothing behind.

    The queue is strict: who holds bytes and asks for more can wait for itself. Take all that a piece of work needs
    before the next one asks, and a reservation larger than the capacity only when holding nothing.

    Raises ConfigError for sizes that make no sense, MemoryLimitError if `pin` is `required` and cannot be.
    """

    def __init__(self, capacity_bytes: int, *, slot_bytes: int, pin: PinMode, pinner: Pinner | None = None) -> None:
        if not 0 < slot_bytes <= capacity_bytes:
            raise ConfigError(f"staging slots of {slot_bytes} bytes do not fit a capacity of {capacity_bytes} bytes")
        # Re-entrant: a collected coroutine that waited here withdraws from within whatever runs.
        self._lock = threading.RLock()
        self._pins = PinPolicy(pin, pinner)
        self._budget = Budget(capacity_bytes, slot_bytes)
        self._caretaker = Caretaker()
        self._queue: deque[_Request] = deque()
        self._idle: list[Slot] = []
        self._kept: list[Slot] = []
        self._held = 0
        self._reservations = 0
        self._abandoned_bytes = 0
        self._closed = False

    @property
    def capacity_bytes(self) -> int:
        """The budget."""
        return self._budget.capacity_bytes

    @property
    def slot_bytes(self) -> int:
        """The most that one lease may have."""
        return self._budget.slot_bytes

    @property
    def pin_outcome(self) -> PolicyOutcome:
        """What `pin` asked for and what is done, for the report; it can change when a buffer is made."""
        return self._pins.outcome

    def statistics(self) -> PoolStatistics:
        """A consistent look at the pool; from any thread."""
        with self._lock:
            budget = self._budget
            return PoolStatistics(
                capacity_bytes=budget.capacity_bytes,
                out_bytes=budget.out_bytes,
                idle_bytes=budget.idle * budget.slot_bytes,
                peak_bytes=budget.peak_bytes,
                abandoned_bytes=self._abandoned_bytes,
                leases_out=budget.leased - self._held,
                leases_held=self._held,
                reservations_out=self._reservations,
                waiting=len(self._queue),
            )

    def restart_peak(self) -> None:
        """Makes `peak_bytes` count from now, for a load's own report."""
        with self._lock:
            self._budget.restart_peak()

    async def reserve(self, nbytes: int) -> Reservation:
        """Waits for so many bytes of the budget; more than the capacity is granted when nothing else is out.

        Raises StateError if the pool is or becomes closed.
        """
        if nbytes < 0:
            raise ConfigError(f"cannot reserve {nbytes} bytes")
        await self._acquire(_Request(nbytes))
        return Reservation(nbytes, self._unreserve)

    async def lease(self, nbytes: int, *, congruent_to: int = 0) -> Lease:
        """Waits for a buffer of `nbytes`, `slot_bytes` at most, with `address % 4096 == congruent_to % 4096`.

        What is in the buffer is left over from before. Raises StateError if the pool is or becomes closed,
        MemoryLimitError if memory, or locking it where that is required, is refused.
        """
        if not 0 <= nbytes <= self.slot_bytes or congruent_to < 0:
            raise ConfigError(
                f"a lease of {nbytes} bytes at offset {congruent_to} is outside the pool's slots of {self.slot_bytes}"
            )
        request = _Request(None)
        await self._acquire(request)
        slot = request.slot or await self._new_slot()
        head_bytes = congruent_to % PAGE_BYTES
        buffer = slot.buffer.part(head_bytes, head_bytes + nbytes)
        return Lease(slot, buffer, returned=self._returned, abandoned=self._write_off)

    def close_now(self) -> None:
        """Fails all waiters with StateError, frees what is idle, takes no more requests. From any thread, at once.

        Leases and reservations that are out stay valid and can be given back later; their memory then goes to the
        system. Memory lives on under tensors that a consumer kept.
        """
        with self._lock:
            self._closed = True
            waiting = tuple(self._queue)
            self._queue.clear()
            for request in waiting:
                _wake(request, StateError("the staging pool was closed while this request waited for memory"))
            self._budget.freeing += self._budget.idle
            self._budget.idle = 0
            idle, self._idle = self._idle, []
            self._free(idle)
        self._caretaker.stop()

    async def close(self, wait_s: float) -> PoolStatistics:
        """`close_now`, then waits at most `wait_s` until devices are done with buffers and idle memory is freed.

        Returns the final statistics: leases and reservations out are ones that nobody gave back.
        """
        self.close_now()
        await asyncio.wait([asyncio.wrap_future(self._caretaker.stop())], timeout=wait_s)
        return self.statistics()

    async def _acquire(self, request: _Request) -> None:
        with self._lock:
            if self._closed:
                raise StateError("the staging pool is closed")
            self._queue.append(request)
            self._grant()
            if request.granted:
                return
            request.wakeup = wakeup = asyncio.get_running_loop().create_future()
        try:
            await wakeup
        except BaseException:
            # Cancelled, maybe in the same tick as the grant: then the grant is taken back.
            with self._lock:
                self._withdraw(request)
            raise

    def _withdraw(self, request: _Request) -> None:
        """Leaves the queue, or gives back what was granted; called with the lock, a second time without effect."""
        if request.over:
            return
        request.over = True
        if not request.granted:
            if request in self._queue:
                self._queue.remove(request)
            self._grant()
        elif request.nbytes is not None:
            self._unreserve(request.nbytes)
        elif request.slot is not None:
            self._take_back(request.slot)
        else:
            self._lost_slot()

    def _grant(self) -> None:
        """Serves the queue from its head as far as the budget goes; called with the lock, by whoever changed it."""
        while self._queue and self._try(self._queue[0]):
            request = self._queue.popleft()
            request.granted = True
            if not _wake(request, None):
                self._withdraw(request)

    def _try(self, request: _Request) -> bool:
        if request.nbytes is None:
            found = self._budget.try_lease()
            if found == "idle":
                request.slot = self._idle.pop()
            return found is not None
        granted = self._budget.try_reserve(request.nbytes)
        if not granted:
            count = self._budget.idle_to_free(request.nbytes)
            doomed, self._idle = self._idle[:count], self._idle[count:]
            # What is freed on the other thread serves the queue again when it is.
            granted = self._free(doomed) and self._budget.try_reserve(request.nbytes)
        self._reservations += granted
        return granted

    async def _new_slot(self) -> Slot:
        """A new buffer for a lease that is granted already; if there is none, the grant is taken back."""
        if not self._pins.active:
            try:
                return self._make_slot()
            except BaseException:
                self._lost_slot()
                raise
        made: Future[Slot] | None = None
        try:
            made = self._caretaker.call(self._make_slot)
            return await asyncio.wrap_future(made)
        except BaseException:
            # Locking goes on in the other thread when the waiter is cancelled: what it makes is kept for the next.
            if made is None:
                self._lost_slot()
            else:
                made.add_done_callback(self._adopt)
            raise

    def _make_slot(self) -> Slot:
        buffer = allocate_host(self.slot_bytes + PAGE_BYTES)
        slot = Slot(buffer, pinned=self._pins.pin(buffer))
        if not slot.pinned:
            self._drop_pinned()
        return slot

    def _adopt(self, made: Future[Slot]) -> None:
        if made.cancelled() or made.exception() is not None:
            self._lost_slot()
            return
        with self._lock:
            self._take_back(made.result())

    def _lost_slot(self) -> None:
        with self._lock:
            self._budget.leased -= 1
            self._grant()

    def _drop_pinned(self) -> None:
        """After a refusal all buffers are alike again: pageable. Those on loan follow when they come back."""
        with self._lock:
            pinned = [slot for slot in self._idle if slot.pinned]
            if pinned:
                self._idle = [slot for slot in self._idle if not slot.pinned]
                self._budget.idle -= len(pinned)
                self._budget.freeing += len(pinned)
                self._free(pinned)

    def _take_back(self, slot: Slot) -> None:
        """A slot that was leased is idle, or freed if it is not wanted any more; called with the lock."""
        self._budget.leased -= 1
        if self._closed or (slot.pinned and not self._pins.active):
            self._budget.freeing += 1
            self._free([slot])
        else:
            self._budget.idle += 1
            self._idle.append(slot)
        self._grant()

    def _free(self, slots: list[Slot]) -> bool:
        """Lets go of slots that count as freeing, on the caretaker's thread; called with the lock.

        True if they went at once, because no thread can be had: better a slow loop than a queue that waits for ever.
        """
        if not slots:
            return False
        try:
            self._caretaker.call(partial(self._let_go, slots))
        except MemoryLimitError:
            self._budget.freeing -= len(slots)
            slots.clear()
            return True
        return False

    def _let_go(self, slots: list[Slot]) -> None:
        count = len(slots)
        slots.clear()
        with self._lock:
            self._budget.freeing -= count
            self._grant()

    def _unreserve(self, nbytes: int) -> None:
        with self._lock:
            self._reservations -= 1
            self._budget.reserved_bytes -= nbytes
            self._grant()

    def _returned(self, slot: Slot, events: Sequence[DeviceEvent]) -> None:
        with self._lock:
            if not events:
                self._take_back(slot)
                return
            self._held += 1
        self.when_passed(slot, events, partial(self._device_done, slot))

    def when_passed(self, slot: Slot, events: Sequence[DeviceEvent], done: Callable[[bool], None]) -> None:
        """Calls `done(True)`, on a thread of the pool, when all events have passed, `done(False)` if nobody knows. The
        slot, which need not be the pool's, is kept until then, and for good if the device may still read it."""

        def settle(passed: bool) -> None:
            if not passed:
                with self._lock:
                    self._kept.append(slot)
            done(passed)

        try:
            self._caretaker.watch(events, settle)
        except MemoryLimitError:
            settle(False)

    def _device_done(self, slot: Slot, passed: bool) -> None:
        with self._lock:
            self._held -= 1
            if passed:
                self._take_back(slot)
            else:
                self._write_off()

    def _write_off(self) -> None:
        with self._lock:
            self._abandoned_bytes += self.slot_bytes
            self._lost_slot()


def _wake(request: _Request, error: StateError | None) -> bool:
    """Ends the wait on the waiter's own loop, from whatever thread this is; False if that loop is closed."""
    wakeup = request.wakeup
    if wakeup is None:
        return True

    def settle() -> None:
        if wakeup.done():
            return
        if error is not None:
            wakeup.set_exception(error)
        else:
            wakeup.set_result(None)

    try:
        wakeup.get_loop().call_soon_threadsafe(settle)
    except RuntimeError:
        return False
    return True
