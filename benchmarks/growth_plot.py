"""Lines over logarithmic axes as a self-contained SVG that follows the reader's light or dark colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, PANEL_HEIGHT = 700, 440
LEFT, RIGHT, TOP, BOTTOM = 66, 190, 44, 58
LABEL_STEP = 15  # from one line's label to the next

Point = tuple[float, float]

_COLOURS = 10  # --c0 to --c9, below
_STYLE = """
  svg { --ink: #1f2328; --soft: #59636e; --grid: #d1d9e0; --ground: #ffffff;
    --c0: #0072b2; --c1: #d55e00; --c2: #007a5a; --c3: #b3478c; --c4: #8a6d00;
    --c5: #2f6fde; --c6: #a8323e; --c7: #5b8a00; --c8: #6f4fc4; --c9: #4d5a66 }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #e6edf3; --soft: #9198a1; --grid: #30363d; --ground: #0d1117;
      --c0: #56b4e9; --c1: #ff9d5c; --c2: #3fd0a0; --c3: #f09fd0; --c4: #e6c229;
      --c5: #8ab4ff; --c6: #ff8a93; --c7: #b5dd4f; --c8: #bda4ff; --c9: #b0bac4 }
  }
  rect { fill: var(--ground) }
  text { font: 12px system-ui, sans-serif; fill: var(--ink) }
  .title { font-size: 14px; font-weight: 600 }
  .tick, .guide-name { fill: var(--soft); font-size: 11px }
  .grid { stroke: var(--grid); stroke-width: 1 }
  .guide { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 4 4; fill: none }
  .line { stroke-width: 2; fill: none }
  .lead { stroke-width: 1; fill: none; opacity: .5 }
"""


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram. `lines`: (x, y) by name, x ascending, all above 0. Axes are named with their units."""

    title: str
    x_name: str
    y_name: str
    lines: Mapping[str, Sequence[Point]]


class _Scale:
    """From values to the picture, in whole decades."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        self.low = math.floor(math.log10(min(values)))
        self.high = max(self.low + 1, math.ceil(math.log10(max(values))))
        self._first, self._step = first, (last - first) / (self.high - self.low)

    def __call__(self, value: float) -> float:
        return self._first + (math.log10(value) - self.low) * self._step

    @property
    def decades(self) -> list[int]:
        return list(range(self.low, self.high + 1))


def svg(panels: Sequence[Panel]) -> str:
    """The panels one below the other, WIDTH pixels wide."""
    height = PANEL_HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img">\n<title>{escape("; ".join(panel.title for panel in panels))}</title>\n<style>{_STYLE}</style>',
        f'<rect width="{WIDTH}" height="{height}"/>',
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate(0 {number * PANEL_HEIGHT})">')
        parts += _panel(panel)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> Iterator[str]:
    points = [point for line in panel.lines.values() for point in line]
    x = _Scale([point[0] for point in points], LEFT, WIDTH - RIGHT)
    y = _Scale([point[1] for point in points], PANEL_HEIGHT - BOTTOM, TOP)
    yield _text(LEFT, 22, panel.title, "title")
    yield from _axes(panel, x, y)
    yield from _guides(x, y, min(point[0] for point in points), max(point[0] for point in points))
    ends = _apart([y(line[-1][1]) for line in panel.lines.values()])
    for number, ((name, line), label_y) in enumerate(zip(panel.lines.items(), ends, strict=True)):
        colour = f"var(--c{number % _COLOURS})"
        places = [(x(a), y(b)) for a, b in line]
        yield f'<polyline class="line" stroke="{colour}" points="{_path(places)}"/>'
        yield from (f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in places)
        last_x, last_y = places[-1]
        lead = [(last_x + 4, last_y), (WIDTH - RIGHT + 14, label_y), (WIDTH - RIGHT + 18, label_y)]
        yield f'<polyline class="lead" stroke="{colour}" points="{_path(lead)}"/>'
        yield f'<text x="{WIDTH - RIGHT + 22}" y="{label_y + 4:.1f}" style="fill: {colour}">{escape(name)}</text>'


def _axes(panel: Panel, x: _Scale, y: _Scale) -> Iterator[str]:
    bottom, right = PANEL_HEIGHT - BOTTOM, WIDTH - RIGHT
    for decade in x.decades:
        at = x(10.0**decade)
        yield f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom}"/>'
        yield _text(at, bottom + 18, f"{10**decade:,}", "tick", "middle")
    for decade in y.decades:
        at = y(10.0**decade)
        yield f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>'
        yield _text(LEFT - 6, at + 4, f"{10.0**decade:,g}", "tick", "end")
    yield _text((LEFT + right) / 2, bottom + 42, panel.x_name, "", "middle")
    middle = (TOP + bottom) / 2
    yield f'<text transform="translate(16 {middle:g}) rotate(-90)" text-anchor="middle">{escape(panel.y_name)}</text>'


def _guides(x: _Scale, y: _Scale, least: float, most: float) -> Iterator[str]:
    """n and n log n, through one point above the axes' corner, as far as they stay within the picture."""
    least = max(least, 2.0)
    steps = [least * (most / least) ** (i / 60) for i in range(61)]
    start = 10.0**y.low * 1.5
    guides: dict[str, Callable[[float], float]] = {"n": lambda n: n, "n log n": lambda n: n * math.log(n)}
    for name, cost in guides.items():
        values = [(n, start * cost(n) / cost(least)) for n in steps]
        inside = [(x(n), y(value)) for n, value in values if value <= 10.0**y.high]
        yield f'<polyline class="guide" points="{_path(inside)}"/>'
        last_x, last_y = inside[-1]
        shift = 12 if name == "n" else -6
        yield _text(last_x - 6, last_y + shift, name, "guide-name", "end")


def _apart(places: Sequence[float]) -> list[float]:
    """The places, moved so that labels there do not overlap and stay within the panel."""
    order = sorted(range(len(places)), key=places.__getitem__)
    found = list(places)
    reached = float(TOP)
    for i in order:
        reached = found[i] = max(found[i], reached)
        reached += LABEL_STEP
    limit = float(PANEL_HEIGHT - BOTTOM)
    for i in reversed(order):
        limit = found[i] = min(found[i], limit)
        limit -= LABEL_STEP
    return found


def _path(places: Sequence[Point]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in places)


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
