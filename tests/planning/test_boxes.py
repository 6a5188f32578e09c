"""Views of any range of a tensor: every wanted element in it once, whatever the cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader_service.checkpoint.dtypes import DTYPES
from loader_service.planning.boxes import views_within
from loader_service.planning.cuts import Interval
from loader_service.planning.fragments import PartGeometry, View
from loader_service.planning.groups import geometry_of, whole_geometry

Dims = list[list[Interval]]


def geometry(shape: tuple[int, ...], dims: Dims, *, itemsize: int = 1) -> PartGeometry:
    return PartGeometry(shape, itemsize, dims, header_shape=(), coalesce_gap_bytes=0)


def check(part: PartGeometry, start: int, stop: int) -> None:
    """Elements count from 1 in the whole tensor; a reader of the range alone finds those that the part wants of it."""
    size = math.prod(part.full_shape)
    full = np.arange(1, size + 1, dtype=np.int64).reshape(part.full_shape)
    places = [[i for run in dim for i in range(run.source, run.source + run.length)] for dim in part.runs]
    part_ids = full[np.ix_(*places)] if part.full_shape else full
    low, high = start // part.itemsize, stop // part.itemsize
    expected = np.where((part_ids > low) & (part_ids <= high), part_ids, 0)
    held = np.arange(low + 1, high + 1, dtype=np.int64)  # one int64 for each element of the range
    filled = np.zeros(part.shape, dtype=np.int64)
    times = np.zeros(part.shape, dtype=np.int64)
    views = views_within(part, start, stop)
    for view in views:
        assert math.prod(view.shape) > 0
        assert view.offset_bytes % part.itemsize == 0
        offset = view.offset_bytes // part.itemsize
        reach = offset + sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True))
        assert 0 <= offset <= reach < len(held)
        source = np.lib.stride_tricks.as_strided(held[offset:], view.shape, [8 * step for step in view.strides])
        assert filled[view.index].shape == view.shape
        filled[view.index] = source
        times[view.index] += 1
    assert (filled == expected).all()
    assert (times == (expected > 0)).all()


@st.composite
def intervals(draw: st.DrawFn, size: int) -> list[Interval]:
    """All of a dimension, or up to three sections of it, some of them empty."""
    if draw(st.booleans()):
        return [(0, size)]
    edges = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=6)))
    return [(edges[i], edges[i + 1]) for i in range(0, len(edges) - 1, 2)]


@st.composite
def ranges(draw: st.DrawFn, part: PartGeometry) -> tuple[int, int]:
    """From one element to another: anywhere, or whole rows of some dimension."""
    size = math.prod(part.full_shape)
    unit = draw(st.sampled_from([1, *(math.prod(part.full_shape[dim:]) for dim in range(len(part.full_shape)))]))
    a, b = (min(size, draw(st.integers(0, size)) // max(1, unit) * unit) for _ in range(2))
    return min(a, b) * part.itemsize, (max(a, b) if draw(st.booleans()) else size) * part.itemsize


shapes = st.lists(st.sampled_from([1, 1, 2, 3, 5, 7, 0]), max_size=4).map(tuple)


@settings(max_examples=400)
@given(st.data(), shapes, st.sampled_from([1, 2, 8]))
def test_every_wanted_element_of_a_range_is_in_one_view(
    data: st.DataObject, shape: tuple[int, ...], itemsize: int
) -> None:
    part = geometry(shape, [data.draw(intervals(size)) for size in shape], itemsize=itemsize)
    for _ in range(3):
        check(part, *data.draw(ranges(part)))


@settings(max_examples=150)
@given(st.data(), shapes, st.sampled_from(["F4", "F6_E2M3", "F8_E8M0"]))
def test_types_of_less_than_a_byte_are_cut_as_they_are_stored(
    data: st.DataObject, shape: tuple[int, ...], code: str
) -> None:
    shape = (*shape[:-1], shape[-1] * 4) if shape and shape[-1] > 1 else (*shape, 4)
    rows = data.draw(intervals(shape[0])) if len(shape) > 1 else [(0, shape[0])]
    part = geometry_of(shape, DTYPES[code], [rows, *([(0, size)] for size in shape[1:])], 0)
    check(part, *data.draw(ranges(part)))


@pytest.mark.parametrize(
    ("code", "shape"), [("F4", (3, 8)), ("F4", (2, 4, 3)), ("F6_E3M2", (4, 3)), ("BF16", (3, 1)), ("F32", ())]
)
def test_every_range_of_a_whole_tensor(code: str, shape: tuple[int, ...]) -> None:
    part = whole_geometry(shape, DTYPES[code])
    for start in range(0, part.nbytes, part.itemsize):
        for stop in range(start + part.itemsize, part.nbytes + 1, part.itemsize):
            check(part, start, stop)


def test_a_range_is_the_rest_of_a_row_whole_rows_and_the_beginning_of_a_row() -> None:
    part = geometry((5, 10), [[(0, 5)], [(0, 10)]], itemsize=2)
    assert views_within(part, 34, 86) == (
        View(0, (3,), (1,), (1, slice(7, 10))),
        View(6, (2, 10), (10, 1), (slice(2, 4), slice(0, 10))),
        View(46, (3,), (1,), (4, slice(0, 3))),
    )


def test_nothing_is_seen_of_rows_and_columns_that_the_part_does_not_take() -> None:
    part = geometry((4, 10), [[(2, 4)], [(0, 3)]])
    assert views_within(part, 0, 20) == ()
    assert views_within(part, 24, 30) == ()
    assert views_within(part, 15, 32) == (
        View(5, (1, 3), (10, 1), (slice(0, 1), slice(0, 3))),
        View(15, (2,), (1,), (1, slice(0, 2))),
    )
    assert views_within(geometry((4, 10), [[], [(0, 3)]]), 0, 40) == ()


@pytest.mark.parametrize("shape", [(9,), (4, 5), (3, 4, 5), (3, 3, 4, 5)])
def test_a_range_has_at_most_two_boxes_less_one_for_each_dimension(shape: tuple[int, ...]) -> None:
    part = geometry(shape, [[(0, size)] for size in shape])
    size = math.prod(shape)
    most = max(len(views_within(part, a, b)) for a in range(size) for b in range(a + 1, size + 1))
    assert most == 2 * len(shape) - 1


def test_tensors_of_one_geometry_share_the_views_of_a_range_and_few_are_kept() -> None:
    part = geometry((100, 4), [[(0, 100)], [(0, 2)]])
    assert views_within(part, 0, 400) is views_within(part, 0, 400)
    for start in range(400):
        views_within(part, start, 400)
    assert len(part.views_of_ranges) < 40
