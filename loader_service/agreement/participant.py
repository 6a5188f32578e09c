"""One rank's part in one session: its member machine, on rank 0 the leader machine too, and the carrier under them.

Synchronous and without threads: a session drives it on an event loop, a simulation drives it in virtual time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from loader_service import logs
from loader_service.agreement.carriers import Carrier
from loader_service.agreement.codec import decode_entry, encode_status
from loader_service.agreement.leader import Leader
from loader_service.agreement.member import Member
from loader_service.agreement.messages import (
    Describe,
    Entry,
    Failure,
    MessageError,
    Phase,
    PhaseRecord,
    Verdict,
    bye_key,
)
from loader_service.agreement.protocol import (
    LEADER,
    SAME_VERSION_HINT,
    STORE_GONE,
    SUSPECT_S,
    Collect,
    Collected,
    Effect,
    Incoming,
    Limits,
    LogEntry,
    Lost,
    Post,
    Publish,
    Statuses,
    Urge,
    Warn,
    died,
    out_of_reach,
)
from loader_service.errors import AgreementError, FailureRecord

_log = logs.logger("loader_service.agreement")

_LONG_STEP_S = 1.0  # ticks come far more often; a longer gap means that this process was stopped


class Participant:
    """Feeds the machines with what arrives and with the time, and does the effects they return.

    `on_verdict` is called for every verdict of the log in order, and for one that was decided here alone because the
    carrier is lost; `on_change` when `lost`, `byes_seen` or `tick_s` changes. `wake` runs a callback on the thread
    that calls all methods but `status`.
    """

    def __init__(
        self,
        carrier: Carrier,
        *,
        rank: int,
        world_size: int,
        limits: Limits,
        describe: Mapping[Phase, Describe],
        clock: Callable[[], float],
        on_verdict: Callable[[Verdict], None],
        on_change: Callable[[], None] = lambda: None,
        wake: Callable[[Callable[[], None]], None] = lambda callback: callback(),
    ) -> None:
        now_s = clock()
        self.rank = rank
        self.world_size = world_size
        self.progress: tuple[int, str] = (0, "")
        self.bytes_done: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.member = Member(rank, limits, now_s)
        self.leader = Leader(world_size, limits, describe, now_s) if rank == LEADER else None
        self.byes_seen = world_size == 1 or rank != LEADER
        self.lost = False
        self._carrier = carrier
        self._limits = limits
        self._clock = clock
        self._on_verdict = on_verdict
        self._on_change = on_change
        self._wake = wake
        self._beat = 0
        self._ticked_at_s = now_s
        self._stopped = (0.0, now_s)  # for how long this process last stood still, and when it went on
        self._connected = False
        self._meeting_s = 0.0
        self._bye_keys: tuple[str, ...] = ()
        self._inbox: deque[Incoming] = deque()
        self._early: dict[int, LogEntry] = {}
        self._busy = False

    def start(self) -> None:
        self._carrier.start(lambda incoming: self._wake(lambda: self.receive(incoming)), self.status)
        if self.leader is not None:
            self._do(self.leader.start())

    # -- what this rank says

    def post(self, phase: Phase, attempt: int, record: PhaseRecord) -> None:
        """Raises `MessageError` if the record cannot travel."""
        self._do(self.member.post(phase, attempt, record))

    def fail(self, failure: Failure) -> None:
        self._do(self.member.fail(failure))

    def bye(self) -> None:
        """This rank reads no more. The leader then expects the BYEs of all ranks but those it found dead."""
        if self.leader is None:
            self._carrier.post_last(bye_key(self.rank), b"{}")
            return
        others = set(range(self.world_size)) - {LEADER} - self.leader.lost
        self._bye_keys = tuple(bye_key(rank) for rank in sorted(others))
        if self._bye_keys:
            self._carrier.collect(self._bye_keys)
        else:
            self.byes_seen = True

    @property
    def none_reads(self) -> bool:
        """True once no rank will read any more. One that was silent may only have been stopped: it still reads why the
        load ended."""
        return self.byes_seen and not (self.leader is not None and self.leader.lost - self.leader.dead)

    def status(self) -> bytes:
        """The heartbeat's content, from the carrier's thread. It does not count on while the loop stands still for
        longer than the limit of silence: a rank whose service is stuck for good must not look alive."""
        if self._clock() - self._ticked_at_s <= self._limits.timeout_s:
            self._beat += 1
        moved, progress = self.progress
        return encode_status(self.member.status(self._beat, moved, progress, self.bytes_done()))

    def insist(self) -> None:
        """Nobody has answered this rank's FAIL, as where the leader is not there yet: it becomes the end, unless one
        stands there already."""
        self._do(self.member.insist())

    def saw_die(self, rank: int) -> None:
        """This rank knows that the process of `rank` has ended without a word. Means nothing once the end is known."""
        if self.member.ended is not None:
            return
        if self.leader is not None:
            self._do(self.leader.saw_die(rank, self._clock()))
        else:
            self._do(self.member.saw_die(rank))
        self._on_change()  # ticks may be wanted sooner

    # -- what arrives

    def receive(self, incoming: Incoming) -> None:
        """Takes a message in. Messages that effects bring back on the same stack wait for their turn."""
        self._inbox.append(incoming)
        if self._busy:
            return
        self._busy = True
        was_choosing = self.choosing
        try:
            while self._inbox:
                self._take(self._inbox.popleft())
        finally:
            self._busy = False
        if self.choosing and not was_choosing:
            self._on_change()  # ticks are wanted sooner

    def tick(self) -> None:
        """Time has passed. To be called every `tick_s`."""
        now_s = self._clock()
        self._note_gap(now_s)
        step_s = min(now_s - self._ticked_at_s, _LONG_STEP_S, self._limits.timeout_s / 4)
        self._ticked_at_s = now_s
        if self.member.ended is not None:
            return
        stalled_s = self._carrier.stalled_s(now_s)
        limit_s = self._limits.timeout_s
        if not self.member.log:
            # Ranks still connect, which can hold up a store. The carrier's own error is clearer: it comes first.
            self._meeting_s += step_s
            stalled_s = stalled_s if self._connected else self._meeting_s
            limit_s = self._limits.start_timeout_s + self._limits.suspect_s
        text = f"no answer for {limit_s:g} s; is its host alive, and reachable from here?"
        if self._carrier.host_rank in self._dead:  # a child of its process may hold the connections open
            limit_s, text = min(limit_s, self._limits.suspect_s), STORE_GONE
        if stalled_s > limit_s:
            self.receive(Lost(text, met=self._connected, may_hear=True))
        if self.leader is not None:
            self._do(self.leader.tick(now_s))

    @property
    def _dead(self) -> Collection[int]:
        return self.member.dead if self.leader is None else self.leader.dead

    @property
    def choosing(self) -> bool:
        """True while this rank, as the leader, gathers failures."""
        return self.leader is not None and self.leader.choosing

    @property
    def tick_s(self) -> float:
        """When to call `tick` next: often only while a cause is being chosen."""
        if self.choosing:
            return min(0.02, self._limits.heartbeat_s / 4)
        return self._limits.heartbeat_s / 4

    def _take(self, incoming: Incoming) -> None:
        now_s = self._clock()
        if isinstance(incoming, Lost):
            self._take_loss(incoming, now_s)
            return
        self._connected = True
        if isinstance(incoming, LogEntry):
            self._take_entry(incoming, now_s)
        elif isinstance(incoming, Collected):
            if self._bye_keys and incoming.keys == self._bye_keys:
                self.byes_seen = True
                self._on_change()
            elif self.leader is not None:
                self._do(self.leader.on_collected(incoming, now_s))
        else:
            self._take_statuses(incoming, now_s)

    def _take_loss(self, lost: Lost, now_s: float) -> None:
        if self.lost:  # each thread of the carrier says so
            return
        _log.warning("rank %d: no store (%s): %s %s", self.rank, self._carrier.where, lost.reason, lost.detail)
        self._note_gap(now_s)
        self.lost = True
        self._end_alone(self._cause_of(lost, now_s), may_hear=lost.may_hear)

    def _end_alone(self, failure: Failure, *, may_hear: bool = False) -> None:
        """Nothing that can be understood comes from the others any more."""
        verdict = self.member.end_alone(failure)
        if verdict is not None:
            if may_hear:
                self._carrier.last_words(verdict)
            self._on_verdict(verdict)
        self._on_change()

    def _cause_of(self, lost: Lost, now_s: float) -> Failure:
        """A rank that was stopped for too long was given up, and finds the others gone: it says what they have said."""
        if lost.own is not None:
            return replace(lost.own, record=replace(lost.own.record, rank=self.rank, phase=str(self.member.phase)))
        stopped_s, woke_at_s = self._stopped
        if stopped_s and now_s - woke_at_s <= max(self._limits.timeout_s, SUSPECT_S):
            return died(self.rank, self.member.phase, stopped_s, self.progress[1])
        host_rank, where = self._carrier.host_rank, self._carrier.where
        return out_of_reach(lost, self.member.phase, rank=self.rank, host_rank=host_rank, where=where)

    def _note_gap(self, now_s: float) -> None:
        gap_s = now_s - self._ticked_at_s
        if gap_s > self._limits.timeout_s - 2 * self._limits.heartbeat_s:  # the last beats before it may have been late
            self._stopped = (gap_s, now_s)

    def _take_statuses(self, incoming: Statuses, now_s: float) -> None:
        self._do(self.member.on_statuses(incoming, now_s))
        if self.leader is not None:
            self._do(self.leader.on_statuses(incoming, now_s))

    def _take_entry(self, incoming: LogEntry, now_s: float) -> None:
        """Entries come from two sides (read, and as answers to a compare-and-set): each counts once, in order."""
        if incoming.sequence < self.member.next_sequence or self.member.ended is not None:
            return
        self._early[incoming.sequence] = incoming
        while (following := self._early.pop(self.member.next_sequence, None)) is not None:
            try:
                entry = decode_entry(following.data)
                if entry.sequence != following.sequence:
                    raise MessageError(f"entry {following.sequence} says that it is {entry.sequence}")  # noqa: TRY301
            except MessageError as error:
                text = f"the log of verdicts cannot be read: {error}; {SAME_VERSION_HINT}"
                self._end_alone(Failure("error", FailureRecord(AgreementError.__name__, text, None, self.member.phase)))
                return
            self._do(self.member.on_entry(entry))
            if isinstance(entry, Verdict):
                self._note(entry)
                self._on_verdict(entry)
            if self.leader is not None:
                self._do(self.leader.on_entry(entry, now_s))

    def _note(self, verdict: Verdict) -> None:
        if verdict.failure is None:
            _log.debug("rank %d: phase %s complete", self.rank, verdict.phase)
            return
        record = verdict.failure.record
        text = "rank %d: phase %s %s: %s on rank %s: %s: %s"
        what = "failed" if verdict.final else "is repeated"
        kind = verdict.failure.kind
        _log.debug(text, self.rank, verdict.phase, what, kind, record.rank, record.error, record.message)

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Post):
                self._carrier.post(effect.key, effect.data)
            elif isinstance(effect, Publish):
                self._publish(effect.entry)
            elif isinstance(effect, Collect):
                self._carrier.collect(effect.keys)
            elif isinstance(effect, Warn):
                _log.warning("rank %d: %s", self.rank, effect.text)
            else:
                assert isinstance(effect, Urge)
                self._carrier.urge()

    def _publish(self, entry: Entry) -> None:
        _log.debug("rank %d: publishes %s", self.rank, entry)
        self._carrier.publish(entry)
