"""What the picture of a plan says of each stretch of a file, where the pointer rests. Pure text, not escaped."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from loader_service.checkpoint.refusal import shown
from loader_service.cli.plan_figures import Figures
from loader_service.sizes import format_size

_LONGEST = 120
_MOST_SPANS = 8


class Titles:
    """The titles of one plan's picture: some lines for each stretch of `figures.titles`."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        stretches = figures.titles
        self._taken, self._several, self._tables, self._draft, self._header = (
            stretches.bytes_in(ranges).tolist()
            for ranges in (figures.taken, figures.several, figures.tables, figures.draft, figures.header)
        )
        node = figures.node
        self._blocks = [] if node is None else [stretches.bytes_in(own) > 0 for own in node.block_ranges]
        self._stripes = [] if node is None else [stretches.bytes_in(own) > 0 for own in node.stripe_ranges]
        if node is not None and node.block_ranges:
            line, blocks = figures.line, node.blocks
            numbers = np.repeat(np.arange(len(blocks)), np.diff(blocks.first_range))
            starts = line.at(blocks.range_shard, blocks.range_start)
            stops = line.at(blocks.range_shard, blocks.range_stop)
            self._first = numbers[np.minimum(np.searchsorted(stops, stretches.start, side="right"), len(numbers) - 1)]
            self._last = numbers[np.maximum(np.searchsorted(starts, stretches.stop, side="left") - 1, 0)]

    def of(self, shard: int) -> Iterator[str]:
        """The shard's titles, in file order."""
        catalog = self._figures.plan.catalog
        rows = slice(*np.searchsorted(catalog.shard_ids, [shard, shard + 1]).tolist())
        starts, stops = catalog.starts[rows], catalog.stops[rows]
        first = self._figures.titles.first
        at = self._figures.line.shard_start[shard]
        for number in range(int(first[shard]), int(first[shard + 1])):
            begin = int(self._figures.titles.start[number] - at)
            end = int(self._figures.titles.stop[number] - at)
            head = int(np.searchsorted(stops, begin, side="right")) + rows.start
            tail = int(np.searchsorted(starts, end, side="left")) + rows.start
            where = f"{plain(catalog.shards[shard].name)}, bytes {begin} to {end}: {format_size(end - begin)}"
            yield "\n".join((where, *self._lines(number, range(head, tail))))

    def _lines(self, number: int, tensors: range) -> Iterator[str]:
        names = self._figures.plan.catalog.names
        if len(tensors) > 1:
            yield f"{len(tensors)} tensors, {plain(names[tensors[0]])} to {plain(names[tensors[-1]])}"
        elif tensors:
            yield plain(names[tensors[0]])
        if self._header[number]:
            yield f"header: {format_size(self._header[number])}"
        yield from self._takers(number)
        yield from self._sharing(number)
        if self._draft[number]:
            yield f"of load {plain(self._figures.draft_name)}: {format_size(self._draft[number])}"

    def _takers(self, number: int) -> Iterator[str]:
        if not self._taken[number]:
            yield "taken by nobody"
            return
        several, tables = self._several[number], self._tables[number]
        yield (
            f"taken by {spans(np.flatnonzero(self._figures.takers[:, number]).tolist())}: "
            f"{format_size(self._taken[number])}"
            + (f", {format_size(several)} by several" if several else "")
            + (f", {format_size(tables)} of host-resident tables" if tables else "")
        )

    def _sharing(self, number: int) -> Iterator[str]:
        readers = [place for place, own in enumerate(self._blocks) if own[number]]
        if readers:
            first, last = int(self._first[number]), int(self._last[number])
            which = f"block {first}" if first == last else f"blocks {first} to {last}"
            yield f"staging: {which}, read by {spans(readers)}"
        ahead = [place for place, own in enumerate(self._stripes) if own[number]]
        if ahead:
            yield f"page_cache: read ahead by {spans(ahead)}"


def spans(ranks: Iterable[int]) -> str:
    """Ranks in words, ascending: "rank 3", "ranks 0-3, 8"."""
    numbers = list(ranks)
    found = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        own = [number for _, number in run]
        found.append(str(own[0]) if len(own) == 1 else f"{own[0]}-{own[-1]}")
    if len(found) > _MOST_SPANS:
        return f"ranks {', '.join(found[:_MOST_SPANS])} and others, {len(numbers)} in all"
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(found)}"


def plain(name: str) -> str:
    """A name as it is, where it can be shown so; else as messages show it: quoted and clipped."""
    if len(name) <= _LONGEST and name.isprintable():
        return name
    return shown(name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2]}...{name[-_LONGEST // 2 :]}")
