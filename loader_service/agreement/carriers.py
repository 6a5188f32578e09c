"""What carries messages between ranks: the small protocol, and the carrier for one rank alone.

`memory_carrier.MemoryCarrier` and `store_carrier.StoreCarrier`, over a torch.distributed store, are the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from loader_service.agreement.codec import decode_entry, encode_entry
from loader_service.agreement.messages import Entry, MessageError, Verdict
from loader_service.agreement.protocol import LEADER, Collected, Incoming, LogEntry, Statuses


class Carrier(Protocol):
    """One rank's way to the board of one session. No method blocks; all are called on the session's loop.

    What is written is not lost unless the carrier is, for good, which is told as `Lost`. A wake-up may be lost, as on a
    connection that the network has forgotten: of a log entry, of a collection, of the alarm. Each heartbeat makes up
    for it: it reads the statuses, the log from where it was last received, and on the leader what is collected. So
    everything is received one heartbeat later at the worst, maybe more than once: a log entry at any time, statuses
    only in the order in which they were asked for.

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
