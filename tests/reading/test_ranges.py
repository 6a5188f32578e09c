"""Ranges of files into memory: past the page cache where it can be, through it where it must be, the same bytes."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader_service.errors import CheckpointError, DestinationError, EndOfFileError, ReadError
from loader_service.memory.allocators import HostBuffer
from loader_service.reading.fake import FakeStorage
from loader_service.reading.faults import Operation
from loader_service.reading.file_range import Access, Drop, FileRange, RangeStatistics, Window, describe
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalFile, LocalStorage
from loader_service.reading.ranges import RangeReader
from tests.reading.disk import MIB, PAGE, disk_bytes, disk_folder, held, memory, uncache, warm
from tests.reading.making import PATIENCE_S, make_file

SIZE = 4 * MIB + 1234


@dataclass
class Disk:
    """A file on a real disk, nothing of it cached, and a fake over the real storage."""

    path: str
    content: bytes
    fake: FakeStorage
    handles: HandleCache

    def reader(self, access: Access = "auto", *, retries: int = 0, drop: Drop = "nothing") -> RangeReader:
        return RangeReader(self.handles, access=access, retries=retries, drop=drop)

    def read(self, reader: RangeReader, start: int, nbytes: int, *, moved: int = 0) -> HostBuffer:
        """Reads into memory congruent with the file, or `moved` from that; checks the bytes."""
        buffer = memory(nbytes, start, moved=moved)
        reader.read(FileRange(self.path, self.fake.identify(self.path), start, "t"), buffer.memoryview)
        assert buffer.memoryview == self.content[start : start + nbytes]
        return buffer

    def direct_reads(self) -> list[tuple[int, int]]:
        return [(read.offset, read.nbytes) for read in self.fake.reads if read.direct]

    def other_reads(self) -> list[tuple[int, int]]:
        return [(read.offset, read.nbytes) for read in self.fake.reads if not read.direct]


@pytest.fixture(scope="module")
def file_on_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, bytes]]:
    with disk_folder(tmp_path_factory.mktemp("ranges")) as folder:
        yield make_file(folder, SIZE)


@pytest.fixture
def disk(file_on_disk: tuple[str, bytes]) -> Iterator[Disk]:
    path, content = file_on_disk
    uncache(path)
    fake = FakeStorage(LocalStorage())
    handles = HandleCache(fake, 8)
    yield Disk(path, content, fake, handles)
    handles.close()
    assert fake.open_now == 0


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged for users, of files that are read otherwise than asked."""
    caplog.set_level(logging.INFO, "loader_service.reading.ranges")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]


# -- straight into memory


@pytest.mark.parametrize(
    ("start", "nbytes", "body", "bounced"),
    [
        pytest.param(0, 8 * PAGE, (0, 8 * PAGE), 0, id="whole blocks"),
        pytest.param(100, 8 * PAGE - 100, (PAGE, 7 * PAGE), PAGE - 100, id="a head"),
        pytest.param(PAGE, 2 * PAGE + 7, (PAGE, 2 * PAGE), 7, id="a tail"),
        pytest.param(5, 3 * PAGE, (PAGE, 2 * PAGE), PAGE, id="head and tail"),
        pytest.param(PAGE - 1, 2, None, 2, id="two blocks, none of them whole"),
        pytest.param(PAGE + 10, 20, None, 20, id="inside one block"),
        pytest.param(PAGE, 1, None, 1, id="the first byte of a block"),
        pytest.param(2 * PAGE - 1, 1, None, 1, id="the last byte of a block"),
        pytest.param(SIZE - 1234, 1234, None, 1234, id="the file's last block"),
        pytest.param(SIZE - 1234 - 2 * PAGE, 2 * PAGE + 1234, (4 * MIB - 2 * PAGE, 2 * PAGE), 1234, id="up to the end"),
        pytest.param(SIZE - 1, 1, None, 1, id="the last byte of the file"),
        pytest.param(0, SIZE, (0, 4 * MIB), 1234, id="the whole file"),
    ],
)
def test_the_body_is_read_in_place_and_the_edges_copied_over(
    disk: Disk, start: int, nbytes: int, body: tuple[int, int] | None, bounced: int
) -> None:
    reader = disk.reader()
    before = disk_bytes()
    disk.read(reader, start, nbytes)
    statistics = reader.statistics
    assert statistics == RangeStatistics(direct_bytes=nbytes, bounced_bytes=bounced)
    assert disk.direct_reads()[:1] == ([body] if body else disk.direct_reads()[:1])
    assert disk.other_reads() == []
    blocks = -(-(start + nbytes) // PAGE) - start // PAGE
    assert disk_bytes() - before <= blocks * PAGE
    assert held(disk.path) == 0, "nothing went through the page cache"


@pytest.mark.parametrize("block", [512, 4096])
def test_all_that_is_asked_of_a_disk_is_aligned_to_its_blocks(disk: Disk, block: int) -> None:
    disk.fake.align(block)
    reader = disk.reader()
    for start, nbytes in ((0, PAGE), (3, 5 * PAGE), (PAGE + 512, 700), (4 * MIB - 5, 1239)):
        disk.read(reader, start, nbytes)
    assert reader.statistics.refused == {}
    assert disk.other_reads() == []


@pytest.mark.parametrize("moved", [1, 511, 512, 2048, 4095])
def test_memory_that_is_not_congruent_is_filled_by_way_of_memory_that_is(disk: Disk, moved: int) -> None:
    disk.fake.align(PAGE)
    reader = disk.reader()
    disk.read(reader, 100, 5 * PAGE, moved=moved)
    assert disk.direct_reads() == [(0, 6 * PAGE)]
    assert disk.other_reads() == []
    assert reader.statistics == RangeStatistics(direct_bytes=5 * PAGE, bounced_bytes=5 * PAGE)
    assert reader.outcome.effective == "direct"
    assert f"({5 * PAGE} bytes copied over)" in reader.outcome.reason


def test_memory_that_is_not_congruent_costs_the_disk_nothing_twice(disk: Disk) -> None:
    """A large range is copied over in steps, of which each goes its way."""
    warm(disk.path, 3 * MIB, 4 * MIB)
    reader = disk.reader()
    before = disk_bytes()
    disk.read(reader, 100, SIZE - 200, moved=64)
    assert disk_bytes() - before == 3 * MIB + PAGE
    assert disk.direct_reads() == [(0, 2 * MIB), (2 * MIB, MIB), (4 * MIB, 1234)]
    assert disk.other_reads() == [(3 * MIB, MIB)]


@pytest.mark.parametrize("nth", [0, 1])
def test_a_file_that_refuses_is_read_through_the_cache_into_any_memory(disk: Disk, nth: int) -> None:
    disk.fake.fail(disk.path, errno.EINVAL, operation="read direct", nth=nth, times=None)
    reader = disk.reader()
    disk.read(reader, 100, 4 * MIB, moved=1)
    assert disk.fake._faults[0].seen == nth + 1
    direct_bytes = nth * (2 * MIB - 100)
    assert reader.statistics == RangeStatistics(
        direct_bytes=direct_bytes,
        bounced_bytes=direct_bytes,
        buffered_bytes=4 * MIB - direct_bytes,
        refused={disk.path: "EINVAL"},
    )


def test_memory_does_not_matter_where_reads_go_through_the_cache_anyway(disk: Disk) -> None:
    reader = disk.reader("buffered")
    disk.read(reader, 100, PAGE, moved=1)
    disk.read(reader, 100, PAGE)
    assert reader.statistics == RangeStatistics(buffered_bytes=2 * PAGE)
    assert disk.fake.opens() == 1


def test_short_direct_reads_go_on_at_the_next_block(disk: Disk) -> None:
    disk.fake.shorten(disk.path, 2 * PAGE + 100)
    reader = disk.reader()
    disk.read(reader, PAGE, 7 * PAGE)
    assert [offset for offset, _ in disk.direct_reads()] == [PAGE, 3 * PAGE, 5 * PAGE, 7 * PAGE]
    assert reader.statistics == RangeStatistics(direct_bytes=7 * PAGE)


def test_direct_reads_that_end_within_a_block_are_done_through_the_cache_from_then_on(
    disk: Disk, told: Callable[[], list[str]]
) -> None:
    disk.fake.shorten(disk.path, 100)
    reader = disk.reader()
    disk.read(reader, PAGE, 3 * PAGE)
    disk.read(reader, 9 * PAGE, PAGE)
    assert reader.statistics.buffered_bytes == 4 * PAGE
    assert len(disk.direct_reads()) == 1
    assert told() == [f"{disk.path} is read through the page cache: reads past the page cache end within a block"]


@pytest.mark.parametrize("most", [1, 500, 4095])
def test_an_edge_that_comes_in_parts_is_read_through_the_cache(disk: Disk, most: int) -> None:
    disk.fake.shorten(disk.path, most)
    reader = disk.reader()
    disk.read(reader, 2 * PAGE - 600, 600)
    statistics = reader.statistics
    assert (statistics.direct_bytes, statistics.bounced_bytes, statistics.buffered_bytes) == (0, 0, 600)


class _ReadOnly:
    """Two pages that nobody may write to, and an array over them that does not know it."""

    def __init__(self) -> None:
        self.pages = mmap.mmap(-1, 2 * PAGE, prot=mmap.PROT_READ)
        address = np.frombuffer(self.pages, np.uint8).ctypes.data
        self.__array_interface__ = {"data": (address, False), "shape": (2 * PAGE,), "typestr": "|u1", "version": 3}


@pytest.mark.parametrize(
    ("start", "nbytes"),
    [
        pytest.param(100, 50, id="an edge alone"),
        pytest.param(0, 2 * PAGE, id="whole blocks"),
        pytest.param(0, PAGE + 5, id="a block and an edge"),
        pytest.param(1, 50, id="memory that is not congruent"),
    ],
)
def test_memory_that_cannot_be_written_to_is_an_error_and_no_crash(disk: Disk, start: int, nbytes: int) -> None:
    whole = np.asarray(_ReadOnly())
    view = whole[start - start % 2 : start - start % 2 + nbytes].data
    assert not view.readonly
    with pytest.raises(DestinationError, match="the destination's memory cannot be written to") as caught:
        disk.reader().read(FileRange(disk.path, None, start, "t"), view)
    assert (caught.value.path, caught.value.tensor, caught.value.errno) == (disk.path, "t", errno.EFAULT)


def test_nothing_wanted_touches_nothing(disk: Disk) -> None:
    reader = disk.reader(drop="everything")
    reader.read(FileRange("/nowhere", None, 5), memoryview(bytearray()))
    assert disk.fake.opens() == 0
    assert reader.outcome.reason == "nothing was read"
    assert reader.outcome.effective == "auto"


# -- with room around the wanted bytes

ROOMY = (3 * PAGE, 3 * PAGE)


@pytest.mark.parametrize(
    ("start", "stop", "memory_of", "lead"),
    [
        pytest.param(0, 50, (0, 100), 10, id="all of it"),
        pytest.param(0, 20, (0, 30), 10, id="its beginning"),
        pytest.param(20, 50, (30, 100), 0, id="its end"),
        pytest.param(20, 30, (30, 40), 0, id="its middle"),
    ],
)
def test_a_part_of_a_window_has_room_at_the_windows_own_ends_only(
    start: int, stop: int, memory_of: tuple[int, int], lead: int
) -> None:
    memory = memoryview(bytes(range(100)))
    part = Window(memory, 10, 50).part(start, stop)
    assert part == Window(memory[slice(*memory_of)], lead, stop - start)
    assert part.view == memory[10 + start : 10 + stop]


@contextmanager
def guarded(nbytes: int, start: int, before: int, behind: int) -> Iterator[tuple[Window, HostBuffer]]:
    """A window with room before and behind it, in memory of which nothing outside the window may change."""
    guard = 2 * PAGE
    whole = memory(guard + before + nbytes + behind + guard, start - guard - before + MIB * PAGE)
    inside = slice(guard, guard + before + nbytes + behind)
    yield Window(whole.memoryview[inside], before, nbytes), whole
    outside = [*whole.memoryview[: inside.start], *whole.memoryview[inside.stop :]]
    assert set(outside) == {0xEE}, "written outside the window"


@pytest.mark.parametrize(
    ("start", "nbytes", "room", "reads", "bounced"),
    [
        pytest.param(5, 3 * PAGE, ROOMY, [(0, 4 * PAGE)], 0, id="both ends"),
        pytest.param(5, 3 * PAGE, (5, PAGE - 5), [(0, 4 * PAGE)], 0, id="just enough"),
        pytest.param(
            5, 3 * PAGE, (4, PAGE - 6), [(PAGE, 2 * PAGE), (0, PAGE), (3 * PAGE, PAGE)], PAGE, id="one too few"
        ),
        pytest.param(5, 3 * PAGE, (5, 0), [(0, 3 * PAGE), (3 * PAGE, PAGE)], 5, id="room before it alone"),
        pytest.param(5, 3 * PAGE, (0, PAGE), [(PAGE, 3 * PAGE), (0, PAGE)], PAGE - 5, id="room behind it alone"),
        pytest.param(5, 100, ROOMY, [(0, PAGE)], 0, id="inside one block"),
        pytest.param(5, 100, (5, 0), [(0, PAGE)], 100, id="inside one block, with room before it alone"),
        pytest.param(5, 100, (0, PAGE), [(0, PAGE)], 100, id="inside one block, with room behind it alone"),
        pytest.param(PAGE - 1, 2, ROOMY, [(0, 2 * PAGE)], 0, id="two blocks, none of them whole"),
        pytest.param(PAGE, 2 * PAGE, ROOMY, [(PAGE, 2 * PAGE)], 0, id="whole blocks need no room"),
        pytest.param(SIZE - 5, 5, ROOMY, [(SIZE - 1234, 1234)], 0, id="the file's last block"),
        pytest.param(PAGE + 1, SIZE - PAGE - 1, ROOMY, [(PAGE, SIZE - PAGE)], 0, id="up to the end"),
    ],
)
def test_ends_are_read_in_place_where_there_is_room_for_their_blocks(
    disk: Disk, start: int, nbytes: int, room: tuple[int, int], reads: list[tuple[int, int]], bounced: int
) -> None:
    disk.fake.align(PAGE)
    reader = disk.reader()
    with guarded(nbytes, start, *room) as (window, _):
        reader.read_within(FileRange(disk.path, None, start), window)
        assert window.view == disk.content[start : start + nbytes]
    assert disk.direct_reads() == reads
    assert disk.other_reads() == []
    assert reader.statistics == RangeStatistics(direct_bytes=nbytes, bounced_bytes=bounced)


def test_room_is_used_at_the_ends_of_a_range_only_not_where_its_pieces_meet(disk: Disk) -> None:
    warm(disk.path, MIB, 2 * MIB)
    reader = disk.reader()
    with guarded(3 * MIB - 200, 100, *ROOMY) as (window, _):
        reader.read_within(FileRange(disk.path, None, 100), window)
        assert window.view == disk.content[100 : 3 * MIB - 100]
    assert disk.direct_reads() == [(0, MIB), (2 * MIB, MIB)]
    assert disk.other_reads() == [(MIB, MIB)]


@pytest.mark.parametrize(
    ("most", "offsets"),
    [
        pytest.param(PAGE, [n * PAGE for n in range(7)], id="a block"),
        pytest.param(PAGE + 1, [n * PAGE for n in range(7)], id="a byte more"),
        pytest.param(2 * PAGE + 100, [0, 2 * PAGE, 4 * PAGE], id="the last one with all that is wanted"),
    ],
)
def test_short_reads_with_room_go_on_at_the_next_block(disk: Disk, most: int, offsets: list[int]) -> None:
    disk.fake.shorten(disk.path, most)
    reader = disk.reader()
    with guarded(6 * PAGE, 5, *ROOMY) as (window, _):
        reader.read_within(FileRange(disk.path, None, 5), window)
        assert window.view == disk.content[5 : 6 * PAGE + 5]
    assert reader.statistics == RangeStatistics(direct_bytes=6 * PAGE)
    assert [offset for offset, _ in disk.direct_reads()] == offsets


def test_a_read_that_ends_behind_the_wanted_bytes_is_enough(disk: Disk) -> None:
    disk.fake.shorten(disk.path, PAGE + 200)
    reader = disk.reader()
    with guarded(PAGE, 150, *ROOMY) as (window, _):
        reader.read_within(FileRange(disk.path, None, 150), window)
        assert window.view == disk.content[150 : PAGE + 150]
    assert len(disk.direct_reads()) == 1
    assert reader.statistics == RangeStatistics(direct_bytes=PAGE)


@pytest.mark.parametrize(("start", "nbytes"), [(SIZE - 10, 11), (SIZE - PAGE, PAGE + 1), (SIZE, 5)])
def test_a_file_that_ends_before_the_wanted_bytes_do_is_found_out_with_room_too(
    disk: Disk, start: int, nbytes: int
) -> None:
    with guarded(nbytes, start, *ROOMY) as (window, _), pytest.raises(EndOfFileError) as caught:
        disk.reader().read_within(FileRange(disk.path, None, start, "a.b"), window)
    wanted = f"the file ends at byte {SIZE} while reading bytes [{start}, {start + nbytes}) of tensor 'a.b'"
    assert wanted in str(caught.value)


def test_an_error_with_room_names_the_wanted_bytes(disk: Disk) -> None:
    disk.fake.fail(disk.path, errno.EIO, operation="read direct", times=None)
    with guarded(PAGE, 150, *ROOMY) as (window, _), pytest.raises(ReadError) as caught:
        disk.reader().read_within(FileRange(disk.path, None, 150), window)
    assert f"reading bytes [150, {PAGE + 150}), 0 of {PAGE} bytes in" in str(caught.value)


@pytest.mark.parametrize("operation", ["open direct", "read direct"])
def test_a_file_that_refuses_fills_the_window_through_the_cache(disk: Disk, operation: Operation) -> None:
    disk.fake.fail(disk.path, errno.EINVAL, operation=operation, times=None)
    reader = disk.reader()
    with guarded(2 * PAGE, 5, *ROOMY) as (window, whole):
        reader.read_within(FileRange(disk.path, None, 5), window)
        assert window.view == disk.content[5 : 2 * PAGE + 5]
        assert set(whole.memoryview[: 5 * PAGE]) == {0xEE}, "through the cache nothing more is read"
    assert reader.statistics.fallbacks == (f"{disk.path}: read through the page cache: EINVAL",)


def test_files_that_refuse_for_one_reason_are_told_of_together() -> None:
    done = RangeStatistics(refused={"/a": "EINVAL", "/b": "EOPNOTSUPP", "/c": "EINVAL", "/d": "EINVAL"})
    assert done.fallbacks == (
        "/a and 2 more files: read through the page cache: EINVAL",
        "/b: read through the page cache: EOPNOTSUPP",
    )


# -- refusals


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize(
    ("operation", "nth"),
    [
        pytest.param("open direct", 0, id="at opening"),
        pytest.param("read direct", 0, id="at the first read"),
        pytest.param("read direct", 2, id="at a later one"),
    ],
)
@pytest.mark.parametrize("access", ["auto", "direct"])
def test_a_file_that_refuses_is_read_through_the_cache_and_not_asked_again(
    disk: Disk, told: Callable[[], list[str]], access: Access, operation: Operation, nth: int, code: int
) -> None:
    disk.fake.fail(disk.path, code, operation=operation, nth=nth, times=None)
    reader = disk.reader(access, retries=3)
    for start in range(0, 8 * MIB // 2, MIB):
        disk.read(reader, start, MIB)
    assert disk.fake._faults[0].seen == nth + 1, "asked once too often"
    name = errno.errorcode[code]
    assert reader.statistics.refused == {disk.path: name}
    assert reader.statistics.direct_bytes == nth * MIB
    assert reader.statistics.buffered_bytes == (4 - nth) * MIB
    assert told() == [f"{disk.path} is read through the page cache: {name}"]
    assert f"{disk.path}: {name}" in reader.outcome.reason
    assert reader.outcome.effective == ("mixed" if nth else "buffered")


@pytest.mark.parametrize("operation", ["open direct", "read direct"])
def test_a_file_that_refuses_is_told_of_also_if_only_edges_are_read(
    disk: Disk, told: Callable[[], list[str]], operation: Operation
) -> None:
    disk.fake.fail(disk.path, errno.EINVAL, operation=operation, times=None)
    reader = disk.reader()
    for start in (10, PAGE + 10, 2 * PAGE - 5):
        disk.read(reader, start, 20)
    assert disk.fake._faults[0].seen == 1
    assert reader.statistics == RangeStatistics(buffered_bytes=60, refused={disk.path: "EINVAL"})
    assert len(told()) == 1


def test_a_refusal_in_the_middle_of_a_range_holds_for_the_rest_of_it(disk: Disk) -> None:
    def half(offset: int, nbytes: int) -> int:  # every other MiB is cached
        return nbytes if nbytes <= MIB and (offset // MIB) % 2 == 0 else nbytes // 2

    disk.fake.cache(disk.path, half)
    disk.fake.fail(disk.path, errno.EINVAL, operation="read direct", times=None)
    reader = disk.reader()
    disk.read(reader, 0, 4 * MIB)
    assert disk.fake._faults[0].seen == 1
    statistics = reader.statistics
    assert (statistics.cached_bytes, statistics.buffered_bytes) == (2 * MIB, 2 * MIB)


def test_one_file_that_refuses_says_nothing_of_others(disk: Disk, told: Callable[[], list[str]]) -> None:
    other, content = make_file(Path(disk.path).parent, 3 * PAGE, "other")
    uncache(other)
    disk.fake.fail(other, errno.EINVAL, operation="open direct", times=None)
    reader = disk.reader()
    buffer = memory(3 * PAGE, 0)
    reader.read(FileRange(other, None, 0), buffer.memoryview)
    disk.read(reader, 0, PAGE)
    assert buffer.memoryview == content
    assert reader.statistics == RangeStatistics(direct_bytes=PAGE, buffered_bytes=3 * PAGE, refused={other: "EINVAL"})
    assert told() == [f"{other} is read through the page cache: EINVAL"]


def test_threads_that_are_refused_at_once_tell_it_once(disk: Disk, told: Callable[[], list[str]]) -> None:
    disk.fake.fail(disk.path, errno.EINVAL, operation="read direct", times=None)
    gate = disk.fake.block(disk.path, operation="open direct")
    reader = disk.reader("direct")
    threads = [threading.Thread(target=disk.read, args=(reader, n * MIB, MIB), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    assert gate.reached.wait(PATIENCE_S)
    gate.release()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert reader.statistics == RangeStatistics(buffered_bytes=4 * MIB, refused={disk.path: "EINVAL"})
    assert len(told()) == 1


# -- what the page cache holds


def test_what_is_cached_is_copied_and_costs_the_disk_nothing(disk: Disk) -> None:
    warm(disk.path, 0, SIZE)
    reader = disk.reader()
    before = disk_bytes()
    disk.read(reader, 100, 3 * MIB)
    assert disk_bytes() == before
    assert reader.statistics == RangeStatistics(cached_bytes=3 * MIB)
    assert "3.00 MiB copied from the page cache" in reader.outcome.reason
    assert disk.direct_reads() == []


def test_what_is_cached_whole_is_not_counted_before(disk: Disk) -> None:
    looks = []

    def held_whole(offset: int, nbytes: int) -> int:
        looks.append((offset, nbytes))
        return nbytes

    disk.fake.cache(disk.path, held_whole)
    reader = disk.reader(drop="what it brought in")
    disk.read(reader, 100, 3 * MIB)
    assert looks == [(100, 1), (3 * MIB + 99, 1), (100, 3 * MIB)], "both ends; the last is the copying itself"
    assert disk.other_reads() == [(100, 3 * MIB)]
    assert reader.statistics == RangeStatistics(cached_bytes=3 * MIB)
    assert disk.fake.drops == []


@pytest.mark.parametrize("gap_at", [MIB, MIB + PAGE, 3 * MIB - PAGE])
def test_a_gap_between_cached_ends_is_read_from_there_on_as_it_is_cached(disk: Disk, gap_at: int) -> None:
    def held_to_the_gap(offset: int, nbytes: int) -> int:
        return 1 if nbytes == 1 else min(nbytes, max(0, gap_at - offset))

    disk.fake.cache(disk.path, held_to_the_gap)
    reader = disk.reader()
    disk.read(reader, 0, 4 * MIB)
    assert reader.statistics == RangeStatistics(cached_bytes=gap_at, direct_bytes=4 * MIB - gap_at)
    assert disk.direct_reads() == [(gap_at, 4 * MIB - gap_at)]


def test_a_real_gap_between_cached_ends_is_filled(disk: Disk) -> None:
    warm(disk.path, 0, MIB)
    warm(disk.path, 3 * MIB, 4 * MIB)
    reader = disk.reader()
    disk.read(reader, 0, 4 * MIB)
    done = reader.statistics
    assert done.cached_bytes >= 2 * MIB
    assert done.cached_bytes + done.direct_bytes == 4 * MIB


def test_copying_that_fails_is_left_to_the_read_which_says_what_is_wrong(disk: Disk) -> None:
    disk.fake.cache(disk.path, lambda offset, nbytes: nbytes)
    disk.fake.fail(disk.path, errno.EIO)
    reader = disk.reader()
    disk.read(reader, 0, MIB)
    assert reader.statistics == RangeStatistics(cached_bytes=MIB)
    disk.fake.fail(disk.path, errno.EIO, times=None)
    with pytest.raises(ReadError) as caught:
        disk.read(reader, 0, MIB)
    assert caught.value.errno == errno.EIO


def test_of_a_range_that_is_cached_in_part_each_mib_goes_its_way_and_nothing_is_read_twice(disk: Disk) -> None:
    warm(disk.path, MIB, 2 * MIB)
    warm(disk.path, 3 * MIB, 4 * MIB)
    reader = disk.reader()
    before = disk_bytes()
    disk.read(reader, 0, 4 * MIB)
    assert disk_bytes() - before == 2 * MIB
    assert reader.statistics == RangeStatistics(direct_bytes=2 * MIB, cached_bytes=2 * MIB)
    assert disk.direct_reads() == [(0, MIB), (2 * MIB, MIB)]
    assert held(disk.path) == 2 * MIB


def test_neighbours_that_go_one_way_are_read_as_one(disk: Disk) -> None:
    warm(disk.path, 3 * MIB, 4 * MIB)
    reader = disk.reader()
    disk.read(reader, 512, 4 * MIB)
    assert disk.direct_reads()[0] == (PAGE, 3 * MIB - PAGE)
    assert disk.other_reads() == [(3 * MIB, MIB)]


def test_access_direct_does_not_ask_what_is_cached(disk: Disk) -> None:
    warm(disk.path, 0, SIZE)
    disk.fake.cache(disk.path, lambda offset, nbytes: pytest.fail("asked"))
    reader = disk.reader("direct")
    disk.read(reader, 0, MIB)
    assert reader.statistics == RangeStatistics(direct_bytes=MIB)


@pytest.mark.parametrize("moved", [0, 1])
def test_access_buffered_never_opens_a_file_otherwise(disk: Disk, moved: int) -> None:
    reader = disk.reader("buffered")
    disk.read(reader, 0, MIB, moved=moved)
    assert disk.direct_reads() == []
    assert disk.fake.opens() == 1
    assert reader.outcome.effective == "buffered"


def test_where_nobody_knows_what_is_cached_files_are_read_through_the_cache(
    disk: Disk, told: Callable[[], list[str]]
) -> None:
    disk.fake.cache(disk.path, lambda offset, nbytes: None)
    reader = disk.reader()
    for start in (0, MIB, 2 * MIB):
        disk.read(reader, start, MIB)
    assert disk.direct_reads() == []
    assert len(disk.other_reads()) == 3
    why = "the file system does not tell what is cached"
    assert reader.statistics == RangeStatistics(buffered_bytes=3 * MIB, refused={disk.path: why})
    assert told() == [f"{disk.path} is read through the page cache: {why}"]


def test_written_bytes_that_never_reached_the_disk_are_read(disk: Disk) -> None:
    disk.path, disk.content = make_file(Path(disk.path).parent, 8 * PAGE, "dirty")
    for access in ("auto", "direct", "buffered"):
        disk.read(disk.reader(access), 0, 8 * PAGE)


# -- what is forgotten behind a read


def dropped(disk: Disk) -> list[tuple[int, int]]:
    return [(offset, nbytes) for _, offset, nbytes in disk.fake.drops]


def test_nothing_is_forgotten_unless_told(disk: Disk) -> None:
    for access in ("auto", "direct", "buffered"):
        disk.read(disk.reader(access), 0, MIB, moved=0)
        disk.read(disk.reader(access), 0, MIB, moved=1)
    assert disk.fake.drops == []
    assert held(disk.path) >= MIB


def test_what_it_brought_in_is_forgotten_and_what_was_there_stays(disk: Disk) -> None:
    warm(disk.path, 0, MIB)
    reader = disk.reader(drop="what it brought in")
    disk.read(reader, 0, 2 * MIB)
    assert dropped(disk) == []
    assert held(disk.path) == MIB
    disk.fake.cache(disk.path, lambda offset, nbytes: None)
    disk.read(reader, 2 * MIB, MIB)
    assert dropped(disk) == [(2 * MIB, MIB)]
    assert held(disk.path, 2 * MIB, MIB) == 0
    assert held(disk.path, 0, MIB) == MIB


def test_an_edge_that_went_through_the_cache_is_forgotten_too(disk: Disk) -> None:
    disk.fake.fail(disk.path, errno.EIO, operation="read direct", nth=1)
    reader = disk.reader(drop="what it brought in")
    disk.read(reader, PAGE, 2 * PAGE + 100)
    assert dropped(disk) == [(3 * PAGE, 100)]
    assert reader.statistics.buffered_bytes == 100


def test_everything_is_forgotten_whoever_brought_it_in(disk: Disk) -> None:
    warm(disk.path, 0, SIZE)
    reader = disk.reader(drop="everything")
    disk.read(reader, 0, MIB)
    assert dropped(disk) == [(0, MIB)]
    disk.read(disk.reader("direct", drop="everything"), MIB, MIB)
    assert held(disk.path, 0, 2 * MIB) == 0
    assert held(disk.path) > MIB


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF])
def test_a_system_that_will_not_forget_fails_nothing(disk: Disk, caplog: pytest.LogCaptureFixture, code: int) -> None:
    caplog.set_level(logging.DEBUG, "loader_service.reading.ranges")
    disk.fake.fail(disk.path, code, operation="drop", times=None)
    reader = disk.reader("buffered", drop="everything")
    disk.read(reader, 10, PAGE)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert f"the page cache keeps {PAGE} bytes from 10 on" in record.getMessage()


def test_a_file_that_was_replaced_before_it_could_be_forgotten_fails_nothing_here(disk: Disk) -> None:
    disk.fake.replace(disk.path, inode=1, operations=("open",), nth=1)
    one = HandleCache(disk.fake, 1)  # the direct handle takes the place of the other one

    reader = RangeReader(one, access="direct", retries=0, drop="everything")
    with one.borrow(disk.path, None):
        pass
    disk.read(reader, 0, PAGE)
    one.close()


# -- failures


@pytest.mark.parametrize("access", ["auto", "direct", "buffered"])
@pytest.mark.parametrize(
    ("start", "nbytes"),
    [
        pytest.param(4 * MIB - 3 * PAGE, 3 * PAGE + 5000, id="over the end"),
        pytest.param(4 * MIB - PAGE, PAGE + 1235, id="one byte too many"),
        pytest.param(4 * MIB + 1000, 300, id="inside the last block"),
        pytest.param(SIZE, 10, id="from the end on"),
        pytest.param(4 * MIB + 2 * PAGE, 2 * PAGE, id="behind the end"),
    ],
)
def test_an_early_end_names_path_tensor_wanted_range_and_where_the_file_ends(
    disk: Disk, told: Callable[[], list[str]], access: Access, start: int, nbytes: int
) -> None:
    reader = disk.reader(access, retries=2)
    buffer = memory(nbytes, start)
    for expected in (None, disk.fake.identify(disk.path)):
        with pytest.raises(EndOfFileError) as caught:
            reader.read(FileRange(disk.path, expected, start, "a.b"), buffer.memoryview)
        error = caught.value
        assert isinstance(error, EOFError)
        assert (error.path, error.tensor) == (disk.path, "a.b")
        stop = start + nbytes
        assert str(error).startswith(f"{disk.path}: the file ends at byte {SIZE} while reading bytes [")
        assert f"{stop}) of tensor 'a.b'" in str(error)
    assert told() == [], "an early end is no refusal"


@pytest.mark.parametrize("ends_at", [0, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE])
def test_a_file_cut_while_it_is_read_past_the_cache_ends_where_it_ends(disk: Disk, ends_at: int) -> None:
    disk.fake.truncate(disk.path, ends_at)
    buffer = memory(4 * PAGE, 0)
    with pytest.raises(EndOfFileError, match=rf"ends at byte {ends_at} while reading bytes \[0, {4 * PAGE}\)"):
        disk.reader().read(FileRange(disk.path, None, 0), buffer.memoryview)


@pytest.mark.parametrize("operation", ["read", "read direct"])
def test_input_output_errors_are_tried_again_either_way(
    disk: Disk, operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loader_service.reading.positioned.time.sleep", lambda seconds: None)
    disk.fake.fail(disk.path, errno.EIO, operation=operation, times=2)
    access: Access = "buffered" if operation == "read" else "direct"
    disk.read(disk.reader(access, retries=2), 0, MIB)
    disk.fake.fail(disk.path, errno.EIO, operation=operation, times=None)
    with pytest.raises(ReadError) as caught:
        disk.read(disk.reader(access, retries=2), 0, MIB)
    assert caught.value.errno == errno.EIO
    assert disk.fake._faults[1].seen == 3


def test_a_stale_direct_handle_is_opened_anew_once(disk: Disk) -> None:
    disk.fake.fail(disk.path, errno.ESTALE, operation="read direct")
    reader = disk.reader("direct")
    disk.read(reader, 0, MIB)
    assert disk.fake.opens() == 2
    disk.fake.fail(disk.path, errno.ESTALE, operation="read direct", times=None)
    with pytest.raises(ReadError) as caught:
        disk.read(reader, 0, MIB)
    assert caught.value.errno == errno.ESTALE


@pytest.mark.parametrize("access", ["auto", "direct", "buffered"])
def test_a_file_that_is_another_one_is_not_read(disk: Disk, access: Access) -> None:
    expected = disk.fake.identify(disk.path)
    disk.fake.replace(disk.path, inode=1)
    buffer = memory(MIB, 0)
    with pytest.raises(CheckpointError, match="changed under the reader"):
        disk.reader(access).read(FileRange(disk.path, expected, 0), buffer.memoryview)
    assert set(bytes(buffer.memoryview[:PAGE])) == {0xEE}
    assert disk.fake.reads == []


def test_a_file_that_is_missing_is_a_typed_error(disk: Disk) -> None:
    for access in ("auto", "direct", "buffered"):
        with pytest.raises(CheckpointError) as caught:
            disk.reader(access).read(FileRange(f"{disk.path}.x", None, 0, "t"), memory(PAGE, 0).memoryview)
        assert (caught.value.errno, caught.value.tensor) == (errno.ENOENT, "t")


# -- in words


@pytest.mark.parametrize(
    ("requested", "done", "effective", "reason"),
    [
        ("direct", RangeStatistics(), "direct", "nothing was read"),
        (
            "auto",
            RangeStatistics(direct_bytes=10, bounced_bytes=3),
            "direct",
            "10 bytes past the page cache (3 bytes copied over)",
        ),
        ("auto", RangeStatistics(cached_bytes=4), "buffered", "4 bytes copied from the page cache"),
        ("direct", RangeStatistics(buffered_bytes=4, refused={"/a": "EINVAL"}), "buffered", "/a: EINVAL"),
        ("auto", RangeStatistics(buffered_bytes=4, refused={"/a": "x", "/b": "y"}), "buffered", "/a and 1 more files"),
        (
            "auto",
            RangeStatistics(direct_bytes=1, cached_bytes=2, buffered_bytes=3),
            "mixed",
            "3 bytes read through the",
        ),
    ],
)
def test_an_outcome_says_what_was_done_and_why(
    requested: Access, done: RangeStatistics, effective: str, reason: str
) -> None:
    outcome = describe(requested, done)
    assert (outcome.requested, outcome.effective) == (requested, effective)
    assert reason in outcome.reason


# -- anything


@given(data=st.data())
def test_any_range_by_any_way_is_the_files_bytes(data: st.DataObject, file_on_disk: tuple[str, bytes]) -> None:
    path, content = file_on_disk
    fake = FakeStorage(LocalStorage())
    fake.align(data.draw(st.sampled_from([512, 4096])))
    access = data.draw(st.sampled_from(get_args(Access)))
    drop = data.draw(st.sampled_from(get_args(Drop)))
    if data.draw(st.booleans()):
        share = data.draw(st.integers(0, 4))
        fake.cache("*", lambda offset, nbytes: nbytes * share // 4)
    if data.draw(st.booleans()):
        fake.shorten("*", data.draw(st.integers(500, 20_000)))
    if data.draw(st.booleans()):
        operation: Operation = "open direct" if data.draw(st.booleans()) else "read direct"
        fake.fail("*", errno.EINVAL, operation=operation, nth=data.draw(st.integers(0, 3)), times=None)
    handles = HandleCache(fake, 4)
    reader = RangeReader(handles, access=access, retries=0, drop=drop)
    total = 0
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, 100_000) | st.integers(len(content) - 50_000, len(content)))
        nbytes = data.draw(st.integers(0, min(len(content) - start, 50_000)))
        moved = data.draw(st.sampled_from([0, 0, 1, 512]))
        room = data.draw(st.tuples(*[st.sampled_from([0, 0, 1, 500, PAGE, 9000])] * 2))
        with guarded(nbytes, start + moved, *room) as (window, _):
            reader.read_within(FileRange(path, None, start), window)
            assert window.view == content[start : start + nbytes]
        total += nbytes
    handles.close()
    done = reader.statistics
    assert done.direct_bytes + done.cached_bytes + done.buffered_bytes == total
    assert done.bounced_bytes <= done.direct_bytes
    assert os.path.getsize(path) == len(content)


def test_no_more_threads_copy_from_the_page_cache_than_there_are_cores(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 6})
    warm(disk.path, 0, 64 * PAGE)
    at_once = 0
    most: list[int] = []
    lock, both = threading.Lock(), threading.Barrier(2, timeout=PATIENCE_S)
    copy = LocalFile.read_cached

    def counted(file: LocalFile, view: memoryview, offset: int) -> int:
        nonlocal at_once
        with lock:
            at_once += 1
            most.append(at_once)
        both.wait()  # two at a time, as there are an even number
        copied = copy(file, view, offset)
        with lock:
            at_once -= 1
        return copied

    monkeypatch.setattr(LocalFile, "read_cached", counted)
    reader = disk.reader()
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda number: disk.read(reader, number * PAGE, PAGE), range(12)))
    assert max(most) == 2
    assert reader.statistics.cached_bytes == 12 * PAGE
