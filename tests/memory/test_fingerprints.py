"""Which changes of memory a fingerprint sees: all of small memory, of large memory those in its sample."""

from __future__ import annotations

import pytest

from loader_service.memory.fingerprints import SAMPLE_BYTES, SAMPLES, WHOLE_BYTES, fingerprint


def sampled(size: int) -> set[int]:
    """The places of the documentation, written again."""
    starts = [i * (size - 512) // 63 for i in range(64)]
    return {byte for start in starts for byte in range(start, start + 512)}


@pytest.mark.parametrize("size", [0, 1, 7, 4096, WHOLE_BYTES])
def test_every_byte_of_small_memory_counts(size: int) -> None:
    memory = bytearray(size)
    before = fingerprint(memoryview(memory))
    for byte in {0, size // 2, size - 1} if size else set():
        memory[byte] ^= 1
        assert fingerprint(memoryview(memory)) != before
        memory[byte] ^= 1
    assert fingerprint(memoryview(memory)) == before


@pytest.mark.parametrize("size", [WHOLE_BYTES + 1, 100_003, 1 << 20])
def test_of_large_memory_64_pieces_of_512_bytes_count_both_ends_among_them(size: int) -> None:
    memory = bytearray(size)
    before = fingerprint(memoryview(memory))
    places = sampled(size)
    assert {0, size - 1} <= places
    assert len(places) == SAMPLES * SAMPLE_BYTES
    edges = {byte for byte in places if byte - 1 not in places or byte + 1 not in places}
    beside = ({byte - 1 for byte in edges} | {byte + 1 for byte in edges}) - places - {-1, size}
    for byte in edges | beside:
        memory[byte] ^= 1
        assert (fingerprint(memoryview(memory)) != before) == (byte in places), byte
        memory[byte] ^= 1


def test_a_stretch_longer_than_a_63rd_is_always_seen() -> None:
    size = 200_000
    places = sampled(size)
    length = size // 63 + 1
    assert all(places & set(range(start, start + length)) for start in range(0, size - length, 101))
