"""Progress of a load, or of a manifest, on stderr: a bar where a person watches, else a line now and then."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.progress import ProgressColumn as RichColumn
from rich.text import Text

from loader_service.sizes import format_rate, format_size

log = logging.getLogger("loader_service.progress")

LINE_EVERY_S = 5.0


class LoadProgress(Protocol):
    """How a load's consumer tells of it. `tick` is called often, also when nothing comes."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def begin(self, total_bytes: int) -> None: ...

    def rows_of(self, table: str) -> None:
        """From now on rows of a host-resident table are read, until `tensor_done`."""
        ...

    def advance(self, nbytes: int) -> None: ...

    def tensor_done(self) -> None: ...

    def waits_for(self, rank: int | None) -> None:
        """The rank that the node waits for now."""
        ...

    def tick(self) -> None: ...


def progress_of(load: str, *, shown: bool) -> LoadProgress:
    """A bar if stderr is a terminal, else lines; nothing unless `shown` (on one rank of all)."""
    if not shown:
        return _NoProgress()
    return _BarProgress(f"load {load}") if sys.stderr.isatty() else _LineProgress(load)


def hashing_progress() -> LoadProgress:
    """The same, of files that are read to be hashed."""
    return _BarProgress("manifest", counts="") if sys.stderr.isatty() else _HashingLines("")


class _NoProgress:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing was shown."""

    def begin(self, total_bytes: int) -> None:
        """Nothing is shown."""

    def rows_of(self, table: str) -> None:
        """Nothing is shown."""

    def advance(self, nbytes: int) -> None:
        """Nothing is shown."""

    def tensor_done(self) -> None:
        """Nothing is shown."""

    def waits_for(self, rank: int | None) -> None:
        """Nothing is shown."""

    def tick(self) -> None:
        """Nothing is shown."""


class _LineProgress(_NoProgress):
    """A line at most every few seconds, so that a fast load says nothing and a slow one is not silent."""

    def __init__(self, load: str) -> None:
        self._load = load
        self._total_bytes: int | None = None
        self._done_bytes = 0
        self._tensors = 0
        self._table = ""
        self._slowest: int | None = None
        self._started_s = self._said_s = time.monotonic()

    def begin(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._started_s = time.monotonic()

    def rows_of(self, table: str) -> None:
        self._table = table

    def advance(self, nbytes: int) -> None:
        self._done_bytes += nbytes

    def tensor_done(self) -> None:
        self._tensors += 1
        self._table = ""

    def waits_for(self, rank: int | None) -> None:
        self._slowest = rank

    def tick(self) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s < LINE_EVERY_S:
            return
        self._said_s = now_s
        if self._total_bytes is None:
            log.info("load '%s': reading headers, or waiting for other ranks", self._load)
            return
        self._say(
            format_size(self._done_bytes),
            format_size(self._total_bytes),
            format_rate(self._done_bytes / max(now_s - self._started_s, 1e-9)),
        )

    def _say(self, done: str, total: str, rate: str) -> None:
        rows = f"; reading rows of '{self._table}'" if self._table else ""
        more = rows if self._slowest is None else f"{rows}; waiting for rank {self._slowest}"
        log.info("load '%s': %s of %s, %d tensors, %s%s", self._load, done, total, self._tensors, rate, more)


class _HashingLines(_LineProgress):
    """Of files that are read to be hashed: there are bytes, and nothing else to count."""

    def _say(self, done: str, total: str, rate: str) -> None:
        log.info("manifest: %s of %s, %s", done, total, rate)


class _BarProgress:
    """A live bar. Log lines that come meanwhile are printed above it."""

    def __init__(
        self, what: str, *, counts: str = "{task.fields[tensors]} tensors{task.fields[rows]}{task.fields[slowest]}"
    ) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            _DoneColumn(),
            _RateColumn(),
            TextColumn(counts),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            redirect_stdout=False,
        )
        self._task = self._progress.add_task(what, total=None, tensors=0, rows="", slowest="")
        self._tensors = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, total_bytes: int) -> None:
        self._progress.update(self._task, total=total_bytes)

    def rows_of(self, table: str) -> None:
        self._progress.update(self._task, rows=f", rows of {escape(table)}")

    def advance(self, nbytes: int) -> None:
        self._progress.update(self._task, advance=nbytes)

    def tensor_done(self) -> None:
        self._tensors += 1
        self._progress.update(self._task, tensors=self._tensors, rows="")

    def waits_for(self, rank: int | None) -> None:
        self._progress.update(self._task, slowest="" if rank is None else f", waiting for rank {rank}")

    def tick(self) -> None:
        """The bar refreshes itself."""


class _DoneColumn(RichColumn):
    """How much of how much, in the loader's own units."""

    def render(self, task: Task) -> Text:
        of_all = f" of {format_size(int(task.total))}" if task.total is not None else ""
        return Text(f"{format_size(int(task.completed))}{of_all}")


class _RateColumn(RichColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else format_rate(speed))
