"""The host-resident tables of an open load: a row source for each, and where they come among the streamed tensors."""

from __future__ import annotations

from collections.abc import Iterator

from loader_service.engine import Engine
from loader_service.errors import LoaderError
from loader_service.memory.tensors import torch_dtype
from loader_service.planning.plan import LoadPlan, RankPlan
from loader_service.reading.ranges import FileRange
from loader_service.report import PolicyOutcome
from loader_service.rows import RowReader, RowSource, SharedRowSource


class Tables:
    """This rank's tables of one load. `sources` by name, in plan order; they outlive the load, not the service."""

    def __init__(self, engine: Engine, plan: LoadPlan, rank_plan: RankPlan) -> None:
        self.sources: dict[str, RowSource] = {}
        self._places: list[tuple[int, str]] = []
        self._shard_of: dict[str, int] = {}
        self._readers: dict[str, RowReader] = {}
        for before, (i, part) in enumerate(sorted(rank_plan.tables.items())):
            reader = self._readers.get(part.layout)
            if reader is None:
                reader = self._readers[part.layout] = engine.row_reader(may_drop=part.layout == "per_rank")
            dtype = torch_dtype(part.dtype_code)
            if dtype is None:
                raise LoaderError(f"torch has no type for '{part.name}' ({part.dtype_code})", tensor=part.name)
            shard = plan.catalog.shards[part.shard_id]
            where = FileRange(shard.path, shard.identity, part.start, part.name)
            self.sources[part.name] = SharedRowSource(reader, where, part.shape, dtype, part.rows)
            self._places.append((i - before, part.name))
            self._shard_of[shard.path] = part.shard_id

    def after(self, streamed: int) -> Iterator[tuple[str, RowSource]]:
        """Those whose turn is right after so many streamed tensors."""
        return ((name, self.sources[name]) for place, name in self._places if place == streamed)

    @property
    def read_bytes(self) -> int:
        """What was read through the sources so far."""
        return sum(reader.ranges.statistics.read_bytes for reader in self._readers.values())

    @property
    def shards_read(self) -> set[int]:
        """The shards of which rows were read."""
        return {self._shard_of[path] for reader in self._readers.values() for path in reader.ranges.paths_read}

    @property
    def policies(self) -> dict[str, PolicyOutcome]:
        """How rows were read: one entry for each layout that the load has."""
        return {f"tables_{layout}": reader.ranges.outcome for layout, reader in self._readers.items()}
