"""Loads a table that stays in host memory, one shard a rank or one table a node, against other ways and the disk.

Ranks are processes that share out one table of a safetensors file in equal rows. Sides: the rows copied out of the
memory-mapped tensor; 8 threads of buffered reads of 64 MiB that drop the page cache behind themselves, as a production
engine has it; `LoaderService.host_table` in both layouts; and the limits, as many processes that read the same bytes
into a few recycled huge-page buffers and keep nothing. Before each run the page cache and memory are brought into a
known state; runs come in another order each round.

    python -m benchmarks.host_tables --rounds 5 --folder /fast/disk
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from benchmarks import limits
from benchmarks.common import (
    GIB,
    MIB,
    SPARE_BYTES,
    add_common_arguments,
    cached_share,
    condition_memory,
    drop_from_cache,
    machine,
    print_table,
    read_into_cache,
    working_folder,
)
from benchmarks.host_tables_sides import RING_READS_A_PROCESS, ROW_BYTES, Table, Took, make_table, run_side
from benchmarks.ranks import Team, serve_store, store_address

WANTED_GIB = 3.0
LEAST_GIB = 2.0  # a smaller table says little: single calls of the kernel and 32-bit sizes end at 2 GiB
RANKS = (1, 2, 4)
RING_BYTES = RING_READS_A_PROCESS * limits.CHUNK_BYTES
SPARE_DISK_BYTES = 1 * GIB
TRIES = 3  # to bring the page cache into its state

MAPPED, MAPPED_TORCH = "mapped_into_huge", "mapped_into_torch"
HUGE, TORCH = "buffered_into_huge", "buffered_into_torch"
OURS, SHARED = "ours_per_rank", "ours_shared"
DIRECT, THROUGH = "ring_direct", "ring_buffered"
LABELS = {
    OURS: "host_table, per_rank",
    SHARED: "host_table, shared",
    MAPPED: "(a) memory-mapped copy, huge pages",
    MAPPED_TORCH: "(a) into torch.empty",
    HUGE: "(b) 8 threads, preadv, huge pages",
    TORCH: "(b) into torch.empty",
    DIRECT: "(d) limit: O_DIRECT rings",
    THROUGH: "limit: buffered rings",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a side: from the first rank's start to the last one's end, and the processor time of all ranks."""

    seconds: float
    cpu_s: float
    slowest_s: float  # of one rank, from its own start
    cached_before: float | None
    conditioned_bytes: int
    how: str
    first_s: float | None = None  # of `host_table` before, for a table of a few bytes


@dataclass(slots=True)
class Series:
    """All rounds of one side with one number of ranks in one state of the page cache."""

    side: str
    ranks: int
    cache: str
    table_bytes: int
    runs: list[Run] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        """GiB/s of all ranks together, by round."""
        return [self.table_bytes / GIB / run.seconds for run in self.runs]

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)

    @property
    def cpu_s_per_gib(self) -> float:
        return statistics.median(run.cpu_s for run in self.runs) / (self.table_bytes / GIB)

    def as_dict(self) -> dict[str, object]:
        medians = {"gib_per_s": self.speed, "cpu_s_per_gib": self.cpu_s_per_gib}
        where = {"side": self.side, "label": LABELS[self.side], "ranks": self.ranks, "cache": self.cache}
        return {**where, "medians": medians, "wrong": self.wrong, "rounds": [asdict(run) for run in self.runs]}


# Measuring


def measure(series: Series, table: Table, *, check: bool) -> None:
    """One run, by fresh processes; with `check` every byte is compared with the file's afterwards."""
    with contextlib.ExitStack() as stack:
        address = ""
        if series.side in (OURS, SHARED):  # ranks meet where a launcher's agent has a store
            address = store_address(stack.enter_context(Team(serve_store, 1)))
        team = stack.enter_context(Team(run_side, series.ranks, series.side, table, check, address=address))
        team.hear("ready")
        cached, conditioned_bytes = prepare(series, table)
        for rank in range(series.ranks):
            team.tell(rank, "start")
        took: list[Took] = team.hear("took")
        for rank in range(series.ranks):
            team.tell(rank, "check")
        wrong: list[str] = team.hear("wrong")
    series.runs.append(run_of(took, cached, conditioned_bytes))
    series.wrong += [f"rank {rank}: {text}" for rank, text in enumerate(wrong) if text]


def prepare(series: Series, table: Table) -> tuple[float | None, int]:
    """Brings page cache and memory into their state: (the cached share of the file, bytes of memory touched)."""
    for _ in range(TRIES):
        (drop_from_cache if series.cache == "cold" else read_into_cache)([table.path])
        # The destination, the page cache's copy, and the rings.
        conditioned_bytes = condition_memory(2 * table.nbytes + series.ranks * RING_BYTES)
        cached = cached_share([table.path])
        if cached is None or (cached <= 0.01 if series.cache == "cold" else cached >= 0.99):
            return cached, conditioned_bytes
    raise RuntimeError(
        f"{cached:.1%} of the file is cached where it is to be {series.cache}: does anybody else use it?"
    )


def run_of(took: Sequence[Took], cached: float | None, conditioned_bytes: int) -> Run:
    return Run(
        seconds=max(each.done_s for each in took) - min(each.began_s for each in took),
        cpu_s=sum(each.cpu_s for each in took),
        slowest_s=max(each.done_s - each.began_s for each in took),
        cached_before=cached,
        conditioned_bytes=conditioned_bytes,
        how=took[-1].how,
        first_s=took[-1].first_s,
    )


def make_series(table: Table, ranks: Sequence[int], caches: Sequence[str], sides: Sequence[str]) -> list[Series]:
    """Direct rings only cold, for they do not use what is cached, and only where the file system takes O_DIRECT."""
    direct = limits.can_read_direct(table.path)
    return [
        Series(side, size, cache, table.nbytes)
        for cache in caches
        for size in ranks
        for side in sides
        if side != DIRECT or (direct and cache == "cold")
    ]


def run_rounds(all_series: Sequence[Series], table: Table, rounds: int, *, seed: int = 0) -> None:
    """In another order each round; the first compares the bytes."""
    order = random.Random(seed)
    for number in range(rounds):
        began_s = time.perf_counter()
        for each in order.sample(all_series, len(all_series)):
            run_began_s = time.perf_counter()
            measure(each, table, check=number == 0)
            text = f"  {each.cache}, {each.ranks} ranks, {LABELS[each.side]}: {each.speeds[-1]:.2f} GiB/s"
            print(f"{text}, {time.perf_counter() - run_began_s:.0f} s in all", file=sys.stderr, flush=True)
        print(f"round {number + 1} of {rounds}: {time.perf_counter() - began_s:.0f} s", file=sys.stderr, flush=True)


# What it says


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio of medians that has to be reached; `least` None: one that is told and need not reach anything. `most` is
    the ratio that the disk's limit itself has."""

    text: str
    ratio: float
    least: float | None
    most: float | None = None

    @property
    def met(self) -> bool:
        return self.least is None or self.ratio >= self.least

    def __str__(self) -> str:
        verdict = "no target" if self.least is None else f"target {self.least:g} ({'met' if self.met else 'MISSED'})"
        limit = f"; the disk's limit: {self.most:.2f}" if self.most is not None else ""
        return f"{self.text}: {self.ratio:.2f}, {verdict}{limit}"


# The target for (a) was set where all destinations lie on huge pages. The system that (a) is from has ordinary memory:
# that ratio is told beside it.
COLD_TARGETS = (
    (DIRECT, "of (d), the limit", 0.93),
    (HUGE, "times (b) into huge pages", 1.2),
    (MAPPED, "times (a) into huge pages", 1.8),
    (MAPPED_TORCH, "times (a) into torch.empty", None),
)


def targets_of(all_series: Sequence[Series]) -> list[Target]:
    """Those whose sides were measured: cold with 4 ranks, warm with any number."""
    speed = {(each.cache, each.ranks, each.side): each.speed for each in all_series}
    found = []
    mine, limit = speed.get(("cold", 4, OURS)), speed.get(("cold", 4, DIRECT))
    for other, text, least in COLD_TARGETS:
        its = speed.get(("cold", 4, other))
        if mine is not None and its is not None:
            most = limit / its if limit is not None and other != DIRECT else None
            found.append(Target(f"cold, 4 ranks, {text}", mine / its, least, most))
    for ranks in sorted({each.ranks for each in all_series}):
        mine = speed.get(("warm", ranks, OURS))
        others = [
            value
            for other in (MAPPED, MAPPED_TORCH, HUGE, TORCH)
            if (value := speed.get(("warm", ranks, other))) is not None
        ]
        if mine is not None and others:
            found.append(Target(f"warm, {ranks} ranks, times the best of (a) and (b)", mine / max(others), 1.0))
    return found


def print_results(all_series: Sequence[Series]) -> None:
    for cache in dict.fromkeys(each.cache for each in all_series):
        print(f"\n{cache}\n")
        rows = []
        for ranks in dict.fromkeys(each.ranks for each in all_series):
            group = [each for each in all_series if (each.cache, each.ranks) == (cache, ranks)]
            limit = max((each.speed for each in group if each.side in (DIRECT, THROUGH)), default=None)
            for each in group:
                share = "" if limit is None else f"{each.speed / limit:.0%}"
                spread = f"{each.speed:.2f} ({min(each.speeds):.2f}-{max(each.speeds):.2f})"
                rows.append([LABELS[each.side], str(ranks), spread, share, f"{each.cpu_s_per_gib:.2f}"])
        print_table(("", "ranks", "GiB/s", "of limit", "CPU s/GiB"), rows)


def first_calls(all_series: Sequence[Series]) -> str:
    """What meeting costs; empty if nobody met."""
    lines = []
    for ranks in sorted({each.ranks for each in all_series}):
        runs = [run for each in all_series if each.ranks == ranks for run in each.runs]
        times_ms = [run.first_s * 1e3 for run in runs if run.first_s is not None]
        if times_ms:
            lines.append(f"{ranks} ranks {statistics.median(times_ms):.0f} ({min(times_ms):.0f}-{max(times_ms):.0f})")
    return f"the ranks' first call, for a table of a few bytes, ms: {'; '.join(lines)}" if lines else ""


# Sizes


def scaled_bytes(wanted_bytes: int, folder: Path) -> tuple[int, str]:
    """A table that this machine has room for (destination, copy in the page cache, file), and a note on that."""
    folder.mkdir(parents=True, exist_ok=True)
    memory_bytes = (psutil.virtual_memory().available - SPARE_BYTES) * 9 // 10
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    disk_bytes = shutil.disk_usage(folder).free + there - SPARE_DISK_BYTES
    scaled = max(ROW_BYTES * MIB // 64, min(wanted_bytes, memory_bytes // 2, disk_bytes))
    if scaled < wanted_bytes:
        note = f"scaled from {wanted_bytes / GIB:g} GiB: room for {memory_bytes / GIB:.1f} GiB in memory, "
        note += f"{disk_bytes / GIB:.1f} on the disk"
    else:
        note = "as large as wanted"
    if scaled <= LEAST_GIB * GIB:
        note += f"; NOT larger than {LEAST_GIB:g} GiB, so that the figures say little"
    return scaled, note


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, rounds=5)
    parser.add_argument("--gib", type=float, default=WANTED_GIB, help=f"the table's size (default {WANTED_GIB:g})")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="numbers of ranks (default 1,2,4)")
    parser.add_argument("--cache", choices=("cold", "warm"), help="only this state of the page cache (default: both)")
    parser.add_argument("--sides", default=",".join(LABELS), help=f"which sides (default: all of {','.join(LABELS)})")
    arguments = parser.parse_args(argv)
    with working_folder(arguments.folder) as parent:
        folder = parent / f"loader-bench-tables-{arguments.gib:g}"
        nbytes, note = scaled_bytes(int(arguments.gib * GIB), folder)
        table = make_table(folder, nbytes)
        caches = [arguments.cache] if arguments.cache else ["cold", "warm"]
        ranks = [int(size) for size in arguments.ranks.split(",")]
        all_series = make_series(table, ranks, caches, arguments.sides.split(","))
        run_rounds(all_series, table, arguments.rounds)
    targets = targets_of(all_series)
    wrong = [f"{LABELS[each.side]}, {each.ranks} ranks, {text}" for each in all_series for text in each.wrong]
    if arguments.json:
        document = {"machine": machine(), "table_bytes": table.nbytes, "offset": table.offset, "size": note}
        document |= {"rounds": arguments.rounds, "wrong": wrong, "targets": [str(target) for target in targets]}
        print(json.dumps(document | {"series": [each.as_dict() for each in all_series]}, indent=2))
    else:
        print(f"a table of {table.nbytes / GIB:.2f} GiB ({note}) from byte {table.offset} of its file on, ", end="")
        print(f"{arguments.rounds} rounds; {machine()}")
        print_results(all_series)
        print("\nbytes: " + ("the file's, on every side" if not wrong else f"WRONG: {'; '.join(wrong)}"))
        print("\n".join((first_calls(all_series), *map(str, targets))))
    return 1 if wrong or not all(target.met for target in targets) else 0


if __name__ == "__main__":
    sys.exit(main())
