"""Coalescing, by literal numbers."""

from __future__ import annotations

import numpy as np
import pytest

from loader_service.planning.extents import ExtentColumns, coalesce


def joined(
    ranges: list[tuple[int, int]], *, payload: int, gap: int, shards: list[int] | None = None
) -> tuple[list[tuple[int, int]], ExtentColumns]:
    start, stop = (np.array([r[i] for r in ranges], dtype=np.int64) for i in range(2))
    shard = np.array(shards or [0] * len(ranges), dtype=np.int32)
    columns = coalesce(start, stop, shard, payload_bytes=payload, gap_bytes=gap)
    return list(zip(columns.start.tolist(), columns.stop.tolist(), strict=True)), columns


@pytest.mark.parametrize(
    ("ranges", "payload", "gap", "expected"),
    [
        pytest.param([], 0, 100, [], id="nothing"),
        pytest.param([(0, 10), (10, 20)], 20, 0, [(0, 20)], id="touching ranges are one even with a gap of 0"),
        pytest.param([(0, 10), (11, 20)], 10**6, 0, [(0, 10), (11, 20)], id="a gap of 0 joins nothing else"),
        pytest.param([(0, 10), (19, 20)], 10**6, 10, [(0, 20)], id="closer than the gap"),
        pytest.param([(0, 10), (20, 21)], 10**6, 10, [(0, 10), (20, 21)], id="just as far as the gap"),
        pytest.param([(0, 100), (105, 205)], 100, 50, [(0, 205)], id="5 extra bytes of 100 are allowed"),
        pytest.param([(0, 100), (106, 206)], 100, 50, [(0, 100), (106, 206)], id="6 are not"),
        pytest.param([(0, 60), (64, 90), (91, 98), (100, 107)], 100, 50, [(0, 60), (64, 107)], id="smallest first"),
        pytest.param([(0, 40), (43, 80), (83, 103)], 100, 50, [(0, 80), (83, 103)], id="equal gaps in file order"),
        pytest.param([(0, 1), (1, 2), (4, 5), (5, 6)], 40, 50, [(0, 6)], id="touching ranges cost nothing"),
    ],
)
def test_ranges_are_joined(
    ranges: list[tuple[int, int]], payload: int, gap: int, expected: list[tuple[int, int]]
) -> None:
    assert joined(ranges, payload=payload, gap=gap)[0] == expected


def test_ranges_of_different_shards_are_never_joined() -> None:
    found, columns = joined([(0, 10), (10, 20), (20, 30), (0, 5)], payload=10**6, gap=100, shards=[0, 0, 1, 2])
    assert found == [(0, 20), (20, 30), (0, 5)]
    assert columns.shard.tolist() == [0, 1, 2]
    assert columns.first_fragment.tolist() == [0, 2, 3, 4]
