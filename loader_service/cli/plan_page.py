"""`plan --html`: the picture of a plan on a page of its own, with what it comes to in words and in a table. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Final

from loader_service.cli.html_page import document, key, table
from loader_service.cli.plan_bins import nbytes
from loader_service.cli.plan_draft import Served
from loader_service.cli.plan_figures import NODE_RANKS, Figures, Node, figures_of
from loader_service.cli.plan_picture import STYLE as PICTURE_STYLE
from loader_service.cli.plan_picture import Picture
from loader_service.cli.plan_titles import plain, spans
from loader_service.planning.plan import LoadPlan
from loader_service.sharing.decision import LEAST_SAVED_BYTES, Request
from loader_service.sizes import format_size

STYLE: Final = (
    PICTURE_STYLE
    + """
.strips svg { display: inline; height: auto; overflow: hidden; } .strips { margin: .5rem 0 1rem; }
summary { overflow-wrap: anywhere; }
"""
)
_OPEN_FILES = 8  # shown unfolded
_MOST_BINS, _LEAST_BINS = 480, 40
_MOST_TITLES, _LEAST_TITLES = 80, 8


def page_of(
    plan: LoadPlan,
    *,
    slot_bytes: int | None,
    sharing: Request = "auto",
    draft: LoadPlan | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The HTML document. `slot_bytes`, `sharing` and `draft` as for `figures_of`, `notes` are sentences beside its own.
    Blocking: it plans every rank."""
    figures = page_figures(plan, slot_bytes=slot_bytes, sharing=sharing, draft=draft)
    said = [*sentences(figures)]
    said[1:1] = [_sharing(figures.node)] if figures.node is not None else []
    return document(
        f"Load {in_short(plan)}: who reads what",
        [f"Checkpoint {folder(plan)}.", *said, *notes, *plan.warnings],
        f"{table(*_table(figures))}{strips(figures)}",
        style=STYLE,
    )


def page_figures(
    plan: LoadPlan, *, slot_bytes: int | None, sharing: Request = "auto", draft: LoadPlan | None = None
) -> Figures:
    """`figures_of` for a page: finer where there are few files, so that one of hundreds of them has some hundred KB."""
    shards = max(1, len(plan.catalog.shards))
    return figures_of(
        plan,
        slot_bytes=slot_bytes,
        sharing=sharing,
        draft=draft,
        most_bins=max(_LEAST_BINS, min(_MOST_BINS, 6000 // shards)),
        most_titles=max(_LEAST_TITLES, min(_MOST_TITLES, 1600 // shards)),
    )


def strips(figures: Figures) -> str:
    """Every file with what is taken of it, and what the colours mean, as markup in `STYLE`."""
    picture, shards = Picture(figures), figures.plan.catalog.shards
    keys = "".join(key(name, mark) for name, mark in picture.legend())
    parts = [f'<ul class="key">{keys}</ul>\n']
    if len(shards) > _OPEN_FILES:
        parts.append(f"<h2>All files</h2>\n{_figure(*picture.overview(), 'the strips of all files')}")
    return "".join(parts + [_file(figures, picture, shard) for shard in range(len(shards))])


def in_short(plan: LoadPlan) -> str:
    """Which load, on how many ranks."""
    return f"{plain(plan.load)} on {_ranks(plan)}{_mesh(plan)}"


def _file(figures: Figures, picture: Picture, shard: int) -> str:
    each = figures.plan.catalog.shards[shard]
    size = format_size(each.identity.size_bytes)
    drawn = _figure(*picture.file(shard, names=True), f"who takes what of {plain(each.name)}")
    unfolded = " open" if len(figures.plan.catalog.shards) <= _OPEN_FILES else ""
    name = f"{shard + 1}. {plain(each.name)}"
    return f"<details{unfolded}>\n<summary>{escape(name)}, {size}</summary>\n{drawn}</details>\n"


def _figure(drawn: str, height: int, label: str) -> str:
    return f'<svg class="strips" style="height:{height}px" role="img" aria-label="{escape(label)}">{drawn}</svg>\n'


def sentences(figures: Figures) -> Iterator[str]:
    """What the pictures show, in words: how much is for whom, and where the draft lies."""
    plan, catalog = figures.plan, figures.plan.catalog
    payload = int((catalog.stops - catalog.starts).sum())
    taken = nbytes(figures.taken)
    yield (
        f"Of {format_size(payload)} of payload in {len(catalog.shards)} files {format_size(taken)} are for "
        f"{_ranks(plan)}, {format_size(nbytes(figures.several))} of it for more than one rank, and "
        f"{format_size(payload - taken)} for nobody."
    )
    if plan.world_size > NODE_RANKS:
        yield f"Ranks from {NODE_RANKS} on are drawn in groups; {NODE_RANKS} ranks are taken for a node."
    if figures.draft_name:
        yield _draft(figures)
    yield (
        "Strips are to scale, and a bar is as high as the part of its bytes that is meant. Rest the pointer on a file "
        "for byte ranges, names and ranks, or go to it with the tab key, and on with the arrows."
    )


def _ranks(plan: LoadPlan) -> str:
    return f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}"


def _mesh(plan: LoadPlan) -> str:
    sizes = [f"{plain(axis)} {size}" for axis, size in zip(plan.mesh.axes, plan.mesh.sizes, strict=True)]
    return f" ({', '.join(sizes)})" if sizes else ""


def folder(plan: LoadPlan) -> str:
    """Where the files lie; of several folders the one above them."""
    folders = {str(Path(shard.path).parent) for shard in plan.catalog.shards}
    return plain(os.path.commonpath(folders)) if folders else "without files"


def _sharing(node: Node) -> str:
    """What several ranks of a node want, and what `reads.sharing` makes of it if all of them can share."""
    blocks, way = node.blocks, node.opinion.way
    found = (
        f"On a node with ranks 0 to {blocks.ranks - 1} these want {format_size(blocks.wanted_bytes)}, of which "
        f"{format_size(blocks.union_bytes)} are different bytes. With reads.sharing {node.requested} "
    )
    if way == "staging":
        saved = format_size(blocks.wanted_bytes - blocks.union_bytes)
        why = "" if node.requested == "staging" else f", since they want {saved} twice"
        lie = f"{format_size(blocks.shared_bytes)} lie in {len(blocks)} blocks that are read once"
        return f"{found}they share staging memory, if all of them can{why}: {lie}."
    if way == "page_cache":
        why = "" if node.requested == "page_cache" else f" ({node.opinion.reason})"
        return f"{found}they read ahead into the page cache, if all of them can{why}: each byte once, by turns."
    why = node.opinion.reason
    if way is None:
        why += f", and {format_size(LEAST_SAVED_BYTES)} are the least for which they share"
    return f"{found}each of them reads for itself: {why}."


def _draft(figures: Figures) -> str:
    """What a draft takes, and what the cache can serve each rank of it; ranks that are served alike, together."""
    ranks_of: dict[Served, list[int]] = {}
    for rank, served in enumerate(figures.draft_served):
        ranks_of.setdefault(served, []).append(rank)
    name = plain(figures.draft_name)
    found = (
        f"Load {name} takes {format_size(nbytes(figures.draft))} of tensors. After this load, with room for all of it, "
        "the raw weight cache can serve of what a rank reads for that at most "
    )
    if len(ranks_of) > NODE_RANKS:
        least, most = (format_size(end(each.served_bytes for each in ranks_of)) for end in (min, max))
        return f"{found}{least} to {most}."
    each_of = (
        f"{format_size(served.served_bytes)} of {format_size(served.wanted_bytes)} on {spans(ranks)}"
        for served, ranks in ranks_of.items()
    )
    return f"{found}{'; '.join(each_of)}."


def _table(figures: Figures) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    columns = ["", "takes"]
    sliced, tables = (
        any(sizes) for sizes in zip(*((r.columns_bytes, r.tables_bytes) for r in figures.rows), strict=True)
    )
    columns += ["of it column slices"] * sliced + ["of it rows of tables"] * tables + ["reads without sharing"]
    node = figures.node
    if node is not None and node.block_ranges:
        columns += ["staging: reads for all", "staging: reads for itself"]
    if node is not None and node.stripe_ranges:
        columns += ["page_cache: reads ahead for all"]
    rows = []
    for number, row in enumerate(figures.rows):
        name = spans(row.ranks)
        if len(row.ranks) > 1:
            name += ", the most of one"
        sizes = [row.payload_bytes]
        sizes += [row.columns_bytes] * sliced + [row.tables_bytes] * tables + [row.read_bytes]
        if node is not None and number < len(node.block_ranges):
            sizes += [nbytes(node.block_ranges[number]), node.reads_apart[number]]
        if node is not None and number < len(node.stripe_ranges):
            sizes += [nbytes(node.stripe_ranges[number])]
        cells = [format_size(size) for size in sizes]
        rows.append([name, *cells, *[""] * (len(columns) - 1 - len(cells))])
    return columns, rows
