"""What ranks tell each other: frozen data, strict JSON, bounded sizes. Never a pickle.

Ranks share a board of keys. A rank writes only its own keys (record, body, status, bye); the log `v/0, v/1, ...` is
written by compare-and-set, so that every rank reads the same entries in the same order. Each message has one key, and
the reader takes the rank from the key, never from the content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, TypeAlias, cast

from loader_service.errors import AgreementError, FailureRecord, LoaderError, RankFailure

JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"

PROTOCOL_VERSION = 3
"""In every message: raised when messages or phases change, so that ranks of mixed versions end with a clear cause. The
FINAL verdict is read whatever its version says: its fields never change, so that every rank can read why it ends."""

MAX_STATUS_BYTES = 128 << 10  # a failure with long texts, each character escaped
MAX_RECORD_BYTES = 128 << 10
MAX_ENTRY_BYTES = 32 << 20  # what 1,000 ranks had to list
MAX_BODY_BYTES = 8 << 20  # compressed, as it travels
MAX_BODY_TEXT_BYTES = 64 << 20  # after decompression: a small body cannot grow without bound
MAX_MESSAGE_CHARS = 4_000
MAX_NAME_CHARS = 1_000
MAX_PROGRESS_CHARS = 200
MAX_DEAD_RANKS = 4096  # of one status

FailureKind = Literal["error", "disagreement", "died", "timeout", "consequence", "cancelled"]
Action = Literal["go", "retry", "final"]
Outcome = Literal["ok", "retry"]
FAILURE_KINDS: tuple[FailureKind, ...] = ("error", "disagreement", "died", "timeout", "consequence", "cancelled")
FOLLOWING_KINDS: frozenset[FailureKind] = frozenset({"consequence", "cancelled"})
"""What follows from something that has happened elsewhere, more likely than not."""
OUTCOMES: tuple[Outcome, ...] = ("ok", "retry")
ACTIONS: tuple[Action, ...] = ("go", "retry", "final")


class MessageError(ValueError):
    """A message is malformed or larger than allowed; the text says which and why."""


class Phase(StrEnum):
    """The phases of every load, always all of them and in this order."""

    CONFIG = "config"
    CATALOG = "catalog"
    PLAN = "plan"
    OPEN = "open"
    READ = "read"
    FINISH = "finish"

    @property
    def position(self) -> int:
        return PHASES.index(self)


PHASES: tuple[Phase, ...] = tuple(Phase)


@dataclass(frozen=True, slots=True)
class Detail:
    """What a `describe` function answers when the first difference lies deeper: both ranks then send
    `body_detail(key)`, and `describe` here gets the two answers."""

    key: str
    describe: Callable[[JSON, JSON], str]


Describe: TypeAlias = Callable[[JSON, JSON, tuple[str, str]], "str | Detail"]
"""The first difference between two ranks' bodies in words; what the ranks are called there comes third."""


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """What a rank brings to a phase's exchange.

    `digest` is compared over the ranks. `outcome` "retry" (catalog only, with `failure`) asks that all ranks do the
    phase once more together. Of `counted` the verdict says how many ranks gave each value of each key; `listed` comes
    back as a list by rank if any rank gave one. `body` is the full text behind the digest and is asked for only if
    digests differ; `body_detail` answers a `Detail`'s key. Both are called on the service's loop.
    """

    digest: str = ""
    outcome: Outcome = "ok"
    failure: FailureRecord | None = None
    counted: Mapping[str, str] = field(default_factory=dict)
    listed: JSON = None
    body: Callable[[], JSON] | None = None
    body_detail: Callable[[str], JSON] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a load ends on every rank. `record.rank` is the rank at fault; None when no single rank can be named."""

    kind: FailureKind
    record: FailureRecord


@dataclass(frozen=True, slots=True)
class Verdict:
    """One entry of the log: what all ranks do next. `sequence` is its place in the log.

    `failure` is the cause of a `final`, or the lowest rank's failure behind a `retry`. `counts` and `listed`: see
    `PhaseRecord`.
    """

    sequence: int
    phase: Phase
    action: Action
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    listed: tuple[JSON, ...] | None = None
    failure: Failure | None = None

    @property
    def final(self) -> bool:
        return self.action == "final"

    @property
    def facts(self) -> list[Mapping[str, object]]:
        """What each rank has listed, by rank, where these are objects."""
        return [cast("Mapping[str, object]", facts) for facts in self.listed or ()]

    @property
    def ends(self) -> bool:
        """True if nothing follows: a FINAL, or the agreement on success."""
        return self.final or (self.phase is Phase.FINISH and self.action == "go")


@dataclass(frozen=True, slots=True)
class BodyRequest:
    """The log entry by which the leader asks two differing ranks for their bodies (or for the detail `key`)."""

    sequence: int
    phase: Phase
    ranks: tuple[int, int]
    key: str | None = None


Entry: TypeAlias = Verdict | BodyRequest


@dataclass(frozen=True, slots=True)
class Record:
    """A `PhaseRecord` as it travels."""

    digest: str
    outcome: Outcome
    failure: FailureRecord | None
    counted: Mapping[str, str]
    listed: JSON


@dataclass(frozen=True, slots=True)
class Status:
    """A rank's heartbeat: `beat` grows while the rank lives, `moved` while it progresses.

    `at` is (phase position, attempt) of the last record it sent, (-1, 0) before the first; `failure` is its FAIL;
    `dead` are the ranks whose process it has seen end without a word; `done` is how many bytes are ready for its
    consumer, and of how many, (0, 0) before that is known.
    """

    beat: int
    moved: int
    progress: str
    at: tuple[int, int]
    failure: Failure | None
    dead: tuple[int, ...] = ()
    done: tuple[int, int] = (0, 0)


def entry_key(sequence: int) -> str:
    """The log's place `sequence`."""
    return f"v/{sequence}"


def record_key(phase: Phase, attempt: int, rank: int) -> str:
    """Where a rank's record of a phase lies; `attempt` counts a phase's repetitions from 0."""
    return f"r/{phase}.{attempt}/{rank}"


def body_key(sequence: int, rank: int) -> str:
    """Where a rank answers the body request at `sequence`."""
    return f"b/{sequence}/{rank}"


def status_key(rank: int) -> str:
    """Where a rank's heartbeat lies."""
    return f"hb/{rank}"


def bye_key(rank: int) -> str:
    """Where a rank says that it reads no more."""
    return f"bye/{rank}"


def bounded(record: FailureRecord) -> FailureRecord:
    """The record with texts cut to what travels: one failure cannot crowd out the verdict that carries it."""

    def cut(text: str | None, limit: int) -> str | None:
        return text if text is None or len(text) <= limit else text[: limit - 3] + "..."

    return replace(
        record,
        error=cut(record.error, MAX_NAME_CHARS) or "",
        message=cut(record.message, MAX_MESSAGE_CHARS) or "",
        phase=cut(record.phase, MAX_NAME_CHARS),
        path=cut(record.path, MAX_NAME_CHARS),
        tensor=cut(record.tensor, MAX_NAME_CHARS),
    )


def error_of(verdict: Verdict) -> LoaderError:
    """The exception that a FINAL verdict means for a rank that is not itself the cause."""
    failure = verdict.failure
    if failure is None:
        return AgreementError("the load ended without a cause", phase=str(verdict.phase))
    record = failure.record
    if failure.kind == "disagreement" or (record.rank is None and failure.kind != "died"):
        return AgreementError(
            record.message,
            rank=record.rank,
            phase=record.phase,
            path=record.path,
            tensor=record.tensor,
            errno=record.errno,
        )
    return RankFailure(record)
