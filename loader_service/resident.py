"""The resident service: a process beside the workers of a node that keeps what they load."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Hashable
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

from loader_service import logs
from loader_service.agreement.group import GroupChoice
from loader_service.bridge import ServiceLoop, uninterrupted
from loader_service.config.schema import ServiceConfig
from loader_service.engine import Engine
from loader_service.errors import ConfigError, LoaderError, StateError, text_of
from loader_service.keeper import KeepRun, Purpose, session_name
from loader_service.keeping import wire
from loader_service.keeping.content import HeadersRead, KeptMemory, Ranges
from loader_service.keeping.index import KeptFile, KeptIndex
from loader_service.keeping.reception import Reception
from loader_service.keeping.shape import ranks_of
from loader_service.keeping.status import ServedLoad, ServiceStatus
from loader_service.memory.held import ByteRanges
from loader_service.planning.plan import LoadPlan
from loader_service.reading.reader import Storage
from loader_service.sizes import format_size
from loader_service.version import VERSION

log = logs.logger("loader_service.serve")

_BEAT_S: Final = 0.25
_LAG_KEPT_S: Final = 60.0


class ResidentService:
    """Keeps loads for the workers of its node: `async with ResidentService(config) as service: await service.fill()`.

    One a node, or several; `group` says which services act together, as for `LoaderService`. `ranks` is how many
    workers there are on all nodes (default: the mesh's product, else as many as services). A node's share of them is as
    large as its share of the services, which keep equal parts of what these workers take. Workers attach with `attach`,
    also while it fills. Raises ConfigError before anything starts.
    """

    def __init__(
        self,
        config: ServiceConfig,
        group: GroupChoice = None,
        *,
        ranks: int | None = None,
        storage: Storage | None = None,
    ) -> None:
        if not config.serve.keep and not config.serve.warm:
            raise ConfigError("serve: nothing is to be kept or warmed; name loads in serve.keep")
        self.config = config
        self._group = group
        self._storage = storage
        self._headers = HeadersRead()
        mesh_ranks = math.prod(config.mesh.values()) if config.mesh is not None else None
        self._ranks = ranks or mesh_ranks
        self._loop: ServiceLoop | None = None
        self._engine: Engine | None = None
        self._reception: Reception | None = None
        self._place = (0, 1)  # rank and number of services
        self._number = 0  # among those of this node
        self._loads = {load: ServedLoad(load) for load, _ in self._purposes()}
        self._run: KeepRun | None = None
        self._kept: list[KeptMemory] = []
        self._had: tuple[dict[Hashable, ByteRanges], dict[Hashable, ByteRanges]] = ({}, {})  # anything; tables
        self._ready = False
        self._used = self._filling = False
        self._began_s = self._beat_s = time.monotonic()
        self._lags: list[tuple[float, float]] = []
        self._beating: asyncio.Task[None] | None = None
        self._lock = threading.Lock()

    def _purposes(self) -> list[tuple[str, Purpose]]:
        serve = self.config.serve
        rest = [name for name in self.config.loads if name not in serve.keep]
        warm = rest if serve.warm == "auto" else serve.warm
        return [*((load, "keep") for load in serve.keep), *((load, "warm") for load in warm)]

    async def __aenter__(self) -> Self:
        if self._used:
            raise StateError("the service was opened before: make a new one to open it again")
        self._used = True
        self._began_s = self._beat_s = time.monotonic()
        self._loop = ServiceLoop()
        try:
            await self._loop.run(self._start())
        except BaseException:
            await self._leave(None)
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._leave(exc)

    async def _leave(self, error: BaseException | None) -> None:
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            await loop.run(self._close(error), then_stop=True)
        finally:
            await loop.ended()

    async def fill(self) -> None:
        """Plans, agrees, reads; collective. Returns once the services of all ranks have everything; then never again.

        Raises on every service or on none, with one cause. MemoryLimitError if shared host tables do not fit; a load
        that memory does not admit whole is kept as far as it does, and says so.
        """
        loop = self._entered
        if self._filling or self._ready:
            raise StateError("the service was filled before, or is being filled: once is enough")
        self._filling = True
        try:
            await loop.run(self._fill())
        except BaseException as error:
            if self._run is not None:
                self._run.attach_verdict(error)
            raise
        finally:
            self._filling = False

    def status(self) -> ServiceStatus:
        """What the service is at; from any thread."""
        engine, reception, now_s = self._engine, self._reception, time.monotonic()
        rank, world_size = self._place
        loads = dict(self._loads)
        if (run := self._run) is not None:
            loads[run.status.load] = run.status
        late_s = max(0.0, now_s - self._beat_s - _BEAT_S)
        with self._lock:
            worst_s = max([lag_s for _, lag_s in self._lags], default=0.0)
        ranks = ranks_of(rank, world_size, self._ranks or world_size)
        return ServiceStatus(
            version=VERSION,
            rank=rank,
            world_size=world_size,
            node=engine.node if engine is not None else "",
            ranks_served=(ranks.start, ranks.stop),
            socket=wire.shown(wire.address_of(self.config, self._number)),
            ready=self._ready,
            uptime_s=now_s - self._began_s,
            late_s=late_s,
            loop_lag_s=max(late_s, worst_s),
            loads=tuple(loads.values()),
            workers=reception.attached if reception is not None else 0,
            worker_loads=reception.loads if reception is not None else (),
            attached_total=reception.attached_total if reception is not None else 0,
            failed_total=reception.failed_total if reception is not None else 0,
        )

    @property
    def failure(self) -> LoaderError | None:
        """The common verdict that ended the filling, from the moment it arrives."""
        return self._run.failure if self._run is not None else None

    @property
    def first_session(self) -> str:
        """Where other services hear of one that cannot begin."""
        return session_name(*self._purposes()[0])

    async def plan(self, load: str) -> LoadPlan:
        """Every rank's plan of a load, from the headers alone."""
        loop = self._entered
        self.config.load(load)
        return await loop.run(self._opened.plan(load))

    @property
    def _entered(self) -> ServiceLoop:
        if self._loop is None:
            raise StateError("the service is not open: enter it with `async with` first")
        return self._loop

    # On the service's loop

    @property
    def _opened(self) -> Engine:
        assert self._engine is not None
        return self._engine

    async def _start(self) -> None:
        self._beating = asyncio.ensure_future(self._beat())
        engine = self._engine = Engine(
            self.config, self._group, None, storage=self._storage, ranks=self._ranks, headers=self._headers
        )
        await engine.start()
        if not self.config.serve.keep:
            log.warning("serve.keep names no load: nothing is kept, files are only brought into the page cache")
        self._place = engine.group.rank, engine.group.world_size
        self._ranks = engine.ranks
        if engine.group.world_size > engine.ranks:
            raise ConfigError(
                f"{engine.group.world_size} services are more than the {engine.ranks} workers that the mesh, or "
                "--ranks, is for"
            )

    async def _beat(self) -> None:
        """How late this loop is."""
        while True:
            self._beat_s = time.monotonic()
            await asyncio.sleep(_BEAT_S)
            now_s = time.monotonic()
            with self._lock:
                self._lags = [(at_s, lag_s) for at_s, lag_s in self._lags if now_s - at_s < _LAG_KEPT_S]
                self._lags.append((now_s, now_s - self._beat_s - _BEAT_S))

    async def _fill(self) -> None:
        engine = self._opened
        for load, purpose in self._purposes():
            self._run = run = KeepRun(
                engine,
                load,
                purpose,
                purposes=self._purposes(),
                headers=self._headers,
                had=self._had,
                on_met=self._on_met,
            )
            try:
                new = await run.run()
            except BaseException as error:
                run.status = replace(run.status, reason=text_of(error))
                raise
            finally:
                self._loads[load] = run.status
            self._kept += new
            streamed, kept_tables = run.kept_on_node
            for had, new_ranges in ((0, streamed), (0, kept_tables), (1, kept_tables)):
                _note(self._had[had], new_ranges)
            log.info("load '%s': %s", load, _in_words(run.status), extra={"load": load})
        await self._open_reception()

    async def _on_met(self, number: int, services: int) -> None:
        self._number = number
        if self._reception is None:
            address = wire.address_of(self.config, number)
            listening = await self._opened.in_thread(lambda: wire.listen(address), what="opening a socket for workers")
            with logs.working_on(logs.Subject(None, *self._place)):  # it outlives the load that is being kept
                self._reception = Reception(listening, services, self._progress)

    def _progress(self) -> str:
        done = sum(load.read_bytes for load in self._loads.values())
        running = self._run.status if self._run is not None else None
        if running is None:
            return "it starts"
        done += running.read_bytes if self._loads[running.load].state != "ready" else 0
        return f"load '{running.load}' is {running.state}, {format_size(done)} read"

    async def _open_reception(self) -> None:
        files: list[KeptFile] = []
        for number, kept in enumerate(self._kept):
            files += [replace(file, segment=number) for file in kept.described]
        shared = frozenset(number for number, kept in enumerate(self._kept) if kept.shared)
        index = KeptIndex(tuple(kept.memory.nbytes for kept in self._kept), shared, tuple(files))
        memory = await self._opened.in_thread(index.in_memory, what="writing down what is kept")
        assert self._reception is not None
        self._reception.open(memory, [kept.memory for kept in self._kept])
        self._ready = True

    async def _close(self, error: BaseException | None) -> None:
        self._ready = False
        engine = self._engine
        try:
            if self._reception is not None:
                await self._reception.close()
            if engine is not None:
                await engine.after_the_rest(self._give_back, within_s=self.config.agreement.grace_s)
        finally:
            if self._beating is not None:
                self._beating.cancel()
            if engine is not None:
                await uninterrupted(engine.close(error))

    def _give_back(self) -> None:
        """The socket's file, and what is kept: hundreds of GiB take the system seconds."""
        if self._reception is not None:
            wire.unlink(wire.address_of(self.config, self._number))
        for kept in self._kept:
            kept.memory.close()


def _in_words(load: ServedLoad) -> str:
    if load.kept == "page cache":
        return f"{format_size(load.read_bytes)} in the page cache"
    text = f"{load.kept} kept, {format_size(load.kept_bytes)}"
    return text + (f" ({load.reason})" if load.reason else "")


def _note(had: dict[Hashable, ByteRanges], new: Ranges) -> None:
    """Also what other services of the node keep: all of them leave out the same of later loads."""
    for state, ranges in new.items():
        before = had.get(state)
        had[state] = ranges if before is None else before.joined(ranges)
