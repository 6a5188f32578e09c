"""What a load fills, one class a form of consumption: owned tensors, staging slots, or the caller's tensors.

A filling says, unit by unit in plan order, how much memory a unit needs, which transfers fill it, and what is handed
to the consumer then. It decides; the scheduler waits, reads and hands over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from loader_service.filling.cached import CachedBytes, HeldBytes
from loader_service.filling.form import Memory, Resources, Streams
from loader_service.filling.into import IntoFilling
from loader_service.filling.owned import OwnedFilling, OwnedUnit
from loader_service.filling.slots import SlotFilling, SlotUnit
from loader_service.filling.specs import TensorSpec, storage_dtype, tensor_spec
from loader_service.transfers import Transfer

__all__ = [
    "CachedBytes",
    "Filling",
    "HeldBytes",
    "IntoFilling",
    "Memory",
    "OwnedFilling",
    "OwnedUnit",
    "Resources",
    "SlotFilling",
    "SlotUnit",
    "Streams",
    "TensorSpec",
    "UnitT",
    "storage_dtype",
    "tensor_spec",
]

UnitT = TypeVar("UnitT")


class Filling(Protocol[UnitT]):
    """How the scheduler asks for one form of consumption. `acquire` is the only step that waits."""

    scratch_leases: int
    keeps_copies: bool  # whether the cache keeps copies of what is read, since the memory is the consumer's

    def units(self) -> Iterator[UnitT]: ...

    async def acquire(self, unit: UnitT) -> Memory: ...

    def prepare(self, unit: UnitT, memory: Memory) -> tuple[OwnedUnit | SlotUnit | None, Iterator[Transfer]]: ...
