"""What one load takes of what its node shares: blocks, in order, each given back once nothing of it is needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from loader_service.errors import StateError
from loader_service.memory.allocators import HostBuffer
from loader_service.memory.events import DeviceEvent
from loader_service.memory.loans import Lease, Slot
from loader_service.planning.shared_units import SharedRanges
from loader_service.planning.sharing import NodeBlocks
from loader_service.sharing.uses import BlockUses

OnPassed = Callable[[Slot, Sequence[DeviceEvent], Callable[[bool], None]], None]
"""(slot, events, done): calls `done(True)`, on some thread, when all events have passed, `done(False)` if one failed.
Until then the slot is kept, and in that case for good."""


class Blocks(Protocol):
    """Where blocks come from: see `sharing.stage.Stage`."""

    async def block(self, number: int) -> HostBuffer: ...

    def done(self, number: int) -> None: ...


class SharedReads:
    """The blocks of one load on one rank, on the service's loop: fillings and the scheduler take them in plan order.

    Those that this rank wants at `place` are kept for it until it has given them back; also such that its consumer
    never comes to. `slots` is how many blocks each place of the node can keep at once.
    """

    def __init__(
        self,
        layout: NodeBlocks,
        place: int,
        slots: Sequence[int],
        source: Blocks,
        *,
        on_passed: OnPassed,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._place = place
        self.layout = layout
        self.ranges = SharedRanges(layout)
        self._slots = slots
        self._source = source
        self._on_passed = on_passed
        self._on_failure = on_failure
        wanted = np.flatnonzero(layout.wants & np.uint64(1 << place)).tolist()
        self._uses = BlockUses(wanted, source.done)
        self._loop = asyncio.get_running_loop()
        self._waits_for: int | None = None
        self._leases: Counter[int] = Counter()
        self._passing = 0  # leases that wait for a device
        self._changed = asyncio.Event()
        self._given_up = False
        self.consumer_waits = False  # for a block, and for nothing else, when the scheduler last looked
        self.shards_taken: set[int] = set()

    @property
    def kept_bytes(self) -> int:
        """What this rank keeps of its staging memory for blocks."""
        return self._slots[self._place] * self.layout.slot_bytes

    @property
    def leases_out(self) -> int:
        """How many blocks the consumer has, each counted as often as it has it."""
        return self._leases.total()

    @property
    def waits(self) -> bool:
        """Whether a block is waited for: for the rank that reads it, or for those that keep its slots."""
        return self._waits_for is not None

    @property
    def waits_for_its_consumer(self) -> bool:
        """Whether the block that is waited for cannot be read because the consumer here keeps all slots of its rank."""
        if self._waits_for is None:
            return False
        place = int(self.layout.owner[self._waits_for])
        return sum(int(self.layout.owner[block]) == place for block in self._leases) >= self._slots[place]

    @property
    def starves(self) -> bool:
        """Whether the consumer waits for a block: nothing else is on its way to it, nor do devices pass what it gave
        back."""
        return self.consumer_waits and self.waits and not self._passing

    async def take(self, block: int) -> HostBuffer:
        """The memory of a block, once it is there: one use, to be ended with `give_back`."""
        self._uses.begin(block)
        self._waits_for = block
        first, last = self.layout.first_range[block : block + 2].tolist()
        self.shards_taken.update(self.layout.range_shard[first:last].tolist())
        try:
            return await self._source.block(block)
        except BaseException:
            self._uses.end(block)
            raise
        finally:
            self._waits_for = None

    def give_back(self, block: int) -> None:
        """One use of a block is over."""
        self._uses.end(block)

    def lease(self, block: int, memory: HostBuffer) -> Lease:
        """A use that was taken, for a consumer: given back from any thread, once devices have passed its events."""
        self._leases[block] += 1
        return Lease(
            Slot(memory, pinned=False),
            memory,
            returned=lambda slot, events: self._returned(block, slot, events),
            abandoned=lambda: self._end_lease(block, passed=False),
        )

    def finish(self) -> None:
        """This load takes no more; what is in use is given back as it ends."""
        self._uses.finish()

    async def all_back(self) -> None:
        """Returns when devices have passed what consumers gave back, or after `give_up`. StateError if a consumer keeps
        what it must give back for the node to go on."""
        await asyncio.sleep(0)  # what was given back a moment ago is counted then
        while self._leases and not self._given_up:
            kept = self._leases.total() - self._passing
            if kept:
                raise StateError(
                    f"the load is left with {kept} batches in use, whose memory other ranks of this node wait for: "
                    "leave each `with batch` before the load"
                )
            self._changed.clear()
            await self._changed.wait()

    def give_up(self) -> None:
        """The load has failed: its node needs nothing back any more."""
        self._given_up = True
        self._changed.set()

    def _returned(self, block: int, slot: Slot, events: Sequence[DeviceEvent]) -> None:
        """On the thread of whoever gives it back."""
        if not events:
            self._end_lease(block, passed=True)
            return
        self._call(self._begin_passing)
        self._on_passed(slot, events, lambda passed: self._end_lease(block, passed=passed, was_passing=True))

    def _begin_passing(self) -> None:
        self._passing += 1

    def _end_lease(self, block: int, *, passed: bool, was_passing: bool = False) -> None:
        """A device may still read what it has not passed: then the block is never given back, and the load fails."""

        def end() -> None:
            self._passing -= was_passing
            self._leases[block] -= 1
            self._leases += Counter()  # forgets those that are at 0
            self._changed.set()
            if passed:
                self._uses.end(block)
            else:
                text = f"nobody knows whether a device still reads block {block}, which ranks of this node share"
                self._on_failure(StateError(text))

        self._call(end)

    def _call(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the load
            self._loop.call_soon_threadsafe(function)
