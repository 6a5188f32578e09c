"""The benchmark of drafts and of ranks that share runs at a tiny size, compares bytes, names a missed target."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors import safe_open

from benchmarks import draft, draft_runs, draft_sides, limits
from benchmarks.common import GIB, MIB, files_of
from benchmarks.draft import (
    DRAFT,
    FULL,
    NATIVE,
    ONE_BUFFERED,
    ONE_DIRECT,
    PARSE,
    PASSED_ON,
    RING,
    STAGED,
    STRIPED,
    WHOLE,
    Target,
)
from benchmarks.draft_runs import MemoryWatch, Run, Series
from benchmarks.draft_sides import DraftCheckpoint, Side, Took, make_draft_checkpoint
from loader_service import BlockingLoad
from loader_service.report import LoadReport, PolicyOutcome


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_sides, "TENSORS_A_SHARD", 80)
    monkeypatch.setattr(draft_sides, "SHARDS", 6)
    monkeypatch.setattr(draft_sides, "DRAFT_SHARDS", (1, 3, 5))


def made_in(folder: Path) -> DraftCheckpoint:
    return make_draft_checkpoint(folder, 24 * MIB)


def names_of(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.offset_keys())


def test_a_third_of_three_shards_is_the_drafts_in_several_runs(tmp_path: Path, few: None) -> None:
    made = made_in(tmp_path)
    assert len(made.files) == 6
    holding = [path for path in made.files if any(name.startswith("mtp.") for name in names_of(path))]
    assert holding == made.draft_files
    assert made.draft_bytes / made.draft_shards_bytes == pytest.approx(1 / 3, rel=0.1)
    assert made.payload_bytes == pytest.approx(24 * MIB, rel=0.1)
    names = [name for path in made.draft_files for name in names_of(path)]
    assert sum(name.startswith("mtp.") for name in names) == made.draft_tensors
    drafted = [name.startswith("mtp.") for name in names_of(made.draft_files[0])]
    assert np.count_nonzero(np.diff(drafted)) == 2 * draft_sides.DRAFT_RUNS, "other tensors lie between its runs"
    made_ns = made.files[0].stat().st_mtime_ns
    assert made_in(tmp_path) == made
    assert made.files[0].stat().st_mtime_ns == made_ns, "it is used again"


def test_headers_are_as_large_as_in_the_case_that_they_stand_for() -> None:
    tensors = draft_sides.draft_tensors(24 * MIB)
    assert len(tensors) == draft_sides.SHARDS * draft_sides.TENSORS_A_SHARD
    assert sum(tensor.name.startswith("mtp.") for tensor in tensors) == 2400
    assert len({tensor.name for tensor in tensors}) == len(tensors)


def took(began_s: float, entered_s: float, left_s: float, **more: Any) -> Took:
    return dataclasses.replace(Took(began_s, entered_s, left_s, left_s + 0.5, 0.25, 0.5, 30), **more)


def test_seconds_count_from_the_last_rank_that_entered_to_the_last_that_left() -> None:
    ranks = [took(10.0, 11.0, 14.0, handed_bytes=60, phases={"catalog": 0.25}), took(10.5, 12.0, 13.0, read_bytes=7)]
    ranks[1] = dataclasses.replace(ranks[1], phases={"catalog": 0.5}, files_read=("b", "a"), handed_bytes=60)
    run = draft_runs.run_of(ranks, 15, 99, 0.0, 7)
    assert (run.seconds, run.from_first_s, run.setup_s, run.total_s) == (2.0, 3.0, 2.0, 4.5)
    assert (run.cpu_s, run.setup_cpu_s, run.disk_bytes, run.peak_bytes) == (1.0, 0.5, 60, 99)
    assert (run.handed_bytes, run.read_bytes, run.header_s, run.files_read) == (120, 7, 0.5, ("a", "b"))
    assert run.whole_s == pytest.approx(2.0 * 60 / 45), "a quarter had been read before"
    assert dataclasses.replace(run, early_bytes=0).whole_s == 2.0
    assert dataclasses.replace(run, early_bytes=0, disk_bytes=0).whole_s == 2.0


def series(label: str, cache: str, *seconds: float, header_s: float = 0.0, **more: Any) -> Series:
    side = Side(label, "owned", (Path("of/one"),), payload_bytes=GIB, prefixes=("mtp",) if label == DRAFT else ())
    run = Run(0, 0, 0, 0, 0.1, 0.1, 0, 0, 0, GIB, GIB, (), {"catalog": header_s}, 0.0, 0, "")
    runs = [dataclasses.replace(run, seconds=each, total_s=each, **more) for each in seconds]
    return Series(side, cache, runs)


def test_a_draft_is_measured_against_the_disks_limit_with_its_headers_apart() -> None:
    ring = dataclasses.replace(series(RING, "cold", 1.0), side=Side(RING, "ring", (Path("of/one"),)))
    found = draft.draft_targets([series(DRAFT, "cold", 1.0, 1.5, 9.0, header_s=0.25), ring])
    assert [(round(target.value, 3), target.met) for target in found] == [(1.0, True), (1.25, True)]
    found = draft.draft_targets([series(DRAFT, "cold", 1.6, header_s=0.25, read_bytes=2 * GIB), ring])
    assert [(round(target.value, 3), target.met) for target in found] == [(2.0, False), (1.35, False)]
    assert len(draft.draft_targets([series(DRAFT, "warm", 1.0), ring])) == 1, "a warm one has no disk as its limit"


def test_ranks_are_compared_by_medians_and_by_the_checkpoints_size() -> None:
    sides = [series(STAGED, "cold", 1.0, 1.1, 9.0, cpu_s=0.3), series(ONE_DIRECT, "cold", 1.0)]
    found = draft.rank_targets([*sides, series(STRIPED, "cold", 2.2), series(ONE_BUFFERED, "cold", 2.0)])
    assert [(round(target.value, 2), target.met) for target in found] == [(1.1, False), (1.1, True), (0.3, False)]
    found = draft.rank_targets([series(STRIPED, "cold", 2.2), series(NATIVE, "cold", 2.3)])
    assert [(round(target.value, 2), target.met) for target in found] == [(0.96, True)]
    assert str(found[0]) == f"cold, {STRIPED}: of {NATIVE}, seconds for all bytes: 0.957, target 1 (met)"
    assert str(Target("of the sun", 2.0, 1.0)) == "of the sun: 2.000, target 1 (MISSED)"


def test_a_page_cache_that_stays_in_another_state_is_an_error(
    tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_runs, "condition_memory", lambda nbytes: nbytes)
    side = Side(FULL, "owned", tuple(made_in(tmp_path).files))
    cached, conditioned_bytes = draft_runs.prepare(Series(side, "warm"))
    assert cached in (1.0, None)
    assert conditioned_bytes > 48 * MIB
    monkeypatch.setattr(draft_runs, "cached_share", lambda _: 0.5)
    with pytest.raises(RuntimeError, match=r"50\.0% of the files is cached where it is to be cold"):
        draft_runs.prepare(Series(side, "cold"))


def test_memory_is_what_processes_have_more_than_at_the_start() -> None:
    with MemoryWatch([os.getpid()]) as memory:
        kept = mmap.mmap(-1, 48 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the allocator may have that much left
        for at in range(0, len(kept), mmap.PAGESIZE):
            kept[at] = 1
        until_s = time.monotonic() + 10
        while memory.peak_bytes < 40 * MIB and time.monotonic() < until_s:
            time.sleep(draft_runs.LOOK_EVERY_S)
    kept.close()
    assert 40 * MIB < memory.peak_bytes < 100 * MIB


def test_what_a_process_reads_from_disks_is_told() -> None:
    assert draft_sides.disk_bytes() == draft_sides.disk_bytes(os.getpid()) >= 0


@pytest.mark.processes
def test_every_side_runs_and_hands_over_the_right_bytes(
    tmp_path: Path, few: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "RANKS", 2)
    monkeypatch.setattr(draft, "draft_targets", lambda _: [])
    monkeypatch.setattr(draft, "rank_targets", lambda _: [])
    monkeypatch.setattr(draft_runs, "condition_memory", lambda nbytes: nbytes)
    arguments = ["--gib", "0.02", "--draft-gib", "0.02", "--rounds", "1", "--cache", "cold", "--folder", str(tmp_path)]
    assert draft.main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["wrong"] == []
    direct = limits.can_read_direct(files_of(next(tmp_path.iterdir()))[0])
    loads = {each["side"]["label"]: each for each in document["draft"]}
    assert loads.keys() == {DRAFT, PASSED_ON, WHOLE, FULL, PARSE} | ({RING} if direct else set())
    ranks = {each["side"]["label"]: each for each in document["ranks"]}
    assert ranks.keys() == {ONE_BUFFERED, NATIVE, STRIPED, STAGED} | ({RING, ONE_DIRECT} if direct else set())
    medians = {label: each["medians"] for label, each in (loads | ranks).items()}
    for label in (DRAFT, PASSED_ON):
        assert medians[label]["read_bytes"] <= 1.05 * medians[label]["handed_bytes"]
    assert 2.5 < medians[WHOLE]["handed_bytes"] / medians[DRAFT]["handed_bytes"] < 3.5
    handed = {label: medians[label]["handed_bytes"] for label in (ONE_BUFFERED, NATIVE, STRIPED, STAGED)}
    assert set(handed.values()) == {handed[ONE_BUFFERED], 2 * handed[ONE_BUFFERED]}
    assert medians[STAGED]["read_bytes"] == medians[ONE_BUFFERED]["read_bytes"], "each byte once"
    assert all(len(each["rounds"]) == 1 for each in (loads | ranks).values())
    assert "sharing staging" in ranks[STAGED]["rounds"][0]["how"]


def test_other_bytes_types_and_ways_are_told(tmp_path: Path) -> None:
    sharing = {"sharing": PolicyOutcome("staging", "none", "too little memory")}
    report = LoadReport("all", 0, 4, 2, 24, 24, 0, 1, (), 1.0, 0, True, "", "", policies=sharing, fallbacks=("none",))
    side = Side(STAGED, "batches", (tmp_path / "one",), reads={"sharing": "staging"}, payload_bytes=24, tensors=2)
    taken = draft_sides._Taken(side, cast(BlockingLoad, None))
    right = torch.arange(3, dtype=torch.int32)
    for name, found in (("same", right.clone()), ("other", right + 1), ("type", right.float()), ("shape", right[None])):
        draft_sides._compare(taken, name, found, right)
    assert taken.wrong == ["other", "type", "shape"]
    taken.tensors, taken.nbytes = 2, 24
    wrong = [f"other bytes in '{name}'" for name in taken.wrong]
    assert draft_sides._wrong(side, taken, report) == [*wrong, "none"], "it is not what was to be measured"
    assert draft_sides._wrong(dataclasses.replace(side, reads={"sharing": "none"}), taken, report) == wrong
    taken.tensors = 1
    few = "1 tensors with 24 bytes were handed over, not 2 tensors with 24 bytes"
    assert sorted(draft_sides._wrong(side, taken, report)) == sorted([*wrong, few, "none"])


@pytest.mark.processes
def test_too_few_tensors_and_other_files_are_told_and_fail(
    tmp_path: Path, few: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def somewhere_else(made: DraftCheckpoint, caches: Sequence[str]) -> list[Series]:
        return [Series(dataclasses.replace(draft_series(made, caches)[0].side, prefixes=("model.layers.0",)), "warm")]

    draft_series = draft.draft_series
    monkeypatch.setattr(draft, "draft_series", somewhere_else)
    monkeypatch.setattr(draft, "print_draft", lambda _: None)
    monkeypatch.setattr(draft, "draft_targets", lambda _: [])
    monkeypatch.setattr(draft_runs, "condition_memory", lambda nbytes: nbytes)
    arguments = ["--part", "draft", "--draft-gib", "0.02", "--rounds", "1", "--folder", str(tmp_path)]
    assert draft.main(arguments) == 1
    out = capsys.readouterr().out
    assert f"WRONG: warm, {DRAFT}, rank 0: 80 tensors with" in out
    assert out.count("rank 0: 80 tensors with") == 2, "when bytes were compared, and in the round"
    shards = ", ".join(f"model-{number:05d}-of-00006.safetensors" for number in (1, 2, 4, 6))
    assert f"not those that hold the draft were read, or those were not: {shards}" in out


def test_a_missed_target_is_told_and_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "measure_ranks", lambda *_: ([], "nothing"))
    monkeypatch.setattr(draft, "rank_targets", lambda _: [Target("of the sun", 2.0, 1.0)])
    assert draft.main(["--part", "ranks"]) == 1
    assert "of the sun: 2.000, target 1 (MISSED)" in capsys.readouterr().out
    monkeypatch.setattr(draft, "rank_targets", lambda _: [Target("of the sun", 1.0, 1.0)])
    assert draft.main(["--part", "ranks"]) == 0
