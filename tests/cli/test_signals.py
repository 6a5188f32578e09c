"""What a load's process makes of signals, and of the failure that it finds when one has come."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import loader_service as ls
from loader_service.cli import load
from loader_service.cli.load import LoadOptions
from loader_service.cli.ranks import Place
from loader_service.errors import FailureRecord, RankFailure

SEVERAL = Place(1, 2, ls.Rendezvous("127.0.0.1:9", 1, 2, "nobody", served=True))
ALONE = Place(0, 1, None)


class LeftAtOnceError(Exception):
    """In place of the process's end."""


@dataclass
class Work:
    """In place of the load's task."""

    cancelled_with: list[str] = field(default_factory=list)

    def cancel(self, text: str) -> None:
        self.cancelled_with.append(text)


@dataclass
class Process:
    """A load's process, its clock, and what it says as it ends at once."""

    tested: Any
    now_s: list[float]
    work: Work = field(default_factory=Work)

    def take(self, number: signal.Signals, *, after_s: float = 0.0) -> None:
        self.now_s[0] += after_s
        self.tested._interrupted(number, self.work)


def process(place: Place, monkeypatch: pytest.MonkeyPatch) -> Process:
    now_s = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])

    def leave(code: int) -> None:
        raise LeftAtOnceError(code)

    monkeypatch.setattr("os._exit", leave)
    config = ls.config_from_dict(
        {"checkpoint": {"path": "/nowhere"}, "loads": {"all": {}}, "agreement": {"timeout_s": 10}}
    )
    options = LoadOptions(Path("c.yaml"), "all", False, None, as_json=True, debug=False)
    return Process(load._LoadProcess(options, place, config), now_s)


@pytest.mark.parametrize("place", [ALONE, SEVERAL], ids=["alone", "several"])
def test_the_first_signal_cancels_with_its_name(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = process(place, monkeypatch)
    tested.take(signal.SIGTERM)
    assert tested.work.cancelled_with == ["interrupted by SIGTERM"]


@pytest.mark.parametrize(
    ("place", "after_s"), [(ALONE, 0.1), (SEVERAL, load.LAUNCHER_REPEATS_S + 0.1)], ids=["alone", "several"]
)
def test_a_second_signal_ends_at_once_and_both_are_named(
    place: Place, after_s: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tested = process(place, monkeypatch)
    tested.take(signal.SIGINT)
    with pytest.raises(LeftAtOnceError, match="130"):
        tested.take(signal.SIGTERM, after_s=after_s)
    assert capsys.readouterr().err == "loader-service: interrupted by SIGINT, then by SIGTERM: ending at once\n"


def test_what_a_launcher_passes_on_is_no_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal's Ctrl-C reaches every rank, and again from the launcher, which got it too."""
    tested = process(SEVERAL, monkeypatch)
    tested.take(signal.SIGINT)
    tested.take(signal.SIGINT, after_s=0.2)
    assert len(tested.work.cancelled_with) == 1
    with pytest.raises(LeftAtOnceError):
        tested.take(signal.SIGINT, after_s=load.LAUNCHER_REPEATS_S)


def test_a_gap_in_its_own_looking_tells_a_process_that_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = process(SEVERAL, monkeypatch)
    stopped = tested.tested._telling._spokesman._stopped
    for _ in range(1000):
        tested.now_s[0] += load.LOOK_EVERY_S
        tested.tested._note_gap()
    assert not stopped()
    tested.take(signal.SIGTERM, after_s=11.0)  # the first thing that a resumed rank sees
    assert stopped()
    tested.tested._note_gap()
    assert stopped()


@pytest.mark.parametrize(
    ("record", "code"),
    [
        (FailureRecord("LostRank", "no sign of life", 1), 4),
        (FailureRecord("LostStore", "gone", 1), 4),
        (FailureRecord("ReadError", "no luck", 1), 5),
        (FailureRecord("ReadError", "no luck", 0), 4),
        (FailureRecord("LoadCancelledError", "interrupted by SIGTERM", 0), 130),
    ],
    ids=["lost itself", "cut off itself", "its own failure", "another's failure", "another's interruption"],
)
def test_a_signal_that_comes_after_the_failure_leaves_its_code(
    record: FailureRecord, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested = process(SEVERAL, monkeypatch).tested
    tested._load = SimpleNamespace(failure=RankFailure(record))
    assert tested._exit_code(asyncio.CancelledError()) == code
