"""The project's documents as tests see them: their text, their fenced blocks, their tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "loader_service"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_BLOCK = re.compile(r"^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: what stands behind the opening fence, its text, and the line of the document it starts at."""

    language: str
    text: str
    line: int


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def all_blocks(name: str) -> list[Block]:
    """A document's fenced blocks, in order."""
    text = text_of(name)
    return [
        Block(match["language"], match["text"], text.count("\n", 0, match.start("text")) + 1)
        for match in _BLOCK.finditer(text)
    ]


def blocks(name: str, language: str) -> list[Block]:
    """Those of one language. One that says that it is not run, `sh (not run: why)`, is another language."""
    return [block for block in all_blocks(name) if block.language == language]


def shell_lines(name: str) -> list[str]:
    """The lines of a document's shell blocks, whether these are run or not."""
    return [
        line for block in all_blocks(name) if block.language.split(" ")[0] == "sh" for line in block.text.splitlines()
    ]


def prose(name: str) -> str:
    """The document without its fenced blocks."""
    return _BLOCK.sub("", text_of(name))


def table_rows(text: str, *, columns: int) -> list[list[str]]:
    """The cells of every row of the tables with so many columns, their heads and rules left out."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == columns:
            rows.append(cells)
    rules = {i for i, row in enumerate(rows) if all(set(cell) <= set("-:") for cell in row)}
    heads = {i - 1 for i in rules}
    return [row for i, row in enumerate(rows) if i not in rules | heads]


def code_words(text: str) -> set[str]:
    """What stands in `backticks`."""
    return set(re.findall(r"`([^`\n]+)`", text))


def modules() -> set[str]:
    """Every module that does something, as documents name it: `run.py`, `planning/cuts.py`."""
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py" or "import" in path.read_text(encoding="utf-8")
    }
