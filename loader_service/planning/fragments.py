"""Where the bytes of a rank's part of a tensor lie in the file, and where each of them goes in the rank's tensor.

A part is the product of runs along each dimension. Its bytes come in fragments: direct ones, contiguous in the file and
in the rank's tensor, and blocks, file ranges in which wanted bytes alternate with others. A column slice is a block:
rows are read with the unwanted columns between them, since thousands of tiny reads cost more. But a block never joins
runs that lie `coalesce_gap_bytes` apart or more, nor sections of rows: rows that no one wants stay out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from loader_service.planning.cuts import Interval

Int64s = npt.NDArray[np.int64]
Index = tuple[int | slice, ...]


class Run(NamedTuple):
    """Consecutive indices of one dimension: [source, source + length) of the whole tensor go to `place` of the part."""

    source: int
    place: int
    length: int


@dataclass(frozen=True, slots=True)
class View:
    """Elements within a file range: `offset_bytes` from the range's start; shape and strides in storage elements.

    They go to `index` of the rank's tensor, whose selection there has the same shape.
    """

    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    index: Index


@dataclass(frozen=True, slots=True)
class SubRange:
    """A contiguous file range [start, stop) in absolute bytes and the views that lie in it, each element in one."""

    start: int
    stop: int
    views: tuple[View, ...]


@dataclass(frozen=True, slots=True)
class PartSpec:
    """How a rank's tensor relates to the checkpoint's, in storage elements: `part[dst] = full[src]` for each pair.

    `dtype_code` is the header's; `full_shape` has the last dimension of a sub-byte type in bytes.
    """

    full_shape: tuple[int, ...]
    dtype_code: str
    parts: tuple[tuple[tuple[slice, ...], tuple[slice, ...]], ...]


class PartGeometry:
    """One rank's part of a tensor with a given shape, relative to the tensor's first byte. Immutable.

    `shape` is the part's, in storage elements, `header_shape` the part's in the header's elements. Fragment k of the
    part is bytes [start[k], stop[k]) of the tensor; `dst[k]` is its byte offset in the part, -1 for a block.
    """

    def __init__(
        self,
        full_shape: tuple[int, ...],
        itemsize: int,
        intervals: Sequence[Sequence[Interval]],
        *,
        header_shape: tuple[int, ...],
        coalesce_gap_bytes: int,
    ) -> None:
        self.full_shape = full_shape
        self.itemsize = itemsize
        self.header_shape = header_shape
        self.runs = tuple(_runs(dim) for dim in intervals)
        self.shape = tuple(sum(run.length for run in dim) for dim in self.runs)
        self.nbytes = math.prod(self.shape) * itemsize
        self._strides = _row_major_strides(full_shape, itemsize)
        self._views: dict[int, tuple[View, ...]] = {}
        self.views_of_ranges: dict[tuple[int, int], tuple[View, ...]] = {}  # filled by `boxes.views_within`
        if self.nbytes == 0:
            self.start = self.stop = self.dst = np.empty(0, dtype=np.int64)
            return
        self._first, self._span = self._extents_of_dims()
        self._level, self._clusters = self._merge(coalesce_gap_bytes)
        self.start, self.stop, self.dst = self._fragments()

    def spec(self, dtype_code: str) -> PartSpec:
        """The part as pairs of indices, one pair unless sections lie apart."""
        runs = [dim or (Run(0, 0, 0),) for dim in self.runs]
        pairs = tuple(
            (
                tuple(slice(run.source, run.source + run.length) for run in chosen),
                tuple(slice(run.place, run.place + run.length) for run in chosen),
            )
            for chosen in itertools.product(*runs)
        )
        return PartSpec(self.full_shape, dtype_code, pairs)

    def cut(self, fragment: int, tensor_start: int, max_bytes: int) -> Iterator[SubRange]:
        """Fragment `fragment` of the part in ranges of at most `max_bytes`; see `subdivide`."""
        start, stop = int(self.start[fragment]), int(self.stop[fragment])
        if stop - start > max_bytes:
            return self._cut_fragment(fragment, tensor_start, max_bytes)
        # The views of a whole fragment are the same for every tensor of this geometry: 200,000 tensors share a few.
        views = self._views.get(fragment)
        if views is None:
            views = self._views[fragment] = next(self._cut_fragment(fragment, 0, stop - start)).views
        return iter((SubRange(tensor_start + start, tensor_start + stop, views),))

    def _cut_fragment(self, fragment: int, tensor_start: int, max_bytes: int) -> Iterator[SubRange]:
        rest, cluster = divmod(fragment, len(self._clusters))
        base = tensor_start
        places: list[int] = []
        for dim in range(self._level - 1, -1, -1):
            rest, place = divmod(rest, self.shape[dim])
            base += _source_of(self.runs[dim], place) * self._strides[dim]
            places.append(place)
        return self._cut(self._level, tuple(reversed(places)), base, self._clusters[cluster], max_bytes)

    def _extents_of_dims(self) -> tuple[list[int], list[int]]:
        """For dims d and deeper: bytes before the first wanted byte, and from there past the last wanted one."""
        first, span = [0], [self.itemsize]
        for dim, stride in zip(reversed(self.runs), reversed(self._strides), strict=True):
            first.append(first[-1] + dim[0].source * stride)
            span.append(span[-1] + (dim[-1].source + dim[-1].length - 1 - dim[0].source) * stride)
        return first[::-1], span[::-1]

    def _merge(self, gap_bytes: int) -> tuple[int, tuple[tuple[Run, ...], ...]]:
        """(level, clusters): a fragment is one index of each dimension above `level` and one cluster of runs there.

        For example rows 2 and 3 of each of 4 matrices of 6 x 8 bytes, [4, 6, 8][:, 2:4]: the deepest cut is dimension
        1, whose one run is 16 bytes. From one matrix's run to the next are 32 bytes. If that is closer than
        `gap_bytes`, the level rises to 0 and all is one block: bytes 16 to 176, of which views take 4 x 16. Else the
        level stays 1 and there are 4 direct fragments of 16 bytes.
        """
        level = self._deepest_cut()
        longest = next((dim for dim, size in enumerate(self.shape) if size > 1), len(self.shape))
        if level < 0:
            return 0, ((),)
        clusters = self._clustered(level, 0, gap_bytes if level > longest else None)
        while level > 0 and len(clusters) == 1:
            gap = self._strides[level - 1] - self._span[level]
            if not closer(gap, gap_bytes):
                break
            level -= 1
            clusters = self._clustered(level, gap, gap_bytes if level > longest else None)
        return level, clusters

    def _deepest_cut(self) -> int:
        """The innermost dimension of which not everything is taken; 0 when all is, -1 without dimensions."""
        for dim in range(len(self.shape) - 1, 0, -1):
            if self.shape[dim] != self.full_shape[dim]:
                return dim
        return 0 if self.shape else -1

    def _clustered(self, dim: int, inner_gap: int, gap_bytes: int | None) -> tuple[tuple[Run, ...], ...]:
        """The runs of a dimension, those together that lie close; None keeps all apart."""
        clusters: list[tuple[Run, ...]] = []
        for run in self.runs[dim]:
            if clusters and gap_bytes is not None:
                last = clusters[-1][-1]
                gap = (run.source - last.source - last.length) * self._strides[dim] + inner_gap
                if closer(gap, gap_bytes):
                    clusters[-1] = (*clusters[-1], run)
                    continue
            clusters.append((run,))
        return tuple(clusters)

    def _fragments(self) -> tuple[Int64s, Int64s, Int64s]:
        level, strides = self._level, self._strides
        part_strides = _row_major_strides(self.shape, self.itemsize)
        start, place = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        for dim in range(level):
            sources = np.concatenate([np.arange(run.source, run.source + run.length) for run in self.runs[dim]])
            start = (start[:, None] + sources * strides[dim]).ravel()
            place = (place[:, None] + np.arange(self.shape[dim]) * part_strides[dim]).ravel()
        if not self.shape:
            return start, start + self.itemsize, place
        inner_bytes = part_strides[level]
        firsts, spans, places = [], [], []
        for cluster in self._clusters:
            head, tail = cluster[0], cluster[-1]
            span = (tail.source + tail.length - 1 - head.source) * strides[level] + self._span[level + 1]
            firsts.append(head.source * strides[level] + self._first[level + 1])
            spans.append(span)
            direct = span == sum(run.length for run in cluster) * inner_bytes
            places.append(head.place * inner_bytes if direct else -1)
        start = (start[:, None] + np.array(firsts, dtype=np.int64)).ravel()
        stop = (start.reshape(-1, len(spans)) + np.array(spans, dtype=np.int64)).ravel()
        offsets = np.array(places, dtype=np.int64)
        dst = np.where(offsets < 0, np.int64(-1), place[:, None] + offsets).ravel()
        return start, stop, dst

    def _cut(
        self, dim: int, places: tuple[int, ...], base: int, runs: tuple[Run, ...], max_bytes: int
    ) -> Iterator[SubRange]:
        """Ranges over `runs` of dimension `dim` at fixed places of the dimensions above; `base` is their offset."""
        if dim == len(self.shape):
            yield SubRange(base, base + self.itemsize, (View(0, (), (), places),))
            return
        stride, inner = self._strides[dim], self._span[dim + 1]
        if (runs[-1].source + runs[-1].length - 1 - runs[0].source) * stride + inner <= max_bytes:
            yield self._range(dim, places, base, runs)
        elif inner <= max_bytes:
            most = 1 + (max_bytes - inner) // stride
            for run in runs:
                pieces = -(-run.length // most)
                for i in range(pieces):
                    a, b = run.length * i // pieces, run.length * (i + 1) // pieces
                    yield self._range(dim, places, base, (Run(run.source + a, run.place + a, b - a),))
        else:
            for run in runs:
                for i in range(run.length):
                    at = base + (run.source + i) * stride
                    yield from self._cut(dim + 1, (*places, run.place + i), at, self._deeper(dim + 1), max_bytes)

    def _deeper(self, dim: int) -> tuple[Run, ...]:
        return self.runs[dim] if dim < len(self.runs) else ()

    def _range(self, dim: int, places: tuple[int, ...], base: int, runs: tuple[Run, ...]) -> SubRange:
        strides = tuple(stride // self.itemsize for stride in self._strides[dim:])
        start = base + runs[0].source * self._strides[dim] + self._first[dim + 1]
        last = runs[-1].source + runs[-1].length - 1
        stop = start + (last - runs[0].source) * self._strides[dim] + self._span[dim + 1]
        views = tuple(
            View(
                base
                - start
                + sum(run.source * stride for run, stride in zip(chosen, self._strides[dim:], strict=True)),
                tuple(run.length for run in chosen),
                strides,
                (*places, *(slice(run.place, run.place + run.length) for run in chosen)),
            )
            for chosen in itertools.product(runs, *self.runs[dim + 1 :])
        )
        return SubRange(start, stop, views)


class FragmentSource(Protocol):
    """What `subdivide` needs of a rank's plan."""

    def origin(self, fragment: int) -> tuple[PartGeometry, int, int]:
        """(geometry, number of the fragment within it, absolute offset of the tensor's first byte)."""
        ...


def subdivide(plan: FragmentSource, fragment: int, max_bytes: int) -> Iterator[SubRange]:
    """Cuts a fragment of a rank's plan into consecutive file ranges of at most `max_bytes` each, in file order.

    No element is split: a `max_bytes` below the element's size gives single elements. Together the views fill exactly
    the fragment's place in the rank's tensor. Rows longer than `max_bytes` are indexed by integers and one slice. The
    ranges of a direct fragment touch; between those of a block may lie bytes that no view wants.
    """
    geometry, number, tensor_start = plan.origin(fragment)
    return geometry.cut(number, tensor_start, max_bytes)


def closer(gap_bytes: int, than_bytes: int) -> bool:
    """Whether ranges with this gap are read as one: they touch, or lie closer than the limit."""
    return gap_bytes == 0 or gap_bytes < than_bytes


def _runs(intervals: Sequence[Interval]) -> tuple[Run, ...]:
    runs: list[Run] = []
    place = 0
    for start, stop in intervals:
        if start < stop:
            runs.append(Run(start, place, stop - start))
            place += stop - start
    return tuple(runs)


def _source_of(runs: Sequence[Run], place: int) -> int:
    for run in reversed(runs):
        if run.place <= place:
            return run.source + place - run.place
    raise AssertionError("a place lies in one of its dimension's runs")


def _row_major_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Bytes from one index to the next, for each dimension."""
    strides: list[int] = []
    step = itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
