"""The picture of a plan: every byte range where it must lie, and nobody's text is markup."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader_service.cli import app
from loader_service.cli.plan_bins import NOTHING, Bins, Ranges, at_least, below
from loader_service.cli.plan_figures import Figures, figures_of
from loader_service.cli.plan_page import page_of
from loader_service.cli.plan_picture import Picture, standalone
from loader_service.cli.plan_titles import Titles, plain, spans
from loader_service.errors import ConfigError
from loader_service.planning.plan import LoadPlan, RankPlan
from loader_service.planning.shared_ranges import Line
from loader_service.planning.sharing import node_blocks
from loader_service.planning.stripes import stripes
from tests.cli.pages import HOSTILE, Parsed, check_alone, check_still
from tests.cli.support import write_config, write_small_checkpoint
from tests.planning.making import KIB, Checkpoint, make_checkpoint, one_shard, plan_of
from tests.support.shards import write_shard

Box = tuple[int, int, int, int]  # start, stop, top, height
Capture = pytest.CaptureFixture[str]
FILE_TOP, FIRST_RANK_TOP = 0, 16
HEIGHT = {"file": 12, "bar": 10, "thin": 4}
RULES = [
    {"match": "rows", "split": {"axis": "tp", "dim": 0}},
    {"match": "columns", "split": {"axis": "tp", "dim": 1}},
]


def ranges(*pairs: tuple[int, int]) -> Ranges:
    return np.array([start for start, _ in pairs], dtype=np.int64), np.array([stop for _, stop in pairs], np.int64)


def pairs(found: Ranges) -> list[tuple[int, int]]:
    return list(zip(found[0].tolist(), found[1].tolist(), strict=True))


def one_byte_bins(checkpoint: Checkpoint) -> int:
    return max(shard.identity.size_bytes for shard in checkpoint.catalog.shards)


def drawn(plan: LoadPlan, checkpoint: Checkpoint, **more: Any) -> Figures:
    """With a bin for each byte, so that x is the byte's offset."""
    return figures_of(plan, **{"slot_bytes": None, "most_bins": one_byte_bins(checkpoint), "most_titles": 4} | more)


def boxes(markup: str, css: str) -> list[Box]:
    """The rectangles of a class, in the order in which they were drawn."""
    found = []
    for path in Parsed(markup).named("path"):
        if path["class"] == css:
            for box in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-\d+z", path["d"] or ""):
                x, y, width, height = map(int, box)
                found.append((x, x + width, y, height))
    return found


def in_lane(markup: str, css: str, top: int, height: int) -> list[tuple[int, int]]:
    """(start, stop) of what fills a lane from top to bottom."""
    return [(start, stop) for start, stop, y, h in boxes(markup, css) if (y, h) == (top, height)]


def at(checkpoint: Checkpoint, name: str) -> int:
    tensor = checkpoint.catalog.id_of(name)
    assert tensor is not None
    return int(checkpoint.catalog.starts[tensor])


class TestBins:
    def test_what_so_many_have(self) -> None:
        parts = [(ranges((0, 10), (20, 30)), 1), (ranges((5, 25)), 1), (ranges((24, 26)), 3)]
        anyone, several, four = at_least(parts, 1, 2, 4)
        assert pairs(anyone) == [(0, 30)]
        assert pairs(several) == [(5, 10), (20, 26)]
        assert pairs(four) == [(24, 26)]
        assert pairs(at_least([(NOTHING, 1)], 1)[0]) == []

    def test_touching_ranges_are_one_and_never_several(self) -> None:
        anyone, several = at_least([(ranges((0, 10)), 1), (ranges((10, 20)), 1)], 1, 2)
        assert (pairs(anyone), pairs(several)) == ([(0, 20)], [])

    def test_bytes_below_a_place(self) -> None:
        found = below(ranges((2, 4), (10, 13)), np.array([0, 2, 3, 4, 9, 11, 13, 99]))
        assert found.tolist() == [0, 0, 1, 2, 2, 3, 5, 5]

    def test_files_are_cut_to_scale_and_wider_bins_consist_of_whole_ones(self) -> None:
        checkpoint = make_checkpoint({"a": [("a", "U8", (900,))], "b": [("b", "U8", (30,))]})
        line = Line(checkpoint.catalog)
        bins = Bins.of(line, 100)
        sizes = np.diff(line.shard_start).tolist()
        assert [bins.count(0), bins.count(1)] == [100, round(100 * sizes[1] / sizes[0])]
        assert (bins.start[1:] == bins.stop[:-1]).all()
        assert bins.stop[-1] == sum(sizes)
        wide, first = bins.together(7)
        assert [wide.count(0), wide.count(1)] == [7, 7]
        assert (wide.start == bins.start[first[:-1]]).all()
        assert (wide.stop == bins.stop[first[1:] - 1]).all()


class TestGeometry:
    def test_rows_columns_and_what_nobody_takes(self) -> None:
        checkpoint = one_shard(("columns", "U8", (4, 10)), ("left", "U8", (50,)), ("rows", "U8", (6, 10)))
        plan = plan_of(checkpoint, {"rules": RULES, "skip": ["left"]}, {"tp": 2}, gap_bytes=64)
        markup, _ = Picture(drawn(plan, checkpoint)).file(0)
        header, columns, rows = at(checkpoint, "columns"), at(checkpoint, "columns"), at(checkpoint, "rows")
        assert in_lane(markup, "head", FILE_TOP, HEIGHT["file"]) == [(0, header)]
        # Columns 0 to 4 and 5 to 9 of 4 rows: each rank's first to last byte.
        assert in_lane(markup, "f3", FIRST_RANK_TOP, 10) == [(columns, columns + 35)]
        assert in_lane(markup, "f3", FIRST_RANK_TOP + 14, 10) == [(columns + 5, columns + 40)]
        assert in_lane(markup, "f0", FIRST_RANK_TOP, 10) == [(rows, rows + 30)]
        assert in_lane(markup, "f0", FIRST_RANK_TOP + 14, 10) == [(rows + 30, rows + 60)]
        # Of the file, by two ranks and by one.
        assert in_lane(markup, "f1", FILE_TOP, 12) == [(columns + 5, columns + 35)]
        assert in_lane(markup, "f0", FILE_TOP, 12) == [
            (columns, columns + 5),
            (columns + 35, columns + 40),
            (rows, rows + 60),
        ]
        hatches = re.findall(r"M(\d+) 12L(\d+) 0", markup)
        left = at(checkpoint, "left")
        assert hatches
        assert all(left <= int(start) < left + 50 for start, _ in hatches)

    def test_rows_of_tables_have_their_own_colour(self) -> None:
        table = {"match": "table", "host_resident": {"layout": "per_rank"}, "split": {"axis": "tp", "dim": 0}}
        checkpoint = one_shard(("table", "U8", (8, 10)), ("whole", "U8", (20,)))
        plan = plan_of(checkpoint, {"rules": [table]}, {"tp": 2})
        markup, _ = Picture(drawn(plan, checkpoint)).file(0)
        start, whole = at(checkpoint, "table"), at(checkpoint, "whole")
        assert in_lane(markup, "f2", FILE_TOP, 12) == [(start, start + 80)]
        assert in_lane(markup, "f2", FIRST_RANK_TOP + 14, 10) == [(start + 40, start + 80)]
        assert in_lane(markup, "f1", FILE_TOP, 12) == [(whole, whole + 20)]
        assert in_lane(markup, "f1", FIRST_RANK_TOP, 10) == [(whole, whole + 20)], "the same colour below"

    def test_a_bar_is_as_high_as_the_part_of_its_bytes(self) -> None:
        checkpoint = one_shard(("a", "U8", (400,)), ("b", "U8", (1000,)), ("c", "U8", (3,)))
        plan = plan_of(checkpoint, {"skip": ["b"]})
        size = one_byte_bins(checkpoint)
        figures = figures_of(plan, slot_bytes=None, most_bins=1, most_titles=1)
        markup, _ = Picture(figures).file(0)
        (box,) = boxes(markup, "f0")[-1:]
        assert box == (0, 1, FIRST_RANK_TOP + 10 - -(-403 * 10 // size), -(-403 * 10 // size))
        assert 2 <= box[3] <= 3

    def test_a_small_part_of_a_bin_shows(self) -> None:
        checkpoint = one_shard(("a", "U8", (1,)), ("b", "U8", (90_000,)))
        figures = figures_of(plan_of(checkpoint, {"skip": ["b"]}), slot_bytes=None, most_bins=10, most_titles=1)
        assert (0, 1, FIRST_RANK_TOP + 9, 1) in boxes(Picture(figures).file(0)[0], "f0")

    def test_layers_are_no_higher_than_their_lane(self) -> None:
        names = [(f"{kind}.{i}", "U8", (3, 3)) for i in range(40) for kind in ("rows", "columns", "left", "both")]
        rules = [{"match": "rows.*", "split": {"axis": "tp", "dim": 0}}]
        rules += [{"match": "columns.*", "split": {"axis": "tp", "dim": 1}}]
        plan = plan_of(one_shard(*names), {"rules": rules, "skip": ["left.*"]}, {"tp": 3}, gap_bytes=0)
        figures = figures_of(plan, slot_bytes=None, most_bins=7, most_titles=1)
        markup, _ = Picture(figures).file(0)
        for top in (FILE_TOP, FIRST_RANK_TOP, FIRST_RANK_TOP + 14, FIRST_RANK_TOP + 28):
            height = 12 if top == FILE_TOP else 10
            own = [box for css in ("head", "f0", "f1", "f3") for box in boxes(markup, css) if top <= box[2] < top + 12]
            for x in range(7):
                there = [(y, h) for start, stop, y, h in own if start <= x < stop]
                assert sum(h for _, h in there) <= height
                assert all(top <= y and y + h <= top + height for y, h in there)
                assert len({y for y, _ in there}) == len(there)

    def test_the_draft_lies_below_its_bytes(self) -> None:
        checkpoint = one_shard(
            ("a", "U8", (70,)), ("mtp.0.w", "U8", (50,)), ("mtp.1.w", "U8", (30,)), ("z", "U8", (9,))
        )
        draft = plan_of(checkpoint, {"key_prefixes": ["mtp"]}, {"tp": 2})
        plan = plan_of(checkpoint, {"skip": ["mtp.1.*"]}, {"tp": 2})
        figures = drawn(plan, checkpoint, draft=draft)
        start = at(checkpoint, "mtp.0.w")
        assert in_lane(Picture(figures).file(0)[0], "draft", 13, 4) == [(start, start + 80)]
        page = "".join(Parsed(page_of(plan, slot_bytes=None, draft=draft)).text)
        assert "Load target takes 80 bytes of tensors." in page
        assert "at most 50 bytes of 80 bytes on ranks 0-1." in page

    def test_what_the_cache_can_serve_of_the_draft_is_what_it_holds_on_that_rank(self) -> None:
        names = [("mtp.columns", "U8", (4, 10)), ("mtp.rows", "U8", (6, 10)), ("mtp.mine", "U8", (7,))]
        checkpoint = one_shard(*names, ("z", "U8", (9,)))
        rules = [
            {"match": "mtp.rows", "split": {"axis": "tp", "dim": 0}},
            {"match": "mtp.columns", "split": {"axis": "tp", "dim": 1}},
            {"match": "mtp.mine", "assign": {"axis": "tp", "to": [1]}},
        ]
        draft = plan_of(checkpoint, {"key_prefixes": ["mtp"], "rules": rules}, {"tp": 2})
        alike = plan_of(checkpoint, {"rules": rules}, {"tp": 2})
        whole = plan_of(checkpoint, {}, {"tp": 2})
        # Rows 30, columns 35 from first to last; rank 1 has the 7 bytes besides.
        assert drawn(alike, checkpoint, draft=draft).draft_served == ((65, 30), (72, 37))
        assert drawn(whole, checkpoint, draft=draft).draft_served == ((65, 65), (72, 72))
        page = "".join(Parsed(page_of(alike, slot_bytes=None, draft=draft)).text)
        assert "at most 30 bytes of 65 bytes on rank 0; 37 bytes of 72 bytes on rank 1." in page

    def test_where_ranks_are_served_in_many_ways_least_and_most_are_said(self) -> None:
        checkpoint = one_shard(*((f"mtp.{i}", "U8", (i + 1,)) for i in range(12)))
        rules = [{"match": f"mtp.{i}", "assign": {"axis": "tp", "to": [i]}} for i in range(12)]
        plan = plan_of(checkpoint, {"key_prefixes": ["mtp"], "rules": rules}, {"tp": 12})
        page = "".join(Parsed(page_of(plan, slot_bytes=None, draft=plan)).text)
        assert "reads for that at most 1 byte to 12 bytes." in page

    def test_the_scale_ends_with_the_longest_file(self) -> None:
        checkpoint = make_checkpoint({"a": [("a", "U8", (3 << 20,))], "b": [("b", "U8", (7,))]})
        figures = figures_of(plan_of(checkpoint), slot_bytes=None, most_bins=10, most_titles=1)
        words = Parsed(Picture(figures).axis(0)).text
        assert words == ["0", "1.50 MiB", "3.00 MiB"]


def node_plans(plan: LoadPlan) -> list[RankPlan]:
    return [plan.for_rank(rank).streamed for rank in range(plan.world_size)]


def test_blocks_and_stripes_are_those_of_the_loader() -> None:
    tensors = [("both", "U8", (150 * KIB,)), ("rows", "U8", (8, 10)), ("more", "U8", (90 * KIB,))]
    checkpoint = one_shard(*tensors)
    plan = plan_of(checkpoint, {"rules": RULES}, {"tp": 2}, gap_bytes=0)
    by_blocks, by_stripes = (
        Picture(drawn(plan, checkpoint, slot_bytes=64 * KIB, sharing=way)).file(0)[0]
        for way in ("staging", "page_cache")
    )
    blocks = node_blocks(node_plans(plan), slot_bytes=64 * KIB)
    assert len(blocks) >= 4
    for place, own in enumerate(stripes(node_plans(plan), ranks=2)):
        bottom = FIRST_RANK_TOP + place * 19 + 11
        expected = [each for block in np.flatnonzero(blocks.owner == place) for each in blocks.ranges(int(block))]
        assert in_lane(by_blocks, "f4", bottom, 4) == [(each.start, each.stop) for each in expected]
        assert in_lane(by_stripes, "f4", bottom, 4) == [(each.start, each.stop) for each in own]


SHARED = one_shard(("both", "U8", (150 * KIB,)))


@pytest.mark.parametrize(
    ("sharing", "least_bytes", "says", "heads", "not_drawn"),
    [
        (
            "staging",
            None,
            ["they share staging memory", "lie in 3 blocks that are read once"],
            ["for all", "for itself"],
            "page_cache",
        ),
        (
            "page_cache",
            None,
            ["they read ahead into the page cache", "each byte once, by turns"],
            ["reads ahead for all"],
            "staging",
        ),
        ("none", None, ["each of them reads for itself: as configured."], [], "blocks"),
        ("auto", None, ["the node's ranks want only 153600 bytes twice, and 64.00 MiB are the least"], [], "blocks"),
        ("auto", 153601, ["the node's ranks want only 153600 bytes twice"], [], "blocks"),
        (
            "auto",
            153600,
            ["they share staging memory, if all of them can, since they want 153600 bytes twice: "],
            ["for all", "for itself"],
            "page_cache",
        ),
    ],
)
def test_sharing_is_drawn_for_the_way_that_would_be_taken_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
    sharing: str,
    least_bytes: int | None,
    says: list[str],
    heads: list[str],
    not_drawn: str,
) -> None:
    if least_bytes is not None:
        monkeypatch.setattr("loader_service.sharing.decision.LEAST_SAVED_BYTES", least_bytes)
    page = page_of(plan_of(SHARED, {}, {"tp": 2}), slot_bytes=64 * KIB, sharing=sharing)  # type: ignore[arg-type]
    words = "".join(Parsed(page).text)
    assert f"With reads.sharing {sharing} " in words
    assert all(each in words for each in says)
    assert not_drawn not in words.replace("reads.sharing", "")
    head = page.split("<thead>")[1].split("</thead>")[0]
    assert head.count("<th>") == 3 + len(heads)
    assert all(each in head for each in heads)
    assert ('class="f4"' in page) == bool(heads)


def test_every_colour_of_the_legend_has_one_meaning() -> None:
    table = {"match": "table", "host_resident": {"layout": "per_rank"}, "split": {"axis": "tp", "dim": 0}}
    names = [("columns", "U8", (4, 10)), ("rows", "U8", (6, 10)), ("table", "U8", (8, 10)), ("both", "U8", (9,))]
    checkpoint = one_shard(*names)
    plan = plan_of(checkpoint, {"rules": [*RULES, table]}, {"tp": 2})
    draft = plan_of(checkpoint, {"key_prefixes": ["both"]}, {"tp": 2})
    for way in ("staging", "page_cache"):
        legend = Picture(drawn(plan, checkpoint, slot_bytes=64 * KIB, sharing=way, draft=draft)).legend()
        colours = [re.findall(r'class="(\w+)"', mark)[0] for _, mark in legend]
        assert len(colours) == 8
        assert len(set(colours)) == len(colours)


def test_the_heading_says_what_is_loaded_by_whom() -> None:
    page = Parsed(page_of(plan_of(SHARED, {}, {"pp": 2, "tp": 3}), slot_bytes=None))
    words = "".join(page.text)
    assert "Load target on 6 ranks (pp 2, tp 3): who reads what" in words
    assert "Checkpoint /checkpoints." in words


def test_a_node_without_common_bytes_has_no_lanes() -> None:
    checkpoint = one_shard(("rows", "U8", (8, 10)))
    plan = plan_of(checkpoint, {"rules": RULES}, {"tp": 2})
    assert drawn(plan, checkpoint, slot_bytes=64 * KIB).node is None
    assert not any("staging" in name for name, _ in Picture(drawn(plan, checkpoint)).legend())


class TestTitles:
    def test_say_file_range_tensors_ranks_and_blocks(self) -> None:
        checkpoint = one_shard(*((f"w.{i}", "U8", (20 * KIB,)) for i in range(8)))
        rules = [{"match": "w.0", "assign": {"axis": "tp", "to": [1]}}]
        plan = plan_of(checkpoint, {"rules": rules, "skip": ["w.7"]}, {"tp": 2})
        figures = drawn(plan, checkpoint, slot_bytes=64 * KIB, sharing="staging", most_titles=8)
        ahead = drawn(plan, checkpoint, slot_bytes=64 * KIB, sharing="page_cache", most_titles=8)
        titles = [title.splitlines() for title in Titles(figures).of(0)]
        assert len(titles) == 8
        size = one_byte_bins(checkpoint)
        assert titles[0][0] == f"model.safetensors, bytes 0 to {size // 8}: {size // 8} bytes"
        assert titles[0][1] == "w.0"
        assert titles[0][2].startswith("header: ")
        assert titles[0][3] == f"taken by rank 1: {size // 8 - at(checkpoint, 'w.0')} bytes"
        assert titles[3][1] == "2 tensors, w.2 to w.3"
        assert titles[3][2] == f"taken by ranks 0-1: {size // 8} bytes, {size // 8} bytes by several"
        found = node_blocks(node_plans(plan), slot_bytes=64 * KIB)
        crossed = next(i for i in range(8) if i * size // 8 < list(found.ranges(0))[-1].stop < (i + 1) * size // 8)
        assert titles[1][3:] == ["staging: block 0, read by rank 0"]
        assert titles[crossed][3:] == ["staging: blocks 0 to 1, read by ranks 0-1"]
        assert list(Titles(ahead).of(0))[1].splitlines()[3:] == ["page_cache: read ahead by rank 0"]
        assert titles[7][1:] == ["2 tensors, w.6 to w.7", *titles[7][2:]]
        left = plan_of(checkpoint, {"skip": ["w.[0-6]"]} | {"key_prefixes": ["w.7"]})
        assert "taken by nobody" in list(Titles(drawn(left, checkpoint, most_titles=8)).of(0))[3]

    def test_a_tensor_belongs_to_its_own_bytes_alone(self) -> None:
        checkpoint = one_shard(("a", "U8", (5,)), ("b", "U8", (4,)))
        size = one_byte_bins(checkpoint)
        titles = list(Titles(drawn(plan_of(checkpoint), checkpoint, most_titles=size)).of(0))
        assert [title.splitlines()[1] for title in titles[-9:]] == ["a"] * 5 + ["b"] * 4

    def test_ranks_in_words(self) -> None:
        assert spans([3]) == "rank 3"
        assert spans([0, 1, 2, 8]) == "ranks 0-2, 8"
        assert spans(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and others, 20 in all"

    def test_names_that_cannot_be_shown_are_quoted_and_long_ones_clipped(self) -> None:
        assert plain("a.b") == "a.b"
        assert plain("a\x1b[2J") == "'a\\x1b[2J'"
        assert len(plain("n" * 100_000)) < 200


class TestPage:
    def test_is_alone_and_nobodys_text_is_markup(self) -> None:
        checkpoint = make_checkpoint({HOSTILE: [(HOSTILE, "U8", (9,))], "b": [("mtp." + HOSTILE, "U8", (9,))]})
        plan = plan_of(checkpoint, {}, {"tp": 2})
        draft = plan_of(checkpoint, {"key_prefixes": ["mtp"]}, {"tp": 2})
        text = page_of(plan, slot_bytes=64 * KIB, draft=draft, notes=[HOSTILE])
        picture = check_still(standalone_of(plan).replace('xmlns="http://www.w3.org/2000/svg"', ""))
        assert HOSTILE in "".join(check_alone(text).text)
        assert HOSTILE in "".join(picture.text)
        assert "prefers-color-scheme: dark" in text

    def test_ranks_beyond_a_node_are_grouped(self) -> None:
        plan = plan_of(one_shard(("a", "U8", (9,))), {}, {"tp": 20})
        figures = figures_of(plan, slot_bytes=None, most_bins=9, most_titles=1)
        assert [spans(row.ranks) for row in figures.rows] == [
            *(f"rank {r}" for r in range(8)),
            "ranks 8-15",
            "ranks 16-19",
        ]
        assert figures.takers.all(axis=1).all()

    def test_a_thousand_ranks_and_two_hundred_files_fit_a_small_page(self) -> None:
        shards = {}
        for s in range(200):
            names: Sequence[tuple[str, str, tuple[int, ...]]] = [
                *((f"model.layers.{s}.experts.{e}.down_proj.weight", "U8", (16, 2)) for e in range(256)),
                (f"model.layers.{s}.o_proj.weight", "U8", (16, 64)),
                (f"model.layers.{s}.norm.weight", "U8", (16,)),
            ]
            shards[f"model-{s:05d}-of-00200.safetensors"] = names
        rules = [
            {"match": "*.experts.*", "assign": {"axis": "tp", "index": r"experts\.(\d+)\.", "how": "round_robin"}},
            {"match": "*.o_proj.weight", "split": {"axis": "tp", "dim": 1}},
        ]
        plan = plan_of(make_checkpoint(shards), {"rules": rules}, {"dp": 125, "tp": 8})
        page = page_of(plan, slot_bytes=64 * KIB)
        assert len(page) < 2_000_000
        parsed = check_alone(page)
        figures = [attrs for attrs in parsed.named("svg") if attrs.get("role") == "img"]
        assert len(figures) == 201
        assert "ranks 8-151" in "".join(parsed.text)

    def test_a_draft_of_another_checkpoint_is_refused(self) -> None:
        one, other = one_shard(("a", "U8", (9,))), one_shard(("a", "U8", (8,)))
        with pytest.raises(ConfigError, match="different checkpoints"):
            page_of(plan_of(one), slot_bytes=None, draft=plan_of(other))

    @pytest.mark.parametrize("load", [{}, {"skip": ["*"]}], ids=["zero-size", "nothing"])
    def test_a_plan_of_nothing_has_a_page_too(self, load: Mapping[str, object]) -> None:
        page = page_of(plan_of(one_shard(("a", "F32", (0, 3))), load, {"tp": 2}), slot_bytes=64 * KIB)
        check_alone(page)
        assert "nan" not in page


def standalone_of(plan: LoadPlan) -> str:
    return standalone(figures_of(plan, slot_bytes=64 * KIB, most_bins=50, most_titles=1), HOSTILE)


class TestCommand:
    @pytest.fixture
    def config(self, tmp_path: Path) -> Path:
        return write_config(tmp_path / "config.yaml", write_small_checkpoint(tmp_path / "checkpoint"), ranks=2)

    def test_writes_the_page_and_prints_the_plan(self, config: Path, tmp_path: Path, capsys: Capture) -> None:
        page = tmp_path / "plan.html"
        assert app.run(["plan", str(config), "--load", "all", "--html", str(page), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["world_size"] == 2
        words = "".join(check_alone(page.read_text()).text)
        assert "Load all on 2 ranks (tp 2): who reads what" in words
        assert f"Checkpoint {tmp_path / 'checkpoint'}." in words
        assert "Load draft takes 12 bytes of tensors." in words
        assert "b.safetensors, bytes 0 to" in words
        assert "With reads.sharing auto each of them reads for itself" in words
        assert app.run(["plan", str(config), "--load", "all", "--html", str(page)]) == 0
        assert "Plan of load all for 2 ranks" in capsys.readouterr().out

    def test_without_sharing_there_are_no_blocks(self, tmp_path: Path) -> None:
        checkpoint = write_small_checkpoint(tmp_path / "checkpoint")
        config = write_config(tmp_path / "none.yaml", checkpoint, ranks=2, reads={"sharing": "none"})
        assert app.run(["plan", str(config), "--load", "all", "--html", str(tmp_path / "plan.html")]) == 0
        assert "staging" not in (tmp_path / "plan.html").read_text()

    def test_a_draft_that_cannot_be_planned_is_a_sentence(self, tmp_path: Path) -> None:
        checkpoint = write_small_checkpoint(tmp_path / "checkpoint")
        loads = {"all": {}, "draft": {"key_prefixes": ["mtp"]}}
        config = write_config(tmp_path / "config.yaml", checkpoint, loads=loads)
        assert app.run(["plan", str(config), "--load", "all", "--html", str(tmp_path / "plan.html")]) == 0
        assert "Load draft is not drawn: " in "".join(Parsed((tmp_path / "plan.html").read_text()).text)

    def test_a_load_of_another_checkpoint_is_not_drawn(self, tmp_path: Path) -> None:
        write_shard(tmp_path / "other/a.safetensors", {"draft.w": ("U8", (3,), b"abc")})
        own = {"key_prefixes": ["draft"], "checkpoint": {"path": str(tmp_path / "other")}}
        checkpoint = write_small_checkpoint(tmp_path / "checkpoint")
        config = write_config(tmp_path / "config.yaml", checkpoint, loads={"all": {}, "draft": own})
        assert app.run(["plan", str(config), "--load", "all", "--html", str(tmp_path / "plan.html")]) == 0
        assert "oad draft" not in (tmp_path / "plan.html").read_text()

    def test_a_page_that_cannot_be_written_is_a_usage_error(
        self, config: Path, tmp_path: Path, capsys: Capture
    ) -> None:
        for file, problem in (
            (tmp_path / "nowhere/plan.html", "--html: the folder"),
            (tmp_path, "is a folder: name a file"),
        ):
            assert app.run(["plan", str(config), "--load", "all", "--html", str(file)]) == 2
            ended = capsys.readouterr()
            assert problem in ended.err
            assert not ended.out
