"""What there is to say of a range of a file: where its bytes lie, what memory they go to, and how they were read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

from loader_service.reading.reader import FileIdentity
from loader_service.report import PolicyOutcome
from loader_service.sizes import format_size

Access: TypeAlias = Literal["auto", "buffered", "direct"]
Drop: TypeAlias = Literal["nothing", "what it brought in", "everything"]
How: TypeAlias = Literal["direct", "cached", "buffered"]


@dataclass(frozen=True, slots=True)
class RangeStatistics:
    """What a `RangeReader` did so far.

    `direct_bytes` went past the page cache, `bounced_bytes` of them by way of memory of the reader's own;
    `cached_bytes` were found in the page cache, `buffered_bytes` read through it. `kept_bytes` were not read: a
    resident service has them in memory. `refused` says for each file why it could not be read past the page cache.
    """

    direct_bytes: int = 0
    bounced_bytes: int = 0
    cached_bytes: int = 0
    buffered_bytes: int = 0
    kept_bytes: int = 0
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def read_bytes(self) -> int:
        return self.direct_bytes + self.cached_bytes + self.buffered_bytes

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Which files were read through the page cache for want of another way, a line for each reason."""
        by_reason: dict[str, list[str]] = {}
        for path, why in self.refused.items():
            by_reason.setdefault(why, []).append(path)
        return tuple(f"{_several(paths)}: read through the page cache: {why}" for why, paths in by_reason.items())


@dataclass(frozen=True, slots=True)
class FileRange:
    """The bytes from `start` on of the file at `path`; `expected` is the file that it must be, None for any.
    `tensor` is whose bytes they are, for messages."""

    path: str
    expected: FileIdentity | None
    start: int
    tensor: str | None = None

    @property
    def of_what(self) -> str:
        """Whose bytes they are, in words."""
        return f"tensor {self.tensor!r}" if self.tensor is not None else "the table"

    def moved(self, nbytes: int) -> FileRange:
        return replace(self, start=self.start + nbytes) if nbytes else self


class Window(NamedTuple):
    """Memory for a range: `nbytes` of `memory` (contiguous bytes) from `lead` on. What lies before and behind them in
    `memory` belongs to the range as well and may be overwritten; nothing outside of `memory` ever is."""

    memory: memoryview
    lead: int
    nbytes: int

    @property
    def view(self) -> memoryview:
        return self.memory[self.lead : self.lead + self.nbytes]

    def part(self, start: int, stop: int) -> Window:
        """Bytes [start, stop) of the range, with what lies around them at the range's own ends only."""
        first = 0 if start == 0 else self.lead + start
        last = len(self.memory) if stop == self.nbytes else self.lead + stop
        return Window(self.memory[first:last], self.lead + start - first, stop - start)


def describe(requested: Access, done: RangeStatistics) -> PolicyOutcome:
    """A reader's policy in words: `effective` is `direct`, `buffered`, `mixed` or `kept`."""
    through = done.cached_bytes + done.buffered_bytes
    effective = "mixed" if done.direct_bytes and through else "direct" if done.direct_bytes else "buffered"
    if not done.direct_bytes and not through:
        effective = "kept" if done.kept_bytes else requested
    parts = []
    if done.kept_bytes:
        parts.append(f"{format_size(done.kept_bytes)} copied from what the resident service keeps")
    if done.direct_bytes:
        bounced = f" ({format_size(done.bounced_bytes)} copied over)" if done.bounced_bytes else ""
        parts.append(f"{format_size(done.direct_bytes)} past the page cache{bounced}")
    if done.cached_bytes:
        parts.append(f"{format_size(done.cached_bytes)} copied from the page cache")
    if done.buffered_bytes:
        parts.append(f"{format_size(done.buffered_bytes)} read through the page cache")
    if done.refused:
        parts.append(f"{_several(list(done.refused))}: {next(iter(done.refused.values()))}")
    return PolicyOutcome(requested, effective, "; ".join(parts) or "nothing was read")


def _several(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more files"
