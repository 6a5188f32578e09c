"""Reads that fill memory completely or end in one typed error, whatever the storage does."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader_service.errors import CheckpointError, DestinationError, EndOfFileError, LoaderError, ReadError
from loader_service.reading import positioned
from loader_service.reading.fake import FakeStorage
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage
from loader_service.reading.positioned import read_fully, verify_identity
from tests.reading.making import fake_and_handles, make_file


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses between retries are recorded instead of slept."""
    slept: list[float] = []
    monkeypatch.setattr("loader_service.reading.positioned.time.sleep", slept.append)
    return slept


def views_of(buffer: bytearray, sizes: Sequence[int]) -> list[memoryview]:
    """Consecutive views over the buffer."""
    views, start = [], 0
    for size in sizes:
        views.append(memoryview(buffer)[start : start + size])
        start += size
    return views


@pytest.mark.parametrize("most", [1, 7, 299, 300, 4096], ids="short reads of {}".format)
def test_short_reads_are_continued_at_the_exact_byte(tmp_path: Path, most: int) -> None:
    path, content = make_file(tmp_path, 1000)
    fake, handles = fake_and_handles()
    fake.shorten(path, most)
    buffer = bytearray(300)
    read_fully(handles, path, fake.identify(path), 123, views_of(buffer, [1, 100, 0, 199]), retries=0)
    handles.close()
    assert buffer == content[123:423]
    assert len(fake.reads) == -(-300 // most)
    assert fake.open_now == 0


@given(data=st.data())
def test_any_views_at_any_offset_with_any_short_reads_get_the_files_bytes(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    path, content = make_file(folder, 500, "any.bin")
    sizes = data.draw(st.lists(st.integers(0, 40), max_size=12))
    offset = data.draw(st.integers(0, 500 - sum(sizes)))
    fake, handles = fake_and_handles()
    for _ in range(data.draw(st.integers(0, 4))):
        fake.shorten(path, data.draw(st.integers(1, 45)), nth=data.draw(st.integers(0, 5)), times=1)
    buffer = bytearray(sum(sizes))
    read_fully(handles, path, None, offset, views_of(buffer, sizes), retries=0)
    handles.close()
    assert buffer == content[offset : offset + len(buffer)]
    assert fake.bytes_read() == len(buffer)


def test_more_views_than_one_call_takes_are_read_in_several_calls(tmp_path: Path) -> None:
    path, content = make_file(tmp_path, 6000)
    fake, handles = fake_and_handles()
    buffer = bytearray(5000)
    read_fully(handles, path, None, 1000, views_of(buffer, [2] * 2500), retries=0)
    handles.close()
    assert buffer == content[1000:]
    assert [read.wanted_bytes for read in fake.reads] == [2048, 2048, 904]


def test_no_call_asks_for_more_bytes_than_the_kernel_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert positioned.MOST_BYTES_A_CALL <= 0x7FFFF000
    monkeypatch.setattr(positioned, "MOST_BYTES_A_CALL", 100)
    path, content = make_file(tmp_path, 1000)
    fake, handles = fake_and_handles()
    buffer = bytearray(450)
    read_fully(handles, path, None, 0, views_of(buffer, [30, 90, 330]), retries=0)
    handles.close()
    assert buffer == content[:450]
    assert [read.wanted_bytes for read in fake.reads] == [100, 100, 100, 100, 50]


def test_views_of_other_formats_and_dimensions_are_filled_as_bytes(tmp_path: Path) -> None:
    path, content = make_file(tmp_path, 64)
    _, handles = fake_and_handles()
    buffer = bytearray(48)
    view = memoryview(buffer).cast("B").cast("i", (3, 4))
    read_fully(handles, path, None, 8, [view], retries=0)
    handles.close()
    assert buffer == content[8:56]


def test_without_bytes_to_read_the_file_is_not_touched() -> None:
    fake, handles = fake_and_handles()
    read_fully(handles, "/nowhere", None, 5, [memoryview(bytearray()), memoryview(bytearray())], retries=0)
    read_fully(handles, "/nowhere", None, 5, [], retries=0)
    assert fake.opens() == 0


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(memoryview(bytes(8)), id="read-only"),
        pytest.param(memoryview(bytearray(8))[::2], id="with gaps"),
    ],
)
def test_memory_that_cannot_be_filled_is_refused_before_anything_is_opened(tmp_path: Path, view: memoryview) -> None:
    path, _ = make_file(tmp_path, 64)
    fake, handles = fake_and_handles()
    with pytest.raises(DestinationError):
        read_fully(handles, path, None, 0, [view], retries=0)
    assert fake.opens() == 0


@pytest.mark.parametrize("interruptions", [1, 5])
def test_an_interrupted_call_goes_on_without_costing_a_retry(tmp_path: Path, interruptions: int) -> None:
    path, content = make_file(tmp_path, 100)
    fake, handles = fake_and_handles()
    fake.fail(path, errno.EINTR, times=interruptions)
    buffer = bytearray(100)
    read_fully(handles, path, None, 0, [memoryview(buffer)], retries=0)
    handles.close()
    assert buffer == content


def test_an_input_output_error_is_tried_again_from_where_it_stood(tmp_path: Path, no_pauses: list[float]) -> None:
    path, content = make_file(tmp_path, 100)
    fake, handles = fake_and_handles()
    fake.shorten(path, 30)
    fake.fail(path, errno.EIO, nth=1, times=2)
    buffer = bytearray(100)
    read_fully(handles, path, None, 0, [memoryview(buffer)], retries=2)
    handles.close()
    assert buffer == content
    assert [read.offset for read in fake.reads] == [0, 30, 60, 90]
    assert no_pauses == [0.01, 0.02]


@pytest.mark.parametrize("retries", [0, 3])
def test_an_input_output_error_that_stays_ends_the_read(tmp_path: Path, retries: int) -> None:
    path, _ = make_file(tmp_path, 100)
    fake, handles = fake_and_handles()
    fake.shorten(path, 30)
    fake.fail(path, errno.EIO, nth=1, times=None)
    with pytest.raises(ReadError) as caught:
        read_fully(handles, path, None, 5, [memoryview(bytearray(90))], retries=retries, tensor="a.b")
    handles.close()
    error = caught.value
    assert (error.path, error.tensor, error.errno, type(error)) == (path, "a.b", errno.EIO, ReadError)
    assert "[5, 95) of tensor 'a.b', 30 of 90 bytes in" in str(error)
    assert "EIO" in str(error)
    assert isinstance(error.__cause__, OSError)
    assert fake._faults[1].seen == 2 + retries


def test_a_stale_handle_is_opened_anew_once_and_the_read_goes_on(tmp_path: Path) -> None:
    path, content = make_file(tmp_path, 100)
    fake, handles = fake_and_handles()
    fake.shorten(path, 40)
    fake.fail(path, errno.ESTALE, nth=1)
    buffer = bytearray(100)
    read_fully(handles, path, fake.identify(path), 0, [memoryview(buffer)], retries=0)
    assert buffer == content
    assert handles.opens == 2
    assert handles.open_now == 1
    handles.close()


def test_a_file_server_that_is_stale_at_opening_gets_its_second_opening(tmp_path: Path) -> None:
    path, content = make_file(tmp_path, 100)
    fake, handles = fake_and_handles()
    fake.fail(path, errno.ESTALE, operation="open")
    buffer = bytearray(100)
    read_fully(handles, path, None, 0, [memoryview(buffer)], retries=0)
    handles.close()
    assert buffer == content


def test_a_handle_that_is_stale_again_is_a_read_error(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    fake, handles = fake_and_handles()
    fake.fail(path, errno.ESTALE, times=None)
    with pytest.raises(ReadError) as caught:
        read_fully(handles, path, None, 0, [memoryview(bytearray(9))], retries=5)
    handles.close()
    assert caught.value.errno == errno.ESTALE
    assert handles.opens == 2
    assert fake.open_now == 0


def test_a_stale_file_that_comes_back_as_another_has_changed_under_the_reader(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    fake, handles = fake_and_handles()
    expected = fake.identify(path)
    fake.fail(path, errno.ESTALE)
    fake.replace(path, inode=1, operations=("open",), nth=1)
    with pytest.raises(CheckpointError, match=r"changed under the reader: inode \d+ -> 1"):
        read_fully(handles, path, expected, 0, [memoryview(bytearray(9))], retries=5)
    assert fake.open_now == 0


@pytest.mark.parametrize(
    ("code", "operation", "kind"),
    [
        (errno.ENOENT, "open", CheckpointError),
        (errno.EACCES, "open", ReadError),
        (errno.EACCES, "read", ReadError),
        (errno.ENXIO, "read", ReadError),
        (errno.EMFILE, "open", ReadError),
    ],
)
def test_other_errors_are_final_at_once_and_typed(
    tmp_path: Path, code: int, operation: str, kind: type[LoaderError]
) -> None:
    path, _ = make_file(tmp_path, 100)
    fake, handles = fake_and_handles()
    fake.fail(path, code, operation=operation)  # type: ignore[arg-type]
    with pytest.raises(kind) as caught:
        read_fully(handles, path, None, 3, [memoryview(bytearray(9))], retries=5, tensor="t")
    handles.close()
    assert (type(caught.value), caught.value.errno, caught.value.path) == (kind, code, path)
    assert errno.errorcode[code] in str(caught.value)
    assert "[3, 12)" in str(caught.value)
    assert fake._faults[0].seen == 1


@pytest.mark.parametrize(
    ("code", "planned", "advice"),
    [
        (errno.ENOENT, True, "was there when the load was planned: put it back or point checkpoint.path elsewhere"),
        (errno.ENOENT, False, "[)] while reading .*; check the path$"),
        (errno.EMFILE, False, "ulimit -n"),
        (errno.EFAULT, False, "the destination's memory cannot be written to"),
    ],
)
def test_an_error_says_what_to_do(tmp_path: Path, code: int, planned: bool, advice: str) -> None:
    path, _ = make_file(tmp_path, 100)
    fake, handles = fake_and_handles()
    fake.fail(path, code)
    expected = fake.identify(path) if planned else None
    with pytest.raises(LoaderError, match=advice) as caught:
        read_fully(handles, path, expected, 3, [memoryview(bytearray(9))], retries=0)
    handles.close()
    assert isinstance(caught.value, DestinationError) == (code == errno.EFAULT)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("pipe", r"not a regular file \(EINVAL\) while reading .*; give the path of a regular file"),
        ("folder", r"Is a directory \(EISDIR\) while reading .*; give the path of a file"),
    ],
)
def test_what_is_no_file_is_called_so(tmp_path: Path, kind: str, words: str) -> None:
    path = tmp_path / kind
    (os.mkfifo if kind == "pipe" else os.mkdir)(path)
    _, handles = fake_and_handles()
    with pytest.raises(ReadError, match=words):
        read_fully(handles, str(path), None, 0, [memoryview(bytearray(9))], retries=0)
    handles.close()


def test_a_file_that_ends_early_but_is_the_planned_one_is_an_end_of_file_error(tmp_path: Path) -> None:
    path, content = make_file(tmp_path, 100)
    fake, handles = fake_and_handles()
    buffer = bytearray(50)
    with pytest.raises(EndOfFileError) as caught:
        read_fully(handles, path, fake.identify(path), 70, [memoryview(buffer)], retries=5, tensor="x")
    handles.close()
    assert isinstance(caught.value, EOFError)
    assert "ends at byte 100" in str(caught.value)
    assert "[70, 120) of tensor 'x', 30 of 50 bytes in" in str(caught.value)
    assert buffer[:30] == content[70:]


def test_a_real_file_that_is_truncated_while_it_is_read_has_changed_under_the_reader(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    fake, handles = fake_and_handles()
    expected = fake.identify(path)
    fake.shorten(path, 40, times=1)

    def truncate() -> BaseException:
        os.truncate(path, 60)
        return OSError(errno.EINTR, "interrupted")

    fake.fail(path, truncate, nth=1)
    with pytest.raises(CheckpointError, match="changed under the reader: size 100 -> 60 bytes") as caught:
        read_fully(handles, path, expected, 0, [memoryview(bytearray(100))], retries=0)
    handles.close()
    assert caught.value.exit_code == 3
    assert fake.open_now == 0


def test_a_file_that_is_gone_when_its_end_comes_early_has_changed_under_the_reader(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    fake, handles = fake_and_handles()
    expected = fake.identify(path)
    with handles.borrow(path, expected):
        Path(path).unlink()
        with pytest.raises(CheckpointError, match="the file is gone") as caught:
            read_fully(handles, path, expected, 90, [memoryview(bytearray(20))], retries=0)
    handles.close()
    assert caught.value.errno == errno.ENOENT


def test_a_file_of_another_identity_is_not_read(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    fake, handles = fake_and_handles()
    buffer = bytearray(10)
    with pytest.raises(CheckpointError, match="size 99 -> 100 bytes"):
        read_fully(handles, path, replace(fake.identify(path), size_bytes=99), 0, [memoryview(buffer)], retries=0)
    assert fake.reads == []
    assert fake.open_now == 0


def test_memory_errors_of_a_storage_pass_through_unchanged_and_leave_nothing_open(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    fake = FakeStorage(LocalStorage())
    handles = HandleCache(fake, 1)
    fake.fail(path, MemoryError)
    with pytest.raises(MemoryError):
        read_fully(handles, path, None, 0, [memoryview(bytearray(10))], retries=5)
    handles.close()
    assert fake.open_now == 0


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EINTR])
def test_a_look_at_a_file_is_tried_again_as_a_read_is(tmp_path: Path, code: int, no_pauses: list[float]) -> None:
    path, _ = make_file(tmp_path, 10)
    fake, handles = fake_and_handles()
    expected = fake.identify(path)
    fake.fail(path, code, operation="identify")
    verify_identity(handles, path, expected, retries=1)
    assert len(no_pauses) == 1


@pytest.mark.parametrize(("code", "tried"), [(errno.EIO, 3), (errno.EACCES, 1)])
def test_a_look_at_a_file_that_goes_on_failing_is_an_error(tmp_path: Path, code: int, tried: int) -> None:
    path, _ = make_file(tmp_path, 10)
    fake, handles = fake_and_handles()
    expected = fake.identify(path)
    fake.fail(path, code, operation="identify", times=None)
    with pytest.raises(ReadError) as caught:
        verify_identity(handles, path, expected, retries=2)
    assert (caught.value.errno, caught.value.path) == (code, path)
    assert fake.identifies(path) == 1 + tried
