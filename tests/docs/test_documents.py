"""Links lead somewhere, and documents keep the project's form."""

from __future__ import annotations

import re

import pytest

from tests.docs.documents import DOCUMENTS, ROOT, blocks, prose, text_of

NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
OWN = [
    "README.md",
    "docs/architecture.md",
    "docs/operations.md",
    "docs/decisions.md",
    "docs/python-api.md",
    "docs/host-tables.md",
    "docs/integrations.md",
    "docs/drafts-and-sharing.md",
    "docs/deployment.md",
]
PRAISE = r"\b(?:blazing|lightning|seamless\w*|effortless\w*|powerful|robust|elegant\w*|cutting-edge|simply|easily)\b"


def anchors(name: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(name), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files_and_headings(name: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(name)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / name).parent / file if file else ROOT / name
        assert target.exists(), f"{name}: {link}"
        if anchor:
            assert anchor in anchors(target.resolve().relative_to(ROOT).as_posix()), f"{name}: {link}"


@pytest.mark.parametrize(
    ("name", "heading"), [("README.md", "## Measured"), ("docs/operations.md", "**Garbage collection:**")]
)
def test_measured_figures_are_those_of_the_benchmarks(name: str, heading: str) -> None:
    section = text_of(name).split(heading)[1].split("\n## ")[0]
    figures = set(re.findall(r"\b\d+\.\d+(?= \w| \||,)", section)) - {"3.11"}
    known = set(re.findall(r"\b\d+\.\d+\b", text_of("docs/benchmarks.md")))
    assert len(figures) >= 2
    assert figures <= known, figures - known


@pytest.mark.parametrize("name", OWN)
def test_a_document_holds_no_praise_and_no_long_lines_of_code(name: str) -> None:
    assert re.findall(PRAISE, text_of(name), re.IGNORECASE) == []
    for language in ("python", "sh"):
        for block in blocks(name, language):
            assert all(len(line) <= 120 for line in block.text.splitlines()), block.line


def test_every_document_is_reached_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(([^)#\s]+)", text_of("README.md")))
    assert {name for name in NAMES if name.startswith("docs/")} <= linked
