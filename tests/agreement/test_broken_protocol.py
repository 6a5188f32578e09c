"""The proof that the matrix can fail: the protocol is broken on purpose, and the checker sees it in runs that pass
without the break."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest

from loader_service.agreement.codec import decode_entry, encode_entry
from loader_service.agreement.leader import Leader
from loader_service.agreement.member import Member
from loader_service.agreement.memory_carrier import MemoryCarrier
from loader_service.agreement.messages import PHASES, Entry, Failure, Phase, Verdict, entry_key
from loader_service.agreement.participant import Participant
from loader_service.agreement.protocol import LEADER, Effect, LogEntry, Lookout, Publish, process_ended
from tests.agreement import cases
from tests.agreement.cases import Case, Moment
from tests.agreement.invariants import check
from tests.agreement.simulation import World
from tests.agreement.surroundings import Weather

Patch = Callable[[pytest.MonkeyPatch], None]


def some(
    *faults: str,
    moments: Sequence[Moment] = ("before",),
    phases: Iterable[Phase] = (Phase.PLAN, Phase.READ),
    victims: Iterable[int] = (0, 2),
    weather: Sequence[str] = ("calm", "slow"),
    hosted: Sequence[bool] = (False,),
    seeds: int = 1,
    witnesses: str = "nobody",
) -> list[Callable[[], World]]:
    return [
        partial(cases.run, Case(fault, moment, phase, victim, 4, sky, host, seed, witnesses))
        for fault in faults
        for moment in moments
        for phase in phases
        for victim in victims
        for sky in weather
        for host in hosted
        for seed in range(seeds)
    ]


# -- breaks -----------------------------------------------------------------------------------------------------------


def skip_the_fail(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "fail", lambda self, failure: [])


def tell_of_a_fail_with_the_next_heartbeat(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryCarrier, "urge", lambda self: None)


def publish_twice(patch: pytest.MonkeyPatch) -> None:
    once = MemoryCarrier.publish

    def publish(self: MemoryCarrier, entry: Entry) -> None:
        once(self, entry)
        once(self, replace(entry, sequence=entry.sequence + 1))

    patch.setattr(MemoryCarrier, "publish", publish)


def publish_a_second_final(patch: pytest.MonkeyPatch) -> None:
    on_entry = Leader.on_entry

    def twice(self: Leader, entry: Entry, now_s: float) -> list[Effect]:
        effects = on_entry(self, entry, now_s)
        if isinstance(entry, Verdict) and entry.final:
            effects.append(Publish(replace(entry, sequence=entry.sequence + 1, failure=None)))
        return effects

    patch.setattr(Leader, "on_entry", twice)


def write_the_log_by_plain_set(patch: pytest.MonkeyPatch) -> None:
    def publish(self: MemoryCarrier, entry: Entry) -> None:
        data = encode_entry(entry)
        self._send(lambda: self._board.set(entry_key(entry.sequence), data), len(data))
        self._tell("answer", LogEntry(entry.sequence, data))

    patch.setattr(MemoryCarrier, "publish", publish)


def count_a_repeated_entry_again(patch: pytest.MonkeyPatch) -> None:
    def take(self: Participant, incoming: LogEntry, now_s: float) -> None:
        entry = decode_entry(incoming.data)
        if self.member.ended is None:
            self._do(self.member.on_entry(entry))
            if isinstance(entry, Verdict):
                self._on_verdict(entry)
            if self.leader is not None:
                self._do(self.leader.on_entry(entry, now_s))

    patch.setattr(Participant, "_take_entry", take)


def forget_the_bye(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryCarrier, "post_last", lambda self, key, data: None)


def leave_without_waiting_for_byes(patch: pytest.MonkeyPatch) -> None:
    bye = Participant.bye

    def leave(self: Participant) -> None:
        bye(self)
        self.byes_seen = True

    patch.setattr(Participant, "bye", leave)


def ignore_statuses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leader, "on_statuses", lambda self, statuses, now_s: [])


def choose(pick: Callable[[dict[int, Failure]], int]) -> Patch:
    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr("loader_service.agreement.leader.choose_cause", lambda failures: failures[pick(failures)])

    return apply


def close_the_window_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leader, "_go_on", _go_on_without_window)


def _go_on_without_window(self: Leader, now_s: float) -> list[Effect]:
    if not self.choosing:
        return []
    limits, self._limits = self._limits, replace(self._limits, window_s=0.0)
    try:
        return _go_on(self, now_s)
    finally:
        self._limits = limits


_go_on = Leader._go_on


def look_for_no_dead_rank_behind_cancellations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leader, "_find_dead", lambda self, unheard: None)


def do_not_watch_the_leader(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "on_statuses", lambda self, statuses, now_s: [])


def beat_only_between_phases(patch: pytest.MonkeyPatch) -> None:
    status = Participant.status

    def without_beat(self: Participant) -> bytes:
        if self.member.at[0] < self.member.phase.position:
            self._beat -= 1
        return status(self)

    patch.setattr(Participant, "status", without_beat)


def lose_patience(patch: pytest.MonkeyPatch) -> None:
    silent = Lookout.silent
    patch.setattr(Lookout, "silent", lambda self, asked_at_s: silent(self, asked_at_s + self._limits.timeout_s * 0.7))


def blame_others_after_a_stop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lookout, "own_silence_s", lambda self, rank: 0.0)


def rely_on_wake_ups(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryCarrier, "_catch_up", lambda self: None)


def send_every_record_as_the_first_attempt(patch: pytest.MonkeyPatch) -> None:
    post = Member.post
    patch.setattr(Member, "post", lambda self, phase, attempt, record: post(self, phase, 0, record))


def succeed_before_the_finish_verdict(patch: pytest.MonkeyPatch) -> None:
    on_entry = Member.on_entry

    def early(self: Member, entry: Entry) -> list[Effect]:
        effects = on_entry(self, entry)
        if isinstance(entry, Verdict) and entry.phase is Phase.READ and not entry.final:
            self.ended = entry
        return effects

    patch.setattr(Member, "on_entry", early)


def hear_no_lost_store(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Participant, "_take_loss", lambda self, lost, now_s: None)


def tell_nobody_of_a_death(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "saw_die", lambda self, rank: [])


def end_alone_at_a_death(patch: pytest.MonkeyPatch) -> None:
    def alone(self: Participant, rank: int) -> None:
        self._end_alone(process_ended(rank, self.member.phase, ""))

    patch.setattr(Participant, "saw_die", alone)


def claim_the_leaders_death_once(patch: pytest.MonkeyPatch) -> None:
    on_entry = Member.on_entry

    def forgetful(self: Member, entry: Entry) -> list[Effect]:
        dead, self.dead = self.dead, ()
        try:
            return on_entry(self, entry)
        finally:
            self.dead = dead

    patch.setattr(Member, "on_entry", forgetful)


def blame_who_saw_a_death(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "saw_die", lambda self, rank: self.fail(process_ended(self.rank, self.phase, "")))


def prefer_a_death_to_an_error(patch: pytest.MonkeyPatch) -> None:
    def pick(failures: dict[int, Failure]) -> int:
        return min(failures, key=lambda rank: failures[rank].kind != "died")

    choose(pick)(patch)


# -- and who sees them ------------------------------------------------------------------------------------------------


def host_stopped_before_it_was_heard() -> World:
    """The leader publishes, and is stopped together with the board before anyone reads that: what the others then leave
    behind finds its place taken, and only the leader can know that it was the one that was gone."""
    world = World(
        2,
        weather=Weather(step_s=0.02, lost_wakes=1.0),
        limits=cases.MATRIX_LIMITS,
        leave_s=lambda: 0.0,
        hosted=True,
        work_s=lambda phase: 0.1,
    )
    world.board.when_all((entry_key(2),), lambda: world.ranks[LEADER].freeze(cases.LONG_S))
    return world.run()


@dataclass(frozen=True)
class Break:
    apply: Patch
    runs: Sequence[Callable[[], World]]
    seen_as: str
    """A regular expression for what the checker says."""


ALL_KINDS = some("error", "SIGKILL", "SIGSTOP", "repeats once", "takes long", phases=PHASES, victims=(0, 1))
STOPPED = some("error, others stopped", moments=("before", "window"), phases=PHASES, victims=(0, 1, 3))
BREAKS = {
    "a FAIL is skipped": Break(skip_the_fail, some("error"), "had no answer to its failure"),
    "a FAIL waits for the heartbeat": Break(
        tell_of_a_fail_with_the_next_heartbeat, some("error", phases=PHASES, weather=("calm",)), "knows at"
    ),
    "a verdict is published twice": Break(publish_twice, ALL_KINDS, "follow"),
    "a second FINAL": Break(publish_a_second_final, some("error"), "something follows an end"),
    "the log is written by plain set": Break(
        write_the_log_by_plain_set, some("SIGKILL", victims=(0,), weather=("loses every wake-up",)), "written"
    ),
    "a repeated entry counts again": Break(
        count_a_repeated_entry_again,
        some("error", weather=("repeats",)),
        "reads another log|is followed by|not done after",
    ),
    "no BYE is said": Break(forget_the_bye, some("takes long", victims=(2,)), "rank 0 still waits"),
    "BYEs are not waited for": Break(
        leave_without_waiting_for_byes,
        some("error", "short SIGSTOP", weather=("slow", "loses wake-ups"), hosted=(True,)),
        "lost the board",
    ),
    "the leader ignores statuses": Break(ignore_statuses, some("error", victims=(2,)), "had no answer|not done"),
    "the newest cause is told": Break(choose(lambda failures: list(failures)[-1]), STOPPED, "is told instead of"),
    "the first cause is told": Break(choose(lambda failures: next(iter(failures))), STOPPED, "is told instead of"),
    "the lowest rank is told": Break(choose(min), STOPPED, "is told instead of"),
    "no window for a better cause": Break(
        close_the_window_at_once,
        some("error", "cancelled", moments=("window",), phases=PHASES, victims=(0, 1, 3)),
        "without waiting for",
    ),
    "cancelled, and nobody asks who is dead": Break(
        look_for_no_dead_rank_behind_cancellations,
        some("SIGKILL, others stopped", victims=(1, 2, 3), seeds=3),
        "were cancelled because of",
    ),
    "the leader is not watched": Break(do_not_watch_the_leader, some("SIGKILL", victims=(0,)), "not done after"),
    "no heartbeat while a phase works": Break(beat_only_between_phases, some("takes long"), "nobody's fault"),
    "silence is not waited for": Break(
        lose_patience, some("short SIGSTOP", "cut off shortly", victims=(0, 2)), "nobody's fault"
    ),
    "who was stopped blames others": Break(
        blame_others_after_a_stop, [host_stopped_before_it_was_heard], "nobody's fault"
    ),
    "lost wake-ups are not made up for": Break(
        rely_on_wake_ups, some("late arrival", weather=("loses every wake-up",)), "not done|fault|late"
    ),
    "a record under the wrong attempt": Break(
        send_every_record_as_the_first_attempt, some("repeats once", phases=(Phase.CATALOG,)), "nobody's fault"
    ),
    "success before the finish verdict": Break(succeed_before_the_finish_verdict, ALL_KINDS, "not done after"),
    "a death is told nobody": Break(
        tell_nobody_of_a_death, some("SIGKILL", victims=(2,), witnesses="some"), "knows at"
    ),
    "a death ends a rank alone": Break(
        end_alone_at_a_death, some("SIGKILL", phases=PHASES, witnesses="all"), "sees .* instead of|after an end"
    ),
    "an end in order is taken for a death": Break(
        end_alone_at_a_death, some("takes long", phases=PHASES, witnesses="all"), "sees .* instead of|is told"
    ),
    "a leader's death is claimed once": Break(
        claim_the_leaders_death_once,
        some("SIGKILL", moments=("after",), phases=PHASES, victims=(0,), seeds=5, witnesses="all"),
        "knows at",
    ),
    "who saw a death is blamed": Break(
        blame_who_saw_a_death, some("SIGKILL", victims=(2,), witnesses="some"), "nobody's fault"
    ),
    "a death is told before an error": Break(
        prefer_a_death_to_an_error,
        some("SIGKILL, and an error elsewhere", phases=PHASES, victims=(1, 2, 3), witnesses="all"),
        "is told instead of",
    ),
    "a lost store is not heard of": Break(hear_no_lost_store, some("loses the store"), "not done after"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_of_the_protocol_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = BREAKS[name]

    def run_all() -> None:
        for run in broken.runs:
            check(run())

    run_all()
    broken.apply(monkeypatch)
    with pytest.raises(AssertionError, match=broken.seen_as):
        run_all()
