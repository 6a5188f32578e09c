"""`bench` for a person: one table of limits and loads, and the sentences."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.markup import escape

from loader_service.cli.bench_figures import Measured, RankRound, Result
from loader_service.cli.render import show, table
from loader_service.sizes import format_size

COLUMNS = ("measured", "GiB/s", "least-most", "CPU s/GiB", "the load reaches")
_OF_PHASES = ("config", "catalog", "plan", "open", "read", "finish")


def show_bench(result: Result) -> None:
    """Prints all that a person asks for; `--json` has every round, and the timelines."""
    bench = result.bench
    rounds = len(result.rounds)
    made = table(
        f"Load {escape(bench.load)}, {bench.form}, {bench.cache}: {rounds} round{'s' if rounds > 1 else ''}",
        *COLUMNS,
    )
    for cells in rows(result):
        made.add_row(*cells)
    show(made, *map(escape, sentences(result)))


def rows(result: Result) -> list[Sequence[str]]:
    """Under `COLUMNS`: a row a limit, with how much of it the load reaches, and a row a rank's load."""
    limits = [
        (*_limit_cells(each), f"{_percent(result.of_limits.get(each.name, 0.0))} of it")
        for each in result.measured
        if each.rates
    ]
    return [*limits, *(_load_cells(result, each) for each in result.middle)]


def sentences(result: Result) -> list[str]:
    """What is said beside the figures, for people; the picture has the same."""
    slowest = max(result.middle, key=lambda each: each.seconds)
    spent = slowest.shares
    phases = ", ".join(f"{name} {slowest.phases[name]:.3f}" for name in _OF_PHASES if name in slowest.phases)
    time = (
        f"While reading: consumer waiting for data {_percent(spent.consumer_waits)}, loader waiting for memory with "
        f"idle threads {_percent(spent.consumer_holds + spent.budget_full)}, {spent.in_flight:.1f} of "
        f"{slowest.threads} threads at work on average."
    )
    return [
        f"Seconds: {phases}.",
        time,
        *result.verdict.sentences,
        *(f"Would help: {advice.sentence}" for advice in result.verdict.advice),
        *result.notes,
    ]


def _limit_cells(each: Measured) -> Sequence[str]:
    rates = each.values("gib_per_s")
    cpu = f"{median(each.values('cpu_s_per_gib')):.2f}"
    return f"limit: {each.label}", f"{median(rates):.2f}", _spread(rates), cpu


def _load_cells(result: Result, each: RankRound) -> Sequence[str]:
    rank = f" of rank {each.rank}" if len(result.middle) > 1 else ""
    rates = [each.payload_bytes / seconds / (1 << 30) for seconds in result.seconds(each.rank) if seconds > 0]
    what = f"the load{rank}, {format_size(each.payload_bytes)} in {each.seconds:.3f} s"
    return what, f"{each.gib_per_s:.2f}", _spread(rates), f"{each.cpu_s_per_gib:.2f}", ""


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}" if values else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
