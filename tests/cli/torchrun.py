"""torchrun, for real, with ranks whose faults a test chooses, and what becomes of each of its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.cli.faulty_rank import Faults, write_faults
from tests.cli.support import NO_SLOW_NAMES, ROOT, WATCHDOG_S, Ended, wait_until
from tests.support.ranks import context


@dataclass(frozen=True)
class TorchrunEnded:
    """torchrun after its end: its own exit code, its log, and its ranks by attempt."""

    code: int
    err: str
    attempts: list[list[Ended]]

    @property
    def ranks(self) -> list[Ended]:
        """Those of the last attempt."""
        return self.attempts[-1]


class Torchrun:
    """`torchrun --standalone`, in a process of its own and a session of its own.

    It is forked from a process that has torch imported, which saves seconds; its ranks are started by it as always.
    """

    def __init__(
        self,
        args: Sequence[str],
        folder: Path,
        *,
        ranks: int,
        faults: Faults = (),
        restarts: int = 0,
    ) -> None:
        self._ranks = ranks
        self._folder = folder
        write_faults(folder / "faults.json", faults)
        command = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
        command += ["--max-restarts", str(restarts)]
        command += ["--log-dir", str(folder / "logs"), "--redirects", "3"]
        command += ["-m", "tests.cli.faulty_rank", str(folder / "faults.json"), *args]
        self._process: ForkServerProcess = context().Process(target=_launch, args=(command, folder), daemon=True)
        self._process.start()

    def pid(self, rank: int, attempt: int = 0) -> int:
        """A rank's process, once it has come so far as to say so."""
        path = self._folder / f"pid.{attempt}.{rank}"
        wait_until(lambda: path.exists() and path.read_text() != "")
        return int(path.read_text())

    def send(self, number: signal.Signals, rank: int | None = None) -> None:
        """Sends a signal to one rank, or to torchrun itself."""
        pid = self._process.pid if rank is None else self.pid(rank)
        assert pid is not None
        os.kill(pid, number)

    def printed(self, rank: int) -> str:
        """What is on a rank's stdout so far."""
        return self._text(rank, "stdout")

    def logged(self, rank: int) -> str:
        """What is on a rank's stderr so far."""
        return self._text(rank, "stderr")

    def end(self) -> TorchrunEnded:
        """Waits for the end of it all, which must come by itself."""
        self._process.join(WATCHDOG_S)
        late = self._process.is_alive()
        if late:
            self._process.kill()
            self._process.join()
        code = self._process.exitcode
        self._process.close()
        err = (self._folder / "torchrun.err").read_text()
        logs = "\n".join(f"rank {rank}: {self.logged(rank)}" for rank in range(self._ranks))
        assert not late, f"torchrun did not end; {err}\n{logs}"
        attempts = [
            [
                Ended(codes[rank], self._text(rank, "stdout", attempt), self._text(rank, "stderr", attempt))
                for rank in range(self._ranks)
            ]
            for attempt, codes in enumerate(json.loads((self._folder / "codes.json").read_text()))
        ]
        return TorchrunEnded(code or 0, err, attempts)

    def _text(self, rank: int, stream: str, attempt: int = 0) -> str:
        found = list((self._folder / "logs").glob(f"*/attempt_{attempt}/{rank}/{stream}.log"))
        return found[0].read_text() if found else ""


def is_running(pid: int) -> bool:
    """Whether a process still runs, or waits: not once it has ended, though its parent may not know."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has gone, before or while it was read
        return False
    return state != "Z"


def run_torchrun(command: list[str], out: Path, err: Path, tell: Callable[[list[int | None]], object]) -> None:
    """torchrun in this process, to its end, its streams going to files. `tell` gets the exit code of every rank's
    process, in the order in which they were started: torchrun itself tells those of failed ones only."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    os.environ.update({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **NO_SLOW_NAMES})
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            started.append(self)

    vars(subprocess_handler)["Popen"] = Noted
    try:
        run.main(command)
    finally:
        tell([process.poll() for process in started])


def _launch(command: list[str], folder: Path) -> None:
    os.setsid()
    ranks = int(command[command.index("--nproc-per-node") + 1])

    def tell(codes: list[int | None]) -> None:
        attempts = [codes[first : first + ranks] for first in range(0, len(codes), ranks)]
        (folder / "codes.json").write_text(json.dumps(attempts))

    run_torchrun(command, folder / "torchrun.out", folder / "torchrun.err", tell)
