"""Many small tensors: what a tensor costs when bytes hardly count, against safetensors' `safe_open` and a clone.

Tensors of 4 to 16 KiB, warm, parsing of headers included. Each side comes twice: as it is, and where the caller has
called `gc.freeze()` after its imports, so that Python's garbage collector does not go through all modules again and
again while tensors pile up; it stops every thread for that time. Each side runs in a process of its own, in interleaved
rounds; see `benchmarks.stream`.

    python -m benchmarks.small --tensors 232670
"""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks.common import (
    GIB,
    MIB,
    Series,
    Side,
    add_common_arguments,
    machine,
    make_checkpoint,
    print_table,
    run_rounds,
    small_tensors,
    working_folder,
)

SHARDS = 4
CAPACITY_BYTES = 256 * MIB
MAX_LAG_P99_MS = 20.0
LOADER = {"owned, kept": "owned_kept", "batches": "batches"}
PEER = {"safe_open + clone": "safetensors_cloned"}
LAGS = ("lag_open_ms", "lag_p50_ms", "lag_p99_ms", "lag_max_ms")
FROZEN = ", gc.freeze()"


def print_results(series: list[Series]) -> None:
    columns = ("", "us a tensor", "of safe_open", "CPU us a tensor", "opening", "lag p50", "p99", "max ms")
    peer = next(each.median("us_per_tensor") for each in series if each.side.label in PEER)
    rows = []
    for each in series:
        lags = [f"{each.median(name):.1f}" for name in LAGS]
        cpu_us = each.median("cpu_s") / each.median("tensors") * 1e6
        share = f"{each.median('us_per_tensor') / peer:.2f} x"
        rows.append([each.side.label, each.spread("us_per_tensor", 1), share, f"{cpu_us:.1f}", *lags])
    print_table(columns, rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, rounds=5)
    parser.add_argument("--tensors", type=int, default=40_000, help="how many tensors (default 40,000)")
    arguments = parser.parse_args(argv)
    with working_folder(arguments.folder) as parent:
        folder = parent / f"loader-bench-small-{arguments.tensors}"
        payload_bytes = make_checkpoint(folder, small_tensors(arguments.tensors), SHARDS)
        sides = [
            Side(
                work,
                str(folder),
                "warm",
                2 * payload_bytes + CAPACITY_BYTES,
                capacity_bytes=CAPACITY_BYTES,
                freeze=freeze,
                label=label + FROZEN * freeze,
            )
            for label, work in {**LOADER, **PEER}.items()
            for freeze in (False, True)
        ]
        series = run_rounds(sides, arguments.rounds)
    ours = [each for each in series if each.side.work in LOADER.values()]
    late = [each for each in ours if each.median("lag_p99_ms") >= MAX_LAG_P99_MS]
    if arguments.json:
        document = {"machine": machine(), "rounds": arguments.rounds, "payload_bytes": payload_bytes}
        document |= {"tensors": arguments.tensors, "series": [each.as_dict() for each in series]}
        print(json.dumps(document, indent=2))
    else:
        print(f"{arguments.tensors} tensors, {payload_bytes / GIB:.2f} GiB in {SHARDS} shards, warm, ", end="")
        print(f"{arguments.rounds} rounds; {machine()}\n")
        print_results(series)
        outcome = "met" if not late else "missed by " + ", ".join(each.side.label for each in late)
        print(f"\ntarget: lag's 99th percentile under {MAX_LAG_P99_MS:g} ms: {outcome}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
