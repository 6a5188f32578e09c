"""Tables for people, on stdout. Everything shown comes from the same data that `--json` prints."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import cast

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loader_service.cli.output import said_by_ranks, writing_to_stdout
from loader_service.planning.plan import LoadPlan
from loader_service.report import LoadReport
from loader_service.sizes import format_size

_SHADES = " ░▒▓█"
_ASCII_SHADES = " .:*#"
STRIPS = "Two cells a shard, the darker the more of it the rank reads."
_MAX_NAMESPACES = 20
_APART = 3  # columns, where there is room
_LONG = 16  # a word above that may be broken
_PLAIN_WIDTH = 160  # where no terminal says how wide it is: nothing is cut off in a log


class _Console(Console):
    """One that leaves a reader that has gone away to `output.writing_to_stdout`; rich would end the process with 1."""

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError, which rich handles when it calls this


def console() -> Console:
    """A console on stdout as it is now; wide enough for whole tables where it is not a terminal."""
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    return _Console(file=sys.stdout, width=width, highlight=False, soft_wrap=False)


def table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are numbers; a column that starts with "<" is text too."""
    made = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for position, column in enumerate(columns):
        text = position == 0 or column.startswith("<")
        made.add_column(column.removeprefix("<"), justify="left" if text else "right", overflow="fold")
    return made


def show(*parts: Table | str) -> None:
    """Prints tables and lines to stdout, as `output.print_text` does."""
    with writing_to_stdout():
        target = console()
        for part in parts:
            if isinstance(part, Table):
                _fit(part, target.width)
            target.print(part)
        sys.stdout.flush()


def _fit(made: Table, width: int) -> None:
    """In a narrow terminal columns come closer together; words break only if they are long, and numbers not at all."""
    needed = 0
    for column in made.columns:
        words = [*str(column.header).split(), *" ".join(map(str, column.cells)).split()]
        whole = [word for word in words if len(word) <= _LONG]
        if column.justify == "right":
            whole += map(str, column.cells)
        column.min_width = max(map(len, whole), default=0)
        needed += column.min_width + _APART
    if needed > width:
        made.padding = 0


def show_checkpoint(described: Mapping[str, object]) -> None:
    """What `inspecting.describe` found, as tables."""
    files = cast("Sequence[Mapping[str, int]]", described["files"])
    path = described["path"]
    where = escape(path) if isinstance(path, str) else f"{len(files)} files"
    total = sum(file["bytes"] for file in files)
    by_file = table(f"Files of {where}", "file", "bytes", "header", "tensors")
    for file in files:
        size, header = format_size(file["bytes"]), format_size(file["header_bytes"])
        by_file.add_row(escape(str(file["name"])), size, header, str(file["tensors"]))
    parts: list[Table | str] = [by_file]
    parts.append(_counts("Dtypes", "dtype", cast("Mapping[str, Mapping[str, int]]", described["dtypes"])))
    parts.append(_counts("Namespaces", "prefix", cast("Mapping[str, Mapping[str, int]]", described["namespaces"])))
    if "tensor_list" in described:
        parts.append(_tensors(cast("Sequence[Mapping[str, object]]", described["tensor_list"])))
    payload = format_size(cast("int", described["payload_bytes"]))
    where = f"1 file of {format_size(total)}"
    if len(files) != 1:
        where = f"{len(files)} files of {format_size(total)} together"
    parts.append(f"{described['tensors']} tensors, {payload} of payload in {where}")
    parts += [f"note: {escape(note)}" for note in cast("Sequence[str]", described["notes"])]
    show(*parts)


def _counts(title: str, what: str, counts: Mapping[str, Mapping[str, int]]) -> Table:
    made = table(title, what, "tensors", "bytes")
    largest = sorted(counts.items(), key=lambda item: -item[1]["bytes"])
    for name, entry in largest[:_MAX_NAMESPACES]:
        made.add_row(escape(name), str(entry["tensors"]), format_size(entry["bytes"]))
    rest = largest[_MAX_NAMESPACES:]
    if rest:
        made.add_row(
            f"and {len(rest)} more",
            str(sum(entry["tensors"] for _, entry in rest)),
            format_size(sum(entry["bytes"] for _, entry in rest)),
        )
    return made


def _tensors(tensors: Sequence[Mapping[str, object]]) -> Table:
    made = table("Tensors", "name", "<dtype", "<shape", "<file", "<offsets")
    for tensor in tensors:
        start, stop = cast("Sequence[int]", tensor["offsets"])
        made.add_row(
            escape(str(tensor["name"])),
            str(tensor["dtype"]),
            escape(str(tensor["shape"])),
            escape(str(tensor["file"])),
            f"{start}:{stop}",
        )
    return made


def show_load_plan(plan: LoadPlan) -> None:
    """A plan: a row a rank, what they read together, and the warnings."""
    files = len(plan.catalog.shards)
    by_rank = table(
        f"Plan of load {escape(plan.load)} for {_ranks(plan.world_size)}",
        "rank",
        "<coordinates",
        "tensors",
        "payload",
        "read",
        "reads",
        f"files of {files}",
    )
    total_bytes = 0
    for rank in range(plan.world_size):
        own = plan.for_rank(rank)
        total_bytes += own.read_bytes
        by_rank.add_row(
            str(rank),
            ", ".join(f"{axis} {at}" for axis, at in zip(plan.mesh.axes, plan.mesh.coordinates(rank), strict=True)),
            str(len(own)),
            format_size(own.payload_bytes),
            format_size(own.read_bytes),
            str(len(own.extents)),
            str(len(set(own.extent_shard.tolist()))),
        )
    all_bytes = int((plan.catalog.stops - plan.catalog.starts).sum())
    share = f", {total_bytes / all_bytes:.2f} times its payload" if all_bytes else ""
    show(
        by_rank,
        *_host_tables(plan),
        *(strips := shares_of_files(plan)),
        *([STRIPS] if strips else []),
        f"All ranks together read {format_size(total_bytes)} of a checkpoint of {format_size(all_bytes)}{share}.",
        f"catalog {plan.catalog.digest}",
        f"plan    {plan.digest}",
        *(f"warning: {escape(warning)}" for warning in plan.warnings),
    )


def _host_tables(plan: LoadPlan) -> list[Table | str]:
    """Which rows of tables each rank holds, and what host memory that takes. Nothing for a load without tables."""
    if not plan.decisions.tables:
        return []
    by_rank = table("Host-resident tables", "rank", "<name", "<layout", "<rows", "bytes")
    for rank in range(plan.world_size):
        for part in plan.tables_of(rank):
            rows = f"{part.rows[0]}:{part.rows[1]}"
            by_rank.add_row(str(rank), escape(part.name), part.layout, rows, format_size(part.held_bytes))
    memory = plan.host_memory
    return [
        by_rank,
        f"Host memory of tables: at most {format_size(memory.rank_bytes)} a rank for its own rows (per_rank), "
        f"{format_size(memory.shared_bytes)} a node for whole tables (shared); "
        f"{format_size(memory.one_node_bytes)} with all ranks on one node.",
    ]


def shares_of_files(plan: LoadPlan, *, max_files: int = 64, max_ranks: int = 16) -> list[str]:
    """A strip of shades a rank, as `STRIPS` says. Empty if too large."""
    shards = plan.catalog.shards
    if len(shards) > max_files or plan.world_size > max_ranks:
        return []
    lines = []
    shades = _shades(sys.stdout.encoding)
    for rank in range(plan.world_size):
        own = plan.for_rank(rank)
        read = [0] * len(shards)
        for shard, start, stop in zip(
            own.extent_shard.tolist(), own.extent_start.tolist(), own.extent_stop.tolist(), strict=True
        ):
            read[shard] += stop - start
        payload = [shard.identity.size_bytes - shard.header_bytes for shard in shards]
        cells = "".join(_shade(part, whole, shades) for part, whole in zip(read, payload, strict=True))
        lines.append(f"{plan.load} rank {rank}  |{cells}|")
    return lines


def _shades(encoding: str | None) -> str:
    try:
        _SHADES.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _ASCII_SHADES
    return _SHADES


def _shade(part: int, whole: int, shades: str) -> str:
    """The lightest shade for any byte at all, full for (nearly) all of them."""
    if part == 0 or whole == 0:
        return shades[0] * 2
    return shades[min(4, 1 + int(4 * part / whole * 0.999))] * 2


def show_reports(reports: Sequence[LoadReport | Mapping[str, object]]) -> None:
    """What a load did, a row a rank; what became of policies; fallbacks and warnings once."""
    documents = [report.as_dict() if isinstance(report, LoadReport) else report for report in reports]
    first = documents[0]
    by_rank = table(
        f"Load {escape(str(first['load']))} on {_ranks(len(documents))}",
        "rank",
        "tensors",
        "payload",
        "read",
        "files",
        "peak staging",
        "seconds",
        "GiB/s",
        "<verified",
    )
    for document in documents:
        by_rank.add_row(
            str(document["rank"]),
            str(document["tensors"]),
            format_size(cast("int", document["payload_bytes"])),
            format_size(cast("int", document["read_bytes"])),
            str(document["files_opened"]),
            format_size(cast("int", document["peak_staging_bytes"])),
            f"{cast('float', document['seconds']):.3f}",
            f"{cast('float', document['gib_per_s']):.2f}",
            _verified(document),
        )
    lines = [f"fallback{words}" for words in said_by_ranks(documents, "fallbacks")]
    lines += [f"warning{words}" for words in said_by_ranks(documents, "warnings")]
    show(by_rank, *_policies(documents), *map(escape, lines))


def _verified(document: Mapping[str, object]) -> str:
    if document["verified"] is None and document["checked_bytes"] is not None:
        return f"{format_size(cast('int', document['checked_bytes']))} of it"
    return {True: "yes", False: "no", None: "not asked for"}[cast("bool | None", document["verified"])]


_OF_WHAT = {
    "access": "streamed tensors",
    "sharing": "streamed tensors",
    "drop_page_cache": "streamed tensors",
    "service": "what a service keeps",
    "threads": "all reads",
    "pin": "staging memory",
}


def _policies(documents: Sequence[Mapping[str, object]]) -> list[Table | str]:
    """Every policy that was not done as it was written, and what it is about; ranks that did the same, together. How
    ranks shared, and whether a service was there, is always said: what a load costs its node hangs on it."""
    ranks_of: dict[tuple[str, str, str, str], list[str]] = {}
    for document in documents:
        for name, policy in cast("Mapping[str, Mapping[str, str]]", document["policies"]).items():
            asked = f"kept, else {policy['requested']}" if name == "service" else policy["requested"]
            outcome = (name, asked, policy["effective"], policy["reason"])
            if name == "sharing" or asked != policy["effective"]:
                ranks_of.setdefault(outcome, []).append(str(document["rank"]))
    if not ranks_of:
        return []
    several = len(documents) > 1
    made = table("Policies", "of", "<policy", "<asked for", "<done", "<why", *(["<ranks"] if several else []))
    names = list(dict.fromkeys(name for name, *_ in ranks_of))
    for (name, *words), ranks in sorted(ranks_of.items(), key=lambda item: names.index(item[0][0])):
        layout = name.removeprefix("tables_")
        about = (_OF_WHAT.get(name, ""), name) if layout == name else (f"tables ({layout})", "access")
        whose = ["all" if len(ranks) == len(documents) else ", ".join(ranks)] if several else []
        made.add_row(*about, *map(escape, words), *whose)
    return [made]


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
