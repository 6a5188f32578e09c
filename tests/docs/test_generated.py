"""What `make docs` writes is what lies in docs/: reference pages from the code, pictures from plans."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import yaml

import loader_service as ls
from loader_service.cli.commands import app
from tests.docs.documents import blocks, text_of
from tools.docs import DOCS, pictures, references

AGAIN = "it is made from the code, which has changed: run `make docs`"
YAML = "docs/reference/yaml.md"


@pytest.mark.parametrize("name", ["api", "cli", "yaml"])
def test_a_reference_page_is_that_of_the_code(name: str) -> None:
    assert text_of(f"docs/reference/{name}.md") == references()[f"reference/{name}.md"], AGAIN


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return dict(pictures())


@pytest.mark.parametrize(
    ("name", "page"),
    [("bytes.svg", "concepts"), ("draft.svg", "drafts-and-sharing"), ("sharing.svg", "drafts-and-sharing")],
)
def test_a_picture_is_that_of_the_plan_and_stands_on_its_page(name: str, page: str, drawn: dict[str, str]) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == drawn[name], AGAIN
    assert f"]({name})" in text_of(f"docs/{page}.md")
    assert ElementTree.fromstring(drawn[name]).attrib["viewBox"].startswith("0 0 8")


def test_the_reference_has_every_public_name_and_command() -> None:
    api, commands = text_of("docs/reference/api.md"), text_of("docs/reference/cli.md")
    missing = [name for name in ls.__all__ if f"### `{name}`" not in api and f"| `{name}` |" not in api]
    assert missing == ["__version__"], "which the first lines name"
    assert all(f"## `{command.name}`\n" in commands for command in app.registered_commands)


def test_the_file_with_all_defaults_says_nothing_new() -> None:
    (block,) = blocks(YAML, "yaml")
    shortest = {"checkpoint": {"path": "checkpoint"}, "loads": {"target": {}}}
    assert ls.config_from_dict(yaml.safe_load(block.text)) == ls.config_from_dict(shortest)
    assert all(f"\n  {key}:" in block.text for key in ("threads", "capacity_bytes", "pin", "grace_s", "reserve_bytes"))
