"""Tables in files, sources over them with scripted faults, and what their rows must be."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from loader_service.memory.tensors import raw_memory
from loader_service.reading.fake import FakeStorage
from loader_service.reading.file_range import Access, Drop, FileRange
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage
from loader_service.reading.ranges import RangeReader
from loader_service.reading.threads import ReadPool
from loader_service.rows import RowReader, RowSource, SharedRowSource
from tests.reading.making import PATIENCE_S

SENTINEL = 0xA5


@dataclass(frozen=True)
class Table:
    """A table that lies at `offset` of a file, with other bytes before and behind it."""

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    content: bytes

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> bytes:
        return self.content[start * self.row_bytes : stop * self.row_bytes]

    def alone(self, **options: object) -> RowSource:
        return RowSource(self.path, self.offset, self.shape, self.dtype, **options)  # type: ignore[arg-type]

    def over(self, reader: RowReader, *, tensor: str | None = "table") -> SharedRowSource:
        identity = reader.ranges.handles.storage.identify(self.path)
        where = FileRange(self.path, identity, self.offset, tensor)
        return SharedRowSource(reader, where, self.shape, self.dtype, (0, self.shape[0]))


def make_table(
    folder: Path,
    shape: tuple[int, ...] = (37, 20),
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    offset: int = 123,
    name: str = "table.bin",
) -> Table:
    nbytes = math.prod(shape) * dtype.itemsize
    content = random.Random(f"{name} {shape} {dtype}").randbytes(nbytes)
    path = folder / name
    path.write_bytes(b"\x11" * offset + content + b"\x22" * 500)
    return Table(str(path), offset, shape, dtype, content)


def empty_rows(table: Table, rows: int) -> torch.Tensor:
    """A destination full of a byte that tells whether it was written."""
    filled = torch.full((rows * table.row_bytes,), SENTINEL, dtype=torch.uint8)
    return (
        filled.view(table.dtype).view(rows, *table.shape[1:])
        if rows * table.row_bytes
        else torch.empty((rows, *table.shape[1:]), dtype=table.dtype)
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(raw_memory(tensor))


def untouched(tensor: torch.Tensor) -> bool:
    return set(bytes_of(tensor)) <= {SENTINEL}


@dataclass
class Workshop:
    """A reader over a fake storage, which the test ends."""

    fake: FakeStorage
    pool: ReadPool
    reader: RowReader

    @classmethod
    def make(
        cls,
        *,
        threads: int = 2,
        chunk_bytes: int = 100,
        access: Access = "buffered",
        drop: Drop = "nothing",
        retries: int = 0,
        stuck_after_s: float = 300.0,
    ) -> Workshop:
        fake = FakeStorage(LocalStorage())
        pool = ReadPool(threads, name="loader-rows")
        ranges = RangeReader(HandleCache(fake, 16), access=access, retries=retries, drop=drop)
        return cls(fake, pool, RowReader(ranges, pool, chunk_bytes=chunk_bytes, stuck_after_s=stuck_after_s))

    @property
    def queued(self) -> int:
        return len(self.pool._queue)

    def until_nothing_is_queued(self) -> None:
        until(lambda: self.queued == 0)

    def end(self) -> None:
        self.fake.clear()
        self.reader.close()
        assert self.pool.shutdown(PATIENCE_S) == []
        assert self.fake.open_now == 0


def until(true: Callable[[], bool]) -> None:
    """Looks again and again until something is so."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s, "it never came to be"
        time.sleep(0.002)
