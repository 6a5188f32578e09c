"""The protocol's rules, rank by rank in virtual time: nothing here waits, so every limit has its real length."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pytest

from loader_service.agreement.messages import JSON, PHASES, Detail, Failure, FailureKind, Phase, PhaseRecord, Status
from loader_service.agreement.protocol import Lookout, choose_cause
from loader_service.agreement.session import FAIL_WAIT_S
from loader_service.errors import FailureRecord
from tests.agreement.simulation import LIMITS, SimulatedRank, World

Act = Callable[[SimulatedRank, Phase, int], PhaseRecord | None]
LATENCY_S = 0.01


def failing(*steps: tuple[int, Phase, str, FailureKind]) -> Act:
    """Ranks that fail at a phase with an error of a kind; everybody else agrees."""

    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        for who, where, error, kind in steps:
            if (who, where) == (rank.rank, phase):
                rank.fail(phase, error, kind)
                return None
        return PhaseRecord("same")

    return act


def at(phase: Phase, who: int, what: Callable[[SimulatedRank], None]) -> Act:
    """Something happens to one rank when its record of a phase is due."""

    def act(rank: SimulatedRank, current: Phase, attempt: int) -> PhaseRecord | None:
        if (rank.rank, current) == (who, phase):
            what(rank)
        return PhaseRecord("same") if rank.alive else None

    return act


def test_all_ranks_see_one_verdict_a_phase_in_the_same_order() -> None:
    world = World(4).run()
    for rank in world.ranks:
        assert [(verdict.sequence, verdict.phase, verdict.action) for verdict in rank.log] == [
            (index, phase, "go") for index, phase in enumerate(PHASES)
        ]
    assert world.time.now_s < 1


def test_counted_values_are_counted_and_listed_ones_come_by_rank() -> None:
    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord:
        listed: JSON = {"tp": rank.rank} if rank.rank != 1 and phase is Phase.CONFIG else None
        return PhaseRecord("same", counted={"node": f"n{rank.rank // 2}"}, listed=listed)

    world = World(3, act=act).run()
    for rank in world.ranks:
        assert rank.log[0].counts == {"node": {"n0": 2, "n1": 1}}
        assert rank.log[0].listed == ({"tp": 0}, None, {"tp": 2})
        assert rank.log[1].listed is None


# -- the choice of the cause ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [
        pytest.param({2: "error"}, 2, id="the only one"),
        pytest.param({0: "cancelled", 3: "error"}, 3, id="an error before a cancellation"),
        pytest.param({0: "timeout", 1: "cancelled", 2: "died"}, 2, id="died before timed out before cancelled"),
        pytest.param({0: "died", 2: "error"}, 2, id="an error before died"),
        pytest.param({3: "error", 1: "error"}, 1, id="of equals the lowest rank"),
        pytest.param({3: "cancelled", 2: "timeout"}, 2, id="timed out before cancelled"),
        pytest.param({0: "consequence", 3: "error"}, 3, id="an error before what it has caused"),
        pytest.param({0: "cancelled", 3: "consequence"}, 3, id="a consequence before cancelled"),
    ],
)
def test_the_root_cause_goes_before_its_consequences(kinds: dict[int, FailureKind], chosen: int) -> None:
    failures = {rank: Failure(kind, FailureRecord("E", "", rank)) for rank, kind in kinds.items()}
    assert choose_cause(failures).record.rank == chosen


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("who", [0, 2])
def test_a_fail_in_any_phase_reaches_every_rank_with_its_cause_within_a_second(phase: Phase, who: int) -> None:
    world = World(3, act=failing((who, phase, "ReadError", "error"))).run()
    assert world.cause() == Failure("error", FailureRecord("ReadError", "it broke", who, phase))
    assert world.time.now_s < 1
    for rank in world.ranks:
        assert [verdict.action for verdict in rank.log] == ["go"] * phase.position + ["final"]


def test_a_secondary_error_on_rank_0_does_not_hide_the_one_on_rank_3() -> None:
    act = failing((0, Phase.READ, "LoadCancelledError", "cancelled"), (3, Phase.READ, "ReadError", "error"))
    world = World(4, act=act, work_s=lambda phase: 0.0).run()
    assert world.cause().record.rank == 3


def test_a_later_root_cause_is_waited_for_but_not_longer_than_the_window() -> None:
    def run(second_after_s: float) -> World:
        def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
            if phase is Phase.READ and rank.rank == 0:
                rank.fail(phase, "LoadCancelledError", "cancelled")
            elif phase is Phase.READ and rank.rank == 1:
                rank.world.time.call_later(second_after_s, lambda: rank.fail(phase))
            elif phase is Phase.READ:
                rank.world.time.call_later(30, lambda: rank.participant.post(phase, 0, PhaseRecord("same")))
            else:
                return PhaseRecord("same")
            return None

        return World(3, act=act).run()

    assert run(0.5).cause().record.rank == 1
    late = run(5)
    assert late.cause().record.rank == 0
    # The failure is a cancellation, so that the next heartbeats are waited for too.
    assert LIMITS.window_s <= late.time.now_s < LIMITS.heartbeat_s + 0.1


@pytest.mark.parametrize("kind", ["cancelled", "consequence", "error"])
@pytest.mark.parametrize("stopped", [[0, 2], [2]], ids=["leader and member", "member only"])
def test_a_death_that_made_the_launcher_stop_the_others_is_the_cause(kind: FailureKind, stopped: list[int]) -> None:
    """Rank 1 is killed between two beats; 0.2 s later its launcher cancels others, rank 3 reads on until it is told."""

    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        if phase is not Phase.READ:
            return PhaseRecord("same")
        if rank.rank == 1:
            rank.world.time.call_later(3.3, rank.kill)
        if rank.rank in stopped:
            rank.world.time.call_later(3.5, lambda: rank.fail(phase, "LoadCancelledError", kind))
        return None

    world = World(4, act=act).run()
    failure = world.cause()
    if kind == "error":  # an own error is cause enough, and reaches the others within the second
        assert (failure.kind, failure.record.rank) == ("error", stopped[0])
        assert world.time.now_s < 3.5 + 1
        return
    assert (failure.kind, failure.record.error, failure.record.rank) == ("died", "LostRank", 1)
    assert "while other ranks were stopped or lost touch" in failure.record.message
    assert world.time.now_s < 3.5 + 3 * LIMITS.heartbeat_s, "long before the limit of silence"


@pytest.mark.parametrize("stopped", [[1, 2, 3], [2]], ids=["all others", "one"])
def test_a_death_of_the_leader_that_made_the_launcher_stop_the_others_is_the_cause(stopped: list[int]) -> None:
    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        if phase is not Phase.READ:
            return PhaseRecord("same")
        if rank.rank == 0:
            rank.world.time.call_later(3.3, rank.kill)
        elif rank.rank in stopped:
            rank.world.time.call_later(3.5, lambda: rank.fail(phase, "LoadCancelledError", "cancelled"))
        return None

    world = World(4, act=act).run()
    failure = world.cause()
    assert (failure.kind, failure.record.error, failure.record.rank) == ("died", "LostRank", 0)
    assert world.time.now_s < 3.5 + FAIL_WAIT_S, "before the cancelled ranks give up"


def test_a_rank_that_has_nothing_left_to_do_is_not_waited_for_when_others_are_cancelled() -> None:
    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        if phase is Phase.READ and rank.rank == 2:
            rank.world.time.call_later(5.5, lambda: rank.fail(phase, "LoadCancelledError", "cancelled"))
            return None
        return PhaseRecord("same")

    world = World(3, act=act).run()
    assert world.cause().record.rank == 2
    assert world.time.now_s - 5.5 < LATENCY_S


def test_the_window_closes_early_when_all_others_have_nothing_left_to_fail_at() -> None:
    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        if (rank.rank, phase) == (1, Phase.CATALOG):
            rank.world.time.call_later(20, lambda: rank.fail(phase))
            return None
        return PhaseRecord("same")

    world = World(3, act=act).run()
    assert world.time.now_s - 20 < LATENCY_S


def test_there_is_one_final_even_if_every_rank_fails() -> None:
    act = failing(*((rank, Phase.OPEN, f"Error{rank}", "error") for rank in range(4)))
    world = World(4, act=act).run()
    assert world.cause().record.error == "Error0"
    assert all(sum(verdict.final for verdict in rank.log) == 1 for rank in world.ranks)


def test_a_fail_after_the_record_of_the_same_phase_still_ends_the_load() -> None:
    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        if (rank.rank, phase) == (1, Phase.PLAN):
            rank.participant.post(phase, attempt, PhaseRecord("same"))
            rank.fail(phase)
            return None
        return PhaseRecord("same")

    assert World(3, act=act).run().cause().record.rank == 1


def test_after_a_fail_no_phase_is_agreed_on_any_more() -> None:
    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        if (rank.rank, phase) == (1, Phase.PLAN):
            rank.participant.post(phase, attempt, PhaseRecord("same"))
            rank.fail(phase)
            return None
        if (rank.rank, phase) == (2, Phase.PLAN):
            rank.world.time.call_later(0.31, lambda: rank.participant.post(phase, attempt, PhaseRecord("same")))
            return None
        return PhaseRecord("same")

    world = World(3, act=act).run()
    assert [(verdict.phase, verdict.action) for verdict in world.ranks[0].log] == [
        (Phase.CONFIG, "go"),
        (Phase.CATALOG, "go"),
        (Phase.PLAN, "final"),
    ]


# -- once more, together ----------------------------------------------------------------------------------------------


def header_failures(*failing_at: tuple[int, int]) -> Act:
    """Ranks whose headers cannot be read at an attempt: they ask to repeat at the first, and FAIL at the second."""

    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        if phase is Phase.CATALOG and (rank.rank, attempt) in failing_at:
            if attempt == 1:
                rank.fail(phase, "ReadError")
                return None
            return PhaseRecord(outcome="retry", failure=FailureRecord("ReadError", "EIO", rank.rank, phase, "a.st"))
        return PhaseRecord("same")

    return act


@pytest.mark.parametrize("who", [[0], [2], [1, 2], [0, 1, 2]], ids=str)
def test_a_header_failure_makes_all_ranks_repeat_the_catalog_once(who: list[int]) -> None:
    world = World(3, act=header_failures(*((rank, 0) for rank in who))).run()
    for rank in world.ranks:
        assert [verdict.action for verdict in rank.log] == ["go", "retry", "go", "go", "go", "go", "go"]
        cause = rank.log[1].failure
        assert cause is not None
        assert (cause.record.rank, cause.record.path) == (min(who), "a.st")


def test_a_header_failure_in_both_attempts_ends_the_load_with_it() -> None:
    world = World(3, act=header_failures((1, 0), (1, 1))).run()
    assert world.cause().record == FailureRecord("ReadError", "it broke", 1, "catalog")


def test_a_second_wish_to_repeat_is_a_failure_not_a_loop() -> None:
    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord:
        wants = phase is Phase.CATALOG and rank.rank == 2
        return PhaseRecord("same", outcome="retry" if wants else "ok")

    world = World(3, act=act).run()
    assert world.cause().record.rank == 2
    assert [verdict.action for verdict in world.ranks[0].log] == ["go", "retry", "final"]


# -- disagreement -----------------------------------------------------------------------------------------------------


def digests(*by_rank: str, phase: Phase = Phase.CONFIG, body: Callable[[int], JSON] | None = None) -> Act:
    def act(rank: SimulatedRank, current: Phase, attempt: int) -> PhaseRecord:
        if current is not phase:
            return PhaseRecord("same")
        asked: list[int] = rank.world.asked  # type: ignore[attr-defined]

        def give() -> JSON:
            asked.append(rank.rank)
            return body(rank.rank) if body is not None else by_rank[rank.rank]

        def detail(key: str) -> JSON:
            asked.append(rank.rank)
            return f"{key} on {rank.rank}"

        return PhaseRecord(by_rank[rank.rank], body=give, body_detail=detail)

    return act


def run_digests(act: Act, world_size: int, describe: object) -> World:
    world = World(world_size, act=act, describe={Phase.CONFIG: describe, Phase.CATALOG: describe})  # type: ignore[dict-item]
    world.asked = []  # type: ignore[attr-defined]
    return world.run()


@pytest.mark.parametrize(
    ("by_rank", "pair", "others"),
    [
        pytest.param("aab", (0, 2), " (rank 1 agrees with rank 0)", id="the last differs"),
        pytest.param("abbb", (1, 0), " (ranks 2 and 3 agree with rank 1)", id="rank 0 differs from all others"),
        pytest.param("ab", (0, 1), "", id="two ranks"),
        pytest.param(
            "abab",
            (0, 1),
            " (rank 2 agrees with rank 0, rank 3 agrees with rank 1)",
            id="halves: the first group first",
        ),
        pytest.param("abcbb", (1, 0), " (ranks 3 and 4 agree with rank 1, 1 with neither)", id="three groups"),
        pytest.param(
            "aacb", (0, 2), " (rank 1 agrees with rank 0, 1 with neither)", id="the lowest of several that differ"
        ),
        pytest.param("a" * 9 + "b" + "a", (0, 9), " (9 others agree with rank 0)", id="so many that they are counted"),
    ],
)
def test_a_disagreement_names_two_ranks_and_who_agrees_with_each(
    by_rank: str, pair: tuple[int, int], others: str
) -> None:
    world = run_digests(digests(*by_rank), len(by_rank), lambda a, b, who: f"{a} is on {who[0]} and {b} is on {who[1]}")
    failure = world.cause()
    first, second = pair
    assert failure.kind == "disagreement"
    assert failure.record.error == "AgreementError"
    assert failure.record.rank == second
    assert failure.record.message == (
        f"ranks {first} and {second} differ in config: {by_rank[first]} is on rank {first} and "
        f"{by_rank[second]} is on rank {second}{others}"
    )
    assert sorted(world.asked) == sorted(pair)  # type: ignore[attr-defined]


def test_a_second_finer_round_asks_the_same_two_ranks_for_the_detail() -> None:
    def describe(a: JSON, b: JSON, who: tuple[str, str]) -> Detail:
        return Detail("shard 7", lambda c, d: f"{c}, {d}")

    world = run_digests(digests("a", "a", "b", phase=Phase.CATALOG), 3, describe)
    assert "ranks 0 and 2 differ in catalog: shard 7 on 0, shard 7 on 2 (" in world.cause().record.message
    assert sorted(world.asked) == [0, 0, 2, 2]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("body", "describe", "text"),
    [
        pytest.param(
            lambda rank: 1 / 0, lambda a, b, who: "", "rank 0 cannot say more: ZeroDivisionError", id="body raises"
        ),
        pytest.param(lambda rank: object(), lambda a, b, who: "", "cannot be written as JSON", id="body is no JSON"),
        pytest.param(lambda rank: "x" * (65 << 20), lambda a, b, who: "", "at most", id="body too large"),
        pytest.param(
            lambda rank: {}, lambda a, b, who: a["missing"], "comparing them failed: KeyError", id="describe raises"
        ),
    ],
)
def test_a_difference_that_cannot_be_named_is_still_a_disagreement(
    body: Callable[[int], JSON], describe: object, text: str
) -> None:
    failure = run_digests(digests("a", "b", body=body), 2, describe).cause()
    assert failure.kind == "disagreement"
    assert text in failure.record.message


def test_a_rank_that_dies_while_its_body_is_awaited_is_named() -> None:
    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord:
        if rank.rank != 1:
            return PhaseRecord("a", body=lambda: 1)
        rank.world.time.call_later(0.00015, rank.kill)  # its record is out, the request not yet there
        return PhaseRecord("b", body=lambda: 2)

    failure = World(3, act=act).run().cause()
    assert (failure.kind, failure.record.rank) == ("died", 1)


# -- silence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("who", [0, 1])
def test_a_killed_rank_is_named_by_all_survivors_within_the_limit(phase: Phase, who: int) -> None:
    def act(rank: SimulatedRank, current: Phase, attempt: int) -> PhaseRecord | None:
        if (rank.rank, current) != (who, phase):
            return PhaseRecord("same")
        rank.participant.progress = (1, "shard 3")
        rank.world.time.call_later(2.0, rank.kill)  # the progress is out by then with a heartbeat, the record is not
        return None

    world = World(4, act=act)
    world.run()
    failure = world.cause()
    assert (failure.kind, failure.record.rank, failure.record.error) == ("died", who, "LostRank")
    assert "last progress: shard 3" in failure.record.message
    assert world.time.now_s < 2 + LIMITS.timeout_s + 2 * LIMITS.heartbeat_s + LIMITS.window_s


def test_a_silent_rank_is_suspect_once_before_it_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "loader_service.agreement"):
        World(3, act=at(Phase.READ, 2, SimulatedRank.kill)).run()
    suspects = [record.getMessage() for record in caplog.records if "suspect" in record.getMessage()]
    assert len(suspects) == 1
    assert "rank 2 is suspect: silent for" in suspects[0]


def test_a_rank_that_is_silent_for_less_than_the_limit_is_healthy(caplog: pytest.LogCaptureFixture) -> None:
    def nap(rank: SimulatedRank) -> None:
        rank.freeze()
        rank.world.time.call_later(LIMITS.timeout_s - 5, rank.thaw)

    with caplog.at_level(logging.WARNING, "loader_service.agreement"):
        world = World(3, act=at(Phase.READ, 1, nap)).run()
    assert all(len(rank.log) == len(PHASES) for rank in world.ranks)
    assert any("rank 1 is suspect" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("who", [0, 2], ids=["leader", "member"])
def test_a_rank_that_was_frozen_sees_the_same_final_when_it_wakes(who: int) -> None:
    def sleep(rank: SimulatedRank) -> None:
        rank.freeze()
        rank.world.time.call_later(500, rank.thaw)

    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        if (rank.rank, phase) != (who, Phase.READ):
            return PhaseRecord("same")
        sleep(rank)
        return None

    world = World(3, act=act).run()
    assert world.cause().record.rank == who
    assert world.time.now_s == pytest.approx(500, abs=5)
    assert all(rank.log == world.ranks[1].log for rank in world.ranks)


def test_all_ranks_stopped_and_continued_together_blame_nobody() -> None:
    """Ctrl-Z and fg of a whole launcher: the clock has jumped, but nobody was silent while others looked."""
    world = World(3, work_s=lambda phase: 100.0 if phase is Phase.READ else 0.0)
    for rank in world.ranks:
        world.time.call_later(20 + rank.rank * 0.01, rank.freeze)
        world.time.call_later(1000 + rank.rank * 0.01, rank.thaw)
    world.run()
    assert all(len(rank.log) == len(PHASES) for rank in world.ranks)


@pytest.mark.parametrize(
    ("asked_s", "answered_s"),
    [
        pytest.param(61.0, 61.0, id="did not look for 61 s: was stopped itself"),
        pytest.param(1.0, 100.0, id="no answer for 99 s: the store was stopped"),
    ],
)
def test_time_without_looking_is_nobodys_silence(asked_s: float, answered_s: float) -> None:
    status = Status(1, 1, "", (0, 0), None)
    lookout = Lookout([1], LIMITS, 0.0)
    lookout.look({1: status}, 0.0, 0.0)
    lookout.look({1: status}, asked_s, answered_s)
    assert lookout.silent(answered_s) == []
    at_s = answered_s
    while not lookout.silent(at_s):
        at_s += 1.0
        lookout.look({1: status}, at_s, at_s)
    assert at_s - answered_s == pytest.approx(LIMITS.timeout_s, abs=2.0), "from then on silence counts"


def test_answers_that_were_held_up_together_are_forgiven_once() -> None:
    """A loop that stood still finds a heap of them; each is old, but no rank has been unseen for their sum."""
    status = Status(1, 1, "", (0, 0), None)
    lookout = Lookout([1], LIMITS, 0.0)
    for asked_s in range(50):
        lookout.look({1: status}, asked_s, 50.0)
    at_s = 50.0
    while not lookout.silent(at_s):
        at_s += 1.0
        lookout.look({1: status}, at_s, at_s)
    assert at_s == pytest.approx(50.0 + LIMITS.timeout_s, abs=2.0)


# -- lateness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.CATALOG, Phase.PLAN, Phase.OPEN])
@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_without_progress_is_late_and_named_with_its_last_progress(phase: Phase, who: int) -> None:
    def act(rank: SimulatedRank, current: Phase, attempt: int) -> PhaseRecord | None:
        if (rank.rank, current) != (who, phase):
            return PhaseRecord("same")
        rank.participant.progress = (1, "header 5 of 48")
        return None

    world = World(3, act=act).run()
    failure = world.cause()
    assert (failure.kind, failure.record.rank, failure.record.error) == ("timeout", who, "LateRank")
    assert "last progress: header 5 of 48" in failure.record.message
    assert world.time.now_s < LIMITS.timeout_s + 5


def test_a_rank_whose_progress_moves_is_slow_and_not_late() -> None:
    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        if (rank.rank, phase) != (1, Phase.CATALOG):
            return PhaseRecord("same")
        for step in range(10):
            rank.world.time.call_later(
                step * 50, partial(setattr, rank.participant, "progress", (step, f"header {step}"))
            )
        rank.world.time.call_later(500, lambda: rank.participant.post(phase, 0, PhaseRecord("same")))
        return None

    world = World(3, act=act).run()
    assert all(len(rank.log) == len(PHASES) for rank in world.ranks)


@pytest.mark.parametrize("phase", [Phase.READ, Phase.FINISH])
def test_reading_and_finishing_may_take_any_time(phase: Phase) -> None:
    def act(rank: SimulatedRank, current: Phase, attempt: int) -> PhaseRecord | None:
        if (rank.rank, current) != (1, phase):
            return PhaseRecord("same")
        rank.world.time.call_later(3000, lambda: rank.participant.post(phase, 0, PhaseRecord("same")))
        return None

    world = World(2, act=act).run()
    assert all(len(rank.log) == len(PHASES) for rank in world.ranks)


@pytest.mark.parametrize("who", [0, 1])
def test_the_first_meeting_waits_for_the_start_limit_and_names_who_did_not_come(who: int) -> None:
    patient = World(3).run(start_s=lambda rank: LIMITS.start_timeout_s - 10 if rank == who else 0.0)
    assert all(len(rank.log) == len(PHASES) for rank in patient.ranks)
    world = World(3).run(start_s=lambda rank: 10_000 if rank == who else 0.0, limit_s=20_000)
    failure = world.cause()
    assert (failure.kind, failure.record.rank) == ("timeout", who)
    assert "did not arrive within 600 s" in failure.record.message
    assert all(rank.log == world.ranks[1].log for rank in world.ranks), "who comes too late sees the same FINAL"


# -- the carrier ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["log", "collected", "alarm", "answer", "all of them"])
def test_a_heartbeat_makes_up_for_wake_ups_that_are_lost_for_good(lost: str) -> None:
    """As where the network has forgotten a connection that only waits: nothing ends it, and nothing comes over it."""

    def run(act: Act) -> World:
        world = World(3, act=act)
        world.board.loses = lambda what: what == lost or (lost == "all of them" and what != "beat")
        return world.run()

    done = run(lambda rank, phase, attempt: PhaseRecord("same"))
    assert all(len(rank.log) == len(PHASES) for rank in done.ranks)
    assert done.time.now_s < 2 * LIMITS.heartbeat_s * len(PHASES) + 1
    failed = run(failing((2, Phase.CATALOG, "ReadError", "error")))
    assert failed.cause().record.rank == 2
    assert failed.time.now_s < 2 * LIMITS.heartbeat_s + LIMITS.window_s + 4 * LIMITS.heartbeat_s


def test_a_rank_that_loses_the_store_ends_alone_and_the_others_name_it() -> None:
    def cut(rank: SimulatedRank) -> None:
        rank.carrier.lose("lost the store (at 10.0.0.1:1): reset")
        rank.failed = True

    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        if (rank.rank, phase) != (2, Phase.READ):
            return PhaseRecord("same")
        cut(rank)
        return None

    world = World(3, act=act).run()
    causes = [rank.ended.failure.record for rank in world.ranks if rank.ended and rank.ended.failure]
    assert [(cause.rank, cause.error) for cause in causes] == [(2, "LostRank"), (2, "LostRank"), (0, "LostStore")]
    assert world.ranks[2].log == world.ranks[0].log[:-1]


@pytest.mark.parametrize(
    ("key", "data"),
    [
        pytest.param("r/config.0/1", b"\xff\xfe", id="record: no UTF-8"),
        pytest.param("r/config.0/1", b"{}", id="record: no keys"),
        pytest.param("r/config.0/1", b"[" * 100_000, id="record: nested without end"),
        pytest.param("r/config.0/1", b'"' + b"x" * (1 << 20) + b'"', id="record: oversized"),
        pytest.param("hb/1", b'{"beat": "1"}', id="heartbeat: wrong keys"),
        pytest.param("hb/1", b"x" * (1 << 20), id="heartbeat: oversized"),
    ],
)
def test_a_malformed_message_is_a_failure_that_names_its_rank(key: str, data: bytes) -> None:
    world = World(3)
    world.ranks[1].alive = False  # what is there of rank 1 is that message
    world.time.call_later(0.1, lambda: world.board.set(key, data))
    world.run()
    failure = world.cause()
    assert (failure.kind, failure.record.rank) == ("error", 1)
    assert "cannot be read" in failure.record.message


def test_a_log_entry_that_cannot_be_read_ends_the_load_on_each_rank() -> None:
    world = World(2)
    world.board.set("v/0", b"nonsense")
    world.run()
    for rank in world.ranks:
        assert rank.ended is not None
        assert rank.ended.failure is not None
        assert "the log of verdicts cannot be read" in rank.ended.failure.record.message


def test_an_operator_hears_who_has_not_come_to_the_first_meeting(caplog: pytest.LogCaptureFixture) -> None:
    """After ten seconds and then once a minute, with the ranks that are waited for."""
    World(3).run(start_s=lambda rank: 100.0 if rank == 2 else 0.0)
    told = [record.getMessage() for record in caplog.records if "waiting for" in record.getMessage()]
    assert len(told) == 2
    assert all(text.startswith("rank 0: waiting for rank 2: 2 of 3 have come after ") for text in told)


def test_the_leader_waits_for_no_bye_of_a_rank_that_never_came() -> None:
    def act(rank: SimulatedRank, phase: Phase, attempt: int) -> PhaseRecord | None:
        return PhaseRecord("same")

    world = World(3, act=act)
    for rank in world.ranks[:2]:
        rank.start(0.0)
    world.time.run(lambda: all(rank.ended for rank in world.ranks[:2]), limit_s=3600.0)
    leader = world.ranks[0].participant.leader
    assert leader is not None
    assert leader.lost == {2}
