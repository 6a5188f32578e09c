"""`load --against`: what a rank takes of a checkpoint is checked against the manifest of it, as it goes by.

Of a tensor that comes whole every part is checked; of a slice along one dimension those parts that it has whole. The
rest (parts at the edges of a slice, slices along several dimensions) cannot be, and is counted.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch

from loader_service.checkpoint.refusal import shown
from loader_service.cli.checking import Index, raw_bytes
from loader_service.cli.checkpoint_manifest import CheckpointManifest, StoredTensor
from loader_service.cli.checksums import Bytes, Cuts, RunningParts, running_parts
from loader_service.errors import CheckpointError
from loader_service.filling import TensorSpec
from loader_service.planning.plan import RankPlan
from loader_service.reading.threads import ReadPool

Checksum: TypeAlias = Literal["crc32", "sha256"]

THREADS: Final = 4  # one takes 3.6 GB/s, less than fast storage gives
_TOGETHER_BYTES: Final = 2 << 20  # less is not worth handing to other threads
_PAGE_BYTES: Final = 4096
_MOST_NAMED: Final = 8


class Against:
    """One rank's tensors against a manifest, as they come in plan order: `begin` each, `add` all that comes of it.

    `checked_bytes` were found right so far, `unchecked_bytes` are those of which the manifest cannot tell. With
    `checksum` "sha256" whole tensors are checked by that, slices by their parts all the same. Blocking.
    """

    def __init__(
        self, manifest: CheckpointManifest, path: Path, plan: RankPlan, threads: ReadPool, *, checksum: Checksum
    ) -> None:
        self._manifest = manifest
        self._path = path
        self._plan = plan
        self._threads = threads
        self._checksum = checksum
        self._checks: list[_Check] = []
        self._indices: Sequence[Index] = ()
        self.checked_bytes = 0
        self.unchecked_bytes = 0
        self._unchecked: list[str] = []

    def check_names(self) -> None:
        """Raises CheckpointError unless the manifest has all that this rank takes, in its dtype and shape."""
        catalog, wrong = self._plan.catalog, []
        for tensor in self._plan.tensor_ids.tolist():
            stored = self._manifest.tensors.get(catalog.names[tensor])
            here = f"{catalog.dtype(tensor).code} {list(catalog.shapes[tensor])}"
            if stored is None:
                wrong.append((tensor, "is not in it"))
            elif here != (there := f"{stored.dtype} {list(stored.shape)}"):
                wrong.append((tensor, f"is {there} in it and {here} here"))
        if wrong:
            tensor, how = wrong[0]
            more = f" (and {len(wrong) - 1} more tensors are not as in it)" if len(wrong) > 1 else ""
            raise self._failure(
                tensor, f"{how}{more}: {self._path} is of another checkpoint, or of another version of this one"
            )

    def begin(self, name: str, spec: TensorSpec) -> None:
        """What comes next is this rank's tensor `name`, or rows of it in order."""
        tensor = self._plan.catalog.id_of(name)
        assert tensor is not None
        stored = self._manifest.tensors[name]
        self._indices = [own for _, own in spec.parts]
        self._checks = [self._check_of(tensor, stored, source, spec) for source, _ in spec.parts]
        if any(check.unchecked_bytes for check in self._checks):
            self._unchecked.append(name)

    def add(self, value: torch.Tensor) -> None:
        """Raises CheckpointError, at the last of a tensor's bytes, with what is not as the manifest says."""
        for check, own in zip(self._checks, self._indices, strict=True):
            some = value if len(self._checks) == 1 else value[own]  # of several parts all come at once
            if check.add(raw_bytes(some).numpy(), self._side_by_side):
                self.checked_bytes += check.checked_bytes
                self.unchecked_bytes += check.unchecked_bytes

    @property
    def words(self) -> str | None:
        """What was not checked, for a person; None if all was."""
        if not self._unchecked:
            return None
        names = ", ".join(map(shown, self._unchecked[:_MOST_NAMED]))
        more = f" and {len(self._unchecked) - _MOST_NAMED} more" if len(self._unchecked) > _MOST_NAMED else ""
        return (
            f"against: {self.unchecked_bytes} bytes could not be checked, since the manifest has no checksum of just "
            f"these slices: parts of {names}{more}"
        )

    def _check_of(self, tensor: int, stored: StoredTensor, source: Index, spec: TensorSpec) -> _Check:
        catalog = self._plan.catalog
        place = _Place(tensor, int(catalog.starts[tensor]), int(catalog.stops[tensor]), self._failure)
        lengths = [index.stop - index.start for index in source]
        nbytes = torch.Size(lengths).numel() * spec.dtype.itemsize
        cut = [dim for dim, size in enumerate(spec.full_shape) if lengths[dim] != size]
        if not cut and self._checksum == "sha256":
            return _WholeCheck(place, stored, nbytes)
        cuts = {each.dim: each for each in stored.cuts}
        dim = cut[0] if cut else next(iter(cuts), None)
        if not nbytes or len(cut) > 1 or dim not in cuts:
            return _Check(nbytes, 0)
        start, stop = (source[dim].start, source[dim].stop) if cut else (0, cuts[dim].size)
        return _PartsCheck(place, stored, cuts[dim], (start, stop), nbytes)

    def _side_by_side(self, work: Callable[[range], None], parts: range, nbytes: int) -> None:
        """Does the work on parts, on several threads where there is much of it."""
        if nbytes < _TOGETHER_BYTES:
            work(parts)
            return
        edges = [parts.start + len(parts) * i // THREADS for i in range(THREADS + 1)]
        jobs = [self._threads.submit(work, range(a, b)) for a, b in itertools.pairwise(edges) if a < b]
        for job in jobs:
            job.result()

    def _failure(self, tensor: int, how: str) -> CheckpointError:
        catalog = self._plan.catalog
        path, name = catalog.shards[int(catalog.shard_ids[tensor])].path, catalog.names[tensor]
        return CheckpointError(f"{path}: tensor '{name}' {how}", path=path, tensor=name)


SideBySide: TypeAlias = Callable[[Callable[[range], None], range, int], None]


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor, where it lies in its file, and how an error about it is made."""

    tensor: int
    start: int
    stop: int
    failure: Callable[[int, str], CheckpointError]

    def differs(self, where: str, expected: str, found: str, hint: str = "") -> CheckpointError:
        return self.failure(
            self.tensor,
            f"is not what the manifest says: {where} {found} instead of {expected}{hint}; the file, or what came of "
            "it on its way, is damaged: load again, fetch the file again if it stays so",
        )


class _Check:
    """A part of a tensor that nothing can be said of."""

    def __init__(self, nbytes: int, checked_bytes: int) -> None:
        self.nbytes = nbytes
        self.checked_bytes = checked_bytes
        self.unchecked_bytes = nbytes - checked_bytes
        self._at = 0

    def add(self, data: Bytes, side_by_side: SideBySide) -> bool:
        """Takes the next bytes. Whether they were the last ones; then they were compared."""
        self._take(data, self._at, side_by_side)
        self._at += len(data)
        if self._at < self.nbytes:
            return False
        self._compare(data)
        return True

    def _take(self, data: Bytes, at: int, side_by_side: SideBySide) -> None:
        """Nothing is made of them."""

    def _compare(self, last: Bytes) -> None:
        """There is nothing to compare with."""


class _WholeCheck(_Check):
    """All of a tensor by its SHA-256."""

    def __init__(self, place: _Place, stored: StoredTensor, nbytes: int) -> None:
        super().__init__(nbytes, nbytes)
        self._place = place
        self._stored = stored
        self._hash: Any = hashlib.sha256()  # hashlib has no type for it

    def _take(self, data: Bytes, at: int, side_by_side: SideBySide) -> None:  # noqa: ARG002 - one signature for all
        self._hash.update(data.data)

    def _compare(self, last: Bytes) -> None:
        found = self._hash.hexdigest()
        if found == self._stored.sha256:
            return
        place = self._place
        where = f"bytes {place.start} to {place.stop} of the file have the SHA-256"
        hint = _zeros(last, place.start) if len(last) == self.nbytes else ""
        raise place.differs(where, self._stored.sha256, found, hint)


class _PartsCheck(_Check):
    """Those parts along one dimension that lie in `indices` of it whole."""

    def __init__(self, place: _Place, stored: StoredTensor, cuts: Cuts, indices: tuple[int, int], nbytes: int) -> None:
        start, stop = indices
        self._parts = cuts.within(start, stop)
        self._running: RunningParts = running_parts(cuts, self._parts, start, stop - start)
        edges = self._running.edges
        super().__init__(nbytes, (edges[-1] - edges[0]) * cuts.outer)
        self._place = place
        self._stored = stored
        self._cuts = cuts

    def _take(self, data: Bytes, at: int, side_by_side: SideBySide) -> None:
        side_by_side(lambda parts: self._running.update(data, at, parts), range(len(self._parts)), len(data))

    def _compare(self, last: Bytes) -> None:
        for i, part in enumerate(self._parts):
            found, expected = self._running.values[i], self._stored.checksum(self._cuts, part)
            if found != expected:
                hint = self._hint(i, part, last)
                raise self._place.differs(self._where(part), f"{expected:08x}", f"{found:08x}", hint)

    def _where(self, part: int) -> str:
        cuts, start = self._cuts, self._place.start
        first, last = cuts.edge(part), cuts.edge(part + 1)
        if cuts.outer == 1:
            first_byte, last_byte = start + first * cuts.inner_bytes, start + last * cuts.inner_bytes
            return f"bytes {first_byte} to {last_byte} of the file have the CRC-32"
        return (
            f"elements {first} to {last} of dimension {cuts.dim}, within bytes {start} to {self._place.stop} of the "
            "file, have the CRC-32"
        )

    def _hint(self, i: int, part: int, last: Bytes) -> str:
        if len(last) < self.nbytes:
            return ""
        first, stop = self._running.edges[i], self._running.edges[i + 1]
        bad = last.reshape(-1, self._running.period_bytes)[:, first:stop]
        at = self._place.start + self._cuts.edge(part) * self._cuts.inner_bytes
        return _zeros(bad.reshape(-1), at if self._cuts.outer == 1 else None)


def _zeros(data: Bytes, at: int | None) -> str:
    """What damaged bytes, that begin at `at` of the file, tell by being zero: what was never written reads so."""
    if not data.any():
        return " (all of them are zero)"
    if at is None:
        return ""
    skip = -at % _PAGE_BYTES
    pages = data[skip : skip + (len(data) - skip) // _PAGE_BYTES * _PAGE_BYTES].reshape(-1, _PAGE_BYTES)
    zero = np.flatnonzero(~pages.any(axis=1))
    if not len(zero):
        return ""
    first = at + skip + int(zero[0]) * _PAGE_BYTES
    return f" ({len(zero)} of its pages of {_PAGE_BYTES} bytes are zero, the first at byte {first} of the file)"
