"""What a load's process makes of signals, and of the failure that it finds when one has come."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import loader_service as ls
from loader_service.cli import load, rank_process
from loader_service.cli.load import LoadOptions
from loader_service.cli.ranks import Place
from loader_service.cli.signals import LAUNCHER_REPEATS_S, Interruptions, interruptions, started_by_a_launcher
from loader_service.errors import FailureRecord, RankFailure
from tests.cli.support import ROOT, wait_until

SEVERAL = Place(1, 2, ls.Rendezvous("127.0.0.1:9", 1, 2, "nobody", served=True))
ALONE = Place(0, 1, None)


class LeftAtOnceError(Exception):
    """In place of the process's end."""


@dataclass
class Taken:
    """A process's interruptions, its clock, and what heard of the first one."""

    tested: Interruptions
    now_s: list[float]
    heard: list[str] = field(default_factory=list)

    def take(self, number: signal.Signals, *, after_s: float = 0.0) -> None:
        self.now_s[0] += after_s
        self.tested._take(number, None)

    def listen(self) -> None:
        self.tested.on_first(lambda number: self.heard.append(number.name))


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])

    def leave(code: int) -> None:
        raise LeftAtOnceError(code)

    monkeypatch.setattr("os._exit", leave)
    return now_s


def taken(now_s: list[float], *, several_ranks: bool = False) -> Taken:
    return Taken(Interruptions(several_ranks=several_ranks), now_s)


def process(place: Place) -> Any:
    config = ls.config_from_dict(
        {"checkpoint": {"path": "/nowhere"}, "loads": {"all": {}}, "agreement": {"timeout_s": 10}}
    )
    options = LoadOptions(Path("c.yaml"), "all", False, None, None, "crc32", as_json=True, debug=False)
    return load._LoadProcess(options, place, config, "all", None)


def test_a_signal_ends_a_command_that_is_no_load_where_it_is(now_s: list[float]) -> None:
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        taken(now_s).take(signal.SIGTERM)


def test_a_signal_that_comes_before_the_load_is_there_waits_for_it(now_s: list[float]) -> None:
    signals = taken(now_s)
    signals.tested.keep()
    signals.take(signal.SIGTERM)
    assert signals.tested.first is signal.SIGTERM
    signals.listen()
    assert signals.heard == ["SIGTERM"]


def test_a_signal_that_was_kept_ends_a_command_that_has_nobody_to_tell(now_s: list[float]) -> None:
    signals = taken(now_s, several_ranks=True)
    signals.tested.keep()
    signals.tested.let_go()
    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        signals.take(signal.SIGINT)
    signals.tested.keep()
    signals.take(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        signals.tested.let_go()


@pytest.mark.parametrize(
    ("several_ranks", "after_s"), [(False, 0.1), (True, LAUNCHER_REPEATS_S + 0.1)], ids=["alone", "several"]
)
@pytest.mark.parametrize("heard", [True, False], ids=["in a load", "before it"])
def test_a_second_signal_ends_at_once_and_both_are_named(
    several_ranks: bool, after_s: float, heard: bool, now_s: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    signals = taken(now_s, several_ranks=several_ranks)
    signals.listen() if heard else signals.tested.keep()
    signals.take(signal.SIGINT)
    with pytest.raises(LeftAtOnceError, match="130"):
        signals.take(signal.SIGTERM, after_s=after_s)
    assert signals.heard == (["SIGINT"] if heard else [])
    assert capfd.readouterr().err == "loader-service: interrupted by SIGINT, then by SIGTERM: ending at once\n"


def test_what_a_launcher_passes_on_is_no_second_signal(now_s: list[float]) -> None:
    """A terminal's Ctrl-C may reach every rank, and again from the launcher, which got it too."""
    signals = taken(now_s, several_ranks=True)
    signals.listen()
    signals.take(signal.SIGINT)
    signals.take(signal.SIGINT, after_s=0.2)
    assert signals.heard == ["SIGINT"]
    with pytest.raises(LeftAtOnceError):
        signals.take(signal.SIGINT, after_s=LAUNCHER_REPEATS_S)


def test_nothing_counts_once_the_outcome_is_settled(now_s: list[float]) -> None:
    signals = taken(now_s)
    signals.listen()
    signals.tested.settle()
    signals.take(signal.SIGINT)
    signals.take(signal.SIGTERM, after_s=10.0)
    assert signals.heard == []


def test_a_program_that_runs_a_command_gets_its_handlers_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with interruptions(several_ranks=False) as own:
        assert Interruptions.installed() is own
        with interruptions(several_ranks=True) as same:
            assert same is own
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(
    ("environ", "several"),
    [
        ({}, False),
        ({"WORLD_SIZE": "1"}, False),
        ({"WORLD_SIZE": "many"}, False),
        ({"WORLD_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
    ],
)
def test_a_launcher_is_known_by_its_variables(environ: dict[str, str], several: bool) -> None:
    assert started_by_a_launcher(environ) == several


STUCK_IN_WRITING = """
import os, sys
from loader_service.cli.signals import Interruptions
signals = Interruptions(several_ranks=False)
signals.install()
signals.on_first(lambda number: None)
os.set_blocking(1, False)
try:
    while True:
        os.write(1, bytes(65536))
except BlockingIOError:
    os.set_blocking(1, True)
print("stuck", file=sys.stderr, flush=True)
print("x" * 65536, flush=True)
"""


@pytest.mark.processes
def test_a_second_signal_ends_a_process_whose_main_thread_is_stuck_in_writing() -> None:
    """Nobody reads its stdout, so that no event loop could hear of a signal."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK_IN_WRITING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert process.stderr is not None
    assert process.stderr.readline() == b"stuck\n"

    def interrupted_until_it_ends() -> bool:  # signals of one kind merge while they are pending: two must be taken
        process.send_signal(signal.SIGTERM)
        return process.poll() is not None

    wait_until(interrupted_until_it_ends)
    assert process.returncode == 130
    assert process.communicate()[1] == b"loader-service: interrupted by SIGTERM, then by SIGTERM: ending at once\n"


async def test_the_first_signal_cancels_a_load_with_its_name() -> None:
    tested = process(ALONE)
    work = asyncio.ensure_future(asyncio.sleep(60))
    tested._interrupted(signal.SIGTERM, work)
    with pytest.raises(asyncio.CancelledError, match="interrupted by SIGTERM"):
        await work


async def test_a_signal_changes_nothing_for_a_load_that_has_failed() -> None:
    tested = process(SEVERAL)
    tested._load = SimpleNamespace(failure=RankFailure(FailureRecord("ReadError", "no luck", 0)))
    work = asyncio.ensure_future(asyncio.sleep(0))
    tested._interrupted(signal.SIGTERM, work)
    await work


def test_a_gap_in_its_own_looking_tells_a_process_that_it_was_stopped(now_s: list[float]) -> None:
    tested = process(SEVERAL)
    stopped = tested._telling._spokesman._stopped
    for _ in range(1000):
        now_s[0] += rank_process.LOOK_EVERY_S
        tested._note_gap()
    assert not stopped()
    now_s[0] += 11.0
    tested._interrupted(signal.SIGTERM, SimpleNamespace(cancel=lambda text: None))  # the first that a resumed rank sees
    assert stopped()
    tested._note_gap()
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
def test_a_signal_that_comes_after_the_failure_leaves_its_code(record: FailureRecord, code: int) -> None:
    tested = process(SEVERAL)
    tested._load = SimpleNamespace(failure=RankFailure(record))
    assert tested._exit_code(asyncio.CancelledError()) == code
