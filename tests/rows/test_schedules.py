"""A reading ends, and nothing is written after that, whatever other threads or an interrupt do at any point of it."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from loader_service.errors import ReadError
from loader_service.memory.allocators import allocate_host
from loader_service.reading import chunked
from loader_service.reading.chunked import Reading
from loader_service.reading.file_range import FileRange
from loader_service.reading.threads import ReadPool
from tests.reading.making import PATIENCE_S
from tests.rows.making import Workshop, make_table
from tests.rows.stepping import at_line, interrupted_at

WHERE = FileRange("/file", None, 0)


def fill(where: FileRange, view: memoryview) -> None:
    view[:] = bytes([where.start + 1]) * view.nbytes


def reading_of(memory: bytearray, threads: object, read: Callable[[FileRange, memoryview], None] = fill) -> Reading:
    chunks = ((start, start + 1) for start in range(len(memory)))
    return Reading(WHERE, memoryview(memory), chunks, read, cast(ReadPool, threads), 300.0)


class Script:
    """Threads whose work is done when the test says so, and where."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(
        self, function: Callable[..., Any], *args: Any, on_done: Callable[..., None], **_: object
    ) -> Future[Any]:
        future: Future[Any] = Future()
        future.add_done_callback(on_done)
        self.jobs.append((future, partial(function, *args)))
        return future

    def run(self) -> None:
        while self.jobs:
            future, call = self.jobs.popleft()
            if future.set_running_or_notify_cancel():
                call()
                future.set_result(None)

    def in_flight(self) -> list[Any]:
        return []


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ends", ["read", "failed", "cancelled"])
def test_all_other_chunks_may_end_while_one_thread_is_anywhere(threads: int, ends: str) -> None:
    def read(where: FileRange, view: memoryview) -> None:
        if ends == "failed" and where.start == 3:
            raise ReadError("no")
        fill(where, view)

    for number in itertools.count():
        memory = bytearray(6)
        script = Script(threads)
        reading = reading_of(memory, script, read)

        def all_of_it(reading: Reading = reading, script: Script = script) -> None:
            reading.start()
            script.run()
            if ends == "cancelled":
                reading.cancel()

        came = at_line(number, all_of_it, script.run, free=lambda reading=reading: not reading._lock.locked())  # type: ignore[misc]
        assert reading._end.has_come, f"line {number}"
        if ends != "failed":
            assert memory == bytes(range(1, 7)), f"line {number}"
            reading.raise_error()
        if not came:
            break
    assert number > 50


def test_an_interrupt_anywhere_ends_the_reading_and_leaves_its_threads_usable() -> None:
    for number in itertools.count():
        pool = ReadPool(2, name="loader-rows")
        memory = bytearray(5)
        reading = reading_of(memory, pool)
        interrupted = interrupted_at(number, reading.wait)
        written = bytes(memory)
        assert reading._end.has_come, f"look {number}"
        assert not reading._running, f"look {number}"
        again = bytearray(5)
        reading_of(again, pool).start()  # what is queued, if anything is, comes before it
        other = reading_of(again, pool)
        waiting = threading.Thread(target=other.wait, daemon=True)
        waiting.start()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive(), f"look {number}"
        assert bytes(memory) == written, f"look {number}"
        assert pool.shutdown(PATIENCE_S) == []
        if not interrupted:
            break
    assert number > 20
    assert memory == again == bytes(range(1, 6))


# -- who lets go of the memory last


@pytest.fixture
def held_at_the_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The thread that tells a reading's end gets no further. Reference counts alone free memory."""
    go = threading.Event()
    tell = chunked._End.tell

    def tell_and_stay(end: chunked._End) -> None:
        tell(end)
        go.wait(PATIENCE_S)

    monkeypatch.setattr(chunked._End, "tell", tell_and_stay)
    gc.disable()
    yield
    gc.enable()
    go.set()


def test_a_thread_that_tells_the_end_keeps_no_memory(
    tmp_path: Path, workshop: Callable[..., Workshop], held_at_the_end: None
) -> None:
    table = make_table(tmp_path, (100, 10))
    buffer = allocate_host(1000)
    gone = weakref.ref(buffer._pages)
    table.over(workshop(threads=2).reader).read_rows_into(buffer.tensor.view(table.dtype).view(100, 10), 0)
    del buffer
    assert gone() is None


def test_nor_does_it_keep_an_error_that_leads_to_the_memory(
    tmp_path: Path, workshop: Callable[..., Workshop], held_at_the_end: None
) -> None:
    table = make_table(tmp_path, (100, 10))
    one = workshop(threads=1)
    one.fake.fail("*", 13, nth=2)

    def fails() -> weakref.ref[Any]:
        buffer = allocate_host(1000)
        gone = weakref.ref(buffer._pages)
        try:
            table.over(one.reader).read_rows_into(buffer.tensor.view(table.dtype).view(100, 10), 0)
        except ReadError:
            return gone
        raise AssertionError

    assert fails()() is None


def test_who_keeps_an_error_of_a_chunk_keeps_nothing_that_the_reading_thread_had() -> None:
    buffer = allocate_host(10)
    gone = weakref.ref(buffer._pages)
    pool = ReadPool(1, name="loader-rows")

    def read(where: FileRange, view: memoryview) -> None:
        raise ReadError("no")

    reading = Reading(WHERE, buffer.memoryview, iter([(0, 10)]), read, pool, 300.0)
    with pytest.raises(ReadError) as caught:
        reading.wait()
    del buffer
    assert pool.shutdown(PATIENCE_S) == []
    assert gone() is None
    assert str(caught.value) == "no"
