"""The caller's own tensors: what `into()` fills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from loader_service.filling.form import MAX_TENSORS_A_UNIT, Memory, Resources, Streams
from loader_service.filling.parts import PartReads, Target
from loader_service.memory.tensors import raw_memory
from loader_service.planning.arenas import ARENA_BYTES
from loader_service.planning.plan import RankPlan
from loader_service.planning.units import TensorUnit, tensor_units
from loader_service.transfers import Transfer


class IntoFilling:
    """Fills tensors that are given. A large one in contiguous CPU memory is read in place; small ones are read together
    and copied from scratch memory, as is anything else.

    `streams` are the caller's, one for each CUDA device: copies to it keep their place in the caller's order of work.
    """

    keeps_copies = True

    def __init__(
        self,
        plan: RankPlan,
        destinations: Mapping[str, torch.Tensor],
        resources: Resources,
        *,
        chunk_bytes: int,
        streams: Streams,
    ) -> None:
        self._plan = plan
        self._chunk_bytes = chunk_bytes
        self._destinations = [destinations[plan.name(i)] for i in range(len(plan.tensor_ids))]
        in_place = all(map(_is_read_in_place, self._destinations)) and not (plan.fragment_dst < 0).any()
        self.scratch_leases = 0 if in_place else resources.scratch_leases(plan)
        self._parts = PartReads(
            plan,
            chunk_bytes=chunk_bytes,
            scratch_bytes=resources.pool.slot_bytes,
            streams=streams,
            shared=resources.shared_ranges,
        )

    def units(self) -> Iterator[TensorUnit]:
        return tensor_units(self._plan.tensor_nbytes, unit_bytes=self._chunk_bytes, max_tensors=MAX_TENSORS_A_UNIT)

    async def acquire(self, unit: TensorUnit) -> Memory:  # noqa: ARG002 - one signature for all fillings
        return None  # the memory is the caller's, and scratch is leased before the load starts

    def prepare(
        self,
        unit: TensorUnit,
        memory: Memory,  # noqa: ARG002 - one signature for all fillings
    ) -> tuple[None, Iterator[Transfer]]:
        return None, self._parts.transfers(self._target(i) for i in range(unit.first, unit.stop))

    def _target(self, number: int) -> Target:
        tensor = self._destinations[number]
        return Target(number, tensor, raw_memory(tensor) if _is_read_in_place(tensor) else None)


def _is_read_in_place(tensor: torch.Tensor) -> bool:
    return tensor.nbytes >= ARENA_BYTES and tensor.device.type == "cpu" and tensor.is_contiguous()
