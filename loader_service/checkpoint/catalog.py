"""All validated headers of a checkpoint as one table of tensors: what selection and planning work on.

Columns, not objects: a checkpoint has 200,000 tensors. The order of the rows is the plan's order, (shard name, start),
which every rank that sees the same files arrives at.
"""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loader_service.checkpoint.choices import Choices, choose
from loader_service.checkpoint.dtypes import DTYPE_LIST, DType
from loader_service.checkpoint.header import ParsedHeader
from loader_service.checkpoint.index import IndexFile
from loader_service.checkpoint.slices import hashes_of
from loader_service.errors import CheckpointError
from loader_service.reading.reader import FileIdentity


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a checkpoint. `name` is its base name, the same on every rank; `path` is absolute, links unresolved.

    `identity` is that of the open file (the target's, not a link's) at the moment when the header was read: every later
    opening is checked against it. `header_bytes` is 8 + N, where the payload starts.
    """

    name: str
    path: str
    identity: FileIdentity
    header_bytes: int
    header_sha256: str


@dataclass(frozen=True, eq=False)
class Catalog:
    """Every tensor of a checkpoint once, in plan order: shards by name, tensors by (start, stop, name).

    `shards` are sorted by name, `shard_ids` index them. `dtype_ids` index `DTYPE_LIST`. `shapes` count elements as the
    headers do. `starts` and `stops` are absolute file offsets, half open; empty tensors have start == stop. `notes` say
    in words what discovery and the index decided. `digest` covers names, sizes, header hashes and those decisions, but
    no local path and no time, so that ranks on different machines can compare it. The arrays are read-only.
    """

    shards: tuple[Shard, ...]
    names: list[str]
    shard_ids: NDArray[np.int32]
    dtype_ids: NDArray[np.uint8]
    shapes: list[tuple[int, ...]]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    notes: tuple[str, ...]
    digest: str

    def __len__(self) -> int:
        return len(self.names)

    def id_of(self, name: str) -> int | None:
        """The row of a tensor, None if there is none. The first call sorts the names' hashes."""
        hashes, rows = self._rows_by_hash
        wanted = hash(name)
        at = bisect_left(hashes, wanted)
        while at < len(hashes) and hashes[at] == wanted:
            if self.names[rows[at]] == name:
                return rows[at]
            at += 1
        return None

    @cached_property
    def _rows_by_hash(self) -> tuple[Sequence[int], Sequence[int]]:
        """All hashes, ascending, and whose they are. As views of memory: their elements are plain numbers."""
        hashes = hashes_of([self.names])
        order = np.argsort(hashes)
        return hashes[order].data, order.data

    def dtype(self, tensor_id: int) -> DType:
        """The dtype of a row."""
        return DTYPE_LIST[int(self.dtype_ids[tensor_id])]

    def summary(self) -> list[list[str | int]]:
        """[name, size, header hash, hash of the names that count] of each shard, as plain JSON.

        For `describe_difference` on another rank. The last column differs alone where an index leaves out other copies.
        """
        bounds = np.searchsorted(self.shard_ids, np.arange(len(self.shards) + 1)).tolist()
        rows: list[list[str | int]] = []
        for shard, (start, stop) in zip(self.shards, itertools.pairwise(bounds), strict=True):
            names = "\n".join(sorted(self.names[start:stop])).encode("utf-8", "surrogateescape")
            rows.append([shard.name, shard.identity.size_bytes, shard.header_sha256, hashlib.sha256(names).hexdigest()])
        return rows

    def tensor_summary(self, shard_name: str) -> list[list[str | int | list[int]]]:
        """[name, dtype, shape, start, stop] of one shard's tensors, in order, for `describe_tensor_difference`.

        Empty for a name that is no shard here: ranks that differ may ask for each other's.
        """
        ids = [i for i, shard in enumerate(self.shards) if shard.name == shard_name]
        rows = np.flatnonzero(np.isin(self.shard_ids, ids)).tolist()
        return [
            [self.names[i], self.dtype(i).code, list(self.shapes[i]), int(self.starts[i]), int(self.stops[i])]
            for i in rows
        ]


def build_catalog(
    shards_with_headers: Iterable[tuple[Shard, ParsedHeader]],
    index: IndexFile | None,
    mode: Literal["advisory", "ignore"] = "advisory",
    *,
    notes: Sequence[str] = (),
) -> Catalog:
    """Joins headers into a catalog; `index` counts only where `mode` is advisory. `notes` come before its own.

    Raises CheckpointError for two files of one name, and where two files hold one tensor and nothing decides.
    """
    pairs = sorted(shards_with_headers, key=lambda pair: pair[0].name)
    for (before, _), (after, _) in itertools.pairwise(pairs):
        if before.name == after.name:
            words = f"{before.path} and {after.path} have the same file name: rename one, names tell shards apart"
            raise CheckpointError(words, path=after.path)
    choices = choose({shard.name: header.names for shard, header in pairs}, index if mode == "advisory" else None)
    left_out = choices.shards
    kept = [(shard, _without(header, choices, shard.name)) for shard, header in pairs if shard.name not in left_out]
    shards = tuple(shard for shard, _ in kept)
    headers = [header for _, header in kept]
    names: list[str] = []
    shapes: list[tuple[int, ...]] = []
    for header in headers:
        names += header.names
        shapes += header.shapes
    empty = np.zeros(0, dtype=np.int64)
    catalog = Catalog(
        shards=shards,
        names=names,
        shard_ids=np.repeat(np.arange(len(shards), dtype=np.int32), [len(header.names) for header in headers]),
        dtype_ids=np.concatenate([empty.astype(np.uint8), *(header.dtype_ids for header in headers)]),
        shapes=shapes,
        starts=np.concatenate([empty, *(header.starts for header in headers)]),
        stops=np.concatenate([empty, *(header.stops for header in headers)]),
        notes=(*notes, *choices.notes),
        digest=_digest(shards, choices),
    )
    for column in (catalog.shard_ids, catalog.dtype_ids, catalog.starts, catalog.stops):
        column.setflags(write=False)
    return catalog


def _without(header: ParsedHeader, choices: Choices, shard_name: str) -> ParsedHeader:
    """The header less the copies that do not count."""
    left_out = choices.tensors.get(shard_name)
    if not left_out:
        return header
    rows = [i for i, name in enumerate(header.names) if name not in left_out]
    return ParsedHeader(
        names=[header.names[i] for i in rows],
        dtype_ids=header.dtype_ids[rows],
        shapes=[header.shapes[i] for i in rows],
        starts=header.starts[rows],
        stops=header.stops[rows],
        metadata=header.metadata,
        header_bytes=header.header_bytes,
        sha256=header.sha256,
    )


def _digest(shards: Sequence[Shard], choices: Choices) -> str:
    """Every field is preceded by its length, so that no two different catalogs give the same bytes."""
    hasher = hashlib.sha256(b"catalog 1")

    def add(*fields: str | int) -> None:
        for value in fields:
            data = str(value).encode("utf-8", "surrogateescape")
            hasher.update(len(data).to_bytes(8, "little") + data)

    for shard in shards:
        add("shard", shard.name, shard.identity.size_bytes, shard.header_sha256)
    for name in sorted(choices.shards):
        add("left out", name)
    for name, tensors in sorted(choices.tensors.items()):
        add("copies left out", name, *sorted(tensors))
    return hasher.hexdigest()
