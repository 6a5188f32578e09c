"""The plan of a load for all ranks: a pure function of (catalog, load, mesh), so that every rank arrives at the same.

`make_plan` does once what does not depend on the rank; a rank's own part is computed when asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from loader_service.checkpoint.catalog import Catalog
from loader_service.config.normalised import normalised_load
from loader_service.config.schema import LoadConfig
from loader_service.planning.groups import WHOLE, Group, group_tensors, refuse_unholdable
from loader_service.planning.mesh import Mesh
from loader_service.planning.rank_plan import Block, Extent, RankPlan, files_of, make_rank_plan
from loader_service.planning.rules import Decisions, Table, decide
from loader_service.planning.selection import select
from loader_service.planning.tables import HostMemory, TablePart, refuse_what_has_no_rows, table_part

__all__ = ["PLANNER_VERSION", "Block", "Extent", "LoadPlan", "RankPlan", "make_plan"]

PLANNER_VERSION: Final = 1
"""Part of every digest: raised when the same input gives another plan, so that mixed versions do not load together."""

_RANKS_KEPT = 8


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """Who reads what. `load` is the load's name; `warnings` say what matched nothing; `read_all` that no prefix did.

    `digest` covers the catalog's digest, the load, the mesh and coordinates and the coalescing, but no local path:
    ranks with the same digest plan the same bytes.
    """

    load: str
    mesh: Mesh
    catalog: Catalog
    digest: str
    warnings: tuple[str, ...]
    read_all: bool
    coalesce_gap_bytes: int
    tensor_ids: npt.NDArray[np.int64]
    tensor_group: npt.NDArray[np.int32]
    groups: tuple[Group, ...]
    decisions: Decisions
    _ranks: dict[int, RankPlan] = field(default_factory=dict, repr=False)

    @property
    def world_size(self) -> int:
        """For how many ranks it is."""
        return self.mesh.world_size

    def for_rank(self, rank: int) -> RankPlan:
        """The rank's part. The last few are kept. Raises ConfigError for a rank that does not exist."""
        found = self._ranks.get(rank)
        if found is None:
            found = self._make(rank)
            if len(self._ranks) >= _RANKS_KEPT:
                self._ranks.clear()
            self._ranks[rank] = found
        return found

    def as_json(self, ranks: Iterable[int] | None = None) -> dict[str, object]:
        """The plan as plain data, for `plan --json`; all ranks unless some are named. Ranges are absolute offsets."""
        wanted = range(self.world_size) if ranks is None else ranks
        return {
            "load": self.load,
            "world_size": self.world_size,
            "catalog_digest": self.catalog.digest,
            "plan_digest": self.digest,
            "warnings": list(self.warnings),
            "host_memory": self.host_memory.as_json(),
            "ranks": [_rank_as_json(self._ranks.get(rank) or self._make(rank)) for rank in wanted],
        }

    def _make(self, rank: int) -> RankPlan:
        self.mesh.coordinates(rank)
        places = self.decisions.places(self.mesh, rank)
        for other in tuple(self._ranks.values()):
            if self.decisions.places(self.mesh, other.rank) == places:
                return replace(other, rank=rank)  # the same columns: a node of 8 ranks that take everything makes one
        ids, group = self.tensor_ids, self.tensor_group
        if self.decisions.terms:
            taken = np.flatnonzero(self.decisions.taken_by(self.mesh, rank))
            ids, group = ids[taken], group[taken]
        present = np.flatnonzero(np.bincount(group - WHOLE, minlength=len(self.groups) + 1)[1:]).tolist()
        geometries = {g: self.groups[g].geometry(self.mesh, rank, self.coalesce_gap_bytes) for g in present}
        tables = self._tables(rank, ids)
        return make_rank_plan(self.catalog, rank, self.digest, ids, group, geometries, self.coalesce_gap_bytes, tables)

    def table(self, name: str, rank: int) -> TablePart | None:
        """The rank's part of a host-resident table; without rows where the rank takes none of it. None for any other
        name. Raises ConfigError for a rank that does not exist."""
        self.mesh.coordinates(rank)
        position = self._position(name)
        table = self.decisions.tables.get(position) if position is not None else None
        if position is None or table is None:
            return None
        part = self._part(position, table, rank)
        return part if self.decisions.taken(position, self.mesh, rank) else replace(part, rows=(0, 0))

    def split_rules(self, name: str) -> tuple[str, ...]:
        """The key paths of the `split`s that apply to a tensor, as `loads.target.rules[0].split`; empty for names that
        the load does not have."""
        position = self._position(name)
        if position is None:
            return ()
        terms = self.decisions.splits(int(self.decisions.signature[position]))
        return tuple(self.decisions.terms[i].where for i in terms)

    def _position(self, name: str) -> int | None:
        """The place of a name among the load's tensors."""
        tensor = self.catalog.id_of(name)
        if tensor is None:
            return None
        position = int(np.searchsorted(self.tensor_ids, tensor))
        return position if position < len(self.tensor_ids) and self.tensor_ids[position] == tensor else None

    def tables_of(self, rank: int) -> tuple[TablePart, ...]:
        """The rank's parts of the host-resident tables that it takes, in plan order. Cheaper than `for_rank`."""
        tables = sorted(self.decisions.tables.items())
        return tuple(
            self._part(position, table, rank)
            for position, table in tables
            if self.decisions.taken(position, self.mesh, rank)
        )

    @property
    def host_memory(self) -> HostMemory:
        """What the load's tables take."""
        return HostMemory.of([self.tables_of(rank) for rank in range(self.world_size)])

    def _tables(self, rank: int, ids: npt.NDArray[np.int64]) -> dict[int, TablePart]:
        """The rank's tables by their place in `ids`, the tensors that it takes."""
        found: dict[int, TablePart] = {}
        for position, table in self.decisions.tables.items():
            tensor = self.tensor_ids[position]
            place = int(np.searchsorted(ids, tensor))
            if place < len(ids) and ids[place] == tensor:
                found[place] = self._part(position, table, rank)
        return found

    def _part(self, position: int, table: Table, rank: int) -> TablePart:
        group = int(self.tensor_group[position])
        cut = None if group == WHOLE else self.groups[group]
        return table_part(self.catalog, int(self.tensor_ids[position]), table.layout, cut, self.mesh, rank)


def make_plan(catalog: Catalog, load_name: str, load: LoadConfig, mesh: Mesh, *, coalesce_gap_bytes: int) -> LoadPlan:
    """Plans a load for all ranks of the mesh.

    Raises ConfigError for rules that do not fit the mesh or the tensors, CheckpointError for prefixes that the
    checkpoint lacks; nothing is read.
    """
    selection = select(catalog, load_name, load)
    if not load.raw_dtypes:
        refuse_unholdable(catalog, selection.ids, load_name)
    decisions = decide(catalog, selection.ids, load_name, load.rules, mesh)
    tensor_group, groups = group_tensors(catalog, selection.ids, decisions)
    refuse_what_has_no_rows(catalog, selection.ids, decisions, tensor_group, groups)
    warnings = [*selection.warnings, *decisions.warnings]
    if mesh.empty_positions:
        warnings.append(
            f"loads.{load_name}: no rank's coords are at {mesh.empty_positions} of the mesh's positions; "
            "what only they would take is not loaded"
        )
    selection.ids.flags.writeable = tensor_group.flags.writeable = False
    return LoadPlan(
        load=load_name,
        mesh=mesh,
        catalog=catalog,
        digest=_digest(catalog, load, mesh, coalesce_gap_bytes),
        warnings=tuple(warnings),
        read_all=selection.read_all,
        coalesce_gap_bytes=coalesce_gap_bytes,
        tensor_ids=selection.ids,
        tensor_group=tensor_group,
        groups=groups,
        decisions=decisions,
    )


def _digest(catalog: Catalog, load: LoadConfig, mesh: Mesh, coalesce_gap_bytes: int) -> str:
    content = {
        "planner": PLANNER_VERSION,
        "catalog": catalog.digest,
        "load": normalised_load(load),
        "axes": mesh.axes,
        "sizes": mesh.sizes,
        "coordinates": mesh.table,
        "coalesce_gap_bytes": coalesce_gap_bytes,
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _rank_as_json(plan: RankPlan) -> dict[str, object]:
    return {
        "rank": plan.rank,
        "payload_bytes": plan.payload_bytes,
        "read_bytes": plan.read_bytes,
        "reads": len(plan.extents),
        "files": [{"path": path, "ranges": ranges} for path, ranges in files_of(plan)],
        "tables": [plan.tables[i].as_json() for i in sorted(plan.tables)],
    }
