"""The ranks' coordinates along named axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loader_service.config.conflicts import DEFAULT_AXIS
from loader_service.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mesh:
    """Where each rank stands. `table` holds every rank's coordinates, or is None for row-major order.

    Row-major means that the last axis varies fastest: with `{pp: 2, tp: 4}` rank 5 is `(pp 1, tp 1)`, and the sizes
    multiply to the number of ranks. A table may put several ranks on one position (replicas) and leave positions empty;
    None in it is a rank whose coordinates are not known.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    table: tuple[tuple[int, ...] | None, ...] | None = None

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes) if self.table is None else len(self.table)

    @property
    def empty_positions(self) -> int:
        """How many positions no rank holds: what only they would take is loaded nowhere."""
        if self.table is None or None in self.table:
            return 0
        return math.prod(self.sizes) - len(set(self.table))

    @classmethod
    def row_major(cls, mesh: Mapping[str, int] | None, world_size: int) -> Mesh:
        """The mesh of a configuration, or one axis `world` where none is declared.

        Raises ConfigError when the sizes do not multiply to `world_size`.
        """
        if world_size < 1:
            raise ConfigError(f"there must be at least one rank, found world_size {world_size}")
        declared = {DEFAULT_AXIS: world_size} if mesh is None else dict(mesh)
        made = cls(tuple(declared), tuple(declared.values()))
        if made.world_size != world_size:
            raise ConfigError(
                f"mesh: {_in_words(made)} is {made.world_size} ranks but there are {world_size}; start "
                f"(or plan for) {made.world_size} ranks, or change the sizes so that they multiply to {world_size}"
            )
        return made

    @classmethod
    def with_coords(cls, mesh: Mapping[str, int] | None, coords_by_rank: Sequence[Mapping[str, int] | None]) -> Mesh:
        """The mesh of a configuration with each rank's own `{axis: number}`; item r of the list is rank r's, None where
        only rank r knows it.

        Raises ConfigError when a rank names other axes than the mesh, or a number lies outside its axis.
        """
        sizes = {DEFAULT_AXIS: len(coords_by_rank)} if mesh is None else dict(mesh)
        rows = tuple(
            None if coords is None else _row(sizes, rank, coords) for rank, coords in enumerate(coords_by_rank)
        )
        return cls(tuple(sizes), tuple(sizes.values()), rows)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The rank's number along each axis, in the order of `axes`."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"there is no rank {rank}; this plan is for ranks 0 to {self.world_size - 1}")
        if self.table is not None:
            row = self.table[rank]
            if row is None:
                raise ConfigError(
                    f"the coords of rank {rank} are not known here, so its part cannot be planned; "
                    "ask again once a load was opened, when all ranks have exchanged theirs"
                )
            return row
        numbers: list[int] = []
        for size in reversed(self.sizes):
            rank, number = divmod(rank, size)
            numbers.append(number)
        return tuple(reversed(numbers))

    def size_along(self, axes: Sequence[str]) -> int:
        """The number of positions along the axes taken as one. Raises KeyError for an axis that the mesh lacks."""
        size_of = dict(zip(self.axes, self.sizes, strict=True))
        return math.prod(size_of[axis] for axis in axes)

    def coord_along(self, rank: int, axes: Sequence[str]) -> tuple[int, int]:
        """(number, size): the rank's place along the axes flattened to one, the last one varying fastest.

        Raises KeyError for an axis that the mesh lacks.
        """
        place = dict(zip(self.axes, zip(self.coordinates(rank), self.sizes, strict=True), strict=True))
        number, size = 0, 1
        for axis in axes:
            along, axis_size = place[axis]
            number, size = number * axis_size + along, size * axis_size
        return number, size


def _in_words(mesh: Mesh) -> str:
    return ", ".join(f"{axis}: {size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=True))


def _row(sizes: Mapping[str, int], rank: int, coords: Mapping[str, int]) -> tuple[int, ...]:
    if set(coords) != set(sizes):
        raise ConfigError(
            f"coords of rank {rank} name the axes {sorted(coords)} but the mesh has {sorted(sizes)}; "
            "give one number for each axis of the mesh",
            rank=rank,
        )
    for axis, size in sizes.items():
        if type(coords[axis]) is not int:
            raise ConfigError(
                f"coords of rank {rank}: {axis} is {coords[axis]!r}, but a coordinate is a whole number", rank=rank
            )
        if not 0 <= coords[axis] < size:
            raise ConfigError(
                f"coords of rank {rank}: {axis} is {coords[axis]}, but that axis has the numbers 0 to {size - 1}",
                rank=rank,
            )
    return tuple(coords[axis] for axis in sizes)
