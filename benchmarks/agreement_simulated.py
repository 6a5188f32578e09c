"""Up to a thousand ranks in virtual time: the protocol's own machines over a board in memory, in one process.

Nothing waits: what is measured is the work of all ranks together, and of the leader apart, the messages and bytes that
each sends, and the virtual time that a failure needs. Records are those of a real load, made from a real catalog.
"""

from __future__ import annotations

import gc
import hashlib
import heapq
import itertools
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.catalog import reading_threads
from benchmarks.common import TensorShape, make_checkpoint
from loader_service.agreed import catalog_record, config_record, plan_record
from loader_service.agreement.memory_carrier import MemoryBoard, MemoryCarrier
from loader_service.agreement.messages import PHASES, Failure, Phase, PhaseRecord, Verdict
from loader_service.agreement.participant import Participant
from loader_service.agreement.protocol import LEADER, Collected, Incoming, Limits, LogEntry, Statuses
from loader_service.checkpoint.catalog import Catalog
from loader_service.checkpoint.discovery import read_catalog
from loader_service.config.schema import AgreementConfig, ServiceConfig
from loader_service.config.yaml_file import config_from_dict
from loader_service.errors import FailureRecord, ReadError
from loader_service.planning.mesh import Mesh
from loader_service.planning.plan import LoadPlan, make_plan
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage

SHARDS = 4
RANKS_A_NODE = 8
STEP_S = 0.0002  # what each step of a message takes in virtual time: about what a store on loopback takes
LIMITS = Limits.of(AgreementConfig())

Whom = Literal["member", "leader"]
Records = Callable[[int], Mapping[Phase, PhaseRecord]]


class VirtualTime:
    """A clock that moves only when there is nothing left to do at its present time."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def time(self) -> float:
        return self._now_s

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self._now_s + max(delay, 0.0), next(self._order), callback))

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self._now_s, _, callback = heapq.heappop(self._due)
            callback()


class MeteredCarrier(MemoryCarrier):
    """Counts what a rank is given, heartbeats apart, and the processor time that it spends on each."""

    entries = 0
    entry_bytes = 0
    cpu_s = 0.0
    look_cpu_s = 0.0  # the longest look at all heartbeats

    def start(self, receive: Callable[[Incoming], None], status: Callable[[], bytes]) -> None:
        def metered(incoming: Incoming) -> None:
            began_s = time.process_time()
            receive(incoming)
            took_s = time.process_time() - began_s
            if isinstance(incoming, Statuses):
                self.look_cpu_s = max(self.look_cpu_s, took_s if all(incoming.by_rank.values()) else 0.0)
                return
            self.cpu_s += took_s
            data = incoming.values if isinstance(incoming, Collected) else ()
            data = (incoming.data,) if isinstance(incoming, LogEntry) else data
            self.entries += len(data)
            self.entry_bytes += sum(map(len, data))

        super().start(metered, status)


class SimulatedRank:
    """One rank that has nothing to do but to agree: its next record follows each verdict at once."""

    def __init__(self, world: World, rank: int, records: Mapping[Phase, PhaseRecord]) -> None:
        self.carrier = MeteredCarrier(world.board, rank, world.limits.heartbeat_s)
        world.board.carriers[rank] = self.carrier
        self._world = world
        self._records = records
        self._due_at_s = 0.0
        self.participant = Participant(
            self.carrier,
            rank=rank,
            world_size=world.board.world_size,
            limits=world.limits,
            describe={},
            clock=world.time.time,
            on_verdict=self._take,
            on_change=self._schedule_tick,
        )

    @property
    def ended(self) -> bool:
        return self.participant.member.ended is not None

    def start(self) -> None:
        self.participant.start()
        self._schedule_tick()
        self._post(Phase.CONFIG)

    def fail(self) -> None:
        rank = self.participant.rank
        self.participant.fail(Failure("error", FailureRecord(ReadError.__name__, "it broke", rank, Phase.READ)))

    def _post(self, phase: Phase) -> None:
        self.participant.post(phase, 0, self._records[phase])

    def _take(self, verdict: Verdict) -> None:
        self._world.note(verdict)
        if verdict.ends:
            self.participant.bye()
        elif verdict.phase is not self._world.last_phase:
            self._post(PHASES[verdict.phase.position + 1])

    def _schedule_tick(self) -> None:
        self._due_at_s = self._world.time.time() + self.participant.tick_s
        self._world.time.call_later(self.participant.tick_s, self._tick)

    def _tick(self) -> None:
        if not self.ended and self._world.time.time() >= self._due_at_s:
            self.participant.tick()
            self._schedule_tick()


class World:
    """All ranks of one load, which comes to an end, or stands still in `last_phase + 1`."""

    def __init__(
        self,
        world_size: int,
        records: Records,
        *,
        last_phase: Phase = Phase.FINISH,
        limits: Limits = LIMITS,
        delay: Callable[[], float] = lambda: STEP_S,
    ) -> None:
        self.time = VirtualTime()
        self.board = MemoryBoard(world_size, self.time, delay=delay)
        self.limits = limits
        self.last_phase = last_phase
        self.seen = [0] * len(PHASES)  # how many ranks have each phase's verdict
        self.seen_at_cpu_s = [0.0] * len(PHASES)  # when the last one had it
        self.ranks = [SimulatedRank(self, rank, records(rank)) for rank in range(world_size)]

    def note(self, verdict: Verdict) -> None:
        position = verdict.phase.position
        self.seen[position] += 1
        if self.seen[position] == len(self.ranks):
            self.seen_at_cpu_s[position] = time.process_time()

    def start(self) -> None:
        for rank in self.ranks:
            rank.start()


@dataclass(frozen=True, slots=True)
class Load:
    """One simulated load of all phases, and one whose last rank fails in the middle of reading.

    Processor time is that of all ranks together unless it says otherwise. Of the leader, its own record counts as an
    entry written, and as one read.
    """

    ranks: int
    tensors: int
    exchanges_cpu_s: tuple[float, ...]
    load_cpu_s: float
    leader_cpu_s: float
    look_cpu_s: float
    member_writes: int
    member_write_bytes: int
    member_read_bytes: int
    leader_writes: int
    leader_write_bytes: int
    leader_reads: int
    leader_read_bytes: int
    failure_s: float


def simulate(world_size: int, tensors: int, records: Records) -> Load:
    """Runs both loads once."""
    world = World(world_size, records)
    gc.collect()
    began_s = time.process_time()
    world.start()
    world.time.run(lambda: world.seen[-1] == world_size and world.ranks[LEADER].participant.byes_seen)
    load_cpu_s = time.process_time() - began_s
    leader, member, board = world.ranks[LEADER].carrier, world.ranks[-1].carrier, world.board
    points = [began_s, *world.seen_at_cpu_s]
    look_cpu_s, failure_s = _failure(world_size, records)
    return Load(
        ranks=world_size,
        tensors=tensors,
        exchanges_cpu_s=tuple(after - before for before, after in itertools.pairwise(points)),
        load_cpu_s=load_cpu_s,
        leader_cpu_s=leader.cpu_s,
        look_cpu_s=look_cpu_s,
        member_writes=board.posts[-1],
        member_write_bytes=board.sent_bytes[-1],
        member_read_bytes=member.entry_bytes,
        leader_writes=board.posts[LEADER],
        leader_write_bytes=board.sent_bytes[LEADER],
        leader_reads=leader.entries,
        leader_read_bytes=leader.entry_bytes,
        failure_s=failure_s,
    )


def _failure(world_size: int, records: Records) -> tuple[float, float]:
    """The leader's longest look at all heartbeats; virtual time from one rank's FAIL to the last one's FINAL."""
    world = World(world_size, records, last_phase=Phase.OPEN)
    world.start()
    world.time.run(lambda: world.seen[Phase.OPEN.position] == world_size and world.time.time() > LIMITS.heartbeat_s)
    failed_at_s = world.time.time()
    world.ranks[-1].fail()
    world.time.run(lambda: all(rank.ended for rank in world.ranks))
    return world.ranks[LEADER].carrier.look_cpu_s, world.time.time() - failed_at_s


# Silence


@dataclass(frozen=True, slots=True)
class Silence:
    """How long one of two ranks was silent, in virtual time, before the other had the verdict: one value a moment at
    which it fell silent."""

    whom: Whom
    timeout_s: float
    seconds: tuple[float, ...]


def fall_silent(whom: Whom, timeout_s: float, moments: int) -> Silence:
    """Kills the rank at so many moments of the two ranks' beats, which do not come together."""
    chance = random.Random(0)
    limits = Limits.of(AgreementConfig(timeout_s=timeout_s))
    log = logging.getLogger("loader_service.agreement")
    level = log.level
    log.setLevel(logging.ERROR)  # each of them is suspected first
    try:
        return Silence(whom, timeout_s, tuple(_silence(whom, limits, chance) for _ in range(moments)))
    finally:
        log.setLevel(level)


def _silence(whom: Whom, limits: Limits, chance: random.Random) -> float:
    records = dict.fromkeys(PHASES, PhaseRecord())
    world = World(
        2,
        lambda _: records,
        last_phase=Phase.OPEN,
        limits=limits,
        delay=lambda: 2 * STEP_S * chance.random(),
    )
    leader, member = world.ranks
    leader.start()
    world.time.call_later(limits.heartbeat_s * chance.random(), member.start)
    silent_at_s = limits.heartbeat_s * (5 + chance.random())
    world.time.run(lambda: world.time.time() >= silent_at_s)
    victim, survivor = (leader, member) if whom == "leader" else (member, leader)
    began_s = world.time.time()
    victim.carrier.kill()
    world.time.run(lambda: survivor.ended)
    return world.time.time() - began_s


# The records of a load


def read_small_catalog(tensors: int) -> Catalog:
    """The catalog of a checkpoint that is made for it: many tensors of a few bytes."""
    shapes = [TensorShape(f"model.layers.{i % 61}.mlp.experts.{i}.weight", (4,)) for i in range(tensors)]
    handles = HandleCache(LocalStorage())
    with tempfile.TemporaryDirectory(prefix="loader-bench-") as temporary, reading_threads() as pool:
        make_checkpoint(Path(temporary), shapes, SHARDS)
        try:
            return read_catalog(temporary, "advisory", handles=handles, storage=LocalStorage(), threads=pool, retries=0)
        finally:
            handles.close()


def records_of(catalog: Catalog, world_size: int) -> Records:
    """What every rank brings to each phase of a load of this whole catalog."""
    config = config_from_dict({"checkpoint": {"path": "/checkpoint"}, "loads": {"target": {}}})
    mesh = Mesh.row_major(None, world_size)
    gap_bytes = config.reads.coalesce_gap_bytes
    plan = make_plan(catalog, "target", config.loads["target"], mesh, coalesce_gap_bytes=gap_bytes)
    return records_of_load(config, plan)


def records_of_load(config: ServiceConfig, plan: LoadPlan) -> Records:
    """What every rank brings to each phase: digests, and its node in the first one."""
    first = config_record(config, plan.load, node="", world_size=plan.world_size, coords=None)
    common = dict.fromkeys(PHASES, PhaseRecord()) | {
        Phase.CATALOG: catalog_record(plan.catalog),
        Phase.PLAN: plan_record(plan),
    }

    def of_rank(rank: int) -> Mapping[Phase, PhaseRecord]:
        node = hashlib.sha256(str(rank // RANKS_A_NODE).encode()).hexdigest()[:36]  # as long as a boot_id
        return {**common, Phase.CONFIG: replace(first, counted={"node": node})}

    return of_rank


def measure(worlds: Sequence[tuple[int, int]], rounds: int) -> list[list[Load]]:
    """All rounds of each (ranks, tensors), interleaved."""
    catalogs = {tensors: read_small_catalog(tensors) for _, tensors in worlds}
    return measure_records(
        {(ranks, tensors): records_of(catalogs[tensors], ranks) for ranks, tensors in worlds}, rounds
    )


def measure_records(records: Mapping[tuple[int, int], Records], rounds: int) -> list[list[Load]]:
    """As `measure`, with records by (ranks, tensors)."""
    found: dict[tuple[int, int], list[Load]] = {key: [] for key in records}
    gc.freeze()  # what the imports brought; each full collection would walk it
    try:
        simulate(*next((*key, of_rank) for key, of_rank in records.items()))  # imports and first uses
        for _ in range(rounds):
            for (ranks, tensors), of_rank in records.items():
                found[ranks, tensors].append(simulate(ranks, tensors, of_rank))
    finally:
        gc.unfreeze()
    return list(found.values())


def median(loads: Sequence[Load], value: Callable[[Load], float]) -> float:
    return statistics.median(map(value, loads))
