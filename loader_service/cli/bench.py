"""`bench`: measures this machine's limits and a load by turns, and says what bounds the load.

Every rank loads; the first rank of each node measures what its node gives, all at the same time, as they load, while
the others wait for them. Rounds alternate: load and limits, limits and load, so that a busy moment meets both.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from loader_service import logs
from loader_service.agreed import as_reported
from loader_service.agreement.node import node_name
from loader_service.cli import ranks
from loader_service.cli.bench_figures import Bench, Node, RankRound, Result
from loader_service.cli.bench_limits import LABELS, WITHIN_S, CacheState, Conditions, LimitBench, prepare_files
from loader_service.cli.checking import check_writable, write_text
from loader_service.cli.loads import load_of
from loader_service.cli.output import print_document
from loader_service.cli.plans import plan_of
from loader_service.cli.rank_process import Meeting, RankProcess, refused
from loader_service.cli.signals import interruptions
from loader_service.config.schema import ServiceConfig, check_world_size
from loader_service.config.yaml_file import config_from_dict
from loader_service.errors import ConfigError, LoadCancelledError, LoaderError
from loader_service.measuring.conditions import cached_share, condition_memory
from loader_service.measuring.limits import StoppedError
from loader_service.measuring.machine import this_machine
from loader_service.memory.process_cache import clear_weight_cache
from loader_service.planning.plan import LoadPlan
from loader_service.rows import RowSource
from loader_service.service import LoaderService
from loader_service.sizes import size_option
from loader_service.stream import Load
from loader_service.timeline import Recorder, Sample, shares, steps_of, timeline_of

log = logs.logger("loader_service.bench")

Form = Literal["owned", "batches"]

_BESIDE_BYTES = 64 << 20  # what a load has in memory beside its staging
_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What the command line said. `load` None: the file's only one."""

    target: Path
    load: str | None
    form: Form
    cache: CacheState
    rounds: int
    max_bytes: str
    html: Path | None
    as_json: bool
    debug: bool


def run_bench(options: BenchOptions) -> int:
    """Measures on this rank and prints what is due on it. Returns the exit code."""
    place = ranks.place_from()
    with interruptions(several_ranks=not place.alone) as signals:
        try:
            config, load = _checked(options, place)
            most_bytes = size_option("--max-bytes", options.max_bytes)
            if signals.first is not None:
                raise LoadCancelledError(f"interrupted by {signals.first.name}")
        except LoaderError as error:
            meeting = Meeting(ranks.REPORTS, ranks.REPORTS_SUFFIX)
            return asyncio.run(refused(options, place, meeting, error, signals))
        return asyncio.run(_BenchProcess(options, place, config, load, most_bytes).main(signals))


def _checked(options: BenchOptions, place: ranks.Place) -> tuple[ServiceConfig, str]:
    """The configuration and which of its loads, once everything is right that needs no other rank and no checkpoint."""
    if options.html is not None:
        check_writable(options.html, option="--html")
    if options.target.suffix == _SUFFIX or options.target.is_dir():
        if options.load is not None:
            raise ConfigError(f"--load: {options.target} is a checkpoint, which has no loads: give a YAML file")
        checkpoint = {"path": str(options.target.absolute())}
        return config_from_dict({"checkpoint": checkpoint, "loads": {"all": {}}}), "all"
    config, load = load_of(options.target, options.load)
    check_world_size(config, place.world_size, coords_given=False)
    return config, load


class _BenchProcess(RankProcess[Load]):
    """One rank's part of the measuring."""

    def __init__(
        self, options: BenchOptions, place: ranks.Place, config: ServiceConfig, load: str, most_bytes: int
    ) -> None:
        meeting = Meeting(ranks.REPORTS, ranks.REPORTS_SUFFIX, phase=None)
        super().__init__(options, place, meeting, config.agreement, load=load)
        self._options = options
        self._config = config
        self._load_name = load
        self._most_bytes = most_bytes
        self._others: Literal["gather", "load", "hear"] = "gather"  # what they wait in; or they hear of it anyway
        self._met = False  # whether all ranks have come once
        self._files: list[str] = []
        self._payload_bytes = 0
        self._stop = threading.Event()
        self._rounds: list[list[RankRound]] = []
        self._limits: LimitBench | None = None

    async def _work(self) -> None:
        try:
            await self._measure()
        except BaseException as error:
            self._stop_measuring()
            with contextlib.suppress(Exception):  # the cause is what is raised, not what befalls the telling
                await self._tell_waiting(error)
            raise

    async def _tell_waiting(self, error: BaseException) -> None:
        if self._others == "gather":
            await ranks.fail_reports(
                self._place, error, self._settings, waits_s=self._waits_s, on_final=self._note_final
            )
        elif self._others == "load":

            async def note(verdict: LoaderError | None) -> None:
                self._later_failure = verdict

            await ranks.tell_others(self._place, self._load_name, as_reported(error), note)

    def _stop_measuring(self) -> None:
        self._stop.set()
        if self._limits is not None:
            self._limits.stop()

    async def _measure(self) -> None:
        place, options = self._place, self._options
        plan = await self._in_thread(lambda: plan_of(self._config, self._load_name, place.world_size))
        self._files = sorted(_sizes(plan, [place.rank]))
        self._payload_bytes = plan.for_rank(place.rank).payload_bytes
        name = await self._in_thread(node_name)
        names = [told["node"] for told in await self._meet({"rank": place.rank, "node": name})]
        here = tuple(rank for rank, other in enumerate(names) if other == name)
        node = None
        if place.rank == here[0]:
            machine = await self._in_thread(lambda: this_machine(self._files))
            node = Node(here, machine, files_bytes=sum(_sizes(plan, here).values()))
        began_at = datetime.now().astimezone().isoformat(timespec="seconds")
        for number in range(options.rounds):
            log.info("round %d of %d", number + 1, options.rounds)
            if number % 2:
                await self._limits_once(number, node)
            await self._load_once()
            if number % 2 == 0:
                await self._limits_once(number, node)
        if node is not None and self._limits is not None:
            node = node.with_limits(self._limits)
        told = await self._meet(node.as_dict() if node is not None else {}, last=True)
        if place.rank == 0:
            path = _in_words(self._config.checkpoint_of(self._load_name).path)
            bench = Bench(path, began_at, self._load_name, options.form, options.cache)
            await self._show(bench.result(self._rounds, [Node.from_dict(each) for each in told if each]))

    # The limits

    async def _limits_once(self, number: int, node: Node | None) -> None:
        if node is None:
            return
        if self._limits is None:
            threads = sum(each.threads for each in self._rounds[0] if each.rank in node.ranks)
            conditions = Conditions(self._files, self._options.cache, threads, node.machine.cores, self._most_bytes)
            self._limits = await self._in_thread(lambda: LimitBench(conditions))
        limits = self._limits
        with contextlib.suppress(StoppedError):  # then this task is cancelled
            await self._in_thread(lambda: limits.round(number))

    # The load

    async def _load_once(self) -> None:
        """One load on all ranks, from a state of page cache and memory that all have prepared."""
        clear_weight_cache()
        cached = await self._in_thread(self._prepare)
        await self._meet({"rank": self._place.rank})
        self._others = "load"
        async with LoaderService(self._config, group=self._place.meeting or "solo") as service:
            self._load = load = service.open(self._load_name)
            self._others = "hear"
            with Recorder(lambda: load.counters) as recorder:
                async with load:
                    tables = await self._consume(load)
            self._others = "gather"
        own = self._round(load, recorder.samples, cached, tables)
        documents = await self._meet(own.as_dict())
        self._rounds.append([RankRound.from_dict(document) for document in documents])

    def _prepare(self) -> float | None:
        prepare_files(self._files, self._options.cache, self._stop)
        condition_memory(min(self._config.staging.capacity_bytes, self._payload_bytes) + _BESIDE_BYTES)
        return cached_share(self._files)

    async def _consume(self, load: Load) -> int:
        """Takes everything and keeps nothing. Returns how many host-resident tables were left out."""
        tables = 0
        if self._options.form == "batches":
            async for batch in load.batches():
                with batch:
                    pass
            return len(load.tables)
        async for _, value in load:
            tables += isinstance(value, RowSource)
            del value
        return tables

    def _round(self, load: Load, samples: Sequence[Sample], cached: float | None, tables: int) -> RankRound:
        report = load.report
        opened_s = sum(spent for name, spent in report.phases.items() if name not in ("read", "finish"))
        capacity_bytes = self._config.staging.capacity_bytes
        timeline = timeline_of(
            samples,
            rank=report.rank,
            phases=report.phases,
            capacity_bytes=capacity_bytes,
            steps=steps_of(report.world_size),
        )
        return RankRound.of(report, samples[-1].cpu_s, cached, shares(samples, opened_s), timeline, tables)

    # The other ranks

    @property
    def _waits_s(self) -> float:
        """Others may be at work for long before they come: at their limits, in two rounds one behind the other. Not
        before all have met: one that never comes is missed as soon as by a load."""
        limits_s = 2 * len(LABELS) * WITHIN_S if self._met else 0.0
        return max(self._settings.start_timeout_s, limits_s)

    async def _meet(self, own: dict[str, object], *, last: bool = False) -> list[dict[str, object]]:
        """Every rank's document, once all are here. After the `last` meeting nobody waits for this rank any more."""
        found = await ranks.gather(
            self._place,
            own,
            self._settings,
            waits_s=self._waits_s,
            on_begin=self._note_meeting,
            on_final=self._note_final,
        )
        self._others = "hear" if last else "gather"
        self._met = True
        return found

    def _note_meeting(self) -> None:
        self._others = "hear"

    # What came out

    async def _show(self, result: Result) -> None:
        if (html := self._options.html) is not None:
            from loader_service.cli.bench_page import page_of

            text = page_of(result)
            await self._in_thread(lambda: write_text(html, text, option="--html"))
        if self._options.as_json:
            print_document(result.as_dict())
        else:
            from loader_service.cli.bench_table import show_bench

            show_bench(result)


def _in_words(path: str | tuple[str, ...]) -> str:
    if isinstance(path, str):
        return path
    return path[0] if len(path) == 1 else f"{path[0]} and {len(path) - 1} more"


def _sizes(plan: LoadPlan, of_ranks: Sequence[int]) -> dict[str, int]:
    """Path -> bytes of the files that these ranks read of."""
    shards = plan.catalog.shards
    read = {shard for rank in of_ranks for shard in plan.for_rank(rank).extent_shard.tolist()}
    return {shards[i].path: shards[i].identity.size_bytes for i in sorted(read)}
