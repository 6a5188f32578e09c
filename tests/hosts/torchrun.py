"""torchrun with two nodes of two ranks, an agent on each host, and what became of each of its processes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Literal

from tests.cli.support import WATCHDOG_S, Ended
from tests.cli.torchrun import run_torchrun
from tests.hosts.host import Host, Hosts, enter_host
from tests.support.ranks import context

RANKS_PER_HOST = 2


@dataclass(frozen=True)
class AgentsEnded:
    """The agents' own exit codes and logs by host, and all ranks."""

    codes: list[int]
    logs: list[str]
    ranks: list[Ended]


class Torchrun:
    """`torchrun --nnodes 2 --nproc-per-node 2` on both hosts.

    `program` is what comes after its options, by node. The agents are forked from a process that has torch imported,
    which saves seconds; they start the ranks as always.
    """

    def __init__(
        self,
        hosts: Hosts,
        program: Sequence[Sequence[str]],
        folder: Path,
        *,
        rendezvous: Literal["static", "c10d"] = "static",
    ) -> None:
        self._hosts = (hosts.first, hosts.second)
        self._folder = folder
        self._agents: list[ForkServerProcess] = []
        for node, host in enumerate(self._hosts):
            command = ["--nnodes", "2", "--nproc-per-node", str(RANKS_PER_HOST), "--monitor-interval", "0.05"]
            if rendezvous == "static":
                where = [hosts.first.address, str(hosts.port)]
                command += ["--node-rank", str(node), "--master-addr", where[0], "--master-port", where[1]]
            else:
                command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.first.name}:{hosts.port}"]
                command += ["--rdzv-id", "two-hosts", "--local-addr", host.address]
            command += ["--log-dir", str(self._of(node, "ranks")), "--redirects", "3", *program[node]]
            agent = context().Process(target=_launch, args=(host, command, self._of(node, "agent")), daemon=True)
            agent.start()
            self._agents.append(agent)

    def end(self) -> AgentsEnded:
        """Waits for the end of all, which must come by itself."""
        until_s = time.monotonic() + WATCHDOG_S
        for agent in self._agents:
            agent.join(max(0.0, until_s - time.monotonic()))
        late = [pid for host in self._hosts for pid in host.pids()]
        for pid in late:  # to say where they are
            os.kill(pid, signal.SIGABRT)
        for agent in self._agents:
            agent.join(5)
            agent.kill()
            agent.join()
        nodes = range(len(self._agents))
        logs = [self._of(node, "err").read_text() for node in nodes]
        errs = [self._text(node, local, "stderr") for node in nodes for local in range(RANKS_PER_HOST)]
        assert not late, "\n".join(["these did not end:", *logs, *errs])
        codes = [agent.exitcode or 0 for agent in self._agents]
        return AgentsEnded(codes, logs, [rank for node in nodes for rank in self._ranks_of(node)])

    def _ranks_of(self, node: int) -> list[Ended]:
        codes = json.loads(self._of(node, "codes").read_text())
        return [
            Ended(code, self._text(node, local, "stdout"), self._text(node, local, "stderr"))
            for local, code in enumerate(codes)
        ]

    def _text(self, node: int, local: int, stream: str) -> str:
        found = list(self._of(node, "ranks").glob(f"*/attempt_0/{local}/{stream}.log"))
        return found[0].read_text() if found else ""

    def _of(self, node: int, what: str) -> Path:
        return self._folder / f"node{node}.{what}"


def _launch(host: Host, command: list[str], path: Path) -> None:
    enter_host(host)
    out, err, codes = (path.with_suffix(suffix) for suffix in (".out", ".err", ".codes"))
    run_torchrun(command, out, err, lambda ended: codes.write_text(json.dumps(ended)))
