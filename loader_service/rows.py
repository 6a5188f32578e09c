"""Row sources: a tensor of a checkpoint that is read by row range, straight into memory of the caller's choice.

For tables that stay in host memory: a rank's rows are one contiguous range of the file, read in large chunks by several
threads at once. Usable from synchronous code and from any event loop, alone or while a load streams.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Final, Self

import torch

from loader_service.bridge import uninterrupted
from loader_service.errors import (
    ConfigError,
    DestinationError,
    LoadCancelledError,
    LoaderError,
    ReadError,
    StateError,
)
from loader_service.memory.tensors import raw_memory, torch_dtype, why_unwritable
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage
from loader_service.reading.positioned import DIRECT_BLOCK_BYTES
from loader_service.reading.ranges import Drop, FileRange, RangeReader
from loader_service.reading.threads import ReadPool
from loader_service.report import PolicyOutcome

STANDALONE_THREADS: Final = 8
STANDALONE_CHUNK_BYTES: Final = 64 << 20
_STANDALONE_RETRIES = 3
_STANDALONE_STUCK_AFTER_S = 300.0
_LOOK_EVERY_S = 1.0


class RowReader:
    """What several row sources share: open files, threads, and one way of reading.

    `chunk_bytes` is what one thread reads at once; a chunk that has not come back after `stuck_after_s` fails its read.
    """

    def __init__(self, ranges: RangeReader, threads: ReadPool, *, chunk_bytes: int, stuck_after_s: float) -> None:
        if chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes must be at least 1, not {chunk_bytes}")
        self.ranges = ranges
        self._threads = threads
        self._chunk_bytes = chunk_bytes
        self._stuck_after_s = stuck_after_s

    @classmethod
    def standalone(cls, *, threads: int, chunk_bytes: int, drop_page_cache: bool) -> RowReader:
        """A reader with threads and files of its own, which end with it: when the last source over it is gone."""
        pool = ReadPool(threads, name="loader-rows")
        handles = HandleCache(LocalStorage())
        drop: Drop = "everything" if drop_page_cache else "nothing"
        ranges = RangeReader(handles, access="auto", retries=_STANDALONE_RETRIES, drop=drop)
        reader = cls(ranges, pool, chunk_bytes=chunk_bytes, stuck_after_s=_STANDALONE_STUCK_AFTER_S)
        weakref.finalize(reader, _end, pool, handles)
        return reader

    def close(self) -> None:
        """Ends threads and closes files; a reading thread that is in a call ends after it."""
        _end(self._threads, self.ranges.handles)

    def begin(self, where: FileRange, view: memoryview) -> Reading:
        """Queues the chunks of one range, which `view` is to hold. What goes wrong with that ends the reading, so that
        whoever waits for it hears of it once nothing is written to `view` any more."""
        reading = Reading(where, self._threads, self._stuck_after_s)
        try:
            for start, stop in _chunks(where.start, where.start + view.nbytes, self._chunk_bytes):
                part = view[start - where.start : stop - where.start]
                at = where.moved(start - where.start)
                label = f"bytes [{start}, {stop}) of {_named(where)}"
                chunk = self._threads.submit(self.ranges.read, at, part, label=label, path=at.path, offset=start)
                if not reading.add(chunk, stop - start):
                    break
        except BaseException as error:  # noqa: BLE001 - an interrupt too: it is raised by whoever waits
            reading.fail(error)
        reading.complete()
        return reading


class Reading:
    """One range on its way into memory, in chunks that reading threads work off. Ends once: all is there, or the first
    failure has dropped what was queued and what ran has come back (or was given up as stuck)."""

    def __init__(self, where: FileRange, threads: ReadPool, stuck_after_s: float) -> None:
        self._where = where
        self._threads = threads
        self._stuck_after_s = stuck_after_s
        self._lock = threading.Lock()
        self._chunks: dict[Future[None], int] = {}
        self._adding = True
        self.done_bytes = 0
        self._error: BaseException | None = None
        self._cancelled = False
        self._ended: Future[None] = Future()

    def add(self, chunk: Future[None], nbytes: int) -> bool:
        """False if no more are wanted: a chunk has failed meanwhile."""
        with self._lock:
            self._chunks[chunk] = nbytes
            wanted = not self._cancelled
        chunk.add_done_callback(self._take)
        if not wanted:
            chunk.cancel()
        return wanted

    def complete(self) -> None:
        """No more chunks come."""
        with self._lock:
            self._adding = False
            over = not self._chunks
        if over:
            self._end()

    def fail(self, error: BaseException) -> None:
        """Ends it with an error, unless it has one."""
        with self._lock:
            self._error = error if self._error is None else self._error
        self.cancel()

    def cancel(self) -> None:
        """Drops what is queued; what a thread is at goes on."""
        with self._lock:
            self._cancelled = True
            chunks = tuple(self._chunks)
        for chunk in chunks:
            chunk.cancel()

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

    def _take(self, chunk: Future[None], error: BaseException | None = None) -> None:
        """A chunk has ended, or was given up with `error`."""
        if error is None:
            error = self._dropped() if chunk.cancelled() else chunk.exception()
        with self._lock:
            nbytes = self._chunks.pop(chunk, None)
            if nbytes is None:
                return
            if error is None:
                self.done_bytes += nbytes
            first = error is not None and self._error is None
            if first:
                self._error = error
            over = not self._chunks and not self._adding
        if first:
            self.cancel()
        if over:
            self._end()

    def _dropped(self) -> LoaderError:
        """Why a chunk was never read; told only where nothing went wrong before."""
        path, tensor = self._where.path, self._where.tensor
        what = f"{path}: not all was read of {_named(self._where)}"
        if self._cancelled:
            return LoadCancelledError(f"{what}: the reading was cancelled", path=path, tensor=tensor)
        return StateError(f"{what}: its source was closed meanwhile", path=path, tensor=tensor)

    def _end(self) -> None:
        with contextlib.suppress(InvalidStateError):
            self._ended.set_result(None)

    def _give_up_stuck(self) -> None:
        for read in self._threads.in_flight():
            if read.age_s <= self._stuck_after_s:
                return  # the oldest comes first
            with self._lock:
                chunk = next((chunk for chunk in self._chunks if chunk is read.future), None)
            if chunk is not None and self._threads.abandon(chunk):
                text = f"{read.path}: {read.label} has not returned for {read.age_s:.1f} s: check the storage"
                self._take(chunk, ReadError(text, path=self._where.path, tensor=self._where.tensor))


class RowSource:
    """A row-major tensor in a file, to be read by row range of the whole table.

    `path`, `offset` (of the tensor's first byte), `shape` and `dtype` (torch's, or a safetensors code) say where it
    lies; a dtype of less than a byte counts as torch counts it. `threads` read `chunk_bytes` at a time;
    `drop_page_cache` asks the system to forget its copy behind the reads. Memory that leaves the same rest by 4096 as
    the file offset of its first byte is filled past the page cache, other memory through it. Thread-safe.

    Sources of a load share its files and threads, and end with its service. One that was made alone ends when it is
    closed, or gone. Raises ConfigError for what is no table.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        offset: int,
        shape: Sequence[int],
        dtype: torch.dtype | str,
        *,
        threads: int = STANDALONE_THREADS,
        chunk_bytes: int = STANDALONE_CHUNK_BYTES,
        drop_page_cache: bool = False,
    ) -> None:
        self._set_up(FileRange(str(Path(path).absolute()), None, offset), shape, dtype)
        self._reader = RowReader.standalone(threads=threads, chunk_bytes=chunk_bytes, drop_page_cache=drop_page_cache)

    def _set_up(self, where: FileRange, shape: Sequence[int], dtype: torch.dtype | str) -> None:
        known = torch_dtype(dtype) if isinstance(dtype, str) else dtype
        if not isinstance(known, torch.dtype):
            raise ConfigError(f"{where.path}: torch has no dtype {dtype!r}")
        sizes = tuple(shape) if isinstance(shape, Sequence) else ()
        if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in (where.start, *sizes)):
            raise ConfigError(
                f"{where.path}: a table needs an offset and a shape of at least one dimension, all of them integers "
                f"that are not negative, not {where.start!r} and {shape!r}"
            )
        self._where = where
        self._shape = sizes
        self._dtype = known
        self._row_bytes = math.prod(self._shape[1:]) * known.itemsize
        self._rows = (0, self._shape[0])

    @property
    def path(self) -> str:
        """The file, absolute."""
        return self._where.path

    @property
    def offset(self) -> int:
        """Where the table begins in the file, in bytes."""
        return self._where.start

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole table."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def rows(self) -> tuple[int, int]:
        """(start, stop) of this rank's share; all rows of a source that was made alone."""
        return self._rows

    @property
    def access(self) -> PolicyOutcome:
        """How rows were read so far, past the page cache or through it, by all sources that share this one's reader."""
        return self._reader.ranges.outcome

    def read_rows_into(self, dst: torch.Tensor, row_start: int) -> None:
        """Fills `dst` with the rows [row_start, row_start + len(dst)) of the table. Blocks.

        `dst` is a contiguous CPU tensor of the table's dtype and row shape, any number of rows. Raises DestinationError
        before a byte moves if it does not fit; EndOfFileError, ReadError or CheckpointError if reading fails, once
        nothing is written to `dst` any more: its contents are then undefined. (A read that is stuck in the system is
        given up in the end; it may still write.)
        """
        self._begin(dst, row_start).wait()

    async def aread_rows_into(self, dst: torch.Tensor, row_start: int) -> None:
        """As `read_rows_into`, awaited on any loop; cancelled, it returns when nothing is written to `dst` any more."""
        await self._begin(dst, row_start).wait_async()

    def close(self) -> None:
        """Ends the threads and closes the file of a source that was made alone; the next read raises StateError."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = f" {self._where.tensor!r}" if self._where.tensor is not None else ""
        return f"RowSource({self.path!r}{name}, shape={self._shape}, dtype={self._dtype}, rows={self._rows})"

    def _begin(self, dst: torch.Tensor, row_start: int) -> Reading:
        problem = self._problem(dst, row_start)
        if problem is not None:
            text = f"{self.path}: nothing was read of {_named(self._where)}: {problem}"
            raise DestinationError(text, path=self.path, tensor=self._where.tensor)
        return self._reader.begin(self._where.moved(row_start * self._row_bytes), raw_memory(dst))

    def _problem(self, dst: object, row_start: object) -> str | None:
        if not isinstance(dst, torch.Tensor):
            return f"the destination is a {type(dst).__name__}, not a torch.Tensor"
        if isinstance(row_start, bool) or not isinstance(row_start, int):
            return f"row_start is {row_start!r}, not an integer"
        if dst.device.type != "cpu":
            return f"the destination is on {dst.device}; rows are read into host memory"
        if dst.dtype != self._dtype:
            return f"the destination is {dst.dtype}, the table {self._dtype}"
        if dst.dim() == 0 or tuple(dst.shape[1:]) != self._shape[1:]:
            return (
                f"the destination's shape is {tuple(dst.shape)}; its rows must be like the table's, {self._shape[1:]}"
            )
        if (unwritable := why_unwritable(dst)) is not None:
            return f"the destination {unwritable}"
        if not dst.is_contiguous():
            return "the destination is not contiguous"
        if row_start < 0 or row_start + dst.shape[0] > self._shape[0]:
            return f"rows [{row_start}, {row_start + dst.shape[0]}) are not all among the table's {self._shape[0]}"
        return None


class SharedRowSource(RowSource):
    """A source over a reader that it shares with others; `rows` is this rank's share."""

    def __init__(
        self, reader: RowReader, where: FileRange, shape: Sequence[int], dtype: torch.dtype, rows: tuple[int, int]
    ) -> None:
        self._set_up(where, shape, dtype)
        self._reader = reader
        self._rows = rows

    def close(self) -> None:
        """Nothing: what it shares ends with its service."""

    def over(self, reader: RowReader) -> SharedRowSource:
        """The same rows, read by another reader."""
        return SharedRowSource(reader, self._where, self._shape, self._dtype, self._rows)


def _chunks(start: int, stop: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Cuts [start, stop); at multiples of whole blocks of the file where chunks are such, so that all but the first and
    the last can be read past the page cache whole."""
    origin = 0 if chunk_bytes % DIRECT_BLOCK_BYTES == 0 else start
    while start < stop:
        end = min(stop, start + chunk_bytes - (start - origin) % chunk_bytes)
        yield start, end
        start = end


def _named(where: FileRange) -> str:
    return f"tensor {where.tensor!r}" if where.tensor is not None else "the table"


def _end(threads: ReadPool, handles: HandleCache) -> None:
    threads.stop()
    handles.close()
