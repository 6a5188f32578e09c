"""Random schedules of several faults at once, and what a thousand ranks cost: messages, bytes, and how fast a failure
spreads. What holds is `invariants.check`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader_service.agreed import catalog_record, config_record, plan_record
from loader_service.agreement.messages import PHASES, Phase, PhaseRecord
from loader_service.agreement.protocol import Collected, Incoming, LogEntry, Statuses
from loader_service.config.yaml_file import config_from_dict
from loader_service.planning.mesh import Mesh
from loader_service.planning.plan import make_plan
from tests.agreement.cases import ANYTIME, BEFORE_ONLY, MATRIX_LIMITS, NOTICE_S, WATCHDOG_S, WEATHER, WITNESSES
from tests.agreement.invariants import check
from tests.agreement.simulation import LIMITS, SimulatedRank, World
from tests.checkpoint.building import catalog_of

FAULTS = {
    name: fault
    for name, fault in (ANYTIME | BEFORE_ONLY).items()
    if name not in {"malformed log", "stuck"} and not name.endswith("others stopped") and "SIGKILL, and" not in name
}


@dataclass(frozen=True)
class Event:
    rank: int
    phase: Phase
    fault: str


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, list[Event], str, bool, str, int]:
    world_size = draw(st.integers(2, 5))
    event = st.builds(Event, st.integers(0, world_size - 1), st.sampled_from(PHASES), st.sampled_from(tuple(FAULTS)))
    events = draw(st.lists(event, max_size=4, unique_by=lambda event: event.rank))
    weather = draw(st.sampled_from(tuple(WEATHER)))
    witnesses = draw(st.sampled_from(tuple(WITNESSES)))
    return world_size, events, weather, draw(st.booleans()), witnesses, draw(st.integers(0, 2**32))


def run(world_size: int, events: list[Event], weather: str, hosted: bool, witnesses: str, seed: int) -> World:
    chance = random.Random(seed)
    due = {(event.rank, event.phase): event.fault for event in events}

    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        fault = due.get((rank.rank, phase))
        return PhaseRecord("same") if fault is None else FAULTS[fault](rank, phase, attempt, chance)

    world = World(
        world_size,
        act=act,
        work_s=lambda phase: chance.choice((0.0, 0.01, 1.0)) * chance.random(),
        weather=WEATHER[weather],
        chance=chance,
        limits=MATRIX_LIMITS,
        describe={phase: lambda a, b, who: f"{a} and {b}" for phase in PHASES},
        leave_s=lambda: chance.choice((0.0, 0.5)) * chance.random(),
        hosted=hosted,
        witnesses=lambda rank: WITNESSES[witnesses](rank, world_size),
        notice_s=lambda: NOTICE_S * chance.random(),
    )
    return world.run(limit_s=WATCHDOG_S, start_s=lambda rank: chance.random())


@settings(max_examples=200)
@given(schedules())
def test_no_hang_one_end_and_logs_that_are_prefixes_of_each_other(
    schedule: tuple[int, list[Event], str, bool, str, int],
) -> None:
    check(run(*schedule))


# -- scale ------------------------------------------------------------------------------------------------------------


@dataclass
class Heard:
    """What one rank read in a whole load: log entries, collected records, and looks at heartbeats."""

    entries: int = 0
    records: int = 0
    looks: int = 0
    log_bytes: int = 0
    statuses: int = 0

    def count(self, incoming: Incoming) -> None:
        if isinstance(incoming, LogEntry):
            self.entries += 1
            self.log_bytes += len(incoming.data)
        elif isinstance(incoming, Collected):
            self.records += len(incoming.values)
        elif isinstance(incoming, Statuses):
            self.looks += 1
            self.statuses = max(self.statuses, len(incoming.by_rank))


def load(world_size: int) -> tuple[World, list[Heard]]:
    """A load that goes well, its records as large as the service's: a digest and two counted values, whatever the
    number of tensors behind them."""

    def body() -> None:
        raise AssertionError("a body travels only where digests differ")

    record = PhaseRecord("d" * 64, counted={"node": "0123456789abcdef", "loader": "1.2.3"}, body=body)
    return run_with(world_size, dict.fromkeys(PHASES, record))


def run_with(world_size: int, records: Mapping[Phase, PhaseRecord]) -> tuple[World, list[Heard]]:
    world = World(world_size, act=lambda rank, phase, attempt: records[phase])
    heard = [Heard() for _ in world.ranks]
    for rank, counts in zip(world.ranks, heard, strict=True):
        rank.listeners.append(counts.count)
    return world.run(), heard


def test_a_member_sends_and_reads_the_same_with_any_number_of_ranks_and_tensors() -> None:
    sizes = (8, 128, 1024)
    loads = {size: load(size) for size in sizes}
    for size, (world, heard) in loads.items():
        assert all(len(rank.log) == len(PHASES) for rank in world.ranks)
        members = range(1, size)
        assert {world.board.posts[rank] for rank in members} == {len(PHASES)}, "a record a phase"
        assert max(world.board.sent_bytes[rank] for rank in members) < len(PHASES) * 256
        # An answer to a publish comes to the leader too; a member reads the log alone.
        assert {heard[rank].entries for rank in members} == {len(PHASES)}
        assert {heard[rank].statuses for rank in members} == {1}, "it watches the leader, and nobody else"
        assert max(heard[rank].log_bytes for rank in members) < len(PHASES) * 512, "verdicts do not grow with the ranks"
    sent = {size: world.board.sent_bytes[1] for size, (world, _) in loads.items()}
    assert len(set(sent.values())) == 1, f"bytes that a member sends: {sent}"
    read = {size: heard[1].log_bytes for size, (_, heard) in loads.items()}
    assert max(read.values()) - min(read.values()) < 100, f"bytes that a member reads, but for digits of counts: {read}"


def real_records(tensors: int, world_size: int) -> dict[Phase, PhaseRecord]:
    """Those of a load of so many tensors in two shards, cut over all ranks."""
    names = [f"model.layers.{i % 7}.mlp.experts.{i}.weight" for i in range(tensors)]
    catalog = catalog_of({"a.safetensors": names[::2], "b.safetensors": names[1::2]})
    rule = {"match": "*.experts.*", "assign": {"axis": "ep", "index": r"experts\.(\d+)\.", "how": "round_robin"}}
    loads = {"checkpoint": {"path": "/c"}, "mesh": {"ep": world_size}, "loads": {"all": {"rules": [rule]}}}
    config = config_from_dict(loads)
    mesh = Mesh.row_major(config.mesh, world_size)
    plan = make_plan(catalog, "all", config.loads["all"], mesh, coalesce_gap_bytes=0)
    return dict.fromkeys(PHASES, PhaseRecord()) | {
        Phase.CONFIG: config_record(config, "all", node="a node", world_size=world_size, coords=None),
        Phase.CATALOG: catalog_record(catalog),
        Phase.PLAN: plan_record(plan),
    }


def test_the_bytes_of_real_records_are_the_same_with_any_number_of_tensors() -> None:
    found = {}
    for tensors in (20, 200, 20_000):
        world, heard = run_with(8, real_records(tensors, 8))
        assert all(len(rank.log) == len(PHASES) for rank in world.ranks)
        found[tensors] = (list(world.board.sent_bytes), [counts.log_bytes for counts in heard])
    assert found[20] == found[200] == found[20_000]


def test_the_leader_reads_one_record_of_each_rank_a_phase_and_writes_one_verdict() -> None:
    for size in (8, 128, 1024):
        world, heard = load(size)
        assert heard[0].records == size * len(PHASES)
        assert world.board.posts[0] == 2 * len(PHASES), "its own records, and one verdict a phase for all"
        assert world.board.sent_bytes[0] < len(PHASES) * 1024


@pytest.mark.parametrize("weather", ["calm", "slow", "loses every wake-up"])
def test_a_failure_among_a_thousand_ranks_spreads_as_one_verdict_within_the_second(weather: str) -> None:
    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        if phase is not Phase.READ:
            return PhaseRecord("same")
        if rank.rank % 10 == 7:
            rank.later(1.0, lambda: rank.fail(phase))
        return None

    world = World(1024, act=act, weather=WEATHER[weather], chance=random.Random(1), limits=LIMITS).run()
    assert world.cause().record.rank == 7
    assert all(rank.log == world.ranks[0].log for rank in world.ranks)
    failed_at_s = min(harm.at_s for harm in world.harms)
    steps_s = 8 * WEATHER[weather].step_s
    made_up_s = 2 * LIMITS.heartbeat_s if WEATHER[weather].lost_wakes else 0.0
    last_s = max(rank.ended_at_s or 0.0 for rank in world.ranks)
    assert last_s - failed_at_s < LIMITS.window_s + LIMITS.heartbeat_s / 20 + steps_s + made_up_s
