"""Progress goes to stderr: a bar for a person who watches, a line now and then for a log."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest

from loader_service.cli import app, progress
from loader_service.sizes import format_size
from tests.cli.support import write_config, write_small_checkpoint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_on_a_terminal_and_stdout_stays_one_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path / "c.yaml", write_small_checkpoint(tmp_path / "checkpoint"))
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    assert app.run(["load", str(config), "--load", "all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 8
    assert "load all" in terminal.getvalue()
    assert "8 tensors" in terminal.getvalue()


def test_a_manifest_has_a_bar_of_bytes_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_small_checkpoint(tmp_path / "checkpoint")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    assert app.run(["manifest", str(folder), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == 8
    total = format_size(sum(file.stat().st_size for file in folder.iterdir()))
    assert "manifest" in terminal.getvalue()
    assert f"{total} of {total}" in terminal.getvalue()
    assert "tensors" not in terminal.getvalue()


class TestLines:
    @pytest.fixture
    def now_s(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        now = [100.0]
        monkeypatch.setattr("time.monotonic", lambda: now[0])
        return now

    def test_a_line_comes_at_most_every_few_seconds_also_when_nothing_moves(
        self, now_s: list[float], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "loader_service")
        lines = progress.progress_of("target", shown=True)
        lines.begin(4 << 30)
        lines.advance(1 << 30)
        lines.tensor_done()
        lines.tick()
        assert caplog.messages == []
        now_s[0] += progress.LINE_EVERY_S
        lines.tick()
        lines.tick()
        assert caplog.messages == ["load 'target': 1.00 GiB of 4.00 GiB, 1 tensors, 0.20 GiB/s"]
        now_s[0] += progress.LINE_EVERY_S
        lines.tick()
        assert len(caplog.messages) == 2

    def test_of_a_manifest_they_count_bytes(self, now_s: list[float], caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "loader_service")
        lines = progress.hashing_progress()
        lines.begin(4 << 30)
        lines.advance(1 << 30)
        now_s[0] += progress.LINE_EVERY_S
        lines.tick()
        assert caplog.messages == ["manifest: 1.00 GiB of 4.00 GiB, 0.20 GiB/s"]

    def test_rows_of_a_table_are_named_and_their_pieces_are_no_tensors(
        self, now_s: list[float], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "loader_service")
        lines = progress.progress_of("target", shown=True)
        lines.begin(4 << 30)
        lines.rows_of("t.embed")
        for _ in range(3):
            lines.advance(64 << 20)
        now_s[0] += progress.LINE_EVERY_S
        lines.tick()
        lines.tensor_done()
        now_s[0] += progress.LINE_EVERY_S
        lines.tick()
        assert caplog.messages == [
            "load 'target': 192.00 MiB of 4.00 GiB, 0 tensors, 0.04 GiB/s; reading rows of 't.embed'",
            "load 'target': 192.00 MiB of 4.00 GiB, 1 tensors, 0.02 GiB/s",
        ]

    def test_a_rank_that_is_waited_for_is_named(self, now_s: list[float], caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "loader_service")
        lines = progress.progress_of("target", shown=True)
        lines.begin(4 << 30)
        for rank in (3, None):
            lines.waits_for(rank)
            now_s[0] += progress.LINE_EVERY_S
            lines.tick()
        ends = [message.partition("GiB/s")[2] for message in caplog.messages]
        assert ends == ["; waiting for rank 3", ""]

    def test_before_the_load_is_planned_a_line_says_what_it_is_at(
        self, now_s: list[float], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "loader_service")
        lines = progress.progress_of("target", shown=True)
        now_s[0] += progress.LINE_EVERY_S
        lines.tick()
        assert caplog.messages == ["load 'target': reading headers, or waiting for other ranks"]

    def test_other_ranks_say_nothing(self, now_s: list[float], caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "loader_service")
        silent = progress.progress_of("target", shown=False)
        silent.begin(10)
        now_s[0] += 100
        silent.tick()
        assert caplog.messages == []
