"""A session: one load's exchanges on one rank, on the service's event loop."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Mapping

from loader_service import logs
from loader_service.agreement.carriers import Carrier
from loader_service.agreement.messages import (
    PHASES,
    Describe,
    Failure,
    MessageError,
    Phase,
    PhaseRecord,
    Verdict,
    error_of,
)
from loader_service.agreement.participant import Participant
from loader_service.agreement.protocol import Limits
from loader_service.errors import (
    AgreementError,
    FailureRecord,
    LoadCancelledError,
    RankFailure,
    StateError,
    record_of,
    text_of,
)

_log = logs.logger("loader_service.agreement")

FAIL_WAIT_S = 5.0  # the window in which a cause is chosen, and a few seconds over
_INSIST_WAIT_S = 1.0
_STOP_WAIT_S = 2.0
_DISTRIBUTED_ERRORS = frozenset({"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"})
_CANCELLED = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)


class Session:
    """One rank's side of one load. Made by `Group.session`; all methods are called on one running loop, except
    `report_progress`, which any thread may call.

    Every rank runs all phases in order with `exchange`, or leaves with `fail`; then `close`, always. Nothing here waits
    without bound for a rank that is gone: see `protocol.Limits`.
    """

    def __init__(
        self,
        name: str,
        carrier: Carrier,
        *,
        rank: int,
        world_size: int,
        limits: Limits,
        describe: Mapping[Phase, Describe] | None = None,
    ) -> None:
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self._carrier = carrier
        self._limits = limits
        self._describe = dict(describe or {})
        self._participant: Participant | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: contextvars.Context | None = None  # of what this is about, for what is logged
        self._ticker: asyncio.TimerHandle | None = None
        self._position = 0
        self._attempt = 0
        self._waiting: asyncio.Future[Verdict] | None = None
        self._changed = asyncio.Event()
        self._on_final: list[Callable[[Verdict], None]] = []
        self._failed = False
        self._closed = False
        self._progress: tuple[int, str] = (0, "")
        self._bytes_done: Callable[[], tuple[int, int]] = lambda: (0, 0)

    # -- what is known

    @property
    def final(self) -> Verdict | None:
        """The FINAL verdict, once it is there. None while the load goes on, and after it has succeeded."""
        ended = self._ended
        return ended if ended is not None and ended.final else None

    @property
    def succeeded(self) -> bool:
        """True once the finish verdict was seen: nothing else is a success."""
        return self._ended is not None and not self._ended.final

    @property
    def verdict_log(self) -> tuple[Verdict, ...]:
        """The verdicts of the common log, in order: on every rank a prefix of the same sequence."""
        return () if self._participant is None else tuple(self._participant.member.log)

    @property
    def _ended(self) -> Verdict | None:
        return None if self._participant is None else self._participant.member.ended

    def report_progress(self, progress: str | int) -> None:
        """What this rank is at, a short text or a counter. A rank whose progress changes is slow, not late. Cheap."""
        moved, before = self._progress
        text = progress if isinstance(progress, str) else str(progress)
        if text != before:
            self._progress = (moved + 1, text)
            if self._participant is not None:
                self._participant.progress = self._progress

    def report_bytes(self, done: Callable[[], tuple[int, int]]) -> None:
        """`done` says how many bytes are ready for this rank's consumer, and of how many. It is asked at every
        heartbeat, on a thread of the carrier, and must not block or raise."""
        self._bytes_done = done
        if self._participant is not None:
            self._participant.bytes_done = done

    @property
    def done_by_rank(self) -> Mapping[int, tuple[int, int]]:
        """On rank 0, by rank: how many bytes were ready for its consumer at its last heartbeat, and of how many,
        once it knows that. Empty on other ranks, which hear of rank 0 alone. From any thread."""
        leader = None if self._participant is None else self._participant.leader
        return {} if leader is None else leader.done_by_rank

    def on_final(self, callback: Callable[[Verdict], None]) -> None:
        """Calls `callback` once, on the loop, when FINAL arrives (soon, if it is there): stop reads, wake consumers."""
        if self.final is not None:
            asyncio.get_running_loop().call_soon(callback, self.final)
        else:
            self._on_final.append(callback)

    # -- what is done

    async def exchange(self, phase: Phase, record: PhaseRecord) -> Verdict:
        """Brings this rank's record of `phase` and returns the common verdict: `go`, or `retry` (all ranks then do
        the phase once more, and exchange it again).

        Raises AgreementError on every rank if the ranks differ; RankFailure if a rank failed, also if this one was
        found late or silent; AgreementError if the record is too large to travel (then `fail` is due, as for any own
        error); StateError out of order.
        """
        self._check_order(phase)
        participant = self._start()
        if self.final is not None:
            raise error_of(self.final)
        _log.debug("rank %d: %s: phase %s started", self.rank, self.name, phase)
        self._waiting = asyncio.get_running_loop().create_future()
        waiting = self._waiting
        try:
            participant.post(phase, self._attempt, record)
        except MessageError as error:
            self._waiting = None
            raise AgreementError(f"rank {self.rank}: {error}", rank=self.rank, phase=str(phase)) from error
        try:
            verdict = await waiting
        finally:
            self._waiting = None
        if verdict.final:
            raise error_of(verdict)
        return verdict

    async def fail(self, error: BaseException, phase: Phase | None) -> Verdict | None:
        """Says FAIL with this rank's own error, first thing, then waits (bounded) for what ends the log.

        `phase` is where it failed, if the error does not say; None for none of a load's.

        Returns the FINAL, whose cause may be another rank's; the finish verdict, if the load had already succeeded
        everywhere; None if nothing came in time: the outcome is unknown. Called again, it only waits. A cancellation
        that comes while waiting is raised afterwards.
        """
        participant = self._start()
        if not self._failed and self._ended is None:
            self._failed = True
            failure = failure_of(error, self.rank, phase)
            _log.debug("rank %d: %s: fails in %s: %s", self.rank, self.name, phase, failure.record.message)
            participant.fail(failure)
            self._schedule_tick()
        bound_s = min(self._limits.timeout_s, self._limits.window_s + FAIL_WAIT_S)
        await self._until(lambda: self._ended is not None, bound_s)
        if self._ended is None and not participant.lost:
            participant.insist()
            await self._until(lambda: self._ended is not None, min(self._limits.timeout_s, _INSIST_WAIT_S))
        return self._ended

    def saw_die(self, rank: int) -> None:
        """This rank knows that the process of `rank` has ended without a word: all ranks hear of it at once, as that
        rank's failure, and of a better cause if there is one. Nothing once the end is known here, or this is closed."""
        if not self._closed:
            self._start().saw_die(rank)

    async def close(self) -> None:
        """Leaves: a member says BYE, the leader waits up to `grace_s` for the BYEs of those who live, so that a store
        in its process outlives its readers. A session that is left in the middle fails first. Idempotent."""
        if self._closed or self._participant is None:
            self._closed = True
            return
        self._closed = True
        participant = self._participant
        try:
            if self._ended is None and not self._failed:
                phase = PHASES[min(self._position, len(PHASES) - 1)]
                await self.fail(StateError("the load was left in the middle", rank=self.rank), phase)
            if not participant.lost:
                participant.bye()
                await self._until(lambda: participant.byes_seen or participant.lost, self._limits.grace_s)
        finally:
            if self._ticker is not None:
                self._ticker.cancel()
            stopped = asyncio.Event()
            self._carrier.stop(tidy=participant.none_reads, stopped=lambda: self._call_soon(stopped.set))
            # Also where the store is lost: a thread still inside its call when the interpreter ends aborts the process.
            if self._ended is not None:
                await _wait_for(stopped, _STOP_WAIT_S)

    # -- inside

    def _check_order(self, phase: Phase) -> None:
        if self._closed or self._failed:
            raise StateError("the session has ended", rank=self.rank, phase=str(phase))
        if self._waiting is not None or self.succeeded or PHASES[self._position] is not phase:
            expected = "none" if self.succeeded else PHASES[self._position]
            raise StateError(f"phase {phase} is exchanged out of order; next is {expected}", rank=self.rank)

    def _start(self) -> Participant:
        if self._participant is not None:
            return self._participant
        if self._closed:
            raise StateError("the session is closed", rank=self.rank)
        self._loop, self._context = asyncio.get_running_loop(), contextvars.copy_context()
        self._participant = Participant(
            self._carrier,
            rank=self.rank,
            world_size=self.world_size,
            limits=self._limits,
            describe=self._describe,
            clock=time.monotonic,
            on_verdict=self._take_verdict,
            on_change=self._take_change,
            wake=self._call_soon,
        )
        self._participant.progress, self._participant.bytes_done = self._progress, self._bytes_done
        self._participant.start()
        self._schedule_tick()
        return self._participant

    def _call_soon(self, callback: Callable[[], None]) -> None:
        """From any thread. A loop that is closed by now has nobody left to tell."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, context=self._context)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _schedule_tick(self) -> None:
        if self.world_size == 1 or self._loop is None or self._participant is None:
            return
        if self._ticker is not None:
            self._ticker.cancel()
        self._ticker = self._loop.call_later(self._participant.tick_s, self._tick)

    def _tick(self) -> None:
        if self._participant is not None:
            self._participant.tick()
            self._schedule_tick()

    def _take_change(self) -> None:
        self._changed.set()
        if not self._closed:
            self._schedule_tick()

    def _take_verdict(self, verdict: Verdict) -> None:
        if verdict.action == "retry":
            self._attempt += 1
        elif not verdict.final:
            self._position, self._attempt = self._position + 1, 0
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(verdict)
        if verdict.final:
            callbacks, self._on_final = self._on_final, []
            for callback in callbacks:
                assert self._loop is not None
                self._loop.call_soon(callback, verdict)
        self._changed.set()

    async def _until(self, condition: Callable[[], bool], bound_s: float) -> None:
        """Waits until `condition` holds, at most `bound_s`; a cancellation meanwhile is raised at the end."""
        deadline_s = time.monotonic() + bound_s
        cancelled: asyncio.CancelledError | None = None
        while not condition() and (left_s := deadline_s - time.monotonic()) > 0:
            self._changed.clear()
            try:
                await _wait_for(self._changed, left_s)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled


async def _wait_for(event: asyncio.Event, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        return


def failure_of(error: BaseException, rank: int, phase: Phase | None) -> Failure:
    """A rank's own failure as it travels. What an error elsewhere is likely to have caused gives way to that one."""
    if issubclass(type(error), _CANCELLED):  # of the class itself: `isinstance` may run code of the caller's own class
        where = "" if phase is None else f" in phase {phase}"
        text = f"cancelled on rank {rank}{where} ({text_of(error)})"
        return Failure("cancelled", FailureRecord(LoadCancelledError.__name__, text, rank, phase))
    record = record_of(error, rank=rank, phase=phase)
    if issubclass(type(error), LoadCancelledError):
        return Failure("cancelled", record)
    return Failure("consequence" if _lost_touch(error) else "error", record)


def _lost_touch(error: BaseException) -> bool:
    """Whether the error tells that another rank, or the way to it, has failed: of a nested load, of a connection, of
    torch's collectives (which fail within milliseconds of a death, and name no rank)."""
    if issubclass(type(error), RankFailure | ConnectionError):
        return True
    if any(cls.__name__ in _DISTRIBUTED_ERRORS for cls in type(error).__mro__):
        return True
    return type(error) is RuntimeError and "/gloo/" in text_of(error)  # torch has no class for what gloo raises
