"""Images: how a file range is cut into reads, and whose bytes a read begins with."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader_service.planning.images import BLOCK_BYTES, Image, block_ceil, block_floor, chunks
from loader_service.reading.positioned import DIRECT_BLOCK_BYTES


def test_a_block_is_what_direct_reads_are_aligned_to() -> None:
    assert BLOCK_BYTES == DIRECT_BLOCK_BYTES


@given(start=st.integers(0, 50_000), nbytes=st.integers(1, 200_000), chunk_bytes=st.integers(64, 70_000))
def test_chunks_are_all_of_the_range_cut_between_blocks(start: int, nbytes: int, chunk_bytes: int) -> None:
    found = list(chunks(start, start + nbytes, chunk_bytes))
    assert (found[0][0], found[-1][1]) == (start, start + nbytes)
    assert all(a[1] == b[0] for a, b in pairwise(found))
    for first, last in found:
        assert first < last
        if chunk_bytes < BLOCK_BYTES:
            assert last - first <= chunk_bytes
        else:
            assert block_ceil(last) - block_floor(first) <= chunk_bytes, "with the rest of the blocks at both ends"
            assert first in (start, block_floor(first))


@pytest.mark.parametrize(
    ("start", "stop", "wanted"),
    [
        pytest.param(0, 3 * BLOCK_BYTES, [BLOCK_BYTES * n for n in (0, 2, 3)], id="no chunk larger than the others"),
        pytest.param(5, 2 * BLOCK_BYTES, [5, 2 * BLOCK_BYTES], id="one chunk"),
        pytest.param(5, 2 * BLOCK_BYTES + 5, [5, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 5], id="a block more than a chunk"),
        pytest.param(0, 5 * BLOCK_BYTES, [BLOCK_BYTES * n for n in (0, 2, 4, 5)], id="three chunks"),
    ],
)
def test_chunks_of_two_blocks(start: int, stop: int, wanted: list[int]) -> None:
    assert list(chunks(start, stop, 2 * BLOCK_BYTES + 100)) == list(pairwise(wanted))


def test_a_byte_in_a_gap_is_taken_for_the_next_tensors() -> None:
    image = Image(0, 100, 160, 0, 100, stops=[110, 130, 160], tensors=[7, 8, 8])
    assert [image.tensor_at(byte) for byte in (100, 109, 110, 129, 130, 159)] == [7, 7, 8, 8, 8, 8]
