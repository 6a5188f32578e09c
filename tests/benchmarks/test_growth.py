"""The benchmark of growth runs at tiny sizes, knows a power when it sees one, and draws a picture that can be read."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import growth, growth_parts
from benchmarks.agreement_simulated import Load
from benchmarks.growth import Growth, Measured, growth_of, slope
from benchmarks.growth_checkpoint import LEAST_TENSORS, entries, growth_config, make_growth_checkpoint, mesh_sizes
from benchmarks.growth_parts import PARTS, Job, read_growth_catalog
from benchmarks.growth_plot import LEFT, RIGHT, WIDTH, Panel, Point, svg
from loader_service.agreement import PHASES

FEW, MORE = 500, 700
SVG = "{http://www.w3.org/2000/svg}"


# Powers


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_slope_of_a_power_is_the_power(power: float) -> None:
    points = [(n, 3e-6 * n**power) for n in (1_000.0, 10_000.0, 100_000.0)]
    assert slope(points) == pytest.approx(power)


def test_between_two_sizes_the_slope_is_that_of_their_logarithms() -> None:
    points = [(100_000.0, 0.25), (1_000_000.0, 3.0)]
    assert slope(points) == pytest.approx(math.log(3.0 / 0.25) / math.log(10))


@pytest.mark.parametrize(
    ("cost", "met"),
    [
        (lambda n: 1.0, True),
        (lambda n: n, True),
        (lambda n: n * math.log(n), True),
        (lambda n: n**1.2, True),
        (lambda n: n**1.3, False),
        (lambda n: n * n, False),
        (lambda n: n if n < 500_000 else 3 * n, False),  # grows at the end alone
    ],
    ids=["constant", "n", "n log n", "n^1.2", "n^1.3", "n^2", "at the end"],
)
def test_what_grows_faster_than_n_log_n_misses_the_target(cost: Callable[[float], float], met: bool) -> None:
    sizes = (1_000.0, 10_000.0, 100_000.0, 1_000_000.0)
    found = growth_of("x", [(n, cost(n)) for n in sizes])
    assert found.met is met
    assert found.last_limit == pytest.approx(1.079, abs=0.001)
    assert [words.startswith("x: grows with the power") for words in growth.missed([found], [])] == [True] * (not met)


def simulated(ranks: int, tensors: int, **changes: int) -> Load:
    load = Load(
        ranks=ranks,
        tensors=tensors,
        exchanges_cpu_s=(0.1,) * len(PHASES),
        load_cpu_s=0.6,
        leader_cpu_s=0.1,
        look_cpu_s=0.01,
        member_writes=7,
        member_write_bytes=700,
        member_read_bytes=600,
        leader_writes=12,
        leader_write_bytes=1_300,
        leader_reads=7 * ranks,
        leader_read_bytes=700 * ranks,
        failure_s=0.75,
    )
    return dataclasses.replace(load, **changes)  # type: ignore[arg-type]


def test_bytes_that_depend_on_the_number_of_tensors_miss_the_target() -> None:
    same = [[simulated(8, 10)], [simulated(64, 10)], [simulated(8, 1000)], [simulated(64, 1000)]]
    assert growth.missed([], same) == []
    more = [*same, [simulated(64, 1000, member_read_bytes=601)]]
    assert growth.missed([], more) == ["agreement of 64 ranks: the bytes depend on the number of tensors"]


# The checkpoint


@pytest.mark.parametrize("tensors", [LEAST_TENSORS, LEAST_TENSORS + 5, 1_000, 20_011])
def test_a_checkpoint_has_as_many_tensors_as_asked_for(tensors: int) -> None:
    names = [name for name, _, _ in entries(tensors)]
    assert len(names) == len(set(names)) == tensors


def test_it_is_found_by_the_service_and_agrees_with_its_index(tmp_path: Path) -> None:
    make_growth_checkpoint(tmp_path, 1_000, a_shard=300)
    catalog = read_growth_catalog(tmp_path)
    assert (len(catalog), len(catalog.shards), catalog.notes) == (1_000, 4, ())
    blocks = sum(path.stat().st_blocks * 512 for path in tmp_path.glob("*.safetensors"))
    assert blocks < sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) / 10, "it is sparse"


@pytest.mark.parametrize("ranks", [1, 2, 8, 24, 64, 1024])
def test_a_mesh_has_as_many_places_as_ranks(ranks: int, tmp_path: Path) -> None:
    assert math.prod(mesh_sizes(ranks).values()) == ranks
    assert growth_config(tmp_path, ranks)[1].world_size == ranks


# All of it


def in_this_process(job: Job) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(json.dumps([dataclasses.asdict(each) for each in growth_parts.do(job)]))
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """A tiny run, without processes of its own: importing torch anew for each would cost seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth, "child", in_this_process)
        patch.setattr(growth, "PLANNED_RANKS", 8)
        return growth.measure(tmp_path_factory.mktemp("growth"), [FEW, MORE], [1, 8], 1, FEW)


def test_it_measures_every_part_and_draws_it(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(growth, "measure", lambda *arguments: measured)
    growth.main(["--svg", str(tmp_path / "growth.svg"), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert [[run["tensors"] for run in runs] for runs in document["tensors"]] == [[FEW], [MORE]]
    assert [[run["ranks"] for run in runs] for runs in document["ranks"]] == [[1], [8]]
    assert [(run["tensors"], run["shards"]) for run in document["one_shard"]] == [(FEW, 1)]
    parts = document["tensors"][1][0]["parts"]
    assert tuple(parts) == PARTS
    assert all(part["cpu_s"] > 0 for part in parts.values())
    assert {(load["ranks"], load["tensors"]) for loads in document["loads"] for load in loads} == {
        (ranks, tensors) for ranks in (1, 8) for tensors in (FEW, MORE)
    }
    assert not [words for words in document["missed"] if "bytes" in words]
    assert len(document["growth"]) == len(PARTS) + 5
    texts = [text.text for text in ElementTree.parse(tmp_path / "growth.svg").iter(f"{SVG}text")]
    assert {*PARTS, growth.EXCHANGES, growth.LEADER, growth.A_RANK, "processor time, s"} <= set(texts)


@pytest.mark.parametrize(
    ("overall", "code", "last"),
    [
        (0.9, 0, "targets: all met"),
        (1.9, 1, "a rank: grows with the power 1.90 (0.90 at the end), n log n with 1.10 (1.10)"),
    ],
)
def test_the_exit_code_and_the_last_line_say_whether_targets_are_met(
    overall: float,
    code: int,
    last: str,
    measured: Measured,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(growth, "measure", lambda *arguments: measured)
    monkeypatch.setattr(growth, "growth_of", lambda name, points: Growth(name, overall, 0.9, 1.1, 1.1))
    assert growth.main([]) == code
    assert capsys.readouterr().out.rstrip().endswith(last)


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="CheckpointError"):
        growth.child(Job("agreement", [str(tmp_path / "absent")], [1]))


# The picture


def test_a_picture_is_well_formed_and_everything_lies_within_it() -> None:
    lines: dict[str, list[Point]] = {
        f"line <{i}> & more": [(1e3, 1e-4 * (i + 1)), (1e5, 1e-2), (1e6, 0.1 + i / 1e4)] for i in range(12)
    }
    panels = [Panel("one", "tensors", "s", lines), Panel("flat", "ranks", "s", {"a": [(1.0, 0.5), (2.0, 0.5)]})]
    root = ElementTree.fromstring(svg(panels))
    height = float(root.attrib["height"])
    style = next(root.iter(f"{SVG}style")).text or ""
    assert "prefers-color-scheme: dark" in style
    first, _ = root.findall(f"{SVG}g")
    circles = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in first.iter(f"{SVG}circle")]
    assert len(circles) == 36
    assert all(LEFT <= x <= WIDTH - RIGHT and 0 < y < height for x, y in circles)
    labels = [each for each in first.iter(f"{SVG}text") if (each.text or "").startswith("line <")]
    places = sorted(float(each.attrib["y"]) for each in labels)
    assert len(places) == 12
    assert all(after - before >= 14 for before, after in itertools.pairwise(places)), "labels do not overlap"
    names = [each.text for each in root.iter(f"{SVG}text") if each.attrib.get("class") == "guide-name"]
    assert names == ["n", "n log n"] * 2
    assert all(len(line.attrib["points"].split()) > 1 for line in root.iter(f"{SVG}polyline"))


def test_a_line_rises_by_its_power() -> None:
    powers: dict[str, list[Point]] = {"square": [(1.0, 1.0), (10.0, 100.0)], "n": [(1.0, 1.0), (10.0, 10.0)]}
    root = ElementTree.fromstring(svg([Panel("powers", "x", "y", powers)]))
    rises = []
    for line in root.iter(f"{SVG}polyline"):
        if line.attrib["class"] == "line":
            (_, low), (_, high) = (tuple(map(float, point.split(","))) for point in line.attrib["points"].split())
            rises.append(low - high)
    assert rises[0] == pytest.approx(2 * rises[1], abs=0.2)
