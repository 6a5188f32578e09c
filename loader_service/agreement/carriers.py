"""What carries messages between ranks: the small protocol, the carrier for one rank alone, and one in memory.

`store_carrier.StoreCarrier` is the third, over a torch.distributed store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from loader_service.agreement.codec import decode_entry, encode_entry
from loader_service.agreement.messages import Entry, MessageError, Verdict, entry_key, status_key
from loader_service.agreement.protocol import LEADER, Collected, Incoming, LogEntry, Lost, Statuses


class Carrier(Protocol):
    """One rank's way to the board of one session. No method blocks; all are called on the session's loop.

    `receive` may be called from any thread, never after `stop` has finished. `status` may be called from any thread.
    """

    host_rank: int | None
    """The rank that goes down with the board, if one is known to."""
    where: str
    """Where ranks meet, for messages."""

    def start(self, receive: Callable[[Incoming], None], status: Callable[[], bytes]) -> None:
        """Begins: sends `status()` every heartbeat, follows the log, and tells everything through `receive`."""

    def post(self, key: str, data: bytes) -> None:
        """Writes this rank's own key. Posts and publishes happen in the order of the calls."""

    def post_last(self, key: str, data: bytes) -> None:
        """Writes the last key of this rank, and removes what it posted before: no one reads that any more."""

    def publish(self, entry: Entry) -> None:
        """Puts `entry` at its place of the log if that is free; what stands there then is received."""

    def last_words(self, entry: Entry) -> None:
        """As `publish`, after the carrier was lost because nobody answers: reaches a host that was only stopped, and
        goes on later. Nothing is received."""

    def collect(self, keys: tuple[str, ...]) -> None:
        """Receives `Collected` once all keys are there. Supersedes the previous wish. Leader only."""

    def urge(self) -> None:
        """Sends the status now and makes the leader look at all statuses now, and often from then on."""

    def stalled_s(self, now_s: float) -> float:
        """How long the carrier has been waiting for one answer that should take milliseconds."""

    def stop(self, *, tidy: bool, stopped: Callable[[], None]) -> None:
        """Ends after what was posted before is out; then calls `stopped` (from any thread). `tidy`: also removes what
        the session left on the board; the leader asks for it once no rank will read any more."""


def ends_log(data: bytes) -> bool:
    """True if nothing can follow this entry in the log, or if it cannot be read."""
    try:
        entry = decode_entry(data)
    except MessageError:
        return True
    return isinstance(entry, Verdict) and entry.ends


class SoloCarrier:
    """One rank alone: everything comes back at once, on the caller's stack. No thread, no clock, no torch."""

    host_rank: int | None = None
    where = "this process"

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._wanted: tuple[str, ...] = ()

    def start(self, receive: Callable[[Incoming], None], status: Callable[[], bytes]) -> None:
        self._receive = receive
        self._status = status

    def post(self, key: str, data: bytes) -> None:
        self._values[key] = data
        self._deliver()

    def post_last(self, key: str, data: bytes) -> None:  # noqa: ARG002 - nobody is there to read it
        self._values.clear()

    def publish(self, entry: Entry) -> None:
        self._receive(LogEntry(entry.sequence, encode_entry(entry)))

    def last_words(self, entry: Entry) -> None:
        pass

    def collect(self, keys: tuple[str, ...]) -> None:
        self._wanted = keys
        self._deliver()

    def urge(self) -> None:
        self._receive(Statuses({LEADER: self._status()}, 0.0))

    def stalled_s(self, now_s: float) -> float:  # noqa: ARG002
        return 0.0

    def stop(self, *, tidy: bool, stopped: Callable[[], None]) -> None:  # noqa: ARG002
        self._values.clear()
        stopped()

    def _deliver(self) -> None:
        if self._wanted and all(key in self._values for key in self._wanted):
            keys, self._wanted = self._wanted, ()
            self._receive(Collected(keys, tuple(self._values[key] for key in keys)))


class Schedule(Protocol):
    """A clock and its timers: an event loop's, or virtual time."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[[], None]) -> object: ...


class MemoryBoard:
    """The board of one session in memory, for ranks that are simulated or share one loop.

    Every step of a message takes `delay()` seconds (random in tests), and each carrier's messages keep their order, as
    a store's do. `posts` and `sent_bytes` count what each rank sent, heartbeats apart.
    """

    def __init__(self, world_size: int, schedule: Schedule, *, delay: Callable[[], float] = lambda: 0.0) -> None:
        self.schedule = schedule
        self.delay = delay
        self.values: dict[str, bytes] = {}
        self.carriers: dict[int, MemoryCarrier] = {}
        self.world_size = world_size
        self.posts = [0] * world_size
        self.sent_bytes = [0] * world_size
        self._wishes: dict[str, list[Callable[[], None]]] = {}

    def carrier(self, rank: int, *, heartbeat_s: float) -> MemoryCarrier:
        carrier = MemoryCarrier(self, rank, heartbeat_s)
        self.carriers[rank] = carrier
        return carrier

    def set(self, key: str, data: bytes) -> None:
        self.values[key] = data
        for wish in self._wishes.pop(key, ()):
            wish()

    def when_all(self, keys: Sequence[str], callback: Callable[[], None]) -> None:
        """Calls back once every key is there. One missing key is watched at a time: O(keys) in total."""
        for key in keys:
            if key not in self.values:
                self._wishes.setdefault(key, []).append(lambda: self.when_all(keys, callback))
                return
        callback()


class MemoryCarrier:
    """One rank's way to a `MemoryBoard`. `kill` and `freeze`/`thaw` do to it what signals do to a process."""

    host_rank: int | None = None
    where = "in memory"

    def __init__(self, board: MemoryBoard, rank: int, heartbeat_s: float) -> None:
        self._board = board
        self._rank = rank
        self._heartbeat_s = heartbeat_s
        self._out_at_s = 0.0
        self._in_at_s = 0.0
        self._started = False
        self._alive = True
        self._frozen: list[Callable[[], None]] | None = None
        self._wanted: tuple[str, ...] = ()
        self._looking_s = heartbeat_s

    def start(self, receive: Callable[[Incoming], None], status: Callable[[], bytes]) -> None:
        self._receive = receive
        self._status = status
        self._started = True
        self._beat()
        self._follow(0)

    def post(self, key: str, data: bytes) -> None:
        self._send(lambda: self._board.set(key, data), len(data))
        self._send(self._show, 0)

    def post_last(self, key: str, data: bytes) -> None:
        self.post(key, data)

    def publish(self, entry: Entry) -> None:
        data = encode_entry(entry)
        key = entry_key(entry.sequence)

        def compare_and_set() -> None:
            if key not in self._board.values:
                self._board.set(key, data)
            self._tell(LogEntry(entry.sequence, self._board.values[key]))

        self._send(compare_and_set, len(data))

    def last_words(self, entry: Entry) -> None:
        self.publish(entry)

    def collect(self, keys: tuple[str, ...]) -> None:
        self._wanted = keys

        def collected() -> None:
            if self._wanted == keys:
                self._tell(Collected(keys, tuple(self._board.values[key] for key in keys)))

        self._send(lambda: self._board.when_all(keys, collected), 0)

    def urge(self) -> None:
        self._send(self._show, 0)
        self._send(self._alarm, 0)

    def stalled_s(self, now_s: float) -> float:  # noqa: ARG002
        return 0.0

    def stop(self, *, tidy: bool, stopped: Callable[[], None]) -> None:  # noqa: ARG002 - the board goes with its ranks
        def end() -> None:
            self._alive = False
            stopped()

        self._send(end, 0)

    def kill(self) -> None:
        """The rank is gone between two instructions; what it sent before still arrives."""
        self._alive = False

    def freeze(self) -> None:
        if self._frozen is None:
            self._frozen = []

    def thaw(self) -> None:
        held, self._frozen = self._frozen or [], None
        for callback in held:
            self._run(callback)

    def lose(self, reason: str) -> None:
        """The connection to the board breaks: the rank lives, but nothing goes out or comes in any more."""
        self._alive = False
        self._board.schedule.call_later(0.0, lambda: self._receive(Lost(reason)))

    # -- this rank's side of time

    def _run(self, callback: Callable[[], None]) -> None:
        if self._frozen is not None:
            self._frozen.append(callback)
        elif self._alive:
            callback()

    def _send(self, action: Callable[[], None], size_bytes: int) -> None:
        if not self._alive:
            return
        if size_bytes:
            self._board.posts[self._rank] += 1
            self._board.sent_bytes[self._rank] += size_bytes
        now_s = self._board.schedule.time()
        self._out_at_s = max(self._out_at_s, now_s + self._board.delay())
        self._board.schedule.call_later(self._out_at_s - now_s, action)

    def _tell(self, incoming: Incoming) -> None:
        now_s = self._board.schedule.time()
        self._in_at_s = max(self._in_at_s, now_s + self._board.delay())
        self._board.schedule.call_later(self._in_at_s - now_s, lambda: self._run(lambda: self._receive(incoming)))

    def _follow(self, sequence: int) -> None:
        def there() -> None:
            data = self._board.values[entry_key(sequence)]
            self._tell(LogEntry(sequence, data))
            if not ends_log(data):
                self._follow(sequence + 1)

        self._board.when_all((entry_key(sequence),), there)

    def _show(self) -> None:
        self._board.set(status_key(self._rank), self._status())

    def _alarm(self) -> None:
        if LEADER in self._board.carriers:
            self._board.carriers[LEADER].look_often()

    def look_often(self) -> None:
        """There is a FAIL to see: the leader looks now, and often from now on."""
        often_s = self._heartbeat_s / 20
        if self._started and self._looking_s != often_s:
            self._looking_s = often_s
            self._look_again()

    def _look_again(self) -> None:
        if self._alive:
            self._run(self._look)
            self._board.schedule.call_later(self._looking_s, self._look_again)

    def _beat(self) -> None:
        if not self._alive:
            return
        if self._frozen is None:
            self._send(self._show, 0)
            self._look()
        self._board.schedule.call_later(self._heartbeat_s, self._beat)

    def _look(self) -> None:
        ranks = range(self._board.world_size) if self._rank == LEADER else (LEADER,)
        asked_at_s = self._board.schedule.time()
        self._tell(Statuses({rank: self._board.values.get(status_key(rank), b"") for rank in ranks}, asked_at_s))
