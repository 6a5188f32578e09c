"""`--log-format json`: whatever the loader writes to stderr is one JSON object a line, also why it failed."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from loader_service import logs
from loader_service.cli import app
from loader_service.errors import ReadError
from tests.cli.support import Fault, start_ranks, write_config, write_small_checkpoint

Capture = pytest.CaptureFixture[str]


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def formatted(**more: Any) -> dict[str, Any]:
    record = logging.LogRecord("a.b", logging.WARNING, "f.py", 1, "%s\nof %d", ("line", 2), None)
    vars(record).update(more)
    (line,) = logs.JsonFormatter().format(record).splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_record_is_one_line_with_what_is_known() -> None:
    found = formatted(
        load="targét", rank=0, world_size=None, phase="read", path=Path("/x"), created=0.25, time=7, level="x"
    )
    assert found == {
        "time": "1970-01-01T00:00:00.250+00:00",
        "level": "WARNING",
        "logger": "a.b",
        "message": "line\nof 2",
        "load": "targét",
        "rank": 0,
        "phase": "read",
        "path": "/x",
    }


def test_an_error_brings_what_it_names() -> None:
    try:
        raise ReadError("it broke", path="/x/a.safetensors", tensor="w", rank=3, errno=5)
    except ReadError as error:
        found = formatted(exc_info=(type(error), error, error.__traceback__))
    assert (found["error"], found["path"], found["tensor"], found["rank"], found["errno"]) == (
        "ReadError",
        "/x/a.safetensors",
        "w",
        3,
        5,
    )
    assert found["message"] == "line\nof 2"
    assert found["traceback"].startswith("Traceback")
    assert found["traceback"].endswith("ReadError: it broke")


def test_what_a_call_says_stands_above_what_is_known(caplog: pytest.LogCaptureFixture) -> None:
    log = logs.logger("loader_service.some")
    with logs.working_on(logs.Subject("target", 1, 2, "plan")):
        log.warning("one", extra={"phase": "read", "tensors": 7})
    log.warning("two")
    one, two = caplog.records
    assert [(r.load, r.rank, r.world_size, r.phase) for r in (one, two)] == [  # type: ignore[attr-defined]
        ("target", 1, 2, "read"),
        (None, None, None, None),
    ]
    assert one.tensors == 7  # type: ignore[attr-defined]
    assert one.filename == "test_logs.py"


@pytest.mark.parametrize(
    ("args", "error", "says"),
    [
        (["load", "{missing}", "--log-format", "json"], "ConfigError", "missing.yaml"),
        (["load", "--log-format=json", "{config}", "--load", "nothing"], "ConfigError", "no load is named 'nothing'"),
        (["inspect", "{missing}", "--log-format", "JSON"], "CheckpointError", "missing.yaml"),
        (["plan", "{config}", "--log-format", "json", "--nothing"], "UsageError", "No such option: --nothing"),
    ],
)
def test_why_a_command_failed_is_a_record_too(
    args: list[str], error: str, says: str, tmp_path: Path, capsys: Capture
) -> None:
    config = write_config(tmp_path / "c.yaml", write_small_checkpoint(tmp_path / "checkpoint"))
    places = {"config": str(config), "missing": str(tmp_path / "missing.yaml")}
    assert app.run([arg.format_map(places) for arg in args]) != 0
    said = capsys.readouterr()
    assert said.out == ""
    found = lines_of(said.err)
    assert (found[-1]["level"], found[-1]["logger"], found[-1]["error"]) == ("ERROR", "loader_service.cli", error)
    assert says in found[-1]["message"]
    assert app.run(["inspect", str(tmp_path / "missing.yaml")]) == 3
    assert capsys.readouterr().err.startswith("loader-service: "), "the next command line says it anew"


def test_a_traceback_is_asked_for_as_a_record(tmp_path: Path, capsys: Capture) -> None:
    assert app.run(["inspect", str(tmp_path / "nowhere"), "--debug", "--log-format", "json"]) == 3
    traceback, failure = lines_of(capsys.readouterr().err)
    assert "checkpoint" in traceback["traceback"]
    assert traceback["error"] == failure["error"] == "CheckpointError"


def test_no_bar_is_drawn_between_records(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    config = write_config(tmp_path / "c.yaml", write_small_checkpoint(tmp_path / "checkpoint"))
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    args = ["load", str(config), "--load", "all", "--json", "--log-format", "json", "--log-level", "debug"]
    assert app.run(args) == 0
    found = lines_of(terminal.getvalue())
    assert {line["load"] for line in found if line["logger"] == "loader_service.load"} == {"all"}
    assert json.loads(capsys.readouterr().out)["tensors"] == 8


@pytest.mark.processes
def test_ranks_that_fail_write_nothing_but_records(tmp_path: Path) -> None:
    checkpoint = write_small_checkpoint(tmp_path / "checkpoint")
    config = write_config(tmp_path / "c.yaml", checkpoint, ranks=2, reads={"retries": 0})
    args = ["load", str(config), "--load", "all", "--json", "--log-format", "json", "--log-level", "debug"]
    ranks = start_ranks([args, args], tmp_path, faults={1: Fault("input/output error")})
    first, second = (lines_of(rank.end().err) for rank in ranks)
    for rank, found in enumerate((first, second)):
        of_load = [line for line in found if line["logger"] in ("loader_service.load", "loader_service.agreement")]
        assert {(line["load"], line["rank"], line["world_size"]) for line in of_load} == {("all", rank, 2)}
        assert {line["phase"] for line in of_load} == {"config", "catalog", "plan", "open", "read"}
    last = first[-1]
    assert (last["level"], last["error"], last["rank"], last["phase"]) == ("ERROR", "ReadError", 1, "read")
    assert (last["load"], last["errno"]) == ("all", 5)
    assert last["path"].startswith(str(checkpoint))
