"""A carrier in memory, for ranks that are simulated or share one loop: what can go wrong between ranks can be made to
go wrong, at any moment and in virtual time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal, Protocol, TypeAlias

from loader_service.agreement.carriers import ends_log
from loader_service.agreement.codec import encode_entry
from loader_service.agreement.messages import Entry, entry_key, status_key
from loader_service.agreement.protocol import LEADER, LOOKS_A_BEAT, Collected, Incoming, LogEntry, Lost, Statuses

_ALARM = "alarm"

Delivery: TypeAlias = Literal["log", "collected", "alarm", "answer", "beat"]
"""What brings something to a rank: three kinds of wake-ups, the answer to a publish, and what a heartbeat reads."""


class Schedule(Protocol):
    """A clock and its timers: an event loop's, or virtual time."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[[], None]) -> object: ...


class MemoryBoard:
    """The board of one session in memory, for ranks that are simulated or share one loop.

    Every step of a message takes `delay()` seconds (random in tests). `loses(what)` says of each delivery whether it is
    lost, `repeats()` whether it comes twice. Of one carrier what it writes keeps its order, and so does what comes back
    on each of its connections (writing and beats, log, collection, alarm), as with a store; between those it does not.
    `posts` and `sent_bytes` count what each rank sent, heartbeats apart.
    """

    def __init__(
        self,
        world_size: int,
        schedule: Schedule,
        *,
        delay: Callable[[], float] = lambda: 0.0,
        loses: Callable[[Delivery], bool] = lambda what: False,  # noqa: ARG005
        repeats: Callable[[], bool] = lambda: False,
    ) -> None:
        self.schedule = schedule
        self.delay = delay
        self.loses = loses
        self.repeats = repeats
        self.values: dict[str, bytes] = {}
        self.carriers: dict[int, MemoryCarrier] = {}
        self.world_size = world_size
        self.posts = [0] * world_size
        self.sent_bytes = [0] * world_size
        self._wishes: dict[str, list[Callable[[], None]]] = {}
        self._held: list[Callable[[], None]] | None = None
        self.closed = ""

    def carrier(self, rank: int, *, heartbeat_s: float) -> MemoryCarrier:
        carrier = MemoryCarrier(self, rank, heartbeat_s)
        self.carriers[rank] = carrier
        return carrier

    def set(self, key: str, data: bytes) -> None:
        self.values[key] = data
        for wish in self._wishes.pop(key, ()):
            wish()

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.values.pop(key, None)

    def when_all(self, keys: Sequence[str], callback: Callable[[], None]) -> None:
        """Calls back once every key is there. One missing key is watched at a time: O(keys) in total."""
        for key in keys:
            if key not in self.values:
                self._wishes.setdefault(key, []).append(lambda: self.when_all(keys, callback))
                return
        callback()

    def do(self, action: Callable[[], None]) -> None:
        if self._held is None:
            action()
        else:
            self._held.append(action)

    def freeze(self) -> None:
        """The host is stopped: what is written lies there until `thaw`, and nobody gets an answer."""
        self._held = self._held or []

    def thaw(self) -> None:
        held, self._held = self._held or [], None
        for action in held:
            self.do(action)

    def close(self, reason: str) -> None:
        """The host is gone: every carrier loses it, and who comes later does not reach it."""
        self.closed = reason
        for carrier in self.carriers.values():
            carrier.lose(reason)


class MemoryCarrier:
    """One rank's way to a `MemoryBoard`. `kill` and `freeze`/`thaw` do to it what signals do to a process, `cut`/`heal`
    and `lose` what a network does."""

    host_rank: int | None = None
    where = "in memory"

    def __init__(self, board: MemoryBoard, rank: int, heartbeat_s: float) -> None:
        self._board = board
        self._rank = rank
        self._often_s = heartbeat_s / 20
        self._look_s = heartbeat_s / (LOOKS_A_BEAT if rank == LEADER else 1)
        self._started = False
        self._alive = True
        self._stopped = False  # the process, by a signal
        self._held: list[Callable[[], None]] | None = None
        self._out_at_s = 0.0
        self._out_until_s = math.inf  # what would arrive later is not out, where the process or the network ended
        self._in_at_s: dict[str, float] = {}
        self._unanswered: deque[float] = deque()
        self._beats = 0
        self._beat_is_out = False
        self._wanted: tuple[str, ...] = ()
        self._log_length = 0
        self._keys_written: list[str] = []

    def start(self, receive: Callable[[Incoming], None], status: Callable[[], bytes]) -> None:
        self._receive = receive
        self._status = status
        self._started = True
        if self._board.closed:
            self.lose(self._board.closed, met=False)
        self._send(lambda: self._follow(0))
        if self._rank == LEADER:
            self._send(lambda: self._board.when_all((_ALARM,), self._alarmed))
        self._beat(self._beats)

    def post(self, key: str, data: bytes) -> None:
        self._keys_written.append(key)
        self._send(lambda: self._board.set(key, data), len(data))
        self._send(self._show)

    def post_last(self, key: str, data: bytes) -> None:
        written, self._keys_written = self._keys_written, []
        self._send(lambda: self._board.remove(written))
        self._send(lambda: self._board.set(key, data), len(data))

    def publish(self, entry: Entry) -> None:
        data = encode_entry(entry)
        key = entry_key(entry.sequence)

        def compare_and_set() -> None:
            if key not in self._board.values:
                self._board.set(key, data)
            self._tell("answer", LogEntry(entry.sequence, self._board.values[key]))

        self._send(compare_and_set, len(data))

    def last_words(self, entry: Entry) -> None:
        if self._rank not in (LEADER, self.host_rank) and self.host_rank is not None:
            self.publish(entry)

    def collect(self, keys: tuple[str, ...]) -> None:
        self._wanted = keys
        self._send(lambda: self._board.when_all(keys, lambda: self._bring("collected", keys)))

    def urge(self) -> None:
        self._send(self._show)
        self._send(lambda: self._board.set(_ALARM, b"fail"))

    def stalled_s(self, now_s: float) -> float:
        return now_s - self._unanswered[0] if self._unanswered else 0.0

    def stop(self, *, tidy: bool, stopped: Callable[[], None]) -> None:
        def end() -> None:
            self._alive = False
            if tidy and self._rank == LEADER:
                self._board.values.clear()
            stopped()

        if self._alive:
            self._send(end)
        else:
            stopped()

    # -- what happens to a rank

    def kill(self) -> None:
        """The rank is gone between two instructions; what is out by then still arrives."""
        self._alive = False
        self._held = None
        self._out_until_s = self._board.schedule.time() + self._board.delay()

    def freeze(self) -> None:
        self._stopped = True
        self.cut()

    def thaw(self) -> None:
        self._stopped = False
        now_s = self._board.schedule.time()
        self._unanswered = deque(now_s for _ in self._unanswered)  # a stopped process waits for nothing
        self.heal()

    def cut(self) -> None:
        """Nothing goes out or comes in until `heal`; nothing is lost either."""
        if self._held is None:
            self._held = []
            self._out_until_s = self._board.schedule.time() + self._board.delay()

    def heal(self) -> None:
        held, self._held = self._held or [], None
        if self._alive:
            self._out_until_s = math.inf
        for callback in held:
            callback()

    def lose(self, reason: str, *, met: bool = True) -> None:
        """The connection to the board breaks: the rank lives, but nothing goes out or comes in any more."""
        if not self._alive or not self._started:
            return
        self._alive = False
        self._out_until_s = self._board.schedule.time() + self._board.delay()
        tell = partial(self._receive, Lost(reason, met=met))
        self._board.schedule.call_later(0.0, lambda: self._held.append(tell) if self._held is not None else tell())

    # -- this rank's side of time

    def _send(self, action: Callable[[], None], size_bytes: int = 0) -> None:
        if not self._alive:
            return
        if size_bytes:
            self._board.posts[self._rank] += 1
            self._board.sent_bytes[self._rank] += size_bytes
        now_s = self._board.schedule.time()
        at_s = self._out_at_s = max(self._out_at_s, now_s + self._board.delay())
        self._unanswered.append(now_s)
        if self._held is not None:
            at_s = math.inf
            self._held.append(lambda: self._arrive(at_s, action))
        else:
            self._board.schedule.call_later(at_s - now_s, lambda: self._arrive(at_s, action))

    def _arrive(self, at_s: float, action: Callable[[], None]) -> None:
        def answered() -> None:
            self._unanswered.popleft()
            action()

        if at_s <= self._out_until_s:
            self._board.do(answered)
        elif self._held is not None:
            self._held.append(lambda: self._arrive(at_s, action))

    def _tell(self, what: Delivery, incoming: Incoming) -> None:
        if not self._board.loses(what):
            self._deliver(what, lambda: self._take(incoming))

    def _deliver(self, what: Delivery, callback: Callable[[], None]) -> None:
        connection = "write" if what in {"answer", "beat"} else what
        now_s = self._board.schedule.time()
        for _ in range(2 if self._board.repeats() else 1):
            at_s = max(self._in_at_s.get(connection, 0.0), now_s + self._board.delay())
            self._in_at_s[connection] = at_s
            self._board.schedule.call_later(at_s - now_s, lambda: self._run(callback))

    def _run(self, callback: Callable[[], None]) -> None:
        if self._held is not None:
            self._held.append(lambda: self._run(callback))
        elif self._alive:
            callback()

    def _take(self, incoming: Incoming) -> None:
        if isinstance(incoming, LogEntry) and incoming.sequence == self._log_length:
            self._log_length += 1
        self._receive(incoming)

    # -- log, collection, alarm, beats

    def _follow(self, sequence: int) -> None:
        def there() -> None:
            data = self._board.values[entry_key(sequence)]
            self._tell("log", LogEntry(sequence, data))
            if not ends_log(data):
                self._follow(sequence + 1)

        self._board.when_all((entry_key(sequence),), there)

    def _bring(self, what: Delivery, keys: tuple[str, ...]) -> None:
        """All keys are there: receives them, once, if they are still wished for."""
        values = self._board.values
        if keys and keys == self._wanted and all(key in values for key in keys) and not self._board.loses(what):
            self._wanted = ()
            collected = Collected(keys, tuple(values[key] for key in keys))
            self._deliver(what, lambda: self._take(collected))

    def _alarmed(self) -> None:
        def look_often() -> None:
            if self._look_s != self._often_s:
                self._look_s = self._often_s
                self._beats += 1
                self._beat(self._beats)

        if not self._board.loses("alarm"):
            self._deliver("alarm", look_often)

    def _show(self) -> None:
        self._board.set(status_key(self._rank), self._status())

    def _beat(self, series: int) -> None:
        if not self._alive or series != self._beats:
            return
        if not self._stopped and not self._beat_is_out:
            self._beat_is_out = True
            asked_at_s = self._board.schedule.time()
            self._send(self._show)
            self._send(lambda: self._look(asked_at_s))
        self._board.schedule.call_later(self._look_s, lambda: self._beat(series))

    def _look(self, asked_at_s: float) -> None:
        self._beat_is_out = False
        ranks = range(self._board.world_size) if self._rank == LEADER else (LEADER,)
        statuses = {rank: self._board.values.get(status_key(rank), b"") for rank in ranks}
        self._tell("beat", Statuses(statuses, asked_at_s))
        self._catch_up()

    def _catch_up(self) -> None:
        """What wake-ups should have brought by now, in case one was lost."""
        sequence = self._log_length
        while (data := self._board.values.get(entry_key(sequence))) is not None:
            self._tell("beat", LogEntry(sequence, data))
            sequence += 1
        self._bring("beat", self._wanted)
