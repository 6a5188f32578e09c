"""What the growth benchmark measures, in a process of its own: `python -m benchmarks.growth_parts JSON`.

Each part runs on a thread beside an event loop with a ticker on it, as the service runs it. Times are processor time of
the process, which other processes of a busy machine do not add to. How long the loop stood still is counted so as well:
the lateness of a tick, but no more than the processor time that the process took meanwhile.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from benchmarks.agreement_simulated import Load, measure_records, records_of_load
from benchmarks.catalog import reading_threads
from benchmarks.growth_checkpoint import LEAST_TENSORS, growth_config, make_growth_checkpoint
from loader_service.checkpoint.catalog import Catalog
from loader_service.checkpoint.discovery import read_catalog
from loader_service.config.schema import ServiceConfig
from loader_service.planning.arenas import owned_units
from loader_service.planning.mesh import Mesh
from loader_service.planning.plan import LoadPlan, make_plan
from loader_service.planning.rank_plan import RankPlan
from loader_service.planning.shared_units import shared_slot_units
from loader_service.planning.sharing import NodeBlocks, node_blocks
from loader_service.planning.stripes import stripes
from loader_service.planning.units import slot_units
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage

T = TypeVar("T")

RANKS_A_NODE = 8
SLOT_BYTES = 16 << 20
TENSORS_A_UNIT = 256
TICK_S = 0.001
SETTLE_S = 0.02  # the loop's first ticks, before the work begins

CATALOG = "catalog"
PLAN_RULES = "plan, by rules"
RANK_WHOLE = "a rank's part, whole load"
RANK_RULES = "a rank's part, by rules"
PARTS = (
    CATALOG,
    "plan, whole load",
    PLAN_RULES,
    RANK_WHOLE,
    RANK_RULES,
    "what 8 ranks share",
    "stripes of 8 ranks",
    "units of slots",
    "units of shared slots",
    "units of owned tensors",
)


@dataclass(frozen=True, slots=True)
class Part:
    """One part, run once. `still_ms`: the longest that the event loop stood still meanwhile. `resident_bytes`: what it
    left; `peak_bytes`: the most meanwhile; both above what was there before it."""

    cpu_s: float
    still_ms: float
    resident_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """All parts, once, on a checkpoint of so many tensors with a plan for so many ranks."""

    tensors: int
    shards: int
    ranks: int
    parts: dict[str, Part]


@dataclass(frozen=True, slots=True)
class Job:
    """What one process measures. `folders` hold checkpoints; all but "agreement" take one. `parts` takes one number of
    ranks."""

    what: Literal["parts", "ranks", "agreement"]
    folders: list[str]
    ranks: list[int]
    rounds: int = 1


@dataclass(slots=True)
class _Ticker:
    """How late a callback comes that is due every millisecond."""

    still_s: float = 0.0

    async def tick(self) -> None:
        while True:
            due_s, used_s = time.perf_counter() + TICK_S, time.process_time()
            await asyncio.sleep(TICK_S)
            late_s = time.perf_counter() - due_s
            self.still_s = max(self.still_s, min(late_s, time.process_time() - used_s))


@dataclass(slots=True)
class Meter:
    """Runs parts and keeps what they took."""

    parts: dict[str, Part] = field(default_factory=dict)

    async def run(self, name: str, work: Callable[[], T]) -> T:
        ticker = _Ticker()
        ticking = asyncio.create_task(ticker.tick())
        await asyncio.sleep(SETTLE_S)
        ticker.still_s = 0.0
        found, cpu_s, memory_bytes = await asyncio.to_thread(_metered, work)
        await asyncio.sleep(TICK_S)
        ticking.cancel()
        self.parts[name] = Part(cpu_s, ticker.still_s * 1e3, *memory_bytes)
        return found


def _metered(work: Callable[[], T]) -> tuple[T, float, tuple[int, int]]:
    """What the work returns, its processor time, and the memory that it leaves and that it takes at most."""
    _forget_peak()
    before_bytes = _status_bytes("VmRSS")
    began_s = time.process_time()
    found = work()
    cpu_s = time.process_time() - began_s
    left_bytes, most_bytes = _status_bytes("VmRSS") - before_bytes, _status_bytes("VmHWM") - before_bytes
    return found, cpu_s, (left_bytes, max(0, most_bytes))


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel does not tell {key} of a process")


def _forget_peak() -> None:
    """The kernel counts the most resident memory anew from here."""
    Path("/proc/self/clear_refs").write_text("5")


def read_growth_catalog(folder: Path) -> Catalog:
    """Through the service's own discovery, reading, validating and joining."""
    storage = LocalStorage()
    handles = HandleCache(storage)
    with reading_threads() as pool:
        try:
            return read_catalog(str(folder), "advisory", handles=handles, storage=storage, threads=pool, retries=0)
        finally:
            handles.close()


def plan_of(made: tuple[ServiceConfig, Mesh], catalog: Catalog, load: str) -> LoadPlan:
    """The plan of a load of `growth_config` for all ranks."""
    config, mesh = made
    gap_bytes = config.reads.coalesce_gap_bytes
    return make_plan(catalog, load, config.loads[load], mesh, coalesce_gap_bytes=gap_bytes)


def rank_part(plan: LoadPlan, rank: int) -> RankPlan:
    """What an opening makes of a plan for its own rank."""
    part = plan.for_rank(rank).streamed
    assert part.digest
    return part


def _shared(plans: list[RankPlan]) -> NodeBlocks:
    blocks = node_blocks(plans, slot_bytes=SLOT_BYTES)
    assert blocks.digest
    return blocks


def _shared_by_node(plan: LoadPlan, ranks: int) -> tuple[list[RankPlan], NodeBlocks]:
    plans = [plan.for_rank(rank).streamed for rank in range(ranks)]
    return plans, _shared(plans)


def _count(items: Iterator[object]) -> int:
    return sum(1 for _ in items)


async def measure_parts(folder: Path, ranks: int) -> Run:
    """Every part once, the first ones' results being the later ones' input."""
    meter = Meter()
    made = growth_config(folder, ranks)
    catalog = await meter.run(CATALOG, lambda: read_growth_catalog(folder))
    whole = await meter.run("plan, whole load", lambda: plan_of(made, catalog, "whole"))
    rules = await meter.run(PLAN_RULES, lambda: plan_of(made, catalog, "parts"))
    own = await meter.run(RANK_WHOLE, lambda: rank_part(whole, 0))
    await meter.run(RANK_RULES, lambda: rank_part(rules, 0))
    here = min(ranks, RANKS_A_NODE)
    plans, blocks = await meter.run("what 8 ranks share", lambda: _shared_by_node(whole, here))
    cut = [rank_part(rules, rank) for rank in range(here)]
    await meter.run("stripes of 8 ranks", lambda: stripes(cut, ranks=here))
    most = TENSORS_A_UNIT
    slots = slot_units(own, slot_bytes=SLOT_BYTES, max_pieces=most)
    await meter.run("units of slots", lambda: _count(slots))
    shared = shared_slot_units(plans[0], blocks, slot_bytes=SLOT_BYTES, max_pieces=most)
    await meter.run("units of shared slots", lambda: _count(shared))
    owned = owned_units(own, unit_bytes=SLOT_BYTES, max_tensors=most)
    await meter.run("units of owned tensors", lambda: _count(owned))
    return Run(len(catalog), len(catalog.shards), ranks, meter.parts)


async def measure_ranks(folder: Path, ranks: list[int]) -> list[Run]:
    """What may depend on the number of ranks: plans by rules, on one catalog."""
    catalog = await asyncio.to_thread(read_growth_catalog, folder)
    return [await _measure_plan(folder, catalog, count) for count in ranks]


async def _measure_plan(folder: Path, catalog: Catalog, ranks: int) -> Run:
    meter = Meter()
    made = growth_config(folder, ranks)
    rules = await meter.run(PLAN_RULES, lambda: plan_of(made, catalog, "parts"))
    await meter.run(RANK_RULES, lambda: rank_part(rules, ranks - 1))
    return Run(len(catalog), len(catalog.shards), ranks, meter.parts)


def measure_agreement(folders: list[Path], ranks: list[int], rounds: int) -> list[Load]:
    """Simulated loads by rules, for each number of ranks and each checkpoint: all rounds."""
    records = {}
    for folder in folders:
        catalog = read_growth_catalog(folder)
        for count in ranks:
            made = growth_config(folder, count)
            records[count, len(catalog)] = records_of_load(made[0], plan_of(made, catalog, "parts"))
    return [load for loads in measure_records(records, rounds) for load in loads]


def _warm_up(ranks: int) -> None:
    """First uses: modules, caches, threads. They cost the same whatever the size."""
    with tempfile.TemporaryDirectory(prefix="loader-bench-") as temporary:
        folder = Path(temporary)
        make_growth_checkpoint(folder, LEAST_TENSORS)
        asyncio.run(measure_parts(folder, ranks))


def do(job: Job) -> Sequence[Run | Load]:
    """What the job finds, in this process."""
    if job.what == "agreement":
        return measure_agreement([Path(folder) for folder in job.folders], job.ranks, job.rounds)
    folder = Path(job.folders[0])
    _warm_up(job.ranks[0])
    gc.collect()
    gc.freeze()  # what the imports brought; each full collection would walk it
    try:
        if job.what == "ranks":
            return asyncio.run(measure_ranks(folder, job.ranks))
        return [asyncio.run(measure_parts(folder, job.ranks[0]))]
    finally:
        gc.unfreeze()


def main() -> None:
    """Prints the runs, or the loads, as JSON."""
    found = do(Job(**json.loads(sys.argv[1])))
    print(json.dumps([dataclasses.asdict(each) for each in found]), flush=True)
    os._exit(0)  # a million small objects need not be freed one by one


if __name__ == "__main__":
    main()
