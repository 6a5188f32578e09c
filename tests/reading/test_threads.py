from __future__ import annotations

import asyncio
import errno
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import pytest

from loader_service.errors import ConfigError, EndOfFileError, MemoryLimitError, StateError
from loader_service.reading.positioned import read_fully
from loader_service.reading.priority import NICE
from loader_service.reading.threads import ReadPool
from tests.reading.making import PATIENCE_S, fake_and_handles, make_file


class Stop:
    """Work that says when it runs and ends when it is told to."""

    def __init__(self) -> None:
        self.runs = threading.Event()
        self.go = threading.Event()

    def __call__(self) -> str:
        self.runs.set()
        assert self.go.wait(PATIENCE_S)
        return "done"


@pytest.fixture
def pool() -> Iterator[ReadPool]:
    pool = ReadPool(2)
    yield pool
    assert pool.shutdown(PATIENCE_S) == []


def threads_of(name: str = "loader-read") -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def occupy(pool: ReadPool, count: int = 2) -> list[Stop]:
    """Keeps `count` threads busy until each `go` is set."""
    stops = [Stop() for _ in range(count)]
    for stop in stops:
        pool.submit(stop)
    for stop in stops:
        assert stop.runs.wait(PATIENCE_S)
    return stops


def test_work_is_done_first_in_first_out_by_named_daemon_threads_that_start_with_it() -> None:
    pool = ReadPool(1, name="loader-read-test")
    assert threads_of("loader-read-test") == []
    done: list[int] = []
    futures = [pool.submit(done.append, number) for number in range(50)]
    wait(futures, PATIENCE_S)
    assert done == list(range(50))
    (thread,) = threads_of("loader-read-test")
    assert thread.daemon
    assert pool.shutdown(PATIENCE_S) == []
    assert not thread.is_alive()


def test_no_more_threads_start_than_there_is_work_for() -> None:
    pool = ReadPool(8, name="loader-read-few")
    for _ in range(5):
        pool.submit(int).result(PATIENCE_S)
    # A thread that has just settled its future may not be waiting again yet, so that another one starts: never all.
    assert 1 <= len(threads_of("loader-read-few")) < 8
    pool.shutdown(PATIENCE_S)


def test_never_more_than_the_pools_threads_work_at_once(pool: ReadPool) -> None:
    stops = occupy(pool)
    extra = Stop()
    future = pool.submit(extra)
    assert len(pool.in_flight()) == 2
    assert not extra.runs.is_set()
    stops[0].go.set()
    assert extra.runs.wait(PATIENCE_S)
    for stop in (*stops, extra):
        stop.go.set()
    assert future.result(PATIENCE_S) == "done"


@pytest.mark.parametrize(
    "kind", [ValueError, MemoryError, SystemExit, KeyboardInterrupt, GeneratorExit, EndOfFileError]
)
def test_an_exception_of_any_kind_reaches_the_future_and_the_thread_works_on(kind: type[BaseException]) -> None:
    pool = ReadPool(1)
    error = kind("why")

    def fail() -> None:
        raise error

    future = pool.submit(fail)
    assert future.exception(PATIENCE_S) is error
    assert pool.submit(threading.get_ident).result(PATIENCE_S) == threads_of()[0].ident
    assert pool.shutdown(PATIENCE_S) == []


def test_a_callback_that_raises_costs_no_thread_and_no_later_work(pool: ReadPool) -> None:
    def callback(_: Future[str]) -> None:
        raise SystemExit

    stops = occupy(pool)
    future = pool.submit(Stop.__call__, stops[0])
    future.add_done_callback(callback)
    for stop in stops:
        stop.go.set()
    assert future.result(PATIENCE_S) == "done"
    assert [pool.submit(abs, -number).result(PATIENCE_S) for number in range(4)] == [0, 1, 2, 3]
    assert len(threads_of()) == 2


def test_cancelled_queued_work_never_runs_and_drops_its_arguments_at_once(pool: ReadPool) -> None:
    class Buffer:
        pass

    stops = occupy(pool)
    ran: list[object] = []
    buffer = Buffer()
    gone = weakref.ref(buffer)
    future = pool.submit(ran.append, buffer)
    del buffer
    assert gone() is not None
    assert future.cancel()
    gc.collect()
    assert gone() is None
    assert wait([future], 0).done == {future}, "waiters hear of it while the threads are still busy"
    for stop in stops:
        stop.go.set()
    assert pool.submit(int).result(PATIENCE_S) == 0
    assert ran == []


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
def test_nothing_of_finished_work_is_kept_while_a_thread_is_idle(pool: ReadPool, fails: bool) -> None:
    class Buffer:
        pass

    def work(_: Buffer) -> None:
        if fails:
            raise ValueError

    gc.disable()  # reference counts alone must do: the collector may be paused during a load
    try:
        buffer = Buffer()
        gone = weakref.ref(buffer)
        future = pool.submit(work, buffer)
        wait([future], PATIENCE_S)
        del buffer, future
        assert _comes_true(lambda: gone() is None)
    finally:
        gc.enable()


def test_whoever_hears_of_the_end_of_work_holds_the_last_reference_to_what_it_was_given(pool: ReadPool) -> None:
    """The thread gets no further than that it has told."""

    class Buffer:
        pass

    def fail(_: Buffer) -> None:
        raise ValueError

    gc.disable()
    try:
        for work in (id, fail):
            go = threading.Event()
            buffer = Buffer()
            gone = weakref.ref(buffer)
            future = pool.submit(work, buffer, on_done=lambda _, go=go: go.wait(PATIENCE_S))  # type: ignore[misc]
            wait([future], PATIENCE_S)
            del buffer
            assert gone() is None
            go.set()
    finally:
        gc.enable()


def test_work_that_is_cancelled_just_as_a_thread_takes_it_is_let_go(pool: ReadPool) -> None:
    class Buffer:
        pass

    gc.disable()
    try:
        (stop, other) = occupy(pool)
        buffer = Buffer()
        gone = weakref.ref(buffer)
        future = pool.submit(id, buffer)
        with future._condition:  # as `cancel` does, before it tells the pool
            future._state = "CANCELLED"
        stop.go.set()
        assert _comes_true(lambda: len(pool._idle) == 1)
        del buffer, future
        assert gone() is None
        other.go.set()
    finally:
        gc.enable()


def _comes_true(condition: object) -> bool:
    """Whether it does while other threads get to run; each turn lets them."""
    assert callable(condition)
    for _ in range(10_000):
        if condition():
            return True
        threading.Event().wait(0.0005)
    return False


def test_work_that_runs_cannot_be_cancelled(pool: ReadPool) -> None:
    stop = Stop()
    future = pool.submit(stop)
    assert stop.runs.wait(PATIENCE_S)
    assert not future.cancel()
    stop.go.set()
    assert future.result(PATIENCE_S) == "done"


def test_what_is_in_flight_is_named_with_its_age_the_oldest_first(
    pool: ReadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr("loader_service.reading.threads.time.monotonic", lambda: now_s[0])
    stops = [Stop(), Stop()]
    futures = []
    for number, stop in enumerate(stops):
        futures.append(pool.submit(stop, label=f"t{number}", path=f"/p{number}", offset=number))
        assert stop.runs.wait(PATIENCE_S)
        now_s[0] += 5.0
    pool.submit(int, label="queued")

    flying = pool.in_flight()
    assert [(item.label, item.path, item.offset, item.age_s) for item in flying] == [
        ("t0", "/p0", 0, 10.0),
        ("t1", "/p1", 1, 5.0),
    ]
    assert [item.future for item in flying] == futures
    for stop in stops:
        stop.go.set()
    wait(futures, PATIENCE_S)
    assert [item for item in pool.in_flight() if item.label != "queued"] == []


def test_an_abandoned_read_is_replaced_and_named_until_it_comes_back(tmp_path: Path) -> None:
    path, content = make_file(tmp_path, 100)
    fake, handles = fake_and_handles()
    gate = fake.block(path)
    pool = ReadPool(1)
    buffers = [bytearray(100), bytearray(100)]

    def read(buffer: bytearray) -> None:
        read_fully(handles, path, None, 0, [memoryview(buffer)], retries=0)

    stuck, after = (pool.submit(read, buffer, label="stuck", path=path, offset=0) for buffer in buffers)
    assert gate.reached.wait(PATIENCE_S)
    assert pool.abandon(stuck)
    after.result(PATIENCE_S)
    assert buffers[1] == content
    assert pool.in_flight() == []
    assert [item.path for item in pool.stuck()] == [path]
    assert not pool.abandon(stuck), "once is enough"
    assert not stuck.done()

    assert [item.label for item in pool.shutdown(0)] == ["stuck"]
    gate.release()
    stuck.result(PATIENCE_S)
    assert buffers[0] == content
    assert pool.shutdown(PATIENCE_S) == []
    handles.close()
    assert fake.open_now == 0


def test_an_abandoned_thread_ends_when_its_work_returns() -> None:
    pool = ReadPool(1, name="loader-read-counted")
    (stop,) = occupy(pool, 1)
    (thread,) = threads_of("loader-read-counted")
    assert pool.abandon(pool.in_flight()[0].future)
    assert pool.submit(int).result(PATIENCE_S) == 0
    stop.go.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert pool.submit(int).result(PATIENCE_S) == 0
    assert len(threads_of("loader-read-counted")) == 1
    pool.shutdown(PATIENCE_S)


def test_abandoning_what_is_not_running_changes_nothing(pool: ReadPool) -> None:
    stops = occupy(pool)
    queued = pool.submit(int)
    assert not pool.abandon(queued)
    for stop in stops:
        stop.go.set()
    assert queued.result(PATIENCE_S) == 0
    assert not pool.abandon(queued)
    assert not pool.abandon(Future())


def test_a_pool_grows_and_shrinks() -> None:
    pool = ReadPool(1, name="loader-read-sized")
    stops = [Stop() for _ in range(3)]
    futures = [pool.submit(stop) for stop in stops]
    assert stops[0].runs.wait(PATIENCE_S)
    pool.resize(3)
    for stop in stops:
        assert stop.runs.wait(PATIENCE_S)
    assert len(threads_of("loader-read-sized")) == 3
    pool.resize(1)
    assert pool.threads == 1
    for stop in stops:
        stop.go.set()
    wait(futures, PATIENCE_S)
    assert pool.submit(int).result(PATIENCE_S) == 0
    assert _comes_true(lambda: len(threads_of("loader-read-sized")) == 1)
    pool.shutdown(PATIENCE_S)


@pytest.mark.parametrize("threads", [0, -1])
def test_a_pool_without_threads_is_refused(pool: ReadPool, threads: int) -> None:
    with pytest.raises(ConfigError):
        ReadPool(threads)
    with pytest.raises(ConfigError):
        pool.resize(threads)


def test_stopping_cancels_what_is_queued_and_tells_when_the_rest_has_returned() -> None:
    pool = ReadPool(2)
    stops = occupy(pool)
    queued = [pool.submit(int) for _ in range(5)]
    stopped = pool.stop()
    assert all(future.cancelled() for future in queued)
    assert not stopped.done()
    assert pool.stop() is stopped
    with pytest.raises(StateError):
        pool.submit(int)
    for stop in stops:
        stop.go.set()
    stopped.result(PATIENCE_S)
    assert pool.shutdown(PATIENCE_S) == []


def test_stopping_does_not_wait_for_abandoned_work() -> None:
    pool = ReadPool(1)
    (stop,) = occupy(pool, 1)
    stopped = pool.stop()
    assert pool.abandon(pool.in_flight()[0].future)
    stopped.result(PATIENCE_S)
    stop.go.set()
    assert pool.shutdown(PATIENCE_S) == []


def test_a_pool_that_never_worked_stops_at_once() -> None:
    pool = ReadPool(4)
    assert pool.stop().done()
    assert pool.shutdown(0) == []


def test_shutting_down_is_bounded_and_names_what_is_stuck() -> None:
    pool = ReadPool(2)
    stop = Stop()
    pool.submit(stop, label="a read", path="/x", offset=7)
    assert stop.runs.wait(PATIENCE_S)
    assert [(item.label, item.path, item.offset) for item in pool.shutdown(0.01)] == [("a read", "/x", 7)]
    stop.go.set()
    assert pool.shutdown(PATIENCE_S) == []


def test_a_system_that_starts_no_thread_is_a_memory_error_and_the_work_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = ReadPool(2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(MemoryLimitError, match="no reading thread"):
            pool.submit(int)
    (stop,) = occupy(pool, 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        future = pool.submit(int)
    stop.go.set()
    assert future.result(PATIENCE_S) == 0, "one thread does the work of two"
    pool.shutdown(PATIENCE_S)


async def test_results_cross_to_an_event_loop(pool: ReadPool) -> None:
    future = asyncio.wrap_future(pool.submit(sum, (1, 2, 3)))
    assert await asyncio.wait_for(future, PATIENCE_S) == 6


_STUCK = """
import threading
from loader_service.reading.threads import ReadPool

pool = ReadPool(2)
begun = threading.Event()
def forever():
    begun.set()
    threading.Event().wait()
pool.submit(forever)
assert begun.wait(30)
print(len(pool.shutdown(0)))
"""


def test_a_process_ends_although_a_read_never_returns() -> None:
    done = subprocess.run([sys.executable, "-c", _STUCK], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process has one priority")
def test_threads_stand_back_behind_the_process(pool: ReadPool) -> None:
    """And no thread of the caller's does."""
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    theirs = pool.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result(PATIENCE_S)
    assert theirs == min(19, own + NICE)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process has one priority")
def test_threads_work_where_a_sandbox_refuses_priorities(monkeypatch: pytest.MonkeyPatch, pool: ReadPool) -> None:
    def refused(*_: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refused)
    assert pool.submit(lambda: 7).result(PATIENCE_S) == 7


_ENDS = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate() if "loader" in thread.name]))
from loader_service import exits
from loader_service.errors import StateError
from loader_service.reading.threads import ReadPool

def ask_again():
    try:
        pool.submit(print, "never")
    except StateError as error:
        print(error)

atexit.unregister(exits.let_threads_end)
atexit.register(ask_again)
exits._WAIT_S = 60
atexit.register(exits.let_threads_end)
pool, began, ends = ReadPool(1), threading.Event(), threading.Event()
pool.submit(lambda: (began.set(), ends.wait()))
pool.submit(print, "never")
began.wait()
atexit.register(ends.set)
"""


def test_a_process_ends_once_threads_have_done_what_they_were_at() -> None:
    """One that comes back from torch while the interpreter is taken down aborts the process."""
    done = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "the process ends; no more work is taken\n[]\n"
