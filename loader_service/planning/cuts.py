"""Split arithmetic: which elements of one dimension each part takes. Pure integers, no rounding surprises.

Every function works on one dimension of `size` elements that is cut for `parts` ranks along an axis, and computes one
part's share without the others': a plan for one rank of a thousand costs what one of eight does.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

Interval = tuple[int, int]
"""Half open: elements [start, stop) of a dimension."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How one section (or a whole dimension) is cut; at most one field is set, none means `size * r // parts`.

    `align`: cuts fall on multiples of it. `pad_to`: cut as if the size were rounded up to a multiple of it. `units`:
    the section holds so many units (heads) that stay whole. `boundaries`: the cuts themselves, parts + 1 numbers.
    """

    align: int | None = None
    pad_to: int | None = None
    units: int | None = None
    boundaries: tuple[int, ...] | None = None

    def problem(self, size: int, parts: int) -> str | None:
        """Why a dimension of `size` cannot be cut so, in words that end with what to do; None when it can."""
        if self.units is not None:
            return self._units_problem(self.units, size, parts)
        if self.boundaries is not None:
            return self._boundaries_problem(self.boundaries, size, parts)
        return None

    @staticmethod
    def _units_problem(units: int, size: int, parts: int) -> str | None:
        if units % parts and parts % units:
            return (
                f"units: {units} is neither a multiple nor a divisor of the {parts} ranks; "
                "use another number of ranks, or cut by boundaries"
            )
        pieces = min(units, parts)
        if size % pieces:
            return (
                f"{units} units over {parts} ranks would cut {size} elements into {pieces} pieces of no whole number; "
                "give the number of units that this dimension holds"
            )
        return None

    @staticmethod
    def _boundaries_problem(boundaries: tuple[int, ...], size: int, parts: int) -> str | None:
        if len(boundaries) != parts + 1:
            return f"boundaries has {len(boundaries)} numbers; {parts} ranks need {parts + 1}, 0 and {size} included"
        if boundaries[0] != 0 or boundaries[-1] != size:
            return f"boundaries go from {boundaries[0]} to {boundaries[-1]}; they must start at 0 and end at {size}"
        if any(a > b for a, b in pairwise(boundaries)):
            return "boundaries must not fall; sort them"
        return None

    def interval(self, size: int, parts: int, part: int) -> Interval:
        """Elements that part `part` of `parts` takes. `problem(size, parts)` must be None."""
        if self.units is not None:
            pieces = min(self.units, parts)
            piece = part * pieces // parts
            return size * piece // pieces, size * (piece + 1) // pieces
        return self._cut(size, parts, part), self._cut(size, parts, part + 1)

    def _cut(self, size: int, parts: int, at: int) -> int:
        if self.align is not None:
            blocks = -(-size // self.align)
            return min(size, self.align * (blocks * at // parts))
        if self.pad_to is not None:
            padded = -(-size // self.pad_to) * self.pad_to
            return min(size, padded * at // parts)
        if self.boundaries is not None:
            return self.boundaries[at]
        return size * at // parts


EVEN: Final = Cut()
"""The default: cut r at size * r // parts."""


@dataclass(frozen=True, slots=True)
class Division:
    """How a dimension is divided: by one cut, or in sections (proportions of it) of which each has its own.

    Without sections `proportions` is (1,) and `cuts` has one item.
    """

    proportions: tuple[int, ...] = (1,)
    cuts: tuple[Cut, ...] = (EVEN,)

    def problem(self, size: int, parts: int) -> str | None:
        """Why a dimension of `size` elements cannot be divided so; None when it can. Holds for all parts at once."""
        total = sum(self.proportions)
        if any(size * proportion % total for proportion in self.proportions):
            return (
                f"sections {list(self.proportions)} do not divide {size} elements into whole numbers; "
                f"give proportions whose sum divides {size}, or match only tensors that have these sections"
            )
        for i, (proportion, cut) in enumerate(zip(self.proportions, self.cuts, strict=True)):
            found = cut.problem(size * proportion // total, parts)
            if found is not None:
                return found if len(self.cuts) == 1 else f"section {i}: {found}"
        return None

    def intervals(self, size: int, parts: int, part: int) -> tuple[Interval, ...]:
        """The part's share, one interval a section, ascending; empty ones are left out and touching ones joined.

        `problem(size, parts)` must be None.
        """
        total = sum(self.proportions)
        found: list[Interval] = []
        reached = 0
        for proportion, cut in zip(self.proportions, self.cuts, strict=True):
            length = size * proportion // total
            start, stop = cut.interval(length, parts, part)
            if start < stop:
                if found and found[-1][1] == reached + start:
                    found[-1] = (found[-1][0], reached + stop)
                else:
                    found.append((reached + start, reached + stop))
            reached += length
        return tuple(found)
