"""A rank under torchrun that reduces all the time and loads beside it: `python -m tests.hosts.reducing FOLDER OUT`.

Two services load at once: one for all ranks, one for the ranks of each host, in process groups of the caller's. Writes
OUT/RANK.json: sha256 of every tensor of both loads, how many reductions there were, and how many were wrong.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import loader_service as ls
from loader_service.config.schema import ServiceConfig
from tests.support.checkpoints import Checkpoint, sha256

BESIDE = 3  # reductions that have to happen while a load is in its middle
WITHIN_S = 60.0
PAUSE_S = 0.002  # leaves the ranks, which share few cores, some time to load
ROWS: dict[str, Any] = {"rules": [{"match": "*", "split": {"axis": "tp", "dim": 0}}]}


class Reducing(threading.Thread):
    """The caller's all-reduce, again and again until all ranks have loaded."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.loaded = threading.Event()
        self.count = 0
        self.wrong = 0

    def run(self) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        ready = 0.0
        while ready < world_size:
            value = torch.full((258,), float(rank + self.count))
            value[-1] = float(self.loaded.is_set())
            dist.all_reduce(value)
            wanted = float(sum(range(world_size)) + world_size * self.count)
            self.wrong += int((value[:-1] != wanted).any())
            ready = float(value[-1])
            self.count += 1
            self.loaded.wait(PAUSE_S)


def config_of(folder: str, load: Mapping[str, object], ranks: int) -> ServiceConfig:
    return Checkpoint(Path(folder), {}, {}).config(load, mesh={"tp": ranks}, agreement={"timeout_s": 20})


async def load(config: ServiceConfig, group: Any, reducing: Reducing) -> dict[str, str]:
    found: dict[str, str] = {}
    async with ls.LoaderService(config, group) as service, service.open("target") as opened:
        async for name, tensor in opened:
            found[name] = sha256(tensor)
            if len(found) == 1:
                await some_reductions(reducing)
    return found


async def some_reductions(reducing: Reducing) -> None:
    wanted, until_s = reducing.count + BESIDE, time.monotonic() + WITHIN_S
    while reducing.count < wanted:
        assert time.monotonic() < until_s, "no reduction comes to its end while a load is open"
        await asyncio.sleep(0.005)


async def load_both(folder: str, pair: Any, reducing: Reducing) -> tuple[dict[str, str], dict[str, str]]:
    return await asyncio.gather(
        load(config_of(folder, {}, dist.get_world_size()), None, reducing),
        load(config_of(folder, ROWS, 2), pair, reducing),
    )


def main() -> None:
    folder, out = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    reducing = Reducing()
    reducing.start()
    whole, rows = asyncio.run(load_both(folder, pairs[rank // 2], reducing))
    reducing.loaded.set()
    reducing.join(WITHIN_S)
    told = {"whole": whole, "rows": rows, "reductions": reducing.count, "wrong": reducing.wrong}
    Path(out, f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
