from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loader_service.errors import CheckpointError, ConfigError, LoaderError, ReadError, StateError
from loader_service.reading.fake import FakeStorage
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage
from loader_service.reading.reader import OpenFile
from tests.reading.making import PATIENCE_S, fake_and_handles, make_file


def use(handles: HandleCache, path: str) -> OpenFile:
    with handles.borrow(path, None) as file:
        return file


def in_threads(count: int, work: Callable[[int], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_path_is_opened_once_and_its_handle_shared(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 10)
    fake, handles = fake_and_handles()
    with handles.borrow(path, None) as first, handles.borrow(path, fake.identify(path)) as second:
        assert first is second
    assert use(handles, path) is first
    assert (handles.opens, fake.opens(path), fake.open_now) == (1, 1, 1)
    handles.close()
    assert fake.open_now == 0


def test_threads_that_come_at_once_open_a_path_once(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 10)
    fake, handles = fake_and_handles()
    gate = fake.block(path, operation="open")
    files: list[OpenFile] = []
    threads = in_threads(4, lambda _: files.append(use(handles, path)))
    assert gate.reached.wait(PATIENCE_S)
    gate.release()
    join(threads)
    assert len(set(map(id, files))) == 1
    assert fake.opens(path) == 1
    handles.close()


def test_whoever_waits_for_an_opening_that_fails_tries_it_itself(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 10)
    fake, handles = fake_and_handles()
    gate = fake.block(path, operation="open")
    fake.fail(path, errno.EIO, operation="open")
    outcomes: list[object] = []

    def work(_: int) -> None:
        try:
            outcomes.append(use(handles, path))
        except OSError as error:
            outcomes.append(error.errno)

    threads = in_threads(3, work)
    assert gate.reached.wait(PATIENCE_S)
    gate.release()
    join(threads)
    assert sorted(outcome == errno.EIO for outcome in outcomes) == [False, False, True]
    assert fake.open_now == 1
    handles.close()


def test_the_least_recently_used_idle_file_makes_room(tmp_path: Path) -> None:
    paths = [make_file(tmp_path, 10, name)[0] for name in "abc"]
    a, b, c = paths
    fake, handles = fake_and_handles(limit=2)
    for path in (a, b, a, c):
        use(handles, path)
    assert (fake.closes(a), fake.closes(b)) == (0, 1)
    assert fake.max_open == 2
    handles.close()


def test_a_file_in_use_is_never_closed_however_many_others_pass_by(tmp_path: Path) -> None:
    kept, content = make_file(tmp_path, 10, "kept")
    others = [make_file(tmp_path, 10, f"other{number}")[0] for number in range(6)]
    fake, handles = fake_and_handles(limit=2)
    with handles.borrow(kept, None) as file:
        for path in others:
            use(handles, path)
        buffer = bytearray(10)
        assert file.read_into([memoryview(buffer)], 0) == 10
    assert buffer == content
    assert fake.closes(kept) == 0
    assert fake.max_open == 2
    handles.close()


def test_a_borrower_beyond_the_limit_does_not_wait_and_its_file_is_closed_on_return(tmp_path: Path) -> None:
    a, b = (make_file(tmp_path, 10, name)[0] for name in "ab")
    fake, handles = fake_and_handles(limit=1)
    with handles.borrow(a, None):
        with handles.borrow(b, None):
            assert fake.open_now == 2
        assert fake.open_now == 1
        assert fake.closes(b) == 1
    assert handles.open_now == fake.open_now == 1
    handles.close()


@pytest.mark.usefixtures("no_leaked_descriptors")
def test_as_many_threads_as_the_limit_never_have_more_files_open(tmp_path: Path) -> None:
    paths = [make_file(tmp_path, 10, f"{number}")[0] for number in range(20)]
    fake, handles = fake_and_handles(limit=3)

    def work(number: int) -> None:
        for turn in range(60):
            use(handles, paths[(number * 7 + turn * (number + 1)) % 20])

    join(in_threads(3, work))
    assert fake.max_open <= 3
    assert handles.open_now == fake.open_now
    handles.close()
    assert fake.open_now == 0


def test_more_threads_than_files_that_may_be_open_are_refused_beforehand() -> None:
    handles = HandleCache(LocalStorage(), 3)
    handles.check_threads(3)
    with pytest.raises(ConfigError, match=r"4 reading threads .* only 3"):
        handles.check_threads(4)
    with pytest.raises(ConfigError):
        HandleCache(LocalStorage(), 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"size_bytes": 11}, "size 10 -> 11 bytes"),
        ({"mtime_ns": 5}, r"modification time \d+ -> 5 ns"),
        ({"inode": 7}, r"inode \d+ -> 7"),
    ],
    ids=["size", "time", "inode"],
)
@pytest.mark.usefixtures("no_leaked_descriptors")
def test_a_file_that_changed_is_refused_at_reopening_and_not_kept_open(
    tmp_path: Path, change: dict[str, int], says: str
) -> None:
    path, _ = make_file(tmp_path, 10)
    other, _ = make_file(tmp_path, 10, "other")
    fake, handles = fake_and_handles(limit=1)
    expected = fake.identify(path)
    fake.replace(path, **change, operations=("open",), nth=1)
    use(handles, path)
    use(handles, other)
    with pytest.raises(CheckpointError, match=f"a.safetensors: changed under the reader: {says}") as caught:
        handles.borrow(path, expected).__enter__()
    assert caught.value.path == path
    assert fake.open_now == 0
    handles.close()


@pytest.mark.usefixtures("no_leaked_descriptors")
def test_a_cached_handle_of_an_older_file_is_replaced_when_the_new_file_is_wanted(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 10)
    fake, handles = fake_and_handles()
    with handles.borrow(path, None) as old:
        new_path, content = make_file(tmp_path, 20, "new")
        Path(new_path).replace(path)
        with handles.borrow(path, fake.identify(path)) as new:
            buffer = bytearray(20)
            assert new.read_into([memoryview(buffer)], 0) == 20
        assert buffer == content
        assert old.read_into([memoryview(buffer)], 0) == 10
    assert fake.open_now == 1
    assert use(handles, path) is new
    handles.close()
    assert fake.open_now == 0


def test_invalidating_closes_an_idle_handle_now_and_a_used_one_on_return(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 10)
    fake, handles = fake_and_handles()
    file = use(handles, path)
    with handles.borrow(path, None):
        handles.invalidate(path)
        assert fake.closes(path) == 0
        with handles.borrow(path, None) as fresh:
            assert fresh is not file
    assert fake.closes(path) == 1
    handles.invalidate(path, file)
    assert fake.open_now == 1, "only the handle that was meant is forgotten"
    handles.invalidate(path, fresh)
    handles.invalidate("/unknown")
    assert fake.open_now == handles.open_now == 0


def test_closing_leaves_files_in_use_to_their_borrowers_and_refuses_new_ones(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 10)
    idle, _ = make_file(tmp_path, 10, "idle")
    fake, handles = fake_and_handles()
    use(handles, idle)
    with handles.borrow(path, None) as file:
        handles.close()
        assert fake.open_now == 1
        assert file.read_into([memoryview(bytearray(10))], 0) == 10
        with pytest.raises(StateError):
            use(handles, path)
    assert fake.open_now == handles.open_now == 0
    handles.close()


@pytest.mark.usefixtures("no_leaked_descriptors")
def test_a_file_whose_opening_ends_after_the_closing_is_closed_by_its_borrower(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 10)
    fake, handles = fake_and_handles()
    gate = fake.block(path, operation="open")
    files: list[OpenFile] = []
    threads = in_threads(1, lambda _: files.append(use(handles, path)))
    assert gate.reached.wait(PATIENCE_S)
    handles.close()
    gate.release()
    join(threads)
    assert fake.opens(path) == 1
    assert fake.open_now == handles.open_now == 0


def test_out_of_descriptors_idle_files_are_given_up_and_the_opening_repeated(tmp_path: Path) -> None:
    a, b, c = (make_file(tmp_path, 10, name)[0] for name in "abc")
    fake, handles = fake_and_handles()
    use(handles, a)
    use(handles, b)
    fake.fail(c, errno.EMFILE, operation="open")
    use(handles, c)
    assert (fake.open_now, handles.open_now) == (1, 1)
    handles.invalidate(c)
    fake.fail(c, errno.EMFILE, operation="open")
    with pytest.raises(OSError) as caught:
        use(handles, c)
    assert caught.value.errno == errno.EMFILE
    handles.close()


def test_a_failing_close_hurts_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = make_file(tmp_path, 10)
    handles = HandleCache(LocalStorage(), 1)
    file = use(handles, path)
    descriptor = file._descriptor  # type: ignore[attr-defined]
    monkeypatch.setattr(type(file), "close", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "late")))
    handles.close()
    assert handles.open_now == 0
    os.close(descriptor)


@pytest.mark.parametrize(
    ("change", "kind", "code", "says"),
    [
        pytest.param(None, None, None, "", id="unchanged"),
        pytest.param("touch", CheckpointError, None, "modification time", id="written to"),
        pytest.param("grow", CheckpointError, None, "size 10 -> 11 bytes", id="longer"),
        pytest.param("exchange", CheckpointError, None, "inode", id="another file"),
        pytest.param("remove", CheckpointError, errno.ENOENT, "gone", id="gone"),
        pytest.param(errno.EIO, ReadError, errno.EIO, "cannot be examined", id="cannot be told"),
    ],
)
def test_the_identity_is_verified_when_a_load_ends(
    tmp_path: Path, change: str | int | None, kind: type[LoaderError] | None, code: int | None, says: str
) -> None:
    path, content = make_file(tmp_path, 10)
    fake, handles = fake_and_handles()
    expected = fake.identify(path)
    if change == "touch":
        os.utime(path, ns=(1, 1))
    elif change == "grow":
        Path(path).write_bytes(content + b"x")
    elif change == "exchange":
        Path(make_file(tmp_path, 10, "new")[0]).replace(path)
    elif change == "remove":
        Path(path).unlink()
    elif isinstance(change, int):
        fake.fail(path, change, operation="identify")
    if kind is None:
        handles.verify(path, expected)
        return
    with pytest.raises(kind, match=says) as caught:
        handles.verify(path, expected)
    assert (type(caught.value), caught.value.errno, caught.value.path) == (kind, code, path)


def test_the_default_limit_leaves_half_of_the_descriptors_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    used = len(os.listdir("/proc/self/fd"))
    for soft, expected in ((used + 41, 20), (used + 1, 1), (used, 1), (100_000, 256), (resource.RLIM_INFINITY, 256)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert abs(HandleCache(LocalStorage()).limit - expected) <= 1


_MANY_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from loader_service.reading.fake import FakeStorage
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage
from loader_service.reading.positioned import read_fully
from loader_service.reading.threads import ReadPool

storage = FakeStorage(LocalStorage())
handles = HandleCache(storage)
pool = ReadPool(8)
handles.check_threads(8)

def read(number, turn):
    path = f"{sys.argv[1]}/{number}"
    buffer = bytearray(8)
    read_fully(handles, path, None, 8 * turn, [memoryview(buffer)], retries=0)
    assert buffer == f"{number:04}{turn:04}".encode(), (number, turn, buffer)

for future in [pool.submit(read, number, turn) for turn in range(3) for number in range(150)]:
    future.result(30)
assert pool.shutdown(30) == []
assert storage.max_open <= handles.limit < 32, (storage.max_open, handles.limit)
assert storage.opens("*/0") > 1
handles.close()
assert storage.open_now == 0
print("read", len(storage.reads))
"""


def test_150_files_are_read_with_64_descriptors(tmp_path: Path) -> None:
    for number in range(150):
        (tmp_path / str(number)).write_bytes(b"".join(f"{number:04}{turn:04}".encode() for turn in range(3)))
    done = subprocess.run(
        [sys.executable, "-c", _MANY_FILES, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "read 450\n"), done.stderr


def test_an_identity_of_the_open_file_is_compared_not_only_the_paths(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 10)
    handles = HandleCache(FakeStorage(LocalStorage()), 2)
    wrong = replace(handles.storage.identify(path), inode=1)
    use(handles, path)
    with pytest.raises(CheckpointError):
        handles.borrow(path, wrong).__enter__()
    handles.close()
