"""What the peers' benchmark says of given figures, and how it makes the peers' environment."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from benchmarks import peers, peers_venv
from benchmarks.common import GIB, MIB
from benchmarks.peers import Target, targets_of
from benchmarks.peers_cases import (
    BUFFERED,
    DIRECT,
    LOADER,
    OTHERS,
    RUNAI,
    SAFE_OPEN,
    SAFE_OPEN_PREAD,
    WHOLE,
    Case,
    Side,
)
from benchmarks.peers_runs import Series
from benchmarks.peers_sides import Result
from benchmarks.peers_venv import Environments, NotOursError, make_environments


def lines_of(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("|")]


# Targets


def series(case: str, cache: str, side: Side, *seconds: float, **more: Any) -> Series:
    result = Result(0.0, 0.5, GIB, 10, GIB + 300 * MIB, 0.1, 1.0, 2.0, {"torch": "2"})
    results = [dataclasses.replace(result, seconds=each, **more) for each in seconds]
    return Series(Case(case, f"{case} it is", "all", (), GIB, ()), side, cache, results)


def found_in(*all_series: Series) -> list[tuple[str, float, bool]]:
    targets = targets_of(all_series)
    assert all(target.value is not None for target in targets)
    return [(target.text.split(": ", 1)[1], round(target.value or 0, 3), target.met) for target in targets]


REST = [("MiB at most above what is delivered", 300.0, True), ("ms, 99th percentile of the loop's lag", 1.0, True)]


def test_whole_loads_are_held_to_the_limit_and_to_each_peer_by_medians() -> None:
    ring, slow_ring = series("whole", "cold", DIRECT, 0.93), series("whole", "cold", BUFFERED, 5.0)
    ours = series("whole", "cold", LOADER, 1.0, 1.0, 9.0)
    beside = [series("whole", "cold", RUNAI, 1.0, cpu_s=0.4), series("whole", "cold", SAFE_OPEN, 1.39)]
    found = found_in(ours, *beside, ring, slow_ring)
    assert found == [
        ("of the limit", 0.93, True),
        ("CPU s/GiB, of which runai-model-streamer has the least of all peers", 0.5, False),
        ("times as fast as runai-model-streamer", 1.0, True),
        (f"times as fast as {SAFE_OPEN.label}", 1.39, False),
        *REST,
    ]
    warm = [dataclasses.replace(each, cache="warm") for each in (ours, *beside, slow_ring)]
    assert [(text, met) for text, _, met in found_in(*warm)][1:3] == [
        ("times as fast as runai-model-streamer", False),
        (f"times as fast as {SAFE_OPEN.label}", False),
    ]
    late = dataclasses.replace(ours, results=[dataclasses.replace(ours.results[0], lag_p99_ms=5.1, peak_bytes=2 * GIB)])
    assert found_in(late, ring)[-2:] == [(REST[0][0], 1024.0, False), (REST[1][0], 5.1, False)]
    assert not found_in(series("whole", "cold", LOADER, 1.01), ring)[0][2]


@pytest.mark.parametrize(
    ("case", "side", "least"),
    [
        ("small", SAFE_OPEN, 2.5),
        ("small", SAFE_OPEN_PREAD, None),
        ("rows", SAFE_OPEN, 1.3),
        ("rows", OTHERS[0], 3.0),
        ("columns", SAFE_OPEN, 1.3),
        ("columns", RUNAI, 1.3),
        ("draft", SAFE_OPEN, None),
        ("draft", dataclasses.replace(RUNAI, reads=WHOLE), 20.0),
    ],
)
def test_parts_are_held_to_what_their_peers_read(case: str, side: Side, least: float | None) -> None:
    for times in (0.99, 1.01):
        group = [series(case, "cold", LOADER, 1.0), series(case, "cold", side, (least or 1) * times)]
        ratios = [met for text, _, met in found_in(*group, series(case, "cold", DIRECT, 1.0)) if "fast" in text]
        assert ratios == ([] if least is None else [times > 1])


def test_a_peer_that_could_not_run_misses_its_target() -> None:
    absent = dataclasses.replace(series("whole", "cold", RUNAI), failure="no wheel | here")
    group = [series("whole", "cold", LOADER, 1.0), absent, series("whole", "cold", DIRECT, 1.0)]
    (target,) = [each for each in targets_of(group) if "runai" in each.text]
    assert (target.met, target.value) == (False, None)
    assert str(target).endswith("not measured (no wheel | here), target at least 1 (MISSED)")
    assert str(Target("a", 2.0, 1.0, least=False)) == "a: 2.00, target at most 1 (MISSED)"
    assert str(Target("a", 1.2, 1.4, most=1.28)) == "a: 1.20, target at least 1.4 (MISSED); the disk's limit: 1.28"


def test_tables_are_markdown_with_all_sides(capsys: pytest.CaptureFixture[str]) -> None:
    absent = dataclasses.replace(series("rows", "cold", RUNAI), failure="no wheel | here")
    ours = series("rows", "cold", LOADER, 1.0, 1.5, 2.0)
    peers.print_results([ours, absent, series("rows", "cold", SAFE_OPEN, 3.0), series("rows", "cold", DIRECT, 0.5)])
    out = capsys.readouterr().out
    assert "rows it is, cold" in out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines_of(out)]
    assert {len(row) for row in rows} == {len(peers.COLUMNS)}
    assert rows[2][:6] == ["loader_service, owned", "1.500 (1.000-2.000)", "0.67", "33%", "", "0.50"]
    assert rows[3][0] == "runai-model-streamer: no wheel / here"
    assert rows[4][4] == "2.0 x"


# The peers' environment


def test_requirements_are_pinned_and_the_pre_release_is_one() -> None:
    lines = [line for line in peers_venv.REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    pins = {requirement.name: str(requirement.specifier) for requirement in map(Requirement, lines)}
    assert all(pin.startswith("==") for pin in pins.values())
    installed = {*peers_venv.BASE, *(name for names in peers_venv.PEERS.values() for name in names)}
    assert pins.keys() == installed
    (line,) = [line for line in peers_venv.PRE_REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    pre = Version(str(Requirement(line).specifier)[2:])
    assert pre.is_prerelease
    assert pre > Version(pins["safetensors"][2:])


def test_the_pre_release_lies_in_front_of_the_peers_packages() -> None:
    environments = Environments("/of/peers", Path("/of/pre"))
    root = str(peers_venv.ROOT)
    assert environments.variables("pre")["PYTHONPATH"] == f"/of/pre{os.pathsep}{root}"
    assert environments.variables("peers")["PYTHONPATH"] == root
    assert environments.variables("own") == dict(os.environ)
    assert [environments.command(where)[0] for where in ("own", "peers", "pre")] == [sys.executable, *["/of/peers"] * 2]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would be run; a command that names the package 'fastsafetensors' fails while it is in the environment."""
    ran: list[list[str]] = []

    def run(command: list[str]) -> str:
        ran.append(command)
        return "ERROR: none" if "fastsafetensors" in command and "NO_FAST" in os.environ else ""

    monkeypatch.setattr(peers_venv, "_run", run)
    return ran


def test_the_environment_is_made_once_with_pinned_versions(tmp_path: Path, commands: list[list[str]]) -> None:
    environments = make_environments(tmp_path / "venv")
    assert environments.missing == {}
    made, base, *others_, pre = commands
    assert made[1:3] == ["-m", "venv"]
    assert base[-3:] == ["torch", "numpy", "safetensors"]
    assert "--no-deps" not in base
    assert all("--no-deps" in command for command in (*others_, pre))
    assert all(command[command.index("-c") + 1] == str(peers_venv.REQUIREMENTS) for command in (base, *others_))
    assert pre[pre.index("--target") + 1] == str(environments.pre)
    count = len(commands)
    assert make_environments(tmp_path / "venv") == environments
    assert len(commands) == count


def test_a_package_that_cannot_be_installed_is_tried_again(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_FAST", "1")
    assert make_environments(tmp_path / "venv").missing == {"fastsafetensors": "ERROR: none"}
    assert any("unifiedefficientloader" in command for command in commands), "the others are installed all the same"
    monkeypatch.delenv("NO_FAST")
    tried = len(commands)
    assert make_environments(tmp_path / "venv").missing == {}
    assert any("fastsafetensors" in command for command in commands[tried:])


def test_a_folder_that_holds_something_else_is_left_alone(
    tmp_path: Path, commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(NotOursError):
        make_environments(tmp_path)
    assert peers.main(["--venv", str(tmp_path), "--folder", str(tmp_path / "folder")]) == 2
    assert "give another one with --venv" in capsys.readouterr().err
    assert commands == []


def test_a_command_that_fails_says_why_in_its_last_error() -> None:
    script = "import sys; print('ERROR: this\\nnote', file=sys.stderr); sys.exit({})"
    assert peers_venv._run([sys.executable, "-c", script.format(1)]) == "ERROR: this"
    assert peers_venv._run([sys.executable, "-c", script.format(0)]) == ""
    assert "No such file" in peers_venv._run(["/no/such/command"])
