"""One SIGINT or SIGTERM ends a process that loads, on every face, also while a read is in flight."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import awkward_checkpoint

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


def start(config_path: Path, face: str, read: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.streaming.consumer_process", str(config_path), face, read],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "reading\n", (line, process.communicate()[1])
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("face", ["asyncio", "uvloop", "blocking"])
def test_one_signal_ends_the_process_after_the_read_in_flight(
    config_path: Path, face: str, number: signal.Signals
) -> None:
    process = start(config_path, face, "returns")
    process.send_signal(number)
    out, err = process.communicate("go on\n", timeout=WATCHDOG_S)
    assert out == "left [] in flight 0\n", err
    assert process.returncode not in (0, None)
    assert "ResourceWarning" not in err
    assert "never retrieved" not in err


def test_a_read_that_never_returns_does_not_keep_the_process(config_path: Path) -> None:
    process = start(config_path, "asyncio", "never")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WATCHDOG_S)
    assert out.startswith("left ['loader-read-"), err
    assert out.endswith("in flight 1\n")
    assert "did not return" in err or "is stuck" in err
    assert process.returncode not in (0, None)
