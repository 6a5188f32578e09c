"""What a rank's tensor is handed over as, and how it comes from the checkpoint's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from loader_service.checkpoint.dtypes import DTYPE_LIST
from loader_service.memory.tensors import empty_tensor, torch_dtype
from loader_service.planning.groups import WHOLE
from loader_service.planning.plan import RankPlan


def storage_dtype(plan: RankPlan, tensor: int) -> torch.dtype:
    """The torch dtype that the rank's tensor is handed over in (uint8 for raw types)."""
    dtype = torch_dtype(plan.storage_dtype_code(tensor))
    assert dtype is not None  # the planner refuses what torch cannot hold, or makes it raw bytes
    return dtype


def storage_columns(
    plan: RankPlan, first: int, stop: int
) -> tuple[list[str], list[torch.dtype], list[tuple[int, ...]]]:
    """(names, torch dtypes, shapes) of tensors [first, stop): as `plan.name`, `storage_dtype` and
    `plan.storage_shape`, at a fraction of what they cost for each."""
    ids = plan.tensor_ids[first:stop].tolist()
    dtype_ids = plan.catalog.dtype_ids[plan.tensor_ids[first:stop]]
    names, shapes = plan.catalog.names, plan.catalog.shapes
    table = _plain_dtypes()
    dtypes = [table[number] for number in dtype_ids.tolist()]
    whole = plan.tensor_group[first:stop] == WHOLE
    if whole.all() and None not in dtypes:
        return [names[i] for i in ids], cast("list[torch.dtype]", dtypes), [shapes[i] for i in ids]
    tensors = range(first, stop)
    return [names[i] for i in ids], [storage_dtype(plan, i) for i in tensors], [plan.storage_shape(i) for i in tensors]


@functools.cache
def _plain_dtypes() -> list[torch.dtype | None]:
    """The torch dtype by the catalog's number of one; None for those whose elements are no whole bytes."""
    return [torch_dtype(dtype.code) if dtype.bits >= 8 else None for dtype in DTYPE_LIST]


def empty_of(plan: RankPlan, tensor: int, shape: Sequence[int]) -> torch.Tensor:
    """A tensor, or a piece of one, without elements."""
    catalog = plan.catalog
    path = catalog.shards[int(catalog.shard_ids[plan.catalog_id(tensor)])].path
    return empty_tensor(shape, storage_dtype(plan, tensor), path=path, name=plan.name(tensor))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """How a rank's tensor comes from the checkpoint's.

    `full_shape` is the whole tensor's in storage elements, `shape` this rank's part of it, `dtype` what is handed over,
    and `parts` pairs of indices: `full[source]` goes to `mine[destination]`. One pair, unless a rule has `sections`.
    """

    full_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[tuple[slice, ...], tuple[slice, ...]], ...]


def tensor_spec(plan: RankPlan, tensor: int) -> TensorSpec:
    """How the rank's tensor comes from the whole one, and as what it is handed over."""
    part = plan.spec(tensor)
    return TensorSpec(part.full_shape, plan.storage_shape(tensor), storage_dtype(plan, tensor), part.parts)
