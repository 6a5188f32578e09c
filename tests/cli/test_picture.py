"""The page of timelines: well formed, alone in the world, and nobody's text is its markup."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loader_service.cli.checking import write_text
from loader_service.cli.picture import Page, render
from loader_service.timeline import Timeline
from tests.cli.pages import HOSTILE, Parsed, check_alone

LINE = Timeline(
    rank=0,
    step_s=0.1,
    seconds=0.4,
    threads=4,
    capacity_bytes=1 << 30,
    phases={"config": 0.01, "catalog": 0.02, "plan": 0.01, "open": 0.01, "read": 0.3, "finish": 0.05},
    read_bytes=(0, 1e9, 2e9, 0),
    filled_bytes=(0, 1e9, 2e9, 0),
    taken_bytes=(0, 5e8, 2e9, 5e8),
    cpu_s=(0.1, 0.1, 0.1, 0.1),
    in_flight=(0, 4, 3.5, 0),
    queued=(0, 1, 0, 0),
    held_bytes=(0, 1e8, 1e8, 0),
    consumer_waits=(1, 0.5, 0, 0),
    waits_for_memory=(0, 0, 0, 0),
)
PAGE = Page(
    "Load all", ["One sentence."], ("measured", "GiB/s"), [("the load", "1.23")], [LINE], {0: 2.5}, "the source"
)


def test_a_page_is_well_formed_and_alone() -> None:
    parsed = check_alone(render(PAGE))
    assert {"viewport"} <= {attrs.get("name") for attrs in parsed.named("meta")}
    assert all("width" not in attrs or float(attrs["width"] or 0) >= 0 for attrs in parsed.named("rect"))
    charts = [attrs for attrs in parsed.named("svg") if attrs.get("role") == "img"]
    assert len(charts) == 5
    assert all(attrs.get("viewbox") and attrs.get("aria-label") for attrs in charts)
    assert "prefers-color-scheme: dark" in render(PAGE)


def test_axes_have_units_and_every_step_a_title() -> None:
    text = " ".join(Parsed(render(PAGE)).text)
    for words in ("Throughput, GiB/s", "Staging memory held, MiB", "Queue depth, units", "0.4 s", "read 0.300 s"):
        assert words in text
    assert "0.100 s: ready 9.31, taken 4.66 GiB/s" in text
    assert "the source: 2.5 GiB/s" in text


def test_each_rank_has_a_limit_of_its_own() -> None:
    page = replace(PAGE, timelines=[replace(LINE, rank=rank) for rank in range(3)], tops_gib_per_s={0: 2.5, 2: 1.5})
    assert [text for text in Parsed(render(page)).text if "the source" in text] == [
        "the source: 2.5 GiB/s",
        "the source: 1.5 GiB/s",
    ]


def test_nobodys_text_is_markup() -> None:
    page = replace(PAGE, title=HOSTILE, sentences=[HOSTILE], columns=(HOSTILE, "x"), rows=[(HOSTILE, HOSTILE)])
    page = replace(page, top_name=HOSTILE)
    parsed = check_alone(render(page))
    assert "".join(parsed.text).count(HOSTILE) == 6 + 1  # the title twice, and the key of the line


@pytest.mark.parametrize(
    "line",
    [
        Timeline(0, 0.0, 0.0, 0, 0),
        replace(LINE, read_bytes=(0,) * 4, filled_bytes=(0,) * 4, taken_bytes=(0,) * 4, in_flight=(0,) * 4, phases={}),
    ],
    ids=["empty", "all zeros"],
)
def test_a_load_of_nothing_has_a_page_too(line: Timeline) -> None:
    text = render(replace(PAGE, timelines=[line], tops_gib_per_s={}))
    check_alone(text)
    assert "nan" not in text
    assert "inf" not in text.replace("in flight", "")


def test_many_ranks_are_folded_but_for_the_first() -> None:
    parsed = Parsed(render(replace(PAGE, timelines=[replace(LINE, rank=rank) for rank in range(6)])))
    assert [("open" in attrs) for attrs in parsed.named("details")] == [True] * 4 + [False] * 2


def test_names_that_are_no_text_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_text(path, render(replace(PAGE, title="load \udcff")), option="--html")
    assert "load \\udcff" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]
