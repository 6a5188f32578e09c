"""`bench --html`: what was measured as a page."""

from __future__ import annotations

from statistics import median

from loader_service.cli.bench_figures import Result
from loader_service.cli.bench_table import sentences
from loader_service.cli.picture import Page, render
from loader_service.measuring.verdict import source_limit


def page_of(result: Result) -> str:
    """The HTML document: the sentences, the limits, and the round in the middle over time, rank by rank."""
    bench = result.bench
    rows = []
    for each in result.measured:
        if each.rates:
            rate, cpu = median(each.values("gib_per_s")), median(each.values("cpu_s_per_gib"))
            rows.append((f"limit: {each.label}", f"{rate:.2f}", f"{cpu:.2f}"))
    for rank in result.middle:
        of_rank = f" of rank {rank.rank}" if len(result.middle) > 1 else ""
        rows.append((f"the load{of_rank}", f"{rank.gib_per_s:.2f}", f"{rank.cpu_s_per_gib:.2f}"))
    top = source_limit(result.loaded, result.limits)
    page = Page(
        title=f"Load {bench.load}: what bounds it",
        sentences=[*sentences(result), "The charts show the load of the round in the middle, in steps of equal time."],
        columns=("measured", "GiB/s", "CPU s/GiB"),
        rows=rows,
        timelines=[rank.timeline for rank in result.middle],
        top_gib_per_s=top,
        top_name="what the source gives",
    )
    return render(page)
