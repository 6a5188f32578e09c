"""What a load's tables say to people: what applies to what, and to whom."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from loader_service.cli import app, render
from loader_service.cli.render import show_reports
from tests.cli.support import write_config, write_small_checkpoint

AUTO = {"requested": "auto"}
POLICIES: Mapping[str, Mapping[str, str]] = {
    "access": {**AUTO, "effective": "buffered", "reason": "through the page cache"},
    "threads": {"requested": "4", "effective": "4", "reason": "as configured"},
    "pin": {**AUTO, "effective": "pageable", "reason": "no device"},
    "tables_per_rank": {**AUTO, "effective": "direct", "reason": "past the page cache"},
    "tables_shared": {**AUTO, "effective": "auto", "reason": "nothing was read"},
}


def report(rank: int, **policies: Mapping[str, str]) -> dict[str, object]:
    return {
        "load": "target",
        "rank": rank,
        "tensors": 3,
        "payload_bytes": 3 << 20,
        "read_bytes": 1500,
        "files_opened": 1,
        "peak_staging_bytes": 0,
        "seconds": 0.5,
        "gib_per_s": 1.0,
        "verified": True,
        "policies": {**POLICIES, **policies},
        "fallbacks": [],
        "warnings": ["[odd] name"],
    }


def rows(out: str) -> list[list[str]]:
    return [re.split(r" {2,}", line.strip()) for line in out.split("Policies")[1].splitlines() if "  " in line.strip()]


def test_a_policy_says_what_it_is_about_and_one_that_was_done_as_written_is_not_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_reports([report(0)])
    out = capsys.readouterr().out
    assert rows(out) == [
        ["of", "policy", "asked for", "done", "why"],
        ["streamed tensors", "access", "auto", "buffered", "through the page cache"],
        ["staging memory", "pin", "auto", "pageable", "no device"],
        ["tables (per_rank)", "access", "auto", "direct", "past the page cache"],
    ]
    assert "3.00 MiB" in out
    assert "1500 bytes" in out
    assert "warning: [odd] name" in out


@pytest.mark.parametrize("way", ["none", "page_cache", "staging"])
def test_how_ranks_shared_is_shown_also_where_it_was_done_as_written(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = {"requested": way, "effective": way, "reason": "as configured"}
    show_reports([report(rank, sharing=shared) for rank in range(2)])
    assert ["streamed tensors", "sharing", way, way, "as configured", "all"] in rows(capsys.readouterr().out)


def test_what_ranks_did_alike_stands_once_and_the_rest_beside_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    other = {**AUTO, "effective": "mixed", "reason": "a part was cached"}
    show_reports([report(0), report(1, tables_per_rank=other), report(2)])
    assert rows(capsys.readouterr().out)[1:] == [
        ["streamed tensors", "access", "auto", "buffered", "through the page cache", "all"],
        ["staging memory", "pin", "auto", "pageable", "no device", "all"],
        ["tables (per_rank)", "access", "auto", "direct", "past the page cache", "0, 2"],
        ["tables (per_rank)", "access", "auto", "mixed", "a part was cached", "1"],
    ]


def test_whether_a_service_was_there_is_always_said(capsys: pytest.CaptureFixture[str]) -> None:
    alone = {"requested": "read", "effective": "read", "reason": "no resident service answers"}
    show_reports([report(0, service=alone)])
    expected = ["what a service keeps", "service", "kept, else read", "read", "no resident service answers"]
    assert expected in rows(capsys.readouterr().out)


def test_what_not_all_ranks_say_is_said_with_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    show_reports([{**report(rank), "fallbacks": ["one way", f"way {rank // 2}"]} for rank in range(3)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("fallback", "warning"))]
    assert lines == [
        "fallback: one way",
        "fallback of ranks 0, 1: way 0",
        "fallback of rank 2: way 1",
        "warning: [odd] name",
    ]


def test_in_a_narrow_terminal_words_and_numbers_stay_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(render, "_PLAIN_WIDTH", 80)
    sizes = {"payload_bytes": 124 << 20, "read_bytes": 136 << 20, "peak_staging_bytes": 243 << 20}
    show_reports([report(0) | sizes])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    shown = out.split()
    assert {"tensors", "payload", "staging", "seconds", "verified", "buffered", "pageable"} <= set(shown)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "0 3 124.00 MiB 136.00 MiB 1 243.00 MiB 0.500 1.00 yes" in lines, "one row a rank"


def test_every_policy_of_a_real_load_says_what_it_is_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = write_config(tmp_path / "c.yaml", write_small_checkpoint(tmp_path / "checkpoint"))
    assert app.run(["load", str(config), "--load", "all"]) == 0
    shown = rows(capsys.readouterr().out)
    assert {row[1] for row in shown[1:]} == {"access", "sharing", "drop_page_cache", "threads", "pin"}
    assert all(len(row) == len(shown[0]) for row in shown), "none lacks its first cell"
