"""`load --html`: one page of what all ranks did, over time and file by file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loader_service.cli import app
from loader_service.cli.load_page import RankLoad, page_of
from tests.cli.pages import HOSTILE, Parsed, check_alone
from tests.cli.support import start_ranks, write_config, write_small_checkpoint
from tests.cli.test_picture import LINE
from tests.planning.making import KIB, make_checkpoint, plan_of

Capture = pytest.CaptureFixture[str]
RULES = [{"match": "split", "split": {"axis": "tp", "dim": 0}}]


def report(rank: int, *, sharing: str = "none", **more: Any) -> dict[str, Any]:
    policy = {"requested": "auto", "effective": sharing, "reason": "so it is"}
    found: dict[str, Any] = {"rank": rank, "payload_bytes": 1 << 20, "read_bytes": 3 << 20, "striped_bytes": 0}
    found |= {"tensors": 7, "files_opened": 1, "peak_staging_bytes": 2 << 20, "seconds": 0.5 + rank, "gib_per_s": 0.25}
    found["phases"] = {"config": 0.25 + rank, "read": 0.2 - 0.1 * rank}  # rank 1 came first, and waited
    return found | {"policies": {"sharing": policy}, "fallbacks": ["one way"], "warnings": ["a rule"], **more}


def loads(*reports: dict[str, Any], nodes: str = "aaaa") -> list[RankLoad]:
    return [RankLoad(each, replace(LINE, rank=each["rank"]), nodes[each["rank"]]) for each in reports]


def page(found: list[RankLoad], **more: Any) -> Parsed:
    checkpoint = make_checkpoint({"a": [("split", "U8", (400 * KIB,)), ("both", "U8", (400 * KIB,))]})
    plan = plan_of(checkpoint, {"rules": RULES}, {"tp": len(found)})
    return check_alone(page_of(plan, found, began_at="now", slot_bytes=64 * KIB, **more))


def test_ranks_are_on_one_page_in_figures_over_time_and_in_files() -> None:
    parsed = page(loads(report(0), report(1)))
    text = "".join(parsed.text)
    assert "2.00 MiB were handed over in 1.50 s: 0.00 GiB/s on all ranks together. Rank 0 read longest, 0.20 s." in text
    for row in (["rank 0", "1.00 MiB", "3.00 MiB", "7", "1", "2.00 MiB", "0.500", "0.25"], ["rank 1", "1.00 MiB"]):
        assert "".join(row) in text.replace("\n", "")
    assert "read for its node" not in text
    assert text.count("Fallback: one way") == text.count("Warning: a rule") == 1, "what all say is said once"
    labels = [attrs["aria-label"] for attrs in parsed.named("svg") if attrs.get("role") == "img"]
    assert labels.count("phases of the load") == 2
    assert "Throughput, GiB/s over 0.40 seconds, rank 1" in labels
    assert labels[-1] == "who takes what of a"
    assert "taken by ranks 0-1" in text


@pytest.mark.parametrize(
    ("nodes", "sharing", "drawn"), [("aa", "staging", True), ("ab", "staging", False), ("aa", "none", False)]
)
def test_what_ranks_read_for_their_node_is_drawn_where_they_are_one(nodes: str, sharing: str, drawn: bool) -> None:
    reports = [report(rank, sharing=sharing, striped_bytes=5) for rank in range(2)]
    text = "".join(page(loads(*reports, nodes=nodes)).text)
    assert ("blocks that the rank reads for all" in text) == drawn
    assert ("Ranks are on several nodes" in text) == (nodes == "ab")
    assert "read for its node" in text


def test_policies_of_ranks_that_differ_are_told_apart() -> None:
    text = "".join(page(loads(report(0), report(1, sharing="staging"))).text)
    assert "sharing on rank 0: none, asked for auto: so it is." in text
    assert "sharing on rank 1: staging, asked for auto: so it is." in text


def test_a_rank_that_has_recorded_nothing_is_in_the_figures() -> None:
    parsed = page([*loads(report(0)), RankLoad(report(1), None)])
    assert "rank 1" in parsed.text
    assert [attrs["aria-label"] for attrs in parsed.named("svg") if "rank 1" in (attrs.get("aria-label") or "")] == []


def test_nobodys_text_is_markup() -> None:
    policy = {"requested": HOSTILE, "effective": HOSTILE, "reason": HOSTILE}
    text = "".join(
        page(
            loads(report(0, policies={"sharing": policy, HOSTILE: policy}, fallbacks=[HOSTILE], warnings=[HOSTILE])),
            notes=[HOSTILE],
        ).text
    )
    assert text.count(HOSTILE) == 3 + 4 + 3


def test_a_load_writes_its_page_and_its_report_as_ever(tmp_path: Path, capsys: Capture) -> None:
    config = write_config(tmp_path / "c.yaml", write_small_checkpoint(tmp_path / "checkpoint"))
    args = ["load", str(config), "--load", "all", "--json"]
    assert app.run(args) == 0
    without = json.loads(capsys.readouterr().out)
    assert app.run([*args, "--html", str(tmp_path / "page.html")]) == 0
    assert json.loads(capsys.readouterr().out).keys() == without.keys()
    text = "".join(check_alone((tmp_path / "page.html").read_text()).text)
    assert "Load all on 1 rank (tp 1): what was read, and when" in text
    assert "176 bytes were handed over in" in text
    assert "Load draft takes" in text


def test_a_page_that_cannot_be_written_ends_it_before_it_begins(tmp_path: Path, capsys: Capture) -> None:
    config = write_config(tmp_path / "c.yaml", write_small_checkpoint(tmp_path / "checkpoint"))
    assert app.run(["load", str(config), "--load", "all", "--html", "/nowhere/page.html"]) == 2
    said = capsys.readouterr()
    assert "--html: the folder /nowhere does not exist" in said.err
    assert said.out == ""


@pytest.mark.processes
def test_rank_0_writes_the_page_of_all(tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", write_small_checkpoint(tmp_path / "checkpoint"), ranks=2)
    args = ["load", str(config), "--load", "all", "--json", "--html"]
    pages = [tmp_path / f"{rank}.html" for rank in range(2)]
    ranks = [rank.end() for rank in start_ranks([[*args, str(page)] for page in pages], tmp_path)]
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert [page.exists() for page in pages] == [True, False]
    parsed = check_alone(pages[0].read_text())
    labels = [attrs.get("aria-label") or "" for attrs in parsed.named("svg")]
    assert [label[-6:] for label in labels if label.startswith("Throughput")] == ["rank 0", "rank 1"]
    assert {"rank 0", "rank 1"} <= set(parsed.text)
    assert all("recorded" not in each for each in ranks[0].document["ranks"])
