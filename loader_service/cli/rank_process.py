"""One rank's process of a command in which ranks act together: its task, its signals, its watch, its exit code.

The work is one task; beside it a watch says why a load failed as soon as the ranks' verdict is known, before anything
is cleaned up, since a launcher that sees one rank end soon stops the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from loader_service import logs
from loader_service.agreement.messages import Phase
from loader_service.cli import ranks
from loader_service.cli.output import print_failure, print_traceback
from loader_service.cli.signals import Interruptions
from loader_service.config.schema import AgreementConfig
from loader_service.errors import (
    EXIT_AGREEMENT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    FailureRecord,
    LoadCancelledError,
    LoaderError,
    exit_code_of,
    record_of,
)
from loader_service.reading.threads import ReadPool

T = TypeVar("T")
FailingT = TypeVar("FailingT", bound="Failing")

LOOK_EVERY_S = 0.05


class Failing(Protocol):
    """What ranks do together: a load, or whatever else has a common verdict."""

    @property
    def failure(self) -> LoaderError | None: ...


class Telling(Protocol):
    """What the command line said about telling."""

    @property
    def as_json(self) -> bool: ...

    @property
    def debug(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the other ranks hear of a rank that cannot even begin: in the session of this name, of the load's own store
    names or, behind a `suffix`, of others beside them. `phase` is the load's in which that is, None if in none."""

    session: str
    suffix: str = ""
    phase: Phase | None = Phase.CONFIG


async def refused(
    telling: Telling, place: ranks.Place, meeting: Meeting, error: LoaderError, signals: Interruptions
) -> int:
    """The command cannot begin on this rank: the others hear of it, and one of all says it."""
    if not place.alone:
        signals.keep()  # this rank is on its way out: a launcher's signal changes nothing
    if telling.debug:
        print_traceback(error)
    await _tell_refused(Teller(telling, place), place, meeting, error)
    return error.exit_code


async def _tell_refused(teller: Teller, place: ranks.Place, meeting: Meeting, error: BaseException) -> None:
    record = record_of(error, rank=place.rank, phase=meeting.phase)

    async def tell(verdict: LoaderError | None) -> None:
        await teller.tell(record if verdict is None else verdict.record(), agreed=verdict is not None)

    await ranks.tell_others(place, meeting.session, error, tell, suffix=meeting.suffix, phase=meeting.phase)


class Teller:
    """Prints a failure, once, if this rank is the one that does."""

    def __init__(self, telling: Telling, place: ranks.Place, *, stopped: Callable[[], bool] = lambda: False) -> None:
        self._telling = telling
        self._place = place
        self._spokesman = ranks.Spokesman(place, stopped=stopped)
        self._lock = asyncio.Lock()
        self._told = False

    async def tell(self, record: FailureRecord, *, agreed: bool) -> None:
        """`agreed`: the record is the common verdict of all ranks, not only what this one knows."""
        async with self._lock:
            if self._told:
                return
            self._told = True
            voice = await self._spokesman.voice(record, agreed=agreed)
            if voice == "none":
                return
            self._print(record, as_json=self._telling.as_json and voice == "document")
            if voice == "document":
                await self._spokesman.printed()

    def _print(self, record: FailureRecord, *, as_json: bool) -> None:
        several = not self._place.alone
        try:
            print_failure(record, as_json=as_json, several_ranks=several)
        except LoaderError:  # stdout is full: the line for a person is what is left
            print_failure(record, as_json=False, several_ranks=several)


class RankProcess(ABC, Generic[FailingT]):
    """One command in one process, from its first collective to its exit code. A subclass does `_work`, and puts what
    ranks do together into `_load`: the load that is open, or was last, or a service that fills."""

    def __init__(
        self, telling: Telling, place: ranks.Place, meeting: Meeting, settings: AgreementConfig, *, load: str | None
    ) -> None:
        self._how = telling
        self._place = place
        self._meeting = meeting
        self._settings = settings
        self._load: FailingT | None = None
        self._subject = logs.Subject(load, place.rank, place.world_size)
        self._telling = Teller(telling, place, stopped=lambda: self._stood_still_s > settings.timeout_s / 2)
        self._threads = ReadPool(1, name="loader-check")
        self._signal: signal.Signals | None = None
        self._later_failure: LoaderError | None = None
        self._looked_at_s = time.monotonic()
        self._stood_still_s = 0.0

    @abstractmethod
    async def _work(self) -> None:
        """All that the command does, to what it prints."""

    def _tick(self) -> None:
        """Called often, beside the work."""

    async def main(self, signals: Interruptions) -> int:
        """Runs the work to its end, however it ends, and prints what is due on this rank. Returns the exit code."""
        logs.begin(self._subject)
        loop = asyncio.get_running_loop()
        work = loop.create_task(self._work())
        signals.on_first(lambda number: _call_soon(loop, self._interrupted, number, work))
        watch = loop.create_task(self._watch())
        try:
            await asyncio.wait({work})
            error: BaseException | None = (
                asyncio.CancelledError(self._why_cancelled()) if work.cancelled() else work.exception()
            )
            if error is None:
                return EXIT_OK
            if self._how.debug:
                print_traceback(error)
            await self._tell(error)
            return self._exit_code(error)
        finally:
            watch.cancel()
            self._threads.stop()

    async def _tell(self, error: BaseException) -> None:
        failure = self._failure
        if self._load is None and failure is None:  # no other rank has heard of it
            own = LoadCancelledError(self._why_cancelled()) if isinstance(error, asyncio.CancelledError) else error
            await _tell_refused(self._telling, self._place, self._meeting, own)
            return
        record = self._own_record(error) if failure is None else failure.record()
        await self._telling.tell(record, agreed=failure is not None)

    @property
    def _failure(self) -> LoaderError | None:
        """The ranks' common verdict on the load, or on what they did beside it."""
        failure = self._load.failure if self._load is not None else None
        return failure or self._later_failure

    def _note_final(self, failure: LoaderError) -> None:
        self._later_failure = failure

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Blocking work in a daemon thread, which may be left behind, so that signals are always heard."""
        return await asyncio.wrap_future(self._threads.submit(work))

    # What happens beside it

    async def _watch(self) -> None:
        while True:
            self._note_gap()
            if (failure := self._failure) is not None:
                await self._telling.tell(failure.record(), agreed=True)
                return
            self._tick()
            await asyncio.sleep(LOOK_EVERY_S)

    def _note_gap(self) -> None:
        """A process that is stopped (SIGSTOP, a frozen container) sees it as a gap in its own looking."""
        now_s = time.monotonic()
        self._stood_still_s = max(self._stood_still_s, now_s - self._looked_at_s)
        self._looked_at_s = now_s

    def _interrupted(self, number: signal.Signals, work: asyncio.Task[None]) -> None:
        """The first signal makes the load leave by its normal door, which tells the other ranks.

        A load that has failed is on its way out: a launcher's signal then changes nothing.
        """
        self._note_gap()
        self._signal = number
        if self._failure is None:
            work.cancel(self._why_cancelled())

    # How it ended

    def _own_record(self, error: BaseException) -> FailureRecord:
        """What this rank knows by itself."""
        own_rank = self._place.rank
        if isinstance(error, asyncio.CancelledError):
            return LoadCancelledError(self._why_cancelled(), rank=own_rank).record()
        return record_of(error, rank=own_rank)

    def _why_cancelled(self) -> str:
        return "interrupted" if self._signal is None else f"interrupted by {self._signal.name}"

    def _exit_code(self, error: BaseException) -> int:
        if not isinstance(error, asyncio.CancelledError):
            return exit_code_of(error)
        cause = self._failure.record() if self._failure is not None else None
        if cause is None or cause.error == LoadCancelledError.__name__:
            return EXIT_INTERRUPTED
        # The load had failed when the signal came: it is that failure's code.
        return ranks.exit_code_of(cause) if cause.rank == self._place.rank else EXIT_AGREEMENT


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> None:
    """From a signal's handler. A loop that has been closed has nothing left to interrupt."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)
