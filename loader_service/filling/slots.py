"""Leased staging slots: what `batches()` hands over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from loader_service.filling.form import MAX_TENSORS_A_UNIT, Memory, Resources
from loader_service.filling.specs import empty_of, storage_dtype
from loader_service.memory.pool import Lease
from loader_service.memory.tensors import tensor_view
from loader_service.planning.plan import RankPlan
from loader_service.planning.shared_units import shared_slot_units
from loader_service.planning.units import Placed, SlotLayout, slot_units
from loader_service.transfers import Transfer, image_transfers


@dataclass(slots=True)
class SlotUnit:
    """A filled staging slot and what lies in it."""

    plan: RankPlan
    placed: list[Placed]
    lease: Lease | None

    def view(self, place: Placed, index: int) -> torch.Tensor:
        """View number `index` of a place, as a tensor over the slot (a copy if the bytes are not aligned)."""
        view, dtype = place.views[index], storage_dtype(self.plan, place.tensor)
        if self.lease is None or place.fragment < 0:
            return empty_of(self.plan, place.tensor, view.shape)
        offset = place.slot_offset + view.offset_bytes
        return tensor_view(self.lease.whole.tensor, offset, dtype, view.shape, view.strides)

    def filled(self) -> None:
        """Nothing is kept of it: the memory is lent."""

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()


class SlotFilling:
    """Fills staging slots; a tensor larger than a slot comes in pieces. Blocks that the node shares are slots, too."""

    scratch_leases = 0
    keeps_copies = True

    def __init__(self, plan: RankPlan, resources: Resources, *, chunk_bytes: int) -> None:
        self._plan = plan
        self._pool = resources.pool
        self._chunk_bytes = chunk_bytes
        self._shared = resources.shared

    def units(self) -> Iterator[SlotLayout]:
        slot_bytes, most = self._pool.slot_bytes, MAX_TENSORS_A_UNIT
        if self._shared is None:
            return slot_units(self._plan, slot_bytes=slot_bytes, max_pieces=most)
        return shared_slot_units(self._plan, self._shared.layout, slot_bytes=slot_bytes, max_pieces=most)

    async def acquire(self, unit: SlotLayout) -> Memory:
        if unit.block is not None:
            assert self._shared is not None
            return self._shared.lease(unit.block, await self._shared.take(unit.block))
        return await self._pool.lease(self._pool.slot_bytes) if unit.images else None

    def prepare(self, unit: SlotLayout, memory: Memory) -> tuple[SlotUnit, Iterator[Transfer]]:
        assert memory is None or isinstance(memory, Lease)
        return SlotUnit(self._plan, unit.placed, memory), self._transfers(unit, memory)

    def _transfers(self, unit: SlotLayout, lease: Lease | None) -> Iterator[Transfer]:
        if lease is not None:
            memory = lease.whole.memoryview
            for image in unit.images:
                yield from image_transfers(image, memory, self._chunk_bytes, self._plan.name)
