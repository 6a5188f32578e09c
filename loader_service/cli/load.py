"""`load`: one load on this rank, from the configuration to what is printed and returned to the shell.

The work is one task; beside it a watch says why a load failed as soon as the ranks' verdict is known, before anything
is cleaned up, since a launcher that sees one rank end soon stops the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from loader_service.agreement.messages import Phase
from loader_service.cli import ranks
from loader_service.cli.checking import Manifest, Reference, check_writable, manifest_path, write_manifest
from loader_service.cli.host_rows import pieces
from loader_service.cli.output import print_document, print_failure, print_traceback
from loader_service.cli.progress import LoadProgress, progress_of
from loader_service.cli.signals import Interruptions, interruptions
from loader_service.config.schema import ServiceConfig, check_world_size
from loader_service.config.yaml_file import load_config
from loader_service.errors import (
    EXIT_AGREEMENT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_UNEXPECTED,
    FailureRecord,
    LoadCancelledError,
    LoaderError,
    record_of,
)
from loader_service.filling import TensorSpec
from loader_service.reading.threads import ReadPool
from loader_service.report import LoadReport
from loader_service.rows import RowSource
from loader_service.service import LoaderService
from loader_service.stream import Load

T = TypeVar("T")

LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the command line said. `manifest` is the name before a rank is put into it."""

    config: Path
    load: str
    verify: bool
    manifest: Path | None
    as_json: bool
    debug: bool


def run_load(options: LoadOptions) -> int:
    """Runs the load on this rank and prints what is due on it. Returns the exit code."""
    place = ranks.place_from()
    with interruptions(several_ranks=not place.alone) as signals:
        try:
            config = _checked_config(options, place)
            if signals.first is not None:
                raise LoadCancelledError(f"interrupted by {signals.first.name}")
        except LoaderError as error:
            return asyncio.run(_refused(options, place, error, signals))
        return asyncio.run(_LoadProcess(options, place, config).main(signals))


def _checked_config(options: LoadOptions, place: ranks.Place) -> ServiceConfig:
    """The configuration, once everything that can be wrong without the other ranks and the checkpoint is not."""
    config = load_config(options.config)
    config.checkpoint_of(options.load)
    check_world_size(config, place.world_size, coords_given=False)
    if options.manifest is not None:
        check_writable(manifest_path(options.manifest, place.rank, place.world_size))
    return config


async def _refused(options: LoadOptions, place: ranks.Place, error: LoaderError, signals: Interruptions) -> int:
    """The load cannot be opened on this rank: the others hear of it, and one of all says it."""
    if not place.alone:
        signals.keep()  # this rank is on its way out: a launcher's signal changes nothing
    if options.debug:
        print_traceback(error)
    await _tell_refused(_Telling(options, place), options, place, error)
    return error.exit_code


async def _tell_refused(telling: _Telling, options: LoadOptions, place: ranks.Place, error: BaseException) -> None:
    record = record_of(error, rank=place.rank, phase=Phase.CONFIG.value)

    async def tell(verdict: LoaderError | None) -> None:
        await telling.tell(record if verdict is None else verdict.record(), agreed=verdict is not None)

    await ranks.tell_others(place, options.load, error, tell)


class _Telling:
    """Prints a failure, once, if this rank is the one that does."""

    def __init__(
        self, options: LoadOptions, place: ranks.Place, *, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._options = options
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
            self._print(record, as_json=self._options.as_json and voice == "document")
            if voice == "document":
                await self._spokesman.printed()

    def _print(self, record: FailureRecord, *, as_json: bool) -> None:
        several = not self._place.alone
        try:
            print_failure(record, as_json=as_json, several_ranks=several)
        except LoaderError:  # stdout is full: the line for a person is what is left
            print_failure(record, as_json=False, several_ranks=several)


class _LoadProcess:
    """One load in one process: its task, its signals, its watch, its exit code."""

    def __init__(self, options: LoadOptions, place: ranks.Place, config: ServiceConfig) -> None:
        self._options = options
        self._place = place
        self._config = config
        self._load: Load | None = None
        self._telling = _Telling(options, place, stopped=lambda: self._stood_still_s > config.agreement.timeout_s / 2)
        self._progress: LoadProgress = progress_of(options.load, shown=place.rank == 0)
        self._threads = ReadPool(1, name="loader-check")
        self._signal: signal.Signals | None = None
        self._gathering = False
        self._later_failure: LoaderError | None = None
        self._looked_at_s = time.monotonic()
        self._stood_still_s = 0.0

    async def main(self, signals: Interruptions) -> int:
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
            if self._options.debug:
                print_traceback(error)
            await self._tell(error)
            return self._exit_code(error)
        finally:
            watch.cancel()
            self._threads.stop()

    async def _tell(self, error: BaseException) -> None:
        if self._load is None:  # the service could not be entered: no other rank has heard of it
            own = LoadCancelledError(self._why_cancelled()) if isinstance(error, asyncio.CancelledError) else error
            await _tell_refused(self._telling, self._options, self._place, own)
            return
        failure = self._failure
        record = self._own_record(error) if failure is None else failure.record()
        await self._telling.tell(record, agreed=failure is not None)

    @property
    def _failure(self) -> LoaderError | None:
        """The ranks' common verdict on the load, or on what they did after it."""
        failure = self._load.failure if self._load is not None else None
        return failure or self._later_failure

    # The work

    async def _work(self) -> None:
        try:
            reports = await self._work_with_others()
        except BaseException as error:
            # Until reports are gathered, a load that has succeeded is not over: the other ranks wait for this one's.
            if self._load is not None and self._load.succeeded and not self._gathering:
                with contextlib.suppress(Exception):  # the cause is what is raised, not what befalls the telling
                    settings = self._config.agreement
                    await ranks.fail_reports(self._place, error, settings, on_final=self._note_final)
            raise
        if self._place.rank != 0:
            return
        if self._options.as_json:
            print_document(reports[0] if self._place.alone else {"ranks": reports})
        else:
            from loader_service.cli.render import show_reports

            show_reports(reports)

    async def _work_with_others(self) -> list[dict[str, object]]:
        place = self._place
        report, manifest = await self._run()
        if self._options.manifest is not None and manifest is not None:
            path = manifest_path(self._options.manifest, place.rank, place.world_size)
            await self._in_thread(lambda: write_manifest(path, manifest.entries))
        return await ranks.gather(
            place,
            report.as_dict(),
            self._config.agreement,
            on_begin=self._note_gathering,
            on_final=self._note_final,
        )

    def _note_gathering(self) -> None:
        self._gathering = True

    def _note_final(self, failure: LoaderError) -> None:
        self._later_failure = failure

    async def _run(self) -> tuple[LoadReport, Manifest | None]:
        options = self._options
        async with LoaderService(self._config, group=self._place.meeting or "solo") as service:
            self._load = load = service.open(options.load)
            async with load:
                plan = load.plan.for_rank(self._place.rank)
                manifest = Manifest(plan) if options.manifest is not None else None
                self._progress.begin(plan.payload_bytes)
                with self._progress, Reference(plan) as reference:
                    await self._consume(load, reference if options.verify else None, manifest)
            return dataclasses.replace(load.report, verified=True if options.verify else None), manifest

    async def _consume(self, load: Load, reference: Reference | None, manifest: Manifest | None) -> None:
        """Takes every tensor and drops it after use: no more of them lives than what is being looked at."""

        async def take(name: str, value: torch.Tensor, spec: TensorSpec) -> None:
            if reference is not None or manifest is not None:
                await self._in_thread(_look_at(name, value, spec, reference, manifest))
            self._progress.advance(value.nbytes)

        async for name, value in load:
            spec = load.spec(name)
            if isinstance(value, RowSource):
                self._progress.rows_of(name)
                async for rows, own_spec in pieces(name, value, spec):
                    await take(name, rows, own_spec)
            else:
                await take(name, value, spec)
            self._progress.tensor_done()
            del value

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
            self._progress.waits_for(self._load.waits_for if self._load is not None else None)
            self._progress.tick()
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
        if isinstance(error, LoaderError):
            return error.exit_code
        if not isinstance(error, asyncio.CancelledError):
            return EXIT_UNEXPECTED
        cause = self._failure.record() if self._failure is not None else None
        if cause is None or cause.error == LoadCancelledError.__name__:
            return EXIT_INTERRUPTED
        # The load had failed when the signal came: it is that failure's code.
        return ranks.exit_code_of(cause) if cause.rank == self._place.rank else EXIT_AGREEMENT


def _look_at(
    name: str, value: torch.Tensor, spec: TensorSpec, reference: Reference | None, manifest: Manifest | None
) -> Callable[[], None]:
    def look() -> None:
        if reference is not None:
            reference.compare(name, value, spec)
        if manifest is not None:
            manifest.add(name, value)

    return look


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> None:
    """From a signal's handler. A loop that has been closed has nothing left to interrupt."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)
