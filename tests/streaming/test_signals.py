"""One SIGINT or SIGTERM ends a process that loads, on every face, also while a read is in flight."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.streaming import consumer_process
from tests.support.checkpoints import awkward_checkpoint
from tests.support.ranks import context

WATCHDOG_S = 60

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    awkward_checkpoint(folder / "checkpoint")
    path = folder / "config.yaml"
    path.write_text(
        "checkpoint: {path: checkpoint}\nloads: {target: {}}\n"
        "staging: {capacity_bytes: 64KiB}\nreads: {chunk_bytes: 16KiB}\nagreement: {grace_s: 1}\n"
    )
    return path


@dataclass(frozen=True)
class Consumer:
    """A process that stands in a read; forked from one that has torch imported, which saves seconds."""

    process: ForkServerProcess
    pipe: Connection
    stderr: Path

    def interrupt(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def said(self) -> Any:
        assert self.pipe.poll(WATCHDOG_S), "it says nothing"
        return self.pipe.recv()

    def end(self) -> tuple[int | None, str]:
        """Its exit code, None if it does not end, and what it wrote to stderr."""
        self.process.join(WATCHDOG_S)
        return self.process.exitcode, self.stderr.read_text()


Start = Callable[[str, bool], Consumer]


@pytest.fixture
def start(config_path: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[Consumer] = []

    def start(face: str, comes_back: bool) -> Consumer:
        ours, theirs = context().Pipe()
        args = (theirs, str(tmp_path / "stderr"), str(config_path), face, comes_back)
        process = context().Process(target=consumer_process.main, args=args, daemon=True)
        process.start()
        theirs.close()
        started.append(Consumer(process, ours, tmp_path / "stderr"))
        assert started[-1].said() == "reading"
        return started[-1]

    yield start
    for consumer in started:
        consumer.process.kill()
        consumer.process.join()
        consumer.process.close()
        consumer.pipe.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("face", ["asyncio", "uvloop", "blocking"])
def test_one_signal_ends_the_process_after_the_read_in_flight(start: Start, face: str, number: signal.Signals) -> None:
    consumer = start(face, True)
    consumer.interrupt(number)
    consumer.pipe.send("go on")
    assert consumer.said() == ([], 0)
    code, err = consumer.end()
    assert code not in (0, None), err
    assert "ResourceWarning" not in err
    assert "never retrieved" not in err


def test_a_read_that_never_returns_does_not_keep_the_process(start: Start) -> None:
    consumer = start("asyncio", False)
    consumer.interrupt(signal.SIGINT)
    left, in_flight = consumer.said()
    code, err = consumer.end()
    assert [name.rpartition("-")[0] for name in left] == ["loader-read"], err
    assert in_flight == 1
    assert "did not return" in err or "is stuck" in err
    assert code not in (0, None)
