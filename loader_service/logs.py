"""What log records say beside their text: of which load, on which rank of how many, in which phase.

Every module's log comes from `logger`. Its records have `load`, `rank`, `world_size` and `phase` as attributes, None
where they are not known, so that any formatter and any filter can use them. Whoever begins to work on a load says so
once, with `working_on`; tasks and callbacks that come of it inherit that, and threads get it with their work.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from loader_service.errors import LoaderError, name_of

FIELDS: Final = ("load", "rank", "world_size", "phase")


@dataclass(slots=True)
class Subject:
    """What records are about. One object a load: when it comes to another phase, all who work on it say so."""

    load: str | None = None
    rank: int | None = None
    world_size: int | None = None
    phase: str | None = None


_UNKNOWN: Final = Subject()
_subject: ContextVar[Subject] = ContextVar("loader_service.subject", default=_UNKNOWN)


def subject() -> Subject:
    """What is being worked on here."""
    return _subject.get()


def begin(on: Subject) -> None:
    """What comes next on this thread, or in this task, is work on this."""
    _subject.set(on)


@contextlib.contextmanager
def working_on(on: Subject) -> Iterator[None]:
    """Until it is left, this thread or task works on this."""
    token = _subject.set(on)
    try:
        yield
    finally:
        _subject.reset(token)


def fields() -> dict[str, object]:
    """What a record gets from here."""
    on = _subject.get()
    return {name: getattr(on, name) for name in FIELDS}


class _Log(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[object, MutableMapping[str, Any]]:
        kwargs["extra"] = fields() | dict(kwargs.get("extra") or {})
        return msg, kwargs


def logger(name: str) -> _Log:
    """A module's log. What a call gives as `extra` stands above what is known here."""
    return _Log(logging.getLogger(name), {})


_OWN: Final = ("time", "level", "logger", "message")  # what no `extra` replaces
_OF_EVERY_RECORD: Final = frozenset({*vars(logging.makeLogRecord({})), "asctime", "taskName", *_OWN})


class JsonFormatter(logging.Formatter):
    """A record as one JSON object on one line, in ASCII, for whoever collects logs.

    `time` (ISO 8601, UTC), `level`, `logger` and `message`; `load`, `rank`, `world_size` and `phase` where they are
    known; whatever else was given as `extra` under another name; of an exception `error` (its class), `traceback` and,
    if it is the loader's, what it names: `path`, `tensor`, `errno`. Usable for all loggers of a process.
    """

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            found |= {"error": name_of(error), "traceback": self.formatException(record.exc_info)}  # type: ignore[arg-type]
        if isinstance(error, LoaderError):
            found |= _known(error.record().as_dict(), but=found)
        found |= _known(vars(record), but=_OF_EVERY_RECORD)
        return json.dumps(found, default=str)


def _known(values: dict[str, Any], *, but: frozenset[str] | dict[str, object]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and name not in but}
