"""Loads a checkpoint into the memory of a CUDA device, warm and cold, against limits and safetensors' own ways.

The loader's batches are copied without waiting into tensors that lie ready on the device, from pinned and from pageable
staging memory; `into()` fills such tensors by itself; owned tensors are copied with `.to()`, one by one. The peers are
`load_file` and `safe_open` of safetensors with the device given. The limits move as many bytes and keep none of them:
copies to the device from one pinned and from one pageable buffer, and a ring of reading threads that copies nothing.

All sides run in one process, in interleaved rounds in another order each. Before the first, host memory is conditioned
and device memory given to torch's allocator, so that no side pays for it. After each, every byte on the device is
compared with what safetensors loads to the CPU, which was copied there before: the device needs room for three
payloads.

    python -m benchmarks.device --rounds 5 --folder /fast/disk
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks import limits
from benchmarks.common import (
    GIB,
    MIB,
    add_common_arguments,
    cached_share,
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
from loader_service import LoaderService, config_from_dict

SHARDS = 4
COPY_BYTES = 16 * MIB  # as large as the loader's batches
COPIED_FROM_BYTES = 256 * MIB
DEVICE = "cuda"
NO_DEVICE = 2  # the exit code

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class Bench:
    """What all sides share: the files, the device's tensors to fill, and the right bytes."""

    folder: Path
    payload_bytes: int
    capacity_bytes: int
    threads: int | str
    params: Tensors = field(default_factory=dict)
    right: Tensors = field(default_factory=dict)
    pinned: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    pageable: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def files(self) -> list[Path]:
        return files_of(self.folder)

    def service(self, pin: str) -> LoaderService:
        config = {
            "checkpoint": {"path": str(self.folder)},
            "loads": {"all": {}},
            "reads": {"threads": self.threads},
            "staging": {"capacity_bytes": self.capacity_bytes, "pin": pin},
        }
        return LoaderService(config_from_dict(config), "solo")

    def prepare(self) -> None:
        condition_memory(2 * self.payload_bytes + self.capacity_bytes)
        for path in self.files:
            with safe_open(path, framework="pt", device="cpu") as file:
                self.right |= {name: file.get_tensor(name).clone().to(DEVICE) for name in file.offset_keys()}
        self.params = {name: torch.empty_like(tensor) for name, tensor in self.right.items()}
        self.pinned = torch.zeros(COPIED_FROM_BYTES, dtype=torch.uint8, pin_memory=True)
        self.pageable = torch.ones(COPIED_FROM_BYTES, dtype=torch.uint8)
        # What the other sides will allocate on the device: from now on torch's allocator has it.
        spare = torch.empty(self.payload_bytes + self.payload_bytes // 8, dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()
        del spare

    def clear(self) -> None:
        """Fills the tensors on the device with bytes that a forgotten piece would leave behind."""
        for tensor in self.params.values():
            tensor.view(torch.uint8).fill_(0xA5)
        torch.cuda.synchronize()


Work = Callable[[Bench], Tensors | None]  # gives what it has put on the device; None: a limit


def _batches(bench: Bench, pin: str) -> Tensors:
    async def work() -> None:
        async with bench.service(pin) as service, service.open("all") as load:
            async for batch in load.batches():
                with batch:
                    for piece in batch:
                        bench.params[piece.name][piece.index].copy_(piece.tensor, non_blocking=True)

    asyncio.run(work())
    return bench.params


def _into(bench: Bench, pin: str) -> Tensors:
    async def work() -> None:
        async with bench.service(pin) as service, service.open("all") as load:
            await load.into(bench.params)

    asyncio.run(work())
    return bench.params


def batches_pinned(bench: Bench) -> Tensors:
    return _batches(bench, "required")


def batches_pageable(bench: Bench) -> Tensors:
    return _batches(bench, "never")


def into_pinned(bench: Bench) -> Tensors:
    return _into(bench, "required")


def into_pageable(bench: Bench) -> Tensors:
    return _into(bench, "never")


def owned(bench: Bench) -> Tensors:
    async def work() -> Tensors:
        async with bench.service("never") as service, service.open("all") as load:
            return {name: tensor.to(DEVICE) async for name, tensor in load}

    return asyncio.run(work())


def peer_load_file(bench: Bench) -> Tensors:
    found: Tensors = {}
    for path in bench.files:
        found |= load_file(path, device=DEVICE)
    return found


def peer_safe_open(bench: Bench) -> Tensors:
    found: Tensors = {}
    for path in bench.files:
        with safe_open(path, framework="pt", device=DEVICE) as file:
            found |= {name: file.get_tensor(name) for name in file.offset_keys()}
    return found


def _copies(source: torch.Tensor, nbytes: int) -> None:
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=DEVICE)
    for start in range(0, nbytes, COPY_BYTES):
        part = source[start % COPIED_FROM_BYTES :][: min(COPY_BYTES, nbytes - start)]
        target[: len(part)].copy_(part, non_blocking=True)


def copies_pinned(bench: Bench) -> None:
    _copies(bench.pinned, bench.payload_bytes)


def copies_pageable(bench: Bench) -> None:
    _copies(bench.pageable, bench.payload_bytes)


def ring_buffered(bench: Bench) -> None:
    limits.read_buffered(bench.files)


def ring_direct(bench: Bench) -> None:
    limits.read_direct(bench.files)


PEER = "load_file(device=cuda)"
DIRECT = "limit: O_DIRECT ring"
SIDES: dict[str, Work] = {
    "batches, pinned": batches_pinned,
    "batches, pageable": batches_pageable,
    "into(), pinned": into_pinned,
    "into(), pageable": into_pageable,
    "owned, then .to(cuda)": owned,
    PEER: peer_load_file,
    "safe_open(device=cuda)": peer_safe_open,
}
COPIES: dict[str, Work] = {"limit: pinned copies": copies_pinned, "limit: pageable copies": copies_pageable}
RINGS: dict[str, Work] = {"limit: buffered ring": ring_buffered, DIRECT: ring_direct}
ALL = SIDES | COPIES | RINGS


@dataclass(frozen=True, slots=True)
class Run:
    """One round of one side."""

    seconds: float
    cpu_s: float
    cached_before: float | None


@dataclass(slots=True)
class Series:
    """All rounds of one side in one state of the page cache."""

    label: str
    cache: str
    payload_bytes: int
    runs: list[Run] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # names of tensors that had other bytes on the device

    @property
    def speeds(self) -> list[float]:
        """GiB/s, by round."""
        return [self.payload_bytes / GIB / run.seconds for run in self.runs]

    @property
    def cpu_s_per_gib(self) -> float:
        return statistics.median(run.cpu_s for run in self.runs) / (self.payload_bytes / GIB)

    def as_dict(self) -> dict[str, object]:
        medians = {"gib_per_s": statistics.median(self.speeds), "cpu_s_per_gib": self.cpu_s_per_gib}
        rounds = [asdict(run) for run in self.runs]
        return {"label": self.label, "cache": self.cache, "medians": medians, "wrong": self.wrong, "rounds": rounds}


def measure(bench: Bench, series: Series) -> None:
    """Brings the page cache into its state, runs the side once, and compares what it put on the device."""
    (drop_from_cache if series.cache == "cold" else read_into_cache)(bench.files)
    cached = cached_share(bench.files)
    if cached is not None and (cached > 0.01 if series.cache == "cold" else cached < 0.99):
        print(f"{series.cache}, but {cached:.1%} of the files is cached", file=sys.stderr)
    bench.clear()
    gc.collect()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    found = ALL[series.label](bench)
    torch.cuda.synchronize()
    series.runs.append(Run(time.perf_counter() - began_s, time.process_time() - began_cpu_s, cached))
    if found is not None:
        series.wrong += differences(found, bench.right)


def differences(found: Tensors, right: Tensors) -> list[str]:
    """Names whose bytes on the device are not the right ones, or that are missing or too many."""
    wrong = sorted(found.keys() ^ right.keys())
    for name in found.keys() & right.keys():
        # As integers: random bytes are NaN here and there, which nothing equals.
        mine, wanted = found[name].view(torch.int16), right[name].view(torch.int16)
        if not (mine.device.type == DEVICE and mine.shape == wanted.shape and torch.equal(mine, wanted)):
            wrong.append(name)
    return wrong


def run_rounds(bench: Bench, caches: list[str], rounds: int) -> list[Series]:
    """Cold sides, then warm ones, each time in another order."""
    groups = [[Series(label, cache, bench.payload_bytes) for label in labels_of(bench, cache)] for cache in caches]
    order = random.Random(0)
    for number in range(rounds):
        began_s = time.perf_counter()
        for each in (each for group in groups for each in order.sample(group, len(group))):
            measure(bench, each)
        print(f"round {number + 1} of {rounds}: {time.perf_counter() - began_s:.0f} s", file=sys.stderr, flush=True)
    return [each for group in groups for each in group]


def labels_of(bench: Bench, cache: str) -> list[str]:
    """Copies are the same whatever is cached, but each table has its own; direct reads do not use what is cached."""
    direct = cache == "cold" and limits.can_read_direct(bench.files[0])
    return [label for label in ALL if direct or label != DIRECT]


def limit_of(group: list[Series]) -> float:
    """GiB/s: reading and copying can overlap, so that the slower of the two, each at its best, is the limit."""
    by_label = {each.label: statistics.median(each.speeds) for each in group}
    reading = max(speed for label, speed in by_label.items() if label in RINGS)
    return min(reading, by_label["limit: pinned copies"])


def print_results(series: list[Series]) -> None:
    for cache in dict.fromkeys(each.cache for each in series):
        group = [each for each in series if each.cache == cache]
        limit = limit_of(group)
        peer = next(statistics.median(each.speeds) for each in group if each.label == PEER)
        rows = []
        for each in group:
            speed = statistics.median(each.speeds)
            spread = f"{speed:.2f} ({min(each.speeds):.2f}-{max(each.speeds):.2f})"
            rows.append([each.label, spread, f"{speed / limit:.0%}", f"{speed / peer:.1f} x"])
            rows[-1].append(f"{each.cpu_s_per_gib:.2f}")
        print(f"\n{cache}\n")
        print_table(("", "GiB/s", "of limit", "of load_file", "CPU s/GiB"), rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, rounds=5)
    parser.add_argument("--gib", type=float, default=8.0, help="payload of the checkpoint in GiB (default 8)")
    parser.add_argument("--capacity-mib", type=int, default=256, help="staging.capacity_bytes in MiB (default 256)")
    parser.add_argument("--threads", type=int, help="reads.threads (default auto)")
    parser.add_argument("--cache", choices=("cold", "warm"), help="only this state of the page cache (default: both)")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks.device needs a CUDA device, and torch sees none here", file=sys.stderr)
        return NO_DEVICE
    with working_folder(arguments.folder) as parent:
        folder = parent / f"loader-bench-stream-{arguments.gib:g}"
        tensors = layered_tensors(int(arguments.gib * GIB))
        payload_bytes = make_checkpoint(folder, tensors, SHARDS)
        bench = Bench(folder, payload_bytes, arguments.capacity_mib * MIB, arguments.threads or "auto")
        bench.prepare()
        caches = [arguments.cache] if arguments.cache else ["cold", "warm"]
        series = run_rounds(bench, caches, arguments.rounds)
    wrong = [each for each in series if each.wrong]
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {machine()}"
    if arguments.json:
        document = {"machine": where, "rounds": arguments.rounds, "payload_bytes": payload_bytes}
        document |= {"tensors": len(tensors), "series": [each.as_dict() for each in series]}
        print(json.dumps(document, indent=2))
    else:
        print(f"{payload_bytes / GIB:.2f} GiB in {len(tensors)} tensors and {SHARDS} shards, ", end="")
        print(f"staging {arguments.capacity_mib} MiB, {arguments.rounds} rounds; {where}")
        print_results(series)
        outcome = "the CPU's, on every side in every round" if not wrong else f"WRONG: {[e.label for e in wrong]}"
        print(f"\nbytes on the device: {outcome}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
