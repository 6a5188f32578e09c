"""Host-resident tables: which rows of each a rank holds. A rank's rows are one contiguous range of the file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from loader_service.checkpoint.catalog import Catalog
from loader_service.checkpoint.refusal import shown
from loader_service.errors import ConfigError
from loader_service.planning.groups import WHOLE, Group
from loader_service.planning.mesh import Mesh
from loader_service.planning.rules import Decisions, Layout
from loader_service.planning.storage import storage_form

Rows = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TablePart:
    """One rank's part of a table.

    `start` is the absolute byte offset of the whole table in shard `shard_id`, `shape` the whole table's in storage
    elements of `dtype_code`, and `rows` (start, stop) what the rank holds of it: possibly nothing.
    """

    name: str
    layout: Layout
    shard_id: int
    start: int
    shape: tuple[int, ...]
    dtype_code: str
    itemsize: int
    rows: Rows

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return math.prod(self.shape[1:]) * self.itemsize

    @property
    def nbytes(self) -> int:
        """Of the whole table."""
        return self.shape[0] * self.row_bytes

    @property
    def held_bytes(self) -> int:
        """Of the rank's rows."""
        return (self.rows[1] - self.rows[0]) * self.row_bytes

    def as_json(self) -> dict[str, object]:
        """As `plan --json` has it."""
        return {"name": self.name, "layout": self.layout, "rows": list(self.rows), "bytes": self.held_bytes}


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What a load's tables take of host memory, all of them filled.

    `rank_bytes` is the most that one rank takes for rows of its own (`per_rank`), `shared_bytes` what every node takes
    for whole tables (`shared`), `one_node_bytes` what a node takes that has all the ranks.
    """

    rank_bytes: int
    shared_bytes: int
    one_node_bytes: int

    @classmethod
    def of(cls, parts_by_rank: Sequence[Sequence[TablePart]]) -> HostMemory:
        """Of the parts that each rank takes."""
        own = [sum(part.held_bytes for part in parts if part.layout == "per_rank") for parts in parts_by_rank]
        shared = {part.name: part.nbytes for parts in parts_by_rank for part in parts if part.layout == "shared"}
        shared_bytes = sum(shared.values())
        return cls(max(own, default=0), shared_bytes, sum(own) + shared_bytes)

    def as_json(self) -> dict[str, int]:
        """As `plan --json` has it."""
        return {
            "rank_bytes": self.rank_bytes,
            "shared_bytes": self.shared_bytes,
            "one_node_bytes": self.one_node_bytes,
        }


def table_part(catalog: Catalog, tensor: int, layout: Layout, group: Group | None, mesh: Mesh, rank: int) -> TablePart:
    """The rank's part of the catalog's tensor; `group` None for one that every rank takes whole."""
    form = storage_form(catalog.dtype(tensor), catalog.shapes[tensor])
    return TablePart(
        catalog.names[tensor],
        layout,
        int(catalog.shard_ids[tensor]),
        int(catalog.starts[tensor]),
        form.shape,
        form.dtype_code,
        form.itemsize,
        (0, form.shape[0]) if group is None else _rows(group, mesh, rank),
    )


def _rows(group: Group, mesh: Mesh, rank: int) -> Rows:
    for term in group.splits:
        if term.division is not None:
            place, parts = mesh.coord_along(rank, term.axes)
            return term.division.cuts[0].interval(group.shape[0], parts, place)
    return 0, group.shape[0]


def filled_by(parts: Sequence[TablePart], hosts: Sequence[int]) -> list[tuple[Rows, ...]]:
    """Which rows of a table each rank fills, and so takes the memory of: its own, or its share of what it fills with
    others. `parts` are all ranks' parts; in layout shared `hosts` names for each rank the one whose memory it uses.
    """
    if parts[0].layout == "per_rank":
        return [(part.rows,) for part in parts]
    found: dict[int, tuple[Rows, ...]] = {}
    for host in dict.fromkeys(hosts):
        rows = {rank: part.rows for rank, part in enumerate(parts) if hosts[rank] == host}
        found |= shares(parts[host].shape[0], rows)
    return [found[rank] for rank in range(len(parts))]


def shares(total: int, rows_by_rank: Mapping[int, Rows]) -> dict[int, tuple[Rows, ...]]:
    """Who fills which rows of a table of `total` rows that the given ranks of a node share: each row once.

    A rank fills what it holds; rows that several of them hold are divided among those, rows that none of them holds (a
    rank of another node does) among all.
    """
    edges = sorted({0, total, *(edge for rows in rows_by_rank.values() for edge in rows)})
    found: dict[int, list[Rows]] = {rank: [] for rank in rows_by_rank}
    for start, stop in itertools.pairwise(edges):
        holders = [rank for rank, (first, last) in rows_by_rank.items() if first <= start and stop <= last]
        fillers = sorted(holders or rows_by_rank)
        for place, rank in enumerate(fillers):
            share = tuple(start + (stop - start) * at // len(fillers) for at in (place, place + 1))
            if share[0] < share[1]:
                found[rank].append((share[0], share[1]))
    return {rank: _joined(ranges) for rank, ranges in found.items()}


def _joined(ranges: Sequence[Rows]) -> tuple[Rows, ...]:
    joined: list[Rows] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def refuse_what_has_no_rows(
    catalog: Catalog,
    ids: npt.NDArray[np.int64],
    decisions: Decisions,
    column: npt.NDArray[np.int32],
    groups: Sequence[Group],
) -> None:
    """Raises ConfigError, naming rule and tensor, for a table that is not cut by contiguous rows of whole bytes."""
    for position, table in decisions.tables.items():
        tensor = int(ids[position])
        shape = catalog.shapes[tensor]
        if not shape:
            _refuse(catalog, tensor, table.where, "a scalar has no rows; keep it out of `match`")
        dtype = catalog.dtype(tensor)
        if storage_form(dtype, shape).flat or (dtype.bits < 8 and len(shape) == 1):
            _refuse(catalog, tensor, table.where, "its rows are no whole bytes; load it as an ordinary tensor")
        if column[position] == WHOLE:
            continue
        for term in groups[column[position]].splits:
            if term.dim != 0 or (term.division is not None and len(term.division.proportions) > 1):
                how = f"along dimension {term.dim}" if term.dim else "in sections"
                text = f"{term.where} cuts it {how}, but tables are cut by contiguous rows: narrow a `match`"
                _refuse(catalog, tensor, table.where, text)


def _refuse(catalog: Catalog, tensor: int, where: str, problem: str) -> NoReturn:
    name = catalog.names[tensor]
    message = f"{where}: tensor {shown(name)} of shape {list(catalog.shapes[tensor])}: {problem}"
    raise ConfigError(message, phase="plan", tensor=name)
