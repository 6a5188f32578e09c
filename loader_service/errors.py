"""One exception class a cause, each with the exit code that the command line ends with.

Every error names what happened, where (rank, phase, path, tensor, errno) and what to do. Errors cross ranks as
`FailureRecord`s (plain data, JSON), never as pickles.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from errno import EMFILE, ENFILE
from typing import ClassVar, TypeVar, cast

T = TypeVar("T")

_MAY_WAIT = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR

MAX_TEXT_CHARS = 64 << 10  # of what an exception says; what travels to other ranks is cut further

OUT_OF_FILES = {
    EMFILE: "raise the limit of open files (ulimit -n)",
    ENFILE: "the whole machine is out of file handles (fs.file-max)",
}
"""What to do where the system opens nothing more, by errno."""

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
        """The same as plain data, as the command line prints it."""
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


class AttachError(LoaderError):
    """No resident service answers where a worker was told to attach to one, or it has ended."""

    exit_code = EXIT_READ


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
        AttachError,
        StateError,
        LoadCancelledError,
    )
}
_BY_NAME[MemoryError.__name__] = MemoryLimitError


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


def exit_code_of(error: BaseException) -> int:
    """The exit code of a process that ends with this error: memory that Python itself cannot have is memory, too."""
    if isinstance(error, LoaderError):
        return error.exit_code
    return EXIT_MEMORY if isinstance(error, MemoryError) else EXIT_UNEXPECTED


def text_of(error: BaseException) -> str:
    """What an exception says, or its class's name, as a plain text of bounded length. Never raises.

    Classes of the caller's own may fail even at that.
    """
    said = _got(lambda: _plain(str(error)))
    if said is None:
        return f"{name_of(error)}, which cannot be put into words"
    return said or name_of(error)


def name_of(error: BaseException) -> str:
    """The name of an exception's class. Never raises."""
    return _got(lambda: _plain(type(error).__name__)) or BaseException.__name__


def clear_frames(error: BaseException) -> None:
    """Empties the frames that an error, and what it came of, was raised through: whoever keeps the error would else
    keep what they refer to. Those that still run stay, and so do coroutines, which may only wait. Never raises."""
    seen: set[int] = set()
    following: list[BaseException | None] = [error]
    while following:
        one = following.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        following += [one.__cause__, one.__context__]
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if not frame.f_code.co_flags & _MAY_WAIT:
                with contextlib.suppress(RuntimeError):
                    frame.clear()


def record_of(error: BaseException, *, rank: int | None = None, phase: str | None = None) -> FailureRecord:
    """A record for any exception; `rank` and `phase` fill what the error itself does not say. Never raises.

    Exceptions may be of the caller's own making and hold anything: only plain texts of bounded length and numbers of 64
    bits get into the record, and what is none of these is left out.
    """
    name, said = name_of(error), text_of(error)
    if issubclass(type(error), LoaderError):
        own = _got(lambda: cast(LoaderError, error).record())  # not there in a class that skips LoaderError's __init__
        own_rank, own_phase = _number_at(own, "rank"), _text_at(own, "phase")
        return FailureRecord(
            _text_at(own, "error") or name,
            _text_at(own, "message") or said,
            rank if own_rank is None else own_rank,
            phase if own_phase is None else own_phase,
            _text_at(own, "path"),
            _text_at(own, "tensor"),
            _number_at(own, "errno"),
        )
    if issubclass(type(error), OSError):
        code = _number_at(error, "errno")
        if code in OUT_OF_FILES:
            said = _plain(f"{said}: {OUT_OF_FILES[code]}")
        return FailureRecord(name, said, rank, phase, _text_at(error, "filename"), None, code)
    return FailureRecord(name, said, rank, phase)


@contextlib.contextmanager
def in_phase(phase: str) -> Iterator[None]:
    """Work of this phase: an error of the loader's that says none gets it."""
    try:
        yield
    except LoaderError as error:
        error.phase = error.phase or phase
        raise


def _got(get: Callable[[], T]) -> T | None:
    try:
        return get()
    # Code of another's exception runs here, and may raise SystemExit or KeyboardInterrupt as well: on the service's
    # loop either would end it, and whatever it is, it must not stop the news of the failure.
    except BaseException:  # noqa: BLE001
        return None


def _text_at(holder: object, name: str) -> str | None:
    """An attribute as a plain text; None where there is none, or none can be made of it."""

    def get() -> str | None:
        value = getattr(holder, name)
        if value is None or isinstance(value, str):
            return None if value is None else _plain(value)
        return _plain(os.fsdecode(value) if isinstance(value, bytes | os.PathLike) else str(value))

    return _got(get)


def _number_at(holder: object, name: str) -> int | None:
    """An attribute that is a number of 64 bits, as a plain one. More digits than that need not even have a text."""

    def get() -> int | None:
        value = getattr(holder, name)
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        plain = int.__add__(value, 0)
        return plain if -(1 << 63) <= plain < 1 << 63 else None

    return _got(get)


def _plain(text: str) -> str:
    """The text as a `str` itself, whatever its class says that it is, cut to `MAX_TEXT_CHARS`."""
    plain = str.__str__(text)
    return plain if len(plain) <= MAX_TEXT_CHARS else plain[: MAX_TEXT_CHARS - 3] + "..."
