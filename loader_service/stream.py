"""What a consumer holds: a load in its async and its blocking face.

Both faces take filled units from the run's channel on the consumer's own thread, and make tensors there, one by one:
nothing is built ahead, and no item costs a trip to the service's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeAlias, TypeVar

import torch

from loader_service import logs
from loader_service.batches import Batch
from loader_service.bridge import ChannelClosed, ServiceLoop
from loader_service.destinations import check_destinations
from loader_service.errors import LoaderError, StateError
from loader_service.filling import OwnedUnit, SlotUnit, TensorSpec, tensor_spec
from loader_service.memory.events import current_streams
from loader_service.planning.plan import LoadPlan
from loader_service.report import LoadReport
from loader_service.rows import RowSource
from loader_service.run import LoadRun
from loader_service.timeline import Counters

YIELD_AFTER_S = 0.001  # an async consumer that never waits for data still lets its loop run this often

T = TypeVar("T")

Weight: TypeAlias = Any
"""What a load hands over for a name: a `torch.Tensor`, or a `RowSource` where a rule says `host_resident`.

Not a union: nearly all loads have tensors only, and whoever writes such a rule knows for which names.
"""


class _Taking:
    """The consumer's side of a run, without any waiting: what lies ready is taken, counted and wrapped."""

    def __init__(self, run: LoadRun) -> None:
        self._run = run
        self._unit: OwnedUnit | None = None
        self._streamed = 0
        self._tables: Iterator[tuple[str, RowSource]] | None = None
        self._tables_left = 0
        self._has_tables = False
        self._last_tensor = -1

    def tensor(self) -> tuple[str, Weight] | None:
        """The next (name, tensor or row source), or None if the consumer has to wait. ChannelClosed at the end."""
        self._run.channel.check()
        if self._has_tables and (table := self._due_table()) is not None:
            return table
        while True:
            if self._unit is None:
                unit = self._run.channel.get_nowait()
                if unit is None:
                    return None
                assert isinstance(unit, OwnedUnit)
                self._unit = unit
            popped = self._unit.pop()
            if popped is not None:
                self._streamed += 1
                self._tables = None
                self._run.progress.tensors += 1
                self._run.progress.payload_bytes += popped[1].nbytes
                return popped
            self._unit = None

    def begin_items(self) -> None:
        """Items are tensors and tables: all of both are to be taken."""
        self._tables_left = len(self._run.tables.sources) if self._run.tables is not None else 0
        self._has_tables = self._tables_left > 0

    def _due_table(self) -> tuple[str, RowSource] | None:
        """A host-resident table whose turn it is; no byte of it is read before the consumer does."""
        if self._run.tables is None:
            return None
        if self._tables is None:
            self._tables = self._run.tables.after(self._streamed)
        table = next(self._tables, None)
        if table is not None:
            self._tables_left -= 1
            self._run.progress.tensors += 1
        return table

    def batch(self) -> Batch | None:
        """The next batch, or None if the consumer has to wait for it. ChannelClosed at the end."""
        unit = self._run.channel.get_nowait()
        if unit is None:
            return None
        assert isinstance(unit, SlotUnit)
        progress = self._run.progress
        for place in unit.placed:
            if place.tensor != self._last_tensor:
                self._last_tensor = place.tensor
                progress.tensors += 1
            itemsize = unit.plan.itemsize(place.tensor)
            progress.payload_bytes += sum(math.prod(view.shape) * itemsize for view in place.views)
        return Batch(unit)

    def close(self) -> None:
        """Ends the taking: notes whether everything was taken, gives back what was not."""
        taken = self._tables_left == 0 and (self._unit is None or self._unit.empty)
        self._run.exhausted = self._run.channel.over and taken
        if self._unit is not None:
            self._unit.release()
            self._unit = None


class _Face:
    """What both faces of a load share: the plan, the specs, the report, and one consumption for each open."""

    def __init__(self, run: LoadRun, loop: ServiceLoop, *, in_generator: bool = False) -> None:
        self._run = run
        self._loop = loop
        self._taking = _Taking(run)
        self._claimed = False
        self._exited = in_generator  # which leaves it, however late it is ended

    @property
    def name(self) -> str:
        """The load's name in the configuration."""
        return self._run.name

    @property
    def plan(self) -> LoadPlan:
        """The plan that all ranks agreed on."""
        return self._run.plan

    @property
    def report(self) -> LoadReport:
        """What this rank did: so far while the load is open, finally once it was left."""
        return self._run.report()

    @property
    def counters(self) -> Counters:
        """What this rank is at, at this moment: bytes read, filled and taken, reads in flight, who waits for whom. For
        any thread that watches; it costs the load nothing but that look."""
        return self._run.counters()

    @property
    def failure(self) -> LoaderError | None:
        """What ended the load on all ranks, as soon as their common verdict is known, before anything is cleaned up.

        Its `record()` is the root cause. None while all is well, and after a success.
        """
        return self._run.failure

    @property
    def waits_for(self) -> int | None:
        """Where ranks of a node share memory: the rank that this one waits for now, since it reads slowly, or since its
        consumer has not given back what others need room for (then it may be this rank). None while nobody waits."""
        return self._run.slowest

    @property
    def done_by_rank(self) -> Mapping[int, tuple[int, int]]:
        """On rank 0, by rank: how many payload bytes lay ready for its consumer or were taken, and of how many, as it
        said in its last heartbeat, a second or two ago while all is well. Ranks that have no plan yet are not in it.
        Empty on the other ranks, and on one that is alone."""
        return self._run.done_by_rank

    @property
    def tables(self) -> Mapping[str, RowSource]:
        """This rank's host-resident tables by name, in plan order: sources to read rows from, also while the load is
        consumed, and until the service closes. StateError before the load is entered."""
        self._run.plan  # noqa: B018 - raises
        assert self._run.tables is not None
        return self._run.tables.sources

    @property
    def succeeded(self) -> bool:
        """Whether all ranks have succeeded, as soon as it is known: also where leaving is then cut short."""
        return self._run.succeeded

    def spec(self, name: str) -> TensorSpec:
        """How this rank's tensor `name` comes from the whole one. KeyError if this rank does not take it."""
        plan = self._run.rank_plan
        i = plan.index_of(name)
        if i is None:
            raise KeyError(f"load '{self.name}': tensor '{name}' is not among those that this rank takes")
        return tensor_spec(plan, i)

    def _begin(self, fill: Callable[[], None]) -> None:
        """Starts the one consumption of this open; what goes wrong then reaches the consumer through the channel."""
        self._run.check_open()
        if self._claimed:
            raise StateError(
                f"load '{self.name}' is consumed already: iterate, take batches or call into(), once for each open"
            )
        self._claimed = True

        def start() -> None:
            with logs.working_on(self._run.subject):
                try:
                    fill()
                except Exception as error:  # noqa: BLE001 - the consumer raises it
                    self._run.channel.fail(error)

        self._loop.post(start)

    def _begin_into(self, destinations: Mapping[str, torch.Tensor]) -> None:
        self._run.check_open()
        check_destinations(self._run.rank_plan, destinations)
        streams = current_streams(tensor.device for tensor in destinations.values())
        self._begin(lambda: self._run.reading.fill_into(destinations, streams))

    @contextlib.contextmanager
    def _verdict_attached(self) -> Iterator[None]:
        """For errors of the caller's side, such as its cancellation, which the run has not seen."""
        try:
            yield
        except BaseException as error:
            self._run.attach_verdict(error)
            raise

    def _filled(self, destinations: Mapping[str, torch.Tensor]) -> None:
        self._run.progress.tensors += len(destinations)
        self._run.progress.payload_bytes += sum(tensor.nbytes for tensor in destinations.values())

    def __del__(self) -> None:
        if not getattr(self, "_exited", True) and self._run.open:
            warnings.warn(f"load '{self.name}' was dropped without being left", ResourceWarning, stacklevel=2)


class Load(_Face):
    """An open load, for asyncio. `async with service.open(name) as load`: entering and leaving are collective.

    Iterate it for `(name, tensor)` with tensors that own their memory, in plan order (file name, offset), the same on
    every rank. Tensors of 1 MiB and more have memory of their own; smaller ones share arenas of at most 1 MiB, so one
    small tensor that is kept keeps no more than that alive. With `cache.capacity_bytes` tensors share their memory with
    the raw weight cache and with later loads instead, and are read-only by contract: nobody may write to them.

    A clean `break` is a success of this rank; an exception, also cancellation, fails the load on every rank. It comes
    out as it is, with a note of what all ranks found.
    """

    async def __aenter__(self) -> Self:
        self._run.begin()
        with self._verdict_attached():
            try:
                await self._loop.run(self._run.enter())
            except BaseException as error:
                if self._run.open:  # cancelled just as it had succeeded
                    await self._loop.run(self._run.leave(error))
                raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exited = True
        if not self._run.open:  # the service was closed first, and has left it
            return
        self._taking.close()
        with self._verdict_attached():
            await self._loop.run(self._run.leave(exc))

    def __aiter__(self) -> AsyncIterator[tuple[str, Weight]]:
        """(name, tensor) in plan order, read-only by contract where the raw weight cache is on.

        Raises StateError if the load was consumed already.
        """
        self._begin(lambda: self._run.reading.fill_owned())
        self._taking.begin_items()
        return _AsyncItems(self._run, self._taking.tensor)

    def batches(self) -> AsyncIterator[Batch]:
        """Leased staging memory, for consumers that copy to a device: `async for batch in load.batches()`.

        Tensors larger than a staging slot come in pieces. Raises StateError if the load was consumed already. Leave
        each batch before the load: where it shares memory with other ranks, leaving it with one in use is a StateError.
        """
        self._begin(lambda: self._run.reading.fill_slots())
        return _AsyncItems(self._run, self._taking.batch)

    async def into(self, destinations: Mapping[str, torch.Tensor]) -> None:
        """Reads exactly these tensors, straight into the caller's memory; CPU or CUDA, any strides.

        Shapes (this rank's), dtypes and names are checked before any byte moves: DestinationError. After an error the
        tensors' contents are undefined. Copies to a CUDA device are queued on the stream that is current here.
        """
        self._begin_into(destinations)
        try:
            await self._run.channel.wait()
        except ChannelClosed:
            self._filled(destinations)


class BlockingLoad(_Face):
    """An open load, for synchronous code: `with service.open(name) as load`, then as `Load`, without await."""

    def __enter__(self) -> Self:
        self._run.begin()
        with self._verdict_attached():
            try:
                self._loop.run_blocking(self._run.enter())
            except BaseException as error:
                if self._run.open:
                    self._loop.run_blocking(self._run.leave(error))
                raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exited = True
        if not self._run.open:  # the service was closed first, and has left it
            return
        self._taking.close()
        if self._loop.must_not_wait:
            self._loop.close_from_inside(self._run.leave(exc))
            return
        with self._verdict_attached():
            self._loop.run_blocking(self._run.leave(exc))

    def __iter__(self) -> Iterator[tuple[str, Weight]]:
        self._begin(lambda: self._run.reading.fill_owned())
        self._taking.begin_items()
        return _Items(self._run, self._taking.tensor)

    def batches(self) -> Iterator[Batch]:
        """As `Load.batches`, without await."""
        self._begin(lambda: self._run.reading.fill_slots())
        return _Items(self._run, self._taking.batch)

    def into(self, destinations: Mapping[str, torch.Tensor]) -> None:
        """As `Load.into`, without await."""
        self._begin_into(destinations)
        try:
            self._run.channel.wait_blocking()
        except ChannelClosed:
            self._filled(destinations)


class _AsyncItems(Generic[T]):
    """Items as an async iterator. A cancelled step takes nothing, an error comes again at every further step."""

    def __init__(self, run: LoadRun, take: Callable[[], T | None]) -> None:
        self._run = run
        self._take = take
        self._last_yield_s = time.perf_counter()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if time.perf_counter() - self._last_yield_s > YIELD_AFTER_S:
            await asyncio.sleep(0)
            self._last_yield_s = time.perf_counter()
        try:
            while (item := self._take()) is None:
                await self._run.channel.wait()
                self._last_yield_s = time.perf_counter()
        except ChannelClosed:
            raise StopAsyncIteration from None
        return item


class _Items(Generic[T]):
    """Items as an iterator; see `_AsyncItems`."""

    def __init__(self, run: LoadRun, take: Callable[[], T | None]) -> None:
        self._run = run
        self._take = take

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            while (item := self._take()) is None:
                self._run.channel.wait_blocking()
        except ChannelClosed:
            raise StopIteration from None
        return item
