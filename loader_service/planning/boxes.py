"""What a rank's part of a tensor wants of any range of the tensor's bytes, wherever the range was cut.

`subdivide` chooses its cuts so that each range is one box of elements. Ranges that ranks share are cut once for all of
them: between two cuts the elements form up to 2 * dims - 1 boxes, the rest of a first row, whole rows, and the
beginning of a last one, on each level of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from loader_service.planning.fragments import PartGeometry, Run, View

_RANGES_KEPT = 32  # of a geometry: what small tensors have in common. Large tensors are cut anywhere, and are few.


def views_within(geometry: PartGeometry, start: int, stop: int) -> tuple[View, ...]:
    """The views of what the part wants of bytes [start, stop), counted from the tensor's first byte.

    Both ends lie between elements. Offsets count from `start`. Every wanted element is in one view; where nothing is
    wanted there is none. Dimensions of which the range holds less than a whole index are indexed by integers.
    """
    views = geometry.views_of_ranges.get((start, stop))
    if views is None:
        views = tuple(_Boxes(geometry, start).views(start, stop)) if geometry.nbytes else ()
        if len(geometry.views_of_ranges) < _RANGES_KEPT:
            geometry.views_of_ranges[start, stop] = views
    return views


class _Boxes:
    """The boxes of one range; elements are counted from the tensor's first."""

    def __init__(self, geometry: PartGeometry, start: int) -> None:
        self._runs = geometry.runs
        self._itemsize = geometry.itemsize
        self._start = start
        inner = list(itertools.accumulate(reversed(geometry.full_shape), initial=1, func=lambda a, b: a * b))
        self._strides = tuple(reversed(inner[:-1]))

    def views(self, start: int, stop: int) -> Iterator[View]:
        if start == stop:
            return
        if not self._runs:
            yield View(0, (), (), ())
        else:
            yield from self._within((), 0, start // self._itemsize, stop // self._itemsize)

    def _within(self, places: tuple[int, ...], base: int, first: int, last: int) -> Iterator[View]:
        """Of elements [first, last), counted from `base`, at fixed places of the dimensions above."""
        dim = len(places)
        stride = self._strides[dim]
        top, head = divmod(first, stride)
        bottom, tail = divmod(last, stride)
        if top == bottom:
            yield from self._within_row(places, base, top, head, tail)
            return
        if head:
            yield from self._within_row(places, base, top, head, stride)
            top += 1
        yield from self._rows(places, base, _clipped(self._runs[dim], top, bottom))
        if tail:
            yield from self._within_row(places, base, bottom, 0, tail)

    def _within_row(self, places: tuple[int, ...], base: int, row: int, first: int, last: int) -> Iterator[View]:
        dim = len(places)
        for run in _clipped(self._runs[dim], row, row + 1):
            yield from self._within((*places, run.place), base + row * self._strides[dim], first, last)

    def _rows(self, places: tuple[int, ...], base: int, runs: Sequence[Run]) -> Iterator[View]:
        dim = len(places)
        strides = self._strides[dim:]
        for chosen in itertools.product(runs, *self._runs[dim + 1 :]):
            first = base + sum(run.source * stride for run, stride in zip(chosen, strides, strict=True))
            yield View(
                first * self._itemsize - self._start,
                tuple(run.length for run in chosen),
                strides,
                (*places, *(slice(run.place, run.place + run.length) for run in chosen)),
            )


def _clipped(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """What of the runs lies in indices [start, stop) of their dimension."""
    found: list[Run] = []
    for run in runs:
        first, last = max(run.source, start), min(run.source + run.length, stop)
        if first < last:
            found.append(Run(first, run.place + first - run.source, last - first))
    return found
