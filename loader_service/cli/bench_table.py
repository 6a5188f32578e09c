"""`bench` for a person: one table of limits and loads, and the sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from rich.markup import escape

from loader_service.cli.bench_figures import JudgedNode, Measured, RankRound, Result
from loader_service.cli.render import show, table
from loader_service.measuring.verdict import Verdict
from loader_service.sizes import format_size

COLUMNS = ("measured", "GiB/s", "least-most", "CPU s/GiB", "reading, all ranks")
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
    """Under `COLUMNS`, node by node: a row a limit, with how much of it all ranks together reach while
    they read, and a row a rank's load."""
    return [cells for judged in result.nodes for cells in _rows_of(result, judged)]


def _rows_of(result: Result, judged: JudgedNode) -> Iterator[Sequence[str]]:
    where = f"{judged.node.name}, " if len(result.nodes) > 1 else ""
    for limit in judged.node.measured:
        if limit.rates:
            share = _percent(judged.of_limits.get(limit.name, 0.0))
            yield (f"{where}limit: {limit.label}", *_limit_cells(limit), f"{share} of it")
    for rank in judged.node.ranks:
        yield _load_cells(result, result.middle[rank])


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
        *(said for judged in result.nodes for said in result.of_node(judged, _verdict(judged.verdict))),
        *result.notes,
    ]


def _verdict(verdict: Verdict) -> list[str]:
    return [*verdict.sentences, *(f"Would help: {advice.sentence}" for advice in verdict.advice)]


def _limit_cells(each: Measured) -> Sequence[str]:
    rates = each.values("gib_per_s")
    cpu = f"{median(each.values('cpu_s_per_gib')):.2f}"
    return f"{median(rates):.2f}", _spread(rates), cpu


def _load_cells(result: Result, each: RankRound) -> Sequence[str]:
    rank = f" of rank {each.rank}" if len(result.middle) > 1 else ""
    rates = [each.payload_bytes / seconds / (1 << 30) for seconds in result.seconds(each.rank) if seconds > 0]
    what = f"the load{rank}, {format_size(each.payload_bytes)} in {each.seconds:.3f} s"
    return what, f"{each.gib_per_s:.2f}", _spread(rates), f"{each.cpu_s_per_gib:.2f}", ""


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}" if values else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
