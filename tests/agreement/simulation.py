"""Ranks in virtual time: participants over a memory board, driven by a heap of timers. Deterministic, no threads."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping

from loader_service.agreement.carriers import MemoryBoard
from loader_service.agreement.messages import PHASES, Describe, Failure, Phase, PhaseRecord, Verdict
from loader_service.agreement.participant import Participant
from loader_service.agreement.protocol import Limits
from loader_service.errors import FailureRecord

LIMITS = Limits(timeout_s=60, start_timeout_s=600, grace_s=10, heartbeat_s=1, suspect_s=5)


class VirtualTime:
    """A clock that only moves when there is nothing left to do at its present time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now_s + max(delay, 0.0), next(self._order), callback))

    def run(self, until: Callable[[], bool], *, limit_s: float) -> None:
        """Runs timers until `until()`; fails if that takes more than `limit_s` of virtual time: somebody hangs."""
        while not until():
            assert self._heap, "nothing is left to happen"
            at_s, _, callback = heapq.heappop(self._heap)
            assert at_s <= limit_s, f"not done after {limit_s} s"
            self.now_s = at_s
            callback()


class SimulatedRank:
    """Runs all phases as the service does: work, exchange, and on failure FAIL first. `script` says what goes wrong.

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
        self.verdicts: list[Verdict] = []
        self.carrier = world.board.carrier(rank, heartbeat_s=world.limits.heartbeat_s)
        self.participant = Participant(
            self.carrier,
            rank=rank,
            world_size=world.board.world_size,
            limits=world.limits,
            describe=world.describe,
            clock=world.time.time,
            on_verdict=self._take,
        )
        self._attempt = 0

    @property
    def carrier_lost(self) -> bool:
        return self.participant.lost

    @property
    def ended(self) -> Verdict | None:
        return self.participant.member.ended

    @property
    def log(self) -> list[Verdict]:
        return self.participant.member.log

    def start(self, delay_s: float) -> None:
        self.world.time.call_later(delay_s, self._begin)

    def _begin(self) -> None:
        if self.alive:
            self.participant.start()
            self._tick()
            self._work(Phase.CONFIG)

    def _tick(self) -> None:
        if self.alive and not self.frozen:
            self.participant.tick()
        if self.alive and self.ended is None:
            self.world.time.call_later(self.participant.tick_s, self._tick)

    def _work(self, phase: Phase) -> None:
        self.world.time.call_later(self.work_s(phase), lambda: self._due(phase))

    def _due(self, phase: Phase) -> None:
        if not self.alive or self.failed or self.ended is not None:
            return
        if self.frozen:
            self.world.time.call_later(1.0, lambda: self._due(phase))
            return
        record = self.act(self, phase, self._attempt)
        if record is not None and self.alive and not self.failed:
            self.participant.post(phase, self._attempt, record)

    def _take(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        if verdict.ends:
            return
        if verdict.action == "retry":
            self._attempt += 1
            self._work(verdict.phase)
        else:
            self._attempt = 0
            self._work(PHASES[verdict.phase.position + 1])

    # -- what can happen to a rank

    def fail(self, phase: Phase, error: str = "ReadError", kind: str = "error") -> None:
        self.failed = True
        self.participant.fail(Failure(kind, FailureRecord(error, "it broke", self.rank, phase)))  # type: ignore[arg-type]

    def kill(self) -> None:
        self.alive = False
        self.carrier.kill()

    def freeze(self) -> None:
        self.frozen = True
        self.carrier.freeze()

    def thaw(self) -> None:
        self.frozen = False
        self.carrier.thaw()


class World:
    """All ranks of one simulated session."""

    def __init__(
        self,
        world_size: int,
        *,
        act: Callable[[SimulatedRank, Phase, int], PhaseRecord | None] = lambda rank, phase, attempt: PhaseRecord("d"),
        work_s: Callable[[Phase], float] = lambda phase: 0.0,
        delay: Callable[[], float] = lambda: 0.0001,
        limits: Limits = LIMITS,
        describe: Mapping[Phase, Describe] | None = None,
    ) -> None:
        self.time = VirtualTime()
        self.limits = limits
        self.describe = dict(describe or {})
        self.board = MemoryBoard(world_size, self.time, delay=delay)
        self.ranks = [SimulatedRank(self, rank, act, work_s) for rank in range(world_size)]

    def run(self, *, limit_s: float = 3600.0, start_s: Callable[[int], float] = lambda rank: 0.0) -> World:
        for rank in self.ranks:
            rank.start(start_s(rank.rank))
        self.time.run(lambda: all(rank.ended for rank in self.ranks if rank.alive), limit_s=limit_s)
        return self

    @property
    def living(self) -> list[SimulatedRank]:
        return [rank for rank in self.ranks if rank.alive]

    def cause(self) -> Failure:
        """The one cause that all living ranks saw."""
        finals = [rank.ended for rank in self.living if rank.ended is not None]
        causes = {(final.failure.kind, final.failure.record) for final in finals if final.failure is not None}
        assert len(causes) == 1, causes
        kind, record = causes.pop()
        return Failure(kind, record)
