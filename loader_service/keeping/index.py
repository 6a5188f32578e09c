"""What a service tells a worker of what it keeps: which bytes of which files lie where. Written and read as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np

from loader_service.errors import AttachError
from loader_service.keeping.shape import PlacedRanges
from loader_service.memory.shared import SharedMemory

KEEP_LESS: Final = "keep fewer loads (serve.keep)"

PROTOCOL: Final = 1
"""Raised when services and workers would misunderstand each other."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptFile:
    """What is kept of one file, in the state in which it was read (see `FileIdentity.state`).

    Files are known by their state alone: a worker may see them under another path. The first `head_bytes` of it, its
    header or all of an index, are among the ranges; 0 where they are not. `fingerprints`: of each range, of memory that
    workers share to write (see `fingerprint`); empty where nobody can change it.
    """

    path: str
    state: tuple[int, ...]
    segment: int
    ranges: PlacedRanges
    head_bytes: int = 0
    fingerprints: tuple[int, ...] = ()

    def as_json(self) -> dict[str, object]:
        columns = (self.ranges.starts, self.ranges.stops, self.ranges.offsets)
        return {
            "path": self.path,
            "state": list(self.state),
            "segment": self.segment,
            "ranges": [column.tolist() for column in columns],
            "head_bytes": self.head_bytes,
            "fingerprints": list(self.fingerprints),
        }

    @classmethod
    def from_json(cls, told: Mapping[str, object]) -> KeptFile:
        columns = cast("Sequence[Sequence[int]]", told["ranges"])
        ranges = PlacedRanges(*(np.array(column, dtype=np.int64) for column in columns))
        return cls(
            str(told["path"]),
            tuple(cast("Sequence[int]", told["state"])),
            cast(int, told["segment"]),
            ranges,
            cast(int, told["head_bytes"]),
            tuple(cast("Sequence[int]", told["fingerprints"])),
        )


@dataclass(frozen=True, slots=True, eq=False)
class KeptIndex:
    """All that a service keeps. `segments` are its memory files, in bytes; `shared` numbers those that workers share to
    write, as ranks share host tables: the others are theirs alone from the moment when they write."""

    segments: tuple[int, ...]
    shared: frozenset[int]
    files: tuple[KeptFile, ...]

    def encode(self) -> bytes:
        facts = {
            "protocol": PROTOCOL,
            "segments": list(self.segments),
            "shared": sorted(self.shared),
            "files": [file.as_json() for file in self.files],
        }
        return json.dumps(facts, separators=(",", ":")).encode()

    def in_memory(self) -> SharedMemory:
        """As it is handed over: encoded, in memory that nobody can write to. Blocks.

        Raises MemoryLimitError if that cannot be had.
        """
        raw = self.encode()
        memory = SharedMemory.create(len(raw), may_freeze=True, instead=KEEP_LESS)
        try:
            memory.reserve(0, len(raw))
            os.pwrite(memory.descriptor, raw, 0)
            memory.freeze()
        except BaseException:
            memory.close()
            raise
        return memory

    @classmethod
    def decode(cls, raw: bytes, *, segments: int) -> KeptIndex:
        """`segments`: how many memory files came with it. Raises AttachError for what another version has written."""
        try:
            facts = json.loads(raw)
            if facts["protocol"] != PROTOCOL:
                raise AttachError(
                    f"the service speaks version {facts['protocol']} of its protocol, this worker {PROTOCOL}: install "
                    "the same version of the loader for both"
                )
            files = tuple(KeptFile.from_json(file) for file in facts["files"])
            index = cls(tuple(facts["segments"]), frozenset(facts["shared"]), files)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise AttachError(f"what the service told of itself cannot be read ({error})") from error
        if len(index.segments) != segments:
            raise AttachError(f"the service has told of {len(index.segments)} memory files, and handed over {segments}")
        return index
