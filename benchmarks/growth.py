"""How headers, plans and agreement grow, with 1,000 to 1,000,000 tensors and with 1 to 1,024 ranks.

Makes sparse checkpoints of a mixture of experts (only headers and indexes take space, 250 MiB for the largest), and in
fresh processes: reads the catalog, plans, makes a rank's part and what a node shares, lays out units. Agreement is
simulated with the records of these loads. Targets: nothing grows faster than n log n, in tensors or in ranks, and a
rank's bytes of agreement are the same whatever the number of tensors.

    python -m benchmarks.growth --rounds 3 --svg docs/growth.svg
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.agreement_simulated import Load
from benchmarks.common import machine, print_table, working_folder
from benchmarks.growth_checkpoint import A_SHARD, make_growth_checkpoint
from benchmarks.growth_parts import CATALOG, PARTS, PLAN_RULES, RANK_RULES, RANK_WHOLE, Job, Part, Run
from benchmarks.growth_plot import Panel, Point, svg

TENSORS = (1_000, 10_000, 100_000, 1_000_000)
RANKS = (1, 8, 64, 1024)
PLANNED_RANKS = 64  # of the plans over tensors
AT_TENSORS = 100_000  # about so many in the plans over ranks
ONE_SHARD = 250_000
SPARE = 0.15
"""Of an exponent: caches of the processor grow too small for a million names, which costs up to a third a decade."""
CHILD_TIMEOUT_S = 900.0
EXCHANGES, LEADER, A_RANK = "agreement, all ranks", "agreement, the leader", "agreement, a rank"


@dataclass(frozen=True, slots=True)
class Growth:
    """The exponents of one series: over all of it by least squares, and between its two largest sizes; and those of
    n log n between the same sizes."""

    name: str
    overall: float
    last: float
    overall_limit: float
    last_limit: float

    @property
    def met(self) -> bool:
        return self.overall <= self.overall_limit + SPARE and self.last <= self.last_limit + SPARE


def slope(points: Sequence[Point]) -> float:
    """The exponent of a power that fits best: the least-squares slope of the logarithms."""
    xs, ys = ([math.log(point[axis]) for point in points] for axis in (0, 1))
    return statistics.linear_regression(xs, ys).slope


def growth_of(name: str, points: Sequence[Point]) -> Growth:
    """`points` are (size, cost), sizes ascending, at least two. Of size 1, whose log is 0, n log n counts as of 2."""
    limits = [(n, max(n, 2) * math.log2(max(n, 2))) for n, _ in points]
    return Growth(name, slope(points), slope(points[-2:]), slope(limits), slope(limits[-2:]))


# Measuring


def child(job: Job) -> list[dict[str, object]]:
    """What a process of its own found."""
    command = [sys.executable, "-m", "benchmarks.growth_parts", json.dumps(asdict(job))]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, cwd=root, check=False)
    if done.returncode:
        raise RuntimeError(f"{job} failed with {done.returncode}:\n{done.stderr}")
    found: list[dict[str, object]] = json.loads(done.stdout.splitlines()[-1])
    return found


def runs_of(job: Job) -> list[Run]:
    return [run_from(each) for each in child(job)]


def run_from(found: Mapping[str, object]) -> Run:
    parts = found["parts"]
    assert isinstance(parts, dict)
    return Run(**{**found, "parts": {name: Part(**part) for name, part in parts.items()}})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Measured:
    """All rounds: of each number of tensors, of one large shard, of each number of ranks; and simulated loads."""

    tensors: list[list[Run]]
    one_shard: list[Run]
    ranks: list[list[Run]]
    loads: list[list[Load]]


def measure(folder: Path, tensors: Sequence[int], ranks: Sequence[int], rounds: int, one_shard: int) -> Measured:
    folders = {}
    for count in tensors:
        note(f"a checkpoint of {count:,} tensors")
        folders[count] = made(folder / f"tensors-{count}", count, A_SHARD)
    large = made(folder / f"one-shard-{one_shard}", one_shard, one_shard)
    over_ranks = folders[min(tensors, key=lambda count: abs(count - AT_TENSORS))]
    by_tensors: list[list[Run]] = [[] for _ in tensors]
    by_ranks: list[list[Run]] = [[] for _ in ranks]
    in_one_shard = []
    for number in range(rounds):
        note(f"round {number + 1} of {rounds}")
        for place, path in enumerate(folders.values()):
            by_tensors[place] += runs_of(Job("parts", [str(path)], [PLANNED_RANKS]))
        in_one_shard += runs_of(Job("parts", [str(large)], [PLANNED_RANKS]))
        for place, run in enumerate(runs_of(Job("ranks", [str(over_ranks)], list(ranks)))):
            by_ranks[place].append(run)
    note("agreement")
    ends = [str(folders[count]) for count in (min(tensors), max(tensors))]
    loads = [load_from(each) for each in child(Job("agreement", ends, list(ranks), rounds))]
    worlds = dict.fromkeys((load.ranks, load.tensors) for load in loads)
    return Measured(
        by_tensors,
        in_one_shard,
        by_ranks,
        [[load for load in loads if (load.ranks, load.tensors) == world] for world in worlds],
    )


def made(folder: Path, tensors: int, a_shard: int) -> Path:
    """The folder, with the checkpoint that was made there before, if one was."""
    stamp = folder / "made"
    if not stamp.exists():
        make_growth_checkpoint(folder, tensors, a_shard=a_shard)
        stamp.touch()
    return folder


def load_from(found: Mapping[str, object]) -> Load:
    exchanges = found["exchanges_cpu_s"]
    assert isinstance(exchanges, list)
    return Load(**{**found, "exchanges_cpu_s": tuple(exchanges)})  # type: ignore[arg-type]


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# What comes of it


def least_s(runs: Sequence[Run], part: str) -> float:
    """Of all rounds: whatever disturbs a round makes it longer."""
    return min(run.parts[part].cpu_s for run in runs)


def over_tensors(measured: Measured) -> dict[str, list[Point]]:
    """(tensors, seconds) of each part."""
    return {part: [(float(runs[0].tensors), least_s(runs, part)) for runs in measured.tensors] for part in PARTS}


def over_ranks(measured: Measured) -> dict[str, list[Point]]:
    """(ranks, seconds) of plans, and of the agreement with most tensors."""
    most = max(loads[0].tensors for loads in measured.loads)
    series = [loads for loads in measured.loads if loads[0].tensors == most]
    lines: dict[str, list[Point]] = {
        part: [(runs[0].ranks, least_s(runs, part)) for runs in measured.ranks] for part in (PLAN_RULES, RANK_RULES)
    }
    costs: dict[str, Callable[[Load], float]] = {
        EXCHANGES: lambda load: sum(load.exchanges_cpu_s),
        LEADER: lambda load: load.leader_cpu_s,
        A_RANK: lambda load: sum(load.exchanges_cpu_s) / load.ranks,
    }
    for name, cost in costs.items():
        lines[name] = [(loads[0].ranks, min(map(cost, loads))) for loads in series]
    return lines


def bytes_of(load: Load) -> tuple[int, int, int, int]:
    """A member sends, a member reads, the leader sends, the leader reads."""
    return load.member_write_bytes, load.member_read_bytes, load.leader_write_bytes, load.leader_read_bytes


def missed(growths: Sequence[Growth], loads: Sequence[Sequence[Load]]) -> list[str]:
    """What is not as it must be, in words."""
    found = [
        f"{each.name}: grows with the power {each.overall:.2f} ({each.last:.2f} at the end), n log n with "
        f"{each.overall_limit:.2f} ({each.last_limit:.2f})"
        for each in growths
        if not each.met
    ]
    by_ranks: dict[int, set[tuple[int, ...]]] = {}
    for load in (load for series in loads for load in series):
        by_ranks.setdefault(load.ranks, set()).add(bytes_of(load))
    return found + [
        f"agreement of {ranks:,} ranks: the bytes depend on the number of tensors"
        for ranks, counts in by_ranks.items()
        if len(counts) > 1
    ]


def panels(measured: Measured) -> list[Panel]:
    tensors = f"tensors; plans for {PLANNED_RANKS} ranks"
    ranks = f"ranks; plans of {measured.ranks[0][0].tensors:,} tensors"
    return [
        Panel("Headers, plans and units over tensors", tensors, "processor time, s", over_tensors(measured)),
        Panel("Plans and agreement over ranks", ranks, "processor time, s", over_ranks(measured)),
    ]


# Tables


def print_growth(unit: str, lines: Mapping[str, Sequence[Point]], growths: Sequence[Growth]) -> None:
    sizes = [size for size, _ in next(iter(lines.values()))]
    limit = growths[0]
    print(f"\nms of processor time by {unit}\n")
    columns = (f"{unit}", *(f"{size:,.0f}" for size in sizes), "power", "at the end")
    rows = [
        [each.name, *(f"{s * 1e3:,.2f}" for _, s in lines[each.name]), f"{each.overall:.2f}", f"{each.last:.2f}"]
        for each in growths
    ]
    rows.append(["n log n", *("" for _ in sizes), f"{limit.overall_limit:.2f}", f"{limit.last_limit:.2f}"])
    print_table(columns, rows)


def print_memory(measured: Measured) -> None:
    """Bytes of resident memory a tensor: what a part leaves, and in brackets the most while it runs."""
    print("\nbytes of memory a tensor, and in brackets the most while it is made\n")

    def cell(runs: Sequence[Run], part: str) -> str:
        kept, most = (
            statistics.median(getattr(run.parts[part], value) for run in runs) / runs[0].tensors
            for value in ("resident_bytes", "peak_bytes")
        )
        return f"{kept:,.0f} ({most:,.0f})"

    rows = [[part, *(cell(runs, part) for runs in measured.tensors)] for part in (CATALOG, PLAN_RULES, RANK_WHOLE)]
    print_table(("tensors", *(f"{runs[0].tensors:,}" for runs in measured.tensors)), rows)


def print_stops(measured: Measured) -> None:
    """The longest that the event loop stood still, in the middle of the rounds."""
    print("\nms that the event loop stood still at the longest\n")
    series = [*measured.tensors, measured.one_shard]

    def cell(runs: Sequence[Run], part: str) -> str:
        return f"{statistics.median(run.parts[part].still_ms for run in runs):.1f}"

    columns = ("tensors in shards", *(f"{runs[0].tensors:,} in {runs[0].shards:,}" for runs in series))
    print_table(columns, [[part, *(cell(runs, part) for runs in series)] for part in PARTS])


def print_bytes(loads: Sequence[Sequence[Load]]) -> None:
    print("\nbytes of agreement in a load\n")
    columns = ("ranks", "tensors", "a rank sends", "reads", "the leader sends", "reads")
    print_table(
        columns,
        [[f"{s[0].ranks:,}", f"{s[0].tensors:,}", *(f"{count:,}" for count in bytes_of(s[0]))] for s in loads],
    )


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of fresh processes (default 3)")
    parser.add_argument("--tensors", type=int, nargs="+", default=TENSORS, help="numbers of tensors, two or more")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks, two or more")
    parser.add_argument("--one-shard", type=int, default=ONE_SHARD, help=f"tensors of one shard (default {ONE_SHARD})")
    parser.add_argument("--folder", type=Path, help="where checkpoints are made, kept and used again")
    parser.add_argument("--svg", type=Path, help="where to draw the picture")
    parser.add_argument("--json", action="store_true", help="print one JSON document, with every round")
    arguments = parser.parse_args(argv)
    with working_folder(arguments.folder) as folder:
        tensors, ranks = sorted(set(arguments.tensors)), sorted(set(arguments.ranks))
        measured = measure(folder, tensors, ranks, arguments.rounds, arguments.one_shard)
    by_tensors, by_ranks = over_tensors(measured), over_ranks(measured)
    growths = [growth_of(name, points) for name, points in by_tensors.items()]
    rank_growths = [growth_of(name, points) for name, points in by_ranks.items()]
    not_met = missed([*growths, *rank_growths], measured.loads)
    if arguments.svg is not None:
        arguments.svg.write_text(svg(panels(measured)))
    if arguments.json:
        document = {"machine": machine(), "missed": not_met, **asdict(measured)}
        print(json.dumps(document | {"growth": [asdict(each) for each in (*growths, *rank_growths)]}, indent=2))
    else:
        print(f"{arguments.rounds} rounds, the least of each; {machine()}")
        print_growth("tensors", by_tensors, growths)
        print_growth("ranks", by_ranks, rank_growths)
        print_memory(measured)
        print_stops(measured)
        print_bytes(measured.loads)
        print("\n" + ("\n".join(f"missed: {each}" for each in not_met) or "targets: all met"))
    return 1 if not_met else 0


if __name__ == "__main__":
    sys.exit(main())
