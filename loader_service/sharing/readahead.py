"""Striped read-ahead: each rank of a node brings its stripes of what they all want into the page cache, once.

Advisory. The ranks' own reads find the bytes there, or wait for the same pages; where reading ahead fails, they read
what is missing, and nothing that was handed over is read again.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from loader_service import logs
from loader_service.checkpoint.catalog import Shard
from loader_service.errors import LoaderError, name_of, text_of
from loader_service.reading.handles import HandleCache
from loader_service.reading.positioned import read_fully
from loader_service.reading.threads import ReadPool

log = logs.logger("loader_service.load")

PIECE_BYTES: Final = 64 << 20
MOST_THREADS: Final = 16  # of a rank
MOST_THREADS_A_NODE: Final = 64
_DISCARD_BYTES: Final = 1 << 20

Stripe = tuple[int, int, int]  # (shard, start, stop)


def threads_of(ranks_here: int, threads_per_node: int) -> int:
    """How many threads of each rank of a node read ahead: an equal part of what the node may have, at least one."""
    return max(1, min(MOST_THREADS, min(threads_per_node, MOST_THREADS_A_NODE) // ranks_here))


class ReadAhead:
    """One rank's stripes of one load. Made, started and stopped on the service's loop; `read_bytes` and `problem` (why
    it gave up, None while all is well) may be looked at by anyone."""

    def __init__(
        self, stripes: Sequence[Stripe], shards: Sequence[Shard], handles: HandleCache, *, threads: int, retries: int
    ) -> None:
        self.read_bytes = 0
        self.problem: str | None = None
        self._shards = shards
        self._handles = handles
        self._retries = retries
        self._pieces = deque(
            (shard, at, min(at + PIECE_BYTES, stop))
            for shard, start, stop in stripes
            for at in range(start, stop, PIECE_BYTES)
        )
        self._pool = ReadPool(threads, name="loader-ahead")
        self._lock = threading.Lock()
        self._discard = memoryview(bytearray(_DISCARD_BYTES))
        self._running: list[Future[None]] = []

    def start(self) -> None:
        try:
            for _ in range(self._pool.threads):
                self._running.append(self._pool.submit(self._work, label="read-ahead"))
        except LoaderError as error:  # no thread can be had
            self._give_up(error)

    @property
    def over(self) -> bool:
        """Whether nothing is left to be read ahead."""
        return all(future.done() for future in self._running)

    def cancel(self) -> None:
        """Drops what is left; calls that are under way go on until `stop` waits for them."""
        with self._lock:
            self._pieces.clear()

    async def stop(self, grace_s: float) -> list[str]:
        """Drops what is left, waits up to `grace_s` for calls that are under way. Returns a line if one is stuck: its
        thread is left behind, and writes to nobody's memory."""
        self.cancel()
        ended = asyncio.wrap_future(self._pool.stop())
        await asyncio.wait((ended,), timeout=grace_s)
        return [] if ended.done() else ["what this rank was to read ahead for its node"]

    def _work(self) -> None:
        while (piece := self._next()) is not None:
            shard, start, stop = piece
            try:
                self._bring(self._shards[shard], start, stop)
            except Exception as error:  # noqa: BLE001 - whatever it is, the reads themselves find out what matters
                self._give_up(error)
                return
            with self._lock:
                self.read_bytes += stop - start

    def _next(self) -> tuple[int, int, int] | None:
        with self._lock:
            return self._pieces.popleft() if self._pieces else None

    def _bring(self, shard: Shard, start: int, stop: int) -> None:
        with self._handles.borrow(shard.path, shard.identity) as file:
            try:
                file.read_ahead(start, stop - start)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
            else:
                return
        for at in range(start, stop, _DISCARD_BYTES):  # into memory that nobody reads, and all threads write
            view = self._discard[: min(_DISCARD_BYTES, stop - at)]
            read_fully(self._handles, shard.path, shard.identity, at, [view], retries=self._retries)

    def _give_up(self, error: BaseException) -> None:
        with self._lock:
            self._pieces.clear()
            first = self.problem is None
            name, text = name_of(error), text_of(error)
            self.problem = self.problem or (text if text == name else f"{name}: {text}")
        if first:
            log.warning(
                "reading ahead for this node ended early (%s): each rank reads the rest for itself", text_of(error)
            )
