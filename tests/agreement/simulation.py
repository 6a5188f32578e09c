"""Ranks in virtual time: participants over a memory board, driven by a heap of timers. Deterministic, no threads.

What happens to a rank is done by its methods, which note it down as a `Harm`: `invariants.check` then knows what the
outcome may be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from loader_service.agreement.codec import decode_entry
from loader_service.agreement.messages import (
    PHASES,
    Describe,
    Failure,
    FailureKind,
    MessageError,
    Phase,
    PhaseRecord,
    Verdict,
)
from loader_service.agreement.participant import Participant
from loader_service.agreement.protocol import LEADER, Incoming, Limits
from loader_service.agreement.session import FAIL_WAIT_S
from loader_service.errors import FailureRecord
from tests.agreement.surroundings import CALM, VirtualTime, Weather

LIMITS = Limits(timeout_s=60, start_timeout_s=600, grace_s=10, heartbeat_s=1, suspect_s=5)

# What is told by the rank itself, what others find out from what it sent, and what they find out because it is silent.
ToldKind = Literal["error", "cancelled"]
SentKind = Literal["record", "beats", "log", "differs", "retry", "busy", "late", "absent"]
SilentKind = Literal["killed", "frozen", "stuck", "cut off", "lost"]
HarmKind = ToldKind | SentKind | SilentKind


@dataclass(frozen=True)
class Harm:
    """What happened to `rank`. `sent`: position of the last record it had sent by then. `for_s`: how long it lasted."""

    rank: int
    kind: HarmKind
    at_s: float
    sent: int
    for_s: float = float("inf")


class OpenParticipant(Participant):
    """One whose heartbeats can be spoilt, and that lets others listen."""

    spoilt: bytes | None = None
    listeners: list[Callable[[Incoming], None]]

    def receive(self, incoming: Incoming) -> None:
        for listen in self.listeners:
            listen(incoming)
        super().receive(incoming)

    def status(self) -> bytes:
        return super().status() if self.spoilt is None else self.spoilt


class SimulatedRank:
    """Runs all phases as the service does: work, exchange, on failure FAIL first, and then leaves as a session does.

    `work_s(phase)` is how long a phase takes here; `act(rank, phase, attempt)` runs when its record is due, and returns
    the record, or None after having called `fail`, `kill` or the like itself.
    """

    def __init__(
        self,
        world: World,
        rank: int,
        act: Callable[[SimulatedRank, Phase, int], PhaseRecord | None],
        work_s: Callable[[Phase], float],
    ) -> None:
        self.rank = rank
        self.world = world
        self.act = act
        self.work_s = work_s
        self.alive = True
        self.frozen = False
        self.failed = False
        self.gave_up = False
        self.sent = -1
        self.verdicts: list[Verdict] = []
        self.listeners: list[Callable[[Incoming], None]] = []
        self.started_at_s: float | None = None
        self.ended_at_s: float | None = None
        self.leaving_at_s: float | None = None
        self.left_at_s: float | None = None
        self.saw: dict[int, float] = {}
        self.carrier = world.board.carrier(rank, heartbeat_s=world.limits.heartbeat_s)
        self.carrier.host_rank = LEADER if world.hosted else None
        self.participant = OpenParticipant(
            self.carrier,
            rank=rank,
            world_size=world.board.world_size,
            limits=world.limits,
            describe=world.describe,
            clock=world.time.time,
            on_verdict=self._take,
            on_change=self._changed,
            wake=self._wake,
        )
        self.participant.listeners = self.listeners
        self._attempt = 0
        self._held: list[Callable[[], object]] = []
        self._unheard: list[Callable[[], None]] | None = None

    @property
    def carrier_lost(self) -> bool:
        """True if it lost the board before it knew the end."""
        return self.participant.lost and self.ended not in self.log

    @property
    def ended(self) -> Verdict | None:
        return self.participant.member.ended

    @property
    def log(self) -> list[Verdict]:
        return self.participant.member.log

    @property
    def settled(self) -> bool:
        """True if nothing is to be expected of it any more: it knows the end, or has given up, or is gone."""
        return not self.alive or self.ended is not None or self.gave_up

    def start(self, delay_s: float) -> None:
        if delay_s > self.world.limits.start_timeout_s / 2:
            self.harm("absent", delay_s)
        if delay_s == float("inf"):
            self.alive = False
        self.world.time.call_later(delay_s, self._begin)

    def later(self, delay_s: float, callback: Callable[[], object]) -> None:
        """Calls back if the rank lives then; once it goes on, if it is stopped."""

        def due() -> None:
            if self.alive:
                self._once_awake(callback)

        self.world.time.call_later(delay_s, due)

    def _once_awake(self, callback: Callable[[], object]) -> None:
        if self.frozen or self._unheard is not None:
            self._held.append(callback)
        else:
            callback()

    def post(self, phase: Phase, attempt: int, record: PhaseRecord) -> None:
        if self.alive and not self.failed and self.ended is None:
            self.sent = phase.position
            self.participant.post(phase, attempt, record)

    def _begin(self) -> None:
        if self.alive and self.started_at_s is None:
            self.started_at_s = self.world.time.time()
            self.participant.start()
            self._tick()
            self._work(Phase.CONFIG)

    def _wake(self, callback: Callable[[], None]) -> None:
        if self._unheard is None:
            callback()
        else:
            self._unheard.append(callback)

    def _tick(self) -> None:
        if self.alive and not self.frozen and self._unheard is None:
            self.participant.tick()
        if self.alive and self.ended is None:
            self.world.time.call_later(self.participant.tick_s, self._tick)

    def _work(self, phase: Phase) -> None:
        self.later(self.work_s(phase), lambda: self._due(phase))

    def _due(self, phase: Phase) -> None:
        if self.failed or self.ended is not None:
            return
        record = self.act(self, phase, self._attempt)
        if record is not None:
            self._once_awake(lambda: self.post(phase, self._attempt, record))

    def _take(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        if verdict.ends:
            self.ended_at_s = self.world.time.time()
            self._leave_soon()
        elif verdict.action == "retry":
            self._attempt += 1
            self._work(verdict.phase)
        else:
            self._attempt = 0
            self._work(PHASES[verdict.phase.position + 1])

    # -- leaving

    def _give_up(self) -> None:
        if self.ended is None:
            self.gave_up = True
            self._leave_soon()

    def _leave_soon(self) -> None:
        if self.world.leave_s is not None and self.leaving_at_s is None:
            self.leaving_at_s = self.world.time.time()
            self.later(self.world.leave_s(), self._leave)

    def _leave(self) -> None:
        if not self.participant.lost:
            self.participant.bye()
        if self.participant.byes_seen or self.participant.lost:
            self._stop()
        else:
            self.later(self.world.limits.grace_s, self._stop)
            self.world.waiting_for_byes = self

    def _changed(self) -> None:
        done = self.participant.byes_seen or self.participant.lost
        if done and self.rank == LEADER and self.world.waiting_for_byes is self:
            self._stop()

    def _stop(self) -> None:
        if self.left_at_s is None:
            self.left_at_s = self.world.time.time()
            if self.ended in self.log:  # in order: whatever becomes of its good-bye, this is no death
                self._process_ends()
            self.carrier.stop(tidy=self.participant.none_reads, stopped=self._stopped)

    def _process_ends(self) -> None:
        """Witnesses see that, as if its good-bye had been lost."""
        for rank in self.world.witnesses(self.rank):
            witness = self.world.ranks[rank]
            witness.later(self.world.notice_s(), partial(witness.saw_die, self.rank))

    def saw_die(self, rank: int) -> None:
        if self.started_at_s is not None and self.left_at_s is None:
            self.saw.setdefault(rank, self.world.time.time())
            self.participant.saw_die(rank)

    def _stopped(self) -> None:
        if self.world.hosted and self.rank == LEADER:  # its process ends, and the store in it
            self.world.board.close("the host has left")

    # -- what can happen to a rank

    def harm(self, kind: HarmKind, for_s: float = float("inf")) -> None:
        self.world.harms.append(Harm(self.rank, kind, self.world.time.time(), self.sent, for_s))

    def fail(self, phase: Phase, error: str = "ReadError", kind: FailureKind = "error") -> None:
        self.fail_with(Failure(kind, FailureRecord(error, "it broke", self.rank, phase)))

    def fail_with(self, failure: Failure) -> None:
        if self.failed or self.ended is not None or not self.alive:
            return
        self._begin()
        self.harm("cancelled" if failure.kind == "cancelled" else "error")
        self.failed = True
        self.participant.fail(failure)
        if self.world.leave_s is not None:
            limits = self.world.limits
            self.later(min(limits.timeout_s, limits.window_s + FAIL_WAIT_S), self._give_up)

    def kill(self, *, child_lives: bool = False) -> None:
        """`child_lives`: a forked child of the rank keeps its connections open, so that nobody hears of its end."""
        if not self.alive:
            return
        self.harm("killed")
        self.alive = False
        self._process_ends()
        self.carrier.kill()
        if self.world.hosted and self.rank == LEADER:
            if child_lives:
                self.world.board.freeze()
            else:
                self.world.board.close("reset by peer")

    def freeze(self, for_s: float = float("inf")) -> None:
        if self.frozen or not self.alive:
            return
        self.harm("frozen", for_s)
        self.frozen = True
        self.carrier.freeze()
        if self.world.hosted and self.rank == LEADER:
            self.world.board.freeze()
        if for_s < float("inf"):
            self.world.time.call_later(for_s, self.thaw)

    def thaw(self) -> None:
        if not self.frozen:
            return
        self.frozen = False
        if self.world.hosted and self.rank == LEADER:
            self.world.board.thaw()
        self.carrier.thaw()
        self._go_on()

    def _go_on(self) -> None:
        held, self._held = self._held, []
        for callback in held:
            if self.alive:
                callback()

    def stick(self, for_s: float) -> None:
        """Its service's loop stands still; the threads under it go on beating."""
        if self._unheard is not None or self.frozen or not self.alive:
            return
        self.harm("stuck", for_s)
        self._unheard = []
        self.world.time.call_later(for_s, self._unstick)

    def _unstick(self) -> None:
        unheard, self._unheard = self._unheard or [], None
        for callback in unheard:
            callback()
        self._go_on()

    def cut_off(self, for_s: float) -> None:
        """The network brings nothing for so long; the connections stay open."""
        self.harm("cut off", for_s)
        self.carrier.cut()
        self.world.time.call_later(for_s, self.carrier.heal)

    def lose_store(self) -> None:
        self.harm("lost")
        self.carrier.lose("reset by peer")

    def spoil_heartbeats(self, data: bytes) -> None:
        self.harm("beats")
        self.participant.spoilt = data


class World:
    """All ranks of one simulated session. With `leave_s` they also leave, so long after they know the end; with
    `hosted` the board lives and dies with rank 0. `witnesses(rank)` see that rank's process end, `notice_s()` later."""

    def __init__(
        self,
        world_size: int,
        *,
        act: Callable[[SimulatedRank, Phase, int], PhaseRecord | None] = lambda rank, phase, attempt: PhaseRecord("d"),
        work_s: Callable[[Phase], float] = lambda phase: 0.0,
        weather: Weather = CALM,
        chance: random.Random | None = None,
        limits: Limits = LIMITS,
        describe: Mapping[Phase, Describe] | None = None,
        leave_s: Callable[[], float] | None = None,
        hosted: bool = False,
        witnesses: Callable[[int], Iterable[int]] = lambda rank: (),
        notice_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.time = VirtualTime()
        self.limits = limits
        self.describe = dict(describe or {})
        self.leave_s = leave_s
        self.hosted = hosted
        self.witnesses = witnesses
        self.notice_s = notice_s
        self.harms: list[Harm] = []
        self.waiting_for_byes: SimulatedRank | None = None
        self.weather = weather
        self.board = weather.board(world_size, self.time, chance or random.Random(0))
        self.ranks = [SimulatedRank(self, rank, act, work_s) for rank in range(world_size)]

    def run(self, *, limit_s: float = 3600.0, start_s: Callable[[int], float] = lambda rank: 0.0) -> World:
        """Until every living rank knows the end, and has left if they leave. Who never starts does not live."""
        for rank in self.ranks:
            rank.start(start_s(rank.rank))
        self.time.run(self._done, limit_s=limit_s)
        return self

    def _done(self) -> bool:
        if self.leave_s is None:
            return all(rank.settled for rank in self.ranks)
        return all(rank.left_at_s is not None or not rank.alive for rank in self.ranks)

    @property
    def living(self) -> list[SimulatedRank]:
        return [rank for rank in self.ranks if rank.alive]

    def verdicts_on_board(self) -> list[Verdict]:
        """What was written into the log, in the order of writing; body requests and what cannot be read left out."""
        found = []
        for _, _, data in self.board.log:
            try:
                entry = decode_entry(data)
            except MessageError:
                continue
            if isinstance(entry, Verdict):
                found.append(entry)
        return found

    def cause(self) -> Failure:
        """The one cause that all living ranks saw."""
        finals = [rank.ended for rank in self.living if rank.ended is not None]
        causes = {(final.failure.kind, final.failure.record) for final in finals if final.failure is not None}
        assert len(causes) == 1, causes
        kind, record = causes.pop()
        return Failure(kind, record)
