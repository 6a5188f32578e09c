"""What the forms of consumption have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from loader_service.checkpoint.catalog import Shard
from loader_service.filling.cached import CachingReader, HeldBytes
from loader_service.memory.pool import Lease, Reservation, StagingPool
from loader_service.planning.plan import RankPlan
from loader_service.planning.shared_units import SharedRanges
from loader_service.reading.ranges import RangeReader
from loader_service.reading.threads import ReadPool
from loader_service.sharing.reads import SharedReads
from loader_service.transfers import RangeSource

MAX_TENSORS_A_UNIT = 256  # bounds how long the service's loop works on one unit at a stretch

SCRATCH_LEASES_A_THREAD = 2  # one that is filled while another is copied from

Memory = Reservation | Lease | None
Streams = Mapping[torch.device, torch.cuda.Stream]


@dataclass(frozen=True, slots=True)
class Resources:
    """What a load borrows from its service, its own way of reading, and what its node shares."""

    ranges: RangeReader
    threads: ReadPool
    thread_count: int
    pool: StagingPool
    shared: SharedReads | None = None
    in_memory: HeldBytes | None = None

    def source(self, shards: Sequence[Shard], *, keeps: bool) -> RangeSource:
        """Where the load's ranges come from: files, or what is in memory of them."""
        if self.in_memory is None:
            return self.ranges
        return CachingReader(self.ranges, self.in_memory, shards, keeps=keeps)

    @property
    def capacity_bytes(self) -> int:
        """What this load may read ahead of its consumer, beside what it keeps for its node."""
        return self.pool.capacity_bytes - (self.shared.kept_bytes if self.shared is not None else 0)

    @property
    def shared_ranges(self) -> SharedRanges | None:
        """Which bytes come from blocks that the node shares."""
        return self.shared.ranges if self.shared is not None else None

    def scratch_leases(self, plan: RankPlan) -> int:
        """Scratch slots of a load that copies: enough to keep the threads busy, no more than there is to read, at most
        half of the staging memory."""
        slots = self.capacity_bytes // self.pool.slot_bytes
        needed = -(-plan.read_bytes // self.pool.slot_bytes)
        return max(1, min(self.thread_count * SCRATCH_LEASES_A_THREAD, needed, slots // 2))
