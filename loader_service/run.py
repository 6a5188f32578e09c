"""One load on one rank, from entering to leaving: the phases, what the ranks agree on, and how it ends.

Runs on the service's loop. The order is the same on every rank whatever happens locally: configuration, catalog,
plan, open, read, finish; each ends in an exchange. A rank that fails says so before it cleans up.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import partial

from loader_service import logs
from loader_service.agreed import DESCRIBE, as_reported, attach_verdict
from loader_service.agreement.messages import Phase, PhaseRecord, Verdict, error_of
from loader_service.agreement.session import Session
from loader_service.bridge import Channel, uninterrupted
from loader_service.engine import Engine
from loader_service.errors import LoaderError, StateError, record_of
from loader_service.filling import HeldBytes, OwnedUnit, SlotUnit
from loader_service.keeping.telling import Telling
from loader_service.load_reading import LoadReading
from loader_service.neighbours import Neighbours
from loader_service.node_sharing import NodeSharing
from loader_service.opening import Opening
from loader_service.planning.plan import LoadPlan, RankPlan
from loader_service.report import LoadReport
from loader_service.scheduler import Progress
from loader_service.sources import Tables
from loader_service.timeline import Counters

log = logs.logger("loader_service.load")

_FINAL = "the ranks' verdict ended the load"  # why a rank that still enters is cancelled


class LoadRun:
    """A load's life on its rank. The faces in stream.py call `enter`, one of the `fill_*` methods, and `leave`."""

    def __init__(self, engine: Engine, load: str) -> None:
        self.name = load
        self.subject = logs.Subject(load)
        self.progress = Progress()
        self.channel: Channel[OwnedUnit | SlotUnit] = Channel()
        self.exhausted = False  # set by the face on leaving: the consumer has taken everything
        self._engine = engine
        self._session: Session | None = None
        self._phase = Phase.CONFIG
        self._phases: dict[str, float] = {}
        self._fallbacks: list[str] = []
        self.tables: Tables | None = None
        self._plan: LoadPlan | None = None
        self._begun = False
        self._leaving = False
        self._failing = False
        self._over = asyncio.Event()  # waited for and set on the service's loop
        self._entering: asyncio.Task[None] | None = None
        self._others: Neighbours | None = None
        self._opening: Opening | None = None
        self._reading: LoadReading | None = None
        self._in_memory: HeldBytes | None = None
        self._failed_by: BaseException | None = None  # reading here
        self._telling: Telling | None = None  # a resident service, of this load
        self._told: asyncio.Task[Verdict | None] | None = None  # of what went wrong here, before the consumer knows
        self._started_s = 0.0
        self._seconds: float | None = None
        self._left = False

    @property
    def plan(self) -> LoadPlan:
        if self._plan is None:
            raise StateError(f"load '{self.name}' is not open: enter it first, `async with service.open(...) as load`")
        return self._plan

    @property
    def rank_plan(self) -> RankPlan:
        return self.plan.for_rank(self._engine.group.rank)

    @property
    def open(self) -> bool:
        """Entered, and not yet left."""
        return self._begun and not self._left

    @property
    def failure(self) -> LoaderError | None:
        """The common verdict that ended the load, from the moment it arrives; None before, and after a success."""
        final = self._session.final if self._session is not None else None
        return None if final is None else error_of(final)

    @property
    def succeeded(self) -> bool:
        """Whether the common verdict is that all ranks have succeeded, from the moment it arrives."""
        return self._session is not None and self._session.succeeded

    # Entering

    def begin(self) -> None:
        """Takes this run for one entering. Raises StateError at the second: open the load again instead."""
        if self._begun:
            raise StateError(f"load '{self.name}' was entered before: call open() again for another load")
        self._engine.check_no_open_load()
        self._begun = True
        self._engine.open_load = self

    async def enter(self) -> None:
        """Agrees on configuration, catalog and plan; collective. After it, every rank can read its part."""
        self.subject = self._engine.subject(self.name)
        with logs.working_on(self.subject):
            await self._enter()

    async def _enter(self) -> None:
        self._started_s = time.monotonic()
        self._entering = asyncio.current_task()
        if (attachment := self._engine.attachment) is not None:
            group = self._engine.group
            self._telling = Telling(attachment, self.name, group.rank, group.world_size, self.counters)
        try:
            self._session = self._engine.group.session(self.name, describe=DESCRIBE)
            self._session.on_final(self._final_arrived)
            opening = self._opening = Opening(self._engine, self.name, self._session, self._fallbacks)
            others = self._others = Neighbours(self._engine, self._session, self._fail_now)
            with self._timed(Phase.CONFIG):
                met = await opening.config(others)
                await others.meet(met.listed)
            with self._timed(Phase.CATALOG):
                catalog = await opening.catalog()
            with self._timed(Phase.PLAN):
                plan = await opening.plan(catalog)
                self._in_memory = await self._engine.held(plan.for_rank(self._engine.group.rank).streamed)
                held = self._in_memory is not None and self._in_memory.everything
                sharing = NodeSharing(self._engine, plan, others, held=held)
                agreed = await opening.agree_on_plan(plan, told=await sharing.facts())
                self._plan = plan
                self._session.report_bytes(partial(self._bytes_done, self.rank_plan.payload_bytes))
            with self._timed(Phase.OPEN):
                opinions = await self._exchange(PhaseRecord(listed=await sharing.opinion(agreed.listed)))
                sharing.settle(opinions.listed)
                self._reading = self._make_reading(plan, sharing)
                await self._reading.begin(met.counts.get("node", {}))
            self._come_to(Phase.READ)  # the consumer's body, whatever it does there
        except BaseException as error:
            self._entering = None
            await self._leave_failed(error)
            failure = self.failure
            if isinstance(error, asyncio.CancelledError) and failure is not None and error.args == (_FINAL,):
                meant = self._failed_by or failure
                self.attach_verdict(meant)
                raise meant from meant.__cause__
            raise
        finally:
            self._entering = None

    async def _exchange(self, record: PhaseRecord) -> Verdict:
        assert self._session is not None
        return await self._session.exchange(self._phase, record)

    def _final_arrived(self, verdict: Verdict) -> None:
        """Another rank failed, or the ranks differ: reads stop and the consumer wakes up, now."""
        error = error_of(verdict)
        if self._entering is not None:  # it may be at work that takes long, or stuck in it
            self._entering.cancel(_FINAL)
        if self._others is not None:
            self._others.stop()
        if self._reading is not None:
            self._reading.fail(error)
        self.channel.fail(error)

    def _fail_now(self, error: BaseException) -> None:
        """Something beside the consumer has failed here. The others hear of it at once, the consumer at its next step,
        which may be late."""
        self.channel.fail(error)
        if self._failed_by is None and self._session is not None and self._session.final is None:
            self._failed_by = error
            self._told = asyncio.ensure_future(self._session.fail(as_reported(error), self._phase))

    @property
    def slowest(self) -> int | None:
        """The rank of this node that this one waits for now, where they share memory."""
        return self._reading.slowest if self._reading is not None and not self._left else None

    # Reading

    def _make_reading(self, plan: LoadPlan, sharing: NodeSharing) -> LoadReading:
        self.tables = Tables(self._engine, plan, self.rank_plan, self._report_progress)
        return LoadReading(
            self._engine,
            self.name,
            self.rank_plan,
            self.tables,
            sharing,
            self._in_memory,
            self.channel,
            self.progress,
            on_progress=self._report_progress,
            on_failure=self._fail_now,
        )

    @property
    def reading(self) -> LoadReading:
        """For one form of consumption. StateError unless the load was entered and not yet left."""
        self.check_open()
        assert self._reading is not None
        return self._reading

    def check_open(self) -> None:
        """Raises StateError unless the load was entered and not yet left."""
        if self._phase is not Phase.READ or self._leaving or self._left:
            raise StateError(f"load '{self.name}' is not open: consume it inside its `with` block")

    def _bytes_done(self, of_all: int) -> tuple[int, int]:
        """What is ready for the consumer or was taken, and of how many; from any thread."""
        return min(of_all, self.progress.handed_bytes + self._table_bytes), of_all

    @property
    def _table_bytes(self) -> int:
        return self.tables.payload_bytes if self.tables else 0

    @property
    def done_by_rank(self) -> Mapping[int, tuple[int, int]]:
        return self._session.done_by_rank if self._session is not None else {}

    def _report_progress(self) -> None:
        if self._session is not None and self._reading is not None:
            self._session.report_progress(self._reading.progress)

    # Leaving

    async def leave(self, error: BaseException | None = None) -> None:
        """Ends the load on every rank; collective. `error` is what the consumer's body raised.

        Without an error this rank succeeds if all do; otherwise it raises what went wrong elsewhere, or what its own
        body has swallowed. May be called from several places at once (a service that closes while an abandoned
        generator is ended): all of them wait for the one end, and an error of any of them is this rank's failure.
        """
        if self.open:
            with logs.working_on(self.subject):
                await self._leave(error)

    async def _leave(self, error: BaseException | None) -> None:
        clean = error is None or issubclass(type(error), GeneratorExit)  # an abandoned generator: a `break`
        again, self._leaving = self._leaving, True
        if not clean:
            assert error is not None
            await self._leave_failed(error)
            return
        try:
            if not again:
                await self._leave_cleanly()
            else:
                await self._over.wait()
        except BaseException as own:
            known = self._failing  # with an error of this rank's that another caller brought, and will raise
            await self._leave_failed(own)
            if known and isinstance(error, GeneratorExit) and isinstance(own, Exception):
                return
            raise
        if again and error is None and (failure := self.failure) is not None:
            raise failure

    async def _leave_cleanly(self) -> None:
        assert self._session is not None
        with self._timed(Phase.READ):
            if (swallowed := self._failed_by or self.channel.raised) is not None:
                raise swallowed
            assert self._reading is not None
            await self._reading.stop_taking()
            await self._reading.verify_files()
            await self._exchange_last_reads(self._reading)
        with self._timed(Phase.FINISH):
            await self._exchange(PhaseRecord())
            await self._session.close()
            await self._leave_node()
        self._ended()

    async def _exchange_last_reads(self, reading: LoadReading) -> None:
        """Ends the reading on all ranks. Until all are there, this one goes on reading for others of its node."""
        try:
            await self._exchange(PhaseRecord())
        except Exception:
            if self._failed_by is not None:  # what was read for others
                raise self._failed_by from self._failed_by.__cause__
            raise
        await reading.stop_sharing()

    async def _leave_failed(self, error: BaseException) -> None:
        """FAIL first, so that the others stop; then this rank's own cleaning up. Never raises a second error.

        A cancellation meanwhile is raised at the end: what is cleaned up by half would hold memory for good.
        """
        if self._left:
            return
        again, self._leaving, self._failing = self._failing, True, True
        await uninterrupted(self._over.wait() if again else self._fail_and_clean_up(error))

    async def _fail_and_clean_up(self, error: BaseException) -> None:
        session, telling = self._session, None
        try:
            if session is not None and session.final is None:
                telling = asyncio.ensure_future(session.fail(as_reported(error), self._phase))
            if self._reading is not None:
                self._reading.give_up()
                for cleaning_up in (self._reading.stop_taking, self._reading.stop_sharing):
                    with contextlib.suppress(Exception):
                        await cleaning_up()
            self._engine.forget_catalog(self.name)
            for told in (telling, self._told):
                if told is not None:
                    with contextlib.suppress(Exception):
                        await told
            if self._opening is not None:
                self._opening.let_next_enter()
            if session is not None:
                with contextlib.suppress(Exception):
                    await session.close()
            await self._leave_node()
        finally:
            if self._opening is not None:
                self._opening.let_next_enter()
            self._ended(error)
        self.attach_verdict(error)

    def attach_verdict(self, error: BaseException) -> None:
        """Adds to this rank's own exception what all ranks found, once the load has failed. Never raises."""
        if self._session is not None and self._failing and self._left:
            attach_verdict(error, self._session, self._phase)

    async def _leave_node(self) -> None:
        if self._others is not None:
            await self._others.close()

    def _ended(self, error: BaseException | None = None) -> None:
        self._left = True
        if self._reading is not None:
            self._reading.left()
        elif self._in_memory is not None:
            self._in_memory.close()
        self._over.set()
        if self._engine.open_load is self:
            self._engine.open_load = None
        if not self.channel.over:  # whoever still iterates, or waits, hears of it
            self.channel.fail(StateError(f"load '{self.name}' was left: consume it inside its `with` block"))
        self._seconds = time.monotonic() - self._started_s
        if self._telling is not None:
            self._telling.end(self.report() if error is None else None, error)

    def _come_to(self, phase: Phase) -> None:
        self._phase = phase
        self.subject.phase = phase.value

    # Reporting

    @contextlib.contextmanager
    def _timed(self, phase: Phase) -> Iterator[None]:
        self._come_to(phase)
        log.debug("load '%s': %s started", self.name, phase.value)
        started = time.monotonic()
        if phase is Phase.READ and Phase.OPEN.value in self._phases:
            started = self._started_s + sum(self._phases.values())
        try:
            yield
        except BaseException as error:
            log.debug("load '%s': %s failed: %s", self.name, phase.value, record_of(error, phase=phase.value))
            raise
        finally:
            self._phases[phase.value] = time.monotonic() - started
        log.debug("load '%s': %s complete", self.name, phase.value)

    def counters(self) -> Counters:
        """What this rank is at, at this moment; from any thread."""
        if self._reading is not None:
            return self._reading.counters()
        threads = self._engine.threads
        return Counters(in_flight=len(threads.in_flight()), threads=threads.threads)

    def report(self) -> LoadReport:
        """What this rank did so far; final once the load was left."""
        plan, reading = self.plan, self._reading
        shards = plan.catalog.shards
        read = sorted(reading.shards_read) if reading is not None else []
        seconds = self._seconds if self._seconds is not None else time.monotonic() - self._started_s
        return LoadReport(
            load=self.name,
            rank=self._engine.group.rank,
            world_size=self._engine.group.world_size,
            tensors=self.progress.tensors,
            payload_bytes=self.progress.payload_bytes + self._table_bytes,
            read_bytes=reading.read_bytes if reading is not None else 0,
            striped_bytes=reading.striped_bytes if reading is not None else 0,
            files_opened=len(read),
            files_read=tuple(shards[i].name for i in read),
            seconds=seconds,
            peak_staging_bytes=reading.peak_bytes if reading is not None else 0,
            complete=self.exhausted,
            catalog_digest=plan.catalog.digest,
            plan_digest=plan.digest,
            phases=dict(self._phases),
            policies=reading.policies if reading is not None else {},
            fallbacks=(*self._fallbacks, *(reading.fallbacks if reading is not None else ())),
            warnings=(*plan.catalog.notes, *plan.warnings),
        )
