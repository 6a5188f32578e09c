"""The raw weight cache: memory that loads have filled from files, held for later loads of the same bytes.

One a process, shared by all services in it. It holds byte ranges of files, not tensors, so that any load finds what
another one left. Nothing is read and nothing allocated here: loads bring memory and take it, and several may have it at
once. What is held is read-only by contract. A change in place is looked for at each use, in a sample of the bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from loader_service import logs
from loader_service.errors import ConfigError
from loader_service.memory.allocators import HostBuffer
from loader_service.memory.fingerprints import fingerprint
from loader_service.memory.headers import HeaderCache
from loader_service.memory.held import ByteRanges, HeldRange, HeldRanges, Segment, clipped
from loader_service.report import PolicyOutcome
from loader_service.sizes import format_size

_log = logs.logger(__name__)


class FileState(NamedTuple):
    """A file as it was when it was read: its absolute path, and what tells this state of it from others."""

    path: str
    identity: Hashable


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """The cache at one moment.

    `reserved_bytes` is what open loads may still add, `entries` counts ranges. `hits` and `misses` count lookups,
    `evictions` ranges that went to make room, `changed` ranges that were found changed in place. `header_bytes` are
    beside `held_bytes`.
    """

    held_bytes: int
    reserved_bytes: int
    entries: int
    hits: int
    misses: int
    evictions: int
    changed: int
    headers: int
    header_bytes: int


@dataclass(slots=True, eq=False)
class _Claim:
    """What an open load may count on: `wanted` is not evicted, `reserved_bytes` are its own. `adds`: until it is over,
    if it was admitted."""

    wanted: Mapping[FileState, ByteRanges]
    capacity_bytes: int
    adds: bool = False
    reserved_bytes: int = 0


class Admission:
    """One load's part in the cache, from `WeightCache.claim` to `close`. Thread-safe.

    Until then none of the ranges that the load wants is evicted, and once it has made room, that for those which it
    lacks is reserved. `lacking_bytes` of what it wants were not held. `admitted` is false where there is no room for
    them, or none was made yet: then nothing is added, and what is held is used all the same. `outcome` says which, in
    figures.
    """

    def __init__(
        self,
        outcome: PolicyOutcome,
        *,
        lacking_bytes: int,
        make_room: Callable[[], tuple[bool, PolicyOutcome]],
        insert: Callable[[FileState, int, memoryview], int],
        close: Callable[[], None],
    ) -> None:
        self.outcome = outcome
        self.admitted = False
        self.lacking_bytes = lacking_bytes
        self._make_room = make_room
        self._insert = insert
        self._close = close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def make_room(self) -> None:
        """Lets go of what the load's bytes need room of, before any of them is read. Once. Blocks while memory goes
        back to the system."""
        self.admitted, self.outcome = self._make_room()

    def insert(self, file: FileState, start: int, memory: HostBuffer | memoryview) -> int:
        """Holds `memory`, filled with the file's bytes from `start` on. Returns how many bytes of it are held anew.

        Called before anybody who might change the memory has it. What is held already is not held twice, and what the
        load did not announce is taken only where there is room. A load that is over, or was not admitted, adds nothing.
        """
        return self._insert(file, start, memory if isinstance(memory, memoryview) else memory.memoryview)

    def close(self) -> None:
        """Gives back what was reserved and not used; what was added stays. A second call does nothing."""
        self._close()


class WeightCache:
    """ByteRanges of files with the memory that holds them; the least recently used go first. Thread-safe.

    Each load gives its own `capacity_bytes`, since each service has its own configuration. What is held and reserved
    together never exceeds the largest one given. A load with a lower one brings it down to that, but for what it wants
    itself and what other open loads want or have reserved.

    Memory counts by its bytes in the file. One that is a part of a larger allocation keeps all of that alive.
    """

    def __init__(self) -> None:
        self.headers = HeaderCache()
        # Re-entrant: the garbage collector may end a load, and with it an admission, within whatever runs here.
        self._lock = threading.RLock()
        self._files: dict[FileState, HeldRanges] = {}
        self._claims: list[_Claim] = []
        self._clock = 0
        self._held_bytes = 0
        self._reserved_bytes = 0
        self._hits = self._misses = self._evictions = self._changed = 0

    def held(self, file: FileState, start: int, stop: int) -> list[Segment] | None:
        """The file's bytes [start, stop), in one segment or several that follow each other; None unless all are held.

        A range that was changed in place is dropped with a warning, and the answer is None: it is to be read anew.
        """
        with self._lock:
            ranges = self._files.get(file)
            if ranges is None or (found := ranges.covering(start, stop)) is None:
                self._misses += 1
                return None
        # What is held stays where it is, so its sample is summed without the lock.
        changed = [held for held in found if fingerprint(held.memory) != held.fingerprint]
        with self._lock:
            if not changed:
                self._hits += 1
                for held in found:
                    ranges.use(held, self._tick())
                return [clipped(held, start, stop) for held in found]
            self._misses += 1
            dropped = [held for held in changed if self._drop(file, held)]
            self._changed += len(dropped)
        for held in dropped:
            _log.warning(
                "%s: bytes [%d, %d) were changed in the raw weight cache and are read anew: what it shares must not be "
                "written to",
                file.path,
                held.start,
                held.stop,
            )
        return None

    def claim(self, wanted: Mapping[FileState, ByteRanges], capacity_bytes: int) -> Admission:
        """What a load that is about to begin wants. To be closed when the load is over; it adds nothing until it has
        made room, and what it wants stays.

        Raises ConfigError for a capacity below 1: a load whose cache is off does not ask.
        """
        if capacity_bytes < 1:
            raise ConfigError(f"the raw weight cache cannot hold {capacity_bytes} bytes")
        claim = _Claim(wanted, capacity_bytes)
        wanted_bytes = sum(ranges.nbytes for ranges in wanted.values())
        with self._lock:
            self._claims.append(claim)
            lacking_bytes = wanted_bytes - self._overlap_bytes(wanted)
        effective = "reuse only" if lacking_bytes else "on"
        return Admission(
            PolicyOutcome("on", effective, _held_text(wanted_bytes, lacking_bytes)),
            lacking_bytes=lacking_bytes,
            make_room=partial(self._make_room, claim),
            insert=partial(self._insert, claim),
            close=partial(self._end, claim),
        )

    def make_room(self, wanted: Mapping[FileState, ByteRanges], capacity_bytes: int) -> Admission:
        """`claim`, and room for it at once."""
        admission = self.claim(wanted, capacity_bytes)
        admission.make_room()
        return admission

    def _make_room(self, claim: _Claim) -> tuple[bool, PolicyOutcome]:
        """Evicts before anything is added, so that old and new memory do not add up: until what stays and what the load
        lacks fit its capacity. What this load or another open one wants stays. Where that leaves too little room the
        load is not admitted, and nothing is evicted but what exceeds the capacity by itself."""
        wanted, capacity_bytes = claim.wanted, claim.capacity_bytes
        wanted_bytes = sum(ranges.nbytes for ranges in wanted.values())
        with self._lock:
            if claim not in self._claims:  # the load has ended meanwhile
                return False, PolicyOutcome("on", "reuse only", "the load has ended")
            lacking_bytes = wanted_bytes - self._overlap_bytes(wanted)
            stays = self._what_stays()
            stays_bytes = self._reserved_bytes + sum(int(held.sizes[kept].sum()) for held, kept in stays)
            claim.adds = lacking_bytes == 0 or stays_bytes + lacking_bytes <= capacity_bytes
            if claim.adds:
                self._reserve(claim, lacking_bytes)
            evicted = self._evict(self._held_bytes + self._reserved_bytes - capacity_bytes, stays)
            self._evictions += len(evicted)
        outcome = _outcome(claim, wanted_bytes, lacking_bytes, stays_bytes, evicted_bytes=sum(map(len, evicted)))
        del evicted  # goes back to the system without the lock: 0.01 s a GiB on huge pages, 0.2 on others
        return claim.adds, outcome

    def statistics(self) -> CacheStatistics:
        """A consistent look at the cache."""
        with self._lock:
            return CacheStatistics(
                held_bytes=self._held_bytes,
                reserved_bytes=self._reserved_bytes,
                entries=sum(map(len, self._files.values())),
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                changed=self._changed,
                headers=len(self.headers),
                header_bytes=self.headers.kept_bytes,
            )

    def clear(self) -> None:
        """Lets go of everything. Open loads may go on adding what they had announced. Blocks as `make_room` does."""
        self.headers.clear()
        with self._lock:
            files, self._files = self._files, {}
            self._held_bytes = 0
        files.clear()  # without the lock

    def _insert(self, claim: _Claim, file: FileState, start: int, memory: memoryview) -> int:
        with self._lock:
            if not claim.adds:
                return 0
            stop = start + len(memory)
            parts = self._missing(file, start, stop)
        new = []
        for begin, end in parts:
            view = memory if (begin, end) == (start, stop) else memory[begin - start : end - start]
            new.append(HeldRange(begin, end, view, fingerprint(view)))
        with self._lock:
            return sum(self._take(claim, file, held) for held in new)

    def _take(self, claim: _Claim, file: FileState, held: HeldRange) -> int:
        """Adds one range; 0 if there is no room, or another load has brought bytes of it meanwhile."""
        nbytes = held.stop - held.start
        own_bytes = min(nbytes, claim.reserved_bytes)
        beyond_bytes = nbytes - own_bytes
        free_bytes = claim.capacity_bytes - self._held_bytes - self._reserved_bytes
        if not claim.adds or beyond_bytes > max(0, free_bytes):
            return 0
        if self._missing(file, held.start, held.stop) != [(held.start, held.stop)]:
            return 0
        if file not in self._files:
            self._files[file] = HeldRanges()
        self._files[file].add(held, self._tick())
        self._held_bytes += nbytes
        self._reserve(claim, claim.reserved_bytes - own_bytes)
        return nbytes

    def _missing(self, file: FileState, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that are not held."""
        ranges = self._files.get(file)
        if ranges is None:
            return [(start, stop)] if start < stop else []
        return ranges.missing(start, stop)

    def _end(self, claim: _Claim) -> None:
        with self._lock:
            claim.adds = False
            self._reserve(claim, 0)
            if claim in self._claims:
                self._claims.remove(claim)

    def _reserve(self, claim: _Claim, nbytes: int) -> None:
        self._reserved_bytes += nbytes - claim.reserved_bytes
        claim.reserved_bytes = nbytes

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _drop(self, file: FileState, held: HeldRange) -> bool:
        """Lets go of one range; False if it is not held any more."""
        ranges = self._files.get(file)
        if ranges is None or not ranges.drop(held):
            return False
        self._held_bytes -= held.stop - held.start
        if not ranges:
            del self._files[file]
        return True

    def _overlap_bytes(self, wanted: Mapping[FileState, ByteRanges]) -> int:
        """How many of the wanted bytes are held."""
        both = [(self._files[file], ranges) for file, ranges in wanted.items() if file in self._files]
        return sum(int(ranges.overlap_bytes(held.starts, held.stops).sum()) for held, ranges in both)

    def _what_stays(self) -> list[tuple[HeldRanges, NDArray[np.bool_]]]:
        """For each file, which of its ranges open loads want bytes of."""
        found = []
        for file, held in self._files.items():
            stays = np.zeros(len(held), dtype=bool)
            for claim in tuple(self._claims):
                if file in claim.wanted:
                    stays |= claim.wanted[file].overlap_bytes(held.starts, held.stops) > 0
            found.append((held, stays))
        return found

    def _evict(self, excess_bytes: int, stays: list[tuple[HeldRanges, NDArray[np.bool_]]]) -> list[memoryview]:
        """Lets go of ranges that need not stay, the least recently used first, until so many bytes are gone.

        Returns their memory, for the caller to drop.
        """
        if excess_bytes <= 0 or not stays:
            return []
        free = np.flatnonzero(~np.concatenate([kept for _, kept in stays]))
        used = np.concatenate([held.used for held, _ in stays])[free]
        sizes = np.concatenate([held.sizes for held, _ in stays])[free]
        order = np.argsort(used)
        count = int(np.searchsorted(np.cumsum(sizes[order]), excess_bytes)) + 1
        doomed = np.zeros(sum(len(held) for held, _ in stays), dtype=bool)
        doomed[free[order[:count]]] = True
        dropped: list[memoryview] = []
        bounds = np.cumsum([0, *(len(held) for held, _ in stays)]).tolist()
        for (held, _), (first, stop) in zip(stays, pairwise(bounds), strict=True):
            dropped += held.drop_all(doomed[first:stop])
        self._held_bytes -= sum(map(len, dropped))
        self._files = {file: held for file, held in self._files.items() if held}
        return dropped


def _outcome(
    claim: _Claim, wanted_bytes: int, lacking_bytes: int, stays_bytes: int, *, evicted_bytes: int
) -> PolicyOutcome:
    """What making room has come to, for the load's report."""
    reason, lacking = _held_text(wanted_bytes, lacking_bytes), format_size(lacking_bytes)
    if lacking_bytes and claim.adds:
        reason += f", {lacking} are added"
    elif lacking_bytes:
        reason += (
            f", {lacking} are not added: with {format_size(stays_bytes)} that must stay they are more than "
            f"cache.capacity_bytes, {format_size(claim.capacity_bytes)}; it takes {stays_bytes + lacking_bytes} bytes"
        )
    if evicted_bytes:
        reason += f"; {format_size(evicted_bytes)} of other loads were evicted"
    return PolicyOutcome("on", "on" if claim.adds else "reuse only", reason)


def _held_text(wanted_bytes: int, lacking_bytes: int) -> str:
    held, wanted = format_size(wanted_bytes - lacking_bytes), format_size(wanted_bytes)
    if lacking_bytes and held == wanted:  # as it is rounded
        return f"all but {format_size(lacking_bytes)} of {wanted} were held"
    return f"{held} of {wanted} were held"
