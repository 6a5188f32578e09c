"""docs/bytes.svg: the way of the bytes, from files to a consumer, as boxes and arrows, light or dark as its page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Final

from loader_service.cli.html_page import COLOURS

WIDTH, HEIGHT = 880, 572
TITLE: Final = "The way of the bytes: a plan first, then reads, memory, and your program"

_STYLE: Final = """
rect { fill: var(--paper); stroke: var(--rule); stroke-width: 1.5; }
rect.page { stroke: none; } .title { fill: var(--ink); font-size: 13px; } .head { fill: var(--ink); font-weight: 600; }
.code { font-family: ui-monospace, monospace; font-size: 12px; fill: var(--ink); }
path { fill: none; stroke: var(--faint); stroke-width: 1.5; } path.head { fill: var(--faint); stroke: none; }
.back { stroke-dasharray: 4 3; }
"""


@dataclass(frozen=True)
class Box:
    """A box with its first line, and smaller ones below. `colour`: of the palette; None for what is no memory."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    colour: int | None = None
    code: bool = False

    @property
    def middle(self) -> int:
        return self.y + self.height // 2


YAML = Box(16, 60, 176, 42, "YAML", ("what each rank takes",))
HEADERS = Box(16, 112, 176, 42, "headers of all shards", ("what exists",))
PLAN = Box(236, 60, 196, 94, "plan", ("every rank's byte ranges,", "as plain data"))
AGREED = Box(476, 60, 196, 94, "all ranks agree on it", ("or all stop, and name", "the first difference"))

FILES = Box(16, 290, 150, 110, "files", ("out of the page cache", "what it holds, the rest", "past it"), 0)
READS = Box(210, 290, 170, 110, "reading threads", ("large positioned reads", "of this rank's ranges"))

MEMORY = (
    Box(436, 208, 220, 52, "memory of each tensor", ("read in place, no copy",), 1),
    Box(436, 274, 220, 52, "staging slots, on loan", ("used again and again",), 2),
    Box(436, 340, 220, 52, "memory that you made", ("CPU or CUDA, any strides",), 3),
    Box(436, 406, 220, 52, "tables in host memory", ("pinned; of a rank or a node",), 4),
)
PROGRAM = (
    Box(700, 208, 164, 52, "for ... in load", ("yours to keep",), code=True),
    Box(700, 274, 164, 52, "load.batches()", ("copy, and give back",), code=True),
    Box(700, 340, 164, 52, "load.into({...})", ("filled when it is back",), code=True),
    Box(700, 406, 164, 52, "host_table(...)", ("or rows: RowSource",), code=True),
)
SHARED = Box(
    210, 488, 206, 68, "slots that a node shares", ("what several ranks want:", "read once, copied by each"), 2
)
CACHE = Box(472, 488, 240, 68, "raw weight cache", ("what a load has read can stay:", "a later load reads nothing"), 5)


def picture() -> str:
    parts = [
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title head" x="16" y="26">{escape(TITLE)}</text>',
        '<text x="16" y="48">First, from headers alone:</text>',
        f'<text x="{READS.x + READS.width // 2 + 10}" y="192">then at most staging.capacity_bytes are read ahead of '
        "your program:</text>",
    ]
    boxes = (YAML, HEADERS, PLAN, AGREED, FILES, READS, *MEMORY, *PROGRAM, SHARED, CACHE)
    for box in boxes:
        parts += _drawn(box)
    parts += _arrows()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(TITLE)}">\n<style>{COLOURS}{_STYLE}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _drawn(box: Box) -> Iterator[str]:
    yield f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="5"/>'
    if box.colour is not None:
        yield f'<rect class="f{box.colour} page" x="{box.x}" y="{box.y + 6}" width="4" height="{box.height - 12}"/>'
    first = box.y + (box.height - 16 * len(box.lines)) // 2 + 4
    kind = "code" if box.code else "head"
    yield f'<text class="{kind}" x="{box.x + 12}" y="{first}">{escape(box.title)}</text>'
    for number, line in enumerate(box.lines, 1):
        yield f'<text x="{box.x + 12}" y="{first + 16 * number}">{escape(line)}</text>'


def _arrows() -> Iterator[str]:
    yield _arrow(_right(YAML), (PLAN.x, YAML.middle))
    yield _arrow(_right(HEADERS), (PLAN.x, HEADERS.middle))
    yield _arrow(_right(PLAN), (AGREED.x, AGREED.middle))
    down = READS.x + READS.width // 2
    below = AGREED.x + AGREED.width // 2
    yield _arrow((below, AGREED.y + AGREED.height), (below, 172), (down, 172), (down, READS.y))
    yield _arrow(_right(FILES), (READS.x, READS.middle))
    turn = READS.x + READS.width + 22
    for memory, program in zip(MEMORY, PROGRAM, strict=True):
        yield _arrow(_right(READS), (turn, READS.middle), (turn, memory.middle), (memory.x, memory.middle))
        yield _arrow(_right(memory), (program.x, program.middle))
    slots, batches = MEMORY[1], PROGRAM[1]
    low = slots.y + slots.height - 10
    yield _arrow((batches.x, low), (slots.x + slots.width, low), back=True)
    yield _arrow((down, READS.y + READS.height), (down, SHARED.y))
    copied = turn + 12
    for memory in MEMORY[:3]:
        enters = memory.middle + 12
        yield _arrow((copied, SHARED.y), (copied, enters), (memory.x, enters), back=True)
    right = MEMORY[0].x + MEMORY[0].width + 22
    yield _arrow((right, MEMORY[0].middle), (right, CACHE.y), back=True)


def _right(box: Box) -> tuple[int, int]:
    return box.x + box.width, box.middle


def _arrow(*points: tuple[int, int], back: bool = False) -> str:
    """A line through the points, with a head at the last one. `back`: broken, for memory that goes on or goes back."""
    (before_x, before_y), (x, y) = points[-2:]
    along = ((x > before_x) - (x < before_x), (y > before_y) - (y < before_y))
    across = (-along[1], along[0])
    corners = [(x - 7 * along[0] + side * across[0], y - 7 * along[1] + side * across[1]) for side in (4, -4)]
    line = " L".join(f"{px} {py}" for px, py in points)
    head = " L".join(f"{px} {py}" for px, py in [(x, y), *corners])
    kind = ' class="back"' if back else ""
    return f'<path{kind} d="M{line}"/><path class="head" d="M{head} Z"/>'
