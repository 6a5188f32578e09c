"""`bench --html`: what was measured as a page."""

from __future__ import annotations

from loader_service.cli.bench_figures import Result
from loader_service.cli.bench_table import COLUMNS, rows, sentences
from loader_service.cli.picture import Page, render
from loader_service.measuring.machine import Machine
from loader_service.sizes import format_size


def page_of(result: Result) -> str:
    """The HTML document: what was measured where, the sentences, the limits, and the round in the middle over time,
    rank by rank."""
    tops, name = _source_of_ranks(result)
    page = Page(
        title=f"Load {result.bench.load}: what bounds it",
        sentences=[
            *_conditions(result),
            *sentences(result),
            "The charts show the load of the round in the middle, in steps of equal time.",
        ],
        columns=COLUMNS,
        rows=rows(result),
        timelines=[rank.timeline for rank in result.middle],
        tops_gib_per_s=tops,
        top_name=name,
    )
    return render(page)


def _conditions(result: Result) -> list[str]:
    """What a reader needs who was not there."""
    bench = result.bench
    handed_bytes = sum(rank.payload_bytes for rank in result.middle)
    return [
        f"Checkpoint {bench.checkpoint}, measured {bench.began_at}.",
        f"{format_size(handed_bytes)} on {_counted(len(result.middle), 'rank')}, form {bench.form}, page cache "
        f"{bench.cache}, {_counted(len(result.rounds), 'round')}.",
        *(f"Machine, {judged.node.name}: {_machine(judged.node.machine)}." for judged in result.nodes),
    ]


def _machine(machine: Machine) -> str:
    said = [_counted(machine.cores, "core"), f"{format_size(machine.memory_bytes)} of memory"]
    said += [f"kernel {machine.kernel}"] if machine.kernel else []
    said += [f"huge pages {machine.huge_pages}"] if machine.huge_pages else []
    return ", ".join(said)


def _source_of_ranks(result: Result) -> tuple[dict[int, float], str]:
    """GiB/s that its node's source gives each rank, where it was measured, if all of the node have the same; and what
    that is called."""
    tops = {
        rank: whole / len(judged.node.ranks)
        for judged in result.nodes
        if (whole := judged.source_gib_per_s)
        for rank in judged.node.ranks
    }
    most = max(len(judged.node.ranks) for judged in result.nodes)
    return tops, "what the source gives" if most == 1 else "its share of what the source gives its node"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
