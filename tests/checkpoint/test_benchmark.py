"""The catalog benchmark runs, and its checkpoint is the size that its figures are quoted for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import catalog as benchmark


def test_the_checkpoint_has_the_announced_number_of_tensors() -> None:
    names = {name for name, _, _, _ in benchmark.tensors()}
    assert len(names) == sum(1 for _ in benchmark.tensors()) == benchmark.TENSORS


def test_it_times_every_subject_and_prints_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for constant, value in (("SHARDS", 3), ("TENSORS", 1200), ("EXPERTS", 2), ("DRAFT_EXPERTS", 1)):
        monkeypatch.setattr(benchmark, constant, value)
    benchmark.main(["--rounds", "1", "--json", "--folder", str(tmp_path)])
    document = json.loads(capsys.readouterr().out)
    assert (document["shards"], document["tensors"], document["rounds"]) == (3, 1200, 1)
    assert [timing["subject"] for timing in document["timings"]] == [
        "json.loads of the headers",
        "catalog",
        "catalog and plan, draft by prefixes",
        "catalog and plan, whole load",
    ]
    assert all(timing["median_s"] > 0 for timing in document["timings"])
    assert list(tmp_path.iterdir()) == []
