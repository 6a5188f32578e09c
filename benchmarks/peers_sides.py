"""One side of the peers' benchmark in a process of its own: `python -m benchmarks.peers_sides JSON`.

Needs nothing but torch and what the side itself imports, so that the peers' environment can run it. It writes lines of
JSON: that it is ready, then, when a line on its standard input says so, what came out.

As in `benchmarks.sides` there is a caller's event loop with a ticker on it. The loader is consumed on that loop, what
blocks runs in a thread beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.peers_works import Loaded, Request

READY = "ready"
TICK_S = 0.001
SETTLE_S = 0.05  # the loop's first ticks, before the work begins
PACKAGES = ("torch", "safetensors", "fastsafetensors", "runai-model-streamer", "unifiedefficientloader")

Load = Callable[[], Loaded | int | Awaitable[Loaded]]


@dataclass(frozen=True, slots=True)
class Result:
    """What came out of one run. Memory is private memory: what the page cache holds of mapped files is not in it."""

    seconds: float
    cpu_s: float  # user and system, of all threads and of processes that have ended
    payload_bytes: int
    tensors: int
    peak_bytes: int  # most of (private memory - at the start), looked at every tick
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    versions: dict[str, str]
    cached_before: float | None = None
    conditioned_bytes: int = 0

    @property
    def gib_per_s(self) -> float:
        return self.payload_bytes / (1 << 30) / self.seconds

    @property
    def cpu_s_per_gib(self) -> float:
        return self.cpu_s / (self.payload_bytes / (1 << 30))

    @property
    def above_bytes(self) -> int:
        return self.peak_bytes - self.payload_bytes


@dataclass(slots=True)
class Meter:
    """Ticks of the loop: how late each came, and the private memory that there was."""

    statm: int
    lags_s: list[float] = field(default_factory=list)
    most_bytes: int = 0

    def look(self) -> int:
        _, resident, shared, *_ = os.pread(self.statm, 128, 0).split()
        nbytes = (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")
        self.most_bytes = max(self.most_bytes, nbytes)
        return nbytes

    async def tick(self) -> None:
        while True:
            due_s = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self.lags_s.append(max(0.0, time.perf_counter() - due_s))
            self.look()


def prepared(request: Request) -> Load:
    """Imports what the side needs; what it returns is to be timed."""
    module, name = request.work.split(".")
    load = getattr(importlib.import_module(f"benchmarks.{module}"), name)(request)
    return cast("Load", load)


async def _loaded(load: Load) -> Loaded | int:
    if inspect.iscoroutinefunction(load):
        return cast("Loaded", await load())
    return await asyncio.to_thread(cast("Callable[[], Loaded | int]", load))


async def _measured(load: Load, meter: Meter) -> tuple[Loaded | int, float, float, int]:
    """(what was loaded, seconds, processor time, private memory at the start)."""
    ticker = asyncio.create_task(meter.tick())
    await asyncio.sleep(SETTLE_S)
    meter.lags_s.clear()
    meter.most_bytes = 0
    start_bytes = meter.look()
    began_s, began_cpu_s = time.perf_counter(), _cpu_s()
    loaded = await _loaded(load)
    seconds, cpu_s = time.perf_counter() - began_s, _cpu_s() - began_cpu_s
    meter.look()
    ticker.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await ticker
    return loaded, seconds, cpu_s, start_bytes


def measure(load: Load) -> Result:
    """Runs the side once. What has been imported is out of the garbage collector's rounds, for all sides alike."""
    gc.collect()
    gc.freeze()
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        meter = Meter(statm)
        loaded, seconds, cpu_s, start_bytes = asyncio.run(_measured(load, meter))
    finally:
        gc.unfreeze()
        os.close(statm)
    lags_ms = sorted(lag * 1e3 for lag in meter.lags_s) or [0.0]  # over before the first tick
    nbytes = loaded if isinstance(loaded, int) else sum(tensor.nbytes for tensor in loaded.values())
    return Result(
        seconds=seconds,
        cpu_s=cpu_s,
        payload_bytes=nbytes,
        tensors=1 if isinstance(loaded, int) else len(loaded),
        peak_bytes=meter.most_bytes - start_bytes,
        lag_p50_ms=_percentile(lags_ms, 0.5),
        lag_p99_ms=_percentile(lags_ms, 0.99),
        lag_max_ms=lags_ms[-1],
        versions=versions(),
    )


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def versions() -> dict[str, str]:
    """Of the peers that this process could import."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# Checking


def digests_of(loaded: Loaded, files: tuple[str, ...]) -> dict[str, str]:
    """For each name: type, shape, where it lies, and a hash of its bytes."""
    mapped = _mapped(files)
    return {name: _digest(tensor, mapped) for name, tensor in loaded.items()}


def _digest(tensor: torch.Tensor, mapped: list[tuple[int, int]]) -> str:
    address = tensor.data_ptr()
    where = str(tensor.device.type)
    if any(start <= address < stop for start, stop in mapped):
        where = "a mapped file"
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{tensor.dtype} {tuple(tensor.shape)} in {where}, {hashlib.sha256(content).hexdigest()}"


def _mapped(files: tuple[str, ...]) -> list[tuple[int, int]]:
    """The addresses at which this process has those files mapped."""
    found = []
    names = {os.path.realpath(path) for path in files}
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, _, *path = line.split(maxsplit=5)
        if path and path[0] in names:
            start, stop = addresses.split("-")
            found.append((int(start, 16), int(stop, 16)))
    return found


def check(load: Load, request: Request) -> None:
    """Loads once, untimed, and writes down what was handed over."""
    loaded = asyncio.run(_loaded(load))
    if not isinstance(loaded, int):
        Path(request.digests).write_text(json.dumps(digests_of(loaded, request.files)))


def main(text: str) -> None:
    # What a peer prints goes to standard error: here only lines of JSON are written.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(value: Any) -> None:
        channel.write(json.dumps(value) + "\n")
        channel.flush()

    document = json.loads(text)
    request = Request(**document | {"files": tuple(document["files"])})
    load = prepared(request)
    tell(READY)
    sys.stdin.readline()
    if request.digests:
        check(load, request)
        tell(None)
    else:
        tell(dataclasses.asdict(measure(load)))


if __name__ == "__main__":
    main(sys.argv[1])
