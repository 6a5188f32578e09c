"""Real processes: exit codes, signals, ranks that meet, fail and die. Torch's import makes each cost seconds."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.support import (
    NO_SLOW_NAMES,
    ROOT,
    CommandLine,
    Fault,
    start_ranks,
    wait_until,
    write_config,
    write_small_checkpoint,
)

pytestmark = pytest.mark.processes

QUICK: dict[str, Any] = {"agreement": {"timeout_s": 20, "start_timeout_s": 60, "grace_s": 0.2}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_small_checkpoint(tmp_path / "checkpoint")


def test_ranks_under_torchrun_verify_and_write_manifests(tmp_path: Path, checkpoint: Path) -> None:
    config = write_config(tmp_path / "config.yaml", checkpoint, ranks=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", "-m", "loader_service", "load", str(config), "--load", "all", "--verify"]
    command += ["--json", "--manifest", str(tmp_path / "m.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **NO_SLOW_NAMES}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert ended.returncode == 0, ended.stderr
    reports = json.loads(ended.stdout)["ranks"]
    assert [(report["rank"], report["world_size"], report["verified"]) for report in reports] == [
        (0, 2, True),
        (1, 2, True),
    ]
    stored = {**load_file(checkpoint / "a.safetensors"), **load_file(checkpoint / "b.safetensors")}
    whole = ["scale", "nothing", "down.scale", "draft.norm"]
    for rank, (rows, columns) in enumerate((((0, 3), (0, 3)), ((3, 7), (3, 7)))):
        expected = {name: stored[name] for name in [*whole, f"experts.{rank}.w"]}
        expected["embed.weight"] = stored["embed.weight"][slice(*rows)]
        expected["down.weight"] = stored["down.weight"][:, slice(*columns)]
        manifest = json.loads((tmp_path / f"m.rank{rank}.json").read_text())
        assert manifest.keys() == expected.keys()
        for name, tensor in expected.items():
            assert manifest[name]["shape"] == list(tensor.shape)
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            assert manifest[name]["sha256"] == hashlib.sha256(data).hexdigest(), name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_load_with_a_read_that_never_returns(
    number: signal.Signals, tmp_path: Path, checkpoint: Path
) -> None:
    config = write_config(tmp_path / "config.yaml", checkpoint, **QUICK)
    mark = tmp_path / "mark"
    process = CommandLine(["load", str(config), "--load", "all", "--json"], {}, Fault("never returns", mark), tmp_path)
    wait_until(mark.exists)
    process.send_signal(number)
    ended = process.end()
    assert ended.code == 130
    assert (ended.document["error"], ended.document["message"]) == (
        "LoadCancelledError",
        f"interrupted by {number.name}",
    )
    assert "Traceback" not in ended.err


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path, checkpoint: Path) -> None:
    patient: dict[str, Any] = {"agreement": {"timeout_s": 300, "start_timeout_s": 300, "grace_s": 300}}
    config = write_config(tmp_path / "config.yaml", checkpoint, **patient)
    mark = tmp_path / "mark"
    process = CommandLine(["load", str(config), "--load", "all", "--json"], {}, Fault("never returns", mark), tmp_path)
    wait_until(mark.exists)

    def interrupted_until_it_ends() -> bool:  # signals of one kind merge while they are pending: two must be taken
        process.send_signal(signal.SIGINT)
        return not process.running

    wait_until(interrupted_until_it_ends)
    ended = process.end()
    assert ended.code == 130
    assert "interrupted by SIGINT, then by SIGINT: ending at once" in ended.err


ENDS = """
import atexit, sys
from loader_service.cli import app
atexit.register(print, "the interpreter's own end")
sys.argv = ["loader-service", "schema"]
app.main()
"""


def test_a_process_ends_without_the_interpreters_own_end() -> None:
    """It would wait for, or be aborted by, a thread that is stuck or comes back meanwhile."""
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "loads" in json.loads(ended.stdout)["properties"]


def test_a_failing_read_on_one_rank_ends_both_and_rank_0_alone_says_so(tmp_path: Path, checkpoint: Path) -> None:
    config = write_config(tmp_path / "config.yaml", checkpoint, ranks=2, reads={"retries": 1}, **QUICK)
    args = ["load", str(config), "--load", "all", "--json"]
    processes = start_ranks([args, args], tmp_path, faults={1: Fault("input/output error")})
    first, second = (process.end() for process in processes)
    assert (first.code, second.code) == (4, 5), first.err + second.err
    record = first.document
    assert (record["error"], record["rank"], record["phase"], record["errno"]) == ("ReadError", 1, "read", 5)
    assert second.out == ""
    assert first.err.count("rank 1 failed") == 1
    assert "rank 1 failed" not in second.err


def test_a_rank_that_prints_and_is_then_stopped_by_its_launcher_keeps_its_code(
    tmp_path: Path, checkpoint: Path
) -> None:
    config = write_config(tmp_path / "config.yaml", checkpoint, ranks=2, agreement={"timeout_s": 20, "grace_s": 6})
    args = ["load", str(config), "--load", "all", "--json"]
    faults = {0: Fault("never returns"), 1: Fault("input/output error")}
    first, second = start_ranks([args, args], tmp_path, faults=faults)
    wait_until(lambda: first.printed() != "")
    assert "did not return" not in first.logged()  # it says so before the read in flight was waited for
    first.send_signal(signal.SIGTERM)
    ended = first.end()
    assert (ended.code, ended.document["error"]) == (4, "ReadError")
    assert "did not return" in ended.err
    assert second.end().code == 5


def test_a_configuration_that_is_wrong_on_one_rank_only(tmp_path: Path, checkpoint: Path) -> None:
    good = write_config(tmp_path / "good.yaml", checkpoint, ranks=2, **QUICK)
    bad = write_config(tmp_path / "bad.yaml", checkpoint, ranks=2, nonsense=1, loads={"all": {"skipp": []}})
    # The rank whose file cannot be read does not know under which name the other one's load goes.
    args = [["load", str(good), "--load", "all", "--json"], ["load", str(bad), "--json"]]
    first, second = (process.end() for process in start_ranks(args, tmp_path))
    assert (first.code, second.code) == (4, 2), first.err + second.err
    assert (first.document["error"], first.document["rank"]) == ("ConfigError", 1)
    said = [line for line in (first.err + second.err).splitlines() if "nonsense" in line or "skipp" in line]
    assert len(said) == 2, said
    assert "\n".join(sorted(said)).count("rank 1 failed in phase config: ConfigError: ") == 1
    assert second.out == ""


def test_a_refused_rank_prints_before_it_waits_for_others_and_its_launcher_changes_nothing(
    tmp_path: Path, checkpoint: Path
) -> None:
    """Rank 0 hears of no BYE from a rank that is frozen, and waits 2 s for it."""
    good = write_config(tmp_path / "good.yaml", checkpoint, ranks=2, **QUICK)
    bad = write_config(tmp_path / "bad.yaml", checkpoint, ranks=2, nonsense=1)
    first, second = start_ranks([["load", str(path), "--load", "all", "--json"] for path in (bad, good)], tmp_path)
    second.send_signal(signal.SIGSTOP)
    wait_until(lambda: first.printed() != "")
    assert first.running
    first.send_signal(signal.SIGTERM)
    ended = first.end()
    assert (ended.code, ended.document["error"]) == (2, "ConfigError"), ended.err
    assert "interrupted" not in ended.err
    second.send_signal(signal.SIGKILL)
    second.end()


def test_a_manifest_that_one_rank_cannot_write_is_told_to_the_others(tmp_path: Path, checkpoint: Path) -> None:
    """Rank 1's folder of manifests goes away while it loads."""
    config = write_config(tmp_path / "config.yaml", checkpoint, ranks=2, **QUICK)
    folder = tmp_path / "manifests"
    folder.mkdir()
    args = ["load", str(config), "--load", "all", "--json", "--manifest"]
    mark = tmp_path / "mark"
    first, second = start_ranks(
        [[*args, str(tmp_path / "m.json")], [*args, str(folder / "m.json")]],
        tmp_path,
        faults={1: Fault("waits", mark)},
    )
    wait_until(mark.exists)
    folder.rmdir()
    mark.unlink()
    ended = first.end()
    assert (ended.code, ended.document["error"], ended.document["rank"]) == (4, "ConfigError", 1), ended.err
    other = second.end()
    assert (other.code, other.out) == (2, ""), other.err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_while_a_manifest_is_written_is_one_record_of_its_rank(
    rank: int, tmp_path: Path, checkpoint: Path
) -> None:
    """The load has succeeded, the other rank waits for this one's report."""
    mark = tmp_path / "mark"
    processes = start_manifests(tmp_path, checkpoint, {rank: Fault("manifest waits", mark)})
    wait_until(mark.exists)
    processes[rank].send_signal(signal.SIGTERM)
    ended = [process.end() for process in processes]
    codes = [130 if number == rank else 4 for number in (0, 1)]
    assert [one.code for one in ended] == codes, ended[0].err + ended[1].err
    told = ended[0].document
    assert (told["error"], told["message"], told["rank"]) == ("LoadCancelledError", "interrupted by SIGTERM", rank)
    assert (ended[1].out, "loader-service:" in ended[1].err) == ("", False)


def test_an_unexpected_error_after_the_load_is_one_record_of_its_rank(tmp_path: Path, checkpoint: Path) -> None:
    processes = start_manifests(tmp_path, checkpoint, {1: Fault("manifest without memory")})
    first, second = (process.end() for process in processes)
    assert (first.code, second.code) == (4, 6), first.err + second.err
    told = first.document
    assert (told["error"], told["message"], told["rank"]) == ("MemoryError", "no room for the text", 1)
    assert (second.out, "loader-service:" in second.err) == ("", False)


def start_manifests(folder: Path, checkpoint: Path, faults: dict[int, Fault]) -> list[CommandLine]:
    """Two ranks that write manifests."""
    config = write_config(folder / "config.yaml", checkpoint, ranks=2, **QUICK)
    args = ["load", str(config), "--load", "all", "--json", "--manifest", str(folder / "m.json")]
    return start_ranks([args, args], folder, faults=faults)


def test_ranks_with_different_configurations_name_the_difference_once(tmp_path: Path, checkpoint: Path) -> None:
    one = write_config(tmp_path / "one.yaml", checkpoint, ranks=2, **QUICK)
    other = write_config(tmp_path / "other.yaml", checkpoint, ranks=2, loads={"all": {"skip": ["scale"]}}, **QUICK)
    processes = start_ranks([["load", str(path), "--load", "all", "--json"] for path in (one, other)], tmp_path)
    first, second = (process.end() for process in processes)
    assert (first.code, second.code) == (4, 4), first.err + second.err
    assert first.document["error"] == "AgreementError"
    assert "loads.all.skip" in first.document["message"]
    assert second.out == ""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_by_the_lowest_that_lives(victim: int, tmp_path: Path, checkpoint: Path) -> None:
    config = write_config(tmp_path / "config.yaml", checkpoint, ranks=3, **QUICK)
    args = ["load", str(config), "--load", "all", "--json"]
    marks = [tmp_path / f"mark{rank}" for rank in range(3)]
    faults = {rank: Fault("never returns", mark) for rank, mark in enumerate(marks)}
    processes = start_ranks([args] * 3, tmp_path, faults=faults)
    wait_until(lambda: all(mark.exists() for mark in marks))
    processes[victim].send_signal(signal.SIGKILL)
    ended = [process.end() for process in processes]
    assert ended[victim].code == -signal.SIGKILL
    speaker = min({0, 1, 2} - {victim})
    for rank in {0, 1, 2} - {victim}:
        assert ended[rank].code == 4, ended[rank].err
        assert (ended[rank].out != "") == (rank == speaker)
    assert ended[speaker].document["rank"] == victim


def test_a_signal_to_one_rank_is_130_there_and_4_on_the_other(tmp_path: Path, checkpoint: Path) -> None:
    config = write_config(tmp_path / "config.yaml", checkpoint, ranks=2, **QUICK)
    args = ["load", str(config), "--load", "all", "--json"]
    mark = tmp_path / "mark"
    faults = {0: Fault("never returns"), 1: Fault("never returns", mark)}
    processes = start_ranks([args, args], tmp_path, faults=faults)
    wait_until(mark.exists)
    processes[1].send_signal(signal.SIGTERM)
    first, second = (process.end() for process in processes)
    assert (first.code, second.code) == (4, 130), first.err + second.err
    assert (first.document["error"], first.document["rank"]) == ("LoadCancelledError", 1)
    assert second.out == ""


def test_a_difference_on_one_rank_fails_the_verification_on_both(tmp_path: Path, checkpoint: Path) -> None:
    config = write_config(tmp_path / "config.yaml", checkpoint, ranks=2, **QUICK)
    args = ["load", str(config), "--load", "all", "--verify", "--json"]
    processes = start_ranks([args, args], tmp_path, faults={1: Fault("flips a bit")})
    first, second = (process.end() for process in processes)
    assert (first.code, second.code) == (4, 3), first.err + second.err
    assert (first.document["error"], first.document["rank"]) == ("CheckpointError", 1)
    assert first.document["tensor"] is not None
    assert second.out == ""
