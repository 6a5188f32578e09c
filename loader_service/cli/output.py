"""What the command line writes, and where: one document or a table on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import cast

from loader_service import logs
from loader_service.errors import ConfigError, FailureRecord, LoaderError

PROGRAM = "loader-service"

log = logs.logger("loader_service.cli")


class Stderr:
    """How this process writes to stderr, whatever it writes there: one for each command line."""

    json = False
    """One JSON object a line, for whoever collects logs."""


def prepare_streams() -> None:
    """Makes stdout and stderr fit for use whatever the caller did with them. Called once, before anything is opened.

    A closed one becomes the null device, under its own number: else the next file that is opened would get that number,
    and what libraries write there. Names that the encoding of stdout lacks are escaped instead of ending the command.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 - lives as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def print_document(document: object) -> None:
    """Writes one JSON document to stdout. ASCII only, so that no locale and no odd file name can break it."""
    print_text(json.dumps(document))


def print_text(text: str) -> None:
    """Writes to stdout and flushes. A reader that has gone away (`| head`) wants no more, and is no failure.

    Raises LoaderError where stdout takes no more (a full disk); what is printed after that goes nowhere.
    """
    with writing_to_stdout():
        print(text + "\n", end="", flush=True)


@contextlib.contextmanager
def writing_to_stdout() -> Iterator[None]:
    """Deals with a stdout that fails: see `print_text`."""
    try:
        yield
    except BrokenPipeError:
        drop_stdout()
    except OSError as error:
        drop_stdout()
        raise LoaderError(f"stdout cannot be written: {error.strerror}", errno=error.errno) from error


def drop_stdout() -> None:
    """Sends what may still lie in stdout's buffer to nowhere: the interpreter would complain about it at its end."""
    with contextlib.suppress(OSError, ValueError):  # stdout may be closed, or not be a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def print_line(text: str) -> None:
    """Writes one line to stderr, whatever the text holds. Where stderr is gone there is nobody to tell."""
    _print_to_stderr([line_of(" | ".join(_lines(text)))])


def line_of(
    text: str,
    level: int = logging.INFO,
    fields: Mapping[str, object] = MappingProxyType({}),
    *,
    error: BaseException | None = None,
) -> str:
    """A line for stderr: the text, or with `fields` and `error` a JSON object."""
    if not Stderr.json:
        return text
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    extra = logs.fields() | dict(fields)
    record = log.logger.makeRecord(log.logger.name, level, __file__, 0, text, (), exc_info, extra=extra)
    return logs.JsonFormatter().format(record)


def _lines(text: str) -> list[str]:
    return [line for part in text.splitlines() if (line := part.strip())]


def _print_to_stderr(lines: Sequence[str]) -> None:
    with contextlib.suppress(OSError, ValueError):
        # One write: ranks share a terminal.
        print("".join(f"{line}\n" for line in lines), end="", file=sys.stderr, flush=True)


def print_failure(record: FailureRecord, *, as_json: bool, several_ranks: bool = False) -> None:
    """The failure on stderr and, with `as_json`, as one record on stdout. On stderr it is one line; of a configuration,
    a line for each of its problems."""
    if as_json:
        print_document(record.as_dict())
    text = failure_text(record, several_ranks=several_ranks)
    if Stderr.json:
        known = {name: value for name, value in record.as_dict().items() if name != "message" and value is not None}
        _print_to_stderr([line_of(text, logging.ERROR, known)])
        return
    text = f"{PROGRAM}: {text}"
    if record.error == ConfigError.__name__:
        _print_to_stderr(_lines(text))
    else:
        print_line(text)


def failure_text(record: FailureRecord, *, several_ranks: bool) -> str:
    """The failure for a person: what happened and, where there are several ranks, on which one and in which phase."""
    if not several_ranks or record.rank is None:
        return record.message
    phase = f" in phase {record.phase}" if record.phase else ""
    return f"rank {record.rank} failed{phase}: {record.error}: {record.message}"


def print_traceback(error: BaseException) -> None:
    """The whole traceback, for `--debug`."""
    if Stderr.json:
        _print_to_stderr([line_of("the traceback", logging.ERROR, error=error)])
        return
    with contextlib.suppress(OSError, ValueError):
        traceback.print_exception(error, file=sys.stderr)


class _StderrHandler(logging.Handler):
    """Looks stderr up at each record: a progress bar replaces it while it is shown, to keep lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record) + "\n", end="", file=sys.stderr, flush=True)  # one write: ranks share a terminal
        except Exception:  # noqa: BLE001 - logging's own way of dealing with what goes wrong in a handler
            self.handleError(record)


@contextlib.contextmanager
def logging_to_stderr(level: str, rank: int | None) -> Iterator[None]:
    """Sends the package's log from `level` on to stderr while a command runs, with the rank where there are several."""
    logger = logging.getLogger("loader_service")
    handler = _StderrHandler()
    where = "" if rank is None else f"[rank {rank}] "
    text = logging.Formatter(f"%(asctime)s {where}%(levelname)s %(name)s: %(message)s")
    handler.setFormatter(logs.JsonFormatter() if Stderr.json else text)
    before = (logger.level, logger.propagate)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def said_by_ranks(documents: Sequence[Mapping[str, object]], key: str) -> Iterator[str]:
    """What reports say under `key`, each sentence once, behind a colon; and who says it, if not all do."""
    ranks_of: dict[str, list[str]] = {}
    for document in documents:
        for text in cast("Sequence[str]", document[key]):
            ranks_of.setdefault(text, []).append(str(document["rank"]))
    for text, ranks in ranks_of.items():
        whose = "" if len(ranks) == len(documents) else f" of rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        yield f"{whose}: {text}"
