"""Exceptions of a caller's own making become records that travel, whatever their classes do when they are asked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from errno import EMFILE, ENFILE

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader_service.agreed import as_reported
from loader_service.agreement.codec import decode_status, encode_status
from loader_service.agreement.messages import Phase, Status, bounded
from loader_service.agreement.session import failure_of
from loader_service.errors import (
    MAX_TEXT_CHARS,
    FailureRecord,
    LoadCancelledError,
    LoaderError,
    RankFailure,
    ReadError,
    name_of,
    record_of,
    text_of,
)
from loader_service.scheduler import _translated

RAISED = [ValueError("no"), SystemExit(3), KeyboardInterrupt("no"), asyncio.CancelledError(), GeneratorExit()]
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.none() | st.text()


class NoText(Exception):
    def __init__(self, raised: BaseException) -> None:
        self.raised = raised

    def __str__(self) -> str:
        raise self.raised

    __repr__ = __str__


class NoRecord(ReadError):
    raised: BaseException | None = None

    def record(self) -> FailureRecord:
        if self.raised is not None:
            raise self.raised
        return None  # type: ignore[return-value]


class NoErrno(OSError):
    raised: BaseException = ValueError("no")

    @property
    def errno(self) -> int:  # type: ignore[override]
        raise self.raised

    @property
    def filename(self) -> str:
        raise self.raised


class LiesAboutItsClass(Exception):
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise SystemExit("no")


class NoInit(LoaderError):
    def __init__(self) -> None:
        pass


class Odd:
    """A value without a text."""

    def __str__(self) -> str:
        raise SystemExit("no")

    def __fspath__(self) -> str:
        raise KeyboardInterrupt("no")


class OddText(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise SystemExit("no")

    def __len__(self) -> int:
        raise SystemExit("no")


class OddNumber(int):
    def __repr__(self) -> str:
        raise SystemExit("no")

    def __le__(self, other: object) -> bool:
        raise SystemExit("no")


class OddMeta(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise SystemExit("no")


class NoName(Exception, metaclass=OddMeta):
    pass


def no_record(raised: BaseException | None) -> NoRecord:
    error = NoRecord("why")
    error.raised = raised
    return error


def no_errno(raised: BaseException) -> NoErrno:
    error = NoErrno(2, "why", "where")
    error.raised = raised
    return error


def odd_read_error(value: object) -> ReadError:
    error = ReadError("why")
    for name in ("message", "rank", "phase", "path", "tensor", "errno"):
        setattr(error, name, value)
    return error


ODD: dict[str, Callable[[], BaseException]] = {
    **{f"text, {type(e).__name__}": lambda e=e: NoText(e) for e in RAISED},  # type: ignore[misc]
    **{f"record, {type(e).__name__}": lambda e=e: no_record(e) for e in [None, *RAISED]},  # type: ignore[misc]
    **{f"errno, {type(e).__name__}": lambda e=e: no_errno(e) for e in RAISED},  # type: ignore[misc]
    "odd fields": lambda: odd_read_error(Odd()),
    "odd texts": lambda: odd_read_error(OddText("x")),
    "odd numbers": lambda: odd_read_error(OddNumber(7)),
    "bytes": lambda: odd_read_error(b"\xff"),
    "huge number": lambda: odd_read_error(10**5000),
    "huge errno": lambda: OSError(10**5000, "why", "where"),
    "odd file name": lambda: OSError(2, "why", Odd()),
    "class": lambda: LiesAboutItsClass("why"),
    "no init": NoInit,
    "long": lambda: ValueError("\ud800\0\U0001f600" * MAX_TEXT_CHARS),
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD.keys())
def test_any_exception_has_a_record_that_travels(make: Callable[[], BaseException]) -> None:
    error = make()
    record = record_of(error, rank=3, phase="read")
    for text in (record.error, record.message, record.phase, record.path, record.tensor):
        assert text is None or (type(text) is str and len(text) <= MAX_TEXT_CHARS)
    for number in (record.rank, record.errno):
        assert number is None or type(number) is int
    assert (record.error, record.message) != ("", "")
    assert type(text_of(error)) is type(name_of(error)) is str
    failure = failure_of(as_reported(error), 3, Phase.READ)
    assert decode_status(encode_status(Status(1, 0, "", (4, 0), failure))).failure is not None


def test_a_record_keeps_what_can_be_told_beside_what_cannot() -> None:
    assert record_of(OSError(2, "why", Odd())).errno == 2
    assert record_of(OSError(10**5000, "why", "where")) == FailureRecord(
        "OSError", "OSError, which cannot be put into words", path="where"
    )
    assert record_of(no_record(KeyboardInterrupt()), rank=1, phase="read") == FailureRecord(
        "NoRecord", "why", 1, "read"
    )
    assert record_of(NoName("why")).message == "why"
    assert record_of(odd_read_error(OddNumber(7))).errno == 7
    assert record_of(odd_read_error(OddText("x"))) == FailureRecord("ReadError", "x", None, "x", "x", "x")
    assert type(record_of(odd_read_error(Phase.READ)).phase) is str


@pytest.mark.parametrize(("code", "advice"), [(EMFILE, "ulimit -n"), (ENFILE, "fs.file-max")])
def test_whoever_may_open_nothing_more_is_told_what_to_do(code: int, advice: str) -> None:
    record = record_of(OSError(code, os.strerror(code), "lib.py"))
    assert record.message.startswith(f"[Errno {code}] {os.strerror(code)}: 'lib.py': ")
    assert advice in record.message
    assert (record.path, record.errno) == ("lib.py", code)


@given(st.text(min_size=1), st.none() | INT64, TEXTS, TEXTS, TEXTS, st.none() | INT64)
def test_the_record_of_an_honest_error_is_exact(
    message: str, rank: int | None, phase: str | None, path: str | None, tensor: str | None, errno: int | None
) -> None:
    error = ReadError(message, rank=rank, phase=phase, path=path, tensor=tensor, errno=errno)
    assert record_of(error) == error.record()
    assert record_of(RankFailure(error.record())) == error.record()
    assert record_of(error, rank=9, phase="plan").rank == (9 if rank is None else rank)


@given(st.integers() | st.booleans() | st.floats() | st.text() | st.binary() | st.none() | st.lists(st.integers()))
def test_fields_of_other_types_become_texts_and_numbers(value: object) -> None:
    record = record_of(odd_read_error(value), rank=3, phase="read")
    assert bounded(record).rank is not None
    encode_status(Status(1, 0, "", (4, 0), failure_of(odd_read_error(value), 3, Phase.READ)))


def test_what_ends_a_load_from_outside_is_one_cause_whatever_its_class() -> None:
    class Hidden(BaseException):
        def __str__(self) -> str:
            raise SystemExit("no")

    reported = as_reported(Hidden())
    assert isinstance(reported, LoadCancelledError)
    assert str(reported) == "interrupted by Hidden (Hidden, which cannot be put into words)"


@pytest.mark.parametrize("kind", ["text, SystemExit", "class"])
def test_a_storages_odd_error_is_put_into_the_loaders_words(kind: str) -> None:
    error = ODD[kind]()
    translated = _translated(error, "reading", path="where")
    assert type(translated) is ReadError
    assert translated.message.startswith(f"{type(error).__name__} while reading: ")
    assert translated.__cause__ is error
