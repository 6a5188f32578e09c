"""Runs of the draft benchmark's sides: fresh processes, page cache and memory in a known state, what came of it."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks import limits
from benchmarks.common import Rounds, cached_share, condition_memory, drop_from_cache, read_into_cache
from benchmarks.draft_sides import CAPACITY_BYTES, Side, Took, disk_bytes, run_side
from benchmarks.ranks import Team, serve_store, store_address

TRIES = 3  # to bring the page cache into its state
LOOK_EVERY_S = 0.02
RING_BYTES = limits.DIRECT_THREADS * limits.CHUNK_BYTES
BESIDE_BYTES = 256 << 20  # of memory, what each rank's process takes beside staging and tensors


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a side, all ranks together.

    `seconds` are from when the last rank had entered its load to when the last one had left it, `from_first_s` from
    when the first one had entered, `setup_s` from the start to where `seconds` begin, `total_s` from the start to where
    all have closed their services. `cpu_s` is the processor time of all ranks after entering, `setup_cpu_s` before.
    Of `disk_bytes`, `early_bytes` had been asked for when `seconds` began: ranks that enter first read for the others.
    `peak_bytes` is the private memory of all ranks and what they share, once, above what they had at the start; the
    page cache is not counted.
    """

    seconds: float
    from_first_s: float
    setup_s: float
    total_s: float
    cpu_s: float
    setup_cpu_s: float
    disk_bytes: int
    early_bytes: int
    peak_bytes: int
    handed_bytes: int
    read_bytes: int
    files_read: tuple[str, ...]
    phases: dict[str, float]  # of the slowest rank in each
    cached_before: float | None
    conditioned_bytes: int
    how: str

    @property
    def whole_s(self) -> float:
        """`seconds`, made up for what had been read when they began."""
        late_bytes = self.disk_bytes - self.early_bytes
        return self.seconds * self.disk_bytes / late_bytes if late_bytes > 0 else self.seconds

    @property
    def header_s(self) -> float:
        """Finding the shards, reading and validating their headers, and agreeing on them."""
        return self.phases.get("catalog", 0.0)


@dataclass(slots=True)
class Series(Rounds):
    """All rounds of one side in one state of the page cache."""

    side: Side
    cache: str
    runs: list[Run] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        return f"{self.cache}, {self.side.label}"

    @property
    def measured(self) -> Sequence[Run]:
        return self.runs

    def as_dict(self) -> dict[str, object]:
        side = {"label": self.side.label, "work": self.side.work, "ranks": self.side.ranks, "reads": self.side.reads}
        medians = {name: self.median(name) for name in _MEDIANS}
        rounds = [asdict(run) for run in self.runs]
        return {"side": side, "cache": self.cache, "medians": medians, "wrong": self.wrong, "rounds": rounds}


_MEDIANS = (
    *("seconds", "whole_s", "from_first_s", "setup_s", "total_s", "header_s", "cpu_s", "setup_cpu_s"),
    *("disk_bytes", "early_bytes", "peak_bytes", "handed_bytes", "read_bytes"),
)


class MemoryWatch:
    """Looks at the memory of processes while the block runs; `peak_bytes` above what they had when it began."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.peak_bytes = 0
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._private, self._shared = self._resident()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            private, shared = self._resident()
            self.peak_bytes = max(self.peak_bytes, private - self._private + shared - self._shared)

    def _resident(self) -> tuple[int, int]:
        """(private bytes of all, shared bytes of the one that has most of them)."""
        private, shared = 0, [0]
        for pid in self._pids:
            with contextlib.suppress(OSError):  # it has ended
                lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                found = {line[0]: int(line[1]) * 1024 for line in lines if line and line[0] in _KINDS}
                private += found.get("RssAnon:", 0)
                shared.append(found.get("RssShmem:", 0))
        return private, max(shared)


_KINDS = ("RssAnon:", "RssShmem:")


def measure(series: Series) -> None:
    """One run, by fresh processes."""
    with _team(series.side, check=False) as team:
        team.hear("ready")
        cached, conditioned_bytes = prepare(series)
        before = sum(map(disk_bytes, team.pids))
        with MemoryWatch(team.pids) as memory:
            for rank in range(series.side.ranks):
                team.tell(rank, "start")
            team.hear("entered")
            early_bytes = sum(map(disk_bytes, team.pids)) - before
            took: list[Took] = team.hear("took")
    early_bytes *= series.side.work in ("batches", "owned")
    series.runs.append(run_of(took, early_bytes, memory.peak_bytes, cached, conditioned_bytes))
    series.wrong += wrong_of(took)


def check(series: Series) -> None:
    """One run that is not timed, with all bytes compared."""
    with _team(series.side, check=True) as team:
        team.hear("ready")
        for rank in range(series.side.ranks):
            team.tell(rank, "start")
        series.wrong += wrong_of(team.hear("took"))


@contextlib.contextmanager
def _team(side: Side, *, check: bool) -> Iterator[Team]:
    with contextlib.ExitStack() as stack:
        address = ""
        if side.ranks > 1:  # ranks meet where a launcher's agent has a store
            address = store_address(stack.enter_context(Team(serve_store, 1)))
        yield stack.enter_context(Team(run_side, side.ranks, side, check, address=address))


def wrong_of(took: Sequence[Took]) -> list[str]:
    return [f"rank {rank}: {text}" for rank, each in enumerate(took) for text in each.wrong]


def run_of(
    took: Sequence[Took], early_bytes: int, peak_bytes: int, cached: float | None, conditioned_bytes: int
) -> Run:
    began_s, left_s = min(each.began_s for each in took), max(each.left_s for each in took)
    entered = [each.entered_s for each in took]
    return Run(
        seconds=left_s - max(entered),
        from_first_s=left_s - min(entered),
        setup_s=max(entered) - began_s,
        total_s=max(each.closed_s for each in took) - began_s,
        cpu_s=sum(each.cpu_s for each in took),
        setup_cpu_s=sum(each.setup_cpu_s for each in took),
        disk_bytes=sum(each.disk_bytes for each in took),
        early_bytes=early_bytes,
        peak_bytes=peak_bytes,
        handed_bytes=sum(each.handed_bytes for each in took),
        read_bytes=sum(each.read_bytes for each in took),
        files_read=tuple(sorted({name for each in took for name in each.files_read})),
        phases={name: max(each.phases[name] for each in took) for name in took[0].phases},
        cached_before=cached,
        conditioned_bytes=conditioned_bytes,
        how=took[-1].how,
    )


def prepare(series: Series) -> tuple[float | None, int]:
    """Brings page cache and memory into their state: (the cached share of the files, bytes of memory touched)."""
    files = series.side.files
    file_bytes = sum(path.stat().st_size for path in files)
    # The page cache's copy, tensors that are kept, staging or rings, and what processes take beside.
    wanted_bytes = 2 * file_bytes + series.side.ranks * (CAPACITY_BYTES + RING_BYTES + BESIDE_BYTES)
    for _ in range(TRIES):
        (drop_from_cache if series.cache == "cold" else read_into_cache)(files)
        conditioned_bytes = condition_memory(wanted_bytes)
        cached = cached_share(files)
        if cached is None or (cached <= 0.01 if series.cache == "cold" else cached >= 0.99):
            return cached, conditioned_bytes
    raise RuntimeError(
        f"{cached:.1%} of the files is cached where it is to be {series.cache}: does anybody else use them?"
    )


def run_rounds(all_series: Sequence[Series], rounds: int, *, seed: int = 0) -> None:
    """In another order each round; before them each load has its bytes compared."""
    for each in {each.side.label: each for each in all_series if each.side.tensors}.values():
        _note(f"comparing the bytes of {each.side.label}")
        check(each)
    order = random.Random(seed)
    for number in range(rounds):
        began_s = time.perf_counter()
        for each in order.sample(all_series, len(all_series)):
            run_began_s = time.perf_counter()
            measure(each)
            text = f"  {each.where}: {each.runs[-1].total_s:.2f} s, {each.runs[-1].seconds:.2f} of them reading"
            _note(f"{text}; {time.perf_counter() - run_began_s:.0f} s with preparing")
        _note(f"round {number + 1} of {rounds}: {time.perf_counter() - began_s:.0f} s")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
