"""Where a part's bytes lie: direct fragments, blocks, and their subdivision."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loader_service.planning.cuts import Interval
from loader_service.planning.fragments import PartGeometry, SubRange, View

Dims = list[list[Interval]]


def geometry(shape: tuple[int, ...], dims: Dims, *, gap: int = 10**6, itemsize: int = 1) -> PartGeometry:
    return PartGeometry(shape, itemsize, dims, header_shape=(), coalesce_gap_bytes=gap)


def fragments(part: PartGeometry) -> list[tuple[int, int, int]]:
    return list(zip(part.start.tolist(), part.stop.tolist(), part.dst.tolist(), strict=True))


@pytest.mark.parametrize(
    ("shape", "dims", "expected"),
    [
        pytest.param((8, 16), [[(2, 4)], [(0, 16)]], [(32, 64, 0)], id="rows are one direct range"),
        pytest.param(
            (8, 16), [[(0, 8)], [(4, 8)]], [(4, 120, -1)], id="columns are one block, first to last wanted byte"
        ),
        pytest.param((8, 16), [[(2, 4)], [(4, 8)]], [(36, 56, -1)], id="columns of some rows pull in no other row"),
        pytest.param((8, 16), [[(2, 3)], [(4, 8)]], [(36, 40, 0)], id="columns of one row are direct"),
        pytest.param((8, 1), [[(2, 4)], [(0, 1)]], [(2, 4, 0)], id="a column of size 1 is whole"),
        pytest.param(
            (8, 16), [[(0, 2), (4, 6)], [(0, 16)]], [(0, 32, 0), (64, 96, 32)], id="sections of rows stay apart"
        ),
        pytest.param((8, 16), [[(0, 2), (4, 6)], [(0, 4)]], [(0, 20, -1), (64, 84, -1)], id="also as column slices"),
        pytest.param((2, 16), [[(0, 2)], [(0, 2), (8, 10)]], [(0, 26, -1)], id="sections of columns are in one block"),
        pytest.param(
            (1, 16), [[(0, 1)], [(0, 2), (8, 10)]], [(0, 2, 0), (8, 10, 2)], id="one row's sections are direct"
        ),
        pytest.param((4, 8, 4), [[(1, 3)], [(0, 8)], [(0, 4)]], [(32, 96, 0)], id="stacked, dimension 0"),
        pytest.param((4, 8, 4), [[(0, 4)], [(2, 4)], [(0, 4)]], [(8, 112, -1)], id="stacked, dimension 1"),
        pytest.param((4, 8, 4), [[(0, 4)], [(0, 8)], [(1, 2)]], [(1, 126, -1)], id="stacked, dimension 2"),
        pytest.param((4, 8, 4), [[(1, 2)], [(2, 4)], [(0, 4)]], [(40, 48, 0)], id="rows of one expert are direct"),
        pytest.param((5,), [[(1, 3)]], [(1, 3, 0)], id="a vector"),
        pytest.param((), [], [(0, 1, 0)], id="a scalar"),
        pytest.param((0, 5), [[(0, 0)], [(0, 5)]], [], id="a tensor without elements"),
        pytest.param((4, 5), [[], [(0, 5)]], [], id="an empty part"),
    ],
)
def test_fragments_of_a_part(shape: tuple[int, ...], dims: Dims, expected: list[tuple[int, int, int]]) -> None:
    assert fragments(geometry(shape, dims)) == expected


@pytest.mark.parametrize(
    ("gap", "expected"),
    [
        pytest.param(0, [(4, 8, 0), (20, 24, 4), (36, 40, 8)], id="none closer than 0"),
        pytest.param(12, [(4, 8, 0), (20, 24, 4), (36, 40, 8)], id="just as far"),
        pytest.param(13, [(4, 40, -1)], id="closer"),
    ],
)
def test_runs_merge_only_when_they_lie_closer_than_the_gap(gap: int, expected: list[tuple[int, int, int]]) -> None:
    assert fragments(geometry((3, 16), [[(0, 3)], [(4, 8)]], gap=gap)) == expected


def test_a_stacked_slice_whose_experts_lie_far_apart_is_a_block_each() -> None:
    part = geometry((3, 100, 4), [[(0, 3)], [(10, 20)], [(0, 2)]], gap=8)
    assert fragments(part) == [(40 + 400 * e, 40 + 400 * e + 38, -1) for e in range(3)]


def test_a_section_of_columns_that_lies_far_away_is_not_pulled_in() -> None:
    part = geometry((2, 100), [[(0, 2)], [(0, 2), (4, 6), (90, 92)]], gap=10)
    # Within a row the first two sections merge. The row's end and the next row's start lie 8 apart, and stay apart.
    assert fragments(part) == [(0, 6, -1), (90, 92, 4), (100, 106, -1), (190, 192, 10)]


def test_offsets_are_bytes_and_views_count_elements() -> None:
    part = geometry((3, 8), [[(0, 3)], [(2, 4)]], itemsize=4)
    assert fragments(part) == [(8, 80, -1)]
    assert list(part.cut(0, 1000, 10**6)) == [
        SubRange(1008, 1080, (View(0, (3, 2), (8, 1), (slice(0, 3), slice(0, 2))),))
    ]


def test_sections_of_columns_are_views_side_by_side() -> None:
    part = geometry((2, 16), [[(0, 2)], [(0, 2), (8, 12)]])
    assert list(part.cut(0, 0, 10**6)) == [
        SubRange(
            0,
            28,
            (
                View(0, (2, 2), (16, 1), (slice(0, 2), slice(0, 2))),
                View(8, (2, 4), (16, 1), (slice(0, 2), slice(2, 6))),
            ),
        )
    ]


def test_a_direct_fragment_is_cut_into_whole_rows_of_like_size() -> None:
    part = geometry((7, 10), [[(0, 7)], [(0, 10)]])
    found = [(sub.start, sub.stop, sub.views[0].index) for sub in part.cut(0, 0, 35)]
    assert found == [
        (0, 20, (slice(0, 2), slice(0, 10))),
        (20, 40, (slice(2, 4), slice(0, 10))),
        (40, 70, (slice(4, 7), slice(0, 10))),
    ]


def test_rows_longer_than_the_limit_are_indexed_by_integers_and_one_slice() -> None:
    part = geometry((2, 3, 10), [[(0, 2)], [(1, 3)], [(0, 10)]])
    found = [(sub.start, sub.stop, sub.views[0].index, sub.views[0].shape) for sub in part.cut(0, 0, 5)]
    assert found[:3] == [
        (10, 15, (0, 0, slice(0, 5)), (5,)),
        (15, 20, (0, 0, slice(5, 10)), (5,)),
        (20, 25, (0, 1, slice(0, 5)), (5,)),
    ]
    assert len(found) == 8


def test_no_element_is_split_however_small_the_limit() -> None:
    part = geometry((3,), [[(1, 3)]], itemsize=8)
    assert [(sub.start, sub.stop) for sub in part.cut(0, 0, 1)] == [(8, 16), (16, 24)]
    assert list(geometry((), [], itemsize=8).cut(0, 5, 1)) == [SubRange(5, 13, (View(0, (), (), ()),))]


def test_a_block_cut_in_rows_leaves_out_the_bytes_between() -> None:
    part = geometry((4, 16), [[(0, 4)], [(4, 8)]])
    assert [(sub.start, sub.stop) for sub in part.cut(0, 0, 20)] == [(4, 24), (36, 56)]
    assert [(sub.start, sub.stop) for sub in part.cut(0, 0, 4)] == [(4, 8), (20, 24), (36, 40), (52, 56)]


def test_a_spec_has_one_pair_unless_sections_lie_apart() -> None:
    assert geometry((4, 6), [[(1, 3)], [(0, 6)]]).spec("U8").parts == (
        ((slice(1, 3), slice(0, 6)), (slice(0, 2), slice(0, 6))),
    )
    apart = geometry((4, 6), [[(1, 3)], [(0, 1), (4, 6)]]).spec("U8").parts
    assert [dst for _, dst in apart] == [(slice(0, 2), slice(0, 1)), (slice(0, 2), slice(1, 3))]


@pytest.mark.parametrize("dims", [[[], [(0, 6)]], [[(0, 4)], []]], ids=["no rows", "no columns"])
def test_the_spec_of_an_empty_part_selects_nothing_of_the_right_shape(dims: Dims) -> None:
    part = geometry((4, 6), dims)
    ((source, place),) = part.spec("U8").parts
    assert np.zeros((4, 6))[source].shape == np.zeros(part.shape)[place].shape == part.shape
    assert part.nbytes == 0


def test_a_slice_of_many_rows_is_no_list_of_rows() -> None:
    part = geometry((129_280, 7168), [[(0, 129_280)], [(0, 896)]], itemsize=2, gap=256 << 10)
    assert len(part.start) == 1
    ranges = list(part.cut(0, 0, 16 << 20))
    assert len(ranges) == math.ceil(129_280 / (1 + ((16 << 20) - 1792) // 14336))
