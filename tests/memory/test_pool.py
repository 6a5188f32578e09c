from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from loader_service.errors import ConfigError, MemoryLimitError, StateError
from loader_service.memory import pool as pool_module
from loader_service.memory.allocators import HUGE_PAGE_BYTES, PAGE_BYTES, HostBuffer, allocate_host
from loader_service.memory.events import FakeDeviceEvent
from loader_service.memory.pinning import FakePinner, PinMode
from loader_service.memory.pool import Lease, Reservation, StagingPool

PATIENCE_S = 30.0
SLOT = 10_000

_T = TypeVar("_T")


@asynccontextmanager
async def pool_of(
    slots: int, *, pin: PinMode = "never", pinner: FakePinner | None = None, slot_bytes: int = SLOT
) -> AsyncIterator[StagingPool]:
    """A pool for so many slots, closed at the end; nothing may be out by then."""
    pool = StagingPool(slots * slot_bytes, slot_bytes=slot_bytes, pin=pin, pinner=pinner)
    yield pool
    final = await pool.close(PATIENCE_S)
    assert (final.out_bytes, final.idle_bytes, final.waiting) == (0, 0, 0)


async def soon(awaitable: Awaitable[_T]) -> _T:
    return await asyncio.wait_for(awaitable, PATIENCE_S)


async def waiting(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task that has come to the queue and waits there."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def until(condition: Callable[[], bool]) -> None:
    """Lets other tasks and threads run until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for happens on another thread
            await asyncio.sleep(0.0005)


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE_S)


async def test_a_lease_is_a_writable_buffer_congruent_with_its_offset() -> None:
    async with pool_of(2) as pool:
        lease = await pool.lease(SLOT, congruent_to=12_345)
        assert (lease.nbytes, lease.buffer.nbytes, lease.buffer.tensor.numel()) == (SLOT, SLOT, SLOT)
        assert lease.buffer.address % PAGE_BYTES == 12_345 % PAGE_BYTES
        lease.buffer.memoryview[-1] = 1
        empty = await pool.lease(0, congruent_to=4095)
        assert empty.buffer.nbytes == 0
        lease.release()
        empty.release()


async def test_large_slots_lie_on_huge_pages() -> None:
    async with pool_of(2, slot_bytes=4 << 20) as pool:
        lease = await pool.lease(1, congruent_to=5)
        assert lease.buffer.address % HUGE_PAGE_BYTES == 5
        lease.release()


async def test_slots_are_used_again_instead_of_freed() -> None:
    async with pool_of(3) as pool:
        addresses = set()
        for _ in range(10):
            lease = await pool.lease(100)
            addresses.add(lease.buffer.address)
            lease.release()
        assert len(addresses) == 1
        assert pool.statistics().idle_bytes == pool.statistics().peak_bytes == SLOT


async def test_two_leases_never_share_memory() -> None:
    async with pool_of(4) as pool:
        leases = [await pool.lease(SLOT) for _ in range(4)]
        for number, lease in enumerate(leases):
            lease.buffer.memoryview[:] = bytes([number]) * SLOT
        assert [bytes(lease.buffer.memoryview[:1]) for lease in leases] == [b"\0", b"\1", b"\2", b"\3"]
        for lease in leases:
            lease.release()


async def test_a_lease_that_has_ended_hands_out_nothing_and_ends_once() -> None:
    async with pool_of(2) as pool:
        first, other = await pool.lease(1), await pool.lease(1)
        first.release()
        first.release()
        first.release_when([FakeDeviceEvent()])
        first.abandon()
        with pytest.raises(StateError, match="given back"):
            _ = first.buffer
        statistics = pool.statistics()
        assert (statistics.out_bytes, statistics.leases_out, statistics.leases_held) == (SLOT, 1, 0)
        assert statistics.abandoned_bytes == 0
        other.release()


async def test_a_reservation_ends_once() -> None:
    async with pool_of(2) as pool:
        first, other = await pool.reserve(100), await pool.reserve(50)
        assert pool.statistics().reservations_out == 2
        first.release()
        first.release()
        assert (pool.statistics().out_bytes, pool.statistics().reservations_out) == (50, 1)
        other.release()


async def test_what_does_not_fit_waits_until_enough_is_given_back() -> None:
    async with pool_of(2) as pool:
        lease, reservation = await pool.lease(SLOT), await pool.reserve(SLOT)
        asking = await waiting(pool.lease(1))
        assert pool.statistics().waiting == 1
        reservation.release()
        granted = await soon(asking)
        assert pool.statistics().out_bytes == 2 * SLOT
        lease.release()
        granted.release()


async def test_requests_are_served_in_the_order_in_which_they_came() -> None:
    async with pool_of(4) as pool:
        served: list[str] = []

        async def ask(name: str, coroutine: Coroutine[Any, Any, Lease | Reservation]) -> None:
            loan = await coroutine
            served.append(name)
            loan.release()

        first = await pool.reserve(3 * SLOT)
        tasks = [
            await waiting(ask(name, coroutine))
            for name, coroutine in (
                ("large", pool.reserve(2 * SLOT)),
                ("small would fit now", pool.reserve(1)),
                ("lease would fit now", pool.lease(1)),
                ("last", pool.reserve(4 * SLOT)),
            )
        ]
        assert served == []
        first.release()
        await soon(asyncio.gather(*tasks))
        assert served == ["large", "small would fit now", "lease would fit now", "last"]


@pytest.mark.parametrize("times", [1.0001, 100])
async def test_more_than_the_capacity_is_granted_alone(times: float) -> None:
    async with pool_of(2) as pool:
        lease = await pool.lease(1)
        nbytes = int(2 * SLOT * times)
        asking = await waiting(pool.reserve(nbytes))
        lease.release()
        large = await soon(asking)
        assert (pool.statistics().out_bytes, pool.statistics().idle_bytes) == (nbytes, 0)
        others = [await waiting(pool.lease(1)), await waiting(pool.reserve(0))]
        large.release()
        for loan in await soon(asyncio.gather(*others)):
            loan.release()


async def test_idle_slots_are_freed_when_a_reservation_needs_their_bytes_and_no_others() -> None:
    pinner = FakePinner()
    async with pool_of(4, pin="auto", pinner=pinner) as pool:
        leases = [await pool.lease(1) for _ in range(4)]
        for lease in leases:
            lease.release()
        assert pool.statistics().idle_bytes == 4 * SLOT
        del lease, leases
        reservation = await soon(pool.reserve(SLOT + 1))
        assert pool.statistics().idle_bytes == 2 * SLOT
        assert len(pinner.locked) == 2
        assert pool.statistics().peak_bytes == 4 * SLOT
        reservation.release()


async def test_loans_come_back_from_any_thread() -> None:
    async with pool_of(2) as pool:
        lease, reservation = await pool.lease(1), await pool.reserve(SLOT)
        asking = [await waiting(pool.lease(1)), await waiting(pool.reserve(SLOT))]
        in_thread(reservation.release)
        in_thread(lease.release)
        for loan in await soon(asyncio.gather(*asking)):
            loan.release()


async def test_many_threads_that_end_one_loan_end_it_once() -> None:
    async with pool_of(8) as pool:
        for _ in range(20):
            lease, reservation = await pool.lease(1), await pool.reserve(7)
            start = threading.Barrier(4)

            def end(lease: Lease = lease, reservation: Reservation = reservation, start: Any = start) -> None:
                start.wait()
                lease.release()
                reservation.release()

            threads = [threading.Thread(target=end) for _ in range(4)]
            for thread in threads:
                thread.start()
            await until(lambda threads=threads: not any(thread.is_alive() for thread in threads))  # type: ignore[misc]
            assert pool.statistics().out_bytes == 0
            assert pool.statistics().idle_bytes == SLOT


# Cancelled waiters


async def test_a_cancelled_waiter_leaves_the_queue_to_those_behind_it() -> None:
    async with pool_of(2) as pool:
        lease = await pool.lease(1)
        blocked = await waiting(pool.reserve(2 * SLOT))
        behind = await waiting(pool.reserve(SLOT))
        blocked.cancel()
        (await soon(behind)).release()
        assert pool.statistics().waiting == 0
        lease.release()


@pytest.mark.parametrize("what", ["lease of an idle slot", "lease of a new slot", "reservation"])
@pytest.mark.parametrize("order", ["grant first", "cancel first"])
async def test_a_waiter_that_is_cancelled_in_the_tick_of_its_grant_loses_nothing(what: str, order: str) -> None:
    async with pool_of(2) as pool:
        held: Lease | Reservation = await (pool.lease(1) if "idle" in what else pool.reserve(2 * SLOT))
        rest = await pool.reserve(SLOT if "idle" in what else 0)
        asking = await waiting(pool.reserve(2 * SLOT) if what == "reservation" else pool.lease(1))
        behind = await waiting(pool.reserve(2 * SLOT))
        if order == "cancel first":
            asking.cancel()
        held.release()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        rest.release()
        reservation = await soon(behind)
        assert pool.statistics().out_bytes == 2 * SLOT
        reservation.release()


async def test_a_waiter_that_is_cancelled_after_its_wakeup_loses_nothing() -> None:
    async with pool_of(1) as pool:
        held = await pool.lease(1)
        asking = await waiting(pool.lease(1))
        held.release()
        await asyncio.sleep(0)  # the wakeup is settled now, the task runs in the next turn
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (pool.statistics().out_bytes, pool.statistics().idle_bytes) == (0, SLOT)


def test_a_waiter_whose_loop_is_gone_keeps_nothing() -> None:
    pool = StagingPool(SLOT, slot_bytes=SLOT, pin="never")
    loop = asyncio.new_event_loop()
    held = loop.run_until_complete(pool.lease(1))
    coroutine = pool.lease(1)
    task = loop.create_task(coroutine)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    held.release()
    assert pool.statistics().out_bytes == 0
    assert pool.statistics().waiting == 0
    coroutine.close()  # ends what the loop left, as the garbage collector does
    assert pool.statistics().out_bytes == 0
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    pool.close_now()


# Devices


async def test_a_buffer_is_not_used_again_before_every_event_has_passed() -> None:
    async with pool_of(1) as pool:
        lease = await pool.lease(1)
        address = lease.buffer.address
        events = [FakeDeviceEvent(), FakeDeviceEvent()]
        lease.release_when(events)
        asking = await waiting(pool.lease(1))
        events[1].complete()
        await until(lambda: events[0].queries > 3)
        assert not asking.done()
        statistics = pool.statistics()
        assert (statistics.out_bytes, statistics.leases_out, statistics.leases_held) == (SLOT, 0, 1)
        events[0].complete()
        again = await soon(asking)
        assert again.buffer.address == address
        again.release()


async def test_no_events_mean_at_once() -> None:
    async with pool_of(1) as pool:
        lease = await pool.lease(1)
        lease.release_when([])
        assert pool.statistics().out_bytes == 0


async def test_a_buffer_whose_event_fails_is_never_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    # Not through pytest's capturing: it keeps the traceback, and with it the buffer.
    monkeypatch.setattr("loader_service.memory.caretaker._log.exception", said.append)
    pinner = FakePinner()
    async with pool_of(1, pin="auto", pinner=pinner) as pool:
        lease = await pool.lease(1)
        address = lease.buffer.address
        event = FakeDeviceEvent()
        event.error = RuntimeError("device lost")
        lease.release_when([event])
        other = await soon(pool.lease(1))
        assert other.buffer.address != address
        assert pool.statistics().abandoned_bytes == SLOT
        assert len(said) == 1
        del event, lease
        gc.collect()
        assert address in pinner.locked, "the device may still read it"
        other.release()


async def test_an_abandoned_buffer_gives_its_bytes_back_but_is_never_used_again() -> None:
    async with pool_of(1) as pool:
        lease = await pool.lease(100)
        view = lease.buffer.memoryview
        lease.abandon()
        statistics = pool.statistics()
        assert (statistics.out_bytes, statistics.abandoned_bytes, statistics.leases_out) == (0, SLOT, 0)
        other = await soon(pool.lease(100))
        view[:] = b"x" * 100  # the stuck read comes back
        assert bytes(other.buffer.memoryview) == bytes(100)
        other.release()


# Locked memory


async def test_slots_are_locked_once_and_unlocked_when_they_are_freed() -> None:
    pinner = FakePinner()
    async with pool_of(3, pin="required", pinner=pinner) as pool:
        for _ in range(3):
            leases = [await pool.lease(1) for _ in range(2)]
            for lease in leases:
                lease.release()
        assert pinner.registrations == len(pinner.locked) == 2
        assert pool.pin_outcome.effective == "pinned"
        del lease, leases
    assert pinner.locked == {}


async def test_a_refusal_under_auto_makes_all_slots_pageable(caplog: pytest.LogCaptureFixture) -> None:
    pinner = FakePinner(refuse_from=2)
    async with pool_of(4, pin="auto", pinner=pinner) as pool:
        on_loan, idle = await pool.lease(1), await pool.lease(1)
        idle.release()
        del idle
        again = await pool.lease(1)
        with caplog.at_level(logging.WARNING):
            refused = [await soon(pool.lease(1)) for _ in range(2)]
        assert len(caplog.messages) == 1
        assert pool.pin_outcome.effective == "pageable"
        assert "registration 2" in pool.pin_outcome.reason
        assert len(pinner.locked) == 2
        on_loan.release()
        again.release()
        del on_loan, again
        await until(lambda: pinner.locked == {})
        for lease in refused:
            lease.release()
        assert pinner.registrations == 3
        assert pool.statistics().idle_bytes == 2 * SLOT


async def test_a_refusal_frees_idle_locked_slots_too() -> None:
    pinner = FakePinner(refuse_from=2)
    async with pool_of(3, pin="auto", pinner=pinner) as pool:
        first, second = await pool.lease(1), await pool.lease(1)
        gate = threading.Event()
        pool._caretaker.call(lambda: gate.wait(PATIENCE_S))
        asking = await waiting(pool.lease(1))
        first.release()
        del first
        gate.set()
        refused = await soon(asking)
        await until(lambda: len(pinner.locked) == 1)
        second.release()
        refused.release()
        del second, refused
        await until(lambda: pinner.locked == {})


async def test_a_refusal_of_required_locking_fails_the_lease_and_costs_no_bytes() -> None:
    pinner = FakePinner(refuse_from=1)
    async with pool_of(2, pin="required", pinner=pinner) as pool:
        first = await pool.lease(1)
        with pytest.raises(MemoryLimitError, match=r"staging\.pin is required"):
            await pool.lease(1)
        assert pool.statistics().out_bytes == SLOT
        assert len(pinner.locked) == 1
        first.release()
        (await pool.lease(1)).release()


def test_required_locking_that_cannot_be_is_refused_when_the_pool_is_made() -> None:
    with pytest.raises(MemoryLimitError):
        StagingPool(SLOT, slot_bytes=SLOT, pin="required", pinner=FakePinner(reason="no device"))


class SlowPinner(FakePinner):
    """Stops inside the first registration."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.go = threading.Event()
        self.thread: threading.Thread | None = None

    def register(self, address: int, nbytes: int) -> None:
        self.thread = threading.current_thread()
        self.reached.set()
        assert self.go.wait(PATIENCE_S)
        super().register(address, nbytes)


async def test_locking_does_not_block_the_loop_and_a_cancelled_waiters_slot_is_kept_for_the_next() -> None:
    pinner = SlowPinner()
    async with pool_of(1, pin="auto", pinner=pinner) as pool:
        asking = await waiting(pool.lease(1))
        await until(pinner.reached.is_set)
        assert pinner.thread is not threading.current_thread()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert pool.statistics().out_bytes == SLOT, "its buffer is still being made"
        behind = await waiting(pool.lease(1))
        pinner.go.set()
        (await soon(behind)).release()
        assert pinner.registrations == 1


async def test_a_slot_that_was_not_begun_when_its_waiter_is_cancelled_is_never_made() -> None:
    pinner = SlowPinner()
    async with pool_of(2, pin="auto", pinner=pinner) as pool:
        first = await waiting(pool.lease(1))
        second = await waiting(pool.lease(1))
        await until(pinner.reached.is_set)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert pool.statistics().out_bytes == SLOT
        pinner.go.set()
        (await soon(first)).release()
        assert pinner.registrations == 1


async def test_memory_that_cannot_be_had_fails_the_lease_and_costs_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> HostBuffer:
        raise MemoryLimitError(f"no {nbytes} bytes")

    async with pool_of(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(pool_module, "allocate_host", refuse)
            with pytest.raises(MemoryLimitError):
                await pool.lease(1)
        assert pool.statistics().out_bytes == 0
        (await pool.lease(1)).release()


async def test_a_system_that_starts_no_thread_makes_the_pool_slow_but_not_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with pool_of(2) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            (await pool.lease(1)).release()
            (await pool.reserve(2 * SLOT)).release()
            lease = await pool.lease(1)
            lease.release_when([FakeDeviceEvent()])  # nobody can ask it
        statistics = pool.statistics()
        assert (statistics.out_bytes, statistics.abandoned_bytes) == (0, SLOT)


# The end


async def test_closing_fails_all_waiters_and_refuses_new_ones() -> None:
    pool = StagingPool(SLOT, slot_bytes=SLOT, pin="never")
    held = await pool.lease(1)
    tasks = [await waiting(pool.lease(1)), await waiting(pool.reserve(SLOT))]
    final = await pool.close(0)
    for task in tasks:
        with pytest.raises(StateError, match="closed while"):
            await task
    for coroutine in (pool.lease(1), pool.reserve(1)):
        with pytest.raises(StateError, match="is closed"):
            await coroutine
    assert (final.leases_out, final.out_bytes, final.waiting) == (1, SLOT, 0)
    held.release()
    await pool.close(PATIENCE_S)


async def test_loans_that_are_out_outlive_the_pool_and_can_be_given_back_later() -> None:
    pinner = FakePinner()
    pool = StagingPool(3 * SLOT, slot_bytes=SLOT, pin="auto", pinner=pinner)
    lease, reservation, idle = await pool.lease(100), await pool.reserve(5), await pool.lease(1)
    idle.release()
    del idle
    final = await pool.close(PATIENCE_S)
    assert (final.leases_out, final.reservations_out, final.idle_bytes) == (1, 1, 0)
    assert len(pinner.locked) == 1
    lease.buffer.memoryview[:] = b"y" * 100
    tensor = lease.buffer.tensor
    in_thread(lease.release)
    reservation.release()
    await pool.close(PATIENCE_S)
    assert pool.statistics().out_bytes == 0
    assert bytes(tensor.numpy()) == b"y" * 100
    assert len(pinner.locked) == 1
    del tensor
    assert pinner.locked == {}


async def test_closing_waits_for_devices_but_not_for_ever() -> None:
    pool = StagingPool(2 * SLOT, slot_bytes=SLOT, pin="never")
    event = FakeDeviceEvent()
    (await pool.lease(1)).release_when([event])
    assert (await pool.close(0.01)).leases_held == 1
    closing = await waiting(pool.close(PATIENCE_S))
    event.complete()
    final = await soon(closing)
    assert (final.leases_held, final.out_bytes, final.idle_bytes) == (0, 0, 0)


async def test_a_pool_may_be_closed_from_another_thread_without_a_loop() -> None:
    pool = StagingPool(SLOT, slot_bytes=SLOT, pin="never")
    held = await pool.lease(1)
    asking = await waiting(pool.lease(1))
    in_thread(pool.close_now)
    with pytest.raises(StateError):
        await soon(asking)
    held.release()
    await pool.close(PATIENCE_S)


@pytest.mark.parametrize("slot_bytes", [0, -1, SLOT + 1])
def test_slots_that_do_not_fit_the_capacity_are_refused(slot_bytes: int) -> None:
    with pytest.raises(ConfigError):
        StagingPool(SLOT, slot_bytes=slot_bytes, pin="never")


async def test_requests_that_make_no_sense_are_refused() -> None:
    async with pool_of(1) as pool:
        for request in (pool.lease(SLOT + 1), pool.lease(-1), pool.lease(1, congruent_to=-1), pool.reserve(-1)):
            with pytest.raises(ConfigError):
                await request


async def test_a_recycled_slot_serves_every_congruence() -> None:
    async with pool_of(1) as pool:
        for offset in (0, 1, 4095, 4096, 100):
            lease = await pool.lease(SLOT, congruent_to=offset)
            assert lease.buffer.address % PAGE_BYTES == offset % PAGE_BYTES
            lease.buffer.memoryview[-1] = 1
            lease.release()
        assert pool.statistics().idle_bytes == SLOT
    assert allocate_host(1).nbytes == 1
