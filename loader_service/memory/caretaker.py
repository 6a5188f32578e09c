"""One small daemon thread that does for the pool what may not be done on an event loop.

It locks and unmaps memory (milliseconds a buffer) and asks devices whether they are done with a buffer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from loader_service import logs
from loader_service.errors import MemoryLimitError
from loader_service.memory.events import DeviceEvent

_log = logs.logger(__name__)

_T = TypeVar("_T")

# A batch of 16 MiB takes about 0.3 ms to cross to a device: sooner asking is wasted, later is a slot not used.
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.016


@dataclass(slots=True, eq=False)
class _Watch:
    events: deque[DeviceEvent]
    done: Callable[[bool], None]
    subject: logs.Subject

    def look(self) -> bool | None:
        """True when all events have passed, False when one failed, None while one has not."""
        logs.begin(self.subject)
        try:
            while self.events:
                if not self.events[0].query():
                    return None
                self.events.popleft()
        except BaseException:  # noqa: BLE001 - whatever a device says, the answer is never to use the buffer again
            _log.exception("a device event failed: the buffer that it guards is never used again")
            return False
        return True


class Caretaker:
    """The thread starts with the first work and ends after `stop`, once there is none; later work starts it again."""

    def __init__(self, *, name: str = "loader-memory") -> None:
        self._name = name
        self._work = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._watches: list[_Watch] = []
        self._new_watches = False
        self._running = False
        self._stopping = False
        self._ended: list[Future[None]] = []

    @property
    def watching(self) -> int:
        """Buffers whose events have not all passed."""
        return len(self._watches)

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Runs `function()` on the thread, in the order of the calls; a cancelled one that has not begun never runs.

        Raises MemoryLimitError if the system lets no thread start.
        """
        future: Future[_T] = Future()
        subject = logs.subject()

        def run() -> None:
            logs.begin(subject)
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._work:
            self._ensure_thread()
            self._calls.append(run)
            self._work.notify()
        return future

    def watch(self, events: Sequence[DeviceEvent], done: Callable[[bool], None]) -> None:
        """Calls `done(True)` on the thread when all events have passed, `done(False)` when asking one failed.

        Asks at once, then after 1 ms, doubling up to 16 ms; new events start that anew.
        """
        with self._work:
            self._ensure_thread()
            self._watches.append(_Watch(deque(events), done, logs.subject()))
            self._new_watches = True
            self._work.notify()

    def stop(self) -> Future[None]:
        """Lets the thread end when all calls and watches are done; the future is done then. Does not block."""
        ended: Future[None] = Future()
        ended.set_running_or_notify_cancel()
        with self._work:
            self._stopping = True
            if self._running:
                self._ended.append(ended)
                self._work.notify()
                return ended
        ended.set_result(None)
        return ended

    def _ensure_thread(self) -> None:
        if self._running:
            return
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError as error:
            raise MemoryLimitError(
                f"no thread could be started to look after staging memory ({error}): raise the limit of processes "
                "(ulimit -u), the cgroup's pids.max or the memory limit"
            ) from error
        self._running = True

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while self._wait(pause_s):
            while self._calls:
                self._calls.popleft()()
            passed = self._poll()
            pause_s = _FIRST_PAUSE_S if passed or self._new_watches else min(2 * pause_s, _LONGEST_PAUSE_S)

    def _wait(self, pause_s: float) -> bool:
        """Waits for work or the next time to ask; False when the thread is to end."""
        with self._work:
            if not self._calls and not self._new_watches:
                if self._watches:
                    self._work.wait(pause_s)
                else:
                    self._work.wait_for(lambda: self._calls or self._watches or self._stopping)
            self._new_watches = False
            if self._calls or self._watches or not self._stopping:
                return True
            self._running = False
            ended, self._ended = self._ended, []
        for future in ended:
            future.set_result(None)
        return False

    def _poll(self) -> bool:
        with self._work:
            watches = tuple(self._watches)
        settled = [(watch, answer) for watch in watches if (answer := watch.look()) is not None]
        for watch, answer in settled:
            with self._work:
                self._watches.remove(watch)
            watch.done(answer)
        return bool(settled)
