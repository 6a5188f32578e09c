"""The leader's side, on group rank 0: collects every rank's record, compares, publishes one verdict a phase.

A failure of any rank (its FAIL, its silence, its lateness, an unreadable record) opens a short window in which others'
failures are gathered; then the root cause is chosen and FINAL is published, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from loader_service.agreement.codec import decode_body, decode_record, decode_status, encode_entry
from loader_service.agreement.messages import (
    FOLLOWING_KINDS,
    JSON,
    PHASES,
    BodyRequest,
    Describe,
    Detail,
    Entry,
    Failure,
    MessageError,
    Phase,
    Record,
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
    WAITING_AGAIN_S,
    WAITING_S,
    Collect,
    Collected,
    Effect,
    Limits,
    Lookout,
    Publish,
    Statuses,
    Warn,
    choose_cause,
    died,
    died_before_the_others_followed,
    process_ended,
    timed_out,
)
from loader_service.errors import AgreementError, FailureRecord

MOST_NAMED = 8
_BOUNDED_WORK = (Phase.CATALOG, Phase.PLAN, Phase.OPEN)  # phases in which a rank without progress is late


class Leader:
    """Pure state machine; every method returns the effects to do. Times are seconds of one monotonic clock."""

    def __init__(self, world_size: int, limits: Limits, describe: Mapping[Phase, Describe], now_s: float) -> None:
        self._world_size = world_size
        self._limits = limits
        self._describe = describe
        self._lookout = Lookout(range(world_size), limits, now_s)
        self._started_at_s = now_s
        self._phase_at_s = now_s
        self._position = 0
        self._attempt = 0
        self._sequence = 0
        self._step: Literal["records", "bodies", "publishing", "done"] = "records"
        self._expected: tuple[str, ...] = ()
        self._failures: dict[int, Failure] = {}
        self.dead: set[int] = set()  # whose process was seen to end without a word
        self._told_until_s = WAITING_S
        self._window_began_at_s: float | None = None
        self._looked_at_s = now_s
        self._groups: list[list[int]] = []
        self._request: BodyRequest | None = None
        self._finer: Detail | None = None

    @property
    def phase(self) -> Phase:
        return PHASES[min(self._position, len(PHASES) - 1)]

    @property
    def choosing(self) -> bool:
        """True while failures are gathered: ticks should then come often."""
        return bool(self._failures) and self._step in {"records", "bodies"}

    @property
    def lost(self) -> frozenset[int]:
        """Ranks found dead or silent, and ranks that never came: no BYE is expected of them."""
        watches = self._lookout.watches
        return frozenset(self.dead).union(
            rank
            for rank, failure in self._failures.items()
            if failure.kind == "died" or (failure.kind == "timeout" and not watches[rank].heard)
        )

    @property
    def done_by_rank(self) -> dict[int, tuple[int, int]]:
        """What ranks have said of how many bytes they have, and of how many; those alone that know it."""
        return {rank: watch.done for rank, watch in self._lookout.watches.items() if watch.done[1]}

    def start(self) -> list[Effect]:
        return [self._collect_records()]

    # -- inputs

    def on_entry(self, entry: Entry, now_s: float) -> list[Effect]:
        """`entry` stands in the log at the next place: the leader's own, or a FINAL that a member put there."""
        if self._step == "done":
            return []
        self._sequence = entry.sequence + 1
        if isinstance(entry, BodyRequest):
            if self._step != "publishing":  # nobody else asks for bodies
                text = f"the log of verdicts holds a request that this rank did not make; {SAME_VERSION_HINT}"
                record = FailureRecord(AgreementError.__name__, text, None, self.phase)
                return self._publish(self._verdict("final", failure=Failure("disagreement", record)))
            self._step, self._request = "bodies", entry
            self._phase_at_s = now_s
            self._expected = tuple(body_key(entry.sequence, rank) for rank in entry.ranks)
            return [Collect(self._expected)]
        if entry.ends:
            self._step = "done"
            return []
        if entry.action == "retry":
            self._attempt += 1
        else:
            self._position, self._attempt = self._position + 1, 0
        self._step = "records"
        self._phase_at_s = now_s
        return [self._collect_records(), *self._go_on(now_s)]

    def on_collected(self, collected: Collected, now_s: float) -> list[Effect]:
        if collected.keys != self._expected or self._step not in {"records", "bodies"}:
            return []
        if self._step == "bodies":
            return self._name_difference(collected.values)
        records: list[Record] = []
        for rank, data in enumerate(collected.values):
            try:
                records.append(decode_record(data))
            except MessageError as error:
                self._unreadable(rank, f"its {self.phase} record cannot be read: {error}")
        return self._go_on(now_s) if self._failures else self._decide(records, now_s)

    def on_statuses(self, statuses: Statuses, now_s: float) -> list[Effect]:
        if self._step == "done":
            return []
        decoded: dict[int, Status] = {}
        for rank, data in statuses.by_rank.items():
            if not data:
                continue
            try:
                decoded[rank] = decode_status(data)
            except MessageError as error:
                self._unreadable(rank, f"its heartbeat cannot be read: {error}")
        effects: list[Effect] = list(self._lookout.look(decoded, statuses.asked_at_s, now_s))
        self._looked_at_s = statuses.asked_at_s
        for rank, status in decoded.items():
            if status.failure is not None and (rank in self.dead or rank not in self._failures):
                self._failures[rank] = status.failure  # a rank's own words count more than how its process ended
        for rank in {dead for status in decoded.values() for dead in status.dead}:
            self._find_dead_process(rank)
        for rank in self._lookout.silent(statuses.asked_at_s):
            if rank != LEADER:
                self._find_silent(rank, statuses.asked_at_s)
        self._find_late(statuses.asked_at_s)
        return [*effects, *self._tell_who_is_waited_for(statuses.asked_at_s), *self._go_on(now_s)]

    def saw_die(self, rank: int, now_s: float) -> list[Effect]:
        """This rank itself has seen the process of `rank` end without a word."""
        if self._step == "done":
            return []
        self._find_dead_process(rank)
        return self._go_on(now_s)

    def tick(self, now_s: float) -> list[Effect]:
        limit_s = self._limits.timeout_s + 3 * self._limits.heartbeat_s  # a rank that has died is found before
        if self._step == "bodies" and not self._failures and now_s - self._phase_at_s > limit_s:
            return self._disagree(f"their digests differ; the texts did not come within {limit_s:g} s")
        return self._go_on(now_s)

    # -- failures

    def _unreadable(self, rank: int, text: str) -> None:
        message = f"{text}; {SAME_VERSION_HINT}"
        self._failures.setdefault(
            rank, Failure("error", FailureRecord(AgreementError.__name__, message, rank, self.phase))
        )

    def _find_silent(self, rank: int, asked_at_s: float) -> None:
        """A rank that was gone when this one went on after a stop had given this one up, not the other way round."""
        watch = self._lookout.watches[rank]
        silent_s = asked_at_s - watch.beat_at_s
        if own_silence_s := self._lookout.own_silence_s(rank):
            rank, watch, silent_s = LEADER, self._lookout.watches[LEADER], own_silence_s
        self._failures.setdefault(rank, died(rank, self.phase, silent_s, watch.progress))

    def _find_dead_process(self, rank: int) -> None:
        if rank == LEADER or rank not in self._lookout.watches or rank in self.dead:
            return
        self.dead.add(rank)
        self._failures.setdefault(rank, process_ended(rank, self.phase, self._lookout.watches[rank].progress))

    def _arrived(self, rank: int) -> bool:
        return self._step != "records" or self._lookout.watches[rank].at >= (self._position, self._attempt)

    def _tell_who_is_waited_for(self, asked_at_s: float) -> list[Effect]:
        """The first meeting may take minutes: an operator should not have to guess whose."""
        waited_s = asked_at_s - self._started_at_s
        absent = [rank for rank in range(self._world_size) if not self._arrived(rank)]
        if self.phase is not Phase.CONFIG or not absent or waited_s < self._told_until_s:
            return []
        self._told_until_s = waited_s + WAITING_AGAIN_S
        shown = ", ".join(map(str, absent[:MOST_NAMED])) + (", ..." if len(absent) > MOST_NAMED else "")
        came = self._world_size - len(absent)
        who = f"rank{'s' if len(absent) > 1 else ''} {shown}"
        return [Warn(f"waiting for {who}: {came} of {self._world_size} have come after {waited_s:.0f} s")]

    def _find_late(self, asked_at_s: float) -> None:
        for rank, watch in self._lookout.watches.items():
            if rank in self._failures or self._arrived(rank):
                continue
            if self.phase is Phase.CONFIG:
                if asked_at_s - self._started_at_s > self._limits.start_timeout_s:
                    what = "did not agree on the configuration" if watch.heard else "did not arrive"
                    text = f"{what} within {self._limits.start_timeout_s:g} s; {NO_ARRIVAL_HINT}"
                    self._failures[rank] = timed_out(rank, self.phase, text)
            elif self.phase in _BOUNDED_WORK and not watch.suspected:  # who is silent cannot tell of its progress
                idle_s = asked_at_s - max(watch.moved_at_s, self._phase_at_s)
                if idle_s > self._limits.timeout_s:
                    text = f"late in phase {self.phase}: alive, but without progress for {idle_s:.1f} s"
                    self._failures[rank] = timed_out(rank, self.phase, f"{text}; {watch.last_progress}")

    def _go_on(self, now_s: float) -> list[Effect]:
        """Publishes FINAL once there is a failure and no other rank can be expected to have a better one to tell."""
        if not self.choosing:
            return []
        if self._window_began_at_s is None:
            self._window_began_at_s = now_s
        passed_s = now_s - self._window_began_at_s
        ranks = range(self._world_size)
        waiting_for = [rank for rank in ranks if rank not in self._failures and not self._arrived(rank)]
        if waiting_for and passed_s < self._limits.window_s:
            return []
        if all(failure.kind in FOLLOWING_KINDS for failure in self._failures.values()):
            unheard = [rank for rank in waiting_for if self._unheard_since(rank, self._window_began_at_s)]
            self._find_dead(unheard)
            if set(unheard) - self._failures.keys() and passed_s < 3 * self._limits.heartbeat_s:
                return []
        return self._publish(self._verdict("final", failure=choose_cause(self._failures)))

    def _unheard_since(self, rank: int, since_s: float) -> bool:
        watch = self._lookout.watches[rank]  # a beat that was seen together with the failure is older than it
        return rank != LEADER and watch.heard and watch.beat_at_s <= since_s

    def _find_dead(self, unheard: list[int]) -> None:
        """What follows from elsewhere is no root cause where a rank has died: its launcher stops all others at once,
        and their own collectives fail, long before the limit of silence. A rank that lives beats soon."""
        for rank in unheard:
            watch = self._lookout.watches[rank]
            silent_s = self._looked_at_s - watch.beat_at_s
            if silent_s > MISSED_BEATS * self._limits.heartbeat_s:
                self._failures[rank] = died_before_the_others_followed(rank, self.phase, silent_s, watch.progress)

    # -- verdicts

    def _collect_records(self) -> Collect:
        ranks = range(self._world_size)
        self._expected = tuple(record_key(self.phase, self._attempt, rank) for rank in ranks)
        return Collect(self._expected)

    def _verdict(
        self,
        action: Literal["go", "retry", "final"],
        *,
        failure: Failure | None = None,
        counts: Mapping[str, Mapping[str, int]] | None = None,
        listed: tuple[JSON, ...] | None = None,
    ) -> Verdict:
        return Verdict(self._sequence, self.phase, action, counts or {}, listed, failure)

    def _publish(self, entry: Entry) -> list[Effect]:
        try:
            encode_entry(entry)
        except MessageError as error:
            record = FailureRecord(AgreementError.__name__, f"no verdict on {self.phase}: {error}", LEADER, self.phase)
            entry = self._verdict("final", failure=Failure("error", record))
        self._step = "publishing"
        return [Publish(entry)]

    def _decide(self, records: Sequence[Record], now_s: float) -> list[Effect]:
        wanting = [rank for rank, record in enumerate(records) if record.outcome == "retry"]
        if wanting:
            causes = {rank: self._retry_cause(rank, records[rank]) for rank in wanting}
            if self.phase is Phase.CATALOG and self._attempt == 0:
                return self._publish(self._verdict("retry", failure=choose_cause(causes)))
            self._failures |= causes
            return self._go_on(now_s)
        by_digest: dict[str, list[int]] = {}
        for rank, record in enumerate(records):
            by_digest.setdefault(record.digest, []).append(rank)
        if len(by_digest) > 1:
            self._groups = sorted(by_digest.values(), key=lambda ranks: (-len(ranks), ranks[0]))
            lowest_other = min(ranks[0] for ranks in self._groups[1:])
            return self._publish(BodyRequest(self._sequence, self.phase, (self._groups[0][0], lowest_other)))
        counts: dict[str, dict[str, int]] = {}
        for record in records:
            for key, value in record.counted.items():
                per_key = counts.setdefault(key, {})
                per_key[value] = per_key.get(value, 0) + 1
        listed = tuple(record.listed for record in records)
        return self._publish(
            self._verdict("go", counts=counts, listed=None if all(item is None for item in listed) else listed)
        )

    def _retry_cause(self, rank: int, record: Record) -> Failure:
        known = record.failure or FailureRecord("LoaderError", "asked to repeat the phase", rank, self.phase)
        return Failure("error", known)

    # -- disagreements

    def _name_difference(self, values: Sequence[bytes]) -> list[Effect]:
        """Both bodies are there: names the first difference, or asks both ranks for one level of detail more."""
        assert self._request is not None
        first, second = self._request.ranks
        bodies: list[JSON] = []
        for rank, data in zip(self._request.ranks, values, strict=True):
            try:
                body, problem = decode_body(data)
            except MessageError as error:
                body, problem = None, str(error)
            if problem is not None:
                return self._disagree(f"their digests differ; rank {rank} cannot say more: {problem}")
            bodies.append(body)
        try:
            if self._finer is not None:
                return self._disagree(self._finer.describe(bodies[0], bodies[1]))
            describe = self._describe.get(self.phase)
            who = (f"rank {first}", f"rank {second}")
            found = "their digests differ" if describe is None else describe(bodies[0], bodies[1], who)
        except Exception as error:  # noqa: BLE001 - the bodies are foreign; whatever they break must not stop the FINAL
            return self._disagree(f"their digests differ; comparing them failed: {type(error).__name__}: {error}")
        if isinstance(found, Detail):
            self._finer = found
            return self._publish(BodyRequest(self._sequence, self.phase, (first, second), found.key))
        return self._disagree(found)

    def _disagree(self, difference: str) -> list[Effect]:
        assert self._request is not None
        first, second = self._request.ranks
        text = f"ranks {first} and {second} differ in {self.phase}: {difference}{self._who_else(first, second)}"
        record = FailureRecord(AgreementError.__name__, text, second, self.phase)
        return self._publish(self._verdict("final", failure=Failure("disagreement", record)))

    def _who_else(self, first: int, second: int) -> str:
        """Which other ranks are like these two; nothing where there are no others."""
        parts, left = [], self._world_size - 2
        for rank in (first, second):
            alike = [other for other in next(ranks for ranks in self._groups if rank in ranks) if other != rank]
            left -= len(alike)
            if alike:
                parts.append(f"{_named(alike)} {'agrees' if len(alike) == 1 else 'agree'} with rank {rank}")
        if left:
            parts.append(f"{left} with neither")
        return f" ({', '.join(parts)})" if parts else ""


def _named(ranks: Sequence[int]) -> str:
    """Ranks for people: "rank 3", "ranks 1, 2 and 5", and how many where they are many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_NAMED:
        return f"{len(ranks)} others"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
