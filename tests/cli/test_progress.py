"""Progress goes to stderr: a bar for a person who watches, a line now and then for a log."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest

from loader_service.cli import app, progress
from loader_service.sizes import format_size
from tests.cli.support import wait_until, write_config, write_small_checkpoint

GIB = 1 << 30


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


@pytest.mark.parametrize(
    ("done", "seconds", "found"),
    [
        pytest.param({}, 60, {}, id="nobody has said anything"),
        pytest.param({0: (9, 9)}, 60, {}, id="alone"),
        pytest.param({0: (600, 1000), 1: (598, 1000)}, 60, {}, id="what it may have read since it said so"),
        pytest.param({0: (600, 1000), 1: (200, 1000)}, 60, {1: 400}, id="of two the slower"),
        pytest.param({0: (600, 1000), 1: (200, 1000)}, 2, {1: 400}, id="at once, where it is more than that"),
        pytest.param({0: (600, 1000), 1: (400, 1000)}, 2, {}, id="not at once, where it may be that"),
        pytest.param({0: (600, 1000), 1: (0, 1000)}, 60, {1: 600}, id="one that has nothing"),
        pytest.param({0: (50, 100), 1: (500, 1000), 2: (10, 10)}, 60, {}, id="shares count, and one has little to do"),
        pytest.param(
            {0: (60, 100), 1: (30, 100), 2: (60, 100), 3: (10, 100)}, 60, {3: 50, 1: 30}, id="the last comes first"
        ),
    ],
)
def test_who_is_behind_and_by_how_much(done: progress.Done, seconds: float, found: dict[int, int]) -> None:
    assert list(progress.behind(done, seconds).items()) == list(found.items())


def test_ranks_that_are_behind_in_words() -> None:
    lags = {7: 3 * GIB, 1: 2 * GIB, 2: GIB, 9: 5, 3: 4}
    assert progress.behind_text(lags) == "behind: rank 7 3.00 GiB, rank 1 2.00 GiB, rank 2 1.00 GiB and 2 more"
    assert progress.behind_text({}) == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (150, "2 min"), (5900, "98 min"), (9000, "2.5 h")]
)
def test_times_in_words(seconds: float, text: str) -> None:
    assert progress.duration(seconds) == text


def test_a_bar_says_who_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    bar = progress.progress_of("target", shown=True, others=lambda: {0: (3 * GIB, 4 * GIB), 1: (GIB, 4 * GIB)})
    bar.begin(4 * GIB)
    with bar:
        bar.advance(3 * GIB)
        bar.waits_for(1)
        bar.rows_of("[bold]t")
        bar._started_s = bar._looked_s = 0.0  # type: ignore[attr-defined]
        bar.tick()
        wait_until(lambda: "behind" in terminal.getvalue())  # it is drawn now and then
        bar.tensor_done()
    assert "3.00 GiB of 4.00 GiB" in terminal.getvalue()
    assert "reading rows of '[bold]t'; waiting for rank 1; behind: rank 1 2.00 GiB" in terminal.getvalue()
    assert "behind" not in terminal.getvalue().splitlines()[-1]


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
        assert caplog.messages == ["load 'target': 1.00 GiB of 4.00 GiB, 1 tensors, 0.10 GiB/s, 30 s left"]
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
        assert caplog.messages == ["manifest: 1.00 GiB of 4.00 GiB, 0.10 GiB/s, 30 s left"]

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
            "load 'target': 192.00 MiB of 4.00 GiB, 0 tensors, 0.02 GiB/s, 3 min left; reading rows of 't.embed'",
            "load 'target': 192.00 MiB of 4.00 GiB, 1 tensors, 0.01 GiB/s, 7 min left",
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

    def test_who_is_behind_is_said_and_all_figures_are_fields(
        self, now_s: list[float], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "loader_service")
        done = {0: (3 * GIB, 4 * GIB), 1: (1 * GIB, 4 * GIB), 2: (3 * GIB, 4 * GIB)}
        lines = progress.progress_of("target", shown=True, others=lambda: done)
        lines.begin(4 * GIB)
        lines.advance(3 * GIB)
        lines.waits_for(1)
        now_s[0] += 30
        lines.tick()
        (line,) = caplog.messages
        assert line.endswith("0.10 GiB/s, 10 s left; waiting for rank 1; behind: rank 1 2.00 GiB")
        (record,) = caplog.records
        expected: dict[str, object] = {
            "done_bytes": 3 * GIB,
            "total_bytes": 4 * GIB,
            "bytes_per_s": GIB // 10,
            "left_s": 10.0,
        }
        expected |= {"tensors": 0, "waiting_for": 1, "behind_bytes": {1: 2 * GIB}, "phase": "read"}
        assert {name: getattr(record, name) for name in expected} == expected

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
