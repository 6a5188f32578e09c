"""What SIGINT and SIGTERM do to a command, from its first moment to its last."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NoReturn

from loader_service.cli.output import PROGRAM, line_of
from loader_service.errors import EXIT_INTERRUPTED

LAUNCHER_REPEATS_S = 1.0  # a launcher passes on the signal that a terminal has already sent to every rank
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruptions:
    """A process's signals. The first one ends most commands where they are, as KeyboardInterrupt; a load keeps it until
    it can leave by its normal door, which tells the other ranks. A second one then ends the process at once, whatever
    its main thread is stuck in. Once the outcome is settled they change nothing any more.

    Handlers are Python's own, not an event loop's: those stay silent while the loop's thread is stuck in a call, and
    where they are taken away again, SIGTERM kills a process that has printed its outcome already.
    """

    def __init__(self, *, several_ranks: bool) -> None:
        self.first: signal.Signals | None = None
        self._first_at_s = 0.0
        self._several_ranks = several_ranks
        self._kept = False
        self._settled = False
        self._hear: Callable[[signal.Signals], None] | None = None
        self._before: dict[signal.Signals, Any] = {}

    @classmethod
    def installed(cls) -> Interruptions | None:
        """Those that handle this process's signals, where some do."""
        owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        return owner if isinstance(owner, cls) else None

    def install(self) -> None:
        """On the main thread."""
        self._before = {number: signal.signal(number, self._take) for number in _SIGNALS}

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def keep(self) -> None:
        """From now on the first signal is only noted, until `on_first` says who hears of it."""
        self._kept = True

    def on_first(self, hear: Callable[[signal.Signals], None]) -> None:
        """`hear` is called with the first signal, at once if it has come; else between any two steps of the main
        thread: it must not wait."""
        self._kept, self._hear = True, hear
        if self.first is not None:
            hear(self.first)

    def let_go(self) -> None:
        """Undoes `keep`, for a command that has nobody to tell. Raises KeyboardInterrupt if a signal has come."""
        self._kept = False
        if self.first is not None:
            raise KeyboardInterrupt(self.first.name)

    def settle(self) -> None:
        """The outcome is printed: a launcher that now stops the remaining ranks must not change it."""
        self._settled = True

    def _take(self, number: int, _frame: FrameType | None) -> None:
        which = signal.Signals(number)
        if self._settled:
            return
        if not self._kept:
            raise KeyboardInterrupt(which.name)
        if self.first is None:
            self.first, self._first_at_s = which, time.monotonic()
            if self._hear is not None:
                self._hear(which)
        elif not self._several_ranks or time.monotonic() - self._first_at_s > LAUNCHER_REPEATS_S:
            _leave_at_once(self.first, which)


def own_signals() -> Interruptions:
    """Makes the process's signals this package's, for good. Where there are several ranks, they are kept from the
    start: a load's imports take seconds, and only after them can it tell the other ranks."""
    if (installed := Interruptions.installed()) is not None:
        return installed
    several_ranks = started_by_a_launcher()
    made = Interruptions(several_ranks=several_ranks)
    made.install()
    if several_ranks:
        made.keep()
    return made


@contextlib.contextmanager
def interruptions(*, several_ranks: bool) -> Iterator[Interruptions]:
    """The process's own, or some for a while where it has none (a command that is run inside another program)."""
    if (installed := Interruptions.installed()) is not None:
        yield installed
        return
    made = Interruptions(several_ranks=several_ranks)
    made.install()
    try:
        yield made
    finally:
        made.restore()


def started_by_a_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher says that there are several ranks. Needs no import that takes long."""
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        with contextlib.suppress(KeyError, ValueError):
            if int(environ[name]) > 1:
                return True
    return False


def _leave_at_once(first: signal.Signals, second: signal.Signals) -> NoReturn:
    text = f"{PROGRAM}: interrupted by {first.name}, then by {second.name}: ending at once"
    line = f"{line_of(text, logging.ERROR)}\n"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        # The interrupted thread may be stuck in writing to stderr: neither its lock nor a full pipe may hold this one.
        descriptor = sys.__stderr__.fileno()  # type: ignore[union-attr]  # without one there is nobody to tell
        if select.select([], [descriptor], [], 0)[1]:
            os.write(descriptor, line.encode())
    os._exit(EXIT_INTERRUPTED)
