"""What every storage promises of reads past the page cache: the real one, and the fake over it with its alignment."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from loader_service.reading.reader import Storage
from tests.reading.disk import MIB, PAGE, disk_bytes, disk_folder, held, memory, uncache, warm
from tests.reading.making import make_file

SIZE = MIB + 1000


@dataclass
class Place:
    storage: Storage
    folder: Path
    path: str
    content: bytes


@pytest.fixture(params=["local", "fake", "fake, 512", "fake, 4096"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    local = LocalStorage()
    with disk_folder(tmp_path) as folder:
        storage: Storage = local
        if request.param != "local":
            storage = fake = FakeStorage(local)
            fake.align(int(request.param.partition(", ")[2] or 1))
        path, content = make_file(folder, SIZE)
        uncache(path)
        yield Place(storage, folder, path, content)


@pytest.mark.usefixtures("no_leaked_descriptors")
def test_whole_blocks_go_straight_into_memory_and_leave_the_page_cache_as_it_was(place: Place) -> None:
    buffer = memory(16 * PAGE, 0)
    file = place.storage.open(place.path, direct=True)
    before = disk_bytes()
    got = file.read_into([buffer.memoryview[: 4 * PAGE], buffer.memoryview[4 * PAGE :]], 8 * PAGE)
    file.close()
    assert got == 16 * PAGE
    assert buffer.memoryview == place.content[8 * PAGE : 24 * PAGE]
    assert disk_bytes() - before == 16 * PAGE
    assert held(place.path) == 0


def test_the_last_block_comes_as_far_as_the_file_goes(place: Place) -> None:
    buffer = memory(2 * PAGE, 0)
    file = place.storage.open(place.path, direct=True)
    assert file.read_into([buffer.memoryview], MIB) == 1000
    assert buffer.memoryview[:1000] == place.content[MIB:]
    assert file.read_into([buffer.memoryview], MIB + PAGE) == 0
    file.close()


@pytest.mark.parametrize(
    ("offset", "moved", "nbytes"),
    [
        pytest.param(1, 0, PAGE, id="an odd offset"),
        pytest.param(0, 1, PAGE, id="an odd address"),
        pytest.param(0, 0, PAGE + 1, id="an odd size"),
    ],
)
def test_what_is_not_aligned_is_refused_with_einval(place: Place, offset: int, moved: int, nbytes: int) -> None:
    buffer = memory(nbytes, 0, moved=moved)
    file = place.storage.open(place.path, direct=True)
    with pytest.raises(OSError) as caught:
        file.read_into([buffer.memoryview], offset)
    file.close()
    assert caught.value.errno == errno.EINVAL
    assert set(bytes(buffer.memoryview)) == {0xEE}


def test_a_folder_and_what_is_missing_are_refused_as_when_they_are_opened_otherwise(place: Place) -> None:
    for name, code in ((".", errno.EISDIR), ("missing", errno.ENOENT)):
        with pytest.raises(OSError) as caught:
            place.storage.open(str(place.folder / name), direct=True)
        assert caught.value.errno == code


def test_what_is_cached_is_told_and_forgotten_on_request(place: Place) -> None:
    file = place.storage.open(place.path)
    assert file.cached_bytes(0, SIZE) == 0
    assert file.read_into([memoryview(bytearray(SIZE))], 0) == SIZE
    assert file.cached_bytes(0, SIZE) == SIZE
    file.drop_cached(4 * PAGE, 8 * PAGE)
    assert file.cached_bytes(4 * PAGE, 8 * PAGE) == 0
    assert (file.cached_bytes(0, SIZE) or 0) > 0
    file.drop_cached(0, 0)  # to the end of the file, as the system understands it
    assert file.cached_bytes(0, SIZE) == 0
    file.close()


def test_what_is_cached_is_read_without_the_disk_and_nothing_else_is(place: Place) -> None:
    file = place.storage.open(place.path)
    into = memoryview(bytearray(b"\xee" * SIZE))
    assert file.read_cached(into, 0) == 0
    uncache(place.path)
    warm(place.path, 4 * PAGE, SIZE)
    before = disk_bytes()
    assert file.read_cached(into, 4 * PAGE + 3) == SIZE - 4 * PAGE - 3
    assert disk_bytes() == before
    assert into[: SIZE - 4 * PAGE - 3] == place.content[4 * PAGE + 3 :]
    assert set(into[SIZE - 4 * PAGE - 3 :]) == {0xEE}
    file.close()


def test_a_closed_file_forgets_nothing(place: Place) -> None:
    file = place.storage.open(place.path)
    file.close()
    with pytest.raises(OSError):
        file.drop_cached(0, PAGE)


def test_a_system_without_direct_reads_says_so_at_opening(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("loader_service.reading.local.os.O_DIRECT")
    with pytest.raises(OSError) as caught:
        place.storage.open(place.path, direct=True)
    assert caught.value.errno == errno.EOPNOTSUPP
    place.storage.open(place.path).close()


def test_a_system_that_cannot_be_asked_to_forget_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("loader_service.reading.local.os.posix_fadvise")
    file = place.storage.open(place.path)
    with pytest.raises(OSError):
        file.drop_cached(0, PAGE)
    file.close()


# The fake alone


def test_the_fakes_alignment_is_as_fine_as_it_was_told(tmp_path: Path) -> None:
    path, content = make_file(tmp_path, 3 * PAGE)
    fake = FakeStorage(AnyAlignment())
    buffer = memory(512, 0)
    for block, allowed in ((512, True), (4096, False)):
        fake.align(block)
        file = fake.open(path, direct=True)
        if allowed:
            assert file.read_into([buffer.memoryview], 1024) == 512
            assert buffer.memoryview == content[1024:1536]
        else:
            with pytest.raises(OSError):
                file.read_into([buffer.memoryview], 1024)
        file.close()


def test_a_direct_read_that_is_cut_short_fills_no_more_than_it_says(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        path, content = make_file(folder, 8 * PAGE)
        fake = FakeStorage(LocalStorage())
        fake.shorten(path, PAGE + 100)
        buffer = memory(4 * PAGE, 0)
        file = fake.open(path, direct=True)
        assert file.read_into([buffer.memoryview[:PAGE], buffer.memoryview[PAGE:]], 2 * PAGE) == PAGE + 100
        file.close()
        assert buffer.memoryview[: PAGE + 100] == content[2 * PAGE : 3 * PAGE + 100]
        assert set(bytes(buffer.memoryview[PAGE + 100 :])) == {0xEE}


def test_the_fake_records_what_went_past_the_cache_and_what_was_forgotten(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 3 * PAGE)
    fake = FakeStorage(AnyAlignment())
    direct, through = fake.open(path, direct=True), fake.open(path)
    direct.read_into([memory(PAGE, 0).memoryview], 0)
    through.read_into([memoryview(bytearray(5))], 7)
    through.drop_cached(7, 5)
    assert [(read.offset, read.nbytes, read.direct) for read in fake.reads] == [(0, PAGE, True), (7, 5, False)]
    assert fake.drops == [(path, 7, 5)]
    assert (fake.opens(path), fake.open_now) == (2, 2)
    direct.close()
    through.close()
    assert fake.open_now == 0


class AnyAlignment(LocalStorage):
    """Opens all files as others: stands for a file system that takes direct reads at any alignment, as tmpfs does."""

    def open(self, path: str, *, direct: bool = False):  # type: ignore[no-untyped-def]
        return super().open(path)
