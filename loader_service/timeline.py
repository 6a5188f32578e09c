"""A load over time: what it is at, looked at again and again from a thread of its own.

Recording costs the load nothing: it keeps these counters anyway, and only a recorder looks at them. What comes out is
plain data, for figures, for JSON and for a picture.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Self

LOOK_EVERY_S = 0.008
LEAST_STEP_S = 0.02  # shorter ones would show single reads as peaks
MOST_STEPS = 160
_ALL_STEPS = 2560  # of all ranks' timelines together: they travel to rank 0
MOST_SAMPLES = 8192  # of a load that takes longer, every second look is kept, then every fourth, ...


@dataclass(frozen=True, slots=True)
class Counters:
    """A load on one rank at one moment. Bytes are counted from its beginning, but for `held_bytes`.

    `read_bytes` came from files, for this rank's own use and for its node. `filled_bytes` lie ready or were taken,
    `taken_bytes` were. `in_flight` of the reading `threads` are at work, on headers too. `queued` units are filled and
    not taken, `held_bytes` of staging memory are out. `consumer_waits` for data; the loader `waits_for_memory` that the
    consumer has to give back, or that a larger budget would have.
    """

    read_bytes: int = 0
    filled_bytes: int = 0
    taken_bytes: int = 0
    in_flight: int = 0
    threads: int = 0
    queued: int = 0
    held_bytes: int = 0
    consumer_waits: bool = False
    waits_for_memory: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters `at_s` seconds after the recording began, and the processor time of the process since then."""

    at_s: float
    cpu_s: float
    counters: Counters


class Recorder:
    """Looks at a load every few milliseconds, from `with` to its end, on a daemon thread of its own. Never blocks.

    `look` is called on that thread, and must not block; where it raises, the recording ends early. The process's
    processor time is in every sample, that of the recorder included: some 50 us a look.
    """

    def __init__(
        self, look: Callable[[], Counters], *, every_s: float = LOOK_EVERY_S, most: int = MOST_SAMPLES
    ) -> None:
        self._look = look
        self._every_s = every_s
        self._most = most
        self._samples: list[Sample] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()  # the last sample is the one of the end
        self._thread = threading.Thread(target=self._run, name="loader-timeline", daemon=True)
        self._began_s = self._began_cpu_s = 0.0

    def __enter__(self) -> Self:
        self._began_s, self._began_cpu_s = time.monotonic(), time.process_time()
        self._note()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._stop.set()
            self._note()

    @property
    def samples(self) -> tuple[Sample, ...]:
        """In order of time, the first at the beginning; complete once the `with` is left."""
        return tuple(self._samples)

    def _run(self) -> None:
        every_s = self._every_s
        while not self._stop.wait(every_s):
            with self._lock:
                if self._stop.is_set():
                    return
                try:
                    self._note()
                except Exception:  # noqa: BLE001 - a load is not disturbed by who watches it
                    return
                if len(self._samples) >= self._most:
                    del self._samples[1::2]
                    every_s *= 2

    def _note(self) -> None:
        counters = self._look()
        at_s, cpu_s = time.monotonic() - self._began_s, time.process_time() - self._began_cpu_s
        self._samples.append(Sample(at_s, cpu_s, counters))


@dataclass(frozen=True, slots=True)
class Shares:
    """Parts of the time between a load's opening and its last filled byte, 0 to 1 each.

    `consumer_waits`: for data. `threads_busy`: all reading threads are at work. The others do not overlap, with some
    thread idle: `consumer_holds`, the loader waits for memory while the consumer has data to take; `budget_full`, it
    waits for memory while the consumer waits too; `loader_busy`, it does not wait for memory.
    """

    consumer_waits: float = 0.0
    threads_busy: float = 0.0
    consumer_holds: float = 0.0
    budget_full: float = 0.0
    loader_busy: float = 0.0
    in_flight: float = 0.0
    """How many threads were at work on average."""


def shares(samples: Sequence[Sample], start_s: float) -> Shares:
    """How the time from `start_s` on was spent, until all was filled; all zeros where nothing was filled."""
    last = samples[-1].counters.filled_bytes if samples else 0
    spent = dict.fromkeys((each.name for each in fields(Shares)), 0.0)
    total_s = 0.0
    for before, after in pairwise(samples):
        span_s = after.at_s - max(before.at_s, start_s)
        if span_s <= 0 or before.counters.filled_bytes >= last:
            continue
        total_s += span_s
        for name in _states(before.counters):
            spent[name] += span_s
        spent["in_flight"] += span_s * before.counters.in_flight
    return Shares(**{name: value / total_s for name, value in spent.items()}) if total_s else Shares()


def _states(counters: Counters) -> Iterator[str]:
    if counters.consumer_waits:
        yield "consumer_waits"
    if counters.threads and counters.in_flight >= counters.threads:
        yield "threads_busy"
    elif not counters.waits_for_memory:
        yield "loader_busy"
    else:
        yield "budget_full" if counters.consumer_waits else "consumer_holds"


@dataclass(frozen=True, slots=True)
class Timeline:
    """One rank's load in equal steps of `step_s` seconds, as columns of one length: for JSON and for a picture.

    `read_bytes`, `filled_bytes`, `taken_bytes` and `cpu_s` are what came in each step; `in_flight`, `queued`,
    `held_bytes`, `consumer_waits` and `waits_for_memory` are means over it. `phases` are the report's, in seconds.
    """

    rank: int
    step_s: float
    seconds: float
    threads: int
    capacity_bytes: int
    phases: Mapping[str, float] = field(default_factory=dict)
    read_bytes: tuple[float, ...] = ()
    filled_bytes: tuple[float, ...] = ()
    taken_bytes: tuple[float, ...] = ()
    cpu_s: tuple[float, ...] = ()
    in_flight: tuple[float, ...] = ()
    queued: tuple[float, ...] = ()
    held_bytes: tuple[float, ...] = ()
    consumer_waits: tuple[float, ...] = ()
    waits_for_memory: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Plain data; numbers are rounded to what a picture shows, since every rank's travel to rank 0."""
        document: dict[str, object] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, tuple):
                value = [round(number, None if each.name.endswith("_bytes") else 4) for number in value]
            document[each.name] = dict(value) if isinstance(value, Mapping) else value
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, object]) -> Timeline:
        """What `as_dict` gave."""
        known = {each.name: document[each.name] for each in fields(cls)}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in known.items()})  # type: ignore[arg-type]


_FLOWS = ("read_bytes", "filled_bytes", "taken_bytes")
_LEVELS = ("in_flight", "queued", "held_bytes", "consumer_waits", "waits_for_memory")


def steps_of(world_size: int) -> int:
    """How many steps the timeline of each of so many ranks has, where all of them travel to one rank."""
    return min(MOST_STEPS, max(16, _ALL_STEPS // world_size))


def timeline_of(
    samples: Sequence[Sample], *, rank: int, phases: Mapping[str, float], capacity_bytes: int, steps: int = MOST_STEPS
) -> Timeline:
    """The recording in `steps` equal steps, fewer where it is short. What a step has of two samples is shared out by
    time."""
    seconds = samples[-1].at_s if samples else 0.0
    threads = samples[-1].counters.threads if samples else 0  # before, as many as read headers
    count = max(1, min(steps, len(samples) - 1, int(seconds / LEAST_STEP_S)))
    step_s = seconds / count
    columns = {name: [0.0] * count for name in ("cpu_s", *_FLOWS, *_LEVELS)}
    for before, after in pairwise(samples):
        span_s = after.at_s - before.at_s
        for step, part_s in _parts(before.at_s, after.at_s, step_s, count):
            share = part_s / span_s
            columns["cpu_s"][step] += (after.cpu_s - before.cpu_s) * share
            for name in _FLOWS:
                columns[name][step] += (getattr(after.counters, name) - getattr(before.counters, name)) * share
            for name in _LEVELS:
                columns[name][step] += float(getattr(before.counters, name)) * part_s / step_s
    found = {name: tuple(column) for name, column in columns.items()}
    return Timeline(rank, step_s, seconds, threads, capacity_bytes, phases, **found)


def _parts(start_s: float, stop_s: float, step_s: float, count: int) -> Iterator[tuple[int, float]]:
    """(step, seconds in it) of a span of time. The last step has whatever comes after it, too."""
    if stop_s <= start_s:
        return
    for step in range(min(count - 1, int(start_s / step_s)), count):
        end_s = stop_s if step == count - 1 else min(stop_s, (step + 1) * step_s)
        begin_s = max(start_s, step * step_s)
        if end_s > begin_s:
            yield step, end_s - begin_s
        if end_s >= stop_s:
            return
