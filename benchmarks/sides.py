"""The measured sides, each run in a process of its own by common.run_side: `python -m benchmarks.sides JSON`.

Every side runs under a caller's event loop with a ticker on it. Loader sides are consumed on that loop; blocking sides
(the limits and the peer) run in a thread beside it, as a caller with an event loop would have to call them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import safetensors
import torch
import uvloop

from benchmarks import limits
from benchmarks.common import Outcome, Side, cached_share, condition_memory, drop_from_cache, files_of, read_into_cache
from loader_service import LoaderService, ServiceConfig, config_from_dict

TICK_S = 0.001
YIELD_AFTER_S = 0.002
SETTLE_S = 0.05  # the loop's first ticks, before the work begins


@dataclass(slots=True)
class Meter:
    """What a side tells while it runs: what it delivered, and what of that the consumer still holds."""

    statm: int
    delivered_bytes: int = 0
    held_bytes: int = 0
    tensors: int = 0
    start_bytes: int = 0
    above_bytes: int = 0
    lags_s: list[float] = field(default_factory=list)
    opening_lag_s: float = 0.0
    kept: list[torch.Tensor] = field(default_factory=list)

    def resident_bytes(self) -> int:
        return int(os.pread(self.statm, 128, 0).split()[1]) * os.sysconf("SC_PAGESIZE")

    def opened(self) -> None:
        """Headers are read and the plan is made: from here on it streams."""
        self.opening_lag_s = max(self.lags_s, default=0.0)
        self.lags_s.clear()

    def deliver(self, nbytes: int) -> None:
        self.tensors += 1
        self.delivered_bytes += nbytes

    async def tick(self) -> None:
        """A callback that is due every millisecond: how late it comes is what everything else on the loop suffers."""
        while True:
            due_s = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self.lags_s.append(max(0.0, time.perf_counter() - due_s))
            self.above_bytes = max(self.above_bytes, self.resident_bytes() - self.start_bytes - self.held_bytes)


Work = Callable[[Side, Meter], Awaitable[None]]


def _config(side: Side) -> ServiceConfig:
    return config_from_dict(
        {
            "checkpoint": {"path": side.folder},
            "loads": {"all": {}},
            "staging": {"capacity_bytes": side.capacity_bytes},
        }
    )


async def owned_kept(side: Side, meter: Meter) -> None:
    async with LoaderService(_config(side), "solo") as service, service.open("all") as load:
        meter.opened()
        async for _, tensor in load:
            meter.deliver(tensor.nbytes)
            meter.held_bytes += tensor.nbytes
            meter.kept.append(tensor)


async def owned_dropped(side: Side, meter: Meter) -> None:
    async with LoaderService(_config(side), "solo") as service, service.open("all") as load:
        meter.opened()
        async for _, tensor in load:
            meter.deliver(tensor.nbytes)
            meter.held_bytes = tensor.nbytes  # the loop's variable holds it until the next one is there


async def batches(side: Side, meter: Meter) -> None:
    yielded_s = time.perf_counter()
    async with LoaderService(_config(side), "solo") as service, service.open("all") as load:
        meter.opened()
        async for batch in load.batches():
            with batch:
                for piece in batch:
                    meter.deliver(piece.tensor.nbytes)
                    # A batch may have thousands of pieces: what is done with them is the caller's own burden.
                    if time.perf_counter() - yielded_s > YIELD_AFTER_S:
                        await asyncio.sleep(0)
                        yielded_s = time.perf_counter()


async def safetensors_cloned(side: Side, meter: Meter) -> None:
    def load() -> None:
        for path in files_of(Path(side.folder)):
            with safetensors.safe_open(path, framework="pt", device="cpu") as file:
                for name in file.offset_keys():
                    tensor = file.get_tensor(name).clone()
                    meter.deliver(tensor.nbytes)
                    meter.held_bytes += tensor.nbytes
                    meter.kept.append(tensor)

    await asyncio.to_thread(load)


async def ring_direct(side: Side, meter: Meter) -> None:
    meter.delivered_bytes = await asyncio.to_thread(limits.read_direct, files_of(Path(side.folder)))
    meter.tensors = 1


async def ring_buffered(side: Side, meter: Meter) -> None:
    meter.delivered_bytes = await asyncio.to_thread(limits.read_buffered, files_of(Path(side.folder)))
    meter.tensors = 1


async def idle(side: Side, meter: Meter) -> None:  # noqa: ARG001 - as the others
    """Nothing but the ticker: how late ticks come on this machine anyway."""
    await asyncio.sleep(1.0)
    meter.deliver(1)


SIDES: dict[str, Work] = {
    work.__name__: work
    for work in (owned_kept, owned_dropped, batches, safetensors_cloned, ring_direct, ring_buffered, idle)
}


async def _measured(side: Side, meter: Meter) -> tuple[float, float]:
    ticker = asyncio.create_task(meter.tick())
    await asyncio.sleep(SETTLE_S)
    meter.lags_s.clear()
    meter.above_bytes = 0
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    await SIDES[side.work](side, meter)
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    ticker.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await ticker
    return seconds, cpu_s


def measure(side: Side) -> Outcome:
    """Prepares cache and memory, then runs the side once in this process."""
    files = files_of(Path(side.folder))
    (drop_from_cache if side.cache == "cold" else read_into_cache)(files)
    cached = cached_share(files)
    if cached is not None and (cached > 0.01 if side.cache == "cold" else cached < 0.99):
        print(f"{side.cache}, but {cached:.1%} of the files is cached", file=sys.stderr)
    conditioned_bytes = condition_memory(side.condition_bytes)
    gc.collect()
    if side.freeze:
        gc.freeze()
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    meter = Meter(statm)
    _reset_peak()
    meter.start_bytes = meter.resident_bytes()
    factory = uvloop.new_event_loop if side.loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        seconds, cpu_s = runner.run(_measured(side, meter))
    gc.unfreeze()
    os.close(statm)
    lags_ms = sorted(lag * 1e3 for lag in meter.lags_s) or [0.0]  # over before the first tick
    return Outcome(
        seconds=seconds,
        cpu_s=cpu_s,
        payload_bytes=meter.delivered_bytes,
        tensors=meter.tensors,
        lag_open_ms=meter.opening_lag_s * 1e3,
        lag_p50_ms=_percentile(lags_ms, 0.5),
        lag_p99_ms=_percentile(lags_ms, 0.99),
        lag_max_ms=lags_ms[-1],
        above_bytes=meter.above_bytes,
        peak_bytes=_peak_bytes() - meter.start_bytes,
        conditioned_bytes=conditioned_bytes,
        cached_before=cached,
    )


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell the peak of resident memory")


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(measure(Side(**json.loads(sys.argv[1]))))))
