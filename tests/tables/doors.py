"""Every way by which one rank comes out of `host_table` without a table, as data: how it is set up on that rank, in
which phase it fails, what it raises, and what the others hear of it.

In both faces: `AsyncFace` and `BlockingFace` open, call and close a service, and return what a call raised.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

import loader_service as ls
from loader_service import neighbours
from loader_service.agreement.messages import PHASES, Describe, Phase, PhaseRecord, Verdict
from loader_service.agreement.session import Session
from loader_service.config.schema import ServiceConfig
from loader_service.memory.admission import Room
from loader_service.memory.pinning import FakePinner
from loader_service.tables import TableRun
from tests.e2e.doors import Oops
from tests.e2e.seats import Seat
from tests.support.checkpoints import Checkpoint
from tests.tables.making import WEIGHT, place_of, rows_range

Service: TypeAlias = ls.LoaderService | ls.BlockingLoaderService
Result: TypeAlias = ls.HostTable | BaseException


# -- faces


class Face(Protocol):
    async def open(self, config: ServiceConfig, seat: Seat, pinner: FakePinner) -> Service: ...
    async def call(self, service: Service) -> Result: ...
    async def close(self, service: Service) -> None: ...


class AsyncFace:
    async def open(self, config: ServiceConfig, seat: Seat, pinner: FakePinner) -> ls.LoaderService:
        return await ls.LoaderService(config, seat.group, storage=seat.storage, pinner=pinner).__aenter__()

    async def call(self, service: Any) -> Result:
        try:
            table: ls.HostTable = await service.host_table("target", WEIGHT)
        except BaseException as error:
            return error
        return table

    async def close(self, service: Any) -> None:
        await service.__aexit__(None, None, None)


class BlockingFace:
    """Each call on a thread of its own, as of a program without a loop."""

    async def open(self, config: ServiceConfig, seat: Seat, pinner: FakePinner) -> ls.BlockingLoaderService:
        service = ls.LoaderService.blocking(config, seat.group, storage=seat.storage, pinner=pinner)
        return await asyncio.to_thread(service.__enter__)

    async def call(self, service: Any) -> Result:
        def call() -> Result:
            try:
                table: ls.HostTable = service.host_table("target", WEIGHT)
            except BaseException as error:
                return error
            return table

        return await asyncio.to_thread(call)

    async def close(self, service: Any) -> None:
        await asyncio.to_thread(service.__exit__, None, None, None)


FACES: Mapping[str, Face] = {"async": AsyncFace(), "blocking": BlockingFace()}


# -- doors


@dataclass(frozen=True)
class Place:
    """The rank that fails, and what its trap may use."""

    seat: Seat
    service: Service
    pinner: FakePinner
    checkpoint: Checkpoint
    rows: tuple[int, int]

    @property
    def engine(self) -> Any:
        assert self.service._engine is not None
        return self.service._engine

    @property
    def path(self) -> str:
        return place_of(self.checkpoint, WEIGHT)[0]

    @property
    def bytes(self) -> tuple[int, int]:
        """Where its rows lie in the file."""
        return rows_range(self.checkpoint, WEIGHT, self.rows)


@dataclass
class Stand:
    """Where a rank stands still; `release` lets go what would not end by itself."""

    reached: threading.Event
    release: Callable[[], None] = lambda: None


Trap: TypeAlias = Callable[[Place], AbstractContextManager[Stand | None]]


@dataclass(frozen=True)
class Door:
    """`trap` is set while the rank calls; where it stands still, it is cancelled, or its time is up. `own` is the class
    of what it raises, `cause` that of what the others hear, None if all ranks find the same and raise it themselves.
    What all are told `says` this."""

    phase: Phase
    trap: Trap
    own: type[BaseException]
    cause: type[Exception] | None
    says: str
    then: Literal["", "cancelled", "timeout"] = ""


@contextmanager
def before(phase: Phase, place: Place, act: Callable[[], Awaitable[None]]) -> Iterator[None]:
    """What the rank does, once, when its work of a phase is done and its record is due."""
    group = place.engine.group
    make = group.session

    def session_of(name: str, describe: Mapping[Phase, Describe] | None = None) -> Session:
        session: Session = make(name, describe)
        exchange = session.exchange

        async def acting(at: Phase, record: PhaseRecord) -> Verdict:
            if at is phase:
                await act()
            return await exchange(at, record)

        session.exchange = acting  # type: ignore[method-assign, assignment]
        return session

    group.session = session_of
    try:
        yield
    finally:
        del group.session


@contextmanager
def stands_before(phase: Phase, place: Place) -> Iterator[Stand]:
    stand = Stand(threading.Event())

    async def act() -> None:
        stand.reached.set()
        await asyncio.Event().wait()

    with before(phase, place, act):
        yield stand


@contextmanager
def fails_before(phase: Phase, place: Place) -> Iterator[None]:
    async def act() -> None:
        raise Oops(3, wanted=phase)

    with before(phase, place, act):
        yield


@contextmanager
def stands_in_a_read(place: Place) -> Iterator[Stand]:
    gate = place.seat.storage.block(place.path, within=place.bytes)
    yield Stand(gate.reached, gate.release)


@contextmanager
def reads_fail(fault: str, place: Place) -> Iterator[None]:
    storage = place.seat.storage
    if fault == "error":
        storage.fail(place.path, errno.EIO, within=place.bytes, times=None)
    elif fault == "early end":
        storage.truncate(place.path, place.bytes[0] + 3)
    else:
        storage.replace(place.path, inode=1, operations=("identify",))  # as looked at after the reads
    yield
    storage.clear()


@contextmanager
def has_no_memory(place: Place) -> Iterator[None]:
    """The rank's machine has less left than its rows take."""
    rooms, place.engine.memory_rooms = place.engine.memory_rooms, lambda: (Room("", 1 << 30, 100),)
    yield
    place.engine.memory_rooms = rooms


@contextmanager
def has_no_memory_left(step: str, place: Place) -> Iterator[None]:
    """All have agreed, and then the memory is gone."""
    obtain, own = getattr(TableRun, step), place.engine

    async def refused(run: TableRun, *args: Any) -> Any:
        if run._engine is own:
            raise ls.MemoryLimitError("no memory is left")
        return await obtain(run, *args)

    setattr(TableRun, step, refused)
    yield
    setattr(TableRun, step, obtain)


@contextmanager
def work_fails(what: str, place: Place) -> Iterator[None]:
    """One kind of the work for which the others may be waiting at their sockets."""
    engine, in_thread = place.engine, place.engine.in_thread

    async def failing(work: Callable[[], object], **options: Any) -> object:
        def fail() -> object:
            raise OSError(errno.ENOMEM, f"no {what}")

        return await in_thread(fail if options["what"].startswith(what) else work, **options)

    engine.in_thread = failing
    yield
    del engine.in_thread


@contextmanager
def meeting_fails(step: str, place: Place) -> Iterator[None]:
    """The rank gets no socket, or cannot connect with the others of its node."""
    make, own = getattr(neighbours, step), place.engine.group.rank

    def failing(who: Any, *args: Any) -> Any:
        if (who if step == "Door" else who.card.rank) == own:
            raise OSError(errno.ENOMEM, f"no {step}")
        return make(who, *args)

    setattr(neighbours, step, failing)
    yield
    setattr(neighbours, step, make)


@contextmanager
def cannot_pin(reason: str | None, place: Place) -> Iterator[None]:
    """There is no device; or the device refuses, after the table was filled."""
    place.pinner.reason, place.pinner.refuse_from = reason, None if reason else place.pinner.registrations
    yield
    place.pinner.reason = place.pinner.refuse_from = None


WORK = {"pinning a table": Phase.FINISH}
SHARED_WORK = {**WORK, "reserving shared": Phase.OPEN}
MEETING = ("Door", "connect")
READ_FAULTS = {"error": ls.ReadError, "early end": ls.EndOfFileError, "change": ls.CheckpointError}


def doors_of(face: str, layout: str) -> dict[str, Door]:
    """All that one service can go through one after another."""
    doors: dict[str, Door] = {}
    cancelled, told, refused = asyncio.CancelledError, ls.LoadCancelledError, ls.MemoryLimitError
    traps: dict[str, tuple[Phase, Trap]] = {phase: (phase, partial(stands_before, phase)) for phase in PHASES}
    traps["a read"] = (Phase.READ, stands_in_a_read)
    for where, (phase, stands) in traps.items():
        if face == "async":
            doors[f"cancelled in {where}"] = Door(phase, stands, cancelled, told, "enough", "cancelled")
            doors[f"timeout in {where}"] = Door(phase, stands, TimeoutError, told, "was cancelled", "timeout")
    for phase in PHASES:
        fails = partial(fails_before, phase)
        doors[f"own error in {phase}"] = Door(phase, fails, Oops, ls.LoaderError, f"layer 3 does not fit {phase}")
    for fault, error in READ_FAULTS.items():
        doors[f"read: {fault}"] = Door(
            Phase.READ, partial(reads_fail, fault), error, error, "00001-of-00002.safetensors"
        )
    required = "staging.pin is required, but memory cannot be locked"
    doors |= {
        "no memory": Door(Phase.OPEN, has_no_memory, refused, None, "want 3552 bytes of host memory"),
        "no device": Door(Phase.PLAN, partial(cannot_pin, "no device"), refused, refused, f"{required}: no device"),
        "not pinned": Door(Phase.FINISH, partial(cannot_pin, None), refused, refused, f"{required}: locking"),
    }
    shared = layout == "shared"
    for step in ("_allocate", "_shared_memory") if shared else ("_allocate",):
        trap = partial(has_no_memory_left, step)
        doors[f"no memory left to {step}"] = Door(Phase.OPEN, trap, refused, refused, "no memory is left")
    for step in MEETING:
        doors[step] = Door(Phase.CONFIG, partial(meeting_fails, step), OSError, ls.LoaderError, f"no {step}")
    for what, phase in (SHARED_WORK if shared else WORK).items():
        doors[what] = Door(phase, partial(work_fails, what), OSError, ls.LoaderError, f"no {what}")
    return doors


async def leave_by(door: Door, face: Face, place: Place) -> Result:
    """The failing rank's call. What came out of it, or out of the `timeout` around it."""
    loop = asyncio.get_running_loop()
    with door.trap(place) as stand:
        if stand is None:
            return await face.call(place.service)
        limit: asyncio.Timeout | None = None

        async def call() -> Result:
            nonlocal limit
            try:
                async with asyncio.timeout(None) as limit:
                    return await place.service.host_table("target", WEIGHT)  # type: ignore[misc, no-any-return]
            except BaseException as error:
                return error

        filling = asyncio.ensure_future(call())
        assert await asyncio.to_thread(stand.reached.wait, 30)
        if door.then == "timeout":
            assert limit is not None
            limit.reschedule(loop.time())
        else:
            filling.cancel("enough")
        loop.call_later(0.05, stand.release)  # it is waited for
        return await filling
