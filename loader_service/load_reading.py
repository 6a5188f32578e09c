"""What one rank reads in one load: for its own consumer, for others of its node, and what became of it.

Runs on the service's loop. `LoadRun` agrees with the other ranks and says when; here bytes move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from loader_service import logs
from loader_service.bridge import Channel
from loader_service.checkpoint.slices import numbers_of
from loader_service.engine import Engine
from loader_service.errors import LoaderError
from loader_service.filling import (
    Filling,
    HeldBytes,
    IntoFilling,
    OwnedFilling,
    OwnedUnit,
    Resources,
    SlotFilling,
    SlotUnit,
    Streams,
    UnitT,
)
from loader_service.node_sharing import NodeSharing
from loader_service.planning.arenas import OwnedLayout
from loader_service.planning.plan import RankPlan
from loader_service.planning.units import SlotLayout, TensorUnit
from loader_service.report import PolicyOutcome
from loader_service.scheduler import Progress, Scheduler
from loader_service.sizes import format_size
from loader_service.sources import Tables
from loader_service.timeline import Counters

log = logs.logger("loader_service.load")


class LoadReading:
    """The reading of one load, from the moment when all ranks have agreed on it. `begin`, then one of the `fill_*`.

    `on_failure` gets what goes wrong here, `on_progress` is called when something was read.
    """

    def __init__(
        self,
        engine: Engine,
        load: str,
        plan: RankPlan,
        tables: Tables,
        sharing: NodeSharing,
        in_memory: HeldBytes | None,
        channel: Channel[OwnedUnit | SlotUnit],
        progress: Progress,
        *,
        on_progress: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._load = load
        self._plan = plan
        self._tables = tables
        self._sharing = sharing
        self._in_memory = in_memory
        self._channel = channel
        self._progress = progress
        self._on_progress = on_progress
        self._on_failure = on_failure
        self._policies: dict[str, PolicyOutcome] = {}
        self._stuck: list[str] = []
        self._resources: Resources | None = None
        self._scheduler: Scheduler[OwnedLayout] | Scheduler[SlotLayout] | Scheduler[TensorUnit] | None = None

    async def begin(self, ranks_by_node: Mapping[str, int]) -> None:
        """From here on this rank reads for others of its node, whenever its own consumer comes."""
        resources, self._policies = self._engine.resources(ranks_by_node, access=self._sharing.access)
        resources.pool.restart_peak()
        self._resources = resources
        shared = await self._sharing.begin(resources, self._on_failure, self._on_progress)
        self._resources = replace(resources, shared=shared, in_memory=self._in_memory)

    # One form of consumption

    def fill_owned(self) -> None:
        plan = self._plan.streamed
        self._scheduler = self._scheduled(plan, OwnedFilling(plan, self._ready, chunk_bytes=self._chunk_bytes))

    def fill_slots(self) -> None:
        plan = self._plan.streamed
        self._scheduler = self._scheduled(plan, SlotFilling(plan, self._ready, chunk_bytes=self._chunk_bytes))

    def fill_into(self, destinations: Mapping[str, torch.Tensor], streams: Streams) -> None:
        whole = self._plan
        plan = whole.restrict([i for name in destinations if (i := whole.index_of(name)) is not None])
        filling = IntoFilling(plan, destinations, self._ready, chunk_bytes=self._chunk_bytes, streams=streams)
        self._scheduler = self._scheduled(plan, filling)

    @property
    def _ready(self) -> Resources:
        assert self._resources is not None
        return self._resources

    @property
    def _chunk_bytes(self) -> int:
        return self._engine.config.reads.chunk_bytes

    def _scheduled(self, plan: RankPlan, filling: Filling[UnitT]) -> Scheduler[UnitT]:
        scheduler = Scheduler(
            plan,
            plan.catalog.shards,
            filling,
            self._ready,
            self._channel,
            reads=self._engine.config.reads,
            progress=self._progress,
            on_progress=self._on_progress,
            on_failure=self._on_failure,
        )
        scheduler.start(lambda: self._make_room(filling.keeps_copies))
        return scheduler

    async def _make_room(self, copies: bool) -> None:
        """Room in the raw weight cache, before anything is read, if anything will be left there."""
        if self._in_memory is None or not self._in_memory.grows:
            return
        if copies and self._ready.shared is not None:
            self._in_memory.leave_nothing("what comes from memory that the node shares is not kept")
            return
        await self._engine.in_thread(self._in_memory.make_room, what="making room in the raw weight cache")
        if not self._in_memory.adds:
            reason = self._in_memory.outcome.reason
            log.warning("load '%s' leaves nothing in the raw weight cache: %s", self._load, reason)

    # Ending

    def fail(self, error: LoaderError) -> None:
        """The load has failed on all ranks: what is queued stops, whoever waits gets `error`."""
        self._sharing.fail(error)
        if self._scheduler is not None:
            self._scheduler.fail(error)
        self._tables.fail(error)

    def give_up(self) -> None:
        """The load has failed here: what is ended now waits for nothing but reads in flight."""
        self._sharing.give_up()

    async def stop_taking(self) -> None:
        """Ends what this rank reads and takes for its own consumer."""
        if self._scheduler is not None:
            self._note_stuck(await self._scheduler.stop(self._engine.config.agreement.grace_s))
        await self._sharing.leave()

    async def stop_sharing(self) -> None:
        """Ends what this rank reads for others of its node."""
        self._note_stuck(await self._sharing.stop(self._engine.config.agreement.grace_s))

    def left(self) -> None:
        """The load is over."""
        self._tables.left()
        if self._in_memory is not None:
            self._in_memory.close()

    def _note_stuck(self, reads: list[str]) -> None:
        for stuck in reads:
            self._stuck.append(f"left behind: a read of {stuck} never returned")
            log.warning("a read of %s did not return; its memory is not used again", stuck)

    async def verify_files(self) -> None:
        """The files that bytes came from are still those whose headers were planned with."""
        taken = self._sharing.shards_taken
        if self._in_memory is not None:  # which has the bytes of files that nobody may have looked at since
            taken = frozenset(numbers_of(self._plan.extent_shard))
        shards = [self._plan.catalog.shards[i] for i in sorted(taken | self.shards_read)]

        def verify() -> None:
            for shard in shards:
                self._engine.verify(shard)

        if shards:
            await self._engine.in_thread(verify, what="looking at the files of the load again")

    # What became of it

    @property
    def progress(self) -> str:
        """How far this rank has come, in words."""
        text = f"{format_size(self.read_bytes)} read"
        if row_bytes := self._tables.read_bytes:
            text += f", {format_size(row_bytes)} of it rows of host-resident tables"
        return text + self._sharing.progress

    def counters(self) -> Counters:
        """What it is at, at this moment; from any thread."""
        resources, scheduler = self._resources, self._scheduler
        return Counters(
            read_bytes=self.read_bytes + self.striped_bytes,
            filled_bytes=self._progress.handed_bytes,
            taken_bytes=self._progress.payload_bytes,
            in_flight=len(self._engine.threads.in_flight()),
            threads=self._engine.threads.threads,
            queued=self._channel.depth,
            held_bytes=resources.pool.statistics().out_bytes if resources is not None else 0,
            consumer_waits=self._channel.consumer_waits,
            waits_for_memory=scheduler is not None and scheduler.waits_for_memory,
        )

    @property
    def slowest(self) -> int | None:
        """The rank of this node that this one waits for now, where they share memory."""
        return self._sharing.slowest

    @property
    def shards_read(self) -> frozenset[int]:
        """The shards of which payload was read: streamed, by rows, for others of the node."""
        scheduled = self._scheduler.shards_read if self._scheduler is not None else ()
        return frozenset({*scheduled, *self._tables.shards_read, *self._sharing.shards_read})

    @property
    def read_bytes(self) -> int:
        return self._progress.read_bytes + self._tables.read_bytes

    @property
    def striped_bytes(self) -> int:
        return self._sharing.read_bytes

    @property
    def peak_bytes(self) -> int:
        """The most staging memory that was held at once."""
        return self._resources.pool.statistics().peak_bytes if self._resources is not None else 0

    @property
    def policies(self) -> dict[str, PolicyOutcome]:
        found: dict[str, PolicyOutcome] = {}
        if self._resources is not None:
            done = self._resources.ranges.outcome
            read_nothing = self._in_memory is not None and self._in_memory.everything
            found["access"] = done if read_nothing else self._sharing.access_outcome(done)
        found["sharing"] = self._sharing.outcome
        if self._engine.attachment is not None:
            found["service"] = self._engine.attachment.outcome
        if self._in_memory is not None:
            found[self._in_memory.policy] = self._in_memory.outcome
        shared = self._sharing.pin_outcome
        pin = {"pin": shared} if shared is not None else {}
        return found | self._policies | pin | self._tables.policies

    @property
    def fallbacks(self) -> list[str]:
        """What was done otherwise than asked."""
        files = self._resources.ranges.statistics.fallbacks if self._resources is not None else ()
        return [*files, *self._sharing.fallbacks, *self._stuck]
