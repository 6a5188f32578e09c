from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from loader_service.reading.fake import FakeStorage, ReadCall
from loader_service.reading.faults import Operation
from loader_service.reading.local import LocalStorage
from loader_service.reading.reader import OpenFile
from tests.reading.making import PATIENCE_S, make_file


@pytest.fixture
def fake() -> FakeStorage:
    return FakeStorage(LocalStorage())


def read(file: OpenFile, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    got = file.read_into([memoryview(buffer)], offset)
    return bytes(buffer[:got])


def test_a_fault_acts_from_its_nth_matching_call_so_many_times(fake: FakeStorage, tmp_path: Path) -> None:
    path, content = make_file(tmp_path, 100)
    fake.fail("*.safetensors", errno.EIO, nth=1, times=2)
    file = fake.open(path)
    outcomes: list[object] = []
    for _ in range(5):
        try:
            outcomes.append(read(file, 0, 10) == content[:10])
        except OSError as error:
            outcomes.append(error.errno)
    assert outcomes == [True, errno.EIO, errno.EIO, True, True]


def test_a_fault_within_a_range_leaves_other_reads_alone_and_uncounted(fake: FakeStorage, tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    fake.fail(path, errno.EIO, within=(50, 60))
    file = fake.open(path)
    assert len(read(file, 0, 50)) == 50
    assert len(read(file, 60, 40)) == 40
    with pytest.raises(OSError):
        read(file, 59, 1)
    assert len(read(file, 59, 1)) == 1


def test_a_pattern_matches_the_name_or_the_whole_path_but_no_other_file(fake: FakeStorage, tmp_path: Path) -> None:
    one, _ = make_file(tmp_path, 10, "one")
    other, _ = make_file(tmp_path, 10, "other")
    for pattern in ("one", one, "*/one"):
        fake.fail(pattern, errno.EACCES, operation="open")
        with pytest.raises(PermissionError):
            fake.open(one)
        fake.open(other).close()


@pytest.mark.parametrize("operation", ["list", "identify", "open"])
def test_other_operations_than_reading_fail_as_scripted(
    fake: FakeStorage, tmp_path: Path, operation: Operation
) -> None:
    path, _ = make_file(tmp_path, 10)
    calls: dict[str, Callable[[], object]] = {
        "list": lambda: fake.list_directory(str(tmp_path)),
        "identify": lambda: fake.identify(path),
        "open": lambda: fake.open(path).close(),
    }
    fake.fail("*", errno.EIO, operation=operation)
    with pytest.raises(OSError) as caught:
        calls[operation]()
    assert caught.value.errno == errno.EIO
    calls[operation]()


def test_any_exception_can_be_scripted(fake: FakeStorage, tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 10)
    fake.fail(path, lambda: SystemExit(3))
    with pytest.raises(SystemExit):
        read(fake.open(path), 0, 1)


def test_reads_are_shortened_and_files_truncated(fake: FakeStorage, tmp_path: Path) -> None:
    path, content = make_file(tmp_path, 100)
    fake.truncate(path, 70)
    fake.shorten(path, 7, nth=1, times=1)
    file = fake.open(path)
    assert read(file, 0, 100) == content[:70]
    assert read(file, 10, 100) == content[10:17]
    assert read(file, 70, 5) == b""
    assert fake.identify(path).size_bytes == 100


def test_a_replaced_file_shows_another_identity_from_the_nth_look_on(fake: FakeStorage, tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    true = fake.identify(path)
    fake.replace(path, size_bytes=5, mtime_ns=6, inode=7, nth=1)
    assert fake.identify(path) == true
    changed = fake.open(path).identity
    assert (changed.size_bytes, changed.mtime_ns, changed.inode, changed.device) == (5, 6, 7, true.device)


def test_a_blocked_read_returns_only_when_it_is_released(fake: FakeStorage, tmp_path: Path) -> None:
    path, content = make_file(tmp_path, 100)
    gate = fake.block(path)
    file = fake.open(path)
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(read(file, 0, 100)), daemon=True)
    thread.start()
    assert gate.reached.wait(PATIENCE_S)
    assert fake.in_flight == 1
    assert fake.reads == []
    gate.release()
    thread.join(PATIENCE_S)
    assert got == [content]
    assert fake.in_flight == 0


def test_clearing_releases_whoever_waits_and_forgets_all_faults(fake: FakeStorage, tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    gate = fake.block(path, times=None)
    fake.fail("*", errno.EIO, nth=1, times=None)
    file = fake.open(path)
    thread = threading.Thread(target=lambda: read(file, 0, 100), daemon=True)
    thread.start()
    assert gate.reached.wait(PATIENCE_S)
    fake.clear()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert len(read(file, 0, 100)) == 100


def test_a_delay_is_slept_in_the_reading_thread(
    fake: FakeStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = make_file(tmp_path, 10)
    slept: list[float] = []
    monkeypatch.setattr("loader_service.reading.faults.time.sleep", slept.append)
    fake.delay(path, 0.25)
    file = fake.open(path)
    read(file, 0, 1)
    read(file, 0, 1)
    assert slept == [0.25, 0.25]


def test_everything_is_recorded(fake: FakeStorage, tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    other, _ = make_file(tmp_path, 10, "other")
    fake.list_directory(str(tmp_path))
    fake.identify(path)
    first, second = fake.open(path), fake.open(other)
    read(first, 0, 8)
    read(first, 8, 50)
    read(second, 5, 50)
    first.close()
    first.close()

    assert fake.reads == [ReadCall(path, 0, 8, 8), ReadCall(path, 8, 50, 50), ReadCall(other, 5, 5, 50)]
    assert fake.reads_of(path, from_byte=8) == [ReadCall(path, 8, 50, 50)]
    assert (fake.bytes_read(), fake.bytes_read(path), fake.bytes_read("oth*")) == (63, 58, 5)
    assert (fake.opens(), fake.opens(path), fake.closes(path), fake.closes(other)) == (2, 1, 1, 0)
    assert (fake.lists(), fake.identifies(path)) == (1, 1)
    assert (fake.open_now, fake.max_open, fake.max_in_flight) == (1, 2, 1)
