"""What the page cache holds of a file, as the kernel tells it, by every way of asking."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loader_service.reading import page_cache
from loader_service.reading.local import LocalStorage
from loader_service.reading.page_cache import cached_bytes, copy_cached
from tests.reading.disk import MIB, PAGE, disk_folder, uncache, warm
from tests.reading.making import make_file


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """(path, descriptor) of 1 MiB and a bit on a disk, of which nothing is cached."""
    with disk_folder(tmp_path) as folder:
        path, _ = make_file(folder, MIB + 100)
        uncache(path)
        descriptor = os.open(path, os.O_RDONLY)
        yield path, descriptor
        os.close(descriptor)


class FakeCalls:
    """What the kernel would answer: `counted` of cachestat (None: refused), the type of the file system."""

    def __init__(self, counted: int | None, kind: int = 0xEF53) -> None:
        self.counted = counted
        self.kind = kind
        self.asked_for_kind = 0

    def cachestat(self, descriptor: int, offset: int, nbytes: int) -> int | None:
        return self.counted

    def file_system(self, descriptor: int) -> int:
        self.asked_for_kind += 1
        return self.kind


def answer(monkeypatch: pytest.MonkeyPatch, calls: FakeCalls | None) -> None:
    monkeypatch.setattr(page_cache, "_system_calls", lambda: calls)


def test_nothing_a_part_and_everything(file: tuple[str, int]) -> None:
    path, descriptor = file
    assert cached_bytes(descriptor, 0, MIB) == 0
    warm(path, 16 * PAGE, 32 * PAGE)
    assert cached_bytes(descriptor, 0, MIB) == 16 * PAGE
    assert cached_bytes(descriptor, 16 * PAGE, 16 * PAGE) == 16 * PAGE
    assert cached_bytes(descriptor, 32 * PAGE, 8 * PAGE) == 0
    warm(path, 0, MIB + 100)
    assert cached_bytes(descriptor, 0, MIB + 100) == MIB + 100


def test_never_more_than_was_asked_for_and_nothing_of_nothing(file: tuple[str, int]) -> None:
    path, descriptor = file
    warm(path, 0, MIB)
    assert cached_bytes(descriptor, 100, 17) == 17
    assert cached_bytes(descriptor, 4000, 200) == 200  # a part of two pages
    assert cached_bytes(descriptor, 100, 0) == 0
    assert cached_bytes(descriptor, 100, -5) == 0


def test_asking_brings_nothing_into_the_cache(file: tuple[str, int]) -> None:
    _, descriptor = file
    for _ in range(3):
        assert cached_bytes(descriptor, 0, MIB) == 0


def test_a_file_is_asked_once_for_its_file_system(file: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system asks its server for it."""
    for kind, wanted in ((0xEF53, 77), (0x794C7630, None)):
        calls = FakeCalls(77, kind)
        answer(monkeypatch, calls)
        opened = LocalStorage().open(file[0])
        assert [opened.cached_bytes(0, MIB) for _ in range(3)] == [wanted] * 3
        opened.close()
        assert calls.asked_for_kind == 1


def test_an_overlay_is_unknown_whatever_the_kernel_counts(
    file: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, descriptor = file
    answer(monkeypatch, FakeCalls(counted=0, kind=0x794C7630))
    assert cached_bytes(descriptor, 0, MIB) is None


def test_elsewhere_than_on_linux_it_is_unknown(file: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, None)
    assert cached_bytes(file[1], 0, MIB) is None


@pytest.mark.parametrize(
    ("warmed", "expected"),
    [
        pytest.param((), 0, id="neither end"),
        pytest.param((0,), MIB // 2, id="the first"),
        pytest.param((MIB - PAGE,), MIB // 2, id="the last"),
        pytest.param((0, MIB - PAGE), MIB, id="both"),
    ],
)
def test_where_counting_is_refused_both_ends_are_probed(
    file: tuple[str, int], monkeypatch: pytest.MonkeyPatch, warmed: tuple[int, ...], expected: int
) -> None:
    path, descriptor = file
    answer(monkeypatch, FakeCalls(counted=None))
    for start in warmed:
        warm(path, start, start + PAGE)
    assert cached_bytes(descriptor, 0, MIB) == expected


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.EIO])
def test_where_probes_are_refused_too_it_is_unknown(
    file: tuple[str, int], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    answer(monkeypatch, FakeCalls(counted=None))
    monkeypatch.setattr("loader_service.reading.page_cache.os.preadv", refuse)
    assert cached_bytes(file[1], 0, MIB) is None


def test_a_library_without_the_flag_for_probes_leaves_it_unknown(
    file: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, FakeCalls(counted=None))
    monkeypatch.delattr("loader_service.reading.page_cache.os.RWF_NOWAIT")
    assert cached_bytes(file[1], 0, MIB) is None


def test_a_descriptor_that_is_none_is_unknown_and_no_error() -> None:
    assert cached_bytes(-1, 0, MIB) is None


# -- copying what is held


@pytest.mark.parametrize(
    ("warmed", "offset", "expected"),
    [
        pytest.param((), 0, 0, id="nothing"),
        pytest.param(((0, MIB + 100),), 0, MIB + 100, id="all, to the file's end"),
        pytest.param(((0, MIB + 100),), 777, MIB + 100 - 777, id="all, from within a page"),
        pytest.param(((0, 16 * PAGE),), 5, 16 * PAGE - 5, id="the beginning"),
        pytest.param(((16 * PAGE, MIB),), 0, 0, id="all but the beginning"),
        pytest.param(((0, 8 * PAGE), (16 * PAGE, MIB)), 0, 8 * PAGE, id="a gap"),
    ],
)
def test_what_is_held_is_copied_up_to_the_first_gap(
    file: tuple[str, int], warmed: tuple[tuple[int, int], ...], offset: int, expected: int
) -> None:
    path, descriptor = file
    for start, stop in warmed:
        warm(path, start, stop)
    into = bytearray(b"\xee" * (MIB + 200))
    assert copy_cached(descriptor, memoryview(into), offset) == expected
    assert into[:expected] == Path(path).read_bytes()[offset : offset + expected]
    assert set(into[expected:]) == {0xEE}


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EOPNOTSUPP, errno.EIO])
def test_what_cannot_be_copied_at_once_is_none(
    file: tuple[str, int], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("loader_service.reading.page_cache.os.preadv", refuse)
    assert copy_cached(file[1], memoryview(bytearray(PAGE)), 0) == 0


def test_a_library_without_the_flag_copies_nothing(file: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    warm(file[0], 0, MIB)
    monkeypatch.delattr("loader_service.reading.page_cache.os.RWF_NOWAIT")
    assert copy_cached(file[1], memoryview(bytearray(PAGE)), 0) == 0


_AS_NOBODY = """
import os, sys
from loader_service.reading.page_cache import _SystemCalls, cached_bytes
descriptor = os.open(sys.argv[1], os.O_RDONLY)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
calls = _SystemCalls()
print(calls.cachestat(descriptor, 0, 1 << 20), cached_bytes(descriptor, 0, 1 << 20))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_kernel_counts_nothing_for_another_user_who_probes_instead(file: tuple[str, int]) -> None:
    path, _ = file
    warm(path, 0, MIB)
    done = subprocess.run(
        [sys.executable, "-c", _AS_NOBODY, path], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["None", str(MIB)]
