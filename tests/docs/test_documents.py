"""Links lead somewhere, and documents keep the project's form."""

from __future__ import annotations

import re

import pytest

from tests.docs.documents import DOCUMENTS, ROOT, all_blocks, blocks, prose, text_of

NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
MADE = [name for name in NAMES if name.startswith("docs/reference/")]
OWN = [name for name in NAMES if name not in (*MADE, "CHANGELOG.md")]
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
    linked = {
        (ROOT / page).parent.joinpath(link).resolve().relative_to(ROOT).as_posix()
        for page in ("README.md", "docs/README.md")
        for link in re.findall(r"\]\(([^)#\s]+)", text_of(page))
        if "://" not in link
    }
    assert set(NAMES) <= linked | {"README.md"}


FOLLOWED = ["docs/quickstart.md", *(name for name in NAMES if name.startswith("docs/how-to/"))]
RUN = {
    **{name: {"python", "sh", "yaml", "text output"} for name in FOLLOWED},  # test_pages.py
    "docs/resident-service.md": {"python", "yaml", "text output"},  # test_pages.py
    "docs/operations.md": {"sh", "python"},  # test_pages.py, test_executors.py
    "README.md": {"sh", "python"},  # test_examples.py
    "docs/python-api.md": {"python"},  # test_examples.py
    "docs/host-tables.md": {"python", "yaml"},  # test_examples.py
    "docs/integrations.md": {"python", "sh", "yaml"},  # test_integrations.py
    "docs/drafts-and-sharing.md": {"python", "yaml"},  # test_drafts_and_sharing.py
    "docs/configuration.md": {"yaml"},  # tests/config/test_documentation.py
    "docs/reference/yaml.md": {"yaml"},  # test_generated.py
}
"""The languages of each document whose blocks a test runs, every one of them, or validates."""

SHOWN = {"json", "mermaid", "text", "text floors"}
EXCUSED = re.compile(r"\w+ \(not run: .{8,}\)")


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_run_or_says_why_not(name: str) -> None:
    for block in all_blocks(name):
        known = RUN.get(name, set()) | SHOWN
        assert block.language in known or EXCUSED.fullmatch(block.language), (
            f"{name}:{block.line}: nothing runs this block of {block.language!r}: have a test run it and name it in "
            "RUN, or say why not behind its fence, ```sh (not run: needs Lustre)"
        )


@pytest.mark.parametrize("name", NAMES)
def test_every_fence_stands_at_the_line_s_beginning_where_tests_see_it(name: str) -> None:
    fences = re.findall(r"^.*(?:```|~~~).*$", text_of(name), re.MULTILINE)
    assert len(all_blocks(name)) * 2 == len(fences), fences
