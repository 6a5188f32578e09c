"""The scheduler: walks one rank's plan on the service's loop, in order, within its memory.

For each unit it waits for memory, then submits the unit's transfers to the reading threads, and hands units over in
plan order as they fill. Decisions are synchronous functions on the loop; only memory, scratch and free places in the
queue of reads are waited for.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, cast

from loader_service import logs
from loader_service.bridge import Channel
from loader_service.checkpoint.catalog import Shard
from loader_service.config.schema import ReadsConfig
from loader_service.errors import LoaderError, MemoryLimitError, ReadError, StateError, name_of, text_of
from loader_service.filling import Filling, Memory, OwnedUnit, Resources, SlotUnit, UnitT
from loader_service.memory.allocators import HostBuffer
from loader_service.memory.pool import Lease
from loader_service.planning.plan import RankPlan
from loader_service.transfers import BlockTransfer, CopyTransfer, Transfer

log = logs.logger("loader_service.scheduler")

QUEUED_A_THREAD = 4  # transfers submitted ahead for each reading thread: enough that none runs dry

WORK_AT_A_STRETCH_S = 0.001
REST_S = 0.001


@dataclass(slots=True)
class Progress:
    """Counters of one load on one rank; written on the service's loop, read by anyone."""

    payload_bytes: int = 0
    read_bytes: int = 0
    handed_bytes: int = 0  # of payload, wherever it came from: this rank's reads, its node, the cache
    tensors: int = 0


@dataclass(slots=True, eq=False)
class _Unit:
    item: OwnedUnit | SlotUnit | None
    memory: Memory
    outstanding: int = 1  # transfers not yet done, and one for the scheduler while it still submits


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    unit: _Unit
    transfer: Transfer
    memory: Lease | HostBuffer | None  # scratch memory, or the block that is copied from


class Scheduler(Generic[UnitT]):
    """Fills one form of consumption and hands it over through `channel`, which ends when all is handed over.

    Everything runs on the service's loop, except the transfers. After `stop` no thread writes into memory that anyone
    will use again, with one exception that is reported: a thread that is stuck in the kernel, left with its memory.
    """

    def __init__(
        self,
        plan: RankPlan,
        shards: tuple[Shard, ...],
        filling: Filling[UnitT],
        resources: Resources,
        channel: Channel[OwnedUnit | SlotUnit],
        *,
        reads: ReadsConfig,
        progress: Progress,
        on_progress: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._plan = plan
        self._shards = shards
        self._filling = filling
        self._resources = resources
        self._source = resources.source(shards, keeps=filling.keeps_copies)
        self._channel = channel
        self._reads = reads
        self._progress = progress
        self._on_progress = on_progress
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._pending: deque[_Unit] = deque()
        self._running: dict[concurrent.futures.Future[int], _Running] = {}
        self._places = asyncio.Semaphore(resources.thread_count * QUEUED_A_THREAD)
        self._scratch: asyncio.Queue[Lease] = asyncio.LifoQueue()  # what was used last is in the processor's cache
        self._scratch_leases: list[Lease] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._waits_for_memory_since: float | None = None
        self._stands: tuple[float | None, float] | None = None  # that wait, and since when the consumer waits as well
        self._worked_since_s = time.monotonic()
        self._all_submitted = False
        self._failed = False
        self._tasks: list[asyncio.Task[None]] = []
        self.shards_read: set[int] = set()

    @property
    def waits_for_memory(self) -> bool:
        """Whether it waits for memory of the budget: its next unit's, or scratch."""
        return self._waits_for_memory_since is not None

    def start(self, before: Callable[[], Awaitable[None]]) -> None:
        """`before` is done, in the background too, before anything is read."""
        self._tasks = [self._loop.create_task(self._produce(before)), self._loop.create_task(self._watch())]

    def fail(self, error: BaseException) -> None:
        """Stops what is queued and tells of `error`; reads in flight go on until `stop` waits for them."""
        if not self._failed:
            self._failed = True
            self._on_failure(error)
        self._cancel()

    def _finish_shared(self) -> None:
        if self._resources.shared is not None:
            self._resources.shared.finish()

    async def stop(self, grace_s: float) -> list[str]:
        """Cancels what is queued, waits up to `grace_s` for reads in flight, gives back all memory.

        Returns a line for each read that was stuck: its thread is abandoned and its memory never used again.
        """
        self._failed = True
        self._cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()  # a cancelled one keeps what it was at, and a report may keep this object
        stuck: list[str] = []
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            stuck = self._abandon_running()
        for unit in self._pending:
            if unit.memory is not None:
                unit.memory.release()
        self._pending.clear()
        for item in self._channel.drain():
            item.release()
        for lease in self._scratch_leases:
            lease.release()
        self._finish_shared()
        return stuck

    # Submitting

    async def _produce(self, before: Callable[[], Awaitable[None]]) -> None:
        try:
            await before()
            await self._lease_scratch()
            for unit in self._filling.units():
                await self._submit_unit(unit)
                await self._give_way()
            self._finish_shared()
            self._all_submitted = True
            self._hand_over()
        except Exception as error:  # noqa: BLE001 - whatever it is, the consumer must hear of it
            self.fail(_translated(error, "planning the reads"))

    async def _give_way(self) -> None:
        """Lets what was read meanwhile be handed over, and after a while a busy consumer have the interpreter.

        Another thread waits up to 5 ms for the interpreter's lock, unless this one sleeps; so it does for 1 ms, as
        long as the consumer has something to take.
        """
        now_s = time.monotonic()
        rests = now_s - self._worked_since_s > WORK_AT_A_STRETCH_S and not self._channel.consumer_waits
        await asyncio.sleep(REST_S if rests else 0)
        if rests:
            self._worked_since_s = time.monotonic()

    async def _lease_scratch(self) -> None:
        self._waits_for_memory_since = time.monotonic()
        for _ in range(self._filling.scratch_leases):
            lease = await self._resources.pool.lease(self._resources.pool.slot_bytes)
            self._scratch_leases.append(lease)
            self._scratch.put_nowait(lease)
        self._waits_for_memory_since = None

    async def _submit_unit(self, planned: UnitT) -> None:
        self._waits_for_memory_since = time.monotonic()
        memory = await self._filling.acquire(planned)
        self._waits_for_memory_since = None
        unit = _Unit(None, memory)
        self._pending.append(unit)
        unit.item, transfers = self._filling.prepare(planned, memory)
        for transfer in transfers:
            await self._places.acquire()
            self._submit(unit, transfer, await self._memory_for(transfer))
        self._settle(unit)

    async def _memory_for(self, transfer: Transfer) -> Lease | HostBuffer | None:
        """What a transfer needs beside its destination."""
        if isinstance(transfer, CopyTransfer):
            return await self._scratch.get()
        if isinstance(transfer, BlockTransfer):
            assert self._resources.shared is not None
            return await self._resources.shared.take(transfer.block)
        return None

    def _submit(self, unit: _Unit, transfer: Transfer, memory: Lease | HostBuffer | None) -> None:
        shard = self._shards[transfer.shard]
        source = self._source

        def run() -> int:
            if isinstance(transfer, CopyTransfer):
                assert isinstance(memory, Lease)
                return transfer.run(source, shard, memory.whole)
            if isinstance(transfer, BlockTransfer):
                assert isinstance(memory, HostBuffer)
                transfer.run(memory)
                return 0
            return transfer.run(source, shard)

        unit.outstanding += 1
        future = self._resources.threads.submit(run, label=transfer.tensor, path=shard.path, offset=transfer.start)
        self._running[future] = _Running(unit, transfer, memory)
        self._idle.clear()
        future.add_done_callback(self._post_done)

    def _post_done(self, future: concurrent.futures.Future[int]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._done, future)
        except RuntimeError:  # the service was closed over a stuck read that ended after all
            log.debug("a read ended after its service was closed")

    # What finished transfers lead to

    def _done(self, future: concurrent.futures.Future[int]) -> None:
        running = self._running.pop(future, None)
        if running is None:  # abandoned
            return
        self._places.release()
        if isinstance(running.memory, Lease):
            self._scratch.put_nowait(running.memory)
        elif isinstance(running.transfer, BlockTransfer):
            assert self._resources.shared is not None
            self._resources.shared.give_back(running.transfer.block)
        if not self._running:
            self._idle.set()
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            what = f"reading tensor '{running.transfer.tensor}'"
            path = self._shards[running.transfer.shard].path
            self.fail(_translated(error, what, path=path, tensor=running.transfer.tensor))
            return
        self._progress.handed_bytes += running.transfer.nbytes
        if read_bytes := future.result():
            self._progress.read_bytes += read_bytes
            self.shards_read.add(running.transfer.shard)
        self._on_progress()
        self._settle(running.unit)

    def _settle(self, unit: _Unit) -> None:
        unit.outstanding -= 1
        if unit.outstanding == 0:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._failed:
            return
        while self._pending and self._pending[0].outstanding == 0:
            item = self._pending.popleft().item
            if item is not None:
                item.filled()
                self._channel.put(item)
        if self._all_submitted and not self._pending:
            self._channel.end()

    # Ending

    def _cancel(self) -> None:
        current = asyncio.current_task(self._loop)
        for task in self._tasks:
            if task is not current:
                task.cancel()
        for future in list(self._running):
            future.cancel()

    def _abandon_running(self) -> list[str]:
        stuck = []
        for future, running in self._running.items():
            self._resources.threads.abandon(future)
            path = self._shards[running.transfer.shard].path
            stuck.append(f"{path} at offset {running.transfer.start} (tensor '{running.transfer.tensor}')")
            for lease in (running.memory, running.unit.memory):
                if isinstance(lease, Lease):
                    lease.abandon()
        self._running.clear()
        return stuck

    async def _watch(self) -> None:
        """Names reads that do not return, and a consumer that keeps all staging memory and waits for more."""
        limit_s = self._reads.stuck_after_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 4))
            self._on_progress()  # who is waited for changes although nothing is read
            for read in self._resources.threads.in_flight():
                if read.age_s > limit_s and read.future in self._running:
                    self.fail(
                        ReadError(
                            f"{read.path}: a read at offset {read.offset} for tensor '{read.label}' has not returned "
                            f"for {read.age_s:.1f} s: check the storage (reads.stuck_after_s is {limit_s:g})",
                            path=read.path,
                            tensor=read.label,
                        )
                    )
                    return
            if self._waits_in_vain_for(limit_s):
                shared, statistics = self._resources.shared, self._resources.pool.statistics()
                kept = statistics.leases_out + (shared.leases_out if shared is not None else 0)
                what = f"it keeps {kept}" if kept else f"a device still uses {statistics.leases_held}"
                self.fail(
                    StateError(
                        f"the consumer waits for more while {what} batches that hold all of staging.capacity_bytes: "
                        "leave each `with batch` before taking many more"
                    )
                )
                return

    def _waits_in_vain_for(self, limit_s: float) -> bool:
        """Whether both this and the consumer have waited so long, for memory and for what would fill it. A consumer
        that was busy for longer with what it has, and gives it back just now, is no reason."""
        since, shared = self._waits_for_memory_since, self._resources.shared
        consumer_waits = not self._running and self._channel.consumer_waits
        stands = since is not None and consumer_waits
        if shared is not None:
            shared.consumer_waits = consumer_waits and shared.waits
            if shared.waits:  # mostly for other ranks, which may take their time
                stands = stands and shared.waits_for_its_consumer
        now_s = time.monotonic()
        if not stands or self._stands is None or self._stands[0] != since:
            self._stands = (since, now_s) if stands else None
        return self._stands is not None and now_s - self._stands[1] > limit_s


def _translated(error: BaseException, what: str, *, path: str | None = None, tensor: str | None = None) -> LoaderError:
    if issubclass(type(error), LoaderError):  # `isinstance` may run code of the caller's own class
        return cast(LoaderError, error)
    cls = MemoryLimitError if issubclass(type(error), MemoryError) else ReadError
    translated = cls(f"{name_of(error)} while {what}: {text_of(error)}", path=path, tensor=tensor)
    translated.__cause__ = error
    return translated
