"""Groups of tensors that are cut alike: the same splits, shape and dtype. Checked once for all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from loader_service.checkpoint.catalog import Catalog
from loader_service.checkpoint.dtypes import DTYPE_LIST, DType
from loader_service.checkpoint.refusal import shown
from loader_service.checkpoint.slices import Picked, numbers_of
from loader_service.errors import ConfigError
from loader_service.planning.cuts import Interval
from loader_service.planning.fragments import PartGeometry
from loader_service.planning.mesh import Mesh
from loader_service.planning.rules import Decisions, Term
from loader_service.planning.storage import (
    first_long_dim,
    needs_raw,
    splits_a_byte,
    storage_form,
    stored_intervals,
)

WHOLE: Final = -1
"""In place of a group: the tensor is taken whole."""

_SUB_BYTE_IDS: Final = tuple(i for i, dtype in enumerate(DTYPE_LIST) if dtype.bits < 8)


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one shape (the header's) and dtype that the same terms cut; `splits` has one term a dimension."""

    shape: tuple[int, ...]
    dtype: DType
    splits: tuple[Term, ...]

    def geometry(self, mesh: Mesh, rank: int, coalesce_gap_bytes: int) -> PartGeometry:
        """The rank's part of each tensor of the group."""
        intervals: list[Sequence[Interval]] = [[(0, size)] for size in self.shape]
        for term in self.splits:
            if term.division is not None:
                place, parts = mesh.coord_along(rank, term.axes)
                intervals[term.dim] = term.division.intervals(self.shape[term.dim], parts, place)
        return geometry_of(self.shape, self.dtype, intervals, coalesce_gap_bytes)


def geometry_of(
    shape: tuple[int, ...], dtype: DType, intervals: Sequence[Sequence[Interval]], coalesce_gap_bytes: int
) -> PartGeometry:
    """The part that takes the given intervals of each of the header's dimensions."""
    form = storage_form(dtype, shape)
    return PartGeometry(
        form.shape,
        form.itemsize,
        stored_intervals(dtype, shape, intervals),
        header_shape=tuple(sum(stop - start for start, stop in dim) for dim in intervals),
        coalesce_gap_bytes=coalesce_gap_bytes,
    )


def whole_geometry(shape: tuple[int, ...], dtype: DType) -> PartGeometry:
    """The part that is the whole tensor."""
    return geometry_of(shape, dtype, [[(0, size)] for size in shape], 0)


def refuse_unholdable(catalog: Catalog, ids: npt.NDArray[np.int64], load_name: str) -> None:
    """Raises ConfigError for a tensor of the selection that torch cannot hold. For loads without `raw_dtypes`."""
    dtype_ids = catalog.dtype_ids[ids]
    narrow = np.flatnonzero(np.isin(dtype_ids, _SUB_BYTE_IDS)).tolist()
    refused = [i for i in narrow if needs_raw(DTYPE_LIST[dtype_ids[i]], catalog.shapes[ids[i]])]
    if refused:
        first = int(ids[refused[0]])
        name = catalog.names[first]
        raise ConfigError(
            f"loads.{load_name}: tensor {shown(name)} is {catalog.dtype(first).code} of shape "
            f"{list(catalog.shapes[first])}, which torch cannot hold ({len(refused)} such tensors); "
            "set raw_dtypes: true to get uint8 bytes, or skip them",
            phase="plan",
            tensor=name,
        )


def group_tensors(
    catalog: Catalog, ids: npt.NDArray[np.int64], decisions: Decisions
) -> tuple[npt.NDArray[np.int32], tuple[Group, ...]]:
    """(column, groups): for each tensor of the selection the place of its group, or WHOLE.

    Raises ConfigError, naming rule and tensor, for two splits of one dimension, a cut that is no whole number or does
    not fit the dimension, and a cut through a byte.
    """
    column = np.full(len(ids), WHOLE, dtype=np.int32)
    cutting = np.array([bool(decisions.splits(i)) for i in range(len(decisions.signatures))])
    tensors = np.flatnonzero(cutting[decisions.signature])
    if not len(tensors):
        return column, ()
    chosen = ids[tensors]
    shapes = Picked(catalog.shapes, chosen)
    columns = numbers_of(decisions.signature[tensors]), numbers_of(catalog.dtype_ids[chosen])
    keys = zip(*columns, shapes, strict=True)
    numbers: dict[tuple[int, int, tuple[int, ...]], int] = {}
    place = np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), dtype=np.int32, count=len(tensors))
    _, first = np.unique(place, return_index=True)
    groups: list[Group] = []
    final = np.full(len(numbers), WHOLE, dtype=np.int32)
    for (signature, dtype_id, shape), example in zip(numbers, first.tolist(), strict=True):
        terms = [decisions.terms[i] for i in decisions.splits(signature)]
        splits = _effective(catalog.names[chosen[example]], shape, DTYPE_LIST[dtype_id], terms)
        if splits:
            final[place[example]] = len(groups)
            groups.append(Group(shape, DTYPE_LIST[dtype_id], splits))
    column[tensors] = final[place]
    return column, tuple(groups)


def _effective(name: str, shape: tuple[int, ...], dtype: DType, terms: Sequence[Term]) -> tuple[Term, ...]:
    """The terms that cut the tensor, all found to be possible. One over a single rank, or of size 1, cuts nothing."""
    by_dim: dict[int, Term] = {}
    for term in terms:
        if term.division is None or term.dim >= len(shape) or shape[term.dim] == 1:
            continue
        if term.dim in by_dim:
            _refuse(term, name, shape, f"dimension {term.dim} is also split by {by_dim[term.dim].where}; remove one")
        by_dim[term.dim] = term
        problem = term.division.problem(shape[term.dim], term.parts)
        if problem is not None:
            _refuse(term, name, shape, f"dimension {term.dim}: {problem}")
    splits = tuple(term for term in by_dim.values() if term.parts > 1)
    if dtype.bits < 8:
        for term in splits:
            _refuse_split_bytes(term, name, shape, dtype)
    return splits


def _refuse_split_bytes(term: Term, name: str, shape: tuple[int, ...], dtype: DType) -> None:
    if term.division is None:
        return
    form = storage_form(dtype, shape)
    size = shape[term.dim]
    edges = {
        edge
        for part in range(term.parts)
        for interval in term.division.intervals(size, term.parts, part)
        for edge in interval
    }
    if edges <= {0, size}:
        return
    scattered = form.flat and term.dim != first_long_dim(shape)
    if scattered or splits_a_byte(dtype, shape, term.dim, sorted(edges)):
        _refuse(
            term,
            name,
            shape,
            f"cutting dimension {term.dim} splits a byte ({dtype.code} elements have {dtype.bits} bits); "
            "cut at a multiple of whole bytes with `align`, or take the tensor whole",
        )


def _refuse(term: Term, name: str, shape: tuple[int, ...], problem: str) -> None:
    message = f"{term.where}: tensor {shown(name)} of shape {list(shape)}: {problem}"
    raise ConfigError(message, phase="plan", tensor=name)
