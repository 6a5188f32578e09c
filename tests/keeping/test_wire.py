"""A service's socket file: who gets it, and who removes it."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import loader_service as ls
from loader_service.keeping import wire

AT_ONCE = 3


def dead_socket(path: Path) -> str:
    """As a killed service leaves it behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(path))
    return str(path)


class Slow(socket.socket):
    """Leaves others time to look between being bound and listening."""

    def bind(self, address: Any) -> None:
        super().bind(address)
        time.sleep(0.02)


def come(together: threading.Barrier, path: str) -> socket.socket | str:
    together.wait()
    try:
        return wire.listen(path)
    except ls.ConfigError as error:
        return str(error)


def test_one_of_those_that_find_a_dead_socket_at_once_gets_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [dead_socket(tmp_path / str(number)) for number in range(5)]
    monkeypatch.setattr(socket, "socket", Slow)
    together = threading.Barrier(AT_ONCE)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for path in paths:
            found = list(pool.map(come, [together] * AT_ONCE, [path] * AT_ONCE))
            listening = [each for each in found if isinstance(each, socket.socket)]
            for each in listening:
                each.close()
            assert len(listening) == 1
            assert sum("another service listens there" in str(each) for each in found) == AT_ONCE - 1


def test_a_service_that_ends_removes_its_file_and_not_that_of_another(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    first = wire.listen(path)
    Path(path).unlink()  # somebody has cleaned up
    second = wire.listen(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    first.close()
    wire.unlink(path)
    assert Path(path).is_socket()
    second.close()
    wire.unlink(path)
    assert not Path(path).exists()
    Path(path).write_text("no socket")
    wire.unlink(path)
    assert Path(path).read_text() == "no socket"


def test_a_folder_that_somebody_else_has_locked_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_LOCK_WAIT_S", 0.05)
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    wire.listen(dead_socket(tmp_path / "s")).close()
    os.close(folder)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ls.ConfigError, match=r"missing/s cannot be had: No such file or directory"):
        wire.listen(str(tmp_path / "missing" / "s"))
