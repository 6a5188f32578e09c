"""The page on drafts and sharing: its examples run, and its pictures are those of the plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import loader_service as ls
from loader_service.cli.demo_checkpoint import make_demo_checkpoint
from loader_service.cli.plans import plan_of
from loader_service.config.schema import ReadsConfig
from loader_service.sharing.decision import LEAST_SAVED_BYTES, LEAST_SLOT_BYTES
from tests.docs.documents import Block, blocks, table_rows, text_of
from tests.docs.reader import execute

PAGE = "docs/drafts-and-sharing.md"
EXAMPLE, *OTHER_YAML = blocks(PAGE, "yaml")
DRAFT = ("mtp.0.", "mtp.1.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    make_demo_checkpoint(folder / "checkpoint", total_bytes=3_000_000)
    (folder / "model.yaml").write_text(EXAMPLE.text)
    return folder


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    ls.clear_weight_cache()
    yield
    ls.clear_weight_cache()


@pytest.mark.parametrize("block", blocks(PAGE, "python"), ids=lambda block: f"line-{block.line}")
def test_an_example_runs_as_it_stands(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    execute(block, PAGE, names)
    load = names["load"]
    assert isinstance(load, ls.BlockingLoad)
    assert load.report.read_bytes == 0
    draft = names["draft"]
    assert isinstance(draft, dict)
    assert draft
    assert all(name.startswith(DRAFT) for name in draft)


def test_on_every_rank_the_example_s_target_takes_all_that_its_draft_does(folder: Path) -> None:
    config = ls.config_from_dict(yaml.safe_load(EXAMPLE.text) | {"mesh": {"tp": 4}}, base_dir=str(folder))
    target, draft = plan_of(config, "target", 4), plan_of(config, "draft", 4)
    for rank in range(4):
        wanted, held = draft.for_rank(rank), target.for_rank(rank)
        assert len(wanted) == 30
        for i in range(len(wanted)):
            found = held.index_of(wanted.name(i))
            assert found is not None
            assert held.spec(found) == wanted.spec(i)


def test_the_example_shows_why_a_cache_is_too_small(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = yaml.safe_load(EXAMPLE.text) | {"cache": {"capacity_bytes": 1000}}
    (folder / "small.yaml").write_text(yaml.safe_dump(small))
    monkeypatch.chdir(folder)
    first = blocks(PAGE, "python")[0]
    execute(replace(first, text=first.text.replace("model.yaml", "small.yaml")), PAGE, {})
    of_target, of_draft = capsys.readouterr().out.strip().splitlines()
    assert "reuse only" in of_target
    assert "more than cache.capacity_bytes, 1000 bytes" in of_target
    assert not of_draft.startswith("0 0")


@pytest.mark.parametrize("block", OTHER_YAML, ids=lambda block: f"line-{block.line}")
def test_other_configurations_are_valid(block: Block, tmp_path: Path) -> None:
    document = yaml.safe_load(block.text)
    ls.config_from_dict({"checkpoint": {"path": "x"}} | document, base_dir=str(tmp_path))


def test_the_ways_and_limits_that_the_page_names_are_the_loader_s() -> None:
    text = text_of(PAGE)
    ways = {row[0].strip("`") for row in table_rows(text, columns=4) if row[0].startswith("`")}
    assert ways == set(ReadsConfig.model_fields["sharing"].annotation.__args__)  # type: ignore[union-attr]
    assert f"spared less than {LEAST_SAVED_BYTES >> 20} MiB" in text
    assert f"slots of {LEAST_SLOT_BYTES >> 10} KiB at least" in text


def test_every_figure_of_the_page_is_one_of_the_benchmarks() -> None:
    rows = [row for row in table_rows(text_of(PAGE), columns=5) if row[1][:1].isdigit()]
    assert len(rows) >= 4
    known = text_of("docs/benchmarks.md")
    assert all(cell in known for row in rows for cell in row[1:])
