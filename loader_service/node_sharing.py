"""How one load shares reads with the ranks of its node: decided by all ranks together, then set up, run and ended.

Runs on the service's loop. What each rank tells, and what follows, is in `sharing.decision`; here it is asked and done.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import cast

import numpy as np

from loader_service import logs
from loader_service.agreement.messages import JSON
from loader_service.engine import Engine
from loader_service.errors import AgreementError, LoaderError, StateError
from loader_service.filling import Resources
from loader_service.memory.admission import Supply
from loader_service.memory.allocators import HostBuffer
from loader_service.memory.loans import Reservation
from loader_service.memory.pinning import PinPolicy
from loader_service.memory.shared import refusal_of_shared
from loader_service.neighbours import Neighbours
from loader_service.planning.plan import LoadPlan, RankPlan
from loader_service.planning.sharing import MOST_RANKS, NodeBlocks, node_blocks
from loader_service.planning.stripes import stripes
from loader_service.reading.file_range import Access
from loader_service.report import PolicyOutcome
from loader_service.sharing.block_reads import ReadingMeans
from loader_service.sharing.decision import (
    LEAST_SLOT_BYTES,
    NodeFacts,
    Opinion,
    Wanted,
    Way,
    neighbours,
    opinion,
    slot_bytes_of,
    together,
)
from loader_service.sharing.readahead import ReadAhead, threads_of
from loader_service.sharing.reads import SharedReads
from loader_service.sharing.segment import obtain
from loader_service.sharing.stage import Stage
from loader_service.sizes import format_size

log = logs.logger("loader_service.load")

SLOTS = 4  # of a rank; with fewer a node waits more: 13 % longer with 2, 22 % with 1
_EXTRA_PART = 20  # of what a node wants: so much may be read twice for its ranks to read each for itself

_ALONE = "one rank"


class NodeSharing:
    """One load's sharing on its rank: `facts` with the plan, `opinion` with the opening, `settle` with the answers."""

    def __init__(self, engine: Engine, plan: LoadPlan, others: Neighbours, *, held: bool) -> None:
        """`held`: all that this rank wants is in memory already."""
        self._held = held
        self._engine = engine
        self._plan = plan
        self._others = others
        self._requested = engine.config.reads.sharing
        self._node: list[NodeFacts] = []
        self._blocks: NodeBlocks | None = None
        self._wanted = Wanted(0, 0, 0)
        self._ahead: ReadAhead | None = None
        self._stage: Stage | None = None
        self._shared: SharedReads | None = None
        self._reservation: Reservation | None = None
        self.way: Way = "none"
        self.pin_outcome: PolicyOutcome | None = None  # of what is shared
        self._reason = _ALONE

    # Deciding

    async def facts(self) -> JSON:
        """What this rank tells with its plan; nothing if it is alone."""
        engine = self._engine
        if engine.group.world_size == 1:
            return None
        slot_bytes = engine.pool.slot_bytes
        slots = max(1, min(SLOTS, engine.pool.capacity_bytes // (2 * slot_bytes)))
        connected, rank = self._others.connected, engine.group.rank
        shared_bytes = slots * slot_bytes * (1 + len(connected))  # about what the lowest rank makes

        def look() -> NodeFacts:
            refused = refusal_of_shared(shared_bytes) if connected else None
            supply = Supply(rank, engine.node, engine.memory_rooms(), engine.config.memory.reserve_bytes)
            return NodeFacts(rank, connected, self._files(), slot_bytes, slots, self._held, supply, refused)

        return (await engine.in_thread(look, what="looking at this node")).as_json()

    def _files(self) -> str:
        """Which files this rank sees, as far as the page cache is concerned."""
        catalog = self._plan.catalog
        shards = [catalog.shards[i] for i in np.unique(catalog.shard_ids[self._plan.tensor_ids]).tolist()]
        return hashlib.sha256(json.dumps([astuple(each.identity) for each in shards]).encode()).hexdigest()

    async def opinion(self, told: Sequence[object] | None) -> JSON:
        """What this rank's node can do, from the facts of all ranks."""
        if told is None:
            return None
        rank = self._engine.group.rank
        facts = [NodeFacts.from_json(other, cast("Mapping[str, object]", each)) for other, each in enumerate(told)]
        self._node = neighbours(facts, rank)
        if 1 < len(self._node) <= MOST_RANKS:
            await self._engine.in_thread(self._lay_out, what="planning what this node shares")
        own = opinion(self._requested, self._node, self._wanted)
        return {**cast("dict[str, JSON]", own.as_json()), "blocks": self._blocks.digest if self._blocks else None}

    def _lay_out(self) -> None:
        slot_bytes = max(slot_bytes_of(self._node), LEAST_SLOT_BYTES)
        self._blocks = blocks = node_blocks(self._plans(), slot_bytes=slot_bytes)
        self._wanted = Wanted(blocks.union_bytes, blocks.wanted_bytes, blocks.shared_bytes)

    def _plans(self) -> list[RankPlan]:
        return [self._plan.for_rank(each.rank).streamed for each in self._node]

    def settle(self, told: Sequence[object] | None) -> None:
        """What all ranks do, from the opinions of all."""
        if told is None:
            return
        answers = [cast("Mapping[str, object]", each) for each in told]
        self.way, self._reason = together([Opinion.from_json(rank, each) for rank, each in enumerate(answers)])
        for each in self._node:
            if answers[each.rank].get("blocks") != answers[self._node[0].rank].get("blocks"):
                raise AgreementError(
                    f"ranks {self._node[0].rank} and {each.rank} of one node cut what they share differently: install "
                    "the same version of the loader, and of numpy, on all ranks"
                )

    @property
    def access(self) -> Access | None:
        """How all ranks of the node read, where that is decided for them together; None: as each is configured."""
        if self.way == "page_cache":
            return "buffered"
        twice = self._wanted.saved_bytes > self._wanted.union_bytes // _EXTRA_PART
        return "buffered" if self.way == "none" and twice and self._engine.config.reads.access == "auto" else None

    def access_outcome(self, done: PolicyOutcome) -> PolicyOutcome:
        """The policy as it is reported, given what came of it."""
        if self.access is None:
            return done
        if self.way == "page_cache":
            why = "what ranks of a node share is read through the page cache, once"
        else:
            why = "ranks of a node want the same bytes, so these are read through the page cache"
        return PolicyOutcome(self._engine.config.reads.access, done.effective, f"{why}; {done.reason}")

    @property
    def outcome(self) -> PolicyOutcome:
        problem = self._ahead.problem if self._ahead is not None else None
        reason = self._reason if problem is None else f"degraded: {problem}"
        return PolicyOutcome(self._requested, self.way, reason)

    @property
    def fallbacks(self) -> list[str]:
        """What was done otherwise than asked."""
        if self.way != self._requested and self._requested != "auto" and self._wanted.shared_bytes:
            return [f"sharing: {self.way} instead of {self._requested}: {self._reason}"]
        problem = self._ahead.problem if self._ahead is not None else None
        return [] if problem is None else [f"sharing: reading ahead for the node ended early: {problem}"]

    # Reading for the node

    async def begin(
        self, resources: Resources, on_failure: Callable[[BaseException], None], on_progress: Callable[[], None]
    ) -> SharedReads | None:
        """Begins what all ranks have decided. Returns what the load takes from its node; None: it reads by itself.

        `on_failure` gets what goes wrong with reading for others, whether or not this rank's consumer is there.
        """
        if len(self._node) < 2 or not self._wanted.shared_bytes or all(each.held for each in self._node):
            return None
        if self.way == "page_cache":
            self._read_ahead(resources)
        if self.way == "staging":
            return await self._share_memory(resources, on_failure, on_progress)
        return None

    def _read_ahead(self, resources: Resources) -> None:
        reads = self._engine.config.reads
        own = stripes(self._plans(), ranks=len(self._node))[self._place]
        threads = threads_of(len(self._node), reads.threads_per_node)
        shards, handles = self._plan.catalog.shards, resources.ranges.handles
        self._ahead = ReadAhead(own, shards, handles, threads=threads, retries=reads.retries)
        self._ahead.start()

    async def _share_memory(
        self, resources: Resources, on_failure: Callable[[BaseException], None], on_progress: Callable[[], None]
    ) -> SharedReads:
        engine, mesh, blocks = self._engine, self._others.mesh, self._blocks
        assert mesh is not None
        assert blocks is not None
        slots = [each.slots for each in self._node]
        await self._reserve(resources, slots[self._place] * blocks.slot_bytes)
        ranks = [each.rank for each in self._node]
        reads = engine.config.reads
        within_s = (
            reads.stuck_after_s + engine.config.agreement.timeout_s
        )  # the lowest rank may wait as `_reserve` does
        segment = await obtain(mesh, ranks, slots, blocks.slot_bytes, engine.in_thread, within_s)
        await self._pin(segment.memory)
        means = ReadingMeans(resources.ranges, resources.threads, reads.chunk_bytes, reads.stuck_after_s)
        shards = self._plan.catalog.shards
        self._stage = Stage(mesh, segment, blocks, shards, means, on_failure=on_failure, on_progress=on_progress)
        on_passed = resources.pool.when_passed
        self._shared = SharedReads(blocks, self._place, slots, self._stage, on_passed=on_passed, on_failure=on_failure)
        self._stage.start(self._shared)
        return self._shared

    async def _reserve(self, resources: Resources, nbytes: int) -> None:
        """This load's alone, and so at once, unless a consumer still has batches of an earlier one."""
        limit_s = self._engine.config.reads.stuck_after_s
        try:
            async with asyncio.timeout(limit_s):
                self._reservation = await resources.pool.reserve(nbytes)
        except TimeoutError:
            raise StateError(
                f"batches of an earlier load have kept for {limit_s:g} s the staging memory that this rank is to share "
                "with its node: leave each `with batch`"
            ) from None

    async def _pin(self, memory: HostBuffer) -> None:
        """Each rank locks the memory for itself, for its own device."""
        engine = self._engine
        policy = PinPolicy(engine.config.staging.pin, engine.pinner, "memory that ranks of this node share")
        await engine.in_thread(lambda: policy.pin(memory), what="pinning memory that ranks of this node share")
        self.pin_outcome = policy.outcome

    @property
    def _place(self) -> int:
        """This rank's place among those of its node."""
        return [each.rank for each in self._node].index(self._engine.group.rank)

    async def leave(self) -> None:
        """This rank's consumer takes no more; what others need is still read for them. StateError if it keeps any."""
        if self._shared is not None:
            await self._shared.all_back()
        if self._stage is not None:
            self._stage.leave()

    def give_up(self) -> None:
        """The load has failed here: leaving waits for no device, since no other rank waits for this one's memory."""
        if self._shared is not None:
            self._shared.give_up()

    def fail(self, error: LoaderError) -> None:
        """The load has failed on all ranks: nothing more is read for others."""
        self.give_up()
        if self._ahead is not None:
            self._ahead.cancel()
        if self._stage is not None:
            self._stage.fail(error)

    async def stop(self, grace_s: float) -> list[str]:
        """Ends everything. Returns a line for each read that was stuck."""
        stuck = []
        if self._ahead is not None:
            stuck = await self._ahead.stop(grace_s)
        if self._stage is not None:
            stuck = await self._stage.stop(grace_s)
        if self._reservation is not None:
            self._reservation.release()
        return stuck

    @property
    def read_bytes(self) -> int:
        """What this rank has read for its node."""
        if self._stage is not None:
            return self._stage.statistics.read_bytes
        return self._ahead.read_bytes if self._ahead is not None else 0

    @property
    def shards_read(self) -> frozenset[int]:
        """The shards of which this rank has read payload for its node, to be handed over."""
        return self._stage.shards_read if self._stage is not None else frozenset()

    @property
    def shards_taken(self) -> frozenset[int]:
        """The shards of which this rank took payload that its node has read."""
        return frozenset(self._shared.shards_taken) if self._shared is not None else frozenset()

    @property
    def slowest(self) -> int | None:
        """The rank of this node that this one waits for now, also if that is for its own consumer."""
        return self._stage.slowest if self._stage is not None else None

    @property
    def progress(self) -> str:
        """What there is to say beside the bytes that were read."""
        if self._stage is None:
            return ""
        waiting = f", waiting for rank {self.slowest}" if self.slowest is not None else ""
        return f", {format_size(self.read_bytes)} for the node{waiting}"
