"""A worker that starts again: beside a resident service, from the page cache, and from the disk.

Every start is a fresh process, in another order each round, with page cache and memory in a known state; imports do not
count. From entering the service on: until the load is open, until the consumer has its first tensor, until it has all
of them and has looked at a byte of each page.
The resident service runs beside the attached ones alone, and is ready before they start.

    python -m benchmarks.restart --rounds 5 --folder /fast/disk
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import loader_service as ls
from benchmarks.common import (
    GIB,
    MIB,
    Rounds,
    add_common_arguments,
    condition_memory,
    drop_from_cache,
    files_of,
    layered_tensors,
    machine,
    make_checkpoint,
    print_table,
    read_into_cache,
    working_folder,
)
from benchmarks.draft_sides import disk_bytes
from benchmarks.host_tables import scaled_bytes

GIBS, ROUNDS, SHARDS = 3.0, 5, 4
PAGE_BYTES = 4096
CAPACITY_BYTES = 256 * MIB
MOST_ATTACH_S = 1.0
START_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Start:
    """What one process does. `cache`: "cold" or "warm"; `attach`: beside a resident service, page cache cold."""

    label: str
    form: str
    cache: str
    attach: bool
    folder: str


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds from entering the service on."""

    open_s: float
    first_s: float
    all_s: float
    cpu_s: float
    disk_bytes: int
    handed_bytes: int
    read_bytes: int


@dataclass(slots=True)
class Series(Rounds):
    """All rounds of one start."""

    start: Start
    runs: list[Run] = field(default_factory=list)

    @property
    def measured(self) -> Sequence[Run]:
        return self.runs


def starts(folder: Path) -> list[Start]:
    found = []
    for form in ("owned", "batches"):
        found.append(Start(f"{form}, attached", form, "cold", True, str(folder)))
        found += [Start(f"{form}, {cache}", form, cache, False, str(folder)) for cache in ("warm", "cold")]
    return found


def config_of(folder: str) -> dict[str, object]:
    return {
        "checkpoint": {"path": folder},
        "loads": {"all": {}},
        "staging": {"capacity_bytes": CAPACITY_BYTES},
        "serve": {"keep": ["all"], "socket": f"@loader-service-bench-{folder[-60:]}", "if_absent": "error"},
    }


# In the process of one start


async def start(this: Start) -> Run:
    config = ls.config_from_dict(config_of(this.folder))
    disk, cpu_s, began_s = disk_bytes(), time.process_time(), time.perf_counter()
    first_s = 0.0
    async with ls.LoaderService(config, "solo", attach=this.attach) as service, service.open("all") as load:
        opened_s = time.perf_counter()
        kept: list[torch.Tensor] = []
        async for tensors in _items(load, this.form):
            first_s = first_s or time.perf_counter()
            for tensor in tensors:  # memory that is mapped and not there yet is no tensor that one can use
                tensor.flatten().view(torch.uint8)[::PAGE_BYTES].sum()
            if this.form == "owned":
                kept += tensors
        all_s = time.perf_counter()
    report = load.report
    return Run(
        opened_s - began_s,
        first_s - began_s,
        all_s - began_s,
        time.process_time() - cpu_s,
        disk_bytes() - disk,
        report.payload_bytes,
        report.read_bytes,
    )


async def _items(load: ls.Load, form: str) -> AsyncIterator[list[torch.Tensor]]:
    """What the consumer gets at once; a batch is left when the next one is asked for."""
    if form == "owned":
        async for _, tensor in load:
            yield [tensor]
        return
    async for batch in load.batches():
        with batch:
            yield [piece.tensor for piece in batch]


# Rounds


@contextlib.contextmanager
def resident_service(folder: Path) -> Iterator[None]:
    """One that is ready, in a process of its own."""
    config = folder / "serve.json"
    config.write_text(json.dumps(config_of(str(folder))))  # JSON is YAML
    command = [sys.executable, "-m", "loader_service", "serve", str(config), "--json", "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_root()) as process:
        assert process.stdout is not None
        document = json.loads(process.stdout.readline() or "{}")
        try:
            if not document.get("ready"):
                raise RuntimeError(f"the resident service did not get ready: {document}")
            yield
        finally:
            process.terminate()


def measure(each: Series) -> None:
    """One start, by a fresh process."""
    files = files_of(Path(each.start.folder))
    if each.start.cache == "warm":
        read_into_cache(files)
    else:
        drop_from_cache(files)
    command = [sys.executable, "-m", "benchmarks.restart", "--start", json.dumps(asdict(each.start))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, cwd=_root(), check=False)
    if done.returncode:
        raise RuntimeError(f"{each.start.label} failed with {done.returncode}:\n{done.stderr}")
    each.runs.append(Run(**json.loads(done.stdout.splitlines()[-1])))


def _root() -> Path:
    return Path(__file__).resolve().parent.parent


def run_rounds(all_series: Sequence[Series], rounds: int, *, seed: int = 0) -> None:
    """Attached starts come together within a round: a service that keeps everything takes memory from the others."""
    order = random.Random(seed)
    for number in range(rounds):
        began_s = time.perf_counter()
        attached = [each for each in all_series if each.start.attach]
        alone = [each for each in all_series if not each.start.attach]
        groups = [(True, attached), (False, alone)]
        for beside, group in order.sample(groups, len(groups)):
            folder = Path(all_series[0].start.folder)
            with resident_service(folder) if beside else contextlib.nullcontext():
                for each in order.sample(group, len(group)):
                    measure(each)
        print(f"round {number + 1} of {rounds}: {time.perf_counter() - began_s:.0f} s", file=sys.stderr)


# What it says


def print_starts(all_series: Sequence[Series]) -> None:
    columns = ("", "open s", "first tensor s", "all s", "GiB/s", "of cold", "MiB from disk", "CPU s")
    cold_s = {each.start.form: each.median("all_s") for each in all_series if each.start.label.endswith("cold")}
    rows = [
        [
            each.start.label,
            each.spread("open_s", 3),
            each.spread("first_s", 3),
            each.spread("all_s", 3),
            f"{each.median('handed_bytes') / GIB / each.median('all_s'):.2f}",
            f"{each.median('all_s') / cold_s[each.start.form]:.3f} x",
            f"{each.median('disk_bytes') / MIB:.0f}",
            f"{each.median('cpu_s'):.2f}",
        ]
        for each in all_series
    ]
    print_table(columns, rows)


def missed(all_series: Sequence[Series]) -> list[str]:
    """What attached starts must not do: read, or be open only after a second."""
    found = []
    for each in all_series:
        if each.start.attach:
            if max(each.values("read_bytes")) or max(each.values("disk_bytes")) > MIB:
                found.append(f"{each.start.label}: something was read")
            if each.median("first_s") > MOST_ATTACH_S:
                found.append(f"{each.start.label}: the first tensor after {each.median('first_s'):.2f} s")
    return found


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 where an attached worker has read, or was not there within a second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, rounds=ROUNDS)
    parser.add_argument("--gib", type=float, default=GIBS, help=f"the checkpoint (default {GIBS:g})")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.start:
        this = Start(**json.loads(arguments.start))
        condition_memory(int(arguments.gib * GIB) if this.form == "owned" and not this.attach else CAPACITY_BYTES)
        print(json.dumps(asdict(asyncio.run(start(this)))))
        return 0
    with working_folder(arguments.folder) as parent:
        folder = parent / f"loader-bench-stream-{arguments.gib:g}"
        wanted_bytes, note = scaled_bytes(int(arguments.gib * GIB), folder)
        tensors = layered_tensors(wanted_bytes)
        payload_bytes = make_checkpoint(folder, tensors, SHARDS)
        all_series = [Series(each) for each in starts(folder)]
        run_rounds(all_series, arguments.rounds)
    found = missed(all_series)
    text = f"{payload_bytes / GIB:.2f} GiB ({note}) in {len(tensors):,} tensors and {SHARDS} shards"
    if arguments.json:
        rounds = [{"start": asdict(each.start), "rounds": [asdict(run) for run in each.runs]} for each in all_series]
        print(json.dumps({"machine": machine(), "checkpoint": text, "missed": found, "starts": rounds}, indent=2))
        return 1 if found else 0
    print(f"{arguments.rounds} rounds, staging {CAPACITY_BYTES / MIB:.0f} MiB; {machine()}\n\n{text}\n")
    print_starts(all_series)
    print("\n" + ("\n".join(f"MISSED: {each}" for each in found) or "attached: open within a second, nothing read"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
