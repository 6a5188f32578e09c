"""Random schedules: whatever happens to whom and when, nobody hangs, and all ranks read one log with one FINAL."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader_service.agreement.messages import PHASES, Phase, PhaseRecord
from tests.agreement.simulation import LIMITS, SimulatedRank, World

Fault = Literal[
    "fail", "cancel", "kill", "freeze", "short freeze", "stuck", "lose", "retry", "differ", "record, then fail"
]
FAULTS: tuple[Fault, ...] = (
    "fail",
    "cancel",
    "kill",
    "freeze",
    "short freeze",
    "stuck",
    "lose",
    "retry",
    "differ",
    "record, then fail",
)
HARMLESS = {"retry", "short freeze"}


@dataclass(frozen=True)
class Event:
    rank: int
    phase: Phase
    fault: Fault


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, list[Event], int]:
    world_size = draw(st.integers(2, 5))
    event = st.builds(Event, st.integers(0, world_size - 1), st.sampled_from(PHASES), st.sampled_from(FAULTS)).filter(
        lambda event: event.fault != "stuck" or event.phase in (Phase.CATALOG, Phase.PLAN, Phase.OPEN)
    )
    return world_size, draw(st.lists(event, max_size=4)), draw(st.integers(0, 2**32))


def happen(rank: SimulatedRank, phase: Phase, attempt: int, fault: Fault, chance: random.Random) -> PhaseRecord | None:
    later = rank.world.time.call_later
    if fault == "fail":
        rank.fail(phase)
    elif fault == "cancel":
        rank.fail(phase, "LoadCancelledError", "cancelled")
    elif fault == "record, then fail":
        rank.participant.post(phase, attempt, PhaseRecord("same"))
        later(chance.random() * 0.2, lambda: rank.fail(phase))
    elif fault == "kill":
        rank.kill()
    elif fault in ("freeze", "short freeze"):
        rank.freeze()
        later(200.0 if fault == "freeze" else 3.0, rank.thaw)
        return PhaseRecord("same")
    elif fault == "lose":
        rank.failed = True
        rank.carrier.lose("lost the store")
    elif fault == "retry" and phase is Phase.CATALOG:
        return PhaseRecord("same", outcome="retry" if attempt == 0 else "ok")
    elif fault == "differ":
        return PhaseRecord(f"of rank {rank.rank}", body=lambda: rank.rank)
    elif fault != "stuck":
        return PhaseRecord("same")
    return None


def run(world_size: int, events: list[Event], seed: int) -> World:
    chance = random.Random(seed)
    due = {(event.rank, event.phase): event.fault for event in reversed(events)}

    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        fault = due.get((rank.rank, phase))
        return PhaseRecord("same") if fault is None else happen(rank, phase, attempt, fault, chance)

    world = World(
        world_size,
        act=act,
        work_s=lambda phase: chance.choice((0.0, 0.01, 1.0, 70.0 if phase is Phase.READ else 2.0)) * chance.random(),
        delay=lambda: chance.choice((0.0, 0.001, 0.2)) * chance.random(),
        describe={phase: lambda a, b: f"{a} and {b}" for phase in PHASES},
    )
    return world.run(limit_s=5000.0, start_s=lambda rank: chance.random())


@settings(max_examples=200)
@given(schedules())
def test_no_hang_one_final_and_logs_that_are_prefixes_of_each_other(schedule: tuple[int, list[Event], int]) -> None:
    world_size, events, seed = schedule
    world = run(world_size, events, seed)
    longest = max((rank.log for rank in world.ranks), key=len)
    for rank in world.ranks:
        assert rank.log == longest[: len(rank.log)]
        assert not any(verdict.ends for verdict in rank.log[:-1])
    connected = [rank for rank in world.living if not rank.carrier_lost]
    for rank in connected:
        assert rank.ended == longest[-1], "who can hear the others knows how it ended"
        assert rank.verdicts == rank.log, "each verdict is told once"
    if all(event.fault in HARMLESS or (event.fault, event.phase) == ("retry", Phase.CATALOG) for event in events):
        assert all(rank.ended is not None and not rank.ended.final for rank in world.ranks)
    elif connected and longest[-1].failure is not None:
        cause = longest[-1].failure
        faults = [event for event in events if event.fault not in HARMLESS]
        differing = cause.kind == "disagreement"  # names two ranks, and the one that differs may be the other
        blamed = [fault for fault in faults if fault.rank == cause.record.rank or differing]
        assert blamed, f"{cause} is nobody's fault"


@pytest.mark.parametrize("world_size", [100, 1000])
def test_a_thousand_ranks_exchange_with_few_small_messages_each(world_size: int) -> None:
    world = World(world_size, act=lambda rank, phase, attempt: PhaseRecord("d" * 64, counted={"node": "n"})).run()
    assert all(len(rank.log) == len(PHASES) for rank in world.ranks)
    members = world.ranks[1:]
    assert {world.board.posts[rank.rank] for rank in members} == {len(PHASES)}
    assert max(world.board.sent_bytes[rank.rank] for rank in members) < len(PHASES) * 256
    assert world.board.posts[0] == 2 * len(PHASES), "the leader's own records, and one verdict a phase for all"
    assert world.board.sent_bytes[0] < len(PHASES) * 1024, "verdicts do not grow with the ranks"


def test_a_failure_among_a_thousand_ranks_is_one_verdict() -> None:
    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        if phase is Phase.READ and rank.rank % 10 == 7:
            rank.fail(phase)
            return None
        return PhaseRecord("same")

    world = World(1000, act=act).run()
    assert world.cause().record.rank == 7
    assert world.time.now_s < LIMITS.window_s + 0.1
