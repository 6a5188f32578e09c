"""Starts real rank processes quickly, runs one function on each, and never waits without bound.

    def work(rank: Rank, folder: str) -> int: ...            # a module-level function

    outcomes = run_ranks(work, 4, str(tmp_path), timeout_s=60)
    assert [outcome.value for outcome in outcomes] == [...]

A fork server that has torch imported already makes a rank in some 20 ms; the first call of a test run pays for it.
`run_teams` runs several groups of ranks side by side: what takes its time (a silence) is then waited for only once.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
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
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from loader_service.errors import FailureRecord, LoaderError

_given_ports: set[int] = set()
_CHILD_ENDS_AFTER_S = 300  # a child that a test process which died itself could not kill

PRELOAD = [
    "torch",
    "torch.distributed",
    "loader_service.service",
    "loader_service.agreement.store_carrier",
    "pytest",
    "uvloop",
    "tests.conftest",
]


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
    stderr: str = field(default="", repr=False)

    def get(self) -> Any:
        """The value; raises AssertionError with the rank's traceback if there is none."""
        assert self.error is None, f"rank {self.rank}:\n{self.error.traceback}"
        assert self.exitcode == 0, f"rank {self.rank} ended with {self.exitcode} after {self.marks}"
        return self.value


class Rank:
    """What a rank's function is given. `address` is a free port of this machine where the ranks can meet; `team` says
    which of several groups it belongs to."""

    def __init__(self, rank: int, world_size: int, address: str, pipe: Connection, team: int = 0) -> None:
        self.rank = rank
        self.world_size = world_size
        self.address = address
        self.team = team
        self._pipe = pipe

    def of_team(self, world_size: int, addresses: Sequence[str]) -> Rank:
        """The same rank as its team sees it: consecutive ranks are a team."""
        team, rank = divmod(self.rank, world_size)
        return Rank(rank, world_size, addresses[team], self._pipe, team)

    def mark(self, text: str) -> None:
        """Tells the test that this rank has come so far: `on_mark(rank, text, pids)` runs there."""
        self._pipe.send(("mark", text))

    def fork_child(self) -> None:
        """Leaves a child that has inherited all sockets of this rank and outlives it: the test ends it at its end."""
        pid = os.fork()
        if pid:
            self._pipe.send(("child", pid))
            return
        try:
            self._pipe.close()  # else the test would wait for this rank as long as the child lives
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_CHILD_ENDS_AFTER_S)
            while True:
                signal.pause()
        finally:
            os._exit(1)

    def end(self) -> None:
        """Ends the process as an interpreter ends, with exit handlers and C++ destructors, which the fork server's way
        skips. The outcome then has no value."""
        ctypes.pythonapi.Py_Exit(0)

    def init_process_group(self, backend: str = "gloo") -> None:
        """torch.distributed's default group over the ranks, its store served by rank 0."""
        import torch.distributed as dist

        dist.init_process_group(
            backend, init_method=f"tcp://{self.address}", rank=self.rank, world_size=self.world_size
        )


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ones, and none that was given before: tests meet under them in one store, where a group that was killed
    leaves its count of sessions behind."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            if port not in _given_ports:
                found.append(port)
        _given_ports.update(found)
    return found


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
    enter: Callable[[int], None] | None = None,
) -> list[Outcome]:
    """Runs `fn(Rank, *args)` on every rank and returns the outcomes by rank.

    `enter(rank)` is the first thing that each process does, while it has one thread: some can only then be done.
    `on_start(pids)` is called once all run, `on_mark(rank, text, pids)` whenever one says `mark(text)`; both may send
    signals. Ranks that have not ended after `timeout_s` are killed, and fail the test with the stacks of their threads.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        return _run_ranks(fn, world_size, args, timeout_s, on_start, on_mark, address, enter, folder)


def run_teams(
    fn: Callable[..., Any],
    world_size: int,
    cases: Sequence[tuple[Any, ...]],
    *,
    timeout_s: float = 60.0,
    on_mark: Callable[[int, int, str, list[int]], None] | None = None,
) -> list[list[Outcome]]:
    """Runs a team of `world_size` ranks for each case, all at once: `fn(Rank, *case)` on each. Outcomes by team, rank.

    `on_mark(team, rank, text, pids)` gets the pids of that team; each team has a free port of its own.
    """

    def on_any_mark(place: int, text: str, pids: list[int]) -> None:
        if on_mark is not None:
            team, rank = divmod(place, world_size)
            on_mark(team, rank, text, pids[team * world_size : (team + 1) * world_size])

    addresses = [f"127.0.0.1:{port}" for port in free_ports(len(cases))]
    found = run_ranks(
        _in_team,
        world_size * len(cases),
        fn,
        world_size,
        cases,
        addresses,
        timeout_s=timeout_s,
        on_mark=on_any_mark,
    )
    return [
        [replace(found[team * world_size + rank], rank=rank) for rank in range(world_size)]
        for team in range(len(cases))
    ]


def _in_team(
    place: Rank, fn: Callable[..., Any], world_size: int, cases: Sequence[tuple[Any, ...]], addresses: Sequence[str]
) -> Any:
    rank = place.of_team(world_size, addresses)
    return fn(rank, *cases[rank.team])


def _run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    timeout_s: float,
    on_start: Callable[[list[int]], None] | None,
    on_mark: Callable[[int, str, list[int]], None] | None,
    address: str | None,
    enter: Callable[[int], None] | None,
    folder: str,
) -> list[Outcome]:
    ctx = context()
    address = address or f"127.0.0.1:{free_port()}"
    processes: list[ForkServerProcess] = []
    pipes: list[Connection] = []
    for rank in range(world_size):
        ours, theirs = ctx.Pipe(duplex=False)
        process = ctx.Process(
            target=_main, args=(fn, rank, world_size, address, theirs, folder, enter, args), daemon=True
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
        for rank in late:
            _say_where(processes[rank])
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(10)
        for child in watch.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        outcomes = watch.outcomes(folder)
        for process, pipe in zip(processes, pipes, strict=True):
            process.close()
            pipe.close()
    if late:
        stacks = "\n".join(f"rank {rank} after {outcomes[rank].marks}:\n{_stack(folder, rank)}" for rank in late)
        ended = "\n".join(_told(outcome, folder) for outcome in outcomes if outcome.rank not in late)
        raise AssertionError(f"ranks {late} did not end within {timeout_s:g} s\n{ended}\n{stacks}")
    return outcomes


def _told(outcome: Outcome, folder: str) -> str:
    """How a rank has ended that others may have waited for in vain."""
    error = outcome.error
    how = f"with {outcome.exitcode}" if error is None else f"by {error.name}: {error.message}"
    said = [*outcome.stderr.splitlines()[-20:], _stack(folder, outcome.rank)] if outcome.exitcode else []
    return "\n".join([f"rank {outcome.rank} ended {how}, after {outcome.marks}", *said])


def _say_where(process: ForkServerProcess) -> None:
    """Ends a process with the stacks of its threads in its file."""
    if process.pid is None or not process.is_alive():
        return
    with contextlib.suppress(ProcessLookupError):  # it ends just now
        os.kill(process.pid, signal.SIGABRT)
    process.join(5)


def _stack(folder: str, rank: int) -> str:
    path = Path(folder, f"{rank}.stack")
    return path.read_text() if path.exists() else "it never started"


def _stderr(folder: str, rank: int) -> str:
    path = Path(folder, f"{rank}.stderr")
    return path.read_text(errors="replace") if path.exists() else ""


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
        self.children: list[int] = []

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
        elif message[0] == "child":
            self.children.append(message[1])
        else:
            self._results[rank] = message[1:]
        return True

    def outcomes(self, folder: str) -> list[Outcome]:
        found = []
        for rank, process in enumerate(self._processes):
            value, error, ended_s = self._results.get(rank, (None, None, self._ended_s.get(rank, time.monotonic())))
            marks, stderr = tuple(self._marks[rank]), _stderr(folder, rank)
            found.append(Outcome(rank, value, error, process.exitcode, marks, ended_s, stderr))
        return found


def _main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    address: str,
    pipe: Connection,
    folder: str,
    enter: Callable[[int], None] | None,
    args: tuple[Any, ...],
) -> None:
    if enter is not None:
        enter(rank)
    gc.freeze()  # what the fork server has made is no garbage, and not looked at again
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The fork server's stderr is what it had when it started, which may be another test's captured output.
    with open(os.path.join(folder, f"{rank}.stderr"), "w") as stderr:
        os.dup2(stderr.fileno(), 2)
    stacks = open(os.path.join(folder, f"{rank}.stack"), "w")  # noqa: SIM115 - open as long as the process
    faulthandler.enable(stacks)  # also for what ends it from within
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
