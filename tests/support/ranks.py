"""Starts real rank processes quickly, runs one function on each, and never waits without bound.

    def work(rank: Rank, folder: str) -> int: ...            # a module-level function

    outcomes = run_ranks(work, 4, str(tmp_path), timeout_s=60)
    assert [outcome.value for outcome in outcomes] == [...]

A fork server that has torch imported already makes a rank in some 20 ms; the first call of a test run pays for it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from loader_service.errors import FailureRecord, LoaderError

PRELOAD = ["torch", "torch.distributed", "loader_service", "loader_service.agreement.store_carrier"]


@dataclass(frozen=True)
class RankError:
    """An exception of a rank, as plain data: exceptions with keyword arguments do not survive a pickle."""

    name: str
    message: str
    rank: int | None
    phase: str | None
    exit_code: int | None
    record: FailureRecord | None
    cause: str | None
    traceback: str = field(repr=False)


@dataclass(frozen=True)
class Outcome:
    """What became of a rank: its value, or its error, or only the exit code (negative: the signal that ended it)."""

    rank: int
    value: Any
    error: RankError | None
    exitcode: int | None
    marks: tuple[str, ...]
    ended_s: float
    """When the rank's function ended, on the machine's monotonic clock; without a result when the process ended."""

    def get(self) -> Any:
        """The value; raises AssertionError with the rank's traceback if there is none."""
        assert self.error is None, f"rank {self.rank}:\n{self.error.traceback}"
        assert self.exitcode == 0, f"rank {self.rank} ended with {self.exitcode} after {self.marks}"
        return self.value


class Rank:
    """What a rank's function is given. `address` is a free port of this machine where the ranks can meet."""

    def __init__(self, rank: int, world_size: int, address: str, pipe: Connection) -> None:
        self.rank = rank
        self.world_size = world_size
        self.address = address
        self._pipe = pipe

    def mark(self, text: str) -> None:
        """Tells the test that this rank has come so far: `on_mark(rank, text, pids)` runs there."""
        self._pipe.send(("mark", text))

    def init_process_group(self, backend: str = "gloo") -> None:
        """torch.distributed's default group over the ranks, its store served by rank 0."""
        import torch.distributed as dist

        dist.init_process_group(
            backend, init_method=f"tcp://{self.address}", rank=self.rank, world_size=self.world_size
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def context() -> ForkServerContext:
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(PRELOAD)
    return forkserver


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    on_start: Callable[[list[int]], None] | None = None,
    on_mark: Callable[[int, str, list[int]], None] | None = None,
    address: str | None = None,
) -> list[Outcome]:
    """Runs `fn(Rank, *args)` on every rank and returns the outcomes by rank.

    `on_start(pids)` is called once all run, `on_mark(rank, text, pids)` whenever one says `mark(text)`; both may send
    signals. Ranks that have not ended after `timeout_s` are killed, and fail the test with the stacks of their threads.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        return _run_ranks(fn, world_size, args, timeout_s, on_start, on_mark, address, folder)


def _run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    timeout_s: float,
    on_start: Callable[[list[int]], None] | None,
    on_mark: Callable[[int, str, list[int]], None] | None,
    address: str | None,
    folder: str,
) -> list[Outcome]:
    ctx = context()
    address = address or f"127.0.0.1:{free_port()}"
    processes: list[ForkServerProcess] = []
    pipes: list[Connection] = []
    for rank in range(world_size):
        ours, theirs = ctx.Pipe(duplex=False)
        process = ctx.Process(
            target=_main, args=(fn, rank, world_size, address, theirs, timeout_s, folder, args), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    pids = [process.pid or 0 for process in processes]
    watch = _Watch(processes, pipes, pids, on_mark)
    try:
        if on_start is not None:
            on_start(pids)
        late = watch.run(time.monotonic() + timeout_s)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(10)
        outcomes = watch.outcomes()
        for process, pipe in zip(processes, pipes, strict=True):
            process.close()
            pipe.close()
    if late:
        stacks = "\n".join(f"rank {rank} after {outcomes[rank].marks}:\n{_stack(folder, rank)}" for rank in late)
        raise AssertionError(f"ranks {late} did not end within {timeout_s:g} s\n{stacks}")
    return outcomes


def _stack(folder: str, rank: int) -> str:
    path = Path(folder, f"{rank}.stack")
    return path.read_text() if path.exists() else "it never started"


class _Watch:
    """Reads what ranks send until all have ended."""

    def __init__(
        self,
        processes: Sequence[ForkServerProcess],
        pipes: Sequence[Connection],
        pids: list[int],
        on_mark: Callable[[int, str, list[int]], None] | None,
    ) -> None:
        self._processes = processes
        self._pipes = pipes
        self._pids = pids
        self._on_mark = on_mark
        self._results: dict[int, tuple[Any, RankError | None, float]] = {}
        self._marks: dict[int, list[str]] = {rank: [] for rank in range(len(pids))}
        self._ended_s: dict[int, float] = {}

    def run(self, deadline_s: float) -> list[int]:
        """Returns the ranks that were not done in time."""
        open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        running = {process.sentinel: rank for rank, process in enumerate(self._processes)}
        while (open_pipes or running) and (left_s := deadline_s - time.monotonic()) > 0:
            for ready in multiprocessing.connection.wait([*open_pipes, *running], left_s):
                if isinstance(ready, Connection):
                    if not self._read(ready, open_pipes[ready]):
                        del open_pipes[ready]
                elif isinstance(ready, int):
                    self._ended_s[running.pop(ready)] = time.monotonic()
        return sorted(set(running.values()) | set(open_pipes.values()))

    def _read(self, pipe: Connection, rank: int) -> bool:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return False
        if message[0] == "mark":
            self._marks[rank].append(message[1])
            if self._on_mark is not None:
                self._on_mark(rank, message[1], self._pids)
        else:
            self._results[rank] = message[1:]
        return True

    def outcomes(self) -> list[Outcome]:
        found = []
        for rank, process in enumerate(self._processes):
            value, error, ended_s = self._results.get(rank, (None, None, self._ended_s.get(rank, time.monotonic())))
            found.append(Outcome(rank, value, error, process.exitcode, tuple(self._marks[rank]), ended_s))
        return found


def _main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    address: str,
    pipe: Connection,
    timeout_s: float,
    folder: str,
    args: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Not to stderr: that is what the fork server had when it started, which may be another test's captured output.
    stacks = open(os.path.join(folder, f"{rank}.stack"), "w")  # noqa: SIM115 - open as long as the process
    faulthandler.dump_traceback_later(max(0.5, timeout_s - 2.0), file=stacks, exit=False)
    # Ranks of tests share a few cores; a thread pool of torch's in each would only wait for them.
    os.environ["OMP_NUM_THREADS"] = "1"
    # A store's server asks for each peer's name; a name server that loses a packet would stop all ranks for 5 s.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    value: Any = None
    error: RankError | None = None
    try:
        value = fn(Rank(rank, world_size, address, pipe), *args)
    except BaseException as caught:
        error = _describe(caught)
    pipe.send(("result", value, error, time.monotonic()))
    pipe.close()
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()


def _describe(error: BaseException) -> RankError:
    own = error if isinstance(error, LoaderError) else None
    return RankError(
        type(error).__name__,
        str(error),
        None if own is None else own.rank,
        None if own is None else own.phase,
        None if own is None else own.exit_code,
        None if own is None else own.record(),
        None if error.__cause__ is None else type(error.__cause__).__name__,
        "".join(traceback.format_exception(error)),
    )
