"""Timelines as a page of their own: inline SVG in one HTML file that asks nobody for anything.

Pure text. Everything that comes from outside is escaped; light and dark follow the reader's system; charts shrink with
the window and keep their letters readable on a telephone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import floor, log10
from types import MappingProxyType

from loader_service.cli.html_page import document, key, table
from loader_service.sizes import UNITS, format_size
from loader_service.timeline import Timeline

_GIB, _MIB = UNITS["GiB"], UNITS["MiB"]
_WIDTH, _HEIGHT = 400, 176
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 392, 12, 146
_MOST_TITLES = 80  # what the pointer can rest on, along a chart

STYLE = """
.charts { display: grid; gap: .25rem 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .area { stroke: none; fill-opacity: .22; }
.top { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 2 3; }
"""
# Lines differ in dashes as well as in colour.
_DASHES = ("", "6 3", "2 2")
_OPEN_RANKS = 4  # shown unfolded
_NO_TOPS: Mapping[int, float] = MappingProxyType({})
_PHASES = ("config", "catalog", "plan", "open", "read", "finish")


@dataclass(frozen=True, slots=True)
class Page:
    """What stands on the page. `rows` are a table under `columns`, `tops_gib_per_s` the limits drawn into the charts of
    throughput, by rank, with their name."""

    title: str
    sentences: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    timelines: Sequence[Timeline]
    tops_gib_per_s: Mapping[int, float] = field(default_factory=dict)
    top_name: str = ""


@dataclass(frozen=True, slots=True)
class _Series:
    name: str
    values: Sequence[float]
    area: bool = False


@dataclass(frozen=True, slots=True)
class _Chart:
    """One picture over time. `what` is its heading, with the unit; `says` one line about it."""

    what: str
    unit: str
    says: str
    series: Sequence[_Series]
    top: float | None = None
    top_name: str = ""
    whole: bool = False  # counts: the axis has whole numbers


def render(page: Page) -> str:
    """The whole HTML document."""
    body = table(page.columns, page.rows) + over_time(page.timelines, page.tops_gib_per_s, page.top_name)
    return document(page.title, page.sentences, body, style=STYLE)


def over_time(timelines: Sequence[Timeline], tops_gib_per_s: Mapping[int, float] = _NO_TOPS, top_name: str = "") -> str:
    """Each rank's load over time as markup, in `STYLE`: its phases and its charts, with the limits as in a `Page`."""
    return "".join(
        _rank(each, tops_gib_per_s.get(each.rank), top_name, unfolded=i < _OPEN_RANKS)
        for i, each in enumerate(timelines)
    )


def _rank(timeline: Timeline, top: float | None, top_name: str, *, unfolded: bool) -> str:
    charts = "".join(_figure(chart, timeline) for chart in _charts(timeline, top, top_name))
    return (
        f"<details{' open' if unfolded else ''}>\n<summary>Rank {timeline.rank}: {timeline.seconds:.3f} s</summary>\n"
        f"{_phases(timeline.phases, timeline.seconds)}"
        f'<div class="charts">\n{charts}</div>\n</details>\n'
    )


def _charts(timeline: Timeline, top_gib_per_s: float | None, top_name: str) -> Sequence[_Chart]:
    def rate(values: Sequence[float]) -> list[float]:
        return [value / _GIB / timeline.step_s if timeline.step_s else 0.0 for value in values]

    held = [value / _MIB for value in timeline.held_bytes]
    return (
        _Chart(
            "Throughput, GiB/s",
            "GiB/s",
            "How fast bytes were ready for the consumer, and how fast it took them.",
            (_Series("ready", rate(timeline.filled_bytes), area=True), _Series("taken", rate(timeline.taken_bytes))),
            top_gib_per_s,
            top_name,
        ),
        _Chart(
            "Reads in flight",
            "at once",
            "How many of the reading threads were at work; gaps are time in which nothing was read.",
            (_Series("in flight", timeline.in_flight, area=True),),
            float(timeline.threads),
            "threads",
            whole=True,
        ),
        _Chart(
            "Queue depth, units",
            "units",
            "What was filled and not yet taken; a queue that stays full waits for the consumer.",
            (_Series("waiting to be taken", timeline.queued, area=True),),
            whole=True,
        ),
        _Chart(
            "Staging memory held, MiB",
            "MiB",
            f"Memory for reading ahead that was out, of {format_size(timeline.capacity_bytes)}.",
            (_Series("held", held, area=True),),
            timeline.capacity_bytes / _MIB,
            "capacity",
        ),
    )


def _figure(chart: _Chart, timeline: Timeline) -> str:
    highest = max((value for each in chart.series for value in each.values), default=0.0)
    scale = _ceiling(max(highest, chart.top or 0.0), whole=chart.whole)
    seconds = timeline.seconds or 1.0
    parts = [_axes(scale, timeline.seconds)]
    for number, each in enumerate(chart.series):
        parts.append(_drawn(each, number, scale))
    if chart.top is not None:
        y = _y(chart.top, scale)
        parts.append(f'<line class="top" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"></line>')
    parts.append(_hits(chart, seconds))
    keys = [_key(each.name, f"s{number}", _DASHES[number]) for number, each in enumerate(chart.series)]
    if chart.top is not None:
        keys.append(_key(f"{chart.top_name}: {_number(chart.top)} {chart.unit}", "top", "2 3"))
    label = escape(f"{chart.what} over {timeline.seconds:.2f} seconds, rank {timeline.rank}", quote=True)
    return (
        f"<figure>\n<h3>{escape(chart.what)}</h3>\n"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>\n'
        f'<ul class="key">{"".join(keys)}</ul>\n'
        f'<figcaption class="faint">{escape(chart.says)}</figcaption>\n</figure>\n'
    )


def _key(name: str, css: str, dashes: str) -> str:
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    return key(name, f'<line class="{css}" x1="0" x2="28" y1="8" y2="8" stroke-width="3"{dash}></line>')


def _axes(scale: float, seconds: float) -> str:
    lines = []
    for part in (0.0, 0.5, 1.0):
        y = _y(part * scale, scale)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"></line>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(part * scale)}</text>')
    for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        x = _LEFT + part * (_RIGHT - _LEFT)
        unit = " s" if part == 1.0 else ""
        text = f"{_number(part * seconds)}{unit}"
        lines.append(f'<text x="{x:.1f}" y="{_BOTTOM + 18}" text-anchor="{anchor}">{text}</text>')
    return "".join(lines)


def _drawn(series: _Series, number: int, scale: float) -> str:
    """Steps as a line through their middles, and the area under it."""
    points = [(_x(i + 0.5, len(series.values)), _y(value, scale)) for i, value in enumerate(series.values)]
    if not points:
        return ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    area = ""
    if series.area:
        ends = f"{points[0][0]:.1f},{_BOTTOM} {path} {points[-1][0]:.1f},{_BOTTOM}"
        area = f'<polygon class="area f{number}" points="{ends}"></polygon>'
    dash = f' stroke-dasharray="{_DASHES[number]}"' if _DASHES[number] else ""
    return f'{area}<polyline class="line s{number}" points="{path}"{dash}></polyline>'


def _hits(chart: _Chart, seconds: float) -> str:
    """What the pointer can rest on: a strip a step, or for a few of them, with the means there as its title."""
    count = max(len(each.values) for each in chart.series)
    stride = max(1, -(-count // _MOST_TITLES))
    strips = []
    for start in range(0, count, stride):
        stop = min(count, start + stride)
        means = (f"{each.name} {_number(sum(each.values[start:stop]) / (stop - start))}" for each in chart.series)
        title = f"{start / count * seconds:.3f} s: {', '.join(means)} {chart.unit}"
        left, right = _x(start, count), _x(stop, count)
        strips.append(
            f'<rect class="hit" x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{_BOTTOM - _TOP}">'
            f"<title>{escape(title)}</title></rect>"
        )
    return "".join(strips)


def _phases(phases: Mapping[str, float], seconds: float) -> str:
    """The phases as one bar, in order, and in words below it."""
    known = [(name, phases[name]) for name in _PHASES if name in phases]
    whole = max(seconds, sum(spent for _, spent in known)) or 1.0
    at, bars, keys = 0.0, [], []
    for number, (name, spent) in enumerate(known):
        title = f"<title>{escape(f'{name}: {spent:.3f} s')}</title>"
        left, width = at / whole * _WIDTH, spent / whole * _WIDTH
        bars.append(f'<rect class="f{number}" x="{left:.1f}" y="0" width="{width:.2f}" height="18">{title}</rect>')
        square = f'<rect class="f{number}" x="0" y="0" width="28" height="16"></rect>'
        keys.append(key(f"{name} {spent:.3f} s", square))
        at += spent
    return (
        f'<h3>Phases</h3>\n<svg viewBox="0 0 {_WIDTH} 18" preserveAspectRatio="none" style="height:1.25rem" role="img" '
        f'aria-label="phases of the load">{"".join(bars)}</svg>\n<ul class="key">{"".join(keys)}</ul>\n'
    )


def _x(step: float, count: int) -> float:
    return _LEFT + step / count * (_RIGHT - _LEFT)


def _y(value: float, scale: float) -> float:
    return _BOTTOM - min(1.0, max(0.0, value / scale)) * (_BOTTOM - _TOP)


def _ceiling(value: float, *, whole: bool) -> float:
    """The next round number, so that half of it is one too."""
    if value <= 0:
        return 2.0 if whole else 1.0
    if whole:
        return max(2.0, -(-value // 2) * 2.0)
    step = 10.0 ** floor(log10(value))
    return next(factor * step for factor in (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0) if factor * step >= value)


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
