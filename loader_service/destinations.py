"""Checks of the tensors that a caller wants filled, before any byte moves."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from loader_service.errors import DestinationError
from loader_service.filling import storage_dtype
from loader_service.memory.tensors import why_unwritable
from loader_service.planning.plan import RankPlan

SHOWN_NAMES = 5


def check_destinations(plan: RankPlan, destinations: Mapping[str, object]) -> None:
    """Raises DestinationError, with all that is wrong, unless each tensor can take this rank's part of its name."""
    if not isinstance(destinations, Mapping):
        raise DestinationError(f"into() takes a mapping of names to tensors, not a {type(destinations).__name__}")
    problems = [
        f"'{name}': {problem}"
        for name, tensor in destinations.items()
        if (problem := _problem(plan, name, tensor)) is not None
    ]
    if not problems:
        return
    shown = "; ".join(problems[:SHOWN_NAMES])
    more = f"; and {len(problems) - SHOWN_NAMES} more" if len(problems) > SHOWN_NAMES else ""
    first = next(name for name in destinations if problems[0].startswith(f"'{name}':"))
    raise DestinationError(f"nothing was read, since destinations do not fit: {shown}{more}", tensor=first)


def _problem(plan: RankPlan, name: str, tensor: object) -> str | None:
    if not isinstance(tensor, torch.Tensor):
        return f"is a {type(tensor).__name__}, not a torch.Tensor"
    i = plan.index_of(name)
    if i is None:
        return "is not among the tensors that this rank takes"
    shape, dtype = plan.storage_shape(i), storage_dtype(plan, i)
    if tensor.dtype != dtype:
        return f"is {tensor.dtype}, but the checkpoint's is {dtype}: convert after loading"
    if (unwritable := why_unwritable(tensor)) is not None:
        return unwritable
    if tuple(tensor.shape) != shape:
        return f"has shape {tuple(tensor.shape)}, but this rank's part is {shape}"
    return None
