"""One exception class a cause, each with the exit code that the command line ends with.

Every error names what happened, where (rank, phase, path, tensor, errno) and what to do. Errors cross ranks as
`FailureRecord`s (plain data, JSON), never as pickles.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import ClassVar

EXIT_OK = 0
EXIT_UNEXPECTED = 1
EXIT_USAGE = 2
EXIT_CHECKPOINT = 3
EXIT_AGREEMENT = 4
EXIT_READ = 5
EXIT_MEMORY = 6
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """What one rank tells the others, and a machine, about a failure. `error` is the class name of the root cause."""

    error: str
    message: str
    rank: int | None = None
    phase: str | None = None
    path: str | None = None
    tensor: str | None = None
    errno: int | None = None

    def as_dict(self) -> dict[str, str | int | None]:
        return asdict(self)


class LoaderError(Exception):
    """Base of all errors that the loader raises on purpose.

    `rank` is the group rank where it happened (None: not known yet, or only one rank), `phase` the phase of the load,
    `path` the file, `tensor` the tensor's name, `errno` the operating system's number where there is one.
    """

    exit_code: ClassVar[int] = EXIT_UNEXPECTED

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        phase: str | None = None,
        path: str | None = None,
        tensor: str | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.phase = phase
        self.path = path
        self.tensor = tensor
        self.errno = errno

    def __str__(self) -> str:
        return self.message

    def record(self) -> FailureRecord:
        """The failure as plain data, as it is printed and sent to other ranks."""
        return FailureRecord(
            type(self).__name__, self.message, self.rank, self.phase, self.path, self.tensor, self.errno
        )


class ConfigError(LoaderError):
    """The configuration or an argument is wrong; nothing was started."""

    exit_code = EXIT_USAGE


class CheckpointError(LoaderError):
    """The checkpoint is missing, malformed, or changed under the reader."""

    exit_code = EXIT_CHECKPOINT


class AgreementError(LoaderError):
    """The ranks differ in configuration, checkpoint or plan; the message names the first difference."""

    exit_code = EXIT_AGREEMENT


class ReadError(LoaderError):
    """A file could not be read although it is the file that was planned."""

    exit_code = EXIT_READ


class EndOfFileError(ReadError, EOFError):
    """A file ended before the planned range did."""


class DestinationError(LoaderError, ValueError):
    """A caller's tensor cannot take what it should be filled with; nothing was written to it."""

    exit_code = EXIT_USAGE


class MemoryLimitError(LoaderError):
    """Memory that was asked for, or pinning that was required, cannot be had."""

    exit_code = EXIT_MEMORY


class StateError(LoaderError):
    """A method was called at a time when it has no meaning (twice, after closing, out of order)."""


class LoadCancelledError(LoaderError):
    """The load was cancelled or interrupted on some rank."""

    exit_code = EXIT_INTERRUPTED


class RankFailure(LoaderError):  # noqa: N818 - the contract's name
    """Another rank failed: `rank` is that one, `__cause__` tells why.

    None on a leading rank that has lost the place where ranks meet: then all others are out of its reach.
    """

    exit_code = EXIT_AGREEMENT

    def __init__(self, cause: FailureRecord) -> None:
        where = f" in phase {cause.phase}" if cause.phase else ""
        who = "all other ranks were lost" if cause.rank is None else f"rank {cause.rank} failed"
        super().__init__(
            f"{who}{where}: {cause.error}: {cause.message}",
            rank=cause.rank,
            phase=cause.phase,
            path=cause.path,
            tensor=cause.tensor,
            errno=cause.errno,
        )
        self.cause_record = cause
        self.__cause__ = error_from_record(cause)

    def record(self) -> FailureRecord:
        """The root cause's record: its class, message and rank, not this exception's."""
        return self.cause_record


_BY_NAME: dict[str, type[LoaderError]] = {
    cls.__name__: cls
    for cls in (
        ConfigError,
        CheckpointError,
        AgreementError,
        ReadError,
        EndOfFileError,
        DestinationError,
        MemoryLimitError,
        StateError,
        LoadCancelledError,
    )
}


def error_from_record(record: FailureRecord) -> LoaderError:
    """The error that a record describes; a class that is not the loader's own becomes a LoaderError naming it."""
    cls = _BY_NAME.get(record.error)
    message = record.message if cls is not None else f"{record.error}: {record.message}"
    return (cls or LoaderError)(
        message,
        rank=record.rank,
        phase=record.phase,
        path=record.path,
        tensor=record.tensor,
        errno=record.errno,
    )


def text_of(error: BaseException) -> str:
    """What an exception says, or its class's name. Classes of the caller's own may fail even at that."""
    try:
        return str(error) or type(error).__name__
    except Exception:  # noqa: BLE001 - whatever it is, it must not stop the news of the failure
        return f"{type(error).__name__}, which cannot be put into words"


def record_of(error: BaseException, *, rank: int | None = None, phase: str | None = None) -> FailureRecord:
    """A record for any exception; `rank` and `phase` fill what the error itself does not say. Never raises.

    Exceptions may be of the caller's own making and hold anything: only texts and numbers get into the record.
    """
    name = type(error).__name__
    if isinstance(error, LoaderError):
        try:
            own = error.record()
        except Exception:  # noqa: BLE001 - a subclass that does not call LoaderError's __init__
            return FailureRecord(name, text_of(error), rank, phase)
        return FailureRecord(
            own.error,
            str(own.message) or text_of(error),
            rank if own.rank is None else own.rank,
            phase if own.phase is None else own.phase,
            _text(own.path),
            _text(own.tensor),
            _number(own.errno),
        )
    errno = _number(error.errno) if isinstance(error, OSError) else None
    path = _text(error.filename) if isinstance(error, OSError) else None
    return FailureRecord(name, text_of(error), rank, phase, path, None, errno)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return os.fsdecode(value) if isinstance(value, bytes | os.PathLike) else str(value)
