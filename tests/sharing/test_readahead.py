"""Striped read-ahead: what it brings into the page cache, what it counts, and how it ends."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loader_service.checkpoint.catalog import Shard
from loader_service.reading.fake import FakeStorage
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage
from loader_service.reading.page_cache import read_ahead_bytes
from loader_service.sharing import readahead
from loader_service.sharing.readahead import ReadAhead, Stripe, threads_of
from tests.reading.disk import disk_folder, held, uncache
from tests.reading.making import PATIENCE_S, make_file

PIECE_BYTES = 8 << 20
SIZE = 3 * PIECE_BYTES + 12345


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "PIECE_BYTES", PIECE_BYTES)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    with disk_folder(tmp_path) as folder:
        path, _ = make_file(folder, SIZE)
        uncache(path)
        yield Shard(Path(path).name, path, LocalStorage().identify(path), 0, "")


async def run(storage: FakeStorage, shard: Shard, stripes: list[Stripe], *, threads: int = 2) -> ReadAhead:
    ahead = ReadAhead(stripes, [shard], HandleCache(storage, 8), threads=threads, retries=0)
    ahead.start()
    while not ahead.over:
        await asyncio.wait([asyncio.wrap_future(future) for future in ahead._running], timeout=PATIENCE_S)
    await ahead.stop(PATIENCE_S)
    return ahead


def no_advice(storage: FakeStorage) -> FakeStorage:
    storage.fail("*", errno.EOPNOTSUPP, operation="read ahead", times=None)
    return storage


@pytest.mark.parametrize("advised", [True, False], ids=["advised", "read and thrown away"])
async def test_exactly_the_stripes_come_into_the_page_cache(shard: Shard, advised: bool) -> None:
    storage = FakeStorage(LocalStorage())
    stripes = [(0, 0, PIECE_BYTES + 5000), (0, 2 * PIECE_BYTES, SIZE)]
    ahead = await run(storage if advised else no_advice(storage), shard, stripes)

    assert ahead.problem is None
    assert ahead.read_bytes == sum(stop - start for _, start, stop in stripes)
    if not advised:
        assert storage.bytes_read() == ahead.read_bytes
        assert all(held(shard.path, start, stop - start) == stop - start for _, start, stop in stripes)


async def test_a_failure_ends_it_and_nothing_else(shard: Shard) -> None:
    storage = FakeStorage(LocalStorage())
    storage.fail("*", errno.EIO, operation="read ahead", nth=1)
    ahead = await run(storage, shard, [(0, 0, SIZE)], threads=1)

    assert ahead.read_bytes == PIECE_BYTES
    assert ahead.problem is not None
    assert "Input/output error" in ahead.problem


@pytest.mark.parametrize("error", [MemoryError, lambda: ValueError("odd")], ids=["MemoryError", "ValueError"])
async def test_whatever_goes_wrong_is_said(shard: Shard, error: Callable[[], BaseException]) -> None:
    storage = FakeStorage(LocalStorage())
    storage.fail("*", error, operation="read ahead")
    ahead = await run(storage, shard, [(0, 0, SIZE)], threads=1)
    assert ahead.problem == ("MemoryError" if error is MemoryError else "ValueError: odd")


async def test_without_threads_it_says_so_and_nothing_fails(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ahead = ReadAhead([(0, 0, SIZE)], [shard], HandleCache(LocalStorage(), 8), threads=2, retries=0)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        ahead.start()
    assert ahead.over
    assert await ahead.stop(PATIENCE_S) == []
    assert ahead.read_bytes == 0
    assert ahead.problem is not None
    assert "ulimit -u" in ahead.problem


async def test_stopping_drops_what_is_left(shard: Shard) -> None:
    storage = FakeStorage(LocalStorage())
    gate = storage.block("*", operation="read ahead")
    ahead = ReadAhead([(0, 0, SIZE)], [shard], HandleCache(storage, 8), threads=1, retries=0)
    ahead.start()
    await asyncio.to_thread(gate.reached.wait, PATIENCE_S)
    stopping = asyncio.ensure_future(ahead.stop(PATIENCE_S))
    await asyncio.sleep(0)
    gate.release()
    await stopping

    assert ahead.over
    assert ahead.read_bytes == PIECE_BYTES


async def test_without_stripes_nothing_is_opened(shard: Shard) -> None:
    storage = FakeStorage(LocalStorage())
    ahead = await run(storage, shard, [])
    assert (ahead.read_bytes, storage.opens()) == (0, 0)


@pytest.mark.parametrize(
    ("ranks", "per_node", "threads"), [(1, 16, 16), (4, 16, 4), (8, 1000, 8), (32, 16, 1), (2, 3, 1), (1, 100, 16)]
)
def test_threads_have_a_cap_for_a_rank_and_one_for_a_node(ranks: int, per_node: int, threads: int) -> None:
    assert threads_of(ranks, per_node) == threads


def wait_until(condition: Callable[[], bool]) -> None:
    """Advice returns before the bytes are there, and nothing tells when they are."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_nothing_behind_a_long_stripe_comes_with_it(tmp_path: Path) -> None:
    """Where the kernel reads far ahead, most of a stripe is touched here and there, and it reads on by itself."""
    step_bytes = read_ahead_bytes(tmp_path.stat().st_dev)
    stripe_bytes = 8 * step_bytes
    if not step_bytes:
        pytest.skip("this file system does not say how far it reads ahead")
    with disk_folder(tmp_path) as folder:
        path = folder / "long.safetensors"
        with path.open("wb") as written:
            written.truncate(3 * stripe_bytes)
        long = Shard(path.name, str(path), LocalStorage().identify(str(path)), 0, "")
        handles = HandleCache(LocalStorage(), 8)
        with handles.borrow(long.path, long.identity) as file:
            file.read_ahead(stripe_bytes, stripe_bytes)
        wait_until(lambda: held(long.path, stripe_bytes, stripe_bytes) == stripe_bytes)
        handles.close()
        assert held(long.path, 0, stripe_bytes) == 0
        assert held(long.path, 2 * stripe_bytes, stripe_bytes) == 0
