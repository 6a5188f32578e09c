"""Reads blocks of shared memory on reading threads: one task a chunk of a range, several blocks at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, cast

from loader_service import logs
from loader_service.checkpoint.catalog import Shard
from loader_service.errors import LoaderError, MemoryLimitError, ReadError, name_of, text_of
from loader_service.memory.allocators import PAGE_BYTES, HostBuffer
from loader_service.planning.sharing import BlockRange, NodeBlocks
from loader_service.reading.file_range import FileRange, Window
from loader_service.reading.ranges import RangeReader
from loader_service.reading.threads import ReadPool

log = logs.logger("loader_service.load")


@dataclass(frozen=True, slots=True)
class ReadingMeans:
    """What blocks are read with: one way of reading, threads, how much one of them reads at once, and after what time
    a read that has not come back is an error."""

    ranges: RangeReader
    threads: ReadPool
    chunk_bytes: int
    stuck_after_s: float


class _Chunk(NamedTuple):
    block: int
    shard: int
    path: str
    start: int
    nbytes: int


class BlockReads:
    """The reads of one rank's own blocks. All methods on one loop. `read_bytes` and `shards_read` count what is done.

    `on_read(block)` is called when a block is complete, `on_error` with the first error, after which nothing more is.
    """

    def __init__(
        self,
        blocks: NodeBlocks,
        shards: Sequence[Shard],
        means: ReadingMeans,
        *,
        on_read: Callable[[int], None],
        on_error: Callable[[LoaderError], None],
    ) -> None:
        self.read_bytes = 0
        self.shards_read: set[int] = set()
        self._blocks = blocks
        self._shards = shards
        self._means = means
        self._on_read = on_read
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._running: dict[Future[int], _Chunk] = {}
        self._left: dict[int, int] = {}  # chunks of each block that is being read
        self._stopped = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._watching = self._loop.create_task(self._watch())

    def begin(self, block: int, slot: HostBuffer) -> None:
        """Reads the block's ranges into `slot`."""
        chunks = [(piece.shard, *chunk) for piece in self._blocks.ranges(block) for chunk in self._chunks(piece, slot)]
        self._left[block] = len(chunks)
        for shard, where, window in chunks:
            if not self._stopped:
                self._submit(_Chunk(block, shard, where.path, where.start, window.nbytes), where, window)

    def cancel(self) -> None:
        """Drops what is queued; what runs goes on until `stop` waits for it."""
        self._stopped = True
        for future in list(self._running):
            future.cancel()

    async def stop(self, grace_s: float) -> list[str]:
        """Cancels, waits up to `grace_s` for what runs. Returns a line for each read that was stuck: its thread is left
        behind, with its slot, which it may still write to."""
        self.cancel()
        self._watching.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        stuck = []
        for future, chunk in self._running.items():
            self._means.threads.abandon(future)
            stuck.append(f"{chunk.path} at offset {chunk.start} (block {chunk.block} of this node)")
        self._running.clear()
        self._idle.set()
        return stuck

    # -- submitting

    def _chunks(self, piece: BlockRange, slot: HostBuffer) -> Iterator[tuple[FileRange, Window]]:
        """A range cut at multiples of the chunk in the file. Its pages in the slot hold nothing else."""
        shard, nbytes = self._shards[piece.shard], piece.stop - piece.start
        first = piece.offset // PAGE_BYTES * PAGE_BYTES
        last = min(slot.nbytes, -(-(piece.offset + nbytes) // PAGE_BYTES) * PAGE_BYTES)
        window = Window(slot.memoryview[first:last], piece.offset - first, nbytes)
        start = piece.start
        while start < piece.stop:
            stop = min(piece.stop, (start // self._means.chunk_bytes + 1) * self._means.chunk_bytes)
            yield (
                FileRange(shard.path, shard.identity, start),
                window.part(start - piece.start, stop - piece.start),
            )
            start = stop

    def _submit(self, chunk: _Chunk, where: FileRange, window: Window) -> None:
        label = f"bytes [{where.start}, {where.start + window.nbytes}), which ranks of this node share"
        try:
            future = self._means.threads.submit(
                self._means.ranges.read_within, where, window, label=label, path=where.path, offset=where.start
            )
        except LoaderError as error:  # no thread could be started, or they were stopped
            self._fail(error)
            return
        self._running[future] = chunk
        self._idle.clear()
        future.add_done_callback(self._post_done)

    def _post_done(self, future: Future[int]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._done, future)
        except RuntimeError:
            log.debug("a read ended after its service was closed")

    # -- what finished reads lead to

    def _done(self, future: Future[int]) -> None:
        chunk = self._running.pop(future, None)
        if chunk is None:  # left behind
            return
        if not self._running:
            self._idle.set()
        if future.cancelled() or self._stopped:
            return
        error = future.exception()
        if error is not None:
            self._fail(_translated(error, chunk))
            return
        self.read_bytes += chunk.nbytes
        self.shards_read.add(chunk.shard)
        self._left[chunk.block] -= 1
        if not self._left[chunk.block]:
            del self._left[chunk.block]
            self._on_read(chunk.block)

    def _fail(self, error: LoaderError) -> None:
        if not self._stopped:
            self.cancel()
            self._on_error(error)

    async def _watch(self) -> None:
        """Names a read that does not return."""
        limit_s = self._means.stuck_after_s
        while not self._stopped:
            await asyncio.sleep(min(1.0, limit_s / 4))
            for read in self._means.threads.in_flight():
                if read.age_s > limit_s and read.future in self._running:
                    text = f"{read.path}: a read of {read.label} has not returned for {read.age_s:.1f} s"
                    hint = f"check the storage (reads.stuck_after_s is {limit_s:g})"
                    self._fail(ReadError(f"{text}: {hint}", path=read.path))


def _translated(error: BaseException, chunk: _Chunk) -> LoaderError:
    if issubclass(type(error), LoaderError):
        return cast(LoaderError, error)
    cls = MemoryLimitError if issubclass(type(error), MemoryError) else ReadError
    what = f"reading {chunk.nbytes} bytes at {chunk.start} of {chunk.path}, which ranks of this node share"
    translated = cls(f"{name_of(error)} while {what}: {text_of(error)}", path=chunk.path)
    translated.__cause__ = error
    return translated
