"""`load --html`: what a load did as one page: who took what, when, and of which parts of which files. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loader_service.cli.html_page import document, paragraphs, table
from loader_service.cli.output import said_by_ranks
from loader_service.cli.picture import STYLE as TIME_STYLE
from loader_service.cli.picture import over_time
from loader_service.cli.plan_page import STYLE as PLAN_STYLE
from loader_service.cli.plan_page import folder, in_short, page_figures, sentences, strips
from loader_service.cli.plan_titles import spans
from loader_service.planning.plan import LoadPlan
from loader_service.sizes import format_rate, format_size
from loader_service.timeline import Timeline

_TIME = "Each rank's time counts from when it entered the load. What it then waits for others is in its phase config."
Report = Mapping[str, Any]
"""What `load --json` prints of a rank."""


@dataclass(frozen=True, slots=True)
class RankLoad:
    """One rank's load: its report and, where it has recorded them, the load over time and the name of its node."""

    report: Report
    timeline: Timeline | None
    node: str = ""


def page_of(
    plan: LoadPlan,
    loads: Sequence[RankLoad],
    *,
    began_at: str,
    slot_bytes: int,
    draft: LoadPlan | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The HTML document. `loads` has all ranks in order, `slot_bytes` is what a staging slot has, `notes` are sentences
    beside its own. Blocking: it plans every rank."""
    reports = [load.report for load in loads]
    way = reports[0]["policies"]["sharing"]["effective"]
    one_node = len({load.node for load in loads}) == 1
    # What ranks read for their node is drawn as if they were one: only where they are.
    figures = page_figures(plan, slot_bytes=slot_bytes if one_node else None, sharing=way, draft=draft)
    apart = "Ranks are on several nodes: what each read for its node is in the table, and not in the pictures of files."
    said = [
        f"Checkpoint {folder(plan)}, loaded {began_at}.",
        _in_all(reports),
        *_shared(reports),
        *([apart] if not one_node and way != "none" else []),
        *(f"Fallback{words}" for words in said_by_ranks(reports, "fallbacks")),
        *(f"Warning{words}" for words in said_by_ranks(reports, "warnings")),
    ]
    body = (
        f"{table(*_rows(reports))}<details>\n<summary>Policies</summary>\n{paragraphs(_policies(reports))}</details>\n"
        f"<h2>Over time</h2>\n{paragraphs([_TIME])}{over_time([load.timeline for load in loads if load.timeline])}"
        f"<h2>Who read what</h2>\n{paragraphs([*sentences(figures), *notes])}{strips(figures)}"
    )
    return document(f"Load {in_short(plan)}: what was read, and when", said, body, style=TIME_STYLE + PLAN_STYLE)


def _in_all(reports: Sequence[Report]) -> str:
    payload = sum(report["payload_bytes"] for report in reports)
    seconds = max(report["seconds"] for report in reports)
    rate = format_rate(payload / seconds) if seconds else "no time"
    found = f"{format_size(payload)} were handed over in {seconds:.2f} s: {rate}"
    if len(reports) == 1:
        return f"{found}."
    slowest = max(reports, key=lambda report: report["phases"]["read"])  # who came first waited for the others besides
    return f"{found} on all ranks together. Rank {slowest['rank']} read longest, {slowest['phases']['read']:.2f} s."


def _shared(reports: Sequence[Report]) -> Iterator[str]:
    """How ranks shared: what a load costs its node hangs on it."""
    if len(reports) > 1:
        sharing = reports[0]["policies"]["sharing"]
        yield f"Sharing: {sharing['effective']}, {sharing['reason']}."


def _policies(reports: Sequence[Report]) -> Iterator[str]:
    """What was asked for, and what was done; ranks that did the same, together."""
    ranks_of: dict[tuple[str, str, str, str], list[int]] = {}
    for report in reports:
        for name, policy in report["policies"].items():
            outcome = (name, policy["requested"], policy["effective"], policy["reason"])
            ranks_of.setdefault(outcome, []).append(report["rank"])
    for (name, requested, effective, reason), ranks in sorted(ranks_of.items(), key=lambda found: found[0][0]):
        whose = "" if len(ranks) == len(reports) else f" on {spans(ranks)}"
        yield f"{name}{whose}: {effective}, asked for {requested}: {reason}."


def _rows(reports: Sequence[Report]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    for_node = any(report["striped_bytes"] for report in reports)
    columns = ["", "took", "read for itself", *["read for its node"] * for_node]
    columns += ["tensors", "files", "staging, most", "seconds", "GiB/s"]
    rows = []
    for report in reports:
        sizes = [report["payload_bytes"], report["read_bytes"], *[report["striped_bytes"]] * for_node]
        counts = [str(report["tensors"]), str(report["files_opened"]), format_size(report["peak_staging_bytes"])]
        speed = [f"{report['seconds']:.3f}", f"{report['gib_per_s']:.2f}"]
        rows.append([f"rank {report['rank']}", *map(format_size, sizes), *counts, *speed])
    return columns, rows
