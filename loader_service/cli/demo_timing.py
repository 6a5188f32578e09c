"""One rank of the demo's measurement: what a load takes, and what safetensors takes for the same tensors.

Started by `demo` as `python -m loader_service.cli.demo_timing CONFIG`, once a rank. Interpreter start and imports are
on neither side of the comparison; reading the headers is on both. Each side ends when the rank holds all its tensors,
in memory of their own. The best of a few rounds counts, as the page cache is warm for all but the first, and each round
starts without memory from the one before: weights are loaded once, into memory that the process did not have.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from loader_service.agreement.group import GroupChoice, from_environment
from loader_service.cli.checking import Reference
from loader_service.cli.output import print_document
from loader_service.cli.ranks import gather, place_from
from loader_service.config.yaml_file import load_config
from loader_service.filling import TensorSpec
from loader_service.planning.plan import RankPlan
from loader_service.service import BlockingLoaderService, LoaderService

ROUNDS = 3


def main(config_path: Path) -> int:
    """Measures every load of the configuration on this rank; rank 0 prints one document for all of them."""
    config = load_config(config_path)
    place = place_from()
    measured: dict[str, object] = {}
    for load in config.loads:
        loader_s, safetensors_s = [], []
        # A service a round, or the later ones would find the headers read already, which safetensors never does.
        for _ in range(ROUNDS):
            with LoaderService.blocking(config, group=_next_group(place.alone)) as service:
                seconds, plan, specs = _load_once(service, load, place.rank)
                loader_s.append(seconds)
            _give_memory_back()
            safetensors_s.append(_safetensors_once(plan, specs))
            _give_memory_back()
        measured[load] = {
            "payload_bytes": plan.payload_bytes,
            "loader_s": min(loader_s),
            "safetensors_s": min(safetensors_s),
        }
    documents = asyncio.run(gather(place, {"rank": place.rank, "loads": measured}, config.agreement))
    if place.rank == 0:
        print_document({"ranks": documents})
    return 0


def _give_memory_back() -> None:
    """The C library keeps what was freed for whoever asks next; the loader's memory goes back by itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _next_group(alone: bool) -> GroupChoice:
    return "solo" if alone else from_environment()


def _load_once(
    service: BlockingLoaderService, load: str, rank: int
) -> tuple[float, RankPlan, Mapping[str, TensorSpec]]:
    started_s = time.perf_counter()
    with service.open(load) as opened:
        held = dict(opened)
    seconds = time.perf_counter() - started_s
    return seconds, opened.plan.for_rank(rank), {name: opened.spec(name) for name in held}


def _safetensors_once(plan: RankPlan, specs: Mapping[str, TensorSpec]) -> float:
    """safe_open and slices of the same files, each copied, since what it hands out is the mapped file."""
    started_s = time.perf_counter()
    with Reference(plan) as reference:
        held = {name: [part.clone() for part in reference.read(name, spec)] for name, spec in specs.items()}
    seconds = time.perf_counter() - started_s
    held.clear()
    return seconds


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
