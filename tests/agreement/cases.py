"""The matrix: what happens, to which rank, in which phase, at which moment, in which weather, in a random schedule."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from loader_service.agreement.messages import PHASES, Phase, PhaseRecord, entry_key, record_key
from loader_service.agreement.protocol import Limits
from loader_service.agreement.session import failure_of
from loader_service.errors import FailureRecord, LoadCancelledError
from tests.agreement.simulation import SimulatedRank, World
from tests.agreement.surroundings import CALM, Weather

MATRIX_LIMITS = Limits(timeout_s=12, start_timeout_s=40, grace_s=4, heartbeat_s=1, suspect_s=5)
LONG_S, SHORT_S = 3 * MATRIX_LIMITS.timeout_s, 0.4 * MATRIX_LIMITS.timeout_s
WATCHDOG_S = 400.0
SAME = PhaseRecord("same")

WEATHER = {
    "calm": CALM,
    "slow": Weather(step_s=0.2),
    "repeats": Weather(step_s=0.2, repeated=0.4),
    "loses wake-ups": Weather(step_s=0.05, lost_wakes=0.4, repeated=0.2),
    "loses every wake-up": Weather(step_s=0.02, lost_wakes=1.0),
    "loses anything": Weather(step_s=0.1, lost_wakes=0.3, lost_beats=0.15, repeated=0.2),
}

NOTICE_S = 0.02
WITNESSES: dict[str, Callable[[int, int], Iterable[int]]] = {
    "nobody": lambda rank, world_size: (),
    "the leader": lambda rank, world_size: {0} - {rank},
    "one member": lambda rank, world_size: {(rank + 1) % world_size or 1} - {rank},
    "some": lambda rank, world_size: set(range(1, world_size, 2)) - {rank},
    "all": lambda rank, world_size: set(range(world_size)) - {rank},
}

Moment = Literal["before", "after", "bodies", "window"]
MOMENTS: tuple[Moment, ...] = ("before", "after", "bodies", "window")
Fault: TypeAlias = Callable[[SimulatedRank, Phase, int, random.Random], PhaseRecord | None]


@dataclass(frozen=True)
class Case:
    """`victim` is the rank to which `fault` happens in `phase`: before its record, after it, while the leader compares
    bodies, or while it gathers failures after another rank's. `witnesses` see a process end, of whatever rank."""

    fault: str
    moment: Moment
    phase: Phase
    victim: int
    world_size: int
    weather: str
    hosted: bool
    seed: int
    witnesses: str = "nobody"


# -- what can happen --------------------------------------------------------------------------------------------------


def fails(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> None:
    rank.fail(phase)


def interrupted(error: BaseException) -> Fault:
    def fault(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> None:
        rank.fail_with(failure_of(error, rank.rank, phase))

    return fault


def killed(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> None:
    rank.kill()


def killed_with_a_child(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> None:
    rank.kill(child_lives=True)


def stopped(for_s: float) -> Fault:
    def fault(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> PhaseRecord:
        rank.freeze(for_s * chance.uniform(0.8, 1.2))
        return SAME

    return fault


def stands_still(for_s: float) -> Fault:
    def fault(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> PhaseRecord:
        rank.stick(for_s * chance.uniform(0.8, 1.2))
        return SAME

    return fault


def cut_off(for_s: float) -> Fault:
    def fault(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> PhaseRecord:
        rank.cut_off(for_s * chance.uniform(0.8, 1.2))
        return SAME

    return fault


def loses_the_store(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> None:
    rank.lose_store()


def stuck(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> None:
    """In a phase whose work is bounded it is late. Nothing bounds an honest read: there another rank is cancelled."""
    if phase in (Phase.READ, Phase.FINISH):
        other = rank.world.ranks[rank.rank - 1]
        other.later(5.0, lambda: interrupted(KeyboardInterrupt())(other, phase, attempt, chance))
    else:
        rank.harm("late")


def takes_long(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> None:
    """Healthy: an honest read or finish, or other work that moves on."""

    def step(number: int) -> None:
        rank.participant.progress = (number, f"step {number}")

    for number in range(1, 10):
        if phase not in (Phase.READ, Phase.FINISH):
            rank.later(number * LONG_S / 10, partial(step, number))
    rank.harm("busy", LONG_S)
    rank.later(LONG_S, partial(rank.post, phase, attempt, SAME))


def repeats(times: int) -> Fault:
    def fault(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> PhaseRecord:
        if phase is not Phase.CATALOG or attempt >= times:
            return SAME
        rank.harm("retry" if attempt == 0 else "record")
        return PhaseRecord(outcome="retry", failure=FailureRecord("ReadError", "EIO", rank.rank, phase))

    return fault


def differs(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> PhaseRecord:
    rank.harm("differs")
    return PhaseRecord(f"of rank {rank.rank}", body=lambda: rank.rank)


def garbles_its_record(junk: bytes) -> Fault:
    def fault(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> None:
        rank.harm("record")
        rank.carrier.post(record_key(phase, attempt, rank.rank), junk)

    return fault


def garbles_its_heartbeat(junk: bytes) -> Fault:
    def fault(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> PhaseRecord:
        rank.spoil_heartbeats(junk)
        return SAME

    return fault


def garbles_the_log(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> PhaseRecord:
    key = entry_key(len(rank.world.board.log))
    rank.harm("log")
    rank.world.board.set(key, b"{}")
    return SAME


def fails_and_the_others_are_stopped(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> None:
    rank.fail(phase)
    _stop_the_others(rank, phase, chance)


def dies_and_the_others_are_stopped(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> None:
    rank.kill()
    _stop_the_others(rank, phase, chance)


def dies_and_then_who_saw_it(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> None:
    rank.kill()
    for witness in list(rank.world.witnesses(rank.rank))[:1]:
        other = rank.world.ranks[witness]
        other.later(2 * NOTICE_S * chance.random(), other.kill)


def dies_while_another_fails(rank: SimulatedRank, phase: Phase, attempt: int, chance: random.Random) -> None:
    other = chance.choice([other for other in rank.world.ranks if other is not rank])
    other.later(chance.choice((0.0, 0.3)) * chance.random(), partial(fails, other, phase, attempt, chance))
    rank.later(chance.choice((0.0, 0.3)) * chance.random(), rank.kill)


SIGTERM = interrupted(LoadCancelledError("SIGTERM"))


def _stop_the_others(rank: SimulatedRank, phase: Phase, chance: random.Random) -> None:
    """As a launcher does: SIGTERM to all others, a moment later."""
    for other in rank.world.ranks:
        if other is not rank:
            other.later(chance.random() * 0.4, partial(SIGTERM, other, phase, 0, chance))


ANYTIME: dict[str, Fault] = {
    "error": fails,
    "cancelled": interrupted(asyncio.CancelledError()),
    "SIGINT": interrupted(KeyboardInterrupt()),
    "SIGTERM": SIGTERM,
    "SIGKILL": killed,
    "SIGKILL, a child lives": killed_with_a_child,
    "SIGSTOP": stopped(LONG_S),
    "short SIGSTOP": stopped(SHORT_S),
    "its loop stands still": stands_still(2 * LONG_S),
    "its loop stands still shortly": stands_still(SHORT_S),
    "cut off": cut_off(LONG_S),
    "cut off shortly": cut_off(SHORT_S),
    "loses the store": loses_the_store,
    "malformed heartbeat": garbles_its_heartbeat(b'{"beat": "1"}'),
    "oversized heartbeat": garbles_its_heartbeat(b"x" * (129 << 10)),
    "malformed log": garbles_the_log,
    "error, others stopped": fails_and_the_others_are_stopped,
    "SIGKILL, others stopped": dies_and_the_others_are_stopped,
    "SIGKILL, and of who saw it": dies_and_then_who_saw_it,
    "SIGKILL, and an error elsewhere": dies_while_another_fails,
}
BEFORE_ONLY: dict[str, Fault] = {  # instead of its record
    "stuck": stuck,
    "takes long": takes_long,
    "differs": differs,
    "repeats once": repeats(1),
    "repeats twice": repeats(2),
    "malformed record": garbles_its_record(b"\xff"),
    "oversized record": garbles_its_record(b'"' + b"x" * (129 << 10) + b'"'),
}
STARTS_AFTER_S = {
    "late arrival": 0.8 * MATRIX_LIMITS.start_timeout_s,
    "arrives too late": 60.0,
    "never arrives": float("inf"),
}


# -- running one ------------------------------------------------------------------------------------------------------


def build(case: Case, chance: random.Random) -> World:
    fault = ANYTIME.get(case.fault) or BEFORE_ONLY.get(case.fault) or (lambda rank, phase, attempt, chance: SAME)
    others = [rank for rank in range(case.world_size) if rank != case.victim]
    other = chance.choice(others)
    odd = chance.choice(range(case.world_size))
    done: list[bool] = []

    def strike(after_s: float, attempt: int) -> None:
        if done:
            return
        done.append(True)
        victim = world.ranks[case.victim]
        victim.later(after_s, lambda: fault(victim, case.phase, attempt, chance))

    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        if phase is not case.phase or (case.moment == "before" and rank.rank != case.victim):
            return SAME
        if case.moment == "before":
            return fault(rank, phase, attempt, chance)
        if case.moment == "after" and rank.rank == case.victim:
            rank.post(phase, attempt, SAME)
            strike(chance.choice((0.0, 0.3)) * chance.random(), attempt)
            return None
        if case.moment == "bodies":
            return _body(rank, odd, lambda: strike(chance.choice((0.0, 0.05, 0.3)) * chance.random(), attempt))
        if case.moment == "window":
            return _window(rank, phase, attempt)
        return SAME

    def _window(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        if rank.rank == other:
            (fails if chance.random() < 0.5 else interrupted(KeyboardInterrupt()))(rank, phase, attempt, chance)
            strike(world.limits.window_s * chance.random(), attempt)
        else:
            rank.later(LONGEST_STEP_S * chance.random(), lambda: rank.post(phase, attempt, SAME))
        return None

    world = World(
        case.world_size,
        act=act,
        work_s=lambda phase: chance.choice((0.0, 0.01, 1.0)) * chance.random(),
        weather=WEATHER[case.weather],
        chance=chance,
        limits=MATRIX_LIMITS,
        describe={phase: lambda a, b, who: f"{a} and {b}" for phase in PHASES},
        leave_s=lambda: chance.choice((0.0, 0.5)) * chance.random(),
        hosted=case.hosted,
        witnesses=lambda rank: WITNESSES[case.witnesses](rank, case.world_size),
        notice_s=lambda: NOTICE_S * chance.random(),
    )
    return world


LONGEST_STEP_S = 2.0


def _body(rank: SimulatedRank, odd: int, asked: Callable[[], None]) -> PhaseRecord:
    def body() -> int:
        asked()
        return rank.rank

    if rank.rank == odd:
        rank.harm("differs")
    return PhaseRecord(f"of rank {odd}" if rank.rank == odd else "same", body=body)


def run(case: Case) -> World:
    chance = random.Random(repr(case))
    world = build(case, chance)
    late_s = STARTS_AFTER_S.get(case.fault, 0.0)
    return world.run(
        limit_s=WATCHDOG_S, start_s=lambda rank: late_s if late_s and rank == case.victim else chance.random()
    )
