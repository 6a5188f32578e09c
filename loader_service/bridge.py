"""The service's own event loop in a thread, and the two bridges from a caller to it.

The loader runs on a loop of its own, so that a consumer that blocks its loop does not stop the reads and the loader
does not burden the caller's loop. Callers reach it in two ways: `ServiceLoop.run` (awaited on the caller's loop) and
`ServiceLoop.run_blocking`. What the loader hands over travels through a `Channel`, which costs no trip between
threads while something lies in it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Generic, TypeVar

from loader_service import logs
from loader_service.errors import MemoryLimitError, StateError, text_of

try:
    import uvloop as loops  # here, not when a load begins: it takes 4 ms
except ImportError:  # a dependency on Linux and macOS only
    import asyncio as loops  # type: ignore[no-redef]

T = TypeVar("T")

log = logs.logger("loader_service.bridge")

_OWN_THREADS = ("loader-service", "loader-read-", "loader-plan-", "loader-close-", "loader-memory", "loader-agreement-")


class _Call(Generic[T]):
    """One coroutine on the service's loop, and how its caller learns of its end.

    Unlike `asyncio.run_coroutine_threadsafe`, cancelling does not end the caller's wait: the coroutine first cleans
    up (it tells the other ranks, waits for reads in flight), and only then does the caller go on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self.done: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop = loop
        self._coroutine = _carrying(coroutine)
        self._task: asyncio.Task[T] | None = None
        loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.done.set_exception(asyncio.CancelledError())
            return
        error = task.exception()
        if type(error) is _Carried:  # by class alone: another's exception may lie about its own
            error = error.error
        if error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(task.result())

    def cancel(self, why: object = None) -> None:
        """Cancels the coroutine, but never before its first step: cleaning up must begin even if it is cut short."""

        def cancel_task() -> None:
            assert self._task is not None  # `_start` was posted before
            self._loop.call_soon(self._task.cancel, why)

        with contextlib.suppress(RuntimeError):  # the loop has ended, and the task with it
            self._loop.call_soon_threadsafe(cancel_task)


class _Carried(Exception):  # noqa: N818 - an envelope
    """SystemExit or KeyboardInterrupt on its way to the caller: raised in a task as they are, they end the loop."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def _carrying(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise _Carried(error) from error


async def uninterrupted(coroutine: Coroutine[Any, Any, T]) -> T:
    """Awaits a coroutine to its end; a cancellation meanwhile is raised only then. For cleaning up, in bounded time."""
    task = asyncio.ensure_future(coroutine)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # noqa: BLE001, S110 - it is the task's own, and raised below
            pass
    if cancelled is not None:
        raise cancelled
    return task.result()


class ServiceLoop:
    """An event loop (uvloop where it is installed) in a daemon thread that the service owns.

    It does not outlive a fork: in a child process every call raises StateError. Raises MemoryLimitError if the system
    lets no thread start, or has no descriptors for the loop.
    """

    def __init__(self, name: str = "loader-service") -> None:
        try:
            self._loop = loops.new_event_loop()
        except OSError as error:
            raise MemoryLimitError(
                f"the service's event loop cannot be had ({error.strerror or error}): raise the limit of open files "
                "(ulimit -n)",
                errno=error.errno,
            ) from error
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._process = os.getpid()
        self._stopped = False
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        try:
            self._thread.start()
        except BaseException as error:
            if self._thread.is_alive():  # an interrupt, just as the thread had started
                self.request_stop()
            else:
                self._loop.close()
            if isinstance(error, RuntimeError):
                raise MemoryLimitError(
                    f"the service's thread could not be started ({error}): raise the limit of processes (ulimit -u) or "
                    "the cgroup's pids.max"
                ) from error
            raise

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
            for call in list(self._calls):  # none is left, unless the loop ended by a fault
                if not call.done():
                    call.set_exception(StateError("the service's event loop has ended"))
            self._ended.set_result(None)

    @property
    def must_not_wait(self) -> bool:
        """Whether the calling thread is one of a service's own, as when the garbage collector ends a generator there.

        What it would wait for may need this very thread: the loop, a reading thread, one that speaks to other ranks.
        """
        return threading.current_thread().name.startswith(_OWN_THREADS)

    def close_from_inside(self, coroutine: Coroutine[Any, Any, object], *, then_stop: bool = False) -> None:
        """Where nothing can be waited for: lets a coroutine that closes something run. Its error is logged."""

        def report(done: concurrent.futures.Future[object]) -> None:
            if (error := done.exception()) is not None:
                log.warning("a generator that was dropped could not be left well: %s", text_of(error))

        self._call(coroutine, inside=True, then_stop=then_stop).done.add_done_callback(report)

    async def run(self, coroutine: Coroutine[Any, Any, T], *, then_stop: bool = False) -> T:
        """Runs a coroutine on the service's loop, awaited from any other loop.

        Cancelling the caller cancels the coroutine and waits for its end; cancelled a second time, it stops waiting,
        and the coroutine goes on to its end. `then_stop`: the loop ends after the coroutine, and not before.
        """
        call = self._call(coroutine, then_stop=then_stop)
        waiting = asyncio.wrap_future(call.done)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError as error:
            if not waiting.done():
                call.cancel(*error.args)
                with contextlib.suppress(Exception):
                    await asyncio.shield(waiting)
            raise
        finally:
            waiting.add_done_callback(_retrieve)

    def run_blocking(self, coroutine: Coroutine[Any, Any, T], *, then_stop: bool = False) -> T:
        """As `run`, blocking: an interrupt cancels the coroutine and waits for its end, a second one stops waiting."""
        call = self._call(coroutine, then_stop=then_stop)
        try:
            return call.done.result()
        except BaseException as error:
            if not call.done.done():
                call.cancel(f"interrupted by {type(error).__name__}")
                with contextlib.suppress(Exception, asyncio.CancelledError):
                    call.done.result()
            raise

    def post(self, callback: Callable[[], object]) -> None:
        """Calls a function on the service's loop, soon, from any thread; nothing happens once the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    async def ended(self, wait_s: float = 5.0) -> None:
        """Waits at most `wait_s` for the end of the loop's thread, if it was told to stop and no call still runs."""
        if self._stopped and self._process == os.getpid():
            await asyncio.wait((asyncio.wrap_future(self._ended),), timeout=wait_s)

    def ended_blocking(self, wait_s: float = 5.0) -> None:
        """As `ended`, for callers without a loop."""
        if self._stopped and self._process == os.getpid():
            self._thread.join(wait_s)

    def request_stop(self) -> None:
        """Ends the loop and its thread, soon."""
        if not self._stopped:
            self._stopped = True
            self.post(self._loop.stop)

    def _call(self, coroutine: Coroutine[Any, Any, T], *, inside: bool = False, then_stop: bool = False) -> _Call[T]:
        why = None
        if self._process != os.getpid():
            why = "the service was opened before a fork and has no thread here: open one in each process"
        elif self._stopped:
            why = "the service is closed: open a new one"
        elif not inside and threading.current_thread() is self._thread:
            why = "the service cannot be called from its own event loop"
        if why is not None:
            coroutine.close()
            raise StateError(why)
        call = _Call(self._loop, coroutine)
        self._calls.add(call.done)
        call.done.add_done_callback(self._calls.discard)
        if then_stop:
            call.done.add_done_callback(lambda _: self.request_stop())
        return call


def _retrieve(future: asyncio.Future[T]) -> None:
    """Marks a future's exception as seen: whoever was cancelled away from it has its own."""
    if not future.cancelled():
        future.exception()


class ChannelClosed(Exception):  # noqa: N818 - not an error: the end of the items
    """Everything that was put into a channel has been taken."""


class Channel(Generic[T]):
    """Items from the service's loop to one consumer on any thread or loop.

    `put` never waits: what lies in a channel is bounded by the memory that was leased for it. While it holds items,
    taking one is a plain deque operation on the consumer's thread; only an empty channel costs a wait. Appending and
    popping are atomic, and a consumer looks again after it has registered, so no lock is needed and no loop blocks.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._raised = False
        self._wake: Callable[[], object] | None = None

    def put(self, item: T) -> None:
        self._items.append(item)
        self._notify()

    def end(self) -> None:
        """No more items will come; those that lie here are still handed out."""
        self._ended = True
        self._notify()

    def fail(self, error: BaseException) -> None:
        """The consumer gets `error` at its next step, before any item that still lies here. The first error stays."""
        if self._error is None:
            self._error = error
        self._notify()

    def drain(self) -> list[T]:
        """Takes out what was never handed over, for its owner to give back."""
        left = []
        while self._items:
            left.append(self._items.popleft())
        return left

    @property
    def over(self) -> bool:
        """Whether the end was reached: all items were taken, and none will come."""
        return self._ended and not self._items and self._error is None

    @property
    def depth(self) -> int:
        """How many items lie here, put and not taken."""
        return len(self._items)

    @property
    def consumer_waits(self) -> bool:
        return self._wake is not None

    @property
    def raised(self) -> BaseException | None:
        """The channel's error, if the consumer has got it."""
        return self._error if self._raised else None

    def check(self) -> None:
        """Raises the channel's error, if there is one."""
        if self._error is not None:
            self._raised = True
            raise self._error

    def get_nowait(self) -> T | None:
        """An item, or None when there is none now; raises the channel's error, or ChannelClosed at its end."""
        self.check()
        ended = self._ended  # before looking: an item put before the end must not be missed
        if self._items:
            return self._items.popleft()
        if ended:
            raise ChannelClosed
        return None

    async def wait(self) -> None:
        """Returns when there is something to take; raises as `get_nowait` does. Awaited on the consumer's loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._waiting(lambda: _wake_future(loop, future)):
            if not self._ready():
                await future
        self._raise_if_over()

    def wait_blocking(self) -> None:
        """As `wait`, for callers without a loop; an interrupt ends the wait."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._waiting(lambda: _wake_concurrent(future)):
            if not self._ready():
                future.result()
        self._raise_if_over()

    @contextlib.contextmanager
    def _waiting(self, wake: Callable[[], object]) -> Iterator[None]:
        if self._wake is not None:
            raise StateError("two consumers wait for the same load: consume it from one place")
        self._wake = wake
        try:
            yield
        finally:
            self._wake = None

    def _ready(self) -> bool:
        return bool(self._items) or self._ended or self._error is not None

    def _raise_if_over(self) -> None:
        self.check()
        if self.over:
            raise ChannelClosed

    def _notify(self) -> None:
        wake = self._wake
        if wake is not None:
            wake()


def _wake_future(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    with contextlib.suppress(RuntimeError):  # the consumer's loop has ended
        loop.call_soon_threadsafe(resolve)


def _wake_concurrent(future: concurrent.futures.Future[None]) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        future.set_result(None)
