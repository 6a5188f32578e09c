"""Tensors that own their memory: what iterating a load hands over."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from loader_service.filling.form import Memory, Resources
from loader_service.filling.parts import PartReads, Target
from loader_service.filling.specs import empty_of, storage_columns, storage_dtype
from loader_service.memory.allocators import HostRegion
from loader_service.memory.pool import Reservation
from loader_service.planning.arenas import ARENA_BYTES, OwnedLayout, needs_copies, owned_units
from loader_service.planning.images import Image
from loader_service.planning.plan import RankPlan
from loader_service.transfers import Transfer, image_transfers, joined_transfers

MAX_OWNED_A_UNIT = 4096  # tensors, which cost the service's loop next to nothing: they are laid out by arena


class OwnedUnit:
    """Filled tensors that own their memory. Popped one by one, on the consumer's thread; then the budget is back."""

    def __init__(
        self,
        plan: RankPlan,
        unit: OwnedLayout,
        memories: Sequence[memoryview],
        offsets: Sequence[int],
        reservation: Reservation,
        keep: Callable[[], None],
    ) -> None:
        """`memories` and `offsets` say where each tensor lies."""
        self._items = _tensors(plan, unit.first, unit.stop, memories, offsets)
        self._left = unit.stop - unit.first
        self._reservation = reservation
        self._keep = keep

    def filled(self) -> None:
        """All bytes are there, and nobody has them yet."""
        self._keep()

    def pop(self) -> tuple[str, torch.Tensor] | None:
        """The next (name, tensor) in plan order, or None at the end. The unit keeps nothing of what it handed out."""
        for item in self._items:
            self._left -= 1
            if not self._left:
                self._reservation.release()
            return item
        return None

    @property
    def empty(self) -> bool:
        return not self._left

    def release(self) -> None:
        """Gives back the budget of a unit that no consumer will take."""
        self._reservation.release()


def _tensors(
    plan: RankPlan, first: int, stop: int, memories: Sequence[memoryview], offsets: Sequence[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) for tensors [first, stop). A memory is let go when its last tensor was made."""
    left = list(reversed(memories))
    forms = zip(offsets, plan.tensor_nbytes[first:stop].tolist(), *storage_columns(plan, first, stop), strict=True)
    for i, (offset, nbytes, name, dtype, shape) in enumerate(forms, first):
        memory = left.pop()
        yield name, _tensor_of(memory, offset, nbytes, dtype, shape) if nbytes else empty_of(plan, i, shape)


_NOTHING = memoryview(b"")


def _keep_nothing() -> None:
    """What becomes of a unit's memory without a cache."""


def owned_tensor(plan: RankPlan, tensor: int, memory: memoryview, offset: int) -> torch.Tensor:
    """A tensor with a storage of exactly its bytes, over memory that it keeps alive; a copy if they lie unaligned."""
    shape, nbytes = plan.storage_shape(tensor), plan.nbytes(tensor)
    if nbytes == 0:
        return empty_of(plan, tensor, shape)
    return _tensor_of(memory, offset, nbytes, storage_dtype(plan, tensor), shape)


def _tensor_of(memory: memoryview, offset: int, nbytes: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    itemsize = dtype.itemsize
    if offset % itemsize:
        copied = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset).clone()
        return copied.view(dtype).view(shape)
    # In place, to the shape of as many elements: a view would cost 0.8 us more, and be another tensor's.
    return torch.frombuffer(memory, dtype=dtype, count=nbytes // itemsize, offset=offset).resize_(shape)


class OwnedFilling:
    """Fills memory that becomes the tensors'.

    Small tensors lie in arenas of at most `ARENA_BYTES`, as in the file, so that one that is kept keeps no more than
    that alive; a larger one has memory of its own. Both are read in place; only column slices, and small tensors that
    lie in several parts of the file, pass through scratch memory. What is in memory already is handed over as it is;
    with the raw weight cache on, memory that is read in place is the cache's, too.
    """

    keeps_copies = False

    def __init__(self, plan: RankPlan, resources: Resources, *, chunk_bytes: int) -> None:
        pool = resources.pool
        self._plan = plan
        self._pool = pool
        self._chunk_bytes = chunk_bytes
        self._shared = resources.shared_ranges
        self._in_memory = resources.in_memory
        self.scratch_leases = resources.scratch_leases(plan) if needs_copies(plan) else 0
        self._budget_bytes = resources.capacity_bytes - self.scratch_leases * pool.slot_bytes
        self._unit_bytes = min(chunk_bytes, self._budget_bytes // 4)
        self._region = HostRegion(plan.payload_bytes)
        self._parts = PartReads(plan, chunk_bytes=chunk_bytes, scratch_bytes=pool.slot_bytes, shared=self._shared)

    def units(self) -> Iterator[OwnedLayout]:
        return owned_units(self._plan, unit_bytes=self._unit_bytes, max_tensors=MAX_OWNED_A_UNIT)

    async def acquire(self, unit: OwnedLayout) -> Memory:
        # A tensor larger than the budget takes all of it, and so is read alone: it is what the consumer waits for.
        return await self._pool.reserve(min(unit.nbytes, self._budget_bytes))

    def prepare(self, unit: OwnedLayout, memory: Memory) -> tuple[OwnedUnit, Iterator[Transfer]]:
        assert isinstance(memory, Reservation)
        held = self._held(unit.images)
        # Each in blocks of its own, beginning with one, so that it is filled in whole blocks.
        sizes = [0 if number in held else nbytes for number, nbytes in enumerate(unit.buffers)]
        buffers = [buffer.memoryview for buffer in self._region.allocate(sizes)]
        moved = [0] * len(buffers)
        for image in unit.images:
            if image.memory in held:
                buffers[image.memory], moved[image.memory] = held[image.memory], -image.offset
        memories = [buffers[buffer] if buffer >= 0 else _NOTHING for buffer in unit.buffer_of]
        offsets = unit.offset_of
        if held:
            offsets = [offset + moved[buffer] for offset, buffer in zip(offsets, unit.buffer_of, strict=True)]
        read = [image for image in unit.images if image.memory not in held]
        keep = partial(self._insert, unit, read, buffers) if self._in_memory is not None else _keep_nothing
        owned = OwnedUnit(self._plan, unit, memories, offsets, memory, keep)
        return owned, self._transfers(unit, read, buffers)

    def _held(self, images: Sequence[Image]) -> dict[int, memoryview]:
        """Held memory that is all of an image, by the number of its buffer: tensors are made over it."""
        found = {}
        for image in images if self._in_memory is not None else ():
            assert self._in_memory is not None
            segments = self._in_memory.held(image.shard, image.start, image.stop)
            if segments is not None and len(segments) == 1:  # more are copied, as if they were read
                found[image.memory] = segments[0].memory
        return found

    def _insert(self, unit: OwnedLayout, images: Sequence[Image], buffers: list[memoryview]) -> None:
        """Leaves what was read in place, or copied there whole, to the cache."""
        assert self._in_memory is not None
        for number in unit.in_parts:
            if (memory := self._target(unit, buffers, number).memory) is not None:
                for shard, start, stop, dst in self._parts.in_place(number):
                    self._in_memory.insert(shard, start, memory[dst : dst + stop - start])
        for image in images:
            nbytes = image.stop - image.start
            self._in_memory.insert(
                image.shard, image.start, buffers[image.memory][image.offset : image.offset + nbytes]
            )

    def _transfers(self, unit: OwnedLayout, images: Sequence[Image], buffers: list[memoryview]) -> Iterator[Transfer]:
        """In plan order: what the node shares comes in that order."""
        if self._shared is None:
            yield from joined_transfers(images, buffers, self._chunk_bytes, self._plan.name)
            yield from self._in_parts(unit, buffers, unit.in_parts)
            return
        in_parts = unit.in_parts
        for image in images:
            before = bisect_left(in_parts, image.tensors[0])
            yield from self._in_parts(unit, buffers, in_parts[:before])
            in_parts = in_parts[before:]
            yield from image_transfers(image, buffers[image.memory], self._chunk_bytes, self._plan.name, self._shared)
        yield from self._in_parts(unit, buffers, in_parts)

    def _in_parts(self, unit: OwnedLayout, buffers: list[memoryview], numbers: list[int]) -> Iterator[Transfer]:
        if numbers:
            yield from self._parts.transfers([self._target(unit, buffers, number) for number in numbers])

    def _target(self, unit: OwnedLayout, buffers: list[memoryview], number: int) -> Target:
        buffer, offset = unit.buffer_of[number - unit.first], unit.offset_of[number - unit.first]
        nbytes = self._plan.nbytes(number)
        memory = buffers[buffer][offset : offset + nbytes] if nbytes >= ARENA_BYTES else None
        return Target(number, owned_tensor(self._plan, number, buffers[buffer], offset), memory)
