"""Windows that follow each other in a file: one read past the page cache for all of them, or each for itself."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader_service.errors import ReadError
from loader_service.reading.blocks import neighbours
from loader_service.reading.fake import FakeStorage, ReadCall
from loader_service.reading.file_range import Access, FileRange, Window
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage
from loader_service.reading.ranges import RangeReader
from tests.reading.disk import PAGE, disk_folder, memory, uncache, warm
from tests.reading.making import make_file

SIZE = 40 * PAGE + 123
Parts = list[tuple[int, Window]]


class Disk:
    def __init__(self, folder: Path) -> None:
        self.path, self.content = make_file(folder, SIZE)
        uncache(self.path)
        self.storage = FakeStorage(LocalStorage())
        self.handles = HandleCache(self.storage)

    def read(self, parts: Parts, access: Access = "auto") -> list[ReadCall]:
        """The reads that it took. Checks every byte."""
        reader = RangeReader(self.handles, access=access, retries=0)
        before = len(self.storage.reads)
        where = FileRange(self.path, self.storage.identify(self.path), parts[0][0], "t")
        nbytes = sum(window.nbytes for _, window in parts)
        assert reader.read_parts(where, parts) == nbytes == reader.statistics.read_bytes
        for start, window in parts:
            assert window.view == self.content[start : start + window.nbytes]
        assert reader.paths_read == {self.path}
        return self.storage.reads[before:]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with disk_folder(tmp_path) as folder:
        found = Disk(folder)
        yield found
        found.handles.close()


def window(start: int, stop: int) -> Window:
    """Whole blocks around the bytes, as an image has them."""
    lead = start % PAGE
    blocks = -(-(lead + stop - start) // PAGE) * PAGE
    return Window(memory(blocks, 0).memoryview, lead, stop - start)


def cut(*bounds: int) -> Parts:
    return [(start, window(start, stop)) for start, stop in itertools.pairwise(bounds)]


CUTS = {
    "within blocks": (100, PAGE + 5, 3 * PAGE + 900, 6 * PAGE + 1),
    "between blocks": (0, PAGE, 4 * PAGE, 5 * PAGE),
    "several in one block": (10, 20, 30, PAGE + 1, PAGE + 2, 3 * PAGE),
    "up to the file's end": (30 * PAGE + 1, 35 * PAGE + 7, SIZE),
}


@pytest.mark.parametrize("bounds", CUTS.values(), ids=CUTS.keys())
def test_windows_in_neighbouring_blocks_take_one_read(disk: Disk, bounds: Sequence[int]) -> None:
    (read,) = disk.read(cut(*bounds))
    assert read.direct
    assert read.nbytes <= -(-bounds[-1] // PAGE) * PAGE - bounds[0] // PAGE * PAGE, "no block twice"


def test_a_small_gap_within_the_blocks_is_read_with_them_and_a_larger_one_is_not(disk: Disk) -> None:
    near = [(0, window(0, 100)), (PAGE - 10, window(PAGE - 10, 2 * PAGE))]
    assert len(disk.read(near)) == 1
    far = [(8 * PAGE, window(8 * PAGE, 9 * PAGE)), (10 * PAGE, window(10 * PAGE, 11 * PAGE))]
    assert len(disk.read(far)) == 2


def test_what_the_page_cache_holds_is_copied_part_by_part(disk: Disk) -> None:
    warm(disk.path, 2 * PAGE, 3 * PAGE)
    reads = disk.read(cut(0, 2 * PAGE, 3 * PAGE, 5 * PAGE))
    assert [read.direct for read in reads] == [True, False, True]


@pytest.mark.parametrize("access", ["direct", "buffered"])
def test_the_way_that_is_asked_for_is_taken(disk: Disk, access: Access) -> None:
    warm(disk.path, 0, PAGE)
    reads = disk.read(cut(5, PAGE + 5, 2 * PAGE + 5), access)
    assert [read.direct for read in reads] == ([True] if access == "direct" else [False, False])


def test_a_file_that_refuses_is_read_through_the_page_cache(disk: Disk) -> None:
    disk.storage.fail("*", errno.EINVAL, operation="open direct", times=None)
    assert not any(read.direct for read in disk.read(cut(*CUTS["within blocks"])))


def test_an_error_names_the_part_that_it_is_of(disk: Disk) -> None:
    parts = cut(*CUTS["within blocks"])
    disk.storage.fail("*", errno.EIO, operation="read direct", times=None, within=(4 * PAGE, 4 * PAGE + 1))
    reader = RangeReader(disk.handles, access="auto", retries=0)
    with pytest.raises(ReadError) as caught:
        reader.read_parts(FileRange(disk.path, None, parts[0][0], "t"), parts)
    assert str(parts[2][0]) in str(caught.value) or str(3 * PAGE) in str(caught.value)


def test_memory_that_does_not_begin_with_a_block_is_filled_part_by_part(disk: Disk) -> None:
    odd = memory(2 * PAGE, 0, moved=8)
    parts = [*cut(0, PAGE + 9), (PAGE + 9, Window(odd.memoryview, 9, PAGE - 9))]
    assert neighbours(parts) is None
    disk.read(parts)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bounds=st.lists(st.integers(0, SIZE), min_size=2, max_size=9, unique=True), warmed=st.booleans())
def test_any_windows_get_their_bytes(disk: Disk, bounds: list[int], warmed: bool) -> None:
    uncache(disk.path)
    if warmed:
        warm(disk.path, 7 * PAGE, 9 * PAGE)
    disk.read(cut(*sorted(bounds)))
