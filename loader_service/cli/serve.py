"""`serve`: the resident service as a process, from the configuration to the signal that ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from loader_service import logs
from loader_service.cli import ranks
from loader_service.cli.http import HttpServer
from loader_service.cli.output import print_document, print_line
from loader_service.cli.rank_process import Meeting, RankProcess, refused
from loader_service.cli.signals import Interruptions, interruptions
from loader_service.config.schema import ServeConfig, ServiceConfig
from loader_service.config.yaml_file import load_config
from loader_service.errors import ConfigError, LoadCancelledError, LoaderError, StateError
from loader_service.keeping.status import ServiceStatus
from loader_service.resident import ResidentService
from loader_service.sizes import format_size

log = logs.logger("loader_service.serve")

_SAY_EVERY_S = 10.0
_PLAN_WAIT_S = 60.0
_LOCAL_RANKS: Final = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the command line said. `ranks`: how many workers there are; `socket` instead of the file's."""

    config: Path
    ranks: int | None
    socket: str | None
    http: str | None
    as_json: bool
    debug: bool


def run_serve(options: ServeOptions) -> int:
    """Serves until a signal ends it, which is a success once it was ready. Returns the exit code."""
    place = ranks.place_from()
    with interruptions(several_ranks=not place.alone) as signals:
        try:
            config = _config_of(options)
            service = ResidentService(config, place.meeting or "solo", ranks=options.ranks)
            if signals.first is not None:
                raise LoadCancelledError(f"interrupted by {signals.first.name}")
        except LoaderError as error:
            return asyncio.run(refused(options, place, Meeting("serve"), error, signals))
        return asyncio.run(_ServeProcess(options, place, config, service).main(signals))


def _config_of(options: ServeOptions) -> ServiceConfig:
    config = load_config(options.config)
    if options.socket is None:
        return config
    try:
        socket_name = ServeConfig.model_validate({"socket": options.socket}).socket
    except ValidationError as error:
        raise ConfigError(f"--socket: {error.errors()[0]['msg']}") from error
    return config.model_copy(update={"serve": config.serve.model_copy(update={"socket": socket_name})})


def _own_address(address: str, environ: Mapping[str, str] = os.environ) -> str:
    """Where this one of several services of a node serves: each at the port after that of the one before."""
    host, _, port = address.rpartition(":")
    local = next((environ[name] for name in _LOCAL_RANKS if environ.get(name, "").isdecimal()), "0")
    return f"{host}:{int(port) + int(local)}" if port.isdecimal() and int(port) else address


class _ServeProcess(RankProcess[ResidentService]):
    def __init__(
        self, options: ServeOptions, place: ranks.Place, config: ServiceConfig, service: ResidentService
    ) -> None:
        super().__init__(options, place, Meeting(service.first_session), config.agreement, load=None)
        self._options = options
        self._service = service
        self._stop = asyncio.Event()
        self._said_s = time.monotonic()

    async def _work(self) -> None:
        async with self._service as service, self._http(asyncio.get_running_loop()) as http:
            self._load = service  # from now on the others hear by itself of what goes wrong
            await service.fill()
            self._say_ready(service.status(), http)
            await self._stop.wait()
            _notify("STOPPING=1")
            log.info("%s: the service ends", self._signal.name if self._signal is not None else "stopped")

    @contextlib.asynccontextmanager
    async def _http(self, loop: asyncio.AbstractEventLoop) -> AsyncIterator[str | None]:
        """Serves over HTTP, where that is asked for; its address."""
        if self._options.http is None:
            yield None
            return

        def plan(load: str | None) -> dict[str, object]:
            planning = asyncio.run_coroutine_threadsafe(self._service.plan(self._named(load)), loop)
            try:
                return planning.result(_PLAN_WAIT_S).as_json()
            except TimeoutError:
                raise StateError(f"the plan was not there within {_PLAN_WAIT_S:g} s") from None

        address = _own_address(self._options.http)
        server = await self._in_thread(lambda: HttpServer(address, self._service.status, plan))
        server.__enter__()
        try:
            yield server.address
        finally:  # in a thread: answers that are under way need this loop
            await self._in_thread(server.__exit__)

    def _named(self, load: str | None) -> str:
        loads = self._service.config.loads
        if load is None and len(loads) > 1:
            raise ConfigError(f"there are several loads: say which with ?load=, one of {', '.join(loads)}")
        return next(iter(loads)) if load is None else load

    def _say_ready(self, status: ServiceStatus, http: str | None) -> None:
        kept_bytes = sum(load.kept_bytes for load in status.loads)
        _notify(f"READY=1\nSTATUS={format_size(kept_bytes)} kept")
        if self._options.as_json:
            print_document({**status.as_dict(), "http": http})
            return
        where = f", http://{http}" if http is not None else ""
        print_line(f"ready: {format_size(kept_bytes)} kept; workers attach on {status.socket}{where}")

    def _tick(self) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s < _SAY_EVERY_S:
            return
        self._said_s = now_s
        for load in self._service.status().loads:
            if load.state == "reading":
                done, wanted = format_size(load.read_bytes), format_size(load.wanted_bytes)
                log.info("load '%s': %s of %s read", load.load, done, wanted, extra={"load": load.load})

    def _interrupted(self, number: signal.Signals, work: asyncio.Task[None]) -> None:
        """Once it is ready, a signal is how a service ends."""
        if self._service.status().ready:
            self._signal = number
            self._stop.set()
            if (signals := Interruptions.installed()) is not None:
                signals.settle()  # a launcher may repeat it
        else:
            super()._interrupted(number, work)


def _notify(text: str) -> None:
    """Tells systemd, where it started this process and wants to hear (sd_notify's protocol)."""
    name = os.environ.get("NOTIFY_SOCKET", "")
    if not name.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as telling:
        telling.connect("\0" + name[1:] if name.startswith("@") else name)
        telling.send(text.encode())
