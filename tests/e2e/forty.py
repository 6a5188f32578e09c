"""Forty tensors in two shards, many more bytes than the memory of a load, and how a rank is made to fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import loader_service as ls
from loader_service.reading.fake import FakeStorage
from tests.e2e.seats import header_end
from tests.support.checkpoints import Checkpoint, assert_same, write_checkpoint

LAST = "model-00002-of-00002.safetensors"
SMALL: dict[str, Any] = {
    "staging": {"capacity_bytes": "16KiB"},
    "reads": {"chunk_bytes": "4KiB", "threads": 2, "retries": 1},
    "agreement": {"grace_s": 20, "timeout_s": 40},
}


def payload_of(checkpoint: Checkpoint, shard: str) -> tuple[int, int]:
    path = checkpoint.folder / shard
    return header_end(str(path)), path.stat().st_size


async def consume(service: ls.LoaderService, checkpoint: Checkpoint) -> ls.LoadReport:
    async with service.open("target") as load:
        names = []
        async for name, tensor in load:
            assert_same(tensor, checkpoint.tensor(name), name)
            names.append(name)
    assert names == list(checkpoint.tensors)
    return load.report


def fail_payload(
    storage: FakeStorage, checkpoint: Checkpoint, error: int | Callable[[], BaseException], *, times: int | None = None
) -> None:
    """Reads of the last shard's payload fail; its header can be read."""
    storage.fail(f"*{LAST}", error, times=times, within=payload_of(checkpoint, LAST))


def write(folder: Path, shape: tuple[int, int] = (50, 41)) -> Checkpoint:
    return write_checkpoint(
        folder,
        {f"model-0000{i}-of-00002.safetensors": {f"s{i}.w{k:02}": ("BF16", shape) for k in range(20)} for i in (1, 2)},
    )
