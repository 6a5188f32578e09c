"""The picture of a plan: each file a strip to scale, and below it what each rank takes of it. Pure text: SVG.

A bar is as high as the part of its bytes that is meant, so that nothing is lost where many tensors fall into one bin.
Widths are per cent of the picture, which therefore shrinks with the window while its letters do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from html import escape
from typing import Final

import numpy as np

from loader_service.cli.html_page import COLOURS
from loader_service.cli.plan_bins import Bins, Floats, Ranges
from loader_service.cli.plan_figures import Figures, Row
from loader_service.cli.plan_titles import Titles, plain, spans
from loader_service.sizes import format_size

STYLE: Final = """
.bed { fill: var(--rule); opacity: .5; } .head { fill: var(--faint); } .draft { fill: var(--ink); }
.skip { stroke: var(--faint); stroke-width: 1; fill: none; vector-effect: non-scaling-stroke; }
.tick { stroke: var(--faint); stroke-width: 1; } .name { fill: var(--ink); font-weight: 600; }
"""

LEFT = 22  # per cent of the width, for the names of rows
_WIDTH, _MARGIN = 800, 16  # of a picture that stands alone
_FILE, _BAR, _THIN = 12, 10, 4  # heights
_HATCHES, _LEAST_HATCH = 90, 3  # lines over the longest file, and how high they are at least
_HEAD, _ONE, _SEVERAL, _COLUMNS, _TABLES = "head", "f0", "f1", "f3", "f2"
_DRAFT, _FOR_ALL, _SKIP = "draft", "f4", "skip"

Heights = Sequence[np.ndarray]


class _Strips:
    """The drawing of one file, a path for each class. x counts bins, y pixels."""

    def __init__(self, bins: int, most: int) -> None:
        self._bins = bins
        self._step = max(1, most // _HATCHES)
        self._paths: dict[str, list[str]] = {}
        self.height = 0

    def lane(self, height: int, layers: Mapping[str, Floats], *, hatched: bool = False) -> None:
        """Below what is there: what each layer has of each bin, one on top of the other; `hatched`: and what none."""
        self._draw("bed", 0, self._bins, self.height, height)
        heights = _heights(list(layers.values()), height)
        below = np.zeros(self._bins, dtype=np.int64)
        for css, own in zip(layers, heights, strict=True):
            self._layer(css, self.height + height - below - own, own)
            below = below + own
        if hatched:
            for bin_ in range(0, self._bins, self._step):
                rest = height - int(below[bin_])
                if rest >= _LEAST_HATCH:
                    end = min(bin_ + self._step, self._bins)
                    self._paths.setdefault(_SKIP, []).append(f"M{bin_} {self.height + rest}L{end} {self.height}")
        self.height += height + 1

    def space(self, height: int) -> None:
        self.height += height

    def _layer(self, css: str, top: np.ndarray, height: np.ndarray) -> None:
        edges = np.flatnonzero(np.diff(top * 64 + height)) + 1
        for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), self._bins], strict=True):
            if height[start]:
                self._draw(css, start, stop, int(top[start]), int(height[start]))

    def _draw(self, css: str, start: int, stop: int, top: int, height: int) -> None:
        path = f"M{start} {top}h{stop - start}v{height}h-{stop - start}z"
        self._paths.setdefault(css, []).append(path)

    def markup(self) -> str:
        order = sorted(self._paths, key=lambda css: (css != "bed", css != _SKIP))
        return "".join(f'<path class="{css}" d="{"".join(self._paths[css])}"/>' for css in order)


def _heights(shares: Sequence[Floats], height: int) -> Heights:
    """Whole pixels: whatever there is of a bin shows, and together they are no higher than the lane."""
    if not shares:
        return []
    found = np.ceil(np.array(shares) * height - 1e-9).astype(np.int64)
    for _ in shares:  # at most one pixel too many for each
        over = found.sum(axis=0) > height
        found[found.argmax(axis=0)[over], np.flatnonzero(over)] -= 1
    return list(found)


class Picture:
    """Draws a plan file by file."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._most = int(np.diff(figures.bins.first).max(initial=1))
        bins = figures.bins
        streamed = np.maximum(bins.share(figures.taken) - bins.share(figures.tables), 0.0)
        several = np.minimum(bins.share(figures.several), streamed)
        self._file = {
            _HEAD: bins.share(figures.header),
            _SEVERAL: several,
            _ONE: streamed - several,
            _TABLES: bins.share(figures.tables),
        }
        self._draft = _shares(bins, [figures.draft] if figures.draft_name else [])
        node = figures.node
        # Of blocks and stripes there are only those of the way that would be taken.
        self._for_all = _shares(bins, [] if node is None else node.block_ranges or node.stripe_ranges)

    def file(self, shard: int, *, names: bool = False, axis: bool = True) -> tuple[str, int]:
        """(markup, height) of one file: the strip of the file, of each rank that takes or reads any of it, and the
        scale under them; with `names` the pointer finds titles."""
        strips = _Strips(self._figures.bins.count(shard), self._most)
        labels = [("file", strips.height)]
        self._strip(strips, shard)
        for number, row in enumerate(self._figures.rows):
            if self._takes(row, number, shard):
                strips.space(3)
                labels.append((spans(row.ranks), strips.height))
                self._rank(strips, row, number, shard)
        hits = self._hits(shard, strips.height) if names else ""
        markup = [_label(text, y) for text, y in labels] + [self._placed(strips, hits)]
        height = strips.height + 2
        if axis:
            markup.append(self.axis(height))
            height += 18
        return "".join(markup), height

    def overview(self) -> tuple[str, int]:
        """(markup, height): every file's strip, one under the other, with its name."""
        parts, at = [], 0
        for shard, each in enumerate(self._figures.plan.catalog.shards):
            strips = _Strips(self._figures.bins.count(shard), self._most)
            self._strip(strips, shard)
            title = f"<title>{escape(plain(each.name))}</title>"
            label = f'<text x="{LEFT - 1}%" y="10" text-anchor="end">{shard + 1}{title}</text>'
            parts.append(f'<svg y="{at}" height="{strips.height}">{label}{self._placed(strips, title)}</svg>')
            at += strips.height + 3
        return "".join(parts) + self.axis(at), at + 18

    def axis(self, y: int) -> str:
        """The scale of all strips, in bytes."""
        sizes = np.diff(self._figures.line.shard_start)
        longest = int(sizes.max(initial=0))
        parts = []
        for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
            x = LEFT + part * (100 - LEFT)
            text = "0" if part == 0 else format_size(int(longest * part))
            parts.append(f'<line class="tick" x1="{x:g}%" x2="{x:g}%" y1="{y - 2}" y2="{y + 3}"/>')
            parts.append(f'<text x="{x:g}%" y="{y + 14}" text-anchor="{anchor}">{text}</text>')
        return "".join(parts)

    def legend(self) -> list[tuple[str, str]]:
        """(what it means, its mark: 28 wide and 16 high) of everything that the picture has."""
        figures = self._figures

        def block(css: str, height: int = 12) -> str:
            return f'<rect class="{css}" x="0" y="{(16 - height) // 2}" width="28" height="{height}"/>'

        lines = "".join(f'<path class="skip" d="M{x} 14l6 -12"/>' for x in range(0, 24, 6))
        found = [("header", block(_HEAD)), ("taken by one rank alone", block(_ONE))]
        if len(figures.several[0]):
            found.append(("taken by several ranks", block(_SEVERAL)))
        if any(row.columns.any() for row in figures.rows):
            found.append(("rows of which the rank takes columns", block(_COLUMNS)))
        if len(figures.tables[0]):
            found.append(("rows of host-resident tables", block(_TABLES)))
        found.append(("taken by nobody", lines))
        if figures.draft_name:
            found.append((f"load {plain(figures.draft_name)}", block(_DRAFT, _THIN)))
        if figures.node is not None and figures.node.block_ranges:
            found.append(("staging: blocks that the rank reads for all", block(_FOR_ALL, _THIN)))
        if figures.node is not None and figures.node.stripe_ranges:
            found.append(("page_cache: stripes that the rank reads ahead for all", block(_FOR_ALL, _THIN)))
        return found

    def _strip(self, strips: _Strips, shard: int) -> None:
        own = self._own(shard)
        strips.lane(_FILE, {css: share[own] for css, share in self._file.items()}, hatched=True)
        if self._draft and self._draft[0][own].any():
            strips.lane(_THIN, {_DRAFT: self._draft[0][own]})

    def _takes(self, row: Row, number: int, shard: int) -> bool:
        """Whether a row has anything of a shard."""
        own = self._own(shard)
        lanes = self._for_all[number : number + 1]
        return any(bool(share[own].any()) for share in (row.several, row.alone, row.columns, row.tables, *lanes))

    def _rank(self, strips: _Strips, row: Row, number: int, shard: int) -> None:
        own = self._own(shard)
        shares = {_SEVERAL: row.several, _ONE: row.alone, _COLUMNS: row.columns, _TABLES: row.tables}
        strips.lane(_BAR, {css: share[own] for css, share in shares.items()})
        if number < len(self._for_all):
            strips.lane(_THIN, {_FOR_ALL: self._for_all[number][own]})

    @cached_property
    def _titles(self) -> Titles:
        return Titles(self._figures)

    def _own(self, shard: int) -> slice:
        first = self._figures.bins.first
        return slice(int(first[shard]), int(first[shard + 1]))

    def _placed(self, strips: _Strips, hits: str) -> str:
        return (
            f'<svg x="{LEFT}%" width="{100 - LEFT}%" height="{strips.height}" '
            f'viewBox="0 0 {self._most} {strips.height}" preserveAspectRatio="none">{strips.markup()}{hits}</svg>'
        )

    def _hits(self, shard: int, height: int) -> str:
        figures, parts = self._figures, []
        bounds = figures.titles_first[figures.titles.first[shard] : figures.titles.first[shard + 1] + 1]
        bounds = bounds - figures.bins.first[shard]
        for number, text in enumerate(self._titles.of(shard)):
            start, stop = int(bounds[number]), int(bounds[number + 1])
            parts.append(
                f'<rect class="hit" x="{start}" y="0" width="{stop - start}" height="{height}">'
                f"<title>{escape(text)}</title></rect>"
            )
        return "".join(parts)


def standalone(figures: Figures, title: str) -> str:
    """The whole picture as an SVG document of its own, without titles for a pointer."""
    picture = Picture(figures)
    parts, at = [f'<text class="name" x="0" y="14">{escape(title)}</text>'], 40
    for shard, each in enumerate(figures.plan.catalog.shards):
        size = format_size(each.identity.size_bytes)
        parts.append(f'<text x="0" y="{at}">{escape(plain(each.name))}, {size}</text>')
        drawn, height = picture.file(shard, axis=shard == len(figures.plan.catalog.shards) - 1)
        parts.append(f'<svg y="{at + 6}" height="{height}">{drawn}</svg>')
        at += height + 28
    for number, (name, mark) in enumerate(picture.legend()):
        x, y = number % 2 * (_WIDTH // 2 - _MARGIN), at + number // 2 * 20
        parts.append(f'<svg x="{x}" y="{y - 12}" width="28" height="16">{mark}</svg>')
        parts.append(f'<text x="{x + 36}" y="{y}">{escape(name)}</text>')
    height = at + (len(picture.legend()) + 1) // 2 * 20 + _MARGIN
    inner = _WIDTH - 2 * _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">\n<style>{COLOURS}{STYLE}</style>\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="var(--paper)"/>\n'
        f'<svg x="{_MARGIN}" y="{_MARGIN}" width="{inner}" height="{height - _MARGIN}">\n'
        + "\n".join(parts)
        + "\n</svg>\n</svg>\n"
    )


def _shares(bins: Bins, ranges: Iterable[Ranges]) -> list[Floats]:
    return [bins.share(each) for each in ranges]


def _label(text: str, y: int) -> str:
    return f'<text x="{LEFT - 1}%" y="{y + 10}" text-anchor="end">{text}</text>'
