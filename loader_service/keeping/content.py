"""What a resident service is about to keep of a load, and the memory that it then lies in."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, cast

from loader_service.keeping.index import KeptFile
from loader_service.keeping.shape import Placed, PlacedRanges
from loader_service.memory.allocators import HostBuffer
from loader_service.memory.fingerprints import fingerprint
from loader_service.memory.held import ByteRanges
from loader_service.memory.shared import SharedMemory
from loader_service.reading.file_range import FileRange
from loader_service.reading.reader import FileIdentity

Ranges = Mapping[Hashable, ByteRanges]
"""Of files, by their state."""


class HeadersRead:
    """Which headers and indexes were read, and how long they are, for `checkpoint.discovery`."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[FileIdentity, int]] = {}

    def get(self, path: str, state: Hashable) -> None:
        """Nothing: they are read."""

    def keep(self, path: str, state: Hashable, raw: bytes) -> None:
        self.files[path] = (FileIdentity(*cast("tuple[int, int, int, int, int]", state)), len(raw))

    def clear(self) -> None:
        self.files.clear()


@dataclass(eq=False)
class KeptMemory:
    """A memory file, and what is to lie in it: by path, the file's identity and its ranges."""

    memory: SharedMemory
    shared: bool  # workers write to it together, as ranks do to shared host tables
    files: Mapping[str, tuple[FileIdentity, PlacedRanges]]
    buffer: HostBuffer | None = None  # while it is filled
    described: list[KeptFile] = field(default_factory=list)

    def views(self) -> Iterator[tuple[FileRange, memoryview]]:
        """What is to be read, and where to."""
        assert self.buffer is not None
        for path, (identity, ranges) in self.files.items():
            columns = (ranges.starts, ranges.stops, ranges.offsets)
            for start, stop, offset in zip(*(column.tolist() for column in columns), strict=True):
                yield FileRange(path, identity, start), self.buffer.memoryview[offset : offset + stop - start]

    def finish(self, heads: Mapping[str, tuple[FileIdentity, int]]) -> None:
        """Describes it, and lets go of the mapping. Nobody can write to it any more, unless it is shared."""
        sums = iter([fingerprint(view) for _, view in self.views()] if self.shared else ())
        for path, (identity, ranges) in self.files.items():
            _, head_bytes = heads.get(path, (identity, 0))
            has_head = ranges.starts[0] == 0 and ranges.stops[0] >= head_bytes
            own = tuple(next(sums) for _ in ranges.starts) if self.shared else ()
            self.described.append(KeptFile(path, identity.state, 0, ranges, head_bytes if has_head else 0, own))
        self.buffer = None
        if not self.shared:
            self.memory.freeze()


@dataclass(frozen=True)
class Part:
    """What a memory file of `nbytes` would hold of a load: by path, the file's identity and its ranges."""

    files: Mapping[str, tuple[FileIdentity, PlacedRanges]]
    nbytes: int

    @classmethod
    def of(cls, ranges: Mapping[str, ByteRanges], identities: Mapping[str, FileIdentity]) -> Part:
        placed = Placed.of(ranges)
        return cls({path: (identities[path], its) for path, its in placed.by_file.items()}, placed.nbytes)

    @property
    def read_bytes(self) -> int:
        """What is to be read for it."""
        return sum(int((ranges.stops - ranges.starts).sum()) for _, ranges in self.files.values())


NOTHING: Final = Part({}, 0)
"""Of a load."""


@dataclass(frozen=True)
class Wanted:
    """What a load would take of this service: what is streamed, headers and rows of single ranks; and whole tables.
    `node`: both as all services of the node have them, by state of the files."""

    streamed: Part
    tables: Part
    node: tuple[Ranges, Ranges] = ({}, {})

    @property
    def nbytes(self) -> int:
        return self.streamed.nbytes + self.tables.nbytes
