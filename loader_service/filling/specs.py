"""What a rank's tensor is handed over as, and how it comes from the checkpoint's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loader_service.memory.tensors import empty_tensor, torch_dtype
from loader_service.planning.plan import RankPlan


def storage_dtype(plan: RankPlan, tensor: int) -> torch.dtype:
    """The torch dtype that the rank's tensor is handed over in (uint8 for raw types)."""
    dtype = torch_dtype(plan.storage_dtype_code(tensor))
    assert dtype is not None  # the planner refuses what torch cannot hold, or makes it raw bytes
    return dtype


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
