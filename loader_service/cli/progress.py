"""Progress of a load, on stderr: a bar where a person watches, else a line now and then."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.progress import ProgressColumn as RichColumn
from rich.text import Text

from loader_service.config.sizes import format_size

log = logging.getLogger("loader_service.progress")

LINE_EVERY_S = 5.0
_GIB = 1 << 30


class LoadProgress(Protocol):
    """How a load's consumer tells of it. `tick` is called often, also when nothing comes."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def begin(self, total_bytes: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def tick(self) -> None: ...


def progress_of(load: str, *, shown: bool) -> LoadProgress:
    """A bar if stderr is a terminal, else lines; nothing unless `shown` (on one rank of all)."""
    if not shown:
        return _NoProgress()
    return _BarProgress(load) if sys.stderr.isatty() else _LineProgress(load)


class _NoProgress:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing was shown."""

    def begin(self, total_bytes: int) -> None:
        """Nothing is shown."""

    def advance(self, nbytes: int) -> None:
        """Nothing is shown."""

    def tick(self) -> None:
        """Nothing is shown."""


class _LineProgress(_NoProgress):
    """A line at most every few seconds, so that a fast load says nothing and a slow one is not silent."""

    def __init__(self, load: str) -> None:
        self._load = load
        self._total_bytes = 0
        self._done_bytes = 0
        self._tensors = 0
        self._started_s = self._said_s = time.monotonic()

    def begin(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._started_s = time.monotonic()

    def advance(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        self._tensors += 1

    def tick(self) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s < LINE_EVERY_S:
            return
        self._said_s = now_s
        rate = self._done_bytes / _GIB / max(now_s - self._started_s, 1e-9)
        log.info(
            "load '%s': %s of %s in %d tensors, %.2f GiB/s",
            self._load,
            format_size(self._done_bytes),
            format_size(self._total_bytes),
            self._tensors,
            rate,
        )


class _BarProgress:
    """A live bar. Log lines that come meanwhile are printed above it."""

    def __init__(self, load: str) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            _RateColumn(),
            TextColumn("{task.fields[tensors]} tensors"),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            redirect_stdout=False,
        )
        self._task = self._progress.add_task(f"load {load}", total=None, tensors=0)
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

    def advance(self, nbytes: int) -> None:
        self._tensors += 1
        self._progress.update(self._task, advance=nbytes, tensors=self._tensors)

    def tick(self) -> None:
        """The bar refreshes itself."""


class _RateColumn(RichColumn):
    """GiB/s, as all the loader's numbers are given."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed / _GIB:.2f} GiB/s")
