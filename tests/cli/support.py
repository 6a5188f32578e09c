"""Small checkpoints with their configurations, and rank processes with their exit codes and outputs."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from loader_service.cli import app
from loader_service.reading import local
from tests.support.ranks import context, free_port
from tests.support.shards import pattern_bytes, write_shard

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG_S = 90.0
_numbers = itertools.count()
# A store's server looks up the name of every peer; where the resolver drops that, a connection waits 5 s for it.
NO_SLOW_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}


def write_small_checkpoint(folder: Path) -> Path:
    """Two shards: rows, experts, a scalar, an empty tensor, FP8 and bytes; 7 rows, so that two ranks differ."""
    write_shard(
        folder / "a.safetensors",
        {
            "embed.weight": ("BF16", (7, 6), pattern_bytes(84, 1)),
            "experts.0.w": ("F32", (5,), pattern_bytes(20, 2)),
            "experts.1.w": ("F32", (5,), pattern_bytes(20, 3)),
            "scale": ("F32", (), pattern_bytes(4, 4)),
            "nothing": ("F16", (0, 3), b""),
        },
    )
    write_shard(
        folder / "b.safetensors",
        {
            "down.weight": ("F8_E4M3", (4, 7), pattern_bytes(28, 5)),
            "down.scale": ("F8_E8M0", (4, 2), pattern_bytes(8, 6)),
            "draft.norm": ("F32", (3,), pattern_bytes(12, 7)),
        },
    )
    return folder


RULES = [
    {"match": "embed.*", "split": {"axis": "tp", "dim": 0}},
    {"match": "experts.*", "assign": {"axis": "tp", "index": r"experts\.(\d+)\."}},
    {"match": "down.weight", "split": {"axis": "tp", "dim": 1}},
]


def write_config(path: Path, checkpoint: Path, *, ranks: int = 1, **more: object) -> Path:
    """A configuration with the loads `all` (rules for `ranks`) and `draft`."""
    config = {
        "checkpoint": {"path": str(checkpoint)},
        "mesh": {"tp": ranks},
        "loads": {"all": {"rules": RULES}, "draft": {"key_prefixes": ["draft"]}},
        **more,
    }
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


@dataclass(frozen=True)
class Fault:
    """What goes wrong with every read of payload in a process, or with its manifest. `mark` is a file that the first
    such read, or the writing, makes; those that wait do so until it is taken away."""

    kind: Literal[
        "input/output error", "never returns", "flips a bit", "waits", "manifest waits", "manifest without memory"
    ]
    mark: Path | None = None


_first_read = threading.Lock()  # taken for good by the first faulty read of a process


class FaultyFile:
    """A file whose header can be read and whose payload cannot. Past the page cache only payload is read, in blocks
    that may begin before it."""

    def __init__(self, file: local.LocalFile, path: str, fault: Fault, direct: bool) -> None:
        self.identity = file.identity
        self._file = file
        self._fault = fault
        self._direct = direct
        with open(path, "rb") as raw:
            self._payload_start = 8 + int.from_bytes(raw.read(8), "little")

    def read_into(self, views: Sequence[memoryview], offset: int) -> int:
        if offset < self._payload_start and not self._direct:
            return self._file.read_into(views, offset)
        if self._fault.mark is not None and _first_read.acquire(blocking=False):
            self._fault.mark.touch()
        if self._fault.kind == "input/output error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self._fault.kind == "never returns":
            threading.Event().wait()
        if self._fault.kind == "waits":
            assert self._fault.mark is not None
            while self._fault.mark.exists():
                time.sleep(0.02)
            return self._file.read_into(views, offset)
        count = self._file.read_into(views, offset)
        views[0][max(0, self._payload_start - offset)] ^= 1
        return count

    def cached_bytes(self, offset: int, nbytes: int) -> int | None:
        return self._file.cached_bytes(offset, nbytes)

    def read_cached(self, view: memoryview, offset: int) -> int:
        return 0  # so that all of it meets the fault

    def read_only_what_is_asked(self, only: bool) -> None:
        self._file.read_only_what_is_asked(only)

    def drop_cached(self, offset: int, nbytes: int) -> None:
        self._file.drop_cached(offset, nbytes)

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def payload_fault(fault: Fault) -> Iterator[None]:
    """Puts a fault into every file that is opened meanwhile."""
    opened = local.LocalStorage.open

    def open_faulty(self: local.LocalStorage, path: str, *, direct: bool = False) -> Any:
        return FaultyFile(opened(self, path, direct=direct), path, fault, direct)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local.LocalStorage, "open", open_faulty)
        yield


@contextlib.contextmanager
def manifest_fault(fault: Fault) -> Iterator[None]:
    """Puts a fault into the writing of manifests meanwhile."""

    def write_badly(path: Path, entries: Mapping[str, object]) -> None:
        if fault.mark is not None:
            fault.mark.touch()
        if fault.kind == "manifest without memory":
            raise MemoryError("no room for the text")
        while fault.mark is not None and fault.mark.exists():
            time.sleep(0.02)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loader_service.cli.load.write_manifest", write_badly)
        yield


@dataclass(frozen=True)
class Ended:
    """A process that has ended; a negative code is the signal that ended it."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """What was printed on stdout, which must be one JSON document and nothing else."""
        loaded: dict[str, Any] = json.loads(self.out)
        return loaded


class CommandLine:
    """The command line in a process of its own, forked from one that has torch imported, which saves seconds each."""

    def __init__(self, args: Sequence[str], environ: Mapping[str, str], fault: Fault | None, folder: Path) -> None:
        number = next(_numbers)  # of no other, also of those that are gone: a test looks for what this one says
        self._out, self._err = (folder / f"{number}.{name}" for name in ("out", "err"))
        target = context().Process(
            target=_run, args=(list(args), dict(environ), fault, self._out, self._err), daemon=True
        )
        self._process: ForkServerProcess = target
        self._process.start()

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def printed(self) -> str:
        """What is on stdout so far."""
        return self._out.read_text() if self._out.exists() else ""

    def logged(self) -> str:
        """What is on stderr so far."""
        return self._err.read_text() if self._err.exists() else ""

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def end(self) -> Ended:
        """Waits for the process, which must end by itself."""
        self._process.join(WATCHDOG_S)
        late = self._process.is_alive()
        if late:
            self._process.kill()
            self._process.join()
        code = self._process.exitcode
        self._process.close()
        ended = Ended(code or 0, self.printed(), self.logged())
        assert not late, f"the process did not end; stderr: {ended.err}"
        return ended


def _run(args: list[str], environ: dict[str, str], fault: Fault | None, out: Path, err: Path) -> None:
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update({"OMP_NUM_THREADS": "1", **NO_SLOW_NAMES, **environ})
    sys.argv = ["loader-service", *args]
    with contextlib.ExitStack() as faults:
        if fault is not None:
            faults.enter_context(manifest_fault(fault) if "manifest" in fault.kind else payload_fault(fault))
        app.main()


def start_ranks(
    args_by_rank: Sequence[Sequence[str]], folder: Path, *, faults: Mapping[int, Fault] | None = None
) -> list[CommandLine]:
    """Starts one process a rank, as a launcher would, without one: exit codes are the ranks' own. Rank 0 serves."""
    port = str(free_port())
    common = {"WORLD_SIZE": str(len(args_by_rank)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        CommandLine(args, {"RANK": str(rank), **common}, (faults or {}).get(rank), folder)
        for rank, args in enumerate(args_by_rank)
    ]


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits until other processes have brought something about."""
    until_s = time.monotonic() + WATCHDOG_S
    while not condition():
        assert time.monotonic() < until_s, "it never came"
        time.sleep(0.02)
