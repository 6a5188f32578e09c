"""Progress of a load, or of a manifest, on stderr: a bar where a person watches, else a line now and then."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.progress import ProgressColumn as RichColumn
from rich.table import Column
from rich.text import Text

from loader_service import logs
from loader_service.cli.output import Stderr
from loader_service.sizes import format_rate, format_size

log = logs.logger("loader_service.progress")

LINE_EVERY_S = 10.0
_LAG_EVERY_S = 0.5  # for a bar: ranks can be many
_HEARTBEATS_S = 2.5  # what a rank says of itself is so old at most, while all is well
_MOST_BEHIND = 3

Done = Mapping[int, tuple[int, int]]
"""By rank: how many bytes it has, and of how many."""


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


def progress_of(load: str, *, shown: bool, others: Callable[[], Done] = dict) -> LoadProgress:
    """A bar if stderr is a terminal, else lines; nothing unless `shown` (on one rank of all). `others` is what is known
    of all ranks."""
    if not shown:
        return _NoProgress()
    return _BarProgress(f"load {load}", others) if _watched() else _LineProgress(f"load '{load}'", others)


def hashing_progress() -> LoadProgress:
    """The same, of files that are read to be hashed."""
    return _BarProgress("manifest", tensors=False) if _watched() else _LineProgress("manifest", tensors=False)


def _watched() -> bool:
    return sys.stderr.isatty() and not Stderr.json


def behind(done: Done, seconds: float) -> dict[int, int]:
    """Ranks that are behind, and by how many bytes, the last first: less of what is theirs is done than the rank in the
    middle has done of its own. What may only be the age of what they said, after so many seconds, does not count."""
    shares = {rank: bytes_done / of_all for rank, (bytes_done, of_all) in done.items()}
    if not shares:
        return {}
    middle = statistics.median_high(shares.values())
    found = {rank: round((middle - shares[rank]) * of_all) for rank, (_, of_all) in done.items()}
    old_s = _HEARTBEATS_S / max(seconds, _HEARTBEATS_S)
    late = [rank for rank, lag in found.items() if lag > done[rank][0] * old_s]
    return {rank: found[rank] for rank in sorted(late, key=lambda rank: (-found[rank], rank))}


def behind_text(lags: Mapping[int, int]) -> str:
    """ "behind: rank 3 1.20 GiB, rank 1 200.00 MiB", or nothing."""
    if not lags:
        return ""
    named = [f"rank {rank} {format_size(lag)}" for rank, lag in list(lags.items())[:_MOST_BEHIND]]
    more = f" and {len(lags) - _MOST_BEHIND} more" if len(lags) > _MOST_BEHIND else ""
    return f"behind: {', '.join(named)}{more}"


def duration(seconds: float) -> str:
    """So many seconds for a person."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


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

    def __init__(self, what: str, others: Callable[[], Done] = dict, *, tensors: bool = True) -> None:
        self._what = what
        self._others = others
        self._counts_tensors = tensors
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
            log.info("%s: reading headers, or waiting for other ranks", self._what)
            return
        seconds = max(now_s - self._started_s, 1e-9)
        rate = self._done_bytes / seconds
        left_s = (self._total_bytes - self._done_bytes) / rate if rate else None
        lags = behind(self._others(), seconds)
        words = [f"{format_size(self._done_bytes)} of {format_size(self._total_bytes)}"]
        words += [f"{self._tensors} tensors"] if self._counts_tensors else []
        words += [format_rate(rate)]
        words += [f"{duration(left_s)} left"] if left_s is not None else []
        more = [f"reading rows of '{self._table}'"] if self._table else []
        more += [f"waiting for rank {self._slowest}"] if self._slowest is not None else []
        more += [behind_text(lags)] if lags else []
        fields: dict[str, object] = {"done_bytes": self._done_bytes, "total_bytes": self._total_bytes}
        fields |= {"bytes_per_s": round(rate), "left_s": None if left_s is None else round(left_s, 1)}
        fields |= {"waiting_for": self._slowest, "behind_bytes": lags or None}
        if self._counts_tensors:
            fields |= {"phase": "read", "tensors": self._tensors, "table": self._table or None}
        log.info("%s: %s", self._what, "; ".join([", ".join(words), *more]), extra=fields)


class _BarProgress:
    """A live bar, and under it what else there is to say. Log lines that come meanwhile are printed above it."""

    def __init__(self, what: str, others: Callable[[], Done] = dict, *, tensors: bool = True) -> None:
        self._progress = _Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            _DoneColumn(table_column=Column(no_wrap=True)),
            _RateColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[tensors]} tensors" if tensors else ""),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            redirect_stdout=False,
        )
        self._task = self._progress.add_task(what, total=None, tensors=0)
        self._tensors = 0
        self._others = others
        self._rows = self._slowest = self._behind = ""
        self._started_s = self._looked_s = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.note = ""
        self._progress.stop()

    def begin(self, total_bytes: int) -> None:
        self._started_s = time.monotonic()
        self._progress.update(self._task, total=total_bytes)

    def rows_of(self, table: str) -> None:
        self._rows = f"reading rows of '{table}'"

    def advance(self, nbytes: int) -> None:
        self._progress.update(self._task, advance=nbytes)

    def tensor_done(self) -> None:
        self._tensors += 1
        self._rows = ""
        self._progress.update(self._task, tensors=self._tensors)

    def waits_for(self, rank: int | None) -> None:
        self._slowest = "" if rank is None else f"waiting for rank {rank}"

    def tick(self) -> None:
        """The bar refreshes itself; who is behind changes more slowly."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LAG_EVERY_S:
            self._looked_s = now_s
            self._behind = behind_text(behind(self._others(), now_s - self._started_s))
        self._progress.note = "; ".join(filter(None, (self._rows, self._slowest, self._behind)))


class _Bar(Progress):
    note = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.note:
            yield Text(self.note, no_wrap=True, overflow="ellipsis")


class _DoneColumn(RichColumn):
    """How much of how much, in the loader's own units."""

    def render(self, task: Task) -> Text:
        of_all = f" of {format_size(int(task.total))}" if task.total is not None else ""
        return Text(f"{format_size(int(task.completed))}{of_all}")


class _RateColumn(RichColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else format_rate(speed))
