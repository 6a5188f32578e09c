"""Daemon threads for reads that may never return.

Not `ThreadPoolExecutor`: the interpreter joins its threads at exit, so one read that is stuck in the kernel would keep
the whole process alive.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar, TypeVarTuple, cast

from loader_service import exits, logs
from loader_service.errors import ConfigError, MemoryLimitError, StateError, clear_frames
from loader_service.reading.forked import starts_anew_in_children
from loader_service.reading.priority import stand_back

_log = logs.logger(__name__)

AUTO_THREADS: Final = 8
"""With fewer the disk waits while threads zero fresh memory; what the page cache holds is copied by fewer."""

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


@dataclass(frozen=True, slots=True)
class InFlight:
    """One piece of work that a thread is doing now. `age_s` counts from its start; `future` is what `submit` gave."""

    label: str
    path: str | None
    offset: int | None
    age_s: float
    future: Future[object] = field(repr=False, compare=False)


@dataclass(slots=True, eq=False)
class _Job:
    call: Callable[[], object]
    future: Future[object]
    label: str
    path: str | None
    offset: int | None
    subject: logs.Subject  # of what it is, for what is logged meanwhile
    started_s: float = 0.0
    worker: threading.Thread | None = None
    abandoned: bool = False

    def take(self) -> Callable[[], object]:
        """The work, which this keeps no longer."""
        call, self.call = self.call, _nothing
        return call

    def in_flight(self, now_s: float) -> InFlight:
        return InFlight(self.label, self.path, self.offset, now_s - self.started_s, self.future)


def thread_count(requested: int | str, per_node: int, ranks_here: int, files: int) -> tuple[int, str]:
    """(reading threads of this rank, why). A number is taken as it is; auto stays within the node's cap and the files
    that may be open at once."""
    if not isinstance(requested, str):
        return requested, "as configured"
    cap = max(1, per_node // ranks_here)
    if cap < AUTO_THREADS:
        return cap, f"reads.threads_per_node is {per_node} and {ranks_here} ranks are on this node"
    if files < AUTO_THREADS:
        return files, f"only {files} files may be open at once (ulimit -n)"
    return AUTO_THREADS, "what one disk needs while some of them zero fresh memory"


def _nothing() -> None:
    """The work of a job that was done."""


def _outcome(call: Callable[[], object]) -> tuple[object, BaseException | None]:
    """What the work returned or raised, of any kind. A function of its own: a traceback keeps its frame's variables."""
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 - SystemExit and MemoryError too belong to whoever waits
        return None, error


def _settle(future: Future[object], result: object, error: BaseException | None) -> None:
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
    except InvalidStateError:
        _log.debug("a read came back after its future had been settled by somebody else")
    except BaseException:  # noqa: BLE001 - it is settled by then: no reason to lose the thread
        _log.exception("a callback of a read failed")


class ReadPool:
    """`threads` daemon threads that work off one first-in first-out queue; they start when work comes.

    All methods may be called from any thread. Only `shutdown` blocks. An interrupt of a thread that calls `submit`
    leaves the pool usable; the work may then be queued, or not. In a forked child it begins without work and threads.
    A thread lets go of the work before it tells its end: whoever waits for it holds the last reference to a buffer.
    """

    def __init__(self, threads: int, *, name: str = "loader-read") -> None:
        if threads < 1:
            raise ConfigError(f"a pool of reading threads needs at least one thread, not {threads}")
        self._name = name
        self._numbers = itertools.count()
        self._target = threads
        self._stopping: Future[None] | None = None
        self._begin()
        starts_anew_in_children(self)
        exits.end_at_exit(self)

    def _begin(self) -> None:
        # Entered by `with self._lock`, never through the condition: an interrupt there would leave the lock held.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: OrderedDict[Future[object], _Job] = OrderedDict()
        self._running: dict[Future[object], _Job] = {}
        self._abandoned: set[_Job] = set()
        self._workers: set[threading.Thread] = set()  # all that live
        self._counted: set[threading.Thread] = set()  # those of them that are not abandoned
        self._idle: set[threading.Thread] = set()  # those of them that wait for work, or are about to

    def start_anew(self) -> None:
        """A fork copies no threads, and perhaps a lock that one of them held."""
        self._begin()
        if self._stopping is not None:
            self._stopping = Future()
            self._stopping.set_result(None)

    @property
    def stopped(self) -> bool:
        """Whether no more work is taken."""
        return self._stopping is not None

    @property
    def threads(self) -> int:
        """How many threads may work at once; abandoned ones are not among them."""
        return self._target

    def submit(
        self,
        function: Callable[[*_Ts], _T],
        *args: *_Ts,
        label: str = "",
        path: str | None = None,
        offset: int | None = None,
        on_done: Callable[[Future[_T]], None] | None = None,
    ) -> Future[_T]:
        """Queues `function(*args)`. Cancelling the future while it is queued drops the work and its arguments at once.

        `label`, `path` and `offset` tell a watchdog what is being done; `on_done` is a callback that the future has
        from the beginning. Raises StateError after `stop`, MemoryLimitError if the system lets no thread start.
        """
        future: Future[_T] = Future()
        # Before any thread may know the future: an interrupt while it is locked here would leave it so.
        future.add_done_callback(cast("Callable[[Future[_T]], None]", self._drop_if_cancelled))
        if on_done is not None:
            future.add_done_callback(on_done)
        # Not a function of this one: whoever keeps an error would keep it, and the arguments, which may be buffers.
        job = _Job(partial(function, *args), cast(Future[object], future), label, path, offset, logs.subject())
        with self._lock:
            if self._stopping is not None:
                raise StateError("the reading threads were stopped; no more work is taken", path=path)
            if not self._target:
                raise StateError("the process ends; no more work is taken", path=path)
            self._queue[job.future] = job
            try:
                self._start_missing()
            except MemoryLimitError:
                del self._queue[job.future]
                raise
            self._work.notify()
        return future

    def in_flight(self) -> list[InFlight]:
        """What threads are doing now, the oldest first; abandoned work is not among it."""
        now_s = time.monotonic()
        with self._lock:
            return [job.in_flight(now_s) for job in self._running.values()]

    def stuck(self) -> list[InFlight]:
        """Abandoned work that still has not come back."""
        now_s = time.monotonic()
        with self._lock:
            return [job.in_flight(now_s) for job in self._abandoned]

    def abandon(self, future: Future[_T]) -> bool:
        """Counts the thread that runs this work out and lets another take its place.

        The thread ends should the work ever return; the future stays as it is until then. False if the work is not
        running (any more), in which case nothing changes.
        """
        with self._lock:
            job = self._running.pop(cast(Future[object], future), None)
            if job is None:
                return False
            job.abandoned = True
            self._abandoned.add(job)
            self._count_out(job.worker)
            try:
                self._start_missing()
            except MemoryLimitError as error:
                _log.warning("no thread could replace an abandoned one: %s", error)
            return True

    def resize(self, threads: int) -> None:
        """Changes how many threads may work; surplus ones end after what they are doing."""
        if threads < 1:
            raise ConfigError(f"a pool of reading threads needs at least one thread, not {threads}")
        with self._lock:
            self._target = threads
            self._start_missing()
            self._work.notify_all()

    def let_end(self) -> tuple[threading.Thread, ...]:
        """See `exits`. What is queued stays there: to cancel it would set others to work."""
        with self._lock:
            self._target = 0
            self._work.notify_all()
            return tuple(self._workers)

    def stop(self) -> Future[None]:
        """Cancels what is queued, takes nothing more; the future is done when the last running work has returned.

        Abandoned work is not waited for. A second call returns the same future.
        """
        with self._lock:
            if self._stopping is not None:
                return self._stopping
            stopping = self._stopping = Future()
            stopping.set_running_or_notify_cancel()
            queued = tuple(self._queue)
            done = not self._counted
            self._work.notify_all()
        for future in queued:
            future.cancel()
        if done:
            stopping.set_result(None)
        return stopping

    def shutdown(self, wait_s: float) -> list[InFlight]:
        """`stop`, then waits at most `wait_s` for the threads. Returns what has not come back, abandoned work too."""
        self.stop()
        deadline_s = time.monotonic() + wait_s
        with self._lock:
            workers = tuple(self._workers)
        for worker in workers:
            if worker is not threading.current_thread():
                worker.join(max(0.0, deadline_s - time.monotonic()))
        return self.stuck() + self.in_flight()

    def _start_missing(self) -> None:
        """Starts threads while there is more queued than idle threads take; called with the lock held."""
        if self._stopping is not None:
            return
        wanted = min(self._target - len(self._counted), len(self._queue) - len(self._idle))
        for _ in range(wanted):
            try:
                self._start_one()
            except RuntimeError as error:
                if self._counted:
                    _log.warning("only %d of %d reading threads run: %s", len(self._counted), self._target, error)
                    return
                raise MemoryLimitError(
                    f"no reading thread could be started ({error}): raise the limit of processes (ulimit -u), the "
                    "cgroup's pids.max or the memory limit"
                ) from error

    def _start_one(self) -> None:
        worker = threading.Thread(target=self._serve, name=f"{self._name}-{next(self._numbers)}", daemon=True)
        try:
            for threads in (self._workers, self._counted, self._idle):
                threads.add(worker)
            worker.start()
        except BaseException:  # interrupted, it may run all the same: then it ends, since it is not counted
            for threads in (self._workers, self._counted, self._idle):
                threads.discard(worker)
            raise

    def _serve(self) -> None:
        worker = threading.current_thread()
        stand_back()
        try:
            while True:
                job = self._next_job(worker)
                if job is None:
                    return
                logs.begin(job.subject)
                result, error = _outcome(job.take())
                if error is not None:
                    clear_frames(error)  # they hold what the work was given
                goes_on = self._finish(job)
                _settle(job.future, result, error)
                if not goes_on:
                    return
                # Nothing may be kept while waiting for more: a job's arguments are buffers.
                del job, result, error
        finally:
            with self._lock:
                self._workers.discard(worker)

    def _next_job(self, worker: threading.Thread) -> _Job | None:
        """Waits for work; None tells the thread to end, which is counted out then."""
        with self._lock:
            self._idle.discard(worker)
            while worker in self._counted:
                if len(self._counted) > self._target or self._stopping is not None:
                    self._count_out(worker)
                    return None
                if self._queue:
                    _, job = self._queue.popitem(last=False)
                    if job.future.set_running_or_notify_cancel():
                        job.started_s = time.monotonic()
                        job.worker = worker
                        self._running[job.future] = job
                        return job
                    del job  # while the lock is held: whoever cancelled it lets go of a buffer after that
                    continue
                self._idle.add(worker)
                try:
                    self._work.wait()
                finally:
                    self._idle.discard(worker)
            return None

    def _count_out(self, worker: threading.Thread | None) -> None:
        if worker is not None:
            self._counted.discard(worker)
        if self._queue:
            # This thread may have taken the notification that another one needs.
            self._work.notify()
        if not self._counted and self._stopping is not None and not self._stopping.done():
            self._stopping.set_result(None)

    def _finish(self, job: _Job) -> bool:
        """Whether the thread goes on."""
        with self._lock:
            self._running.pop(job.future, None)
            self._abandoned.discard(job)
            return not job.abandoned

    def _drop_if_cancelled(self, future: Future[object]) -> None:
        if not future.cancelled():
            return
        with self._lock:
            job = self._queue.pop(future, None)
        if job is not None:
            future.set_running_or_notify_cancel()
