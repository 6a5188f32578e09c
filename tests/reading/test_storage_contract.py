"""What every storage promises: run over the real one and over the fake that wraps it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from loader_service.reading.reader import DirectoryEntry, FileIdentity, Storage, describe_change
from tests.reading.making import make_file


@pytest.fixture(params=["local", "fake over local"])
def storage(request: pytest.FixtureRequest) -> Storage:
    local = LocalStorage()
    return local if request.param == "local" else FakeStorage(local)


def test_a_listing_is_sorted_and_tells_kinds_after_following_links(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "z.bin").write_bytes(b"")
    (tmp_path / "sub").mkdir()
    (tmp_path / "to_file").symlink_to("z.bin")
    (tmp_path / "to_folder").symlink_to("./sub")
    (tmp_path / "gone").symlink_to("../nowhere/x")
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "below_a_file").symlink_to("z.bin/x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / ".hidden").write_bytes(b"")

    assert storage.list_directory(str(tmp_path)) == [
        DirectoryEntry(".hidden", "file"),
        DirectoryEntry("below_a_file", "dangling", "z.bin/x"),
        DirectoryEntry("gone", "dangling", "../nowhere/x"),
        DirectoryEntry("pipe", "other"),
        DirectoryEntry("round", "dangling", "round"),
        DirectoryEntry("sub", "directory"),
        DirectoryEntry("to_file", "file", "z.bin"),
        DirectoryEntry("to_folder", "directory", "./sub"),
        DirectoryEntry("z.bin", "file"),
    ]


@pytest.mark.usefixtures("no_leaked_descriptors")
def test_an_identity_is_the_targets_and_the_same_for_the_open_file(storage: Storage, tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 1234)
    link = tmp_path / "link"
    link.symlink_to("a.safetensors")
    status = Path(path).stat()
    expected = FileIdentity(status.st_dev, status.st_ino, 1234, status.st_mtime_ns)

    file = storage.open(str(link))
    found = file.identity
    file.close()

    assert storage.identify(path) == storage.identify(str(link)) == found == expected


@pytest.mark.parametrize(
    ("offset", "sizes", "expected"),
    [
        pytest.param(0, [100], 100, id="whole file in one view"),
        pytest.param(17, [1, 2, 50], 53, id="several views from the middle"),
        pytest.param(90, [100], 10, id="short at the end of the file"),
        pytest.param(90, [4, 0, 4, 20], 10, id="short within views, one of them empty"),
        pytest.param(100, [5], 0, id="at the end"),
        pytest.param(10_000, [5], 0, id="behind the end"),
        pytest.param(5, [0], 0, id="nothing wanted"),
    ],
)
def test_one_positioned_read_fills_views_in_order(
    storage: Storage, tmp_path: Path, offset: int, sizes: list[int], expected: int
) -> None:
    path, content = make_file(tmp_path, 100)
    buffers = [bytearray(b"\xee" * size) for size in sizes]
    file = storage.open(path)

    got = file.read_into([memoryview(buffer) for buffer in buffers], offset)
    again = file.read_into([memoryview(bytearray(3))], 0)
    file.close()

    joined = b"".join(buffers)
    assert got == expected
    assert joined == content[offset : offset + got] + b"\xee" * (len(joined) - got)
    assert again == 3  # no file position was moved


def test_a_negative_offset_is_refused_and_nothing_is_read(storage: Storage, tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    buffer = bytearray(4)
    file = storage.open(path)
    with pytest.raises(OSError) as caught:
        file.read_into([memoryview(buffer)], -1)
    file.close()
    assert caught.value.errno == errno.EINVAL
    assert buffer == bytes(4)


def test_a_closed_file_reads_nothing_and_closes_again(storage: Storage, tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    file = storage.open(path)
    file.close()
    file.close()
    with pytest.raises(OSError) as caught:
        file.read_into([memoryview(bytearray(4))], 0)
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize("operation", ["open", "identify", "list_directory"])
def test_what_is_missing_is_enoent(storage: Storage, tmp_path: Path, operation: str) -> None:
    with pytest.raises(OSError) as caught:
        getattr(storage, operation)(str(tmp_path / "missing"))
    assert caught.value.errno == errno.ENOENT


@pytest.mark.usefixtures("no_leaked_descriptors")
def test_a_folder_and_a_named_pipe_are_refused_instead_of_waited_for(storage: Storage, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, code in (("pipe", errno.EINVAL), (".", errno.EISDIR)):
        with pytest.raises(OSError) as caught:
            storage.open(str(tmp_path / name))
        assert caught.value.errno == code


def test_an_open_file_is_not_inherited_by_programs(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 10)
    file = LocalStorage().open(path)
    assert not os.get_inheritable(file._descriptor)
    file.close()


BEFORE = FileIdentity(device=1, inode=2, size_bytes=3, mtime_ns=4)


@pytest.mark.parametrize(
    ("after", "text"),
    [
        pytest.param(BEFORE, "", id="nothing"),
        pytest.param(FileIdentity(1, 2, 9, 4), "size 3 -> 9 bytes", id="size"),
        pytest.param(FileIdentity(1, 2, 3, 9), "modification time 4 -> 9 ns", id="time"),
        pytest.param(FileIdentity(1, 9, 3, 4), "inode 2 -> 9", id="inode"),
        pytest.param(FileIdentity(9, 2, 3, 4), "device 1 -> 9", id="device"),
        pytest.param(FileIdentity(1, 8, 9, 4), "size 3 -> 9 bytes, inode 2 -> 8", id="two"),
    ],
)
def test_a_change_is_described_by_what_differs(after: FileIdentity, text: str) -> None:
    assert describe_change(BEFORE, after) == text
