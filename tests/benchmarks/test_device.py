"""The benchmark of loading to a device: its machinery at a tiny size where there is one, a clear message where not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import device


def test_without_a_device_it_says_so_and_makes_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.main(["--folder", str(tmp_path)]) == device.NO_DEVICE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "benchmarks.device needs a CUDA device, and torch sees none here\n"
    assert list(tmp_path.iterdir()) == []


def test_other_bytes_missing_and_foreign_tensors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "DEVICE", "cpu")
    right = {name: torch.arange(6, dtype=torch.bfloat16) for name in ("same", "other", "shape", "missing", "nan")}
    right["nan"] *= torch.nan
    found = {
        "same": right["same"].clone(),
        "other": right["other"] + 1,
        "shape": right["shape"].view(2, 3),
        "nan": right["nan"].clone(),
        "foreign": torch.zeros(1),
    }
    assert sorted(device.differences(found, right)) == ["foreign", "missing", "other", "shape"]
    monkeypatch.setattr(device, "DEVICE", "cuda")
    assert device.differences({"same": right["same"]}, {"same": right["same"]}) == ["same"], "it never left the CPU"


def test_the_limit_is_the_slower_of_reading_and_copying() -> None:
    def series(label: str, seconds: float) -> device.Series:
        return device.Series(label, "cold", 1 << 30, [device.Run(seconds, 0.0, None)])

    group = [series("limit: buffered ring", 0.5), series(device.DIRECT, 0.25), series("limit: pageable copies", 0.1)]
    assert device.limit_of([*group, series("limit: pinned copies", 0.1)]) == 4.0
    assert device.limit_of([*group, series("limit: pinned copies", 1.0)]) == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["json", "table"])
def test_every_side_puts_the_right_bytes_on_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    arguments = ["--gib", "0.03", "--rounds", "1", "--capacity-mib", "8", "--folder", str(tmp_path)]
    assert device.main([*arguments, *(["--json"] if form == "json" else [])]) == 0
    out = capsys.readouterr().out
    if form == "table":
        assert "the CPU's, on every side in every round" in out
        return
    document = json.loads(out)
    labels = {(each["cache"], each["label"]) for each in document["series"]}
    assert {("warm", label) for label in device.SIDES | device.COPIES} <= labels
    assert all(each["wrong"] == [] and len(each["rounds"]) == 1 for each in document["series"])
