"""The loader beside other loaders of safetensors files, each as its documentation has it called, on a CPU.

safetensors and its newest pre-release, fastsafetensors, runai-model-streamer, unifiedefficientloader and torch's
Hugging Face reader, in an environment of their own, which is made at the first run: some minutes, and about 1 GiB.
Everything, many small tensors, a quarter of each tensor by rows and by columns, a draft of 1 %. Each side runs in a
fresh process, in another order each round, with page cache and memory in a known state; before the first round the
bytes of each are compared with what safetensors reads.

    python -m benchmarks.peers --rounds 5 --folder /fast/disk
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import GIB, MIB, add_common_arguments, machine, print_table, working_folder
from benchmarks.peers_cases import (
    CASES,
    LIMIT,
    OURS,
    PEERS,
    RUNAI,
    SAFE_OPEN,
    SMALL_TENSORS,
    WHOLE,
    make_case,
)
from benchmarks.peers_runs import CAPACITY_BYTES, Series, measure
from benchmarks.peers_venv import Environments, NotOursError, make_environments

OF_LIMIT = 0.93  # cold, of the faster ring
TIMES_RUNAI = 1.0  # cold: it reads at the limit too
TIMES_COLD = 1.4
TIMES_WARM = 2.0
TIMES_SMALL = 2.5
TIMES_SLICE = 1.3
TIMES_WHOLE_TENSORS = 3.0  # of rows
TIMES_WHOLE_FILES = 20.0  # of a draft
ABOVE_CAPACITY_BYTES = 64 * MIB
LAG_P99_MS = 5.0
EVERY_BLOCK_CASES = ("whole", "columns")  # cold, every block of the files comes from the disk, whoever loads
LAG_CASES = ("whole", "rows", "columns")  # the others are over after too few ticks, or are many small tensors


# What must be shown


@dataclass(frozen=True, slots=True)
class Target:
    """A median, or a ratio of medians, and its bound. Without a value it could not be measured, and is missed."""

    text: str
    value: float | None
    bound: float
    least: bool = True  # whether the bound is the least that will do, or the most
    why: str = ""  # there is no value
    most: float | None = None  # what the disk itself has, where nobody can have more

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.bound if self.least else self.value <= self.bound

    def __str__(self) -> str:
        found = f"not measured ({self.why})" if self.value is None else f"{self.value:.2f}"
        bound = f"at {'least' if self.least else 'most'} {self.bound:g}"
        limit = f"; the disk's limit: {self.most:.2f}" if self.most is not None else ""
        return f"{self.text}: {found}, target {bound} ({'met' if self.met else 'MISSED'}){limit}"


def targets_of(all_series: Sequence[Series]) -> list[Target]:
    """Those of the cases, the states of the page cache and the peers that were asked for."""
    found: list[Target] = []
    for case, cache in dict.fromkeys((each.case.name, each.cache) for each in all_series):
        group = [each for each in all_series if (each.case.name, each.cache) == (case, cache)]
        ours = next(each for each in group if each.side.peer == OURS)
        if case == "whole":
            found += _of_whole(ours, group)
        ring = limit_s(group) if cache == "cold" and case in EVERY_BLOCK_CASES else None
        found += [_times(ours, each, least, ring) for each in group if (least := _least(each)) is not None]
        text = f"{case}, {cache}: MiB at most above what is delivered"
        most = (CAPACITY_BYTES + ABOVE_CAPACITY_BYTES) / MIB
        found.append(Target(text, max(ours.values("above_bytes")) / MIB, most, least=False))
        if case in LAG_CASES:
            text = f"{case}, {cache}: ms, 99th percentile of the loop's lag"
            found.append(Target(text, ours.median("lag_p99_ms"), LAG_P99_MS, least=False))
    return found


def _least(each: Series) -> float | None:
    """How many times as fast as this side the loader must be."""
    side, case = each.side, each.case.name
    if side.peer in (OURS, LIMIT):
        return None
    whole = side.reads == WHOLE
    return {
        "whole": (TIMES_RUNAI if side.peer == RUNAI.peer else TIMES_COLD) if each.cache == "cold" else TIMES_WARM,
        "small": TIMES_SMALL if side == SAFE_OPEN else None,
        "rows": TIMES_WHOLE_TENSORS if whole else TIMES_SLICE,
        "columns": TIMES_SLICE,
        "draft": TIMES_WHOLE_FILES if whole else None,
    }[case]


def _times(ours: Series, each: Series, least: float, ring_s: float | None) -> Target:
    text = f"{each.case.name}, {each.cache}: times as fast as {each.side.label}"
    if each.failure:
        return Target(text, None, least, why=each.failure)
    seconds = each.median("seconds")
    return Target(text, seconds / ours.median("seconds"), least, most=None if ring_s is None else seconds / ring_s)


def _of_whole(ours: Series, group: Sequence[Series]) -> list[Target]:
    found = []
    if ours.cache == "cold":
        text = "whole, cold: of the limit"
        found.append(Target(text, ours.median("gib_per_s") / limit_of(group), OF_LIMIT))
    peers = [each for each in group if each.side.peer in PEERS and each.results]
    if peers:
        best = min(peers, key=lambda each: each.median("cpu_s_per_gib"))
        text = f"whole, {ours.cache}: CPU s/GiB, of which {best.side.label} has the least of all peers"
        found.append(Target(text, ours.median("cpu_s_per_gib"), best.median("cpu_s_per_gib"), least=False))
    return found


def limit_of(group: Sequence[Series]) -> float:
    """GiB/s of the faster ring."""
    return max(each.median("gib_per_s") for each in group if each.side.peer == LIMIT)


def limit_s(group: Sequence[Series]) -> float:
    """Seconds of the faster ring, for every byte of the files."""
    return min(each.median("seconds") for each in group if each.side.peer == LIMIT)


# What it says

COLUMNS = ("", "seconds", "GiB/s", "of limit", "ours is", "CPU s/GiB", "above MiB", "lag p50", "p99", "max ms")


def print_results(all_series: Sequence[Series]) -> None:
    """A table for each case and state of the page cache; peers that could not run are named under their reasons."""
    for name, cache in dict.fromkeys((each.case.name, each.cache) for each in all_series):
        group = [each for each in all_series if (each.case.name, each.cache) == (name, cache)]
        ours = next(each for each in group if each.side.peer == OURS)
        limit = limit_of(group)
        print(f"\n{group[0].case.text}, {cache}\n")
        print_table(COLUMNS, [_row(each, ours, limit) for each in group])


def _row(each: Series, ours: Series, limit: float) -> list[str]:
    if each.failure:
        return [f"{each.side.label}: {each.failure.replace('|', '/')}", *[""] * (len(COLUMNS) - 1)]
    speed = each.median("gib_per_s")
    times = each.median("seconds") / ours.median("seconds")
    ring = each.side.peer == LIMIT
    return [
        each.side.label,
        each.spread("seconds", 3),
        f"{speed:.2f}" if speed >= 0.1 else f"{speed:.3f}",
        f"{speed / limit:.1%}" if speed < limit / 10 else f"{speed / limit:.0%}",
        "" if ring or each is ours else f"{times:.1f} x",
        f"{each.median('cpu_s_per_gib'):.2f}",
        "" if ring else f"{max(each.values('above_bytes')) / MIB:.0f}",
        *(f"{each.median(name):.1f}" for name in ("lag_p50_ms", "lag_p99_ms", "lag_max_ms")),
    ]


def versions_of(all_series: Sequence[Series]) -> str:
    """Of what was measured: each package with its version, safetensors with both."""
    found = {(name, version) for each in all_series for run in each.results for name, version in run.versions.items()}
    return ", ".join(f"{name} {version}" for name, version in sorted(found))


def problems_of(all_series: Sequence[Series]) -> tuple[list[str], list[str]]:
    """(what is wrong with bytes, which peers could not run), in words."""
    wrong = [f"{each.who}: {text}" for each in all_series for text in each.wrong]
    failures = dict.fromkeys(
        f"{each.case.name}, {each.side.label}: {each.failure}" for each in all_series if each.failure
    )
    return list(dict.fromkeys(wrong)), list(failures)


# Command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, rounds=5)
    parser.add_argument("--gib", type=float, default=3.0, help="payload of the checkpoints in GiB (default 3)")
    parser.add_argument(
        "--tensors", type=int, default=SMALL_TENSORS, help=f"small tensors (default {SMALL_TENSORS:,}: 1.1 GiB)"
    )
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES), help="default: all")
    parser.add_argument("--cache", nargs="+", choices=("cold", "warm"), default=("cold", "warm"), help="default: both")
    parser.add_argument("--sides", nargs="+", choices=PEERS, default=PEERS, help="peers (default: all)")
    parser.add_argument("--venv", type=Path, help="the peers' environment, made there (default: in the folder)")
    return parser


def measure_all(arguments: argparse.Namespace, make: Callable[[Path], Environments]) -> list[Series]:
    all_series: list[Series] = []
    with working_folder(arguments.folder) as parent:
        environments = make((arguments.venv or parent / "loader-bench-peers").resolve())
        for name in dict.fromkeys(arguments.cases):
            case = make_case(name, parent, int(arguments.gib * GIB), arguments.tensors, arguments.sides)
            all_series += measure(case, list(dict.fromkeys(arguments.cache)), arguments.rounds, environments)
    return all_series


def main(argv: list[str] | None = None, make: Callable[[Path], Environments] = make_environments) -> int:
    """Exit code 1 where a target is missed, bytes are wrong or a peer could not run; 2 where `--venv` is not ours."""
    arguments = _parser().parse_args(argv)
    try:
        all_series = measure_all(arguments, make)
    except NotOursError as error:
        print(error, file=sys.stderr)
        return 2
    targets = targets_of(all_series)
    wrong, failures = problems_of(all_series)
    if arguments.json:
        document = {"machine": machine(), "rounds": arguments.rounds, "versions": versions_of(all_series)}
        document |= {"cases": list(dict.fromkeys(each.case.text for each in all_series))}
        document |= {"targets": list(map(str, targets)), "wrong": wrong, "failures": failures}
        print(json.dumps(document | {"series": [each.as_dict() for each in all_series]}, indent=2))
    else:
        print(f"{arguments.rounds} rounds, staging {CAPACITY_BYTES / MIB:.0f} MiB; {machine()}")
        print(versions_of(all_series))
        print_results(all_series)
        print("\nbytes: " + ("the files', on every side" if not wrong else f"WRONG: {'; '.join(wrong)}"))
        print("".join(f"could not run: {text}\n" for text in failures), end="")
        print("\n".join(map(str, targets)))
    return 1 if wrong or failures or not all(target.met for target in targets) else 0


if __name__ == "__main__":
    sys.exit(main())
