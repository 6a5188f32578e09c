"""The demo's parts. The whole of it, with its processes, is run by `make demo`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import loader_service as ls
from loader_service.cli import app, demo, demo_checkpoint
from loader_service.cli.plans import plan_of
from loader_service.errors import FailureRecord
from loader_service.sizes import format_size
from tests.cli.support import ROOT
from tests.docs.documents import blocks

SIZE = "4MiB"


def documents_of(config_path: Path, load: str, **changed: object) -> list[dict[str, object]]:
    """What the ranks would print, from the plan."""
    plan = plan_of(ls.load_config(config_path), load, demo.RANKS)
    return [
        {
            "rank": rank,
            "tensors": len(plan.for_rank(rank)),
            "payload_bytes": plan.for_rank(rank).payload_bytes,
            "read_bytes": plan.for_rank(rank).read_bytes,
            "files_opened": len(set(plan.for_rank(rank).extent_shard.tolist())),
            "verified": True,
            **changed,
        }
        for rank in range(demo.RANKS)
    ]


class FakeRanks:
    """Stands for the launcher: answers as ranks would, with `changed` in their reports."""

    def __init__(self, **changed: object) -> None:
        self.launched: list[tuple[str, ...]] = []
        self._changed = changed

    def __call__(self, args: Sequence[str]) -> dict[str, object]:
        self.launched.append(tuple(args))
        command, config_path, option, load, *_ = args
        assert (command, option) == ("load", "--load")
        return {"ranks": documents_of(Path(config_path), load, **self._changed)}


class RealTarget(FakeRanks):
    """Launches the ranks of the target for real; those of the draft would show no more."""

    def __init__(self) -> None:
        super().__init__()
        self._launch = demo._launch

    def __call__(self, args: Sequence[str]) -> dict[str, object]:
        return dict(self._launch(args)) if args[3] == "target" else super().__call__(args)


def test_the_ranks_compare_every_byte_of_both_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = FakeRanks()
    monkeypatch.setattr(demo, "_launch", ranks)
    assert app.run(["demo", "--folder", str(tmp_path), "--size", SIZE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [command[3] for command in ranks.launched] == ["target", "draft"]
    assert all("--verify" in command for command in ranks.launched)
    assert found["checkpoint"]["payload_bytes"] <= 4 << 20
    assert {load: [rank["verified"] for rank in part["ranks"]] for load, part in found["loads"].items()} == {
        "target": [True, True],
        "draft": [True, True],
    }
    draft_files = {rank["files_opened"] for rank in found["loads"]["draft"]["ranks"]}
    assert draft_files == {2}  # of five: those that hold stages 0 and 1
    assert ls.load_config(found["config"]).mesh == {"tp": 2}


def test_the_table_shows_what_each_rank_read_for_what_it_got_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_launch", FakeRanks())
    assert app.run(["demo", "--folder", str(tmp_path), "--size", SIZE]) == 0
    out = capsys.readouterr().out
    assert out.count("2 of 5") == 2
    assert "draft rank 1" in out
    plan = plan_of(ls.load_config(tmp_path / "demo.yaml"), "draft", demo.RANKS).for_rank(1)
    assert re.search(
        rf"draft +1 +{len(plan)} +{format_size(plan.payload_bytes)} +{format_size(plan.read_bytes)} +\d+\.\d % .* yes",
        out,
    )
    by_hand = out.split("Again by hand: ")[1].split()[0]
    assert shutil.which(by_hand), "it can be copied into a shell, whatever environment is active"
    assert "GiB/s" not in out
    assert "seconds" not in out
    assert "mtp.0.eh_proj.weight" in out
    again = app.run(["demo", "--folder", str(tmp_path), "--size", SIZE])  # the checkpoint is found, not made
    assert again == 0


def test_the_readme_shows_what_the_demo_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def zeros(tensor: demo_checkpoint.DemoTensor, _seed: int) -> torch.Tensor:
        return (
            torch.zeros(tensor.nbytes, dtype=torch.uint8).view(demo_checkpoint._CODES[tensor.dtype]).view(tensor.shape)
        )

    monkeypatch.setattr(demo_checkpoint, "_content", zeros)
    monkeypatch.setattr(demo, "_launch", RealTarget())
    assert app.run(["demo", "--folder", str(tmp_path)]) == 0
    shutil.rmtree(tmp_path)  # 300 MiB
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    (shown,) = (block for block in blocks("README.md", "text") if "every byte equal" in block.text)
    for line in shown.text.splitlines():
        assert line.strip() in printed


@pytest.mark.parametrize("changed", [{"read_bytes": 1 << 30}, {"verified": None}, {"tensors": 0}], ids=str)
def test_a_report_that_differs_from_the_plan_fails_the_demo(
    changed: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_launch", FakeRanks(**changed))
    assert app.run(["demo", "--folder", str(tmp_path), "--size", SIZE, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["error"] == "CheckpointError"


@pytest.mark.parametrize(
    ("printed", "error", "says"),
    [
        (FailureRecord("ReadError", "no luck", 1, "read").as_dict(), ls.ReadError, "no luck"),
        (None, ls.LoaderError, "ended with code 7 and without a document: the last | words"),
    ],
    ids=["a record", "nothing"],
)
def test_what_the_ranks_say_of_their_failure_is_the_demo_s(
    printed: dict[str, object] | None,
    error: type[Exception],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher = tmp_path / "python"
    out = f"echo '{json.dumps(printed)}'" if printed else ":"
    launcher.write_text(f"#!/bin/sh\n{out}\necho the last >&2\necho words >&2\nexit 7\n")
    launcher.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(launcher))
    with pytest.raises(error, match=says.replace("|", r"\|")):
        demo._launch(["load"])


def test_ranks_that_hang_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "python"
    launcher.write_text("#!/bin/sh\nexec sleep 1000\n")
    launcher.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(launcher))
    monkeypatch.setattr(demo, "LIMIT_S", 0.2)
    with pytest.raises(ls.LoaderError, match="did not end within"):
        demo._launch(["load"])


def test_the_repository_s_demo_configuration_has_the_same_loads(tmp_path: Path) -> None:
    config = ls.load_config(demo._write_config(tmp_path))
    repository = ls.load_config(ROOT / "configs" / "demo.yaml")
    assert config.loads == repository.loads
    assert config.mesh == repository.mesh
    assert repository.checkpoint_of("target").path == str(ROOT / ".demo" / "checkpoint")


@pytest.mark.parametrize("size", ["300 MiB", "1e9", "12KiB"])
def test_a_size_that_cannot_be_is_a_usage_error(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["demo", "--folder", str(tmp_path), "--size", size, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == "ConfigError"
