"""Host tables: one collective call that agrees on a table, admits, allocates, fills and pins it.

`per_rank`: each rank holds its own rows. `shared`: the ranks of a node hold one whole table, which each of them fills a
part of, at the same time. The order is the same on every rank, also on one without rows; a rank that fails says so
before it cleans up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from loader_service import logs
from loader_service.agreement.messages import JSON, Phase, PhaseRecord, Verdict
from loader_service.agreement.node_connect import groups
from loader_service.agreement.session import Session
from loader_service.collective import LOOK_EVERY_S, Collective
from loader_service.engine import Engine
from loader_service.errors import ConfigError, LoaderError, MemoryLimitError
from loader_service.memory.admission import Supply, refusal
from loader_service.memory.allocators import PAGE_BYTES, HostBuffer, allocate_host
from loader_service.memory.pinning import PinPolicy
from loader_service.memory.shared import SharedMemory
from loader_service.memory.tensors import empty_tensor, tensor_view, torch_dtype
from loader_service.neighbours import Neighbours
from loader_service.opening import Opening
from loader_service.planning.plan import LoadPlan
from loader_service.planning.rules import Layout
from loader_service.planning.tables import Rows, TablePart, filled_by, shares
from loader_service.reading.file_range import FileRange
from loader_service.report import PolicyOutcome
from loader_service.rows import RowReader
from loader_service.sharing.handing import shared_memory
from loader_service.sizes import format_size
from loader_service.sources import held_alone

log = logs.logger("loader_service.tables")

_INSTEAD = "give the table layout per_rank"


@dataclass(frozen=True, slots=True)
class HostTable:
    """A filled table in host memory, which lives as long as its tensor does, whatever becomes of the service.

    `tensor` holds this rank's rows (`per_rank`) or the whole table (`shared`: other ranks of the node see the same
    memory), in the table's dtype; `rows` (start, stop) are this rank's rows of the whole table. `pinned`: page-locked,
    for this process's device. `access` and `pin` say what became of those policies.
    """

    tensor: torch.Tensor
    rows: Rows
    layout: Layout
    pinned: bool
    access: PolicyOutcome
    pin: PolicyOutcome


class TableRun(Collective[HostTable]):
    """One `host_table` call on its rank. Runs on the service's loop."""

    def __init__(self, engine: Engine, load: str, name: str) -> None:
        super().__init__(engine, load, f"host table '{name}'")
        self._name = name
        self._memory: SharedMemory | None = None
        # Not in frames, which an exception that somebody keeps would keep, and the memory with them.
        self._buffer: HostBuffer | None = None
        self._kept: HostBuffer | None = None  # by a resident service

    async def _act(self, session: Session, opening: Opening, others: Neighbours) -> HostTable:
        met = await opening.config(others, table=self._name)
        async with self._turn(session):
            await others.meet(met.listed)
            return await self._fill(session, opening, others, met)

    def _forget(self) -> None:
        self._buffer = self._kept = None  # else the memory would end with the next garbage collection, not its tensor

    async def _let_go(self) -> None:
        await self._close_memory()

    @contextlib.asynccontextmanager
    async def _turn(self, session: Session) -> AsyncIterator[None]:
        """Waits for the tables that were asked for before. That takes its time, and is no silence."""
        waiting = asyncio.ensure_future(self._engine.table_turn.acquire())
        try:
            seconds = 0
            while not (await asyncio.wait((waiting,), timeout=1.0))[0]:
                seconds += 1
                session.report_progress(f"waiting for its turn for {seconds} s")
        except BaseException:
            if not waiting.cancel():
                self._engine.table_turn.release()
            raise
        try:
            yield
        finally:
            self._engine.table_turn.release()

    async def _fill(self, session: Session, opening: Opening, others: Neighbours, met: Verdict) -> HostTable:
        engine = self._engine
        self._come_to(Phase.CATALOG)
        catalog = await opening.catalog()
        self._come_to(Phase.PLAN)
        plan = await opening.plan(catalog)
        pin = PinPolicy(engine.config.staging.pin, engine.pinner, f"host table '{self._name}'")
        part = plan.table(self._name, engine.group.rank)
        if part is not None and part.layout == "shared":
            await engine.in_thread(lambda: self._look_for(plan, part), what="mapping what the service keeps")
        agreed = await opening.agree_on_plan(plan, told=await self._supply(others.connected))
        self._come_to(Phase.OPEN)
        if part is None:
            raise self._no_table()
        engine.size_threads(met.counts.get("node", {}))
        ranges: tuple[Rows, ...] = ()
        if all(facts["kept"] for facts in agreed.facts):
            self._buffer = self._kept
        else:
            sharing = self._admit(plan, agreed.facts)
            ranges = await self._allocate(session, plan, part, sharing)
        await session.exchange(Phase.OPEN, PhaseRecord())
        await self._close_memory()
        self._come_to(Phase.READ)
        may_drop = part.layout == "per_rank" and held_alone(plan, part, engine.group.rank)
        reader = engine.row_reader(RowReader, may_drop=may_drop)
        await self._read(session, reader, plan, part, ranges)
        await session.exchange(Phase.READ, PhaseRecord())
        self._come_to(Phase.FINISH)
        pinned = await engine.in_thread(lambda: self._pin(pin), what="pinning a table")
        dtype = _dtype(part)
        await session.exchange(Phase.FINISH, PhaseRecord())
        tensor = _tensor(part, dtype, self._memory_of_table(), plan.catalog.shards[part.shard_id].path)
        return HostTable(tensor, part.rows, part.layout, pinned, self._access(reader), pin.outcome)

    def _access(self, reader: RowReader) -> PolicyOutcome:
        attachment = self._engine.attachment
        if attachment is None or self._buffer is not self._kept:
            return reader.ranges.outcome
        return PolicyOutcome(self._engine.config.reads.access, "kept", f"nothing was read: {attachment.where} has it")

    # Before anything is read

    def _no_table(self) -> ConfigError:
        return ConfigError(
            f"loads.{self._load}: '{self._name}' is no host-resident table of this load: give it a rule with "
            "`host_resident`, or take it as an ordinary tensor",
            tensor=self._name,
        )

    def _look_for(self, plan: LoadPlan, part: TablePart) -> None:
        """Where a resident service of this node keeps the whole table, it need not be filled."""
        view = self._engine.attachment.view() if self._engine.attachment is not None else None
        if view is not None:
            self._kept = view.table(part, plan.catalog.shards[part.shard_id])

    async def _supply(self, connected: Sequence[int]) -> JSON:
        """What all ranks must know of this one to admit the table: with whom it can share memory, and what is free to
        it; or that it has the table already, as is the case on all of them or does not count."""
        engine = self._engine
        rooms = await engine.in_thread(engine.memory_rooms, what="how much memory is free")
        supply = Supply(engine.group.rank, engine.node, rooms, engine.config.memory.reserve_bytes)
        told = {"connected": list(connected), "supply": supply.as_json(), "kept": self._kept is not None}
        return cast(JSON, told)

    def _admit(self, plan: LoadPlan, told: Sequence[Mapping[str, object]]) -> Sequence[int]:
        """The ranks, this one among them, that can share memory. Raises MemoryLimitError, on every rank, if any rank's
        memory cannot be had.

        A rank takes the memory of what it fills, of a shared table too: its own control groups are charged with that.
        """
        sharing = groups([cast("Sequence[int]", facts["connected"]) for facts in told])
        hosts = {rank: group[0] for group in sharing for rank in group}
        supplies = [Supply.from_json(rank, facts["supply"]) for rank, facts in enumerate(told)]
        parts = [part for rank in range(len(told)) if (part := plan.table(self._name, rank)) is not None]
        filled = filled_by(parts, [hosts[rank] for rank in range(len(told))])
        wanted_bytes = [sum(stop - start for start, stop in rows) * parts[0].row_bytes for rows in filled]
        problem = refusal(supplies, wanted_bytes)
        if problem is not None:
            raise MemoryLimitError(f"host table '{self._name}': {problem}", tensor=self._name)
        return next(group for group in sharing if self._engine.group.rank in group)

    # Memory

    async def _allocate(
        self, session: Session, plan: LoadPlan, part: TablePart, ranks: Sequence[int]
    ) -> tuple[Rows, ...]:
        """Gets the table's memory; `ranks` are those that share it. Returns the rows that this rank reads into it."""
        if part.layout == "per_rank":
            self._buffer = _own_memory(part)
            return (part.rows,)
        engine = self._engine
        parts = {rank: plan.table(self._name, rank) for rank in ranks}
        holders = {rank: other.rows for rank, other in parts.items() if other is not None}
        rows = shares(part.shape[0], holders)[engine.group.rank]
        self._memory = memory = await self._shared_memory(_lead(part) + part.nbytes, ranks)
        lead = _lead(part)

        def reserve() -> None:
            for start, stop in rows:
                memory.reserve(lead + start * part.row_bytes, lead + stop * part.row_bytes, self._stopped.is_set)
            self._buffer = memory.map()
            log.debug("host table '%s': %s collapsed to huge pages", self._name, format_size(memory.collapsed_bytes))

        session.report_progress(f"reserving shared memory of '{self._name}'")
        await engine.in_thread(
            reserve,
            what=f"reserving shared table '{self._name}'",
            on_progress=session.report_progress,  # zeroing takes its time
            progress=lambda: f"{format_size(memory.reserved_bytes)} of '{self._name}' reserved",
        )
        return rows

    async def _shared_memory(self, nbytes: int, ranks: Sequence[int]) -> SharedMemory:
        assert self._others is not None
        mesh, config = self._others.mesh, self._engine.config
        if mesh is None:  # one rank
            return SharedMemory.create(nbytes)
        within_s = config.reads.stuck_after_s + config.agreement.timeout_s  # who is silent so long is named before
        return await shared_memory(mesh, ranks, nbytes, within_s, _INSTEAD)

    # Reading

    async def _read(
        self, session: Session, reader: RowReader, plan: LoadPlan, part: TablePart, ranges: Sequence[Rows]
    ) -> None:
        engine = self._engine
        shard = plan.catalog.shards[part.shard_id]
        session.report_progress(f"reading rows of '{part.name}'")
        for rows in ranges:
            where = FileRange(shard.path, shard.identity, part.start + rows[0] * part.row_bytes, part.name)
            self._readings.append(reader.begin(where, self._view(part, rows)))
        for reading in self._readings:
            while not await reading.ended_within(LOOK_EVERY_S):
                done = format_size(sum(one.done_bytes for one in self._readings))
                session.report_progress(f"{done} of rows of '{part.name}' read")
                for one in self._readings:  # the others hear of it before what still runs has come back
                    one.raise_error()
            reading.raise_error()
        await engine.in_thread(lambda: engine.verify(shard), what=f"looking at {shard.path} again")

    def _view(self, part: TablePart, rows: Rows) -> memoryview:
        """Where rows of the whole table lie in this rank's memory."""
        before, lead = (part.rows[0], 0) if part.layout == "per_rank" else (0, _lead(part))
        start, stop = (lead + (row - before) * part.row_bytes for row in rows)
        return self._memory_of_table().memoryview[start:stop]

    def _memory_of_table(self) -> HostBuffer:
        assert self._buffer is not None
        return self._buffer

    def _pin(self, policy: PinPolicy) -> bool:
        """Whether the memory is page-locked; none at all, of a rank without rows, is where any would be."""
        buffer = self._memory_of_table()
        return policy.pin(buffer) if buffer.nbytes else policy.active

    # Leaving

    async def _close_memory(self) -> None:
        """The mapping keeps it. Whatever a thread is at comes to its end before, so that it does not use a descriptor
        that is another's by then."""
        if self._memory is not None:
            grace_s = self._engine.config.agreement.grace_s
            await self._engine.after_the_rest(self._memory.close, within_s=grace_s)


def _own_memory(part: TablePart) -> HostBuffer:
    """Memory that this rank's rows can be read into past the page cache, if the file's alignment allows it at all."""
    start = part.start + part.rows[0] * part.row_bytes
    nbytes = (part.rows[1] - part.rows[0]) * part.row_bytes
    return allocate_host(nbytes, congruent_to=start if start % part.itemsize == 0 else 0)


def _lead(part: TablePart) -> int:
    """Where the table begins in a shared segment: congruent with the file, as far as its elements' alignment allows."""
    lead = part.start % PAGE_BYTES
    return lead if lead % part.itemsize == 0 else 0


def _dtype(part: TablePart) -> torch.dtype:
    dtype = torch_dtype(part.dtype_code)
    if dtype is None:
        raise LoaderError(f"torch has no type for '{part.name}' ({part.dtype_code})", tensor=part.name)
    return dtype


def _tensor(part: TablePart, dtype: torch.dtype, buffer: HostBuffer, path: str) -> torch.Tensor:
    shared = part.layout == "shared"
    shape = part.shape if shared else (part.rows[1] - part.rows[0], *part.shape[1:])
    if 0 in shape:
        return empty_tensor(shape, dtype, path=path, name=part.name)
    return tensor_view(buffer.tensor, _lead(part) if shared else 0, dtype, shape)
