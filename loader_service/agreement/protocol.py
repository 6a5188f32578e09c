"""The vocabulary of the state machines: time limits, what comes in, what goes out, who is silent, what is the cause.

`leader.Leader` and `member.Member` are pure: they get what arrived and the time, and return effects. They know no
thread, no loop and no torch; a carrier does what the effects say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from loader_service.agreement.messages import Entry, Failure, Status
from loader_service.errors import FailureRecord

HEARTBEAT_S = 1.0
LOOKS_A_BEAT = 2  # of the leader at all statuses: a rank's silence is then known half a heartbeat after it began
SUSPECT_S = 5.0
WAITING_S, WAITING_AGAIN_S = 10.0, 60.0  # when an operator hears who has not come to the first meeting
CHOICE_WINDOW_S = 0.75  # within the second that an explicit failure may take to reach everyone

LEADER = 0
SAME_VERSION_HINT = "do all ranks run the same version of the loader?"
STORE_GONE = "the process that serves it has ended, or cannot be reached from here"
NO_ARRIVAL_HINT = "start it, or see that it can reach the others (GLOO_SOCKET_IFNAME, MASTER_ADDR, firewall)"


class AgreementSettings(Protocol):
    """The part of the configuration that this package needs; `config.schema.AgreementConfig` has it."""

    @property
    def timeout_s(self) -> float: ...

    @property
    def start_timeout_s(self) -> float: ...

    @property
    def grace_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits of one session.

    `timeout_s` bounds silence, `start_timeout_s` the first meeting, `grace_s` how long the leader waits for BYEs.
    `heartbeat_s`, `suspect_s` and `window_s` follow; with a small `timeout_s` beats and suspicion come sooner.
    """

    timeout_s: float
    start_timeout_s: float
    grace_s: float
    heartbeat_s: float
    suspect_s: float
    window_s: float = CHOICE_WINDOW_S

    @classmethod
    def of(cls, settings: AgreementSettings) -> Limits:
        return cls(
            timeout_s=settings.timeout_s,
            start_timeout_s=settings.start_timeout_s,
            grace_s=settings.grace_s,
            heartbeat_s=min(HEARTBEAT_S, settings.timeout_s / 5),
            suspect_s=min(SUSPECT_S, settings.timeout_s / 2),
        )


# -- what comes in ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogEntry:
    """The entry that stands at `sequence` of the log: read there, or what a compare-and-set found or put there."""

    sequence: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Collected:
    """The values of all keys of one `Collect`, in its order."""

    keys: tuple[str, ...]
    values: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Statuses:
    """Statuses by rank (empty bytes: none yet). `asked_at_s` is the time when they were asked for: they may be newer,
    so silence that is counted up to then is never overstated by an answer that took long."""

    by_rank: dict[int, bytes]
    asked_at_s: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The carrier has failed for good: no message goes out or comes in any more.

    `reason` is what all ranks say that lose it in one way, whether connections break or stay silent; `detail` what only
    this one sees; `met`: it has worked once.
    `own` is this rank's failure where it is the only one in trouble. `may_hear`: others may still be told.
    """

    reason: str = STORE_GONE
    detail: str = ""
    met: bool = True
    own: Failure | None = None
    may_hear: bool = False


Incoming: TypeAlias = LogEntry | Collected | Statuses | Lost


# -- what goes out ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Post:
    """Write this rank's own message."""

    key: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Publish:
    """Append to the log by compare-and-set; what stands there afterwards comes back as `LogEntry`."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Collect:
    """The leader wants these messages, once all are there. Supersedes the previous wish."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Urge:
    """Send the status now and wake the leader: it carries a FAIL."""


@dataclass(frozen=True, slots=True)
class Warn:
    """Say this to the operator."""

    text: str


Effect: TypeAlias = Post | Publish | Collect | Urge | Warn


# -- who is silent ----------------------------------------------------------------------------------------------------


MISSED_BEATS = 2.25  # two, and what an answer may take


class Watch:
    """What is known of one rank's life: its last beat, its last progress, and since when neither changed."""

    def __init__(self, now_s: float) -> None:
        self.heard = False
        self.progress = ""
        self.done = (0, 0)
        self.at = (-1, 0)
        self.suspected = False
        self._beat = -1
        self._moved = -1
        self.beat_at_s = now_s
        self.moved_at_s = now_s

    def observe(self, status: Status, now_s: float) -> None:
        if status.beat != self._beat:
            self.heard, self._beat, self.beat_at_s, self.suspected = True, status.beat, now_s, False
        if (status.moved, status.at) != (self._moved, self.at):
            self._moved, self.at, self.moved_at_s = status.moved, status.at, now_s
        self.progress, self.done = status.progress, status.done

    def forgive(self, unseen_s: float) -> None:
        """This process did not look for so long (it was stopped), or the store did not answer (it was): that time
        counts as nobody's silence."""
        self.beat_at_s += unseen_s
        self.moved_at_s += unseen_s

    @property
    def last_progress(self) -> str:
        return last_progress(self.progress)


class Lookout:
    """Watches over a set of ranks, and over the gaps in its own looking."""

    def __init__(self, ranks: Iterable[int], limits: Limits, now_s: float) -> None:
        self.watches = {rank: Watch(now_s) for rank in ranks}
        self._limits = limits
        self._looked_at_s = now_s
        self._gap = (0.0, now_s)  # for how long it did not look, where that was too long, and when it looked again

    def look(self, statuses: dict[int, Status], asked_at_s: float, now_s: float) -> list[Warn]:
        """Takes in what the ranks say of themselves. Returns a warning for each rank that has become suspect."""
        # Several answers that were held up come at one time, which counts once.
        unseen_s = max(asked_at_s - self._looked_at_s, now_s - max(asked_at_s, self._looked_at_s))
        if unseen_s > self._limits.suspect_s:
            for watch in self.watches.values():
                watch.forgive(unseen_s)
        if unseen_s > self._limits.timeout_s:
            self._gap = (unseen_s, now_s)
        self._looked_at_s = now_s
        warnings = []
        for rank, watch in self.watches.items():
            if rank in statuses:
                watch.observe(statuses[rank], now_s)
            silent_s = asked_at_s - watch.beat_at_s
            if watch.heard and not watch.suspected and silent_s > self._limits.suspect_s:
                watch.suspected = True
                warnings.append(Warn(f"rank {rank} is suspect: silent for {silent_s:.1f} s; {watch.last_progress}"))
        return warnings

    def silent(self, asked_at_s: float) -> list[int]:
        """Ranks that were heard once and then not for `timeout_s`."""
        return [
            rank
            for rank, watch in self.watches.items()
            if watch.heard and asked_at_s - watch.beat_at_s > self._limits.timeout_s
        ]

    def own_silence_s(self, rank: int) -> float:
        """For how long this process itself stood still, if `rank` was gone when it went on; else 0."""
        gap_s, looked_again_at_s = self._gap
        soon_s = looked_again_at_s + MISSED_BEATS * self._limits.heartbeat_s
        return gap_s if self.watches[rank].beat_at_s <= soon_s else 0.0


# -- what is the cause ------------------------------------------------------------------------------------------------

_PRECEDENCE = {"error": 0, "disagreement": 0, "died": 1, "timeout": 2, "consequence": 3, "cancelled": 4}


def last_progress(progress: str) -> str:
    """How the last word of a silent rank is told."""
    return f"last progress: {progress}" if progress else "no progress reported when last heard"


def choose_cause(failures: dict[int, Failure]) -> Failure:
    """The root cause before its consequences: own error, then died, timed out, a consequence of something elsewhere,
    cancelled; of equals the lowest rank."""
    rank = min(failures, key=lambda rank: (_PRECEDENCE[failures[rank].kind], rank))
    return failures[rank]


def died(rank: int, phase: str, silent_s: float, progress: str) -> Failure:
    """A rank that was heard and then was silent for too long."""
    text = f"no sign of life for {silent_s:.1f} s; {last_progress(progress)}"
    return Failure("died", FailureRecord("LostRank", text, rank, phase))


def process_ended(rank: int, phase: str, progress: str) -> Failure:
    """A rank whose process was seen to end without a word. Nothing measured: several ranks may see it."""
    return Failure("died", FailureRecord("LostRank", f"its process has ended; {last_progress(progress)}", rank, phase))


def out_of_reach(lost: Lost, phase: str, *, rank: int, host_rank: int | None, where: str) -> Failure:
    """What `rank` knows that has lost the place where ranks meet. The same text on every rank, so nothing measured."""
    if not lost.met:
        text = f"could not reach the store ({where}): {lost.reason}"
        return Failure("died", FailureRecord("LostStore", text, host_rank, phase))
    with_it = "every other rank" if rank == LEADER else f"rank {LEADER}"
    text = f"lost the store ({where}) and {with_it} with it: {lost.reason}"
    return Failure("died", FailureRecord("LostStore", text, None if rank == LEADER else LEADER, phase))


def died_before_the_others_followed(rank: int, phase: str, silent_s: float, progress: str) -> Failure:
    """A rank that has missed beats, found when the others were cancelled: a launcher stops them after a death."""
    silence = f"no sign of life for {silent_s:.1f} s while other ranks were stopped or lost touch"
    text = f"{silence}; {last_progress(progress)}"
    return Failure("died", FailureRecord("LostRank", text, rank, phase))


def timed_out(rank: int, phase: str, text: str) -> Failure:
    """A rank that did not come, or that lives and makes no progress."""
    return Failure("timeout", FailureRecord("LateRank", text, rank, phase))
