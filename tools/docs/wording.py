"""How pages are worded that are made from the code."""

from __future__ import annotations

import re
from collections.abc import Sequence

from loader_service.sizes import UNITS

MADE = "<!-- Made from the code by `make docs`: change it there. -->"


def cell(text: str) -> str:
    """Text as a cell of a table holds it."""
    return re.sub(r"\s+", " ", text).strip().replace("|", r"\|")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)


def either(words: Sequence[str]) -> str:
    """`a`, `b` or `c`."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def written_size(size_bytes: int) -> str:
    """A size as a configuration writes it, in the largest binary unit of which it is a whole number: "16MiB"."""
    unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if size_bytes and size_bytes % UNITS[unit] == 0), "B")
    return f"{size_bytes // UNITS[unit]}{unit}"
