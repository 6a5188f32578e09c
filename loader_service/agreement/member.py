"""A member's side, on every rank (the leader's own too): posts records, follows the log, watches the leader."""

from __future__ import annotations

from loader_service.agreement.codec import decode_status, encode_body, encode_record
from loader_service.agreement.messages import (
    FOLLOWING_KINDS,
    BodyRequest,
    Entry,
    Failure,
    MessageError,
    Phase,
    PhaseRecord,
    Status,
    Verdict,
    body_key,
    record_key,
)
from loader_service.agreement.protocol import (
    LEADER,
    MISSED_BEATS,
    NO_ARRIVAL_HINT,
    SAME_VERSION_HINT,
    Effect,
    Limits,
    Lookout,
    Post,
    Publish,
    Statuses,
    Urge,
    choose_cause,
    died,
    died_before_the_others_followed,
    process_ended,
    timed_out,
)
from loader_service.errors import FailureRecord


class Member:
    """Pure state machine; every method returns the effects to do. Times are seconds of one monotonic clock.

    `log` holds the verdicts in the log's order. `ended` is the verdict that nothing follows: FINAL, or success. It is
    not in `log` if it was decided here alone, because nothing could be heard from the others any more.
    """

    def __init__(self, rank: int, limits: Limits, now_s: float) -> None:
        self.rank = rank
        self.log: list[Verdict] = []
        self.ended: Verdict | None = None
        self.failure: Failure | None = None
        self.dead: tuple[int, ...] = ()  # whose process this rank has seen end without a word
        self.at = (-1, 0)
        self._limits = limits
        self._lookout = Lookout((LEADER,), limits, now_s)
        self._started_at_s = now_s
        self._sequence = 0
        self._declared = -1
        self._record = PhaseRecord()

    @property
    def phase(self) -> Phase:
        """The phase that the log has come to."""
        for verdict in reversed(self.log):
            following = verdict.phase.position + (1 if verdict.action == "go" else 0)
            return list(Phase)[min(following, len(Phase) - 1)]
        return Phase.CONFIG

    @property
    def next_sequence(self) -> int:
        return self._sequence

    def post(self, phase: Phase, attempt: int, record: PhaseRecord) -> list[Effect]:
        """This rank's record of a phase. Raises `MessageError` if it cannot travel."""
        data = encode_record(record)
        self._record = record
        self.at = (phase.position, attempt)
        return [Post(record_key(phase, attempt, self.rank), data)]

    def fail(self, failure: Failure) -> list[Effect]:
        """FAIL: the first thing that a failing rank says. Only the first one counts."""
        if self.failure is not None or self.ended is not None:
            return []
        self.failure = failure
        return [Urge()]

    def saw_die(self, rank: int) -> list[Effect]:
        """The process of `rank` has ended without a word. The leader is told; a leader's end is declared."""
        if self.ended is not None or rank in self.dead or rank == self.rank:
            return []
        self.dead = tuple(sorted((*self.dead, rank)))
        return [Urge()] if rank != LEADER else self.insist()

    def insist(self) -> list[Effect]:
        """No leader chooses: the best cause that this rank knows becomes the end, unless one stands there already."""
        failures = {} if self.failure is None else {self.rank: self.failure}
        failures |= {rank: process_ended(rank, self.phase, self._progress_of(rank)) for rank in self.dead}
        return self.declare(choose_cause(failures)) if failures else []

    def status(self, beat: int, moved: int, progress: str, done: tuple[int, int] = (0, 0)) -> Status:
        return Status(beat, moved, progress, self.at, self.failure, self.dead, done)

    def on_entry(self, entry: Entry) -> list[Effect]:
        """`entry` stands in the log at the next place."""
        if self.ended is not None:
            return []
        self._sequence = entry.sequence + 1
        effects: list[Effect] = []
        if not isinstance(entry, BodyRequest):
            self.log.append(entry)
            if entry.ends:
                self.ended = entry
                return []
        elif self.rank in entry.ranks:
            effects.append(Post(body_key(entry.sequence, self.rank), self._body(entry.key)))
        if LEADER in self.dead:  # these were its last words: its end comes behind them
            effects += self.insist()
        return effects

    def on_statuses(self, statuses: Statuses, now_s: float) -> list[Effect]:
        """The leader's status. A leader that is silent too long is declared lost, by whoever is first to do so."""
        if self.ended is not None or self.rank == LEADER:
            return []
        decoded: dict[int, Status] = {}
        if data := statuses.by_rank.get(LEADER):
            try:
                decoded[LEADER] = decode_status(data)
            except MessageError as error:
                text = f"its heartbeat cannot be read: {error}; {SAME_VERSION_HINT}"
                return self.declare(Failure("error", FailureRecord("AgreementError", text, LEADER, self.phase)))
        effects: list[Effect] = list(self._lookout.look(decoded, statuses.asked_at_s, now_s))
        watch = self._lookout.watches[LEADER]
        if self._lookout.silent(statuses.asked_at_s):
            silent_s = statuses.asked_at_s - watch.beat_at_s
            return effects + self.declare(died(LEADER, self.phase, silent_s, watch.progress))
        if self.failure is not None and self.failure.kind in FOLLOWING_KINDS and watch.heard:
            # As the leader does with the others: a launcher cancels all ranks when one has died, and collectives fail.
            silent_s = statuses.asked_at_s - watch.beat_at_s
            if silent_s > MISSED_BEATS * self._limits.heartbeat_s:
                dead = died_before_the_others_followed(LEADER, self.phase, silent_s, watch.progress)
                return effects + self.declare(dead)
        if not watch.heard and statuses.asked_at_s - self._started_at_s > self._limits.start_timeout_s:
            text = f"the leading rank did not arrive within {self._limits.start_timeout_s:g} s; {NO_ARRIVAL_HINT}"
            return effects + self.declare(timed_out(LEADER, self.phase, text))
        return effects

    def end_alone(self, failure: Failure) -> Verdict | None:
        """The carrier is gone: decided here, since nothing can be heard any more. None if the load had ended before."""
        if self.ended is not None:
            return None
        self.ended = Verdict(self._sequence, self.phase, "final", failure=failure)
        return self.ended

    def declare(self, failure: Failure) -> list[Effect]:
        """FINAL by compare-and-set at the next place: of several members, and the leader, one wins."""
        if self._declared == self._sequence:
            return []
        self._declared = self._sequence
        return [Publish(Verdict(self._sequence, self.phase, "final", failure=failure))]

    def _progress_of(self, rank: int) -> str:
        watch = self._lookout.watches.get(rank)
        return "" if watch is None else watch.progress

    def _body(self, key: str | None) -> bytes:
        try:
            if key is None and self._record.body is not None:
                return encode_body(self._record.body())
            if key is not None and self._record.body_detail is not None:
                return encode_body(self._record.body_detail(key))
        except Exception as error:  # noqa: BLE001 - whatever a body function raises must not keep the leader waiting
            return encode_body(problem=f"{type(error).__name__}: {str(error)[:500]}")
        return encode_body(problem="it keeps no such body")
