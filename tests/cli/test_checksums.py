"""Checksums of parts: what they cover, for whom, and however their bytes come."""

from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest

from loader_service.cli.checksums import ALL_BELOW_BYTES, MANY_FROM_BYTES, Cuts, cuts_of, running_parts
from tests.support.shards import pattern_bytes

SHAPES = [((7,), 4), ((100,), 2), ((1, 60), 1), ((50, 96), 2), ((4, 33, 50), 2), ((3, 2, 5, 7, 2), 1), ((1, 1), 8)]


def expected(cuts: Cuts, data: bytes) -> list[int]:
    """Every part's checksum, by plain indexing."""
    whole = np.frombuffer(data, np.uint8).reshape(cuts.outer, cuts.size, cuts.inner_bytes)
    edges = [cuts.edge(part) for part in range(cuts.parts + 1)]
    return [zlib.crc32(whole[:, start:stop].tobytes()) for start, stop in itertools.pairwise(edges)]


def test_the_dimensions_that_are_longer_than_one_are_cut_the_first_three_of_them() -> None:
    assert [(each.dim, each.parts) for each in cuts_of((1, 100, 1, 7, 60, 9), 2)] == [(-1, 1), (1, 48), (3, 7), (4, 48)]


@pytest.mark.parametrize(("shape", "dims"), [((), [-1]), ((1, 1), [-1]), ((0, 5), []), ((5, 0), [])], ids=str)
def test_a_tensor_without_length_is_one_part_and_one_without_bytes_none(
    shape: tuple[int, ...], dims: list[int]
) -> None:
    assert [each.dim for each in cuts_of(shape, 4)] == dims
    assert all((each.parts, each.inner_bytes) == (1, 4) for each in cuts_of(shape, 4))


def test_a_large_tensor_has_more_parts_and_none_of_all() -> None:
    assert [each.parts for each in cuts_of((1 << 10, 1 << 10), MANY_FROM_BYTES >> 20)] == [192, 192]
    assert [(each.dim, each.parts) for each in cuts_of((ALL_BELOW_BYTES,), 1)] == [(0, 48)]
    assert [(each.dim, each.parts) for each in cuts_of((ALL_BELOW_BYTES - 1,), 1)] == [(-1, 1), (0, 48)]


@pytest.mark.parametrize(("shape", "itemsize"), SHAPES, ids=str)
@pytest.mark.parametrize("step", [13, 101, 1000, 1 << 20])
def test_however_the_bytes_come_every_part_has_the_checksum_of_its_bytes(
    shape: tuple[int, ...], itemsize: int, step: int
) -> None:
    nbytes = int(np.prod(shape)) * itemsize
    data = pattern_bytes(nbytes, 1)
    for cuts in cuts_of(shape, itemsize):
        running = running_parts(cuts, range(cuts.parts), 0, cuts.size)
        for at in range(0, nbytes, step):
            chunk = np.frombuffer(data, np.uint8)[at : at + step]
            for part in range(cuts.parts):  # each by itself, as several threads do it
                running.update(chunk, at, range(part, part + 1))
        assert running.values == expected(cuts, data)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 12, 16, 24, 48])
@pytest.mark.parametrize("size", [5, 47, 96, 1001, 129280])
def test_slices_of_so_many_ranks_consist_of_whole_parts(size: int, ranks: int) -> None:
    _, cuts = cuts_of((size,), 2)
    covered = []
    for rank in range(ranks):
        start, stop = size * rank // ranks, size * (rank + 1) // ranks  # as rules cut that say nothing else
        parts = cuts.within(start, stop)
        assert [cuts.edge(parts.start), cuts.edge(parts.stop)] == [start, stop] if start < stop else not parts
        covered += list(parts)
    assert covered == list(range(cuts.parts))


def test_of_another_slice_only_the_parts_within_count() -> None:
    _, cuts = cuts_of((480,), 1)
    assert cuts.within(5, 35) == range(1, 3)
    assert cuts.within(11, 19) == range(2, 2)
    assert cuts.within(0, 480) == range(48)


def test_a_slice_s_parts_have_the_checksums_of_the_whole() -> None:
    data = pattern_bytes(50 * 96 * 2, 3)
    whole = np.frombuffer(data, np.uint8).reshape(50, 192)
    columns = cuts_of((50, 96), 2)[2]
    parts = columns.within(13, 40)
    running = running_parts(columns, parts, 13, 27)
    running.update(np.ascontiguousarray(whole[:, 26:80]).reshape(-1), 0, range(len(parts)))
    assert running.values == expected(columns, data)[parts.start : parts.stop]
    assert len(parts) == 13
