"""Transfers: images filled in few reads, whole blocks of their own, and never a byte of another's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader_service.checkpoint.catalog import Shard
from loader_service.memory.allocators import HostBuffer, allocate_host
from loader_service.planning.images import BLOCK_BYTES, Image, block_ceil, block_floor
from loader_service.reading.fake import FakeStorage
from loader_service.reading.file_range import Access
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage
from loader_service.reading.ranges import RangeReader
from loader_service.transfers import DirectTransfer, Transfer, image_transfers, memory_transfers
from tests.reading.disk import disk_folder, uncache
from tests.reading.making import make_file

SIZE = 300_000
GUARD = 0xEE


class Disk:
    """A file on a disk, none of it cached."""

    def __init__(self, folder: Path) -> None:
        path, self.content = make_file(folder, SIZE)
        uncache(path)
        self.storage = FakeStorage(LocalStorage())
        self.storage.align(BLOCK_BYTES)
        self.shard = Shard("a.safetensors", path, self.storage.identify(path), 0, "")
        self.handles = HandleCache(self.storage, 8)

    def reader(self, access: Access = "auto") -> RangeReader:
        return RangeReader(self.handles, access=access, retries=0)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    with disk_folder(tmp_path_factory.mktemp("transfers")) as folder:
        disk = Disk(folder)
        yield disk
        disk.handles.close()


def images_in_one_memory(data: st.DataObject) -> tuple[list[Image], int]:
    """Images as planned: congruent with the file, in any order of it, none in another's blocks; and their memory."""
    used, images = 0, []
    for number in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, SIZE - 1))
        stop = data.draw(st.integers(start + 1, min(SIZE, start + 30_000)))
        offset = block_ceil(used) + start % BLOCK_BYTES
        images.append(Image(0, start, stop, 0, offset, [stop], [number]))
        used = offset + stop - start
    return images, used + data.draw(st.integers(0, BLOCK_BYTES))


def read(transfer: Transfer, reader: RangeReader, shard: Shard) -> None:
    assert isinstance(transfer, DirectTransfer)
    assert transfer.run(reader, shard) == transfer.nbytes


@given(data=st.data(), chunk_bytes=st.integers(64, 40_000))
def test_images_are_filled_and_only_their_blocks_written(disk: Disk, data: st.DataObject, chunk_bytes: int) -> None:
    images, nbytes = images_in_one_memory(data)
    buffer = allocate_host(nbytes + BLOCK_BYTES)
    whole = buffer.memoryview
    whole[:] = bytes([GUARD]) * len(whole)
    reader = disk.reader(data.draw(st.sampled_from(["auto", "direct", "buffered"])))
    transfers = [transfer for image in images for transfer in image_transfers(image, whole[:nbytes], chunk_bytes, str)]
    assert_apart(buffer, transfers, images)
    for transfer in data.draw(st.permutations(transfers)):
        read(transfer, reader, disk.shard)
    untouched = [True] * len(whole)
    for image in images:
        end = image.offset + image.stop - image.start
        assert whole[image.offset : end] == disk.content[image.start : image.stop]
        first, last = block_floor(image.offset), min(block_ceil(end), nbytes)
        untouched[first:last] = [False] * (last - first)
    assert all(byte == GUARD for byte, free in zip(whole, untouched, strict=True) if free)
    assert sum(transfer.nbytes for transfer in transfers) == sum(image.stop - image.start for image in images)


def assert_apart(buffer: HostBuffer, transfers: Sequence[Transfer], images: list[Image]) -> None:
    """No two transfers may write to the same byte, and each only within the blocks of its image."""
    spans = []
    for transfer in transfers:
        assert isinstance(transfer, DirectTransfer)
        memory = transfer.window.memory
        start = np.frombuffer(memory, np.uint8).ctypes.data - buffer.address
        spans.append((start, start + len(memory)))
        image = next(each for each in images if str(each.tensors[0]) == transfer.tensor)
        assert block_floor(image.offset) <= start
        assert start + len(memory) <= block_ceil(image.offset + image.stop - image.start)
    assert all(a[1] <= b[0] for a, b in pairwise(sorted(spans)))


def test_an_image_in_its_own_blocks_is_one_read_of_them(disk: Disk) -> None:
    before = len(disk.storage.reads)
    buffer = allocate_host(5 * BLOCK_BYTES)
    image = Image(0, 100, 4 * BLOCK_BYTES + 7, 0, 100, [4 * BLOCK_BYTES + 7], [3])
    (transfer,) = image_transfers(image, buffer.memoryview, 1 << 20, str)
    reader = disk.reader("direct")
    read(transfer, reader, disk.shard)
    assert [(read.offset, read.nbytes) for read in disk.storage.reads[before:]] == [(0, 5 * BLOCK_BYTES)]
    assert reader.statistics.bounced_bytes == 0
    assert transfer.tensor == "3"


def test_chunks_of_an_image_meet_between_blocks_and_name_the_tensor_that_they_begin_with(disk: Disk) -> None:
    before = len(disk.storage.reads)
    stops = [5000, 5010, 30_000]
    image = Image(0, 4096 + 50, 30_000, 0, 50, stops, [7, 8, 9])
    buffer = allocate_host(block_ceil(30_000))
    transfers = list(image_transfers(image, buffer.memoryview, 2 * BLOCK_BYTES, str))
    assert [transfer.tensor for transfer in transfers] == ["7", "9", "9", "9"]
    reader = disk.reader("direct")
    for transfer in transfers:
        read(transfer, reader, disk.shard)
    reads = [(read.offset, read.nbytes) for read in disk.storage.reads[before:]]
    assert reads == [(4096 * n, 8192) for n in (1, 3, 5)] + [(4096 * 7, 4096)]


@given(
    start=st.integers(0, SIZE - 1),
    nbytes=st.integers(1, 30_000),
    chunk_bytes=st.integers(64, 40_000),
    moved=st.sampled_from([0, 64]),
)
def test_memory_of_someone_else_is_filled_to_the_byte(
    disk: Disk, start: int, nbytes: int, chunk_bytes: int, moved: int
) -> None:
    nbytes = min(nbytes, SIZE - start)
    buffer = allocate_host(nbytes + 2 * BLOCK_BYTES, congruent_to=start + moved)
    whole = buffer.memoryview
    whole[:] = bytes([GUARD]) * len(whole)
    wanted = slice(BLOCK_BYTES, BLOCK_BYTES + nbytes)
    for transfer in memory_transfers(0, start, whole[wanted], chunk_bytes, "t"):
        read(transfer, disk.reader(), disk.shard)
    assert whole[wanted] == disk.content[start : start + nbytes]
    assert set(whole[: wanted.start]) | set(whole[wanted.stop :]) == {GUARD}
