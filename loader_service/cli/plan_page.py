"""`plan --html`: the picture of a plan on a page of its own, with what it comes to in words and in a table. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from loader_service.cli.html_page import document, key, table
from loader_service.cli.plan_bins import inside, nbytes
from loader_service.cli.plan_figures import NODE_RANKS, Figures, figures_of
from loader_service.cli.plan_picture import STYLE, Picture
from loader_service.cli.plan_titles import plain, spans
from loader_service.planning.plan import LoadPlan
from loader_service.sizes import format_size

_STYLE: Final = (
    STYLE
    + """
.strips svg { display: inline; height: auto; overflow: hidden; } .strips { margin: .5rem 0 1rem; }
.wide { overflow-x: auto; }
.wide table { max-width: none; font-size: .875rem; } .wide :is(td, th) { padding-left: .5rem; white-space: nowrap; }
summary { overflow-wrap: anywhere; }
"""
)
_OPEN_FILES = 8  # shown unfolded
_MOST_BINS, _LEAST_BINS = 480, 40
_MOST_TITLES, _LEAST_TITLES = 80, 8


def page_of(plan: LoadPlan, *, slot_bytes: int | None, draft: LoadPlan | None = None, notes: Sequence[str] = ()) -> str:
    """The HTML document. `slot_bytes` and `draft` as for `figures_of`, `notes` are sentences beside its own. Blocking:
    it plans every rank."""
    shards = max(1, len(plan.catalog.shards))
    # Finer where there are few files, so that a page of hundreds of them has some hundred KB.
    figures = figures_of(
        plan,
        slot_bytes=slot_bytes,
        draft=draft,
        most_bins=max(_LEAST_BINS, min(_MOST_BINS, 6000 // shards)),
        most_titles=max(_LEAST_TITLES, min(_MOST_TITLES, 1600 // shards)),
    )
    picture = Picture(figures)
    keys = "".join(key(name, mark) for name, mark in picture.legend())
    body = [f'<div class="wide">{table(*_table(figures))}</div>\n<ul class="key">{keys}</ul>\n']
    if len(plan.catalog.shards) > _OPEN_FILES:
        body.append(f"<h2>All files</h2>\n{_figure(*picture.overview(), 'the strips of all files')}")
    body += [_file(figures, picture, shard) for shard in range(len(plan.catalog.shards))]
    title = f"Load {plain(plan.load)}: who reads what"
    return document(title, [*_sentences(figures), *notes, *plan.warnings], "".join(body), style=_STYLE)


def _file(figures: Figures, picture: Picture, shard: int) -> str:
    each = figures.plan.catalog.shards[shard]
    size = format_size(each.identity.size_bytes)
    drawn = _figure(*picture.file(shard, names=True), f"who takes what of {plain(each.name)}")
    unfolded = " open" if len(figures.plan.catalog.shards) <= _OPEN_FILES else ""
    name = f"{shard + 1}. {plain(each.name)}"
    return f"<details{unfolded}>\n<summary>{escape(name)}, {size}</summary>\n{drawn}</details>\n"


def _figure(drawn: str, height: int, label: str) -> str:
    return f'<svg class="strips" style="height:{height}px" role="img" aria-label="{escape(label)}">{drawn}</svg>\n'


def _sentences(figures: Figures) -> Iterator[str]:
    plan, catalog = figures.plan, figures.plan.catalog
    payload = int((catalog.stops - catalog.starts).sum())
    taken = nbytes(figures.taken)
    ranks = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}"
    yield (
        f"Of {format_size(payload)} of payload in {len(catalog.shards)} files {format_size(taken)} are for {ranks}, "
        f"{format_size(nbytes(figures.several))} of it for more than one rank, and {format_size(payload - taken)} for "
        "nobody."
    )
    if figures.node is not None:
        blocks = figures.node.blocks
        yield (
            f"On a node with ranks 0 to {blocks.ranks - 1} these want {format_size(blocks.wanted_bytes)}, of which "
            f"{format_size(blocks.union_bytes)} are different bytes: {format_size(blocks.shared_bytes)} lie in "
            f"{len(blocks)} blocks that are read once for several of them."
        )
    if plan.world_size > NODE_RANKS:
        yield f"Ranks from {NODE_RANKS} on are drawn in groups; {NODE_RANKS} ranks are taken for a node."
    if figures.draft_name:
        draft = nbytes(figures.draft)
        held = inside(figures.draft, figures.taken)
        yield (
            f"Load {plain(figures.draft_name)} takes {format_size(draft)} of tensors, of which this load takes "
            f"{format_size(held)}: the raw weight cache can serve no more than that after this load."
        )
    yield (
        "Strips are to scale, and a bar is as high as the part of its bytes that is meant. Rest the pointer on a file "
        "for byte ranges, names and ranks."
    )


def _table(figures: Figures) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    columns = ["", "takes", "reads alone"]
    sliced, tables = (
        any(sizes) for sizes in zip(*((r.columns_bytes, r.tables_bytes) for r in figures.rows), strict=True)
    )
    columns += ["of it column slices"] * sliced + ["of it tables"] * tables
    node = figures.node
    if node is not None:
        columns += ["staging: for all", "for itself", "page_cache: ahead"]
    rows = []
    for number, row in enumerate(figures.rows):
        name = spans(row.ranks)
        if len(row.ranks) > 1:
            name += ", the most of one"
        sizes = [row.payload_bytes, row.read_bytes]
        sizes += [row.columns_bytes] * sliced + [row.tables_bytes] * tables
        if node is not None and number < node.blocks.ranks:
            sizes += [nbytes(node.block_ranges[number]), node.reads_apart[number], nbytes(node.stripe_ranges[number])]
        cells = [format_size(size) for size in sizes]
        rows.append([name, *cells, *[""] * (len(columns) - 1 - len(cells))])
    return columns, rows
