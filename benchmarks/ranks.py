"""Rank processes for benchmarks: forked from a server that has torch imported, led over a pipe each.

Times that ranks tell are comparable: the monotonic clock is one for all processes of a machine.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

PRELOAD = [
    "torch.distributed",
    "loader_service.service",
    "loader_service.config.yaml_file",
    "loader_service.cli.app",
    "loader_service.cli.load",
    "benchmarks.agreement_exchanges",
    "benchmarks.agreement_failures",
    "benchmarks.draft_sides",
    "benchmarks.host_tables_sides",
]
WATCHDOG_S = 120.0


class Rank:
    """What the function of a rank process is given. `address` is where the ranks meet."""

    def __init__(self, rank: int, world_size: int, address: str, pipe: Connection) -> None:
        self.rank = rank
        self.world_size = world_size
        self.address = address
        self._pipe = pipe
        self._lock = threading.Lock()

    def tell(self, what: str, value: Any = None) -> None:
        """Tells the benchmark that this rank has come so far; from any thread."""
        with self._lock:
            self._pipe.send((what, value))

    def hear(self) -> str:
        """The benchmark's next word; blocks."""
        word: str = self._pipe.recv()
        return word


class Team:
    """Processes that run `fn(Rank, *args)` each, until the block is left. Only the block's thread starts and ends them;
    `tell` and `hear` may be called by another one."""

    def __init__(self, fn: Callable[..., Any], world_size: int, *args: Any, address: str = "") -> None:
        self._fn = fn
        self._args = args
        self._address = address
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._said: list[list[tuple[str, Any]]] = [[] for _ in range(world_size)]

    def __enter__(self) -> Self:
        forkserver = multiprocessing.get_context("forkserver")
        forkserver.set_forkserver_preload(PRELOAD)
        world_size = len(self._said)
        for rank in range(world_size):
            ours, theirs = forkserver.Pipe()
            process = forkserver.Process(
                target=_main, args=(self._fn, rank, world_size, self._address, theirs, self._args), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join(WATCHDOG_S)
            process.close()
            pipe.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def tell(self, rank: int, word: str) -> None:
        self._pipes[rank].send(word)

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Sends a signal; returns when."""
        at_s = time.monotonic()
        os.kill(self.pids[rank], number)
        return at_s

    def hear(self, what: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """The value that each of the ranks (None: all) tells with `what`, once all have. RuntimeError if one cannot."""
        wanted = list(range(len(self._said))) if ranks is None else list(ranks)
        until_s = time.monotonic() + WATCHDOG_S
        while missing := [rank for rank in wanted if not self._has_said(rank, what)]:
            pipes = {self._pipes[rank]: rank for rank in missing}
            ready = multiprocessing.connection.wait(list(pipes), until_s - time.monotonic())
            if not ready:
                raise RuntimeError(f"ranks {missing} did not come to '{what}' within {WATCHDOG_S:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                self._read(pipe, pipes[pipe], what)
        return [self._take(rank, what) for rank in wanted]

    def _read(self, pipe: Connection, rank: int, what: str) -> None:
        try:
            said, value = pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"rank {rank} ended before it came to '{what}'") from error
        if said == "error":
            raise RuntimeError(f"rank {rank} failed before it came to '{what}':\n{value}")
        self._said[rank].append((said, value))

    def _has_said(self, rank: int, what: str) -> bool:
        return any(said == what for said, _ in self._said[rank])

    def _take(self, rank: int, what: str) -> Any:
        at = next(i for i, (said, _) in enumerate(self._said[rank]) if said == what)
        return self._said[rank].pop(at)[1]


def _main(
    fn: Callable[..., Any], rank: int, world_size: int, address: str, pipe: Connection, args: tuple[Any, ...]
) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)  # torch tells of every lost connection; what matters goes by the pipe
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.environ["OMP_NUM_THREADS"] = "1"
    # A store's server asks for each peer's name; a name server that loses a packet would stop all ranks for 5 s.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    own = Rank(rank, world_size, address, pipe)
    try:
        own.tell("result", fn(own, *args))
    except BaseException:  # noqa: BLE001 - whatever it is, the benchmark says it and stops
        own.tell("error", traceback.format_exc())


def serve_store(rank: Rank) -> None:
    """A store in a process of its own, as torchrun's agent has it. Tells its port, then serves until it is killed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    rank.tell("serves", store.port)
    while store is not None:
        time.sleep(60)


def store_address(agent: Team) -> str:
    """Where the store of a team of one that runs `serve_store` is reached."""
    (port,) = agent.hear("serves")
    return f"127.0.0.1:{port}"


def free_address() -> str:
    """An address where rank 0 can serve the store itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
