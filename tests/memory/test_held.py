"""The columns beneath the raw weight cache: ranges of one file, and what of them is held."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loader_service.memory.held import ByteRanges, HeldRange, HeldRanges

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def covered(pairs: list[tuple[int, int]]) -> set[int]:
    return {byte for start, stop in pairs for byte in range(start, stop)}


def columns(pairs: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [start for start, _ in pairs], [stop for _, stop in pairs]


@given(pairs=PAIRS, others=PAIRS)
@example(pairs=[(2, 4), (0, 2), (7, 9), (8, 8), (9, 8)], others=[(1, 3), (4, 7), (9, 9)])
def test_merged_ranges_cover_the_same_bytes_once_and_count_overlaps(
    pairs: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    merged = ByteRanges.merged(*columns(pairs))
    listed = list(zip(merged.starts.tolist(), merged.stops.tolist(), strict=True))
    assert covered(listed) == covered(pairs)
    assert merged.nbytes == len(covered(pairs))
    assert all(start < stop for start, stop in listed)
    assert all(before[1] < after[0] for before, after in pairwise(listed))
    asked = [pair for pair in others if pair[0] <= pair[1]]
    found = merged.overlap_bytes(*(np.array(column, dtype=np.int64) for column in columns(asked)))
    assert found.tolist() == [len(covered([pair]) & covered(pairs)) for pair in asked]


def held_at(*pairs: tuple[int, int]) -> HeldRanges:
    held = HeldRanges()
    for start, stop in pairs:
        held.add(HeldRange(start, stop, memoryview(bytes(stop - start)), start), used=start)
    return held


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)], ids=["in order", "out of order"])
def test_ranges_are_found_and_missed_wherever_a_lookup_begins_and_ends(order: tuple[int, ...]) -> None:
    pairs = [(2, 5), (5, 6), (8, 9), (11, 14)]
    held = held_at(*(pairs[i] for i in order))
    for start in range(16):
        for stop in range(start + 1, 17):
            wanted = set(range(start, stop))
            found = held.covering(start, stop)
            if wanted <= covered(pairs):
                assert found is not None
                assert [(each.start, each.stop) for each in found] == [p for p in pairs if covered([p]) & wanted]
                assert [each.fingerprint for each in found] == [each.start for each in found]
            else:
                assert found is None
            missing = held.missing(start, stop)
            assert covered(missing) == wanted - covered(pairs)
            assert all(before[1] < after[0] for before, after in pairwise(missing))


def test_what_is_dropped_is_the_range_that_was_meant() -> None:
    held = held_at((0, 4), (4, 8))
    found = held.covering(0, 8)
    assert found is not None
    first, second = found
    assert held.drop(first)
    assert not held.drop(first)
    held.add(HeldRange(0, 4, memoryview(bytes(4)), 9), used=9)
    assert not held.drop(first)  # other memory stands in its place
    held.use(first, 77)
    assert held.used.tolist() == [9, 4]
    (dropped,) = held.drop_all(np.array([False, True]))
    assert dropped is second.memory
    assert (held.starts.tolist(), held.stops.tolist(), held.sizes.tolist()) == ([0], [4], [4])
    assert held.covering(0, 4) is not None
