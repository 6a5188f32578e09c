"""Ranks whose process is seen to end: all hear of it at once, with its name, and an end in order means nothing."""

from __future__ import annotations

import pytest

from loader_service.agreement.messages import PHASES, Failure, Phase, PhaseRecord
from loader_service.agreement.protocol import STORE_GONE, Urge
from loader_service.errors import FailureRecord
from tests.agreement.invariants import check
from tests.agreement.simulation import LIMITS, SimulatedRank, World
from tests.agreement.surroundings import Weather

NOTICE_S = 0.01
LATENCY_S = 0.01
SLOW = Weather(step_s=0.1)
WORK_S = 5.0  # so that beats bring progress before


def died(rank: int, phase: Phase, progress: str) -> Failure:
    text = f"its process has ended; {progress}"
    return Failure("died", FailureRecord("LostRank", text, rank, phase))


def run(
    victim: int,
    phase: Phase,
    witnesses: set[int],
    *,
    also: tuple[int, str] | None = None,
    hosted: bool = False,
    child_lives: bool = False,
    others_go_on: bool = False,
) -> World:
    """Rank `victim` of four is killed when its record of `phase` is due; `also`: what happens to whom meanwhile."""

    def act(rank: SimulatedRank, current: Phase, attempt: int) -> PhaseRecord | None:
        if current is not phase:
            return PhaseRecord("same")
        if rank.rank == victim:
            rank.kill(child_lives=child_lives)
            return None
        if also is not None and rank.rank == also[0]:
            if also[1] == "fails":
                rank.later(LIMITS.window_s / 2, lambda: rank.fail(phase))
            elif also[1] == "is cancelled":
                rank.later(0.0, lambda: rank.fail(phase, "LoadCancelledError", "cancelled"))
            else:
                rank.later(NOTICE_S / 2, rank.kill)
            return None
        return PhaseRecord("same") if others_go_on else None

    world = World(
        4,
        act=act,
        work_s=lambda current: WORK_S,
        hosted=hosted,
        witnesses=lambda rank: witnesses - {rank},
        notice_s=lambda: NOTICE_S,
        leave_s=lambda: 0.0,
    )
    for rank in world.ranks:
        rank.participant.progress = (1, f"shard {rank.rank}")
    world.run()
    check(world)
    return world


def known_after_s(world: World) -> float:
    killed_at_s = min(harm.at_s for harm in world.harms if harm.kind == "killed")
    return max(rank.ended_at_s or 0.0 for rank in world.living) - killed_at_s


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("witnesses", [{0}, {1}, {1, 3}, {0, 1, 3}], ids=str)
def test_a_death_that_is_seen_is_told_to_all_within_a_second(witnesses: set[int], phase: Phase) -> None:
    world = run(2, phase, witnesses)
    assert world.cause() == died(2, phase, "last progress: shard 2")
    assert known_after_s(world) < NOTICE_S + LIMITS.window_s + 4 * LATENCY_S + LIMITS.heartbeat_s / 20


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("witnesses", [{1}, {1, 2, 3}], ids=str)
def test_a_leaders_death_that_is_seen_is_declared_at_once(witnesses: set[int], phase: Phase) -> None:
    world = run(0, phase, witnesses)
    assert world.cause() == died(0, phase, "last progress: shard 0")
    assert known_after_s(world) < NOTICE_S + 4 * LATENCY_S


def test_a_death_that_nobody_sees_is_silence() -> None:
    world = run(2, Phase.READ, set())
    assert "no sign of life" in world.cause().record.message
    assert known_after_s(world) > LIMITS.timeout_s


@pytest.mark.parametrize(("who", "what"), [(3, "fails"), (0, "fails"), (1, "fails")])
def test_an_error_of_another_rank_within_the_window_is_the_cause(who: int, what: str) -> None:
    world = run(2, Phase.READ, {1, 3}, also=(who, what))
    assert world.cause().record == FailureRecord("ReadError", "it broke", who, Phase.READ)
    assert known_after_s(world) < 1.0


def test_a_launcher_that_stops_the_others_is_not_the_cause_also_where_only_a_stopped_rank_saw_it() -> None:
    world = run(2, Phase.READ, {3}, also=(3, "is cancelled"))
    assert world.cause() == died(2, Phase.READ, "last progress: shard 2")
    assert known_after_s(world) < 1.0


@pytest.mark.parametrize("notice_s", [0.0, 0.3], ids=["its end is seen first", "its error is heard first"])
def test_what_a_rank_has_said_of_itself_counts_more_than_how_its_process_ended(notice_s: float) -> None:
    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        if phase is not Phase.READ:
            return PhaseRecord("same")
        if rank.rank == 2:
            rank.fail(phase)
            rank.later(2 * SLOW.step_s, rank.kill)  # what it has said is under way
            rank.world.time.call_later(notice_s, lambda: rank.world.ranks[0].saw_die(2))
        return None

    world = World(3, act=act, weather=SLOW, leave_s=lambda: 0.0).run()
    assert world.cause().record == FailureRecord("ReadError", "it broke", 2, Phase.READ)
    leader = world.ranks[0]
    assert leader.left_at_s is not None
    assert leader.left_at_s - (leader.leaving_at_s or 0.0) < LIMITS.heartbeat_s, "no good-bye is awaited of it"


def test_of_two_deaths_the_lowest_rank_that_was_seen_is_named() -> None:
    world = run(2, Phase.READ, {0, 3}, also=(1, "is killed"))
    assert world.cause() == died(1, Phase.READ, "last progress: shard 1")


def test_who_saw_a_death_and_dies_before_it_tells_is_seen_itself() -> None:
    world = run(2, Phase.READ, {3}, also=(3, "is killed"))
    assert world.cause().record.rank in (2, 3)
    assert "no sign of life" in world.cause().record.message, "rank 3 alone looked"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_after_success_is_nothing(victim: int) -> None:
    world = World(4, witnesses=lambda rank: {0, 1, 2, 3} - {rank}, notice_s=lambda: 0.0)
    world.run()
    assert all(rank.ended is not None and not rank.ended.final for rank in world.ranks)
    for rank in world.ranks:
        rank.participant.saw_die(victim)
        assert rank.ended is not None
        assert not rank.ended.final
    assert len(world.board.log) == len(PHASES)


def test_who_ends_in_order_before_others_have_heard_of_the_success_is_not_dead() -> None:
    """Wake-ups are lost, so the others hear of the success with their next heartbeat: after they have seen the leader's
    process end."""
    others = {1, 2, 3}
    world = World(4, work_s=lambda phase: WORK_S, witnesses=lambda rank: others, notice_s=lambda: 0.0)
    leader = world.ranks[0]
    world.board.loses = lambda what: what == "log"

    def end_soon() -> None:
        assert leader.ended is not None
        leader._process_ends()

    world.board.when_all((f"v/{len(PHASES) - 1}",), lambda: world.time.call_later(LATENCY_S, end_soon))
    world.run()
    check(world)
    assert {rank.rank for rank in world.ranks if 0 in rank.saw} == others
    assert all(rank.ended is not None and not rank.ended.final for rank in world.ranks)
    assert len(world.board.log) == len(PHASES)


def test_a_host_whose_child_keeps_the_connections_open_is_given_up_soon_by_who_saw_its_end() -> None:
    world = run(0, Phase.READ, {1, 2, 3}, hosted=True, child_lives=True)
    assert world.cause().kind == "died"
    text = f"lost the store (in memory) and rank 0 with it: {STORE_GONE}"
    assert world.cause().record.message == text
    assert LIMITS.suspect_s <= known_after_s(world) < LIMITS.suspect_s + 3 * LIMITS.heartbeat_s


def test_the_leader_waits_for_no_bye_of_a_dead_rank_and_leaves_nothing_on_the_board() -> None:
    world = run(2, Phase.READ, {0})
    leader = world.ranks[0]
    assert leader.left_at_s is not None
    assert leader.leaving_at_s is not None
    assert leader.left_at_s - leader.leaving_at_s < LIMITS.heartbeat_s
    assert leader.participant.none_reads


def test_a_rank_tells_a_death_once_and_none_of_itself() -> None:
    world = World(2)
    member = world.ranks[1].participant.member
    assert member.saw_die(1) == []
    assert [type(effect) for effect in member.saw_die(5)] == [Urge]
    assert member.saw_die(5) == []
    assert member.status(1, 1, "").dead == (5,)


@pytest.mark.parametrize("rank", [-1, 0, 9])
def test_the_leader_ignores_the_death_of_who_is_none_of_the_others(rank: int) -> None:
    world = World(3)
    leader = world.ranks[0].participant.leader
    assert leader is not None
    assert leader.saw_die(rank, 0.0) == []
    assert not leader.choosing
