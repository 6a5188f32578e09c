"""Ranks that stage together: files and blocks with known bytes, and several ranks on one loop."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from loader_service.agreement.node import Door
from loader_service.agreement.node_connect import connect
from loader_service.agreement.node_mesh import Mesh
from loader_service.checkpoint.catalog import Shard
from loader_service.errors import LoaderError
from loader_service.memory.allocators import HostBuffer, allocate_host
from loader_service.planning.sharing import NodeBlocks
from loader_service.reading.fake import FakeStorage
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage
from loader_service.reading.ranges import RangeReader
from loader_service.reading.threads import ReadPool
from loader_service.sharing.block_reads import ReadingMeans
from loader_service.sharing.segment import Segment
from loader_service.sharing.stage import Stage
from tests.reading.making import PATIENCE_S, make_file

SLOT_BYTES = 16 << 10
RANGES = ((100, 5000), (8199, 16381))  # of each block: within its SLOT_BYTES of the file, and alike in its slot
BLOCK_BYTES = sum(stop - start for start, stop in RANGES)


@dataclass(frozen=True)
class Contents:
    """A file cut into blocks, each of two ranges with bytes between them that nobody wants."""

    shard: Shard
    content: bytes
    blocks: NodeBlocks

    def holds(self, number: int, slot: HostBuffer) -> bool:
        ranges = self.blocks.ranges(number)
        return all(
            slot.memoryview[piece.offset : piece.offset + piece.stop - piece.start]
            == self.content[piece.start : piece.stop]
            for piece in ranges
        )

    def digest(self, number: int, slot: HostBuffer) -> str:
        """Of the block's ranges as they lie in a slot."""
        found = hashlib.sha256()
        for piece in self.blocks.ranges(number):
            found.update(slot.memoryview[piece.offset : piece.offset + piece.stop - piece.start])
        return found.hexdigest()

    def expected(self, number: int) -> str:
        found = hashlib.sha256()
        for piece in self.blocks.ranges(number):
            found.update(self.content[piece.start : piece.stop])
        return found.hexdigest()


def contents(folder: Path, wants: Sequence[int], ranks: int) -> Contents:
    """Blocks that ranks own in turn, wanted as `wants` says."""
    path, content = make_file(folder, len(wants) * SLOT_BYTES, f"{len(wants)}.safetensors")
    shard = Shard(Path(path).name, path, LocalStorage().identify(path), 0, "")
    first = np.arange(len(wants), dtype=np.int64)[:, None] * SLOT_BYTES
    starts, stops = (np.array(column, dtype=np.int64) for column in zip(*RANGES, strict=True))
    blocks = NodeBlocks(
        ranks=ranks,
        slot_bytes=SLOT_BYTES,
        range_shard=np.zeros(len(wants) * len(RANGES), dtype=np.int32),
        range_start=(first + starts).ravel(),
        range_stop=(first + stops).ravel(),
        range_offset=np.tile(starts, len(wants)),
        first_range=np.arange(len(wants) + 1, dtype=np.int64) * len(RANGES),
        owner=np.arange(len(wants), dtype=np.int64) % ranks,
        wants=np.array(wants, dtype=np.uint64),
        shared_bytes=len(wants) * BLOCK_BYTES,
        union_bytes=len(wants) * BLOCK_BYTES,
        wanted_bytes=sum(bin(mask).count("1") for mask in wants) * BLOCK_BYTES,
    )
    return Contents(shard, content, blocks)


async def made(folder: Path, wants: Sequence[int], ranks: int) -> Contents:
    return await asyncio.to_thread(contents, folder, wants, ranks)


def connected(count: int) -> list[Mesh]:
    doors = [Door(rank, "kernel", "shm") for rank in range(count)]
    cards = [door.card for door in doors]
    with ThreadPoolExecutor(count) as pool:
        meshes = list(pool.map(lambda door: connect(door, cards, lambda: False), doors))
    for door in doors:
        door.close()
    return meshes


@dataclass
class RankHere:
    """One of the ranks on this loop. `failures`: what its stage has told; `storage`: what it reads with."""

    stage: Stage
    mesh: Mesh
    storage: FakeStorage
    threads: ReadPool
    handles: HandleCache
    failures: list[LoaderError] = field(default_factory=list)
    steps: int = 0


@contextlib.asynccontextmanager
async def node(
    things: Contents,
    counts: Sequence[int],
    *,
    chunk_bytes: int = 4096,
    threads: int = 2,
    stuck_after_s: float = 10 * PATIENCE_S,
) -> AsyncIterator[list[RankHere]]:
    """Ranks on this loop, each with its own threads and files, staging in memory of this process; not yet started."""
    meshes = await asyncio.to_thread(connected, len(counts))
    memory = allocate_host(sum(counts) * SLOT_BYTES)
    segment = Segment(memory, tuple(range(len(counts))), tuple(counts), SLOT_BYTES)
    ranks: list[RankHere] = []
    for mesh in meshes:
        mesh.start(lambda rank: None)
        storage, pool = FakeStorage(LocalStorage()), ReadPool(threads)
        handles = HandleCache(storage, 8)
        ranges = RangeReader(handles, access="auto", retries=0)
        means = ReadingMeans(ranges, pool, chunk_bytes, stuck_after_s)
        failures: list[LoaderError] = []
        stage = Stage(mesh, segment, things.blocks, [things.shard], means, on_failure=failures.append)
        ranks.append(RankHere(stage, mesh, storage, pool, handles, failures))
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.storage.clear()
            await rank.stage.stop(PATIENCE_S)
        for rank in ranks:
            await rank.mesh.close(PATIENCE_S)
            await asyncio.to_thread(rank.threads.shutdown, PATIENCE_S)
            await asyncio.to_thread(rank.handles.close)


async def take_all(things: Contents, rank: RankHere) -> list[int]:
    """Takes what this rank wants in plan order and gives each back at once; then serves the others."""
    place = np.uint64(rank.mesh.rank)
    seen = []
    for number in np.flatnonzero(things.blocks.wants >> place & np.uint64(1)).tolist():
        slot = await rank.stage.block(number)
        assert things.holds(number, slot), f"block {number} on rank {rank.mesh.rank}"
        rank.stage.done(number)
        seen.append(number)
    await rank.stage.served()
    return seen
