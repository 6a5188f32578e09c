"""One range of a file on its way into memory: chunks that reading threads work off, and whoever waits for all of them.

Waited for by blocking or on any event loop; when it ends badly, nothing writes to the memory any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from loader_service.bridge import uninterrupted
from loader_service.errors import LoadCancelledError, LoaderError, ReadError, StateError, clear_frames
from loader_service.reading.file_range import FileRange
from loader_service.reading.threads import ReadPool

_LOOK_EVERY_S = 1.0
_QUEUED_A_THREAD = 2


class _End:
    """That a reading has ended. An interrupt of the thread that waits for it leaves no lock behind in a state in which
    the thread that tells it would wait: no `Future` and no `Event` may be touched by the former."""

    def __init__(self) -> None:
        self.has_come = False
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # a loop that is closed must not cancel it
        self._gate = threading.Lock()
        self._gate.acquire()

    def wait(self, limit_s: float) -> None:
        if not self.has_come:
            self._gate.acquire(timeout=limit_s)

    def tell(self) -> None:
        self.has_come = True
        self._gate.release()
        self.future.set_result(None)


class Reading:
    """One range on its way into memory: `read` reads each of its `chunks`, (first byte, last byte + 1) of the file.

    Ends once, when nothing writes to the memory any more: all is there, or it was stopped (a chunk failed, it was
    cancelled, its threads were) and what ran has come back or was given up as stuck. What is queued then does nothing.
    A reading thread keeps nothing that leads to the memory, or to an error, when the end is told: the last reference is
    the waiting thread's, since a thread that destroyed a tensor while the interpreter ends would crash.
    """

    def __init__(
        self,
        where: FileRange,
        view: memoryview,
        chunks: Iterator[tuple[int, int]],
        read: Callable[[FileRange, memoryview], None],
        threads: ReadPool,
        stuck_after_s: float,
    ) -> None:
        self.done_bytes = 0
        self._where = where
        self._view = view
        self._nbytes = view.nbytes
        self._chunks = chunks
        self._read = read
        self._threads = threads
        self._stuck_after_s = stuck_after_s
        self._lock = threading.Lock()
        self._outstanding: dict[int, Future[None] | None] = {}  # queued and running, by first byte
        self._running: set[int] = set()
        self._started = False
        self._stopped = False
        self._cancelled = False
        self._error: BaseException | None = None
        self._ended = False
        self._end = _End()

    def start(self) -> None:
        """Queues the first chunk; the thread that takes it queues more. What goes wrong is told by the reading."""
        if not self._started:
            self._started = True
            self._queue_one()
            self._end_if_over()

    def fail(self, error: BaseException) -> None:
        """Ends it with an error, unless it has one or has ended."""
        self._note(error)
        self._stop()

    def cancel(self) -> None:
        """Drops what is queued; what a thread is at goes on."""
        self._cancelled = True
        self._stop()

    def wait(self) -> None:
        """Starts it, and blocks until all is there. An interrupt drops what is queued, waits for what runs, and is
        raised then. To be called once, as `wait_async`."""
        try:
            self.start()
            self._until_ended()
        except BaseException:
            self._cancelled = self._stopped = True  # before any call, at which a second interrupt could come
            self.cancel()
            self._until_ended()
            raise
        self._raise_last()

    async def wait_async(self) -> None:
        """As `wait`, on the running loop, for a cancellation."""
        try:
            self.start()
            await self._ended_async()
        except BaseException:
            self._cancelled = self._stopped = True
            self.cancel()
            await uninterrupted(self._ended_async())
            raise
        self._raise_last()

    async def ended_within(self, limit_s: float) -> bool:
        """Whether it has ended, after waiting for that at most so long. Being cancelled here does not `cancel` it."""
        if not self._end.has_come:
            await asyncio.wait((asyncio.wrap_future(self._end.future),), timeout=limit_s)
            self._give_up_stuck()
        return self._end.has_come

    def raise_error(self) -> None:
        """Raises what went wrong first, or that it was cancelled before all was there."""
        _raise(self._error)

    # -- inside

    def _note(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None and not self._ended:
                self._error = error
                self._stopped = True

    def _raise_last(self) -> None:
        """Raises the error and keeps it no longer: a reading thread may be the last to let go of this object."""
        error, self._error = self._error, None
        try:
            _raise(error)
        finally:
            del error  # it leads to this frame

    def _until_ended(self) -> None:
        while not self._end.has_come:
            self._end.wait(_LOOK_EVERY_S)
            self._give_up_stuck()

    async def _ended_async(self) -> None:
        while not await self.ended_within(_LOOK_EVERY_S):
            pass

    def _queue_more(self) -> None:
        """Queues chunks as long as there is room. Each thread that has ended a chunk does, so that none is missed."""
        while self._queue_one():
            pass

    def _queue_one(self) -> bool:
        """Queues the next chunk. False if there is none, or no room."""
        with self._lock:
            if self._stopped or len(self._outstanding) >= _QUEUED_A_THREAD * self._threads.threads:
                return False
            start, stop = next(self._chunks, (0, 0))
            if start == stop:
                return False
            self._outstanding[start] = None
        label = f"bytes [{start}, {stop}) of {self._where.of_what}"
        path = self._where.path
        try:
            chunk = self._threads.submit(
                self._read_chunk, start, stop, label=label, path=path, offset=start, on_done=self._dropped
            )
        except StateError:  # its threads were stopped
            self._stop()
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised by whoever waits
            self.fail(error)
            return False
        self._note_queued(start, chunk)
        return True

    def _note_queued(self, start: int, chunk: Future[None]) -> None:
        with self._lock:
            if start in self._outstanding:
                self._outstanding[start] = chunk
            stopped = self._stopped
        if stopped:
            chunk.cancel()

    def _read_chunk(self, start: int, stop: int) -> None:
        """What a reading thread does."""
        with self._lock:
            if self._stopped:
                return
            self._running.add(start)
        self._queue_more()
        error = self._attempt(start, stop)
        if error is not None:
            clear_frames(error)
        with self._lock:
            given_up = start not in self._running
            self._running.discard(start)
            self._outstanding.pop(start, None)
            if error is None and not given_up:
                self.done_bytes += stop - start
        if error is not None:
            self._note(error)
            del error  # the end may be told now
            self._stop()
        self._queue_more()
        self._end_if_over()

    def _attempt(self, start: int, stop: int) -> BaseException | None:
        """The error of one read, whose frames have ended by then."""
        before = self._where.start
        try:
            self._read(self._where.moved(start - before), self._view[start - before : stop - before])
        except BaseException as error:  # noqa: BLE001 - SystemExit and MemoryError too belong to whoever waits
            return error
        return None

    def _dropped(self, chunk: Future[None]) -> None:
        """A chunk has left the threads' queue: by being cancelled, here or with all that was queued there?"""
        if chunk.cancelled():
            with self._lock:
                self._stopped = True
            self._end_if_over()

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            chunks = tuple(self._outstanding.values())
        for chunk in chunks:
            if chunk is not None:
                chunk.cancel()
        self._end_if_over()

    def _end_if_over(self) -> None:
        with self._lock:
            over = self._stopped or self.done_bytes == self._nbytes
            if self._ended or self._running or not over:
                return
            self._ended = True
            if self._error is None and self.done_bytes < self._nbytes:
                self._error = self._incomplete()
            # Whoever keeps this need not keep the memory, nor what reads into it.
            self._view, self._chunks, self._read = memoryview(b""), iter(()), _read_nothing
            self._outstanding.clear()
        self._end.tell()

    def _incomplete(self) -> LoaderError:
        path, tensor = self._where.path, self._where.tensor
        what = f"{path}: not all was read of {self._where.of_what}:"
        if self._cancelled:
            return LoadCancelledError(f"{what} the reading was cancelled", path=path, tensor=tensor)
        return StateError(f"{what} its source, or the service it is of, was closed", path=path, tensor=tensor)

    def _give_up_stuck(self) -> None:
        for read in self._threads.in_flight():
            if read.age_s <= self._stuck_after_s:
                return  # the oldest comes first
            with self._lock:
                start = next((start for start, chunk in self._outstanding.items() if chunk is read.future), None)
            if start is not None and self._threads.abandon(read.future):
                with self._lock:
                    self._running.discard(start)
                text = f"{read.path}: {read.label} has not returned for {read.age_s:.1f} s: check the storage"
                self.fail(ReadError(text, path=self._where.path, tensor=self._where.tensor))


def _raise(error: BaseException | None) -> None:
    if error is not None:
        try:
            raise error
        finally:
            del error  # it leads to this frame


def _read_nothing(where: FileRange, view: memoryview) -> None:
    """What a reading that has ended reads."""
