"""Split arithmetic, by literal numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader_service.planning.cuts import EVEN, Cut, Division, Interval


def edges(cut: Cut, size: int, parts: int) -> list[int]:
    """The parts + 1 cut points, checked to join."""
    assert cut.problem(size, parts) is None
    intervals = [cut.interval(size, parts, part) for part in range(parts)]
    assert [stop for _, stop in intervals[:-1]] == [start for start, _ in intervals[1:]]
    return [intervals[0][0], *(stop for _, stop in intervals)]


@pytest.mark.parametrize(
    ("cut", "size", "parts", "expected"),
    [
        pytest.param(EVEN, 37, 4, [0, 9, 18, 27, 37], id="37 rows over 4"),
        pytest.param(EVEN, 3, 4, [0, 0, 1, 2, 3], id="fewer rows than ranks leaves the first without"),
        pytest.param(EVEN, 0, 2, [0, 0, 0], id="nothing to cut"),
        pytest.param(EVEN, 2**63, 3, [0, 2**63 // 3, 2**64 // 3, 2**63], id="beyond 64 bits"),
        pytest.param(Cut(pad_to=64), 32003, 4, [0, 8016, 16032, 24048, 32003], id="vocabulary padded to 64"),
        pytest.param(Cut(pad_to=4), 10, 4, [0, 3, 6, 9, 10], id="padded to the ranks is ceil-chunking"),
        pytest.param(Cut(pad_to=8), 5, 4, [0, 2, 4, 5, 5], id="padding can leave the last part empty"),
        pytest.param(Cut(align=128), 768, 4, [0, 128, 384, 512, 768], id="768 rows in blocks of 128"),
        pytest.param(EVEN, 6, 4, [0, 1, 3, 4, 6], id="and their 6 scales agree"),
        pytest.param(Cut(align=128), 700, 2, [0, 384, 700], id="a ragged last block"),
        pytest.param(Cut(align=128), 100, 4, [0, 0, 0, 0, 100], id="one block goes to the last rank"),
        pytest.param(
            Cut(boundaries=(0, 15, 30, 46, 61)), 61, 4, [0, 15, 30, 46, 61], id="stages with the rest in between"
        ),
        pytest.param(Cut(boundaries=(0, 16, 31, 46, 61)), 61, 4, [0, 16, 31, 46, 61], id="stages with the rest first"),
        pytest.param(Cut(boundaries=(0, 0, 5)), 5, 2, [0, 0, 5], id="an empty part by choice"),
        pytest.param(Cut(units=32), 4096, 4, [0, 1024, 2048, 3072, 4096], id="32 heads of 128"),
        pytest.param(Cut(units=8), 4, 2, [0, 2, 4], id="scales coarser than heads, cut at whole numbers"),
    ],
)
def test_cut_points(cut: Cut, size: int, parts: int, expected: list[int]) -> None:
    assert edges(cut, size, parts) == expected


def test_two_kv_heads_go_to_four_consecutive_ranks_each() -> None:
    cut = Cut(units=2)
    assert cut.problem(256, 8) is None
    assert [cut.interval(256, 8, rank) for rank in range(8)] == [(0, 128)] * 4 + [(128, 256)] * 4


@pytest.mark.parametrize(
    ("cut", "size", "parts", "words"),
    [
        pytest.param(Cut(units=6), 768, 4, "neither a multiple nor a divisor", id="6 heads over 4"),
        pytest.param(Cut(units=3), 768, 4, "neither a multiple nor a divisor", id="3 heads over 4"),
        pytest.param(Cut(units=2), 255, 8, "no whole number", id="2 heads of no whole number"),
        pytest.param(Cut(units=4), 10, 4, "no whole number", id="4 heads in 10 elements"),
        pytest.param(Cut(boundaries=(0, 4, 9)), 10, 2, "end at 10", id="boundaries for another size"),
        pytest.param(Cut(boundaries=(1, 4, 10)), 10, 2, "start at 0", id="boundaries that start late"),
        pytest.param(Cut(boundaries=(0, 5, 10)), 10, 3, "need 4", id="too few boundaries"),
        pytest.param(Cut(boundaries=(0, 7, 5, 10)), 10, 3, "must not fall", id="falling boundaries"),
    ],
)
def test_a_cut_that_cannot_be_made_says_why(cut: Cut, size: int, parts: int, words: str) -> None:
    problem = cut.problem(size, parts)
    assert problem is not None
    assert words in problem


QKV = Division((32, 2, 2), (Cut(units=32), Cut(units=2), Cut(units=2)))
GATE_UP = Division((1, 1), (EVEN, EVEN))


@pytest.mark.parametrize(
    ("division", "size", "parts", "part", "expected"),
    [
        pytest.param(QKV, 36 * 128, 4, 0, [(0, 1024), (4096, 4224), (4352, 4480)], id="qkv, first of 4"),
        pytest.param(QKV, 36 * 128, 4, 1, [(1024, 2048), (4096, 4224), (4352, 4480)], id="kv heads are shared by two"),
        pytest.param(QKV, 36 * 128, 4, 3, [(3072, 4096), (4224, 4352), (4480, 4608)], id="last of 4"),
        pytest.param(QKV, 36, 4, 0, [(0, 8), (32, 33), (34, 35)], id="its scales, by the same proportions"),
        pytest.param(GATE_UP, 20, 4, 1, [(2, 5), (12, 15)], id="gate and up, uneven"),
        pytest.param(GATE_UP, 20, 1, 0, [(0, 20)], id="sections that touch are one"),
        pytest.param(GATE_UP, 0, 2, 0, [], id="nothing to divide"),
        pytest.param(GATE_UP, 2, 4, 0, [], id="an empty part"),
        pytest.param(
            Division((1, 1), (Cut(align=4), Cut(align=2))), 24, 2, 0, [(0, 4), (12, 18)], id="a value a section"
        ),
    ],
)
def test_sections_are_cut_by_themselves(
    division: Division, size: int, parts: int, part: int, expected: list[Interval]
) -> None:
    assert division.problem(size, parts) is None
    assert list(division.intervals(size, parts, part)) == expected


@pytest.mark.parametrize(
    ("division", "size", "words"),
    [
        pytest.param(GATE_UP, 7, "do not divide 7", id="halves of an odd size"),
        pytest.param(QKV, 4600, "do not divide 4600", id="proportions of another tensor"),
        pytest.param(Division((1, 1), (EVEN, Cut(units=3))), 12, "section 1: units: 3", id="one section's own cut"),
    ],
)
def test_sections_that_do_not_fit_say_why(division: Division, size: int, words: str) -> None:
    problem = division.problem(size, 2)
    assert problem is not None
    assert words in problem


sizes = st.integers(0, 10_000)
parts_of_an_axis = st.integers(1, 70)


@given(sizes, parts_of_an_axis, st.builds(Cut, align=st.integers(1, 300)) | st.builds(Cut, pad_to=st.integers(1, 300)))
def test_parts_cover_the_dimension_in_order_and_never_overlap(size: int, parts: int, cut: Cut) -> None:
    points = edges(cut, size, parts)
    assert points[0] == 0
    assert points[-1] == size
    assert points == sorted(points)


@given(sizes, parts_of_an_axis, st.integers(1, 256))
def test_aligned_rows_agree_with_their_block_scales(size: int, parts: int, block: int) -> None:
    scales = -(-size // block)
    rows = edges(Cut(align=block), size, parts)
    assert rows == [min(size, block * at) for at in edges(EVEN, scales, parts)]


@given(sizes, st.integers(1, 64))
def test_padding_to_the_number_of_ranks_is_ceil_chunking(size: int, parts: int) -> None:
    chunk = -(-size // parts)
    assert edges(Cut(pad_to=parts), size, parts) == [min(size, chunk * rank) for rank in range(parts + 1)]
