"""Whatever is asked for, given back and cancelled, in any order: the budget holds and everybody is served in turn."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from loader_service.memory.events import FakeDeviceEvent
from loader_service.memory.pinning import FakePinner
from loader_service.memory.pool import Lease, Reservation, StagingPool

CAPACITY = 100
SLOT = 30

STEPS = st.one_of(
    st.tuples(st.just("reserve"), st.integers(0, 250)),
    st.tuples(st.just("lease"), st.integers(0, SLOT)),
    st.tuples(st.sampled_from(["release", "hold", "abandon", "cancel", "complete", "turn"]), st.integers(0, 9)),
)


@dataclass
class Model:
    """Drives one pool and keeps its own account of what is out."""

    pool: StagingPool
    waiting: list[asyncio.Task[Any]] = field(default_factory=list)
    out: list[Lease | Reservation] = field(default_factory=list)
    events: list[FakeDeviceEvent] = field(default_factory=list)
    asked_bytes: set[int] = field(default_factory=set)

    def collect(self) -> None:
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            if not task.cancelled():
                self.out.append(task.result())

    async def step(self, name: str, number: int) -> None:
        if name == "reserve":
            self.asked_bytes.add(number)
            self.waiting.append(asyncio.ensure_future(self.pool.reserve(number)))
        elif name == "lease":
            self.waiting.append(asyncio.ensure_future(self.pool.lease(number, congruent_to=number)))
        elif name == "turn":
            await asyncio.sleep(0)
        elif name == "complete" and self.events:
            self.events.pop(number % len(self.events)).complete()
        elif name == "cancel" and self.waiting:
            self.waiting[number % len(self.waiting)].cancel()
        elif name in ("release", "hold", "abandon") and self.out:
            self.end(self.out.pop(number % len(self.out)), name)
        self.collect()
        self.check()

    def end(self, loan: Lease | Reservation, how: str) -> None:
        if isinstance(loan, Lease) and how == "hold":
            event = FakeDeviceEvent()
            self.events.append(event)
            loan.release_when([event])
        elif isinstance(loan, Lease) and how == "abandon":
            loan.abandon()
        else:
            loan.release()

    def check(self) -> None:
        statistics = self.pool.statistics()
        held_bytes = statistics.out_bytes + statistics.idle_bytes
        if held_bytes > CAPACITY:  # one reservation that is too large for it, and nothing beside it
            assert held_bytes in self.asked_bytes
            assert (statistics.leases_out, statistics.leases_held, statistics.idle_bytes) == (0, 0, 0)
        assert min(statistics.out_bytes, statistics.idle_bytes, statistics.leases_out, statistics.waiting) >= 0
        addresses = {loan.buffer.address // 4096 for loan in self.out if isinstance(loan, Lease)}
        assert len(addresses) == sum(isinstance(loan, Lease) for loan in self.out)

    async def finish(self) -> None:
        """Gives everything back until nobody waits: each turn must serve somebody."""
        async with asyncio.timeout(30):
            while self.waiting or self.out or self.events:
                while self.out:
                    self.end(self.out.pop(), "release")
                while self.events:
                    self.events.pop().complete()
                if self.waiting:
                    await asyncio.wait(self.waiting, return_when=asyncio.FIRST_COMPLETED)
                self.collect()
                self.check()


async def run(steps: list[tuple[str, int]], pinner: FakePinner | None) -> None:
    pool = StagingPool(CAPACITY, slot_bytes=SLOT, pin="auto" if pinner else "never", pinner=pinner)
    model = Model(pool)
    for name, number in steps:
        await model.step(name, number)
    await model.finish()
    final = await pool.close(30)
    assert (final.out_bytes, final.idle_bytes, final.waiting) == (0, 0, 0)
    assert (final.leases_out, final.leases_held, final.reservations_out) == (0, 0, 0)
    assert not pinner or pinner.locked == {}


@settings(max_examples=150)
@given(steps=st.lists(STEPS, max_size=40))
def test_any_sequence_keeps_the_budget_and_comes_to_its_end(steps: list[tuple[str, int]]) -> None:
    asyncio.run(run(steps, None))


@settings(max_examples=75)
@given(steps=st.lists(STEPS, max_size=40), refuse_from=st.none() | st.integers(0, 3))
def test_so_it_does_with_memory_that_is_locked_or_refused(
    steps: list[tuple[str, int]], refuse_from: int | None
) -> None:
    asyncio.run(run(steps, FakePinner(refuse_from=refuse_from)))
