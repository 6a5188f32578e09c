"""Streams a checkpoint of a few GiB, cold and warm, as owned tensors and as batches, against limits and a peer.

Each side runs in a process of its own, after the page cache and memory were brought into a known state, in interleaved
rounds. The limits keep nothing: a few recycled huge-page buffers that all bytes pass through, past the page cache
(O_DIRECT) and through it. The peer is safetensors' own `safe_open`, each tensor cloned so that it owns its memory.

    python -m benchmarks.stream --rounds 5 --folder /fast/disk
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.common import (
    GIB,
    MIB,
    Series,
    Side,
    add_common_arguments,
    layered_tensors,
    machine,
    make_checkpoint,
    print_table,
    run_rounds,
    working_folder,
)

SHARDS = 4
MAX_LAG_P99_MS = 20.0
MAX_ABOVE_CAPACITY_BYTES = 64 * MIB
LOADER = {
    "owned, kept": "owned_kept",
    "owned, each dropped": "owned_dropped",
    "batches": "batches",
}
LIMITS = {"limit: O_DIRECT ring": "ring_direct", "limit: buffered ring": "ring_buffered"}
PEER = {"safe_open + clone": "safetensors_cloned"}


def make_sides(folder: Path, payload_bytes: int, capacity_bytes: int, caches: list[str]) -> list[Side]:
    """Every side of every cache state: the loader under both event loops, the others under one."""
    # Tensors that are kept, the page cache's copy of the files, and what is staged.
    condition_bytes = 2 * payload_bytes + capacity_bytes

    def side(label: str, work: str, cache: str, loop: str = "asyncio") -> Side:
        return Side(work, str(folder), cache, condition_bytes, loop, capacity_bytes, label=label)

    sides = []
    for cache in caches:
        sides += [side(label, work, cache, loop) for label, work in LOADER.items() for loop in ("asyncio", "uvloop")]
        sides += [side(label, work, cache) for label, work in PEER.items()]
        # Cold only: a direct read does not use what is cached.
        sides += [
            side(label, work, cache) for label, work in LIMITS.items() if (work, cache) != ("ring_direct", "warm")
        ]
    return [*sides, Side("idle", str(folder), "warm", 0, label="nothing but the ticker")]


def limit_of(series: list[Series], cache: str) -> float:
    """GiB/s of the better limit in this cache state."""
    return max(each.median("gib_per_s") for each in series if each.side.cache == cache and each.side.label in LIMITS)


def failed_checks(series: list[Series]) -> list[str]:
    """What is not as it must be, in words."""
    failed = []
    for each in series:
        if each.side.label not in LOADER:
            continue
        who = f"{each.side.cache} {each.side.label} under {each.side.loop}"
        if (lag_ms := each.median("lag_p99_ms")) >= MAX_LAG_P99_MS:
            failed.append(f"{who}: 99th percentile of the loop's lag is {lag_ms:.1f} ms")
        above_bytes = max(each.values("above_bytes"))
        if above_bytes > each.side.capacity_bytes + MAX_ABOVE_CAPACITY_BYTES:
            failed.append(f"{who}: {above_bytes / MIB:.0f} MiB above what was delivered")
    return failed


def print_results(series: list[Series]) -> None:
    columns = (
        "",
        "loop",
        "GiB/s",
        "of limit",
        "of safe_open",
        "CPU s/GiB",
        "opening",
        "lag p50",
        "p99",
        "max ms",
        "above MiB",
    )
    for cache in dict.fromkeys(each.side.cache for each in series):
        group = [each for each in series if each.side.cache == cache and each.side.work != "idle"]
        if not group:
            continue
        limit = limit_of(group, cache)
        peer = next(each.median("gib_per_s") for each in group if each.side.label in PEER)
        print(f"\n{cache}\n")
        print_table(columns, [_row(each, limit, peer) for each in group])
    idle = next(each for each in series if each.side.work == "idle")
    print(f"\nnothing but the ticker: lag {_lags(idle)} ms (50th, 99th percentile, most)")


def _row(each: Series, limit: float, peer: float) -> list[str]:
    speed = each.median("gib_per_s")
    ours = each.side.label in LOADER
    p50, p99, most = (f"{each.median(name):.1f}" for name in ("lag_p50_ms", "lag_p99_ms", "lag_max_ms"))
    opening = f"{each.median('lag_open_ms'):.1f}" if ours else ""
    return [
        each.side.label,
        each.side.loop,
        each.spread("gib_per_s"),
        f"{speed / limit:.0%}",
        f"{speed / peer:.1f} x",
        f"{each.median('cpu_s_per_gib'):.2f}",
        opening,
        p50,
        p99,
        most,
        f"{max(each.values('above_bytes')) / MIB:.0f}" if ours else "",
    ]


def _lags(each: Series) -> str:
    return ", ".join(f"{each.median(name):.2f}" for name in ("lag_p50_ms", "lag_p99_ms", "lag_max_ms"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, rounds=5)
    parser.add_argument("--gib", type=float, default=3.0, help="payload of the checkpoint in GiB (default 3)")
    parser.add_argument("--capacity-mib", type=int, default=256, help="staging.capacity_bytes in MiB (default 256)")
    parser.add_argument("--cache", choices=("cold", "warm"), help="only this state of the page cache (default: both)")
    arguments = parser.parse_args(argv)
    with working_folder(arguments.folder) as parent:
        tensors = layered_tensors(int(arguments.gib * GIB))
        folder = parent / f"loader-bench-stream-{arguments.gib:g}"
        payload_bytes = make_checkpoint(folder, tensors, SHARDS)
        caches = [arguments.cache] if arguments.cache else ["cold", "warm"]
        sides = make_sides(folder, payload_bytes, arguments.capacity_mib * MIB, caches)
        series = run_rounds(sides, arguments.rounds)
    failed = failed_checks(series)
    if arguments.json:
        document = {"machine": machine(), "rounds": arguments.rounds, "payload_bytes": payload_bytes}
        document |= {"tensors": len(tensors), "failed": failed, "series": [each.as_dict() for each in series]}
        print(json.dumps(document, indent=2))
    else:
        print(f"{payload_bytes / GIB:.2f} GiB in {len(tensors)} tensors and {SHARDS} shards, ", end="")
        print(f"staging {arguments.capacity_mib} MiB, {arguments.rounds} rounds; {machine()}")
        print_results(series)
        print(f"\ntarget: lag's 99th percentile under {MAX_LAG_P99_MS:g} ms, ", end="")
        print(f"memory above the delivered tensors at most {arguments.capacity_mib} + 64 MiB: ", end="")
        print("; ".join(failed) if failed else "met by every side")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
