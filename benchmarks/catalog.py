"""How long planning takes on a checkpoint of 48 shards and 232,670 tensors, against `json.loads` of the same headers.

Makes sparse shards in a temporary folder (only their headers take space), then times in interleaved rounds, in one
process with a warm page cache: `json.loads` alone over the headers held in memory; reading, validating and joining them
into a catalog; and the catalog plus one rank's plan, for a draft by key prefixes and for a whole load with expert,
pipeline and tensor parallel rules.

    python -m benchmarks.catalog --rounds 9 --json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from loader_service.checkpoint.catalog import Catalog
from loader_service.checkpoint.discovery import read_catalog
from loader_service.config.yaml_file import config_from_dict
from loader_service.planning.mesh import Mesh
from loader_service.planning.plan import make_plan
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage
from loader_service.reading.threads import ReadPool

T = TypeVar("T")

SHARDS = 48
TENSORS = 232_670
LAYERS, EXPERTS, DRAFT_EXPERTS = 61, 620, 200
READ_THREADS = 8
TARGET_RATIO = 3.0

CONFIG: dict[str, object] = {
    "mesh": {"pp": 2, "tp": 8},
    "loads": {
        "target": {
            "skip": ["mtp.*"],
            "rules": [
                {
                    "match": "*.layers.*",
                    "assign": {"axis": "pp", "index": r"layers\.(\d+)\.", "boundaries": [0, 31, LAYERS]},
                },
                {"match": "*.experts.*", "assign": {"axis": "tp", "index": r"experts\.(\d+)\.", "how": "block"}},
                {"match": "*.o_proj_*.weight", "split": {"axis": "tp", "dim": 1}},
                {"match": "*.self_attn.*", "split": {"axis": "tp", "dim": 0}},
            ],
        },
        "draft": {"key_prefixes": ["mtp.0.", "mtp.1."]},
    },
}


@dataclass(frozen=True)
class Timing:
    """Seconds of one subject over all rounds, and its median against the baseline's."""

    subject: str
    median_s: float
    least_s: float
    most_s: float
    ratio: float


def tensors() -> Iterator[tuple[str, str, list[int], int]]:
    """(name, dtype, shape, bytes) in the order in which the shards hold them."""
    named = 0
    stacks = [(f"model.layers.{layer}", EXPERTS) for layer in range(LAYERS)]
    for stack, experts in (*stacks, ("mtp.0", DRAFT_EXPERTS), ("mtp.1", DRAFT_EXPERTS)):
        for expert in range(experts):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                yield f"{stack}.mlp.experts.{expert}.{projection}.weight", "F8_E4M3", [2048, 7168], 2048 * 7168
                yield f"{stack}.mlp.experts.{expert}.{projection}.weight_scale_inv", "F32", [16, 56], 4 * 16 * 56
                named += 2
    for i in range(TENSORS - named):
        projection = ("q_proj", "k_proj", "v_proj", "o_proj")[i % 4]
        yield f"model.layers.{i % LAYERS}.self_attn.{projection}_{i}.weight", "BF16", [512, 512], 2 * 512 * 512


def make_checkpoint(folder: Path) -> list[bytes]:
    """Writes the shards, sparse; returns their headers' JSON texts."""
    everything = list(tensors())
    a_shard = -(-len(everything) // SHARDS)
    texts = []
    for number in range(SHARDS):
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, dtype, shape, size_bytes in everything[number * a_shard : (number + 1) * a_shard]:
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size_bytes]}
            offset += size_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (folder / f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + offset)
        texts.append(text)
    return texts


@contextlib.contextmanager
def reading_threads() -> Iterator[ReadPool]:
    pool = ReadPool(READ_THREADS)
    try:
        yield pool
    finally:
        pool.shutdown(10)


def make_subjects(folder: Path, texts: list[bytes], pool: ReadPool) -> dict[str, Callable[[], object]]:
    """What is timed, by name; the first is the baseline."""
    storage = LocalStorage()
    config = config_from_dict(CONFIG | {"checkpoint": {"path": str(folder)}})
    mesh = Mesh.row_major(config.mesh, 16)

    def parse_json() -> None:
        for text in texts:
            json.loads(text)

    def catalog() -> Catalog:
        handles = HandleCache(storage)
        try:
            return read_catalog(str(folder), "advisory", handles=handles, storage=storage, threads=pool, retries=0)
        finally:
            handles.close()

    def planned(load: str) -> object:
        gap_bytes = config.reads.coalesce_gap_bytes
        return make_plan(catalog(), load, config.loads[load], mesh, coalesce_gap_bytes=gap_bytes).for_rank(0)

    return {
        "json.loads of the headers": parse_json,
        "catalog": catalog,
        "catalog and plan, draft by prefixes": lambda: planned("draft"),
        "catalog and plan, whole load": lambda: planned("target"),
    }


def measure(subjects: dict[str, Callable[[], object]], rounds: int) -> list[Timing]:
    """Interleaved, so that a busy moment of the machine meets every subject; garbage is collected between.

    What the imports brought (torch: hundreds of thousands of objects) is frozen first: each full collection that
    `json.loads` sets off would walk it, which made the baseline several times slower and the ratios too good.
    """
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    try:
        for round_ in range(rounds + 1):
            for name, subject in subjects.items():
                gc.collect()
                began = time.perf_counter()
                kept = subject()
                elapsed_s = time.perf_counter() - began
                del kept
                if round_:  # the first round warms caches
                    seconds[name].append(elapsed_s)
    finally:
        gc.unfreeze()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    baseline = next(iter(medians.values()))
    return [
        Timing(name, medians[name], min(values), max(values), medians[name] / baseline)
        for name, values in seconds.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 where a ratio exceeds the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default 7)")
    parser.add_argument("--folder", type=Path, help="where to make the checkpoint (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args(argv)
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as temporary,
        reading_threads() as pool,
    ):
        folder = Path(temporary)
        texts = make_checkpoint(folder)
        timings = measure(make_subjects(folder, texts, pool), arguments.rounds)
    header_mib = sum(map(len, texts)) / 2**20
    if arguments.json:
        document = {"shards": SHARDS, "tensors": TENSORS, "header_mib": header_mib, "rounds": arguments.rounds}
        print(json.dumps(document | {"timings": [asdict(timing) for timing in timings]}, indent=2))
    else:
        print(f"{SHARDS} shards, {TENSORS} tensors, {header_mib:.1f} MiB of headers, {arguments.rounds} rounds")
        print(f"{'':38}{'median s':>10}{'min s':>10}{'max s':>10}{'ratio':>8}")
        for timing in timings:
            figures = f"{timing.median_s:10.3f}{timing.least_s:10.3f}{timing.most_s:10.3f}{timing.ratio:8.2f}"
            print(f"{timing.subject:38}{figures}")
        print(f"target: every ratio at most {TARGET_RATIO:g}")
    return 0 if max(timing.ratio for timing in timings) <= TARGET_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
