"""The host-resident tables of an open load: a row source for each, and where they come among the streamed tensors."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from types import MappingProxyType

from loader_service.engine import Engine
from loader_service.errors import LoaderError, StateError
from loader_service.memory.tensors import torch_dtype
from loader_service.planning.plan import LoadPlan, RankPlan
from loader_service.planning.tables import TablePart
from loader_service.reading.file_range import FileRange
from loader_service.reading.ranges import RangeReader
from loader_service.reading.threads import ReadPool
from loader_service.report import PolicyOutcome
from loader_service.rows import Reading, RowReader, RowSource, SharedRowSource


def held_alone(plan: LoadPlan, part: TablePart, rank: int) -> bool:
    """Whether no other rank holds any of these rows, so that nobody else needs what the page cache has of them."""
    start, stop = part.rows
    for other in range(plan.world_size):
        theirs = plan.table(part.name, other) if other != rank else None
        if theirs is not None and max(start, theirs.rows[0]) < min(stop, theirs.rows[1]):
            return False
    return True


class LoadRowReader(RowReader):
    """The reader of an open load's tables: reads end early when another rank has failed, as all others do."""

    def __init__(self, ranges: RangeReader, threads: ReadPool, *, chunk_bytes: int, stuck_after_s: float) -> None:
        super().__init__(ranges, threads, chunk_bytes=chunk_bytes, stuck_after_s=stuck_after_s)
        self._lock = threading.Lock()
        self._readings: weakref.WeakSet[Reading] = weakref.WeakSet()
        self._failure: BaseException | None = None
        self._process = os.getpid()
        self.on_progress: Callable[[], None] | None = None  # called on reading threads, until the load is left

    def reading(self, where: FileRange, view: memoryview) -> Reading:
        if self._process != os.getpid():
            text = f"{where.path}: nothing was read of {where.of_what}: its service was opened before a fork"
            raise StateError(f"{text}: open one in each process", path=where.path, tensor=where.tensor)
        reading = super().reading(where, view)
        with self._lock:
            self._readings.add(reading)
            failure = self._failure
        if failure is not None:
            reading.fail(failure)
        return reading

    def _read(self, where: FileRange, view: memoryview) -> None:
        super()._read(where, view)
        if (tell := self.on_progress) is not None:
            tell()

    def fail(self, error: BaseException) -> None:
        """Ends all reads, also those begun before the load is left. Who began one waits for what runs of it."""
        with self._lock:
            self._failure = error
            readings = tuple(self._readings)
        for reading in readings:
            reading.fail(error)

    def resume(self) -> None:
        """The load was left: from now on sources are used for themselves."""
        with self._lock:
            self._failure = self.on_progress = None
            self._readings.clear()


class Tables:
    """This rank's tables of one load. `sources` by name, in plan order; they outlive the load, not the service.

    `on_progress` is called on reading threads when rows have come, until the load is left.
    """

    def __init__(
        self, engine: Engine, plan: LoadPlan, rank_plan: RankPlan, on_progress: Callable[[], None] | None = None
    ) -> None:
        sources: dict[str, RowSource] = {}
        self.sources = MappingProxyType(sources)
        self._places: list[tuple[int, str]] = []
        self._shard_of: dict[str, int] = {}
        parts = sorted(rank_plan.tables.items())
        may_drop = {"per_rank": all(held_alone(plan, part, rank_plan.rank) for _, part in parts), "shared": False}
        self._readers = {
            layout: engine.row_reader(LoadRowReader, may_drop=may_drop[layout])
            for layout in dict.fromkeys(part.layout for _, part in parts)
        }
        for reader in self._readers.values():
            reader.on_progress = on_progress
        for before, (i, part) in enumerate(parts):
            dtype = torch_dtype(part.dtype_code)
            if dtype is None:
                raise LoaderError(f"torch has no type for '{part.name}' ({part.dtype_code})", tensor=part.name)
            shard = plan.catalog.shards[part.shard_id]
            where = FileRange(shard.path, shard.identity, part.start, part.name)
            sources[part.name] = SharedRowSource(self._readers[part.layout], where, part.shape, dtype, part.rows)
            self._places.append((i - before, part.name))
            self._shard_of[shard.path] = part.shard_id

    def after(self, streamed: int) -> Iterator[tuple[str, RowSource]]:
        """Those whose turn is right after so many streamed tensors."""
        return ((name, self.sources[name]) for place, name in self._places if place == streamed)

    def fail(self, error: BaseException) -> None:
        """Another rank has failed: reads of rows stop now, whoever waits for them gets `error`."""
        for reader in self._readers.values():
            reader.fail(error)

    def left(self) -> None:
        """The load is over; its sources live on."""
        for reader in self._readers.values():
            reader.resume()

    @property
    def read_bytes(self) -> int:
        """What was read through the sources so far."""
        return sum(reader.ranges.statistics.read_bytes for reader in self._readers.values())

    @property
    def payload_bytes(self) -> int:
        """What was handed over through the sources so far, read or kept by a resident service."""
        return self.read_bytes + sum(reader.ranges.statistics.kept_bytes for reader in self._readers.values())

    @property
    def shards_read(self) -> set[int]:
        """The shards of which rows were read."""
        return {self._shard_of[path] for reader in self._readers.values() for path in reader.ranges.paths_read}

    @property
    def policies(self) -> dict[str, PolicyOutcome]:
        """How rows were read: one entry for each layout that the load has."""
        return {f"tables_{layout}": reader.ranges.outcome for layout, reader in self._readers.items()}
