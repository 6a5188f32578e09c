"""Transfers: views joined to few large reads, cut at the chunk, gaps read and thrown away."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader_service.transfers import MAX_VIEWS, DirectTransfer, RunBuilder, discarded

Piece = tuple[int, int, int]  # shard, gap before it, bytes


def build(pieces: list[tuple[int, int, int, int]], chunk_bytes: int) -> list[DirectTransfer]:
    """Transfers for (shard, start, gap, bytes) pieces."""
    builder = RunBuilder(chunk_bytes)
    found: list[DirectTransfer] = []
    for number, (shard, start, gap, nbytes) in enumerate(pieces):
        found.extend(builder.add(shard, start, gap, memoryview(bytearray(nbytes)), f"t{number}"))
    found.extend(builder.flush())
    return found


def ranges(transfers: list[DirectTransfer]) -> list[tuple[int, int, int]]:
    return [(t.shard, t.start, t.start + t.nbytes) for t in transfers]


@pytest.mark.parametrize(
    ("pieces", "chunk_bytes", "wanted"),
    [
        pytest.param([(0, 100, 0, 10), (0, 110, 0, 5)], 1000, [(0, 100, 115)], id="touching are one"),
        pytest.param([(0, 100, 0, 10), (0, 120, 10, 5)], 1000, [(0, 100, 125)], id="a gap is read along"),
        pytest.param([(0, 100, 0, 10), (0, 120, 0, 5)], 1000, [(0, 100, 110), (0, 120, 125)], id="apart"),
        pytest.param([(0, 100, 0, 10), (1, 110, 0, 5)], 1000, [(0, 100, 110), (1, 110, 115)], id="another file"),
        pytest.param([(0, 7, 7, 10)], 1000, [(0, 0, 17)], id="a gap at the start"),
        pytest.param([(0, 0, 0, 25)], 10, [(0, 0, 10), (0, 10, 20), (0, 20, 25)], id="larger than a chunk"),
        pytest.param([(0, 0, 0, 6), (0, 6, 0, 6)], 10, [(0, 0, 10), (0, 10, 12)], id="cut inside a piece"),
        pytest.param([(0, 25, 25, 1)], 10, [(0, 0, 10), (0, 10, 20), (0, 20, 26)], id="a gap larger than a chunk"),
    ],
)
def test_transfers(
    pieces: list[tuple[int, int, int, int]], chunk_bytes: int, wanted: list[tuple[int, int, int]]
) -> None:
    assert ranges(build(pieces, chunk_bytes)) == wanted


@given(
    pieces=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.booleans(), st.integers(1, 60)), max_size=40),
    chunk_bytes=st.integers(1, 100),
)
def test_every_byte_is_read_once_and_in_order(pieces: list[tuple[int, int, bool, int]], chunk_bytes: int) -> None:
    ends, placed, wanted = {0: 0, 1: 0}, [], []
    for shard, distance, is_gap, nbytes in sorted(pieces, key=lambda piece: piece[0]):
        start = ends[shard] + distance
        gap = distance if is_gap else 0
        placed.append((shard, start, gap, nbytes))
        wanted.append((shard, start - gap, start + nbytes))
        ends[shard] = start + nbytes
    transfers = build(placed, chunk_bytes)
    assert all(sum(len(view) for view in t.views) == t.nbytes <= chunk_bytes for t in transfers)
    found = {(shard, byte) for shard, start, stop in ranges(transfers) for byte in range(start, stop)}
    assert found == {(shard, byte) for shard, start, stop in wanted for byte in range(start, stop)}
    assert sum(t.nbytes for t in transfers) == len(found), "no byte is read twice"
    for (shard_a, _, stop_a), (shard_b, start_b, _) in pairwise(ranges(transfers)):
        assert (shard_a, stop_a) <= (shard_b, start_b)


def test_a_call_has_a_bounded_number_of_views() -> None:
    transfers = build([(0, i, 0, 1) for i in range(2 * MAX_VIEWS + 5)], 1 << 20)
    assert [len(t.views) for t in transfers] == [MAX_VIEWS, MAX_VIEWS, 5]


@pytest.mark.parametrize("nbytes", [0, 1, 256 << 10, (256 << 10) + 1, 1 << 20])
def test_discarded_views_have_the_bytes_asked_for(nbytes: int) -> None:
    assert sum(len(view) for view in discarded(nbytes)) == nbytes
