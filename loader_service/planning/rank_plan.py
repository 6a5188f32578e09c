"""One rank's part of a plan: which bytes of which file it reads, and where each of them goes. Frozen columns."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import numpy as np
import numpy.typing as npt

from loader_service.checkpoint.catalog import Catalog
from loader_service.checkpoint.dtypes import DTYPE_LIST
from loader_service.planning.extents import ExtentColumns, coalesce
from loader_service.planning.fragments import PartGeometry, PartSpec, SubRange, subdivide
from loader_service.planning.groups import WHOLE, whole_geometry
from loader_service.planning.storage import storage_form
from loader_service.planning.tables import TablePart

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

Block = SubRange
"""A fragment whose wanted bytes alternate with others: its whole file range, and the views of what is wanted."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [start, stop) of a file, read as one: the unit of scheduling. `shard_id` indexes the catalog's shards."""

    path: str
    shard_id: int
    start: int
    stop: int


class Extents(Sequence[Extent]):
    """A rank's extents in plan order; items are made when asked for."""

    def __init__(self, catalog: Catalog, columns: ExtentColumns) -> None:
        self._shards = catalog.shards
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns.start)

    @overload
    def __getitem__(self, at: int) -> Extent: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Extent, ...]: ...
    def __getitem__(self, at: int | slice) -> Extent | tuple[Extent, ...]:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(len(self))))
        shard = int(self._columns.shard[at])
        return Extent(self._shards[shard].path, shard, int(self._columns.start[at]), int(self._columns.stop[at]))


@dataclass(frozen=True)
class FragmentColumns:
    """Fragments sorted by (shard, start). Fragment f is bytes [start[f], stop[f]) of `shard[f]`, for the rank's tensor
    `tensor[f]`; it is fragment `number[f]` of that tensor. `dst[f]` is its byte offset in the rank's tensor, -1 for a
    block.
    """

    tensor: Int64s
    start: Int64s
    stop: Int64s
    dst: Int64s
    shard: Int32s
    number: Int64s


@dataclass(frozen=True, eq=False)
class RankPlan:
    """What one rank reads. Made by `LoadPlan.for_rank`; every rank can make any rank's.

    Tensors are counted from 0 in plan order, (file name, offset); all methods with an argument `i` take such a number.
    Zero-size tensors and empty parts are among them, without fragments. `tensor_ids` are catalog ids, `tensor_nbytes`
    the bytes of the rank's part of each, `payload_bytes` their sum, `read_bytes` the sum of the extents. `tables` are
    those that stay in host memory, by number: their rows count in the sums, but are not streamed. No extent takes bytes
    of a table of `unbridged` because they lie between two fragments.
    """

    rank: int
    load_digest: str
    catalog: Catalog
    coalesce_gap_bytes: int
    tensor_ids: Int64s
    tensor_group: Int32s
    tensor_nbytes: Int64s
    payload_bytes: int
    read_bytes: int
    fragments: FragmentColumns
    extent_columns: ExtentColumns
    geometries: Mapping[int, PartGeometry]
    tables: Mapping[int, TablePart] = field(default_factory=dict)
    unbridged: tuple[TablePart, ...] = ()
    _whole: dict[tuple[int, tuple[int, ...]], PartGeometry] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """The number of tensors that the rank takes."""
        return len(self.tensor_ids)

    @property
    def extents(self) -> Extents:
        """What is read, in plan order; each as one range of a file."""
        return Extents(self.catalog, self.extent_columns)

    @property
    def extent_start(self) -> Int64s:
        return self.extent_columns.start

    @property
    def extent_stop(self) -> Int64s:
        return self.extent_columns.stop

    @property
    def extent_shard(self) -> Int32s:
        return self.extent_columns.shard

    @property
    def extent_first_fragment(self) -> Int64s:
        """Fragments [result[e], result[e + 1]) lie in extent e."""
        return self.extent_columns.first_fragment

    @property
    def fragment_tensor(self) -> Int64s:
        return self.fragments.tensor

    @property
    def fragment_start(self) -> Int64s:
        return self.fragments.start

    @property
    def fragment_stop(self) -> Int64s:
        return self.fragments.stop

    @property
    def fragment_dst(self) -> Int64s:
        return self.fragments.dst

    @property
    def fragment_shard(self) -> Int32s:
        return self.fragments.shard

    @cached_property
    def streamed(self) -> RankPlan:
        """The plan for what is streamed: without the host-resident tables."""
        if not self.tables:
            return self
        return self.restrict([i for i in range(len(self)) if i not in self.tables])

    @cached_property
    def blocks(self) -> Mapping[int, Block]:
        """Every fragment that is a block, whole."""
        return {int(f): self.block(int(f)) for f in np.flatnonzero(self.fragments.dst < 0)}

    def block(self, fragment: int) -> Block:
        """A fragment, direct or not, as one file range with its views."""
        nbytes = int(self.fragments.stop[fragment] - self.fragments.start[fragment])
        return next(subdivide(self, fragment, nbytes))

    @cached_property
    def digest(self) -> str:
        """Of the load's digest and this rank's own columns, little-endian: equal where two ranks plan the same."""
        columns = (
            self.tensor_ids,
            self.extent_columns.start,
            self.extent_columns.stop,
            self.extent_columns.shard,
            self.fragments.tensor,
            self.fragments.start,
            self.fragments.stop,
            self.fragments.dst,
        )
        hasher = hashlib.sha256(f"rank plan {self.load_digest} {self.rank}".encode())
        for column in columns:
            hasher.update(len(column).to_bytes(8, "little"))
            hasher.update(np.ascontiguousarray(column, dtype="<i8").data)
        return hasher.hexdigest()

    def name(self, i: int) -> str:
        """The tensor's name."""
        return self.catalog.names[self.catalog_id(i)]

    def catalog_id(self, i: int) -> int:
        return int(self.tensor_ids[i])

    def index_of(self, name: str) -> int | None:
        """The number of a tensor, None where the rank does not take it."""
        catalog_id = self.catalog.id_of(name)
        if catalog_id is None:
            return None
        i = int(np.searchsorted(self.tensor_ids, catalog_id))
        return i if i < len(self.tensor_ids) and self.tensor_ids[i] == catalog_id else None

    def dtype_code(self, i: int) -> str:
        """The header's dtype code."""
        return self.catalog.dtype(self.catalog_id(i)).code

    def storage_dtype_code(self, i: int) -> str:
        """The dtype code in which the tensor is handed over: the header's, or U8 for raw bytes."""
        tensor = self.catalog_id(i)
        dtype = self.catalog.dtype(tensor)
        return dtype.code if dtype.bits >= 8 else storage_form(dtype, self.catalog.shapes[tensor]).dtype_code

    def storage_shape(self, i: int) -> tuple[int, ...]:
        """The shape of the rank's tensor in storage elements (an F4's last dimension is halved)."""
        tensor = self.catalog_id(i)
        if self.tensor_group[i] == WHOLE and self.catalog.dtype(tensor).bits >= 8:
            return self.catalog.shapes[tensor]
        return self.geometry(i).shape

    def header_shape(self, i: int) -> tuple[int, ...]:
        """The shape of the rank's tensor as headers count elements, for manifests."""
        return self.geometry(i).header_shape

    def itemsize(self, i: int) -> int:
        """Bytes of a storage element."""
        return max(1, self.catalog.dtype(self.catalog_id(i)).bits // 8)

    def nbytes(self, i: int) -> int:
        """Bytes of the rank's tensor."""
        return int(self.tensor_nbytes[i])

    def spec(self, i: int) -> PartSpec:
        """How the rank's tensor relates to the checkpoint's."""
        return self.geometry(i).spec(self.dtype_code(i))

    def geometry(self, i: int) -> PartGeometry:
        group = int(self.tensor_group[i])
        if group != WHOLE:
            return self.geometries[group]
        tensor = self.catalog_id(i)
        dtype_id, shape = int(self.catalog.dtype_ids[tensor]), self.catalog.shapes[tensor]
        found = self._whole.get((dtype_id, shape))
        if found is None:
            found = self._whole[dtype_id, shape] = whole_geometry(shape, DTYPE_LIST[dtype_id])
        return found

    def origin(self, fragment: int) -> tuple[PartGeometry, int, int]:
        """For `subdivide`: the geometry that the fragment belongs to, its number there, the tensor's first byte."""
        i = int(self.fragments.tensor[fragment])
        start = int(self.catalog.starts[self.tensor_ids[i]])
        return self.geometry(i), int(self.fragments.number[fragment]), start

    def restrict(self, indices: Sequence[int]) -> RankPlan:
        """The plan for some of the rank's tensors, given by their numbers in any order; coalesced anew.

        Tensors of the new plan are counted anew, in plan order. Raises IndexError for a number that does not exist.
        """
        kept = np.asarray(sorted(set(indices)), dtype=np.int64)  # np.unique imports numpy.ma: not on the loop
        if len(kept) and not 0 <= kept[0] <= kept[-1] < len(self):
            raise IndexError(f"the plan has tensors 0 to {len(self) - 1}; asked for {int(kept[0])} to {int(kept[-1])}")
        return make_rank_plan(
            self.catalog,
            self.rank,
            self.load_digest,
            self.tensor_ids[kept],
            self.tensor_group[kept],
            self.geometries,
            self.coalesce_gap_bytes,
            unbridged=self.unbridged,
        )


def make_rank_plan(
    catalog: Catalog,
    rank: int,
    load_digest: str,
    tensor_ids: Int64s,
    tensor_group: Int32s,
    geometries: Mapping[int, PartGeometry],
    coalesce_gap_bytes: int,
    tables: Mapping[int, TablePart] | None = None,
    *,
    unbridged: Sequence[TablePart] = (),
) -> RankPlan:
    """The plan for the tensors `tensor_ids` (ascending). `tensor_group` holds for each its key in `geometries`, or
    WHOLE; `tables` says which of them, by their place here, stay in host memory, `unbridged` what others do.
    """
    tables = tables or {}
    unbridged = (*unbridged, *tables.values())
    nbytes = catalog.stops[tensor_ids] - catalog.starts[tensor_ids]
    members = _members(tensor_group)
    for group, tensors in members.items():
        nbytes[tensors] = geometries[group].nbytes
    fragments = _fragments(catalog, tensor_ids, nbytes, members, geometries)
    payload_bytes = int(nbytes.sum())
    streamed_bytes = payload_bytes - int(nbytes[list(tables)].sum())
    extents = coalesce(
        fragments.start,
        fragments.stop,
        fragments.shard,
        payload_bytes=streamed_bytes,  # so that the extents of what is streamed are the same without the tables
        gap_bytes=coalesce_gap_bytes,
        apart=_apart(fragments, tables, unbridged) if unbridged else None,
    )
    for column in (tensor_ids, tensor_group, nbytes, *vars(fragments).values()):
        column.flags.writeable = False
    for column in (extents.start, extents.stop, extents.shard, extents.first_fragment):
        column.flags.writeable = False
    return RankPlan(
        rank,
        load_digest,
        catalog,
        coalesce_gap_bytes,
        tensor_ids,
        tensor_group,
        nbytes,
        payload_bytes,
        int((extents.stop - extents.start).sum()),
        fragments,
        extents,
        geometries,
        tables,
        unbridged,
    )


def _apart(
    fragments: FragmentColumns, tables: Mapping[int, TablePart], unbridged: Sequence[TablePart]
) -> npt.NDArray[np.bool_]:
    """Which gaps, each between a fragment and the next, border on rows of `tables` or hold a byte of `unbridged`."""
    rows = np.isin(fragments.tensor, list(tables))
    apart: npt.NDArray[np.bool_] = rows[1:] | rows[:-1]
    for table in unbridged:
        same_shard = fragments.shard[1:] == table.shard_id
        apart |= same_shard & (fragments.stop[:-1] < table.start + table.nbytes) & (fragments.start[1:] > table.start)
    return apart


def _members(tensor_group: Int32s) -> Mapping[int, Int64s]:
    """The tensors of each group."""
    cut = np.flatnonzero(tensor_group != WHOLE)
    if not len(cut):
        return {}
    ordered = cut[np.argsort(tensor_group[cut], kind="stable")]
    groups, first = np.unique(tensor_group[ordered], return_index=True)
    return dict(zip(groups.tolist(), np.split(ordered, first[1:]), strict=True))


def _fragments(
    catalog: Catalog,
    tensor_ids: Int64s,
    nbytes: Int64s,
    members: Mapping[int, Int64s],
    geometries: Mapping[int, PartGeometry],
) -> FragmentColumns:
    first_byte = catalog.starts[tensor_ids]
    counts = (nbytes > 0).astype(np.int64)
    for group, tensors in members.items():
        counts[tensors] = len(geometries[group].start)
    tensor = np.repeat(np.arange(len(tensor_ids), dtype=np.int64), counts)
    start = first_byte[tensor]
    stop = start + nbytes[tensor]
    dst, number = np.zeros(len(tensor), dtype=np.int64), np.zeros(len(tensor), dtype=np.int64)
    head = np.cumsum(counts) - counts
    for group, tensors in members.items():
        geometry = geometries[group]
        order = np.arange(len(geometry.start))
        at = (head[tensors][:, None] + order).ravel()
        start[at] = (first_byte[tensors][:, None] + geometry.start).ravel()
        stop[at] = (first_byte[tensors][:, None] + geometry.stop).ravel()
        dst[at] = np.tile(geometry.dst, len(tensors))
        number[at] = np.tile(order, len(tensors))
    return FragmentColumns(tensor, start, stop, dst, catalog.shard_ids[tensor_ids][tensor], number)


def files_of(plan: RankPlan) -> Iterator[tuple[str, list[list[int]]]]:
    """(path, [[start, stop], ...]) for each file that the rank reads, in plan order."""
    columns = plan.extent_columns
    ranges = np.stack((columns.start, columns.stop), axis=1)
    shards, first = np.unique(columns.shard, return_index=True)
    for shard, own in zip(shards.tolist(), np.split(ranges, first[1:]), strict=False):
        yield plan.catalog.shards[shard].path, own.tolist()
