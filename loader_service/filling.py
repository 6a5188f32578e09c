"""What a load fills, one class a form of consumption: owned tensors, staging slots, or the caller's tensors.

A filling says, unit by unit in plan order, how much memory a unit needs, which transfers fill it, and what is handed
to the consumer then. It decides; the scheduler waits, reads and hands over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from loader_service.memory.allocators import allocate_together
from loader_service.memory.pool import Lease, Reservation, StagingPool
from loader_service.memory.tensors import empty_tensor, raw_memory, tensor_view, torch_dtype
from loader_service.planning.fragments import subdivide
from loader_service.planning.plan import RankPlan
from loader_service.planning.units import (
    ALIGNMENT_BYTES,
    Placed,
    TensorUnit,
    fragments_of_tensors,
    gaps_before,
    slot_units,
    tensor_units,
)
from loader_service.transfers import CopyTransfer, DirectTransfer, RunBuilder, Transfer

ARENA_BYTES = 1 << 20  # what one kept small tensor keeps alive at most; larger tensors own their memory alone
MAX_TENSORS_A_UNIT = 256  # bounds how long the service's loop works on one unit at a stretch

UnitT = TypeVar("UnitT")
Memory = Reservation | Lease | None
Streams = Mapping[torch.device, torch.cuda.Stream]


class Filling(Protocol[UnitT]):
    """How the scheduler asks for one form of consumption. `acquire` is the only step that waits."""

    scratch_leases: int

    def units(self) -> Iterator[UnitT]: ...

    async def acquire(self, unit: UnitT) -> Memory: ...

    def prepare(self, unit: UnitT, memory: Memory) -> tuple[OwnedUnit | SlotUnit | None, Iterator[Transfer]]: ...


def storage_dtype(plan: RankPlan, tensor: int) -> torch.dtype:
    """The torch dtype that the rank's tensor is handed over in (uint8 for raw types)."""
    dtype = torch_dtype(plan.storage_dtype_code(tensor))
    assert dtype is not None  # the planner refuses what torch cannot hold, or makes it raw bytes
    return dtype


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


def has_blocks(plan: RankPlan) -> bool:
    """Whether any fragment is a block with gaps, so that wanted elements are copied out of scratch memory."""
    return bool((plan.fragment_dst < 0).any())


class OwnedUnit:
    """Filled tensors that own their memory. Popped one by one, on the consumer's thread; then the budget is back."""

    def __init__(
        self, plan: RankPlan, unit: TensorUnit, places: list[tuple[memoryview, int]], reservation: Reservation
    ) -> None:
        self._plan = plan
        self._next, self._first, self._stop = unit.first, unit.first, unit.stop
        self._places = places
        self._reservation = reservation

    def pop(self) -> tuple[str, torch.Tensor] | None:
        """The next (name, tensor) in plan order, or None at the end. The unit keeps nothing of what it handed out."""
        i = self._next
        if i == self._stop:
            return None
        self._next += 1
        memory, offset = self._places[i - self._first]
        tensor = owned_tensor(self._plan, i, memory, offset)
        self._places[i - self._first] = _NOTHING
        if self._next == self._stop:
            self._reservation.release()
        return self._plan.name(i), tensor

    @property
    def empty(self) -> bool:
        return self._next == self._stop

    def release(self) -> None:
        """Gives back the budget of a unit that no consumer will take."""
        self._reservation.release()


_NOTHING = (memoryview(b""), 0)


def owned_tensor(plan: RankPlan, tensor: int, memory: memoryview, offset: int) -> torch.Tensor:
    """A tensor with a storage of exactly its bytes, over memory that it keeps alive."""
    shape, dtype = plan.storage_shape(tensor), storage_dtype(plan, tensor)
    nbytes = plan.nbytes(tensor)
    if nbytes == 0:
        return _empty_tensor(plan, tensor, shape)
    count = nbytes // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def _empty_tensor(plan: RankPlan, tensor: int, shape: Sequence[int]) -> torch.Tensor:
    catalog = plan.catalog
    path = catalog.shards[int(catalog.shard_ids[plan.catalog_id(tensor)])].path
    return empty_tensor(shape, storage_dtype(plan, tensor), path=path, name=plan.name(tensor))


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
            return _empty_tensor(self.plan, place.tensor, view.shape)
        offset = place.slot_offset + view.offset_bytes
        return tensor_view(self.lease.buffer.tensor, offset, dtype, view.shape, view.strides)

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()


class _Places:
    """Turns tensors and their destinations into transfers, fragment by fragment."""

    def __init__(self, plan: RankPlan, *, chunk_bytes: int, scratch_bytes: int, streams: Streams | None = None) -> None:
        self._plan = plan
        self._chunk_bytes = chunk_bytes
        self._scratch_bytes = scratch_bytes
        self._streams = streams or {}
        self._bounds = fragments_of_tensors(plan)
        self._gaps = gaps_before(plan)
        self._copied = set(plan.fragment_tensor[plan.fragment_dst < 0].tolist())

    def copies(self, tensor: int) -> bool:
        """Whether elements of the tensor are copied from blocks, so that it is needed as a tensor while reading."""
        return tensor in self._copied

    def transfers(
        self, first: int, direct: list[memoryview | None], strided: Mapping[int, torch.Tensor]
    ) -> Iterator[Transfer]:
        """Transfers for tensors from `first` on. `direct[k]` is contiguous memory of tensor first + k; where it is
        None, or where a fragment is a block with gaps, elements are copied into `strided[first + k]`."""
        plan = self._plan
        builder = RunBuilder(self._chunk_bytes)
        of_unit = slice(self._bounds[first], self._bounds[first + len(direct)])
        columns = (plan.fragment_tensor, plan.fragment_dst, plan.fragment_start, plan.fragment_stop)
        # As lists: an element of an array costs three times as much, and there may be hundreds of thousands.
        lists = [column[of_unit].tolist() for column in (*columns, plan.fragment_shard, self._gaps)]
        for f, (tensor, dst, start, stop, shard, gap_bytes) in enumerate(zip(*lists, strict=True), of_unit.start):
            memory = direct[tensor - first]
            if memory is None or dst < 0:
                yield from builder.flush()
                yield from self._copies(tensor, f, strided[tensor])
                continue
            view = memory[dst : dst + stop - start]
            yield from builder.add(shard, start, gap_bytes, view, plan.name(tensor))
        yield from builder.flush()

    def _copies(self, tensor: int, fragment: int, destination: torch.Tensor) -> Iterator[CopyTransfer]:
        plan = self._plan
        shard, name = int(plan.fragment_shard[fragment]), plan.name(tensor)
        reached = int(plan.fragment_start[fragment] - self._gaps[fragment])
        stream = self._streams.get(destination.device)
        for sub in subdivide(plan, fragment, self._scratch_bytes):
            gap = sub.start - reached
            nbytes = sub.stop - reached
            yield CopyTransfer(shard, reached, nbytes, gap, sub.views, destination, name, stream)
            reached = sub.stop


class OwnedFilling:
    """Tensors that own their memory: what iterating a load hands over.

    Small tensors share arenas of at most `ARENA_BYTES`, so that one that is kept keeps no more than that alive; a
    larger one has memory of its own. Both are read in place; only column slices pass through scratch memory.
    """

    def __init__(self, plan: RankPlan, pool: StagingPool, *, chunk_bytes: int, scratch_leases: int) -> None:
        self._plan = plan
        self._pool = pool
        self.scratch_leases = scratch_leases if has_blocks(plan) else 0
        self._budget_bytes = pool.capacity_bytes - self.scratch_leases * pool.slot_bytes
        self._unit_bytes = min(chunk_bytes, self._budget_bytes // 4)
        self._places = _Places(plan, chunk_bytes=chunk_bytes, scratch_bytes=pool.slot_bytes)

    def units(self) -> Iterator[TensorUnit]:
        return tensor_units(self._plan.tensor_nbytes, unit_bytes=self._unit_bytes, max_tensors=MAX_TENSORS_A_UNIT)

    async def acquire(self, unit: TensorUnit) -> Memory:
        # A tensor larger than the budget takes all of it, and so is read alone: it is what the consumer waits for.
        return await self._pool.reserve(min(unit.nbytes, self._budget_bytes))

    def prepare(self, unit: TensorUnit, memory: Memory) -> tuple[OwnedUnit | SlotUnit | None, Iterator[Transfer]]:
        assert isinstance(memory, Reservation)
        plan = self._plan
        places = self._allocate(unit)
        direct: list[memoryview | None] = []
        strided: dict[int, torch.Tensor] = {}
        for i, (view, offset) in zip(range(unit.first, unit.stop), places, strict=True):
            direct.append(view[offset : offset + plan.nbytes(i)])
            if self._places.copies(i):
                strided[i] = owned_tensor(plan, i, view, offset)
        return OwnedUnit(plan, unit, places, memory), self._places.transfers(unit.first, direct, strided)

    def _allocate(self, unit: TensorUnit) -> list[tuple[memoryview, int]]:
        """(memory, offset) for each tensor of the unit: arenas for small ones, memory of its own for a large one."""
        wanted: list[
            tuple[int, int]
        ] = []  # (bytes, congruent to) of each buffer; only the last may be an arena to fill
        places: list[tuple[int, int]] = []  # (buffer, offset) of each tensor
        arena_is_open = False
        for tensor in range(unit.first, unit.stop):
            nbytes = self._plan.nbytes(tensor)
            if nbytes >= ARENA_BYTES:
                wanted.append((nbytes, self._congruence(tensor)))
                places.append((len(wanted) - 1, 0))
                arena_is_open = False
                continue
            used = wanted[-1][0] if arena_is_open else 0
            offset = -(-used // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            if not arena_is_open or offset + nbytes > ARENA_BYTES:
                wanted.append((0, 0))
                arena_is_open, offset = True, 0
            wanted[-1] = (offset + nbytes, 0)
            places.append((len(wanted) - 1, offset))
        buffers = [buffer.memoryview for buffer in allocate_together(wanted)]
        return [(buffers[buffer], offset) for buffer, offset in places]

    def _congruence(self, tensor: int) -> int:
        """The file offset that a large tensor's memory is congruent to; 0 where its elements would lie unaligned."""
        start = int(self._plan.catalog.starts[self._plan.catalog_id(tensor)])
        return start if start % self._plan.itemsize(tensor) == 0 else 0


class SlotFilling:
    """Leased staging slots: what `batches()` hands over. A tensor larger than a slot comes in pieces."""

    scratch_leases = 0

    def __init__(self, plan: RankPlan, pool: StagingPool, *, chunk_bytes: int) -> None:
        self._plan = plan
        self._pool = pool
        self._chunk_bytes = chunk_bytes

    def units(self) -> Iterator[list[Placed]]:
        return slot_units(self._plan, slot_bytes=self._pool.slot_bytes, max_pieces=MAX_TENSORS_A_UNIT)

    async def acquire(self, unit: list[Placed]) -> Memory:
        if all(place.fragment < 0 for place in unit):
            return None
        return await self._pool.lease(self._pool.slot_bytes)

    def prepare(self, unit: list[Placed], memory: Memory) -> tuple[OwnedUnit | SlotUnit | None, Iterator[Transfer]]:
        assert memory is None or isinstance(memory, Lease)
        return SlotUnit(self._plan, unit, memory), self._transfers(unit, memory)

    def _transfers(self, unit: list[Placed], lease: Lease | None) -> Iterator[DirectTransfer]:
        if lease is None:
            return
        plan, memory = self._plan, lease.buffer.memoryview
        builder = RunBuilder(self._chunk_bytes)
        for place in unit:
            if place.fragment < 0:
                continue
            view = memory[place.slot_offset : place.slot_offset + place.stop - place.start]
            shard = int(plan.fragment_shard[place.fragment])
            yield from builder.add(shard, place.start, place.gap_bytes, view, plan.name(place.tensor))
        yield from builder.flush()


class IntoFilling:
    """The caller's own tensors: contiguous CPU memory is read in place, anything else is copied from scratch.

    `streams` are the caller's, one for each CUDA device: copies to it keep their place in the caller's order of work.
    """

    def __init__(
        self,
        plan: RankPlan,
        destinations: Mapping[str, torch.Tensor],
        pool: StagingPool,
        *,
        chunk_bytes: int,
        scratch_leases: int,
        streams: Streams,
    ) -> None:
        self._plan = plan
        self._chunk_bytes = chunk_bytes
        self._destinations = [destinations[plan.name(i)] for i in range(len(plan.tensor_ids))]
        in_place = all(_is_memory(tensor) for tensor in self._destinations)
        self.scratch_leases = 0 if in_place and not has_blocks(plan) else scratch_leases
        self._places = _Places(plan, chunk_bytes=chunk_bytes, scratch_bytes=pool.slot_bytes, streams=streams)

    def units(self) -> Iterator[TensorUnit]:
        return tensor_units(self._plan.tensor_nbytes, unit_bytes=self._chunk_bytes, max_tensors=MAX_TENSORS_A_UNIT)

    async def acquire(self, unit: TensorUnit) -> Memory:  # noqa: ARG002 - one signature for all fillings
        return None  # the memory is the caller's, and scratch is leased before the load starts

    def prepare(
        self,
        unit: TensorUnit,
        memory: Memory,  # noqa: ARG002 - one signature for all fillings
    ) -> tuple[OwnedUnit | SlotUnit | None, Iterator[Transfer]]:
        tensors = self._destinations[unit.first : unit.stop]
        direct = [raw_memory(tensor) if _is_memory(tensor) else None for tensor in tensors]
        return None, self._places.transfers(unit.first, direct, dict(enumerate(tensors, unit.first)))


def _is_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()
