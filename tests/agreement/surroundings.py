"""What simulated ranks live in: virtual time, a board that remembers its log, and the weather between ranks."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from loader_service.agreement.memory_carrier import Delivery, MemoryBoard

_MOST_STEPS = 2_000_000


class VirtualTime:
    """A clock that only moves when there is nothing left to do at its present time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._steps = 0

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now_s + max(delay, 0.0), next(self._order), callback))

    def run(self, until: Callable[[], bool], *, limit_s: float) -> None:
        """Runs timers until `until()`; fails if that takes more than `limit_s` of virtual time, or without end at one
        time: somebody hangs."""
        while not until():
            assert self._heap, "nothing is left to happen"
            self._steps += 1
            assert self._steps < _MOST_STEPS, f"not done after {_MOST_STEPS} steps"
            at_s, _, callback = heapq.heappop(self._heap)
            assert at_s <= limit_s, f"not done after {limit_s} s"
            self.now_s = at_s
            callback()


class WatchedBoard(MemoryBoard):
    """Keeps what was written into the log, and when: the board itself only knows what stands there now."""

    log: list[tuple[float, str, bytes]]

    def set(self, key: str, data: bytes) -> None:
        if key.startswith("v/"):
            self.log.append((self.schedule.time(), key, data))
        super().set(key, data)


@dataclass(frozen=True)
class Weather:
    """What the network does: how long a step of a message takes at most, and how likely it is that a wake-up is lost,
    what a heartbeat reads is lost, and anything comes twice."""

    step_s: float = 0.0001
    lost_wakes: float = 0.0
    lost_beats: float = 0.0
    repeated: float = 0.0

    def board(self, world_size: int, time: VirtualTime, chance: random.Random) -> WatchedBoard:
        def delay() -> float:
            return self.step_s if self == CALM else self.step_s * chance.choice((0.0, 0.02, 1.0)) * chance.random()

        def loses(what: Delivery) -> bool:
            return chance.random() < (self.lost_beats if what == "beat" else self.lost_wakes)

        repeats = lambda: chance.random() < self.repeated  # noqa: E731
        board = WatchedBoard(world_size, time, delay=delay, loses=loses, repeats=repeats)
        board.log = []
        return board


CALM = Weather()
