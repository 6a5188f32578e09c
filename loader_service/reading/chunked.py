"""One range of a file on its way into memory: chunks that reading threads work off, and whoever waits for all of them.

Waited for by blocking or on any event loop; when it ends badly, nothing writes to the memory any more.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from typing import NamedTuple

from loader_service.bridge import uninterrupted
from loader_service.errors import LoadCancelledError, LoaderError, ReadError, StateError
from loader_service.reading.ranges import FileRange
from loader_service.reading.threads import ReadPool

_LOOK_EVERY_S = 1.0
_QUEUED_A_THREAD = 2


class Part(NamedTuple):
    """One chunk to be read: `read` does it, on a reading thread; `offset` in the file, `label` for messages."""

    read: Callable[[], None]
    label: str
    offset: int
    nbytes: int


class Reading:
    """One range on its way into memory, in chunks that reading threads work off. Ends once: all is there, or the first
    failure has dropped what was queued and what ran has come back (or was given up as stuck)."""

    def __init__(
        self, where: FileRange, parts: Iterator[Part], nbytes: int, threads: ReadPool, stuck_after_s: float
    ) -> None:
        self.done_bytes = 0
        self._where = where
        self._left = parts
        self._nbytes = nbytes
        self._threads = threads
        self._stuck_after_s = stuck_after_s
        self._lock = threading.Lock()
        self._chunks: dict[Future[None], int] = {}
        self._queueing = False
        self._no_more = False
        self._cancelled = False
        self._error: BaseException | None = None
        self._ended: Future[None] = Future()

    def queue_more(self) -> None:
        """Queues chunks as long as there is room; one thread at a time. Ends the reading when none are left."""
        with self._lock:
            if self._queueing:
                return
            self._queueing = True
        try:
            while (part := self._next_part()) is not None:
                chunk = self._threads.submit(part.read, label=part.label, path=self._where.path, offset=part.offset)
                with self._lock:
                    self._chunks[chunk] = part.nbytes
                    dropped = self._no_more
                chunk.add_done_callback(self._take)
                if dropped:  # it failed meanwhile
                    chunk.cancel()
        except BaseException as error:  # noqa: BLE001 - an interrupt too: it is raised by whoever waits
            self.fail(error)
        with self._lock:
            self._queueing = False
        self._end_if_over()

    def fail(self, error: BaseException) -> None:
        """Ends it with an error, unless it has one or has ended."""
        with self._lock:
            if self._error is None and not self._ended.done():
                self._error = error
        self._drop_queued()

    def cancel(self) -> None:
        """Drops what is queued; what a thread is at goes on."""
        self._cancelled = True
        self._drop_queued()

    def wait(self) -> None:
        """Blocks until all is there. An interrupt drops what is queued, waits for what runs, and is raised then."""
        try:
            self._until_ended()
        except BaseException:
            self.cancel()
            self._until_ended()
            raise
        self.raise_error()

    async def wait_async(self) -> None:
        """As `wait`, on the running loop, for a cancellation."""
        try:
            await self._ended_async()
        except BaseException:
            self.cancel()
            await uninterrupted(self._ended_async())
            raise
        self.raise_error()

    async def ended_within(self, limit_s: float) -> bool:
        """Whether it has ended, after waiting for that at most so long. Being cancelled here does not `cancel` it."""
        if not self._ended.done():
            await asyncio.wait((asyncio.wrap_future(self._ended),), timeout=limit_s)
            self._give_up_stuck()
        return self._ended.done()

    def raise_error(self) -> None:
        """Raises what went wrong first, or that it was cancelled before all was there."""
        if self._error is not None:
            raise self._error

    # -- inside

    def _until_ended(self) -> None:
        while not self._ended.done():
            concurrent.futures.wait((self._ended,), _LOOK_EVERY_S)
            self._give_up_stuck()

    async def _ended_async(self) -> None:
        while not await self.ended_within(_LOOK_EVERY_S):
            pass

    def _next_part(self) -> Part | None:
        with self._lock:
            if self._no_more or len(self._chunks) >= _QUEUED_A_THREAD * self._threads.threads:
                return None
            part = next(self._left, None)
            self._no_more = part is None
            return part

    def _drop_queued(self) -> None:
        with self._lock:
            self._no_more = True
            chunks = tuple(self._chunks)
        for chunk in chunks:
            chunk.cancel()

    def _take(self, chunk: Future[None], error: BaseException | None = None) -> None:
        """A chunk has ended, or was given up with `error`."""
        if error is None and not chunk.cancelled():
            error = chunk.exception()
        with self._lock:
            nbytes = self._chunks.pop(chunk, None)
            if nbytes is None:
                return
            if error is None and not chunk.cancelled():
                self.done_bytes += nbytes
        if error is not None:
            self.fail(error)
        elif chunk.cancelled():
            self._drop_queued()
        self.queue_more()

    def _end_if_over(self) -> None:
        with self._lock:
            if self._chunks or self._queueing or not self._no_more or self._ended.done():
                return
            if self._error is None and self.done_bytes < self._nbytes:
                self._error = self._incomplete()
        with contextlib.suppress(InvalidStateError):  # two threads may come here at once
            self._ended.set_result(None)

    def _incomplete(self) -> LoaderError:
        path, tensor = self._where.path, self._where.tensor
        what = f"{path}: not all was read of {self._where.of_what}"
        if self._cancelled:
            return LoadCancelledError(f"{what}: the reading was cancelled", path=path, tensor=tensor)
        return StateError(f"{what}: its source was closed meanwhile", path=path, tensor=tensor)

    def _give_up_stuck(self) -> None:
        for read in self._threads.in_flight():
            if read.age_s <= self._stuck_after_s:
                return  # the oldest comes first
            with self._lock:
                chunk = next((chunk for chunk in self._chunks if chunk is read.future), None)
            if chunk is not None and self._threads.abandon(chunk):
                text = f"{read.path}: {read.label} has not returned for {read.age_s:.1f} s: check the storage"
                self._take(chunk, ReadError(text, path=self._where.path, tensor=self._where.tensor))
