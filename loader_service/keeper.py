"""Keeping one load for the workers of a node: agreed, admitted and read by the resident services of all nodes.

Each service keeps what its own share of the ranks takes. A load that memory does not admit whole is kept as its shared
host tables alone; which of it, all services decide alike.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

from loader_service import logs
from loader_service.agreement.messages import JSON, Phase, PhaseRecord
from loader_service.agreement.node import Card
from loader_service.agreement.session import Session
from loader_service.collective import LOOK_EVERY_S, Collective
from loader_service.engine import Engine
from loader_service.errors import MemoryLimitError
from loader_service.keeping.content import NOTHING, HeadersRead, KeptMemory, Part, Ranges, Wanted
from loader_service.keeping.index import KEEP_LESS
from loader_service.keeping.shape import equal_part, ranks_of, shared_tables, streamed_ranges, table_ranges
from loader_service.keeping.status import Kept, ServedLoad
from loader_service.memory.admission import Supply, refusal, reserve_of
from loader_service.memory.held import ByteRanges
from loader_service.memory.shared import SharedMemory
from loader_service.neighbours import Neighbours
from loader_service.opening import Opening
from loader_service.planning.plan import LoadPlan
from loader_service.reading.file_range import FileRange
from loader_service.reading.reader import FileIdentity
from loader_service.rows import RowReader
from loader_service.sharing.readahead import ReadAhead, Stripe
from loader_service.sizes import format_size

log = logs.logger("loader_service.serve")

_AT_ONCE = 16  # ranges that are being read; each has two chunks a thread queued

Purpose = Literal["keep", "warm"]
_WHAT: Mapping[Purpose, str] = {"keep": "what is to be kept of it", "warm": "what is to be read ahead of it"}
_WARMED: tuple[Kept, str] = ("page cache", "")


def session_name(load: str, purpose: Purpose) -> str:
    """The name of the session in which services keep or warm a load."""
    return f"{load}: {_WHAT[purpose]}"


class KeepRun(Collective[list[KeptMemory]]):
    """Keeps or warms one load, on the service of one rank. Runs on the service's loop.

    `purposes` are those of all loads, which services agree on; `had` is kept on this node already: anything, and
    tables, which workers share only where they are kept as such. `on_met` hears which of how many services on this node
    this one is.
    """

    def __init__(
        self,
        engine: Engine,
        load: str,
        purpose: Purpose,
        *,
        purposes: Sequence[tuple[str, Purpose]],
        headers: HeadersRead,
        had: tuple[Ranges, Ranges],
        on_met: Callable[[int, int], Awaitable[None]],
    ) -> None:
        super().__init__(engine, load, _WHAT[purpose])
        self.status = ServedLoad(load)
        self._purpose = purpose
        self._serve: dict[str, JSON] = {kind: [load for load, its in purposes if its == kind] for kind in _WHAT}
        self._headers = headers
        self._had = had
        self._on_met = on_met
        self._services: Sequence[int] = ()  # of this node, by rank
        self._chosen = Wanted(NOTHING, NOTHING)
        self._kept: list[KeptMemory] = []
        self.kept_on_node: tuple[Ranges, Ranges] = ({}, {})
        self._ahead: ReadAhead | None = None
        self._left: Iterator[tuple[FileRange, memoryview]] = iter(())  # what is still to be read
        self._read_before = 0
        self._phase_began_s = time.monotonic()

    async def _act(self, session: Session, opening: Opening, others: Neighbours) -> list[KeptMemory]:
        engine = self._engine
        self.status = replace(self.status, state="agreeing")
        await self._meet(opening, others)
        self._enter(Phase.CATALOG)
        catalog = await opening.catalog()
        self._enter(Phase.PLAN)
        plan = await opening.plan(catalog)
        wanted = await engine.in_thread(lambda: self._wanted(plan), what=f"working out load '{self._load}'")
        agreed = await opening.agree_on_plan(plan, told=await self._demand(wanted))
        self._enter(Phase.OPEN)
        self._settle(wanted, agreed.facts, len(plan.tensor_ids))
        await self._allocate(session)
        await session.exchange(Phase.OPEN, PhaseRecord())
        self._enter(Phase.READ)
        self.status = replace(self.status, state="reading")
        if self._purpose == "warm":
            await self._read_ahead(session, plan)
        else:
            await self._read(session)
        await session.exchange(Phase.READ, PhaseRecord())
        self._enter(Phase.FINISH)
        await engine.in_thread(self._finish, what=f"sealing what is kept of load '{self._load}'")
        await session.exchange(Phase.FINISH, PhaseRecord())
        self._enter(Phase.FINISH)
        self.status = replace(self.status, state="ready")
        return self._kept

    def _forget(self) -> None:
        self._left = iter(())

    async def _let_go(self) -> None:
        self.status = replace(self.status, state="failed", kept="nothing", kept_bytes=0)
        if self._ahead is not None:
            await self._ahead.stop(self._engine.config.agreement.grace_s)
        await self._engine.after_the_rest(self._close_memory, within_s=self._engine.config.agreement.grace_s)

    # On a thread: to unmap hundreds of GiB takes seconds, and what is reserved must not be closed meanwhile.

    def _finish(self) -> None:
        for kept in self._kept:
            kept.finish(self._headers.files)

    def _close_memory(self) -> None:
        for kept in self._kept:
            kept.buffer = None
            kept.memory.close()

    def _enter(self, phase: Phase) -> None:
        now_s = time.monotonic()
        seconds = now_s - self._phase_began_s
        self.status = replace(self.status, phases={**self.status.phases, self._phase.value: seconds})
        self._phase_began_s = now_s
        self._come_to(phase)

    # Before anything is read

    async def _meet(self, opening: Opening, others: Neighbours) -> None:
        engine = self._engine
        met = await opening.config(others, serve=self._serve)
        await others.meet(met.listed)
        cards = [Card.from_json(rank, facts.get("card")) for rank, facts in enumerate(met.facts)]
        # Services that see one kernel, but not each other's sockets, are as on two nodes.
        places = [(card.node, card.memory) for card in cards] or [("", "")]  # one tells nothing
        self._services = [rank for rank, place in enumerate(places) if place == places[engine.group.rank]]
        engine.size_threads(met.counts.get("node", {}))
        await self._on_met(self._services.index(engine.group.rank), len(self._services))

    def _ranks(self, plan: LoadPlan) -> list[int]:
        """Those whose workers this node's services keep the load for."""
        of_all = self._engine.group.world_size
        return [rank for place in self._services for rank in ranks_of(place, of_all, plan.world_size)]

    def _wanted(self, plan: LoadPlan) -> Wanted:
        """What of the load is not kept yet on this node, and this service's part of it, in memory of its own. Blocks:
        plans every rank of the node."""
        ranks, shards = self._ranks(plan), plan.catalog.shards
        number, count = self._services.index(self._engine.group.rank), len(self._services)
        tables = shared_tables(plan, ranks)
        identities = {shard.path: shard.identity for shard in shards}
        new = [
            {shards[s].path: _without(had, shards[s].identity, each) for s, each in found.items()}
            for found, had in (
                (streamed_ranges(plan, ranks), self._had[0]),
                (table_ranges(tables), self._had[1]),
                (table_ranges(tables[number::count]), self._had[1]),
            )
        ]
        streamed = equal_part(new[0], number, count)
        if number == 0:  # keeps all headers; a plan that is asked for meanwhile may add some
            for path, (identity, nbytes) in tuple(self._headers.files.items()):
                identities[path] = identity
                head = _without(self._had[0], identity, ByteRanges.merged([0], [nbytes]))
                for each in (streamed, new[0]):
                    each[path] = each[path].joined(head) if path in each else head
        parts = [Part.of(each, identities) for each in (streamed, new[2])]
        node: list[dict[Hashable, ByteRanges]]
        node = [{identities[path].state: ranges for path, ranges in each.items()} for each in new[:2]]
        return Wanted(parts[0], parts[1], (node[0], node[1]))

    async def _demand(self, wanted: Wanted) -> JSON:
        """What all services must know of this one: what it would take, and what memory is free to it."""
        engine = self._engine
        rooms = await engine.in_thread(engine.memory_rooms, what="how much memory is free")
        supply = Supply(engine.group.rank, engine.node, rooms, engine.config.memory.reserve_bytes)
        told = {"everything": wanted.nbytes, "tables": wanted.tables.nbytes}
        return {"supply": cast(JSON, supply.as_json()), **told}

    def _settle(self, wanted: Wanted, told: Sequence[Mapping[str, object]], tensors: int) -> None:
        """Decides what is kept, as all other services do. Raises MemoryLimitError if not even the tables fit."""
        kept, reason = self._admitted(told) if self._purpose == "keep" else _WARMED
        streamed = wanted.streamed if kept == "everything" else NOTHING
        tables = wanted.tables if kept in ("everything", "tables") else NOTHING
        self._chosen = Wanted(streamed, tables)
        self.kept_on_node = wanted.node if kept == "everything" else ({}, wanted.node[1] if kept == "tables" else {})
        self.status = replace(
            self.status,
            kept=kept,
            reason=reason,
            wanted_bytes=streamed.read_bytes + tables.read_bytes,
            kept_bytes=self._chosen.nbytes,
            tensors=tensors,
        )
        if reason:
            log.warning("load '%s': kept is %s of it, not everything: %s", self._load, kept, reason)

    def _admitted(self, told: Sequence[Mapping[str, object]]) -> tuple[Kept, str]:
        supplies = [Supply.from_json(rank, facts["supply"]) for rank, facts in enumerate(told)]
        everything, tables = ([cast(int, facts[what]) for facts in told] for what in ("everything", "tables"))
        problem = refusal(supplies, everything)
        if problem is None:
            return "everything", ""
        if (too_much := refusal(supplies, tables)) is not None:
            raise MemoryLimitError(f"shared host tables of load '{self._load}' cannot be kept: {too_much}")
        return ("tables" if any(tables) else "nothing"), problem

    async def _allocate(self, session: Session) -> None:
        def reserve() -> None:
            for part, shared in ((self._chosen.streamed, False), (self._chosen.tables, True)):
                if part.files:
                    memory = SharedMemory.create(part.nbytes, may_freeze=not shared, instead=KEEP_LESS)
                    kept = KeptMemory(memory, shared, part.files)
                    self._kept.append(kept)
                    kept.memory.reserve(0, part.nbytes, self._stopped.is_set)
                    kept.buffer = kept.memory.map()

        await self._engine.in_thread(
            reserve,
            what=f"reserving memory for load '{self._load}'",
            on_progress=session.report_progress,
            progress=lambda: f"{format_size(sum(k.memory.reserved_bytes for k in self._kept))} reserved",
        )

    # Reading

    async def _read(self, session: Session) -> None:
        engine = self._engine
        reader = engine.row_reader(RowReader, may_drop=True)
        self._left = (view for kept in self._kept for view in kept.views())
        while self._begin_next(reader):
            if len(self._readings) >= _AT_ONCE:
                await self._until_first_ends(session)
        while self._readings:
            await self._until_first_ends(session)
        await engine.in_thread(self._verify, what="looking at the files again")

    def _begin_next(self, reader: RowReader) -> bool:
        """Whether there was one more range. Its memory is in no frame that an exception could keep."""
        for where, view in self._left:
            self._readings.append(reader.begin(where, view))
            return True
        return False

    async def _until_first_ends(self, session: Session) -> None:
        while not await self._readings[0].ended_within(LOOK_EVERY_S):
            self._note_read(session, self._read_before + sum(reading.done_bytes for reading in self._readings))
            for reading in self._readings:  # the others hear of it before what still runs has come back
                reading.raise_error()
        self._readings[0].raise_error()
        self._read_before += self._readings.pop(0).done_bytes
        self._note_read(session, self._read_before)

    def _note_read(self, session: Session, nbytes: int) -> None:
        self.status = replace(self.status, read_bytes=nbytes)
        session.report_progress(f"{format_size(nbytes)} of load '{self._load}' read")

    def _verify(self) -> None:
        for kept in self._kept:
            for path, (identity, _) in kept.files.items():
                self._engine.verify_file(path, identity)

    async def _read_ahead(self, session: Session, plan: LoadPlan) -> None:
        """Into the page cache, as far as memory is free. Advisory: what goes wrong is told, and no failure."""
        engine = self._engine
        room = await engine.in_thread(self._free_bytes, what="how much memory is free")
        stripes: list[Stripe] = []
        wanted = 0
        number, count = self._services.index(engine.group.rank), len(self._services)
        for shard, ranges in equal_part(streamed_ranges(plan, self._ranks(plan)), number, count).items():
            for start, stop in zip(ranges.starts.tolist(), ranges.stops.tolist(), strict=True):
                if wanted < room:
                    stripes.append((shard, start, min(stop, start + room - wanted)))
                wanted += stop - start
        reads = engine.config.reads
        threads = engine.threads.threads
        self._ahead = ReadAhead(stripes, plan.catalog.shards, engine.handles, threads=threads, retries=reads.retries)
        self.status = replace(self.status, wanted_bytes=min(wanted, room))
        self._ahead.start()
        while not self._ahead.over:
            await asyncio.sleep(LOOK_EVERY_S)
            self._note_read(session, self._ahead.read_bytes)
        stuck = await self._ahead.stop(engine.config.agreement.grace_s)
        self._note_read(session, self._ahead.read_bytes)
        reason = self._ahead.problem or "; ".join(stuck)
        if not reason and wanted > room:
            reason = f"memory has room for {format_size(room)} of {format_size(wanted)}"
        if reason:
            self.status = replace(self.status, reason=reason)
            log.warning("load '%s' is in the page cache only in part: %s", self._load, reason)

    def _free_bytes(self) -> int:
        reserve = self._engine.config.memory.reserve_bytes
        rooms = self._engine.memory_rooms()
        return max(0, min((room.free_bytes - reserve_of(room, reserve) for room in rooms), default=1 << 62))


def _without(had: Ranges, identity: FileIdentity, ranges: ByteRanges) -> ByteRanges:
    known = had.get(identity.state)
    return ranges if known is None else ranges.without(known)
