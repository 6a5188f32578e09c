"""Row sources: a tensor of a checkpoint that is read by row range, straight into memory of the caller's choice.

For tables that stay in host memory: a rank's rows are one contiguous range of the file, read in large chunks by several
threads at once. Usable from synchronous code and from any event loop, alone or while a load streams.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

import torch

from loader_service.errors import ConfigError, DestinationError, StateError
from loader_service.memory.tensors import raw_memory, torch_dtype, why_unwritable
from loader_service.reading.chunked import Reading
from loader_service.reading.file_range import Drop, FileRange
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage
from loader_service.reading.positioned import DIRECT_BLOCK_BYTES
from loader_service.reading.ranges import RangeReader
from loader_service.reading.threads import ReadPool
from loader_service.report import PolicyOutcome

__all__ = ["Reading", "RowReader", "RowSource", "SharedRowSource"]

STANDALONE_THREADS: Final = 8
STANDALONE_CHUNK_BYTES: Final = 64 << 20
_STANDALONE_RETRIES = 3
_STANDALONE_STUCK_AFTER_S = 300.0
_MOST_FILE_BYTES = 2**63 - 1


class RowReader:
    """What several row sources share: open files, threads, and one way of reading.

    `chunk_bytes` is what one thread reads at once; a chunk that has not come back after `stuck_after_s` fails its read.
    """

    def __init__(self, ranges: RangeReader, threads: ReadPool, *, chunk_bytes: int, stuck_after_s: float) -> None:
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
        ranges = RangeReader(handles, access="auto", retries=_STANDALONE_RETRIES, drop=drop, by_tensor=True)
        reader = cls(ranges, pool, chunk_bytes=chunk_bytes, stuck_after_s=_STANDALONE_STUCK_AFTER_S)
        weakref.finalize(reader, _end, pool, handles)
        return reader

    def close(self) -> None:
        """Ends threads and closes files; a reading thread that is in a call ends after it."""
        _end(self._threads, self.ranges.handles)

    def reading(self, where: FileRange, view: memoryview) -> Reading:
        """One range to be read into `view`, in chunks, of which two a thread are queued at any time: several readings
        get on side by side. Not started yet: whoever waits for it does that, so that an interrupt finds it in one
        place. Raises StateError once this was closed."""
        if self._threads.stopped:
            text = f"{where.path}: nothing was read of {where.of_what}: its source, or the service it is of, was closed"
            raise StateError(text, path=where.path, tensor=where.tensor)
        chunks = _chunks(where.start, where.start + view.nbytes, self._chunk_bytes)
        return Reading(where, view, chunks, self._read, self._threads, self._stuck_after_s)

    def begin(self, where: FileRange, view: memoryview) -> Reading:
        """As `reading`, and starts it."""
        reading = self.reading(where, view)
        reading.start()
        return reading

    def _read(self, where: FileRange, view: memoryview) -> None:
        self.ranges.read(where, view)


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
        self._set_up(FileRange(_checked_path(path), None, offset), shape, dtype)
        _check_options(self.path, threads=threads, chunk_bytes=chunk_bytes, drop_page_cache=drop_page_cache)
        self._reader = RowReader.standalone(threads=threads, chunk_bytes=chunk_bytes, drop_page_cache=drop_page_cache)

    def _set_up(self, where: FileRange, shape: Sequence[int], dtype: torch.dtype | str) -> None:
        known = torch_dtype(dtype) if isinstance(dtype, str) else dtype
        if not isinstance(known, torch.dtype):
            raise ConfigError(f"{where.path}: torch has no dtype {dtype!r}")
        no_bytes = isinstance(shape, Sequence) and not isinstance(shape, bytes | bytearray | memoryview)
        sizes = tuple(shape) if no_bytes else ()
        if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in (where.start, *sizes)):
            raise ConfigError(
                f"{where.path}: a table needs an offset and a shape of at least one dimension, all of them integers "
                f"that are not negative, not {where.start!r} and {shape!r}"
            )
        self._where = where
        self._shape = sizes
        self._dtype = known
        self._row_bytes = math.prod(self._shape[1:]) * known.itemsize
        if where.start + self._shape[0] * self._row_bytes > _MOST_FILE_BYTES:
            raise ConfigError(f"{where.path}: no file can hold a table of shape {shape!r} at offset {where.start}")
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
        """Of the elements, torch's."""
        return self._dtype

    @property
    def rows(self) -> tuple[int, int]:
        """(start, stop) of this rank's share; all rows of a source that was made alone."""
        return self._rows

    @property
    def access(self) -> PolicyOutcome:
        """How rows were read through this source so far: past the page cache, or through it."""
        return self._reader.ranges.outcome_of(self._where)

    def read_rows_into(self, dst: torch.Tensor, row_start: int) -> None:
        """Fills `dst` with the rows [row_start, row_start + len(dst)) of the table. Blocks.

        `dst` is a contiguous CPU tensor of the table's dtype and row shape, any number of rows. Raises DestinationError
        before a byte moves if it does not fit; EndOfFileError, ReadError or CheckpointError if reading fails, once
        nothing is written to `dst` any more: its contents are then undefined. (A read that is stuck in the system is
        given up in the end; it may still write.)
        """
        where, memory = self._checked(dst, row_start)
        self._reader.reading(where, memory).wait()

    async def aread_rows_into(self, dst: torch.Tensor, row_start: int) -> None:
        """As `read_rows_into`, awaited on any loop; cancelled, it returns when nothing is written to `dst` any more."""
        where, memory = self._checked(dst, row_start)
        await self._reader.reading(where, memory).wait_async()

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

    def _checked(self, dst: torch.Tensor, row_start: int) -> tuple[FileRange, memoryview]:
        """What is to be read, and where to; whoever waits for that keeps the memory meanwhile."""
        problem = self._problem(dst, row_start)
        if problem is not None:
            text = f"{self.path}: nothing was read of {self._where.of_what}: {problem}"
            raise DestinationError(text, path=self.path, tensor=self._where.tensor)
        return self._where.moved(row_start * self._row_bytes), raw_memory(dst)

    def _problem(self, dst: object, row_start: object) -> str | None:
        if not isinstance(dst, torch.Tensor):
            return f"the destination is a {type(dst).__name__}, not a torch.Tensor"
        if isinstance(row_start, bool) or not isinstance(row_start, int):
            return f"row_start is {row_start!r}, not an integer"
        if dst.device.type != "cpu":
            return f"the destination is on {dst.device}; rows are read into host memory"
        if (unwritable := why_unwritable(dst)) is not None:
            return f"the destination {unwritable}"
        if dst.dtype != self._dtype:
            return f"the destination is {dst.dtype}, the table {self._dtype}"
        if dst.dim() == 0 or tuple(dst.shape[1:]) != self._shape[1:]:
            return (
                f"the destination's shape is {tuple(dst.shape)}; its rows must be like the table's, {self._shape[1:]}"
            )
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


def _checked_path(path: object) -> str:
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"a row source needs the path of a file, as text, not {path!r}")
    text = os.fspath(path)
    problem = "text, not bytes" if not isinstance(text, str) else "without NUL characters" if "\0" in text else None
    if problem is None:
        try:
            os.fsencode(text)
        except UnicodeEncodeError:
            problem = "one that can be encoded"
    if problem is not None:
        raise ConfigError(f"a row source needs a path that is {problem}, not {path!r}")
    return str(Path(text).absolute())


def _check_options(path: str, *, threads: object, chunk_bytes: object, drop_page_cache: object) -> None:
    for name, value in (("threads", threads), ("chunk_bytes", chunk_bytes)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{path}: {name} must be an integer of at least 1, not {value!r}")
    if not isinstance(drop_page_cache, bool):
        raise ConfigError(f"{path}: drop_page_cache must be True or False, not {drop_page_cache!r}")


def _chunks(start: int, stop: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Cuts [start, stop); at multiples of whole blocks of the file where chunks are such, so that all but the first and
    the last can be read past the page cache whole."""
    origin = 0 if chunk_bytes % DIRECT_BLOCK_BYTES == 0 else start
    while start < stop:
        end = min(stop, start + chunk_bytes - (start - origin) % chunk_bytes)
        yield start, end
        start = end


def _end(threads: ReadPool, handles: HandleCache) -> None:
    threads.stop()
    handles.close()
