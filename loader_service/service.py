"""The public face: `LoaderService` for asyncio, its blocking twin, and `iter_weights`."""

from __future__ import annotations

import os
import warnings
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from loader_service.agreement.group import GroupChoice
from loader_service.bridge import ServiceLoop
from loader_service.config.schema import ServiceConfig
from loader_service.config.yaml_file import config_from_dict
from loader_service.engine import Engine
from loader_service.errors import ConfigError, StateError
from loader_service.memory.pinning import Pinner
from loader_service.planning.plan import LoadPlan
from loader_service.reading.reader import Storage
from loader_service.rows import STANDALONE_CHUNK_BYTES, STANDALONE_THREADS, RowReader, SharedRowSource
from loader_service.run import LoadRun
from loader_service.stream import BlockingLoad, Load, Weight
from loader_service.tables import HostTable, TableRun


class _Service:
    """What both faces share: the configuration, the loop, the engine, and one open load at a time."""

    def __init__(
        self,
        config: ServiceConfig,
        group: GroupChoice = None,
        coords: Mapping[str, int] | None = None,
        *,
        storage: Storage | None = None,
        pinner: Pinner | None = None,
        attach: bool = False,
    ) -> None:
        if not isinstance(config, ServiceConfig):
            raise ConfigError(
                f"a service takes a ServiceConfig, not a {type(config).__name__}: pass ls.load_config(path) or "
                "ls.config_from_dict(...)"
            )
        self.config = config
        self._group = group
        self._coords = coords
        self._storage = storage
        self._pinner = pinner
        self._attach = attach
        self._loop: ServiceLoop | None = None
        self._engine: Engine | None = None

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._opened()[1].group.rank

    @property
    def world_size(self) -> int:
        """How many ranks act together."""
        return self._opened()[1].group.world_size

    def _opened(self) -> tuple[ServiceLoop, Engine]:
        if self._loop is None or self._engine is None:
            raise StateError("the service is not open: enter it with `with` or `async with` first")
        return self._loop, self._engine

    def _check_closed(self) -> None:
        if self._loop is not None:
            raise StateError("the service is open already: make a new one to open it again")

    def _create(self) -> tuple[ServiceLoop, Engine]:
        self._loop = ServiceLoop()
        self._engine = Engine(
            self.config, self._group, self._coords, storage=self._storage, pinner=self._pinner, attach=self._attach
        )
        return self._loop, self._engine

    def _new_run(self, load: str) -> tuple[LoadRun, ServiceLoop]:
        loop, engine = self._opened()
        engine.check_no_open_load()
        return LoadRun(engine, load), loop

    def __del__(self) -> None:
        if getattr(self, "_loop", None) is not None:
            warnings.warn("a LoaderService was dropped without being closed", ResourceWarning, stacklevel=2)

    def _forget(self) -> ServiceLoop | None:
        loop, self._loop, self._engine = self._loop, None, None
        return loop


class LoaderService(_Service):
    """Loads a checkpoint beside inference workers. `async with LoaderService(config) as service`.

    `group` says who acts together. None: torch.distributed's default group if it is initialised, else this process
    alone, which is a ConfigError if WORLD_SIZE or OMPI_COMM_WORLD_SIZE is above 1; "solo": alone, whatever else; a
    `ProcessGroup`: its members only; a `Rendezvous`. `coords` is this rank's place in the mesh, `{axis: number}`, given
    on every rank or on none; without it ranks are placed row-major. `storage` and `pinner` replace what touches the
    disk and the accelerator, for tests; `attach`: as the function of that name does. Usable under any event loop; the
    loader runs on a loop of its own. Raises ConfigError before anything starts.
    """

    async def __aenter__(self) -> Self:
        self._check_closed()
        try:
            loop, engine = self._create()
            await loop.run(engine.start())
        except BaseException as error:
            if self._engine is not None:
                await self.__aexit__(type(error), error, None)
            elif (made := self._forget()) is not None:
                made.request_stop()
                await made.ended()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        loop, engine = self._opened()
        try:
            await loop.run(engine.close(exc), then_stop=True)
        finally:
            self._forget()
            await loop.ended()

    async def plan(self, load: str) -> LoadPlan:
        """Every rank's plan of a load, from the headers alone. Local: other ranks are not asked. With `coords`, other
        ranks' parts are known once a load was opened."""
        loop, engine = self._opened()
        return await loop.run(engine.plan(load))

    def open(self, load: str) -> Load:
        """The load `load`, to be entered with `async with`; collective.

        All ranks enter the same loads in the same order. One open load for each service, entered and left once;
        StateError otherwise.
        """
        return Load(*self._new_run(load))

    async def host_table(self, load: str, name: str) -> HostTable:
        """Fills the host-resident table `name` of a load and returns it; collective, also for ranks without rows of it.

        The rule decides the layout and the split the rows. Memory is admitted on all ranks before any is allocated. May
        be called while a load is open, in the same order on all ranks. Raises on all ranks or on none.
        """
        loop, engine = self._opened()
        run = TableRun(engine, load, name)
        try:
            return await loop.run(run.run())
        except BaseException as error:
            run.attach_verdict(error)  # the caller's own cancellation, which the run has not seen
            raise

    async def iter_weights(self, load: str) -> AsyncGenerator[tuple[str, Weight], None]:
        """Opens a load and yields its (name, tensor) pairs, in plan order; the load is left at the end.

        Tensors own their memory. With `cache.capacity_bytes` they share it with later loads: nobody may write to them.
        An error in the body of the loop over it is no error here: the generator is abandoned, which is a `break`, and
        the other ranks are told only if the service is left with that error first. `open` where they should hear of it.
        """
        async with Load(*self._new_run(load), in_generator=True) as opened:
            async for item in opened:
                yield item

    @classmethod
    def blocking(
        cls,
        config: ServiceConfig,
        group: GroupChoice = None,
        coords: Mapping[str, int] | None = None,
        *,
        storage: Storage | None = None,
        pinner: Pinner | None = None,
        attach: bool = False,
    ) -> BlockingLoaderService:
        """The same service for synchronous code, also under a running loop: `with LoaderService.blocking(...)`."""
        return BlockingLoaderService(config, group, coords, storage=storage, pinner=pinner, attach=attach)


def attach(config: ServiceConfig, group: GroupChoice = None, coords: Mapping[str, int] | None = None) -> LoaderService:
    """A service for a worker beside which `loader-service serve` runs, on the same node, with the same checkpoint.

    As `LoaderService(config, group, coords)`, but what the resident service keeps is not read: tensors and shared host
    tables are made over its memory, all else is copied from there. Bytes are the same with and without it. What is
    written to a tensor is this process's own; a shared host table is memory of all workers, as ever. The first load
    waits, at most `agreement.start_timeout_s`, for a service that still fills.

    Where none answers, or it has ended, `serve.if_absent` decides: read the files here, with a warning and a line in
    the report (`policies["service"]`), or fail on all ranks with AttachError.
    """
    return LoaderService(config, group, coords, attach=True)


def attach_blocking(
    config: ServiceConfig, group: GroupChoice = None, coords: Mapping[str, int] | None = None
) -> BlockingLoaderService:
    """As `attach`, for synchronous code: `with ls.attach_blocking(config) as service`."""
    return BlockingLoaderService(config, group, coords, attach=True)


class BlockingLoaderService(_Service):
    """`LoaderService` without await, for engines' synchronous code: what `LoaderService.blocking(...)` makes."""

    def __enter__(self) -> Self:
        self._check_closed()
        try:
            loop, engine = self._create()
            loop.run_blocking(engine.start())
        except BaseException as error:
            if self._engine is not None:
                self.__exit__(type(error), error, None)
            elif (made := self._forget()) is not None:
                made.request_stop()
                made.ended_blocking()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        loop, engine = self._opened()
        if loop.must_not_wait:
            self._forget()
            loop.close_from_inside(engine.close(exc), then_stop=True)
            return
        try:
            loop.run_blocking(engine.close(exc), then_stop=True)
        finally:
            self._forget()
            loop.ended_blocking()

    def plan(self, load: str) -> LoadPlan:
        """As `LoaderService.plan`, without await."""
        loop, engine = self._opened()
        return loop.run_blocking(engine.plan(load))

    def open(self, load: str) -> BlockingLoad:
        """As `LoaderService.open`, to be entered with `with`."""
        return BlockingLoad(*self._new_run(load))

    def host_table(self, load: str, name: str) -> HostTable:
        """As `LoaderService.host_table`, without await."""
        loop, engine = self._opened()
        run = TableRun(engine, load, name)
        try:
            return loop.run_blocking(run.run())
        except BaseException as error:
            run.attach_verdict(error)
            raise

    def iter_weights(self, load: str) -> Iterator[tuple[str, Weight]]:
        """As `LoaderService.iter_weights`; abandoning the generator leaves the load as a `break` does."""
        with BlockingLoad(*self._new_run(load), in_generator=True) as opened:
            yield from opened


def iter_weights(config: ServiceConfig, load: str, group: GroupChoice = None) -> Iterator[tuple[str, Weight]]:
    """Opens a service for one load and yields its (name, tensor) pairs; everything is closed at the end.

    Tensors own their memory. With `cache.capacity_bytes` they share it with later loads: nobody may write to them.
    """
    with LoaderService.blocking(config, group) as service:
        yield from service.iter_weights(load)


def host_resident_weights(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], patterns: Sequence[str]
) -> Iterator[tuple[str, Weight]]:
    """Row sources for the names of some safetensors files that match a pattern, tensors that own their memory for the
    others, in plan order. For this process alone.

    `files`: a folder, one file, or several files. `patterns` are globs over whole names; `*` crosses dots. The sources
    live on after the iteration, and each ends when it is gone; no byte of a table is read before its source is.
    """
    paths = [os.fspath(files)] if isinstance(files, str | os.PathLike) else [os.fspath(path) for path in files]
    rules = [{"match": pattern, "host_resident": {"layout": "per_rank"}} for pattern in patterns]
    config = config_from_dict(
        {"checkpoint": {"path": paths[0] if len(paths) == 1 else paths}, "loads": {"all": {"rules": rules}}}
    )
    reader: RowReader | None = None
    with LoaderService.blocking(config, "solo") as service, service.open("all") as load:
        for name, value in load:
            if isinstance(value, SharedRowSource):
                reader = reader or RowReader.standalone(
                    threads=STANDALONE_THREADS, chunk_bytes=STANDALONE_CHUNK_BYTES, drop_page_cache=False
                )
                yield name, value.over(reader)
            else:
                yield name, value
