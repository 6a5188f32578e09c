"""`load`: one load on this rank, from the configuration to what is printed and returned to the shell."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from loader_service.agreement.messages import Phase
from loader_service.agreement.node import node_name
from loader_service.cli import ranks
from loader_service.cli.against import THREADS, Against, Checksum
from loader_service.cli.checking import Manifest, Reference, check_writable, manifest_path, write_manifest, write_text
from loader_service.cli.checkpoint_manifest import CheckpointManifest, read_checkpoint_manifest
from loader_service.cli.host_rows import pieces
from loader_service.cli.loads import load_of
from loader_service.cli.output import print_document
from loader_service.cli.plans import draft_of
from loader_service.cli.progress import LoadProgress, progress_of
from loader_service.cli.rank_process import Meeting, RankProcess, refused
from loader_service.cli.signals import interruptions
from loader_service.config.schema import ServiceConfig, check_world_size
from loader_service.errors import LoadCancelledError, LoaderError
from loader_service.filling import TensorSpec
from loader_service.memory.budget import slot_bytes_of
from loader_service.planning.plan import RankPlan
from loader_service.reading.threads import ReadPool
from loader_service.report import LoadReport
from loader_service.rows import RowSource
from loader_service.service import LoaderService
from loader_service.stream import Load
from loader_service.timeline import Recorder, Sample, Timeline, steps_of, timeline_of

_QUICK_BYTES = 64 << 10  # hashed in 20 to 60 us; another thread costs 90, for each of many thousands of tensors
_RECORDED = "recorded"  # travels with a report to rank 0, for the page
_UNNAMED = "the only load"  # of a file that cannot be read; ranks meet under any name


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the command line said. `load` None: the file's only one. `manifest` is the name before a rank is put into
    it, `against` the whole checkpoint's, which every rank reads, `checksum` what of it counts, and `html` the page that
    rank 0 writes."""

    config: Path
    load: str | None
    verify: bool
    manifest: Path | None
    against: Path | None
    checksum: Checksum
    as_json: bool
    debug: bool
    html: Path | None = None
    attach: bool = False


def run_load(options: LoadOptions) -> int:
    """Runs the load on this rank and prints what is due on it. Returns the exit code."""
    place = ranks.place_from()
    with interruptions(several_ranks=not place.alone) as signals:
        try:
            config, load, known = _checked(options, place)
            if signals.first is not None:
                raise LoadCancelledError(f"interrupted by {signals.first.name}")
        except LoaderError as error:
            return asyncio.run(refused(options, place, Meeting(options.load or _UNNAMED), error, signals))
        return asyncio.run(_LoadProcess(options, place, config, load, known).main(signals))


def _checked(options: LoadOptions, place: ranks.Place) -> tuple[ServiceConfig, str, CheckpointManifest | None]:
    """The configuration, which of its loads, and the manifest that it is checked against, once everything is right that
    needs no other rank and no checkpoint."""
    config, load = load_of(options.config, options.load)
    check_world_size(config, place.world_size, coords_given=False)
    if options.manifest is not None:
        check_writable(manifest_path(options.manifest, place.rank, place.world_size))
    if options.html is not None and place.rank == 0:
        check_writable(options.html, option="--html")
    known = read_checkpoint_manifest(options.against) if options.against is not None else None
    return config, load, known


@dataclass(frozen=True, slots=True)
class _Looks:
    """What looks at every tensor. All block."""

    reference: Reference | None
    manifest: Manifest | None
    against: Against | None

    def is_quick(self, value: torch.Tensor) -> bool:
        """Whether it takes less than to give it to another thread, or nothing."""
        if self.reference is not None:
            return False
        return value.nbytes <= _QUICK_BYTES or (self.manifest is None and self.against is None)

    def begin(self, name: str, spec: TensorSpec) -> None:
        """A tensor comes next, or rows of it."""
        if self.against is not None:
            self.against.begin(name, spec)

    def look(self, name: str, value: torch.Tensor, spec: TensorSpec) -> None:
        """At a tensor, or at rows of one, which come in order. Raises CheckpointError where it is not as it must be."""
        if self.reference is not None:
            self.reference.compare(name, value, spec)
        if self.against is not None:
            self.against.add(value)
        if self.manifest is not None:
            self.manifest.add(name, value)

    def reported(self, report: LoadReport) -> LoadReport:
        """The report, with what was compared. `verified` is true only of all that the rank has taken."""
        against = self.against
        all_checked = against is not None and not against.unchecked_bytes
        report = dataclasses.replace(report, verified=True if self.reference is not None or all_checked else None)
        if against is None:
            return report
        words = () if against.words is None else (against.words,)
        return dataclasses.replace(
            report,
            checked_bytes=against.checked_bytes,
            unchecked_bytes=against.unchecked_bytes,
            fallbacks=(*report.fallbacks, *words),
        )


class _LoadProcess(RankProcess[Load]):
    """One load in one process."""

    def __init__(
        self,
        options: LoadOptions,
        place: ranks.Place,
        config: ServiceConfig,
        load: str,
        known: CheckpointManifest | None,
    ) -> None:
        super().__init__(options, place, Meeting(load), config.agreement, load=load)
        self._options = options
        self._known = known
        self._config = config
        self._load_name = load
        self._progress: LoadProgress = progress_of(load, shown=place.rank == 0, others=self._known_of_all)
        self._gathering = False
        self._began_at = datetime.now().astimezone().isoformat(timespec="seconds")

    def _known_of_all(self) -> Mapping[int, tuple[int, int]]:
        return self._load.done_by_rank if self._load is not None else {}

    def _tick(self) -> None:
        self._progress.waits_for(self._load.waits_for if self._load is not None else None)
        self._progress.tick()

    async def _work(self) -> None:
        try:
            reports = await self._work_with_others()
        except BaseException as error:
            # Until reports are gathered, a load that has succeeded is not over: the other ranks wait for this one's.
            if self._load is not None and self._load.succeeded and not self._gathering:
                with contextlib.suppress(Exception):  # the cause is what is raised, not what befalls the telling
                    settings = self._config.agreement
                    await ranks.fail_reports(
                        self._place, error, settings, phase=Phase.FINISH, on_final=self._note_final
                    )
            raise
        if self._place.rank != 0:
            return
        recorded = [report.pop(_RECORDED, None) for report in reports]
        if (html := self._options.html) is not None:
            text = await self._in_thread(partial(self._page, reports, recorded))
            await self._in_thread(lambda: write_text(html, text, option="--html"))
        if self._options.as_json:
            print_document(reports[0] if self._place.alone else {"ranks": reports})
        else:
            from loader_service.cli.render import show_reports

            show_reports(reports)

    async def _work_with_others(self) -> list[dict[str, object]]:
        place = self._place
        report, manifest, recorded = await self._run()
        if self._options.manifest is not None and manifest is not None:
            path = manifest_path(self._options.manifest, place.rank, place.world_size)
            await self._in_thread(lambda: write_manifest(path, manifest.entries))
        return await ranks.gather(
            place,
            report.as_dict() | recorded,
            self._config.agreement,
            phase=Phase.FINISH,
            on_begin=self._note_gathering,
            on_final=self._note_final,
        )

    def _note_gathering(self) -> None:
        self._gathering = True

    def _page(self, reports: Sequence[Mapping[str, object]], recorded: Sequence[object]) -> str:
        """The page, from all ranks' reports and from what they have recorded. Blocking."""
        from loader_service.cli.load_page import RankLoad, page_of

        assert self._load is not None
        loads = [
            RankLoad(report, Timeline.from_dict(found["timeline"]), found["node"]) if found else RankLoad(report, None)
            for report, found in zip(reports, cast("Sequence[Any]", recorded), strict=True)
        ]
        draft, notes = draft_of(self._config, self._load.plan)
        return page_of(
            self._load.plan,
            loads,
            began_at=self._began_at,
            slot_bytes=slot_bytes_of(self._config.reads.chunk_bytes, self._config.staging.capacity_bytes),
            draft=draft,
            notes=notes,
        )

    def _recorded(self, report: LoadReport, samples: Sequence[Sample]) -> dict[str, object]:
        """What the page needs beside the report, with which it travels to rank 0."""
        capacity_bytes, steps = self._config.staging.capacity_bytes, steps_of(report.world_size)
        timeline = timeline_of(
            samples, rank=report.rank, phases=report.phases, capacity_bytes=capacity_bytes, steps=steps
        )
        return {_RECORDED: {"timeline": timeline.as_dict(), "node": node_name()}}

    async def _run(self) -> tuple[LoadReport, Manifest | None, dict[str, object]]:
        options = self._options
        async with LoaderService(self._config, group=self._place.meeting or "solo", attach=options.attach) as service:
            self._load = load = service.open(self._load_name)
            recording = contextlib.nullcontext() if options.html is None else Recorder(lambda: load.counters)
            async with contextlib.AsyncExitStack() as stack:
                recorder = stack.enter_context(recording)
                await stack.enter_async_context(load)
                plan = load.plan.for_rank(self._place.rank)
                manifest = Manifest(plan) if options.manifest is not None else None
                self._progress.begin(plan.payload_bytes)
                with self._progress, Reference(plan) as reference, self._against(plan) as against:
                    looks = _Looks(reference if options.verify else None, manifest, against)
                    await self._consume(load, looks)
            report = looks.reported(load.report)
            if recorder is None:
                return report, manifest, {}
            return report, manifest, await self._in_thread(partial(self._recorded, report, recorder.samples))

    @contextlib.contextmanager
    def _against(self, plan: RankPlan) -> Iterator[Against | None]:
        """What checks against the manifest of the checkpoint, and its threads, if one was given."""
        if self._known is None or self._options.against is None:
            yield None
            return
        threads = ReadPool(THREADS, name="loader-crc")
        try:
            yield Against(self._known, self._options.against, plan, threads, checksum=self._options.checksum)
        finally:
            threads.stop()

    async def _consume(self, load: Load, looks: _Looks) -> None:
        """Takes every tensor and drops it after use: no more of them lives than what is being looked at."""

        async def take(name: str, value: torch.Tensor, spec: TensorSpec) -> None:
            if looks.is_quick(value):
                looks.look(name, value, spec)
            else:
                await self._in_thread(partial(looks.look, name, value, spec))
            self._progress.advance(value.nbytes)

        if looks.against is not None:
            await self._in_thread(looks.against.check_names)
        async for name, value in load:
            spec = load.spec(name)
            looks.begin(name, spec)
            if isinstance(value, RowSource):
                self._progress.rows_of(name)
                async for rows, own_spec in pieces(name, value, spec):
                    await take(name, rows, own_spec)
            else:
                await take(name, value, spec)
            self._progress.tensor_done()
            del value
