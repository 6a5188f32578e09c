"""The load behind a mapping of weights, on a thread of its own: it takes what somebody waits for, and holds it."""

from __future__ import annotations

import asyncio
import atexit
import bisect
import contextlib
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeAlias

import torch

from loader_service.errors import MemoryLimitError, StateError
from loader_service.service import LoaderService
from loader_service.stream import Load, Weight

Check: TypeAlias = Callable[[Load, int], None]

# A load that nobody has asked for so long looks whether others have failed, or may wait for memory of the node that
# holds what it does not take. Each time that it then takes a tensor it waits half as long for the next.
LOOK_S = 0.5
LEAST_LOOK_S = 0.005

_EXIT_S = 5.0  # as long as a service may take to end


class WeightStream:
    """One load, its thread, and what has come of it. It does not know the mapping over it, which may be dropped.

    `_changed` guards everything: `_alive` are the names that are not consumed, with their numbers in plan order, and
    `_held` those of them that have come; somebody waits for each of `_wanted`.
    """

    def __init__(self, service: LoaderService, name: str, check: Check | None) -> None:
        self.load: Load | None = None
        self.error: BaseException | None = None
        self.over = False
        self._service = service
        self._name = name
        self._check = check
        self._shared_memory = service.config.cache.on
        self._changed = threading.Condition()
        self._alive: dict[str, int] = {}
        self._held: dict[str, Weight] = {}
        self._wanted: set[str] = set()
        self._numbers = itertools.count()
        self._sorted: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None  # what an end of the taking cancels: opening, then taking
        self._look_s = LOOK_S
        self._leaving = False
        self._body_error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=f"loader-weights-{name}", daemon=True)
        self._process = os.getpid()

    # For any thread

    def start(self) -> None:
        """Returns once the load is open. Raises what opening it, or the check, raised."""
        _started.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:
            _started.discard(self)
            raise MemoryLimitError(f"load '{self._name}': its thread could not be started ({error})") from error
        with self._changed:
            self._changed.wait_for(lambda: self.load is not None or self.over)
        if self.load is None:
            assert self.error is not None
            raise self.error

    def wait_for(self, name: str) -> Weight:
        with self._changed:
            while True:
                if self.error is not None:
                    raise self.error
                if name not in self._alive:
                    raise KeyError(f"load '{self._name}': '{name}' is not among this rank's names, or is consumed")
                if name in self._held:
                    return self._held[name]
                if self._leaving or self.over:
                    raise StateError(f"load '{self._name}' was left before '{name}' had come")
                if self._process != os.getpid():
                    why = "the load was opened before a fork and has no thread here: open one in each process"
                    raise StateError(f"load '{self._name}': '{name}' had not come: {why}")
                self._wanted.add(name)
                self._post(self._asked.set)
                self._changed.wait()

    def put(self, name: str, value: Weight) -> None:
        with self._changed:
            if name not in self._alive:
                self._alive[name] = next(self._numbers)
                place = bisect.bisect_left(self._sorted, name)
                if self._sorted[place : place + 1] != [name]:  # consumed names stay there
                    self._sorted.insert(place, name)
            self._hold(name, value)

    def consume(self, names: Iterable[str]) -> int:
        """How many of the names were there; now none is."""
        with self._changed:
            found = [name for name in names if name in self._alive]
            for name in found:
                del self._alive[name]
                self._held.pop(name, None)
                self._wanted.discard(name)
            self._changed.notify_all()  # whoever waits for one of them
            if self._all_here():
                self._post(self._asked.set)
        return len(found)

    def has(self, name: str) -> bool:
        with self._changed:
            return name in self._alive

    def names(self, inside: str = "") -> list[str]:
        """The names that begin with `inside`, which ends in a dot, in plan order."""
        with self._changed:
            if not inside:
                return list(self._alive)
            first = bisect.bisect_left(self._sorted, inside)
            last = bisect.bisect_left(self._sorted, inside[:-1] + chr(ord(".") + 1), first)
            return sorted((n for n in self._sorted[first:last] if n in self._alive), key=self._alive.__getitem__)

    def held_bytes(self) -> int:
        with self._changed:
            return sum(value.nbytes for value in self._held.values() if isinstance(value, torch.Tensor))

    def leave(self, error: BaseException | None) -> None:
        """Ends the taking, with the error of the consumer's body if there is one. Waits for nothing, not even a lock:
        the garbage collector may call it anywhere."""
        self._post(lambda: self._stop(error))

    def join(self, within_s: float | None = None) -> None:
        self._thread.join(within_s)

    def _post(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback)

    # With the lock

    def _hold(self, name: str, value: Weight) -> None:
        self._held[name] = value
        if name in self._wanted:
            self._wanted.remove(name)
            self._changed.notify_all()

    def _all_here(self) -> bool:
        """Whether everything has come that anybody can still ask for."""
        return len(self._alive) == len(self._held)

    # On the stream's thread

    def _main(self) -> None:
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                runner.run(self._run())
        except BaseException as error:  # noqa: BLE001 - whoever asks raises it
            self.error = error if error is not self._body_error else None
        finally:
            with self._changed:
                self.over = True
                self._changed.notify_all()
            _dropped.discard(self)
            _started.discard(self)

    async def _run(self) -> None:
        self._task = asyncio.current_task()
        async with self._service as service, service.open(self._name) as load:
            if self._check is not None:
                self._check(load, service.rank)
            self._open(load, service.rank)
            self._task = asyncio.ensure_future(self._take(load, service.rank))
            try:
                await self._task
            except asyncio.CancelledError:  # by `_stop`; a step that is cancelled takes nothing, so this is a `break`
                if not self._leaving:
                    raise
            finally:
                self._task = None
            if self._body_error is not None:
                raise self._body_error

    def _stop(self, error: BaseException | None) -> None:
        if self._task is not None and not self._leaving:
            with self._changed:
                self._leaving = True
                self._body_error = error
                self._changed.notify_all()
            self._task.cancel()

    def _open(self, load: Load, rank: int) -> None:
        plan = load.plan.for_rank(rank)
        with self._changed:
            self._alive = {plan.name(i): next(self._numbers) for i in range(len(plan))}
            self._sorted = sorted(self._alive)
            self.load = load
            self._changed.notify_all()

    async def _take(self, load: Load, rank: int) -> None:
        left = len(self._alive)
        items = aiter(load)
        while left > 0 and await self._wants_more(load, rank):
            await self._take_one(items)
            left -= 1
        if left == 0:
            with contextlib.suppress(StopAsyncIteration):
                await anext(items)
            while self._holds_any(load.tables):
                await self._asked.wait()

    async def _take_one(self, items: AsyncIterator[tuple[str, Weight]]) -> None:
        """A frame of its own: nothing but the mapping refers to the tensor while the next one is waited for."""
        name, value = await anext(items)
        if self._shared_memory and isinstance(value, torch.Tensor):  # others see the raw weight cache, too
            value = value.clone()
        with self._changed:
            if name in self._alive and name not in self._held:
                self._hold(name, value)

    async def _wants_more(self, load: Load, rank: int) -> bool:
        """Waits until somebody asks for what has not come. False once nobody can any more."""
        while True:
            self._asked.clear()
            with self._changed:
                if self._all_here():
                    return False
                if self._wanted:
                    self._look_s = LOOK_S
                    return True
            try:
                async with asyncio.timeout(self._look_s):
                    await self._asked.wait()
            except TimeoutError:
                if load.failure is not None or load.waits_for == rank:
                    self._look_s = max(self._look_s / 2, LEAST_LOOK_S)
                    return True

    def _holds_any(self, tables: Iterable[str]) -> bool:
        self._asked.clear()
        with self._changed:
            return any(name in self._held for name in tables)


_dropped: set[WeightStream] = set()
"""Streams whose mapping nobody refers to any more, until they are over."""


def drop(stream: WeightStream) -> None:
    """Lets a stream end that nobody waits for."""
    _dropped.add(stream)
    stream.leave(None)
    if stream.over:
        _dropped.discard(stream)


def join_dropped() -> None:
    """Waits for the end of those: one load of a group comes after the other."""
    for stream in list(_dropped):
        stream.join()


_started: set[WeightStream] = set()
"""Streams until they are over."""


def _end_all() -> None:
    """At the end of the process, before the interpreter is taken down: threads that load beside that crash it."""
    streams = list(_started)
    for stream in streams:
        stream.leave(None)
    until_s = time.monotonic() + _EXIT_S
    for stream in streams:
        stream.join(max(0.0, until_s - time.monotonic()))


atexit.register(_end_all)
