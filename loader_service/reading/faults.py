"""The faults of the scripted storage: which calls one acts on, and what it does to them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from loader_service.reading.reader import FileIdentity

Operation = Literal["list", "identify", "open", "open direct", "read", "read direct", "drop", "read ahead"]
"""What a fault acts on. `open` and `read` are those through the page cache."""


class Gate:
    """Where a scripted call stops until it is told to go on. `calls` counts those that reached it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()
        self.calls = 0

    def release(self) -> None:
        """Lets everything through that waits here or will come."""
        self.go.set()

    def pass_through(self) -> None:
        """Called by the fake in the reading thread: says that it is here, and waits."""
        self.calls += 1
        self.reached.set()
        self.go.wait()


@dataclass(slots=True, eq=False)
class Fault:
    """Acts on calls of `operations` on paths that match, from the `nth` on, `times` in a row, if they touch `within`.

    Then it waits at its gate or for its delay, and raises its error; else reads return at most `most_bytes`, the file
    ends at `ends_at`, and looks as `identity` says.
    """

    pattern: str
    operations: tuple[Operation, ...]
    nth: int
    times: int | None
    within: tuple[int, int] | None
    error: Callable[[], BaseException] | None = None
    gate: Gate | None = None
    delay_s: float = 0.0
    most_bytes: int | None = None
    ends_at: int | None = None
    identity: dict[str, int] = field(default_factory=dict)
    seen: int = 0

    def takes(self, operation: Operation, path: str, start: int, stop: int) -> bool:
        """Whether it acts on this call; counts the calls that match."""
        if operation not in self.operations or not matches(self.pattern, path):
            return False
        if self.within is not None and not (start < self.within[1] and self.within[0] < stop):
            return False
        turn = self.seen - self.nth
        self.seen += 1
        return turn >= 0 and (self.times is None or turn < self.times)

    def act(self) -> None:
        if self.gate is not None:
            self.gate.pass_through()
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.error is not None:
            raise self.error()


def matches(pattern: str, path: str) -> bool:
    """Whether the pattern is that of the path, or of its last component."""
    return pattern == path or fnmatchcase(path, pattern) or fnmatchcase(path.rpartition("/")[2], pattern)


def disguise(identity: FileIdentity, faults: Sequence[Fault]) -> FileIdentity:
    """The identity that a file shows under these faults."""
    for fault in faults:
        identity = dataclasses.replace(identity, **fault.identity)
    return identity


def room_for(faults: Sequence[Fault], offset: int, wanted_bytes: int) -> int:
    """How many bytes a read from `offset` may have at most."""
    room = wanted_bytes
    for fault in faults:
        if fault.most_bytes is not None:
            room = min(room, fault.most_bytes)
        if fault.ends_at is not None:
            room = min(room, max(0, fault.ends_at - offset))
    return room
