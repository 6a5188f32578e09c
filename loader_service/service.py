"""The public face: `LoaderService` for asyncio, its blocking twin, and `iter_weights`."""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator, Iterator, Mapping
from types import TracebackType
from typing import NoReturn, Self

import torch

from loader_service.agreement.group import GroupChoice
from loader_service.bridge import ServiceLoop
from loader_service.config.schema import ServiceConfig
from loader_service.engine import Engine
from loader_service.errors import ConfigError, StateError
from loader_service.memory.pinning import Pinner
from loader_service.planning.plan import LoadPlan
from loader_service.reading.reader import Storage
from loader_service.run import LoadRun
from loader_service.stream import BlockingLoad, Load


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
        self._engine = Engine(self.config, self._group, self._coords, storage=self._storage, pinner=self._pinner)
        return self._loop, self._engine

    def _new_run(self, load: str) -> tuple[LoadRun, ServiceLoop]:
        loop, engine = self._opened()
        engine.check_no_open_load()
        return LoadRun(engine, load), loop

    def host_table(self, load: str, name: str) -> NoReturn:
        """Host-resident tables are not in this version: raises ConfigError."""
        raise ConfigError(f"this version does not have host tables: load '{load}' reads '{name}' as an ordinary tensor")

    def __del__(self) -> None:
        if getattr(self, "_loop", None) is not None:
            warnings.warn("a LoaderService was dropped without being closed", ResourceWarning, stacklevel=2)

    def _forget(self) -> ServiceLoop | None:
        loop, self._loop, self._engine = self._loop, None, None
        return loop


class LoaderService(_Service):
    """Loads a checkpoint beside inference workers. `async with LoaderService(config) as service`.

    `group` says who acts together: None (torch.distributed's default group if it is initialised, alone otherwise),
    "solo", a `ProcessGroup`, or a `Rendezvous`. `coords` overrides this rank's place in the mesh, `{axis: number}`.
    `storage` and `pinner` replace what touches the disk and the accelerator. Usable under any event loop; the loader
    runs on a loop of its own. Raises ConfigError before anything starts.
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
        """Every rank's plan of a load, from the headers alone. Local: other ranks are not asked."""
        loop, engine = self._opened()
        return await loop.run(engine.plan(load))

    def open(self, load: str) -> Load:
        """The load `load`, to be entered with `async with`; collective. One open load for each service."""
        return Load(*self._new_run(load))

    async def iter_weights(self, load: str) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Opens a load and yields its (name, tensor) pairs, in plan order; the load is left at the end.

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
    ) -> BlockingLoaderService:
        """The same service for synchronous code, also under a running loop: `with LoaderService.blocking(...)`."""
        return BlockingLoaderService(config, group, coords, storage=storage, pinner=pinner)


class BlockingLoaderService(_Service):
    """`LoaderService` without await, for engines' synchronous code."""

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

    def iter_weights(self, load: str) -> Iterator[tuple[str, torch.Tensor]]:
        """As `LoaderService.iter_weights`; abandoning the generator leaves the load as a `break` does."""
        with BlockingLoad(*self._new_run(load), in_generator=True) as opened:
            yield from opened


def iter_weights(config: ServiceConfig, load: str, group: GroupChoice = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Opens a service for one load and yields its (name, tensor) pairs; everything is closed at the end."""
    with LoaderService.blocking(config, group) as service:
        yield from service.iter_weights(load)
