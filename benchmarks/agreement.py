"""What agreement costs, and how long a failure takes to reach every rank.

Three tables: up to 1,024 ranks simulated in virtual time (work, messages, bytes); exchanges between 2 and 4 processes
on loopback; and, with real loads in the middle of reading, the time from a failure to the last survivor's exception.

    python -m benchmarks.agreement --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import agreement_exchanges as exchanges
from benchmarks import agreement_failures as failures
from benchmarks import agreement_simulated as simulated
from benchmarks.agreement_exchanges import Exchanges, Served
from benchmarks.agreement_failures import Failed
from benchmarks.common import machine, print_table, working_folder

TENSORS, MANY_TENSORS = 1_000, 100_000
MOMENTS = 50  # of a heartbeat, at which a simulated rank falls silent
MAX_EXCHANGE_S = 1.0
MAX_GROWTH = 2.0  # of the leader's time a rank, from one number of ranks to eight times as many
LOAD_SPARE_S = 45.0  # so much longer a load lasts than the limit of silence: a busy machine starts ranks slowly


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 where a target is missed."""
    arguments = _parser().parse_args(argv)
    short = arguments.short
    sizes = sorted(arguments.simulated or [2, 16, 128, 1024])
    ranks = arguments.ranks or ([2] if short else [2, 4])
    timeouts_s = arguments.timeouts or ([1.0] if short else [5.0, 10.0])
    rounds = arguments.rounds or (1 if short else 5)
    loads = arguments.loads or (20 if short else 200)
    worlds = [*((size, TENSORS) for size in sizes), (sizes[-1], MANY_TENSORS)]
    _note("simulated ranks")
    series = simulated.measure(worlds, rounds)
    silences = [simulated.fall_silent(whom, each, MOMENTS) for each in timeouts_s for whom in ("member", "leader")]
    with working_folder(None) as folder:
        exchanged = _exchanges(ranks, loads, folder / "small")
        failed = _failures(ranks, timeouts_s, rounds, folder / "slow")
    missed = [*missed_by_simulated(series), *missed_by_silences(silences), *missed_by_failures(failed)]
    if arguments.json:
        document: dict[str, object] = {"machine": machine(), "rounds": rounds, "loads": loads, "missed": missed}
        document["simulated"] = [asdict(load) for loads_ in series for load in loads_]
        document["silences"] = [asdict(each) for each in silences]
        document["exchanges"] = [asdict(each) for each in exchanged]
        document["failures"] = [asdict(each) | {"met": each.met} for each in failed]
        print(json.dumps(document, indent=2))
    else:
        print(f"{rounds} rounds; {machine()}")
        print_simulated(series)
        print_silences(silences)
        print_exchanges(exchanged, loads)
        print_failures(failed)
        print_targets(missed)
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="rounds of simulations and failures (default 5)")
    parser.add_argument("--loads", type=int, help="sessions and loads of each group of processes (default 200)")
    parser.add_argument(
        "--simulated", type=_numbers(int), help="numbers of simulated ranks, two or more (default 2,16,128,1024)"
    )
    parser.add_argument("--ranks", type=_numbers(int), help="numbers of rank processes (default 2,4)")
    parser.add_argument(
        "--timeouts", type=_numbers(float), help="agreement.timeout_s of silent failures (default 5,10)"
    )
    parser.add_argument("--short", action="store_true", help="2 ranks, one round, timeout_s 1: some 20 s")
    parser.add_argument("--json", action="store_true", help="print one JSON document, with every round")
    return parser


def _numbers(kind: Callable[[str], float]) -> Callable[[str], list[float]]:
    def numbers(text: str) -> list[float]:
        return [kind(part) for part in text.split(",")]

    return numbers


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _exchanges(ranks: Sequence[int], loads: int, folder: Path) -> list[Exchanges]:
    exchanges.make_small_checkpoint(folder)
    groups: list[tuple[int, Served]] = [(1, "nowhere")]
    groups += [(size, served) for size in ranks for served in ("agent", "rank 0")]
    _note("exchanges")
    return [exchanges.measure(size, served, loads, folder) for size, served in groups]


def _failures(ranks: Sequence[int], timeouts_s: Sequence[float], rounds: int, folder: Path) -> list[Failed]:
    failures.make_slow_checkpoint(folder, max(timeouts_s) + LOAD_SPARE_S)
    found = []
    for number in range(rounds):
        _note(f"failures, round {number + 1} of {rounds}")
        found += failures.measure(failures.CASES, ranks, timeouts_s, folder)
    return found


# Targets


def missed_by_simulated(series: Sequence[Sequence[simulated.Load]]) -> list[str]:
    """What is not as it must be, in words. The last two of the series have equally many ranks."""
    missed = []
    for loads in series:
        who = f"{loads[0].ranks:,} simulated ranks, {loads[0].tensors:,} tensors"
        if (longest_s := _exchange_s(loads, max)) >= MAX_EXCHANGE_S:
            missed.append(f"{who}: an exchange takes {longest_s:.2f} s")
        if (failure_s := max(load.failure_s for load in loads)) >= failures.TOLD_LIMIT_S:
            missed.append(f"{who}: a failure takes {failure_s:.2f} s")
    *_, fewer, most, same_with_more_tensors = series
    if _bytes_of(most[0]) != _bytes_of(same_with_more_tensors[0]):
        missed.append(f"{most[0].ranks:,} simulated ranks: the bytes depend on the number of tensors")
    growth = _leader_s_a_rank(most) / _leader_s_a_rank(fewer)
    if growth >= MAX_GROWTH:
        missed.append(
            f"the leader's time a rank grows by {growth:.1f} from {fewer[0].ranks} to {most[0].ranks:,} ranks"
        )
    return missed


def missed_by_silences(silences: Sequence[simulated.Silence]) -> list[str]:
    """What took too long at any moment, in words."""
    return [
        f"silence of a simulated {each.whom}: {max(each.seconds):.2f} s, target {_silent_limit_s(each.timeout_s):g} s"
        for each in silences
        if max(each.seconds) >= _silent_limit_s(each.timeout_s)
    ]


def _silent_limit_s(timeout_s: float) -> float:
    return timeout_s + failures.SILENT_SPARE_S


def missed_by_failures(failed: Sequence[Failed]) -> list[str]:
    """What was beyond its target in any round, in words."""
    missed = []
    for group in _by_case(failed):
        first = group[0]
        last_s = max(each.counted_s for each in group)
        if last_s >= (limit_s := first.case.limit_s(first.timeout_s)):
            missed.append(f"{first.case.text}, {first.ranks} ranks: {last_s:.2f} s, target {limit_s:g} s")
    return missed


def _exchange_s(loads: Sequence[simulated.Load], choose: Callable[[Sequence[float]], float]) -> float:
    return statistics.median(choose(load.exchanges_cpu_s) for load in loads)


def _leader_s_a_rank(loads: Sequence[simulated.Load]) -> float:
    return simulated.median(loads, lambda load: load.leader_cpu_s) / loads[0].ranks


def _bytes_of(load: simulated.Load) -> tuple[int, ...]:
    return (load.member_write_bytes, load.member_read_bytes, load.leader_write_bytes, load.leader_read_bytes)


def _by_case(failed: Sequence[Failed]) -> list[list[Failed]]:
    groups: dict[tuple[object, ...], list[Failed]] = {}
    for each in failed:
        groups.setdefault((each.case, each.timeout_s, each.ranks), []).append(each)
    order = list(failures.CASES)
    return [groups[key] for key in sorted(groups, key=lambda key: (order.index(groups[key][0].case), *key[1:]))]


# Tables


def print_simulated(series: Sequence[Sequence[simulated.Load]]) -> None:
    """One row for each number of ranks with one catalog. Milliseconds of processor time."""
    print("\nsimulated ranks\n")
    columns = (
        "ranks",
        "tensors",
        "exchange ms",
        "longest",
        "load ms",
        "leader ms",
        "us a rank",
        "look ms",
        "member sends",
        "bytes",
        "reads bytes",
        "leader writes",
        "bytes",
        "reads",
        "bytes",
        "FAIL to FINAL",
    )
    print_table(columns, [_simulated_row(loads) for loads in series])


def _simulated_row(loads: Sequence[simulated.Load]) -> list[str]:
    first = loads[0]
    leader_s = simulated.median(loads, lambda load: load.leader_cpu_s)
    return [
        f"{first.ranks:,}",
        f"{first.tensors:,}",
        f"{_exchange_s(loads, statistics.median) * 1e3:.2f}",
        f"{_exchange_s(loads, max) * 1e3:.2f}",
        f"{simulated.median(loads, lambda load: load.load_cpu_s) * 1e3:.1f}",
        f"{leader_s * 1e3:.2f}",
        f"{leader_s / first.ranks * 1e6:.0f}",
        f"{simulated.median(loads, lambda load: load.look_cpu_s) * 1e3:.2f}",
        f"{first.member_writes}",
        f"{first.member_write_bytes:,}",
        f"{first.member_read_bytes:,}",
        f"{first.leader_writes}",
        f"{first.leader_write_bytes:,}",
        f"{first.leader_reads:,}",
        f"{first.leader_read_bytes:,}",
        f"{simulated.median(loads, lambda load: load.failure_s):.2f} s",
    ]


def print_silences(silences: Sequence[simulated.Silence]) -> None:
    """Virtual seconds from the last sign of life to the other rank's verdict."""
    print(f"\nsilence of one of two simulated ranks, at {MOMENTS} moments\n")
    columns = ("silent", "timeout_s", "least s", "median", "most", "target")
    rows = []
    for each in silences:
        figures = (min(each.seconds), statistics.median(each.seconds), max(each.seconds))
        cells = [each.whom, f"{each.timeout_s:g}", *(f"{figure:.2f}" for figure in figures)]
        rows.append([*cells, f"{_silent_limit_s(each.timeout_s):g}"])
    print_table(columns, rows)


def print_exchanges(exchanged: Sequence[Exchanges], loads: int) -> None:
    """Milliseconds, median and 95th percentile of all ranks' samples; the first row is one rank alone."""
    print(f"\nprocesses on loopback, {loads} sessions and as many loads\n")
    columns = ("ranks", "store in", "exchange ms", "p95", "session ms", "p95", "load ms", "p95", "sent B", "received B")
    rows = []
    for each in exchanged:
        cells = [f"{each.ranks}", each.served]
        for seconds in (each.exchange_s, each.session_s, each.load_s):
            cells += [f"{statistics.median(seconds) * 1e3:.2f}", f"{_percentile(seconds, 0.95) * 1e3:.2f}"]
        rows.append([*cells, *(_whole(value) for value in (each.sent_bytes, each.received_bytes))])
    print_table(columns, rows)


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def print_failures(failed: Sequence[Failed]) -> None:
    """Medians of all rounds with the least and the most; seconds, and milliseconds for a rank that goes on."""
    print("\nfrom a failure to the last survivor's exception\n")
    columns = ("failure", "ranks", "timeout_s", "exception s", "left s", "woken ms", "target s", "cause")
    print_table(columns, [_failure_row(group) for group in _by_case(failed)])


def _failure_row(group: Sequence[Failed]) -> list[str]:
    first = group[0]
    return [
        first.case.text,
        f"{first.ranks}",
        f"{first.timeout_s:g}",
        _spread([each.last_s for each in group]),
        _spread([each.left_s for each in group]),
        _spread([each.woken_s and each.woken_s * 1e3 for each in group], digits=1),
        f"{first.case.limit_s(first.timeout_s):g}",
        "; ".join(dict.fromkeys(cause for each in group for cause in each.seen)),
    ]


def _spread(values: Sequence[float | None], digits: int = 2) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return f"{statistics.median(known):.{digits}f} ({min(known):.{digits}f}-{max(known):.{digits}f})"


def print_targets(missed: Sequence[str]) -> None:
    print(
        f"\ntargets: a simulated exchange under {MAX_EXCHANGE_S:g} s, the leader's time linear in ranks, and bytes that"
    )
    print("do not depend on the number of tensors; from a failure to the last survivor's exception, in every round,")
    print(f"under {failures.TOLD_LIMIT_S:g} s where somebody tells of it (and a heartbeat where a rank was cancelled),")
    print(f"under timeout_s + {failures.SILENT_SPARE_S:g} s where nobody does: {'; '.join(missed) or 'all met'}")


if __name__ == "__main__":
    sys.exit(main())
