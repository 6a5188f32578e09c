"""From a failure in the middle of reading to the last survivor's exception, with real loads in real processes.

Storage is slow on purpose: every read takes 50 ms longer, so that each rank is in the middle of its load, and its
consumer waits for a tensor, whenever something happens. The time is taken where the exception comes out of the
consumer's own `async for`; leaving the load, which waits for reads in flight, comes after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import loader_service as ls
from benchmarks.common import MIB, TensorShape, make_checkpoint
from benchmarks.ranks import Rank, Team, free_address, serve_store, store_address
from loader_service.config.schema import AgreementConfig, ServiceConfig
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage

How = Literal["raise", "read error", "cancel", "SIGTERM", "SIGTERM, command line", "SIGKILL", "SIGSTOP"]
Whom = Literal["member", "leader", "host", "agent"]
Kind = Literal["told", "cancelled", "silent"]

READ_DELAY_S = 0.05
READ_BYTES = 64 << 10
READS_BEFORE = 8  # the load is in the middle once so many reads came back
AT_ONCE = 6  # silent failures that are waited for at the same time: nothing is computed meanwhile
TOLD_LIMIT_S = 1.0
SILENT_SPARE_S = 2.0
DEFAULT_TIMEOUT_S = AgreementConfig().timeout_s


@dataclass(frozen=True, slots=True)
class Case:
    """What happens to whom. `member` is the highest rank, `leader` rank 0; the `agent` serves the store in a process
    of its own, the `host` is rank 0 where it serves the store itself."""

    text: str
    how: How
    whom: Whom
    kind: Kind

    def limit_s(self, timeout_s: float) -> float:
        """The target. A rank that was cancelled alone waits up to a heartbeat for a better cause of the others."""
        if self.kind == "silent":
            return timeout_s + SILENT_SPARE_S
        return TOLD_LIMIT_S + (min(1.0, timeout_s / 5) if self.kind == "cancelled" else 0.0)


CASES = (
    Case("exception in a member's consumer", "raise", "member", "told"),
    Case("exception in the leader's consumer", "raise", "leader", "told"),
    Case("read error of a member", "read error", "member", "told"),
    Case("cancelled member", "cancel", "member", "cancelled"),
    Case("SIGTERM to a member that cancels then", "SIGTERM", "member", "cancelled"),
    Case("SIGTERM to a member, command line", "SIGTERM, command line", "member", "cancelled"),
    Case("SIGKILL of rank 0, which serves the store", "SIGKILL", "host", "told"),
    Case("SIGKILL of the agent, which serves the store", "SIGKILL", "agent", "told"),
    Case("SIGKILL of a member", "SIGKILL", "member", "silent"),
    Case("SIGKILL of the leader", "SIGKILL", "leader", "silent"),
    Case("SIGSTOP of a member", "SIGSTOP", "member", "silent"),
    Case("SIGSTOP of the leader", "SIGSTOP", "leader", "silent"),
    Case("SIGSTOP of rank 0, which serves the store", "SIGSTOP", "host", "silent"),
    Case("SIGSTOP of the agent, which serves the store", "SIGSTOP", "agent", "silent"),
)


@dataclass(frozen=True, slots=True)
class End:
    """How a rank's load ended: when the consumer had the exception, when the load was left, and what it was."""

    failed_at_s: float | None
    left_at_s: float
    cause: str


@dataclass(frozen=True, slots=True)
class Failed:
    """One failure. Seconds from it to the last survivor's exception, and until all survivors had left their loads;
    from waking a stopped rank to its own exception. `seen`: the distinct causes that survivors and the woken saw."""

    case: Case
    ranks: int
    timeout_s: float
    last_s: float | None  # None on the command line, which shows only its end
    left_s: float
    woken_s: float | None
    seen: tuple[str, ...]

    @property
    def counted_s(self) -> float:
        """What the target is for."""
        return self.left_s if self.last_s is None else self.last_s

    @property
    def met(self) -> bool:
        return self.counted_s < self.case.limit_s(self.timeout_s)


def failed_of(
    case: Case,
    ranks: int,
    timeout_s: float,
    began_s: float,
    survivors: Sequence[End],
    woken: tuple[float, End] | None = None,
) -> Failed:
    """`began_s` is when it happened, `woken` when a stopped rank was woken and how it ended."""
    told_at_s = [end.failed_at_s for end in survivors if end.failed_at_s is not None]
    woken_s = None
    if woken is not None and woken[1].failed_at_s is not None:
        woken_s = woken[1].failed_at_s - woken[0]
    ends = [*survivors] if woken is None else [*survivors, woken[1]]
    return Failed(
        case,
        ranks,
        timeout_s,
        last_s=max(told_at_s) - began_s if told_at_s else None,
        left_s=max(end.left_at_s for end in survivors) - began_s,
        woken_s=woken_s,
        seen=tuple(dict.fromkeys(end.cause for end in ends)),
    )


def make_slow_checkpoint(folder: Path, seconds: float) -> None:
    """Enough reads of one tensor each for loads that last so long."""
    count = READS_BEFORE + round(seconds / READ_DELAY_S)
    make_checkpoint(folder, [TensorShape(f"layers.{i}.weight", (READ_BYTES // 2,)) for i in range(count)], 2)


def slow_config(folder: str, timeout_s: float) -> dict[str, Any]:
    return {
        "checkpoint": {"path": folder},
        "loads": {"target": {}},
        "reads": {"threads": 1, "chunk_bytes": READ_BYTES, "retries": 0},
        "staging": {"capacity_bytes": MIB},
        "agreement": {"timeout_s": timeout_s},
    }


# The benchmark's side


def measure(cases: Sequence[Case], sizes: Sequence[int], timeouts_s: Sequence[float], folder: Path) -> list[Failed]:
    """Every case once with each number of ranks; silent ones with each limit of silence, some at the same time."""
    loud = [case for case in cases if case.kind != "silent"]
    silent = [case for case in cases if case.kind == "silent"]
    found = []
    for case in loud:
        for size in sizes:
            with _started(case, size, DEFAULT_TIMEOUT_S, folder) as scene:
                found.append(scene.play())
    waits = [(case, size, timeout_s) for timeout_s in timeouts_s for case in silent for size in sizes]
    for start in range(0, len(waits), AT_ONCE):
        with contextlib.ExitStack() as stack:
            scenes = [stack.enter_context(_started(*wait, folder)) for wait in waits[start : start + AT_ONCE]]
            with ThreadPoolExecutor(AT_ONCE) as threads:
                found += threads.map(_Scene.play, scenes)
    return found


@dataclass(slots=True)
class _Scene:
    """The processes of one case, all of them started."""

    case: Case
    timeout_s: float
    agent: Team | None
    team: Team
    size: int

    @property
    def victim(self) -> int | None:
        return {"member": self.size - 1, "leader": 0, "host": 0, "agent": None}[self.case.whom]

    def play(self) -> Failed:
        """Waits until all are in the middle of reading, lets it happen, and takes the times."""
        survivors = [rank for rank in range(self.size) if rank != self.victim]
        self.team.hear("reading")
        if self.case.kind != "told":  # heartbeats come every second: any moment between two of them is as likely
            time.sleep(random.random())
        began_s = self._strike()
        ends: list[End] = self.team.hear("ended", survivors)
        if self.victim is None or self.case.how != "SIGSTOP":
            return failed_of(self.case, self.size, self.timeout_s, began_s, ends)
        woken_at_s = self.team.signal(self.victim, signal.SIGCONT)
        (woken,) = self.team.hear("ended", [self.victim])
        return failed_of(self.case, self.size, self.timeout_s, began_s, ends, (woken_at_s, woken))

    def _strike(self) -> float:
        how = self.case.how
        if how.startswith("SIG"):
            number = signal.Signals[how.split(",")[0]]
            if self.victim is not None:
                return self.team.signal(self.victim, number)
            assert self.agent is not None
            return self.agent.signal(0, number)
        assert self.victim is not None
        self.team.tell(self.victim, how)
        (began_s,) = self.team.hear("failing", [self.victim])
        return float(began_s)


@contextlib.contextmanager
def _started(case: Case, size: int, timeout_s: float, folder: Path) -> Iterator[_Scene]:
    with contextlib.ExitStack() as stack:
        agent, address = None, free_address()
        if case.whom != "host":
            agent = stack.enter_context(Team(serve_store, 1))
            address = store_address(agent)
        work: Callable[..., None] = run_command_line if "command line" in case.how else load_until_it_fails
        arguments = (str(folder), timeout_s, agent is not None)
        yield _Scene(case, timeout_s, agent, stack.enter_context(Team(work, size, *arguments, address=address)), size)


# A rank's side


class _Slow(FakeStorage):
    """Tells when the load is in the middle, from a thread of its own: the rank's loop and interpreter stay free."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(LocalStorage())
        self.delay("*.safetensors", READ_DELAY_S)
        self._rank = rank
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while len(self.reads_of(from_byte=READ_BYTES)) < READS_BEFORE:
            time.sleep(READ_DELAY_S / 5)
        self._rank.tell("reading")


def load_until_it_fails(rank: Rank, folder: str, timeout_s: float, served: bool) -> None:
    """A rank's process. Tells that it is reading, does to itself what it hears, and tells how it ended."""
    config = ls.config_from_dict(slow_config(folder, timeout_s))
    rank.tell("ended", asyncio.run(_load(rank, config, served)))


async def _load(rank: Rank, config: ServiceConfig, served: bool) -> End:
    task = asyncio.current_task()
    assert task is not None
    storage = _Slow(rank)
    consumer = _Consumer(rank, storage, task)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    threading.Thread(target=lambda: loop.call_soon_threadsafe(consumer.obey, rank.hear()), daemon=True).start()
    meeting = ls.Rendezvous(rank.address, rank.rank, rank.world_size, "failures", served=served)
    async with ls.LoaderService(config, meeting, storage=storage) as service:
        try:
            async with service.open("target") as load:
                await consumer.consume(load)
        except (ls.LoaderError, ConsumerError, asyncio.CancelledError) as error:
            return End(consumer.failed_at_s, time.monotonic(), _cause(error))
    raise AssertionError("the load came to its end before anything failed")


class ConsumerError(Exception):
    """What a consumer raises."""


class _Consumer:
    """Takes tensors and forgets them, until it hears what to do."""

    def __init__(self, rank: Rank, storage: FakeStorage, task: asyncio.Task[Any]) -> None:
        self.failed_at_s: float | None = None
        self._rank = rank
        self._storage = storage
        self._task = task
        self._raises = False

    async def consume(self, load: ls.Load) -> None:
        try:
            async for _ in load:
                self._raise_if_told()
        except BaseException:
            self.failed_at_s = time.monotonic()
            raise

    def _raise_if_told(self) -> None:
        if self._raises:
            self._tell_when()
            raise ConsumerError("the consumer's own")

    def obey(self, word: str) -> None:
        if word == "raise":
            self._raises = True
        elif word == "cancel":
            self._tell_when()
            self._task.cancel()
        else:
            assert word == "read error"
            self._storage.fail("*.safetensors", self._read_error)

    def _read_error(self) -> OSError:
        self._tell_when()
        return OSError(errno.EIO, os.strerror(errno.EIO))

    def _tell_when(self) -> None:
        self._rank.tell("failing", time.monotonic())


def _cause(error: BaseException) -> str:
    """The cause in few words, as the failure's record has it."""
    if not isinstance(error, ls.LoaderError):
        return type(error).__name__
    record = error.record()
    return record.error if record.rank is None else f"{record.error} of rank {record.rank}"


def run_command_line(rank: Rank, folder: str, timeout_s: float, served: bool) -> None:
    """A rank's process that runs the `load` command, over slow storage, as a launcher would start it."""
    from loader_service.cli import app
    from loader_service.cli import load as command

    path = Path(folder, f"{os.getpid()}.yaml")
    path.write_text(json.dumps(slow_config(folder, timeout_s)))  # JSON is YAML
    host, _, port = rank.address.rpartition(":")
    environ = {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.world_size), "MASTER_ADDR": host, "MASTER_PORT": port}
    os.environ.update({**environ, "TORCHELASTIC_USE_AGENT_STORE": str(served)})
    slow_service = partial(ls.LoaderService, storage=_Slow(rank))
    setattr(command, "LoaderService", slow_service)  # noqa: B010 - the command takes no storage from outside
    code = app.run(["load", str(path), "--load", "target"])
    path.unlink()
    rank.tell("ended", End(None, time.monotonic(), f"exit code {code}"))
