"""What all ranks do together beside loads, in a session of its own: filling a host table, keeping a load.

The order is the same on every rank; a rank that fails says so before it cleans up, and all ranks fail with one cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Generic, TypeVar

from loader_service import logs
from loader_service.agreed import DESCRIBE, as_reported, attach_verdict
from loader_service.agreement.messages import Phase, Verdict, error_of
from loader_service.agreement.session import Session
from loader_service.bridge import uninterrupted
from loader_service.engine import SERVICE_CLOSED, Engine
from loader_service.errors import LoaderError, StateError, clear_frames
from loader_service.neighbours import Neighbours
from loader_service.opening import Opening
from loader_service.rows import Reading

log = logs.logger("loader_service.load")

T = TypeVar("T")

FINAL = "the ranks' verdict ended it"
LOOK_EVERY_S = 0.25


class Collective(Generic[T]):
    """One such call on its rank; runs on the service's loop. Subclasses say in `_act` what is done, in `_let_go` what
    of it is given back after a failure, and keep in `_readings` what reading threads are at. `_others`, once they have
    met, tell of a death among them until the session is closed."""

    def __init__(self, engine: Engine, load: str, what: str) -> None:
        self._engine = engine
        self._load = load
        self._what = what
        self._phase, self._subject = Phase.CONFIG, engine.subject(load, Phase.CONFIG.value)
        self._task: asyncio.Task[object] | None = None  # as long as the ranks' verdict is to end it
        self._session: Session | None = None
        self._others: Neighbours | None = None
        self._opening: Opening | None = None
        self._readings: list[Reading] = []
        self._failed = False
        self._stopped = threading.Event()  # for threads that wait for other ranks

    async def _act(self, session: Session, opening: Opening, others: Neighbours) -> T:
        raise NotImplementedError

    async def _let_go(self) -> None:
        """After a failure; nothing reads any more."""

    def _forget(self) -> None:
        """Afterwards, whatever came of it: nothing here may keep memory that is to end with its tensor."""

    @property
    def failure(self) -> LoaderError | None:
        """The common verdict that ended it, from the moment it arrives; None before, and after a success."""
        final = self._session.final if self._session is not None else None
        return None if final is None else error_of(final)

    async def run(self) -> T:
        """Collective. Raises on every rank or on none, with one cause: see `LoadRun`."""
        with logs.working_on(self._subject):
            return await self._run()

    def _come_to(self, phase: Phase) -> None:
        self._phase, self._subject.phase = phase, phase.value

    async def _run(self) -> T:
        engine, task = self._engine, asyncio.current_task()
        assert task is not None
        self._task = task
        engine.collective_tasks.add(task)
        try:
            self._session = session = engine.group.session(f"{self._load}: {self._what}", describe=DESCRIBE)
            self._others = others = Neighbours(engine, session)
            session.on_final(self._final_arrived)
            opening = self._opening = Opening(engine, self._load, session, [])
            done = await self._act(session, opening, others)
            await session.close()
            await others.close()
        except BaseException as error:
            self._task = None  # this rank's own FAIL brings a verdict, too
            try:
                await uninterrupted(self._fail(error))
            except asyncio.CancelledError as meanwhile:  # the caller's own; the service's end changes nothing any more
                if meanwhile.args != (SERVICE_CLOSED,):
                    raise
            if isinstance(error, asyncio.CancelledError):
                self._raise_meant(error)
            raise
        finally:
            if self._opening is not None:
                self._opening.let_next_enter()
            engine.collective_tasks.discard(task)
            self._task = None
            self._readings.clear()
            self._forget()
        return done

    def attach_verdict(self, error: BaseException) -> None:
        """Adds to this rank's own exception what all ranks found, once this has failed. Never raises."""
        if self._session is not None and self._failed:
            with contextlib.suppress(Exception):  # a class of the caller's own may refuse
                attach_verdict(error, self._session, self._phase)

    def _raise_meant(self, cancelled: asyncio.CancelledError) -> None:
        """Raises what this task was cancelled for, unless its caller has cancelled it, who gets that."""
        failure = self.failure
        if failure is not None and cancelled.args == (FINAL,):
            raise failure from failure.__cause__
        if cancelled.args == (SERVICE_CLOSED,):
            raise StateError(f"{SERVICE_CLOSED} before {self._what} was there")

    def _final_arrived(self, verdict: Verdict) -> None:  # noqa: ARG002 - it is in the session
        self._stopped.set()
        if self._others is not None:
            self._others.stop()
        if self._task is not None:
            self._task.cancel(FINAL)

    async def _fail(self, error: BaseException) -> None:
        """FAIL first, so that the others stop; then this rank's own cleaning up. Never raises."""
        session, others = self._session, self._others
        if session is None or others is None:
            return
        telling = None
        if session.final is None and not session.succeeded:
            telling = asyncio.ensure_future(session.fail(as_reported(error), self._phase))
        self._stopped.set()
        for reading in self._readings:
            reading.cancel()
        grace_s = self._engine.config.agreement.grace_s
        for reading in self._readings:
            if not await reading.ended_within(grace_s):
                log.warning("a read for %s did not return; its memory is not used again", self._what)
        self._engine.forget_catalog(self._load)
        if telling is not None:
            with contextlib.suppress(Exception):
                await telling
        if self._opening is not None:
            self._opening.let_next_enter()
        clear_frames(error)  # else it would keep the memory, if somebody keeps it
        self._failed = True
        self.attach_verdict(error)
        await self._let_go()
        for close in (session.close, others.close):
            with contextlib.suppress(Exception):
                await close()
