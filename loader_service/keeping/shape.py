"""What a resident service keeps of a load, and where it lies in memory: a pure function of the plan.

Byte ranges of files, not tensors, so that a worker finds what it wants however it cuts tensors. A range lies in memory
as in its file: address and offset leave the same rest by the page size, so that it can be read past the page cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from loader_service.memory.allocators import PAGE_BYTES
from loader_service.memory.held import ByteRanges
from loader_service.planning.plan import LoadPlan
from loader_service.planning.tables import TablePart

Int64s = NDArray[np.int64]
Key = TypeVar("Key", int, str)


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRanges:
    """Byte ranges of one file: bytes [starts[i], stops[i]) of it lie from `offsets[i]` on in a memory file."""

    starts: Int64s
    stops: Int64s
    offsets: Int64s

    @classmethod
    def after(cls, ranges: ByteRanges, offset: int) -> tuple[Self, int]:
        """The ranges, placed from a multiple of the page size on, and the offset behind them."""
        leads = ranges.starts % PAGE_BYTES
        pages = -(-(leads + ranges.stops - ranges.starts) // PAGE_BYTES) * PAGE_BYTES
        bases = offset + np.concatenate([[0], np.cumsum(pages)]).astype(np.int64)
        return cls(ranges.starts, ranges.stops, bases[:-1] + leads), int(bases[-1])


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Where kept bytes lie: by the path of a file its ranges, in memory of `nbytes`."""

    by_file: Mapping[str, PlacedRanges]
    nbytes: int

    @classmethod
    def of(cls, ranges: Mapping[str, ByteRanges]) -> Self:
        """One file after the other."""
        placed, offset = {}, 0
        for path in sorted(ranges):
            if ranges[path].nbytes:
                placed[path], offset = PlacedRanges.after(ranges[path], offset)
        return cls(placed, offset)


def streamed_ranges(plan: LoadPlan, ranks: Iterable[int]) -> dict[int, ByteRanges]:
    """By shard, all that these ranks take of a load but its shared host tables, as they read it, gaps included."""
    starts: dict[int, list[Int64s]] = {}
    stops: dict[int, list[Int64s]] = {}
    for rank in ranks:
        part = plan.for_rank(rank)
        streamed = part.streamed
        for shard in np.unique(streamed.extent_shard).tolist():
            here = streamed.extent_shard == shard
            starts.setdefault(shard, []).append(streamed.extent_start[here])
            stops.setdefault(shard, []).append(streamed.extent_stop[here])
        for table in part.tables.values():
            if table.layout == "per_rank" and table.held_bytes:
                first, last = (table.start + row * table.row_bytes for row in table.rows)
                starts.setdefault(table.shard_id, []).append(np.array([first]))
                stops.setdefault(table.shard_id, []).append(np.array([last]))
    return {shard: ByteRanges.merged(np.concatenate(starts[shard]), np.concatenate(stops[shard])) for shard in starts}


def shared_tables(plan: LoadPlan, ranks: Iterable[int]) -> tuple[TablePart, ...]:
    """The shared host tables that any of these ranks takes rows of, whole, in plan order."""
    found: dict[str, TablePart] = {}
    for rank in ranks:
        for table in plan.tables_of(rank):
            if table.layout == "shared" and table.nbytes:
                found.setdefault(table.name, table)
    return tuple(sorted(found.values(), key=lambda table: (table.shard_id, table.start)))


def table_ranges(tables: Sequence[TablePart]) -> dict[int, ByteRanges]:
    """By shard, all bytes of whole tables; tables that follow each other are one range."""
    by_shard: dict[int, list[TablePart]] = {}
    for table in tables:
        by_shard.setdefault(table.shard_id, []).append(table)
    return {
        shard: ByteRanges.merged([t.start for t in these], [t.start + t.nbytes for t in these])
        for shard, these in by_shard.items()
    }


def equal_part(ranges: Mapping[Key, ByteRanges], number: int, count: int) -> dict[Key, ByteRanges]:
    """Of the bytes of all files, in order, the part `number` of `count` equal ones: there are few cuts, so that few
    tensors lie in two parts."""
    nbytes = sum(each.nbytes for each in ranges.values())
    first, last = (nbytes * place // count for place in (number, number + 1))
    found, passed = {}, 0
    for key in sorted(ranges):
        part = ranges[key].stretch(first - passed, last - passed)
        if part.nbytes:
            found[key] = part
        passed += ranges[key].nbytes
    return found


def ranks_of(place: int, services: int, ranks: int) -> range:
    """The ranks whose bytes one of several services keeps: as many as any other, in order, as launchers place them."""
    return range(ranks * place // services, ranks * (place + 1) // services)
