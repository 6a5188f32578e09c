"""Batches of leased staging memory and the pieces in them: what `batches()` hands to consumers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Self

import torch

from loader_service.errors import StateError
from loader_service.filling import SlotUnit
from loader_service.memory.events import DeviceEvent, UnknownDeviceEvent, current_device_event
from loader_service.planning.units import Placed

Index = tuple[int | slice, ...]


class Piece:
    """A part of one tensor in a batch: `tensor` (a view of the batch's memory) belongs at `index` of the rank's tensor.

    `params[piece.name][piece.index].copy_(piece.tensor)` is right for every piece, whole tensors and scalars included.
    """

    __slots__ = ("_batch", "_number", "_place", "index", "name")

    def __init__(self, batch: Batch, place: Placed, number: int, name: str) -> None:
        self._batch = batch
        self._place = place
        self._number = number
        self.name = name
        self.index: Index = place.views[number].index

    @property
    def tensor(self) -> torch.Tensor:
        """A view of leased memory, valid until the batch is left; StateError after that."""
        return self._batch._view(self._place, self._number)  # noqa: SLF001 - two halves of one thing

    def __repr__(self) -> str:
        return f"Piece(name={self.name!r}, index={self.index!r})"


class Batch:
    """A filled staging slot on loan and the pieces in it, in plan order. Use it as a context manager, and
    iterate it for its `Piece`s.

    Leaving it gives the memory back once nothing may read it any more: where CUDA is initialised, an event on the
    current device's stream is waited for, and so is each event given to `hold_until`.
    """

    def __init__(self, unit: SlotUnit) -> None:
        self._unit: SlotUnit | None = unit
        self._events: list[DeviceEvent] = []

    def __iter__(self) -> Iterator[Piece]:
        unit = self._held()
        for place in unit.placed:
            name = unit.plan.name(place.tensor)
            for number in range(len(place.views)):
                yield Piece(self, place, number, name)

    def __len__(self) -> int:
        return sum(len(place.views) for place in self._held().placed)

    def hold_until(self, event: DeviceEvent) -> None:
        """Keeps the memory, after this batch is left, until `event.query()` is true: for copies on other streams."""
        self._held()
        self._events.append(event)

    def __enter__(self) -> Self:
        self._held()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """Gives the memory back; pieces raise StateError from now on. Idempotent."""
        unit, self._unit = self._unit, None
        if unit is None or unit.lease is None:
            return
        try:
            event = current_device_event()
        except BaseException as error:
            unit.lease.release_when([UnknownDeviceEvent(error)])
            raise
        events = [*self._events, event] if event is not None else self._events
        if events:
            unit.lease.release_when(events)
        else:
            unit.lease.release()

    def _held(self) -> SlotUnit:
        if self._unit is None:
            raise StateError("this batch was given back: copy what is needed before leaving `with batch`")
        return self._unit

    def _view(self, place: Placed, number: int) -> torch.Tensor:
        return self._held().view(place, number)

    def __del__(self) -> None:
        unit = self._unit
        if unit is not None and unit.lease is not None:
            warnings.warn("a batch was dropped without being left: use `with batch:`", ResourceWarning, stacklevel=2)
            self.release()
