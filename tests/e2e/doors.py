"""How a rank comes into a load and leaves it: every face, and a rank that is held back in a phase.

A door is what happens in the consumer's body, `body(number of items taken)`: it raises, or returns True to break.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import loader_service as ls
from loader_service.agreement.messages import Describe, Phase, PhaseRecord, Verdict
from loader_service.agreement.session import Session
from loader_service.config.schema import ServiceConfig
from loader_service.errors import FailureRecord
from tests.e2e.forty import SMALL
from tests.e2e.seats import Seat
from tests.support.checkpoints import Checkpoint

Service = ls.LoaderService | ls.BlockingLoaderService
Body = Callable[[int], bool | None]

UNKNOWN = "outcome unknown: the other ranks were told, but no verdict came back in time"
AHEAD = 19  # items of the first shard: while the last of them is consumed, the second shard is being read
FORMS = ("iterate", "batches", "into")
QUICK: dict[str, Any] = {**SMALL, "agreement": {"timeout_s": 20, "start_timeout_s": 30, "grace_s": 10}}


class Oops(Exception):
    """The caller's own, with a signature that nothing but the caller can call."""

    def __init__(self, layer: int, *, wanted: str) -> None:
        super().__init__(f"layer {layer} does not fit {wanted}")
        self.layer = layer


class Hold:
    """A rank stands still just before it brings its record of one phase, until it is released; or it only says so."""

    def __init__(self, service: Service, phase: Phase, *, holds: bool = True) -> None:
        assert service._engine is not None
        self.reached = threading.Event()
        self._phase = phase
        self._loop: asyncio.AbstractEventLoop | None = None
        self._go = asyncio.Event()
        if not holds:
            self._go.set()
        group = service._engine.group
        self._make = group.session
        group.session = self._session  # type: ignore[method-assign]

    def _session(self, name: str, describe: Mapping[Phase, Describe] | None = None) -> Session:
        session = self._make(name, describe)
        exchange = session.exchange

        async def held(phase: Phase, record: PhaseRecord) -> Verdict:
            if phase is self._phase and not self.reached.is_set():
                self._loop = asyncio.get_running_loop()
                self.reached.set()
                await self._go.wait()
            return await exchange(phase, record)

        session.exchange = held  # type: ignore[method-assign]
        return session

    def release(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._go.set)


@dataclass
class Left:
    """How one rank came out of one load."""

    error: BaseException | None
    verdict: FailureRecord | None
    complete: bool
    out_bytes: int
    log: tuple[Verdict, ...] = ()

    @property
    def notes(self) -> list[str]:
        return list(getattr(self.error, "__notes__", ()))


def nothing(_taken: int) -> None:
    return


def left(service: Service, load: ls.Load | ls.BlockingLoad, error: BaseException | None) -> Left:
    assert service._engine is not None
    pool = service._engine._pool
    failure = load.failure
    complete = load._run._plan is not None and load.report.complete
    verdict = None if failure is None else failure.record()
    session = load._run._session
    log = () if session is None else session.verdict_log
    return Left(error, verdict, complete, 0 if pool is None else pool.statistics().out_bytes, log)


def destinations(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """One that is read in place, one that is copied."""
    names = [next(iter(checkpoint.tensors)), list(checkpoint.tensors)[-1]]
    rows, columns = checkpoint.tensors[names[1]][1]
    wide = torch.zeros((rows, 2 * columns), dtype=torch.bfloat16)
    return {names[0]: torch.zeros((rows, columns), dtype=torch.bfloat16), names[1]: wide[:, ::2]}


async def use(
    service: ls.LoaderService,
    checkpoint: Checkpoint,
    form: str = "iterate",
    body: Body = nothing,
    told: Callable[[], None] | None = None,
) -> Left:
    """One load in the async face. Never raises: what came out is in the result.

    `told` is called when this rank knows that the load has failed, before it has left, or leaves without knowing.
    """
    load, caught = service.open("target"), None
    watch = asyncio.ensure_future(_tell(load, told)) if told is not None else None
    try:
        async with load:
            if form == "into":
                await load.into(destinations(checkpoint))
                body(0)
            elif form == "batches":
                taken = 0
                async for batch in load.batches():
                    with batch:
                        stop = body(taken)
                    taken += 1
                    if stop:
                        break
            else:
                taken = 0
                async for _ in load:
                    if body(taken):
                        break
                    taken += 1
    except BaseException as error:
        caught = error
    if watch is not None:
        await watch
    return left(service, load, caught)


async def _tell(load: ls.Load, told: Callable[[], None]) -> None:
    while load.failure is None and (load._run.open or not load._run._begun):  # noqa: ASYNC110 - it sends no event
        await asyncio.sleep(0.01)
    told()


def use_blocking(
    service: ls.BlockingLoaderService, checkpoint: Checkpoint, form: str = "iterate", body: Body = nothing
) -> Left:
    """As `use`, in the blocking face."""
    load, caught = service.open("target"), None
    try:
        with load:
            if form == "into":
                load.into(destinations(checkpoint))
                body(0)
            elif form == "batches":
                for taken, batch in enumerate(load.batches()):
                    with batch:
                        stop = body(taken)
                    if stop:
                        break
            else:
                for taken, _ in enumerate(load):
                    if body(taken):
                        break
    except BaseException as error:
        caught = error
    return left(service, load, caught)


def blocking_service(seat: Seat, config: ServiceConfig) -> ls.BlockingLoaderService:
    return ls.LoaderService.blocking(config, seat.group, storage=seat.storage)


def in_thread(work: Callable[[Seat], Any]) -> Callable[[Seat], Any]:
    """Blocking work of a rank, on a thread of its own, for `all_of`."""

    async def run(seat: Seat) -> Any:
        result: list[Any] = []

        def keep() -> None:  # what interrupts a thread must not end the test's loop
            try:
                result.append(work(seat))
            except BaseException as error:
                result.append(error)

        await asyncio.to_thread(keep)
        if isinstance(result[0], Exception):
            raise result[0]
        return result[0]

    return run


OWN_CLASSES = ("LoadCancelledError", "EndOfFileError", "MemoryLimitError", "ReadError", "CheckpointError", "StateError")
CAUSES = {name: getattr(ls, name) for name in OWN_CLASSES}


def check_failed(results: list[Left], who: int, error: BaseException | None, record: FailureRecord) -> None:
    """`who` has raised `error` itself, all others the same RankFailure, and all have seen one verdict."""
    own = results[who]
    assert error is None or own.error is error, "its own exception, the very object"
    check_logs([result.log for result in results])
    for rank, result in enumerate(results):
        assert result.verdict == record
        assert result.out_bytes == 0
        if rank == who:
            continue
        failure = result.error
        if not isinstance(failure, ls.RankFailure):
            raise AssertionError(failure) from failure
        where = (failure.rank, failure.phase, failure.path, failure.tensor, failure.errno)
        assert where == (who, record.phase, record.path, record.tensor, record.errno)
        assert type(failure.__cause__) is CAUSES.get(record.error, ls.LoaderError)
        assert record.message in str(failure.__cause__)
        assert own.notes == [f"verdict of all ranks: {failure}"]
        assert result.notes == []


def check_logs(logs: Sequence[Sequence[Verdict]]) -> None:
    """The verdicts of all ranks are prefixes of one sequence, in which nothing follows a FINAL."""
    longest = max(logs, key=len)
    assert all(list(log) == list(longest[: len(log)]) for log in logs)
    assert not any(verdict.final for verdict in longest[:-1])


def located(record: FailureRecord, who: int, phase: str = "read") -> FailureRecord:
    return FailureRecord(record.error, record.message, who, phase, record.path, record.tensor, record.errno)
