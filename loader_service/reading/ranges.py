"""Byte ranges of files into memory: past the page cache where that is possible and faster, through it otherwise.

A range can be read past the page cache straight into its final memory if that memory is congruent with the file:
address and offset leave the same rest by the block size. Only its first and last partial block are copied over.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from loader_service.errors import EndOfFileError, LoaderError, ReadError
from loader_service.reading.forked import starts_anew_in_children
from loader_service.reading.handles import HandleCache
from loader_service.reading.positioned import DIRECT_BLOCK_BYTES, read_fully
from loader_service.reading.reader import FileIdentity
from loader_service.report import PolicyOutcome
from loader_service.sizes import format_size

_log = logging.getLogger(__name__)

Access: TypeAlias = Literal["auto", "buffered", "direct"]
Drop: TypeAlias = Literal["nothing", "what it brought in", "everything"]
How: TypeAlias = Literal["direct", "cached", "buffered"]

_PIECE_BYTES = 1 << 20  # how finely a chunk is looked at of which the page cache holds a part
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


@dataclass(frozen=True, slots=True)
class RangeStatistics:
    """What a `RangeReader` did so far.

    `direct_bytes` went past the page cache, `bounced_bytes` of them by way of a block of the reader's own;
    `cached_bytes` were found in the page cache, `buffered_bytes` read through it; `incongruent_bytes` of these for the
    memory's sake. `refused` says for each file why it could not be read past the page cache.
    """

    direct_bytes: int = 0
    bounced_bytes: int = 0
    cached_bytes: int = 0
    buffered_bytes: int = 0
    incongruent_bytes: int = 0
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def read_bytes(self) -> int:
        return self.direct_bytes + self.cached_bytes + self.buffered_bytes


class _Piece(NamedTuple):
    start: int
    stop: int
    how: How


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
        return replace(self, start=self.start + nbytes)


class RangeReader:
    """Reads ranges for one purpose, in one way. Thread-safe; `read` blocks: it is called on reading threads.

    `access` "auto": what the page cache holds is copied from it, the rest is read past it, and through it where the
    file system refuses or the memory is not congruent. "direct" does not ask the page cache first, "buffered" always
    goes through it. A file that refused is not asked again.

    `drop` says what the page cache is asked to forget behind the reads: "what it brought in" leaves what "auto" found
    there. Without such a look nobody knows what was there, since reads ahead: what is read through it is forgotten.
    """

    def __init__(self, handles: HandleCache, *, access: Access, retries: int, drop: Drop = "nothing") -> None:
        self.handles = handles
        self._access: Access = access
        self._retries = retries
        self._drop = drop
        self._lock = threading.Lock()
        self._statistics = RangeStatistics()
        self._of_tensor: dict[tuple[str, str | None], RangeStatistics] = {}
        self._refused: dict[str, str] = {}
        self._paths_read: set[str] = set()
        self._of_thread = threading.local()
        starts_anew_in_children(self)

    def start_anew(self) -> None:
        """In a forked child the lock may be that of a thread that is not here."""
        self._lock = threading.Lock()

    @property
    def statistics(self) -> RangeStatistics:
        with self._lock:
            return replace(self._statistics, refused=dict(self._refused))

    @property
    def paths_read(self) -> frozenset[str]:
        """The files of which bytes were asked for."""
        with self._lock:
            return frozenset(self._paths_read)

    @property
    def outcome(self) -> PolicyOutcome:
        """What became of `access`, for a report."""
        return describe(self._access, self.statistics)

    def outcome_of(self, tensor: FileRange) -> PolicyOutcome:
        """As `outcome`, of one tensor's bytes alone."""
        with self._lock:
            own = self._of_tensor.get((tensor.path, tensor.tensor), RangeStatistics())
            refused = {path: why for path, why in self._refused.items() if path == tensor.path and own.buffered_bytes}
        return describe(self._access, replace(own, refused=refused))

    def read(self, where: FileRange, view: memoryview) -> None:
        """Fills `view` (contiguous bytes) with the file's bytes from `where.start` on. Raises as `read_fully` does."""
        if not view.nbytes:
            return
        with self._lock:
            self._paths_read.add(where.path)
        start = where.start
        congruent = (_address(view) - start) % DIRECT_BLOCK_BYTES == 0
        copied = self._copy_held(where, view, congruent=congruent)
        for piece in self._pieces(where.moved(copied), start + view.nbytes, congruent=congruent):
            part, at = view[piece.start - start : piece.stop - start], where.moved(piece.start - start)
            if piece.how == "direct" and self._read_direct(at, part):
                continue
            self._read_through(at, part, cached=piece.how == "cached", congruent=congruent)
        if self._drop == "everything":
            self._forget(where, view.nbytes)

    # -- which way

    def _pieces(self, where: FileRange, stop: int, *, congruent: bool) -> Iterator[_Piece]:
        start = where.start
        if start == stop:
            return
        if self._access == "buffered" or not congruent or where.path in self._refused:
            yield _Piece(start, stop, "buffered")
            return
        held = 0 if self._access == "direct" else self._cached(where, start, stop)
        if held is None:
            self._refuse(where.path, "the file system does not tell what is cached")
            yield _Piece(start, stop, "buffered")
        elif held in (0, stop - start):
            yield _Piece(start, stop, "cached" if held else "direct")
        else:
            yield from self._mixed(where, stop)

    def _copy_held(self, where: FileRange, view: memoryview, *, congruent: bool) -> int:
        """Copies what the page cache holds from the beginning on, if that has the first page and the last: then it has
        all of them, as a rule, and to count them before takes a twentieth of the time. Returns how many bytes."""
        if self._access != "auto" or not congruent or where.path in self._refused:
            return 0
        copied = 0
        with contextlib.suppress(OSError), self.handles.borrow(where.path, where.expected) as file:
            if file.cached_bytes(where.start, 1) and file.cached_bytes(where.start + view.nbytes - 1, 1):
                copied = file.read_cached(view, where.start)
        self._count(where, cached_bytes=copied)
        return copied

    def _mixed(self, where: FileRange, stop: int) -> Iterator[_Piece]:
        """The cache holds a part: looks piece by piece, and joins those that go one way."""
        pending: _Piece | None = None
        at = where.start
        while at < stop:
            end = min(stop, (at // _PIECE_BYTES + 1) * _PIECE_BYTES)
            how: How = "cached" if 2 * (self._cached(where, at, end) or 0) > end - at else "direct"
            if pending is not None and pending.how != how:
                yield pending
                pending = None
            pending = _Piece(at, end, how) if pending is None else pending._replace(stop=end)
            at = end
        if pending is not None:
            yield pending

    def _cached(self, where: FileRange, start: int, stop: int) -> int | None:
        """How much the page cache holds; None where nobody knows. A file that cannot be opened is left to the read."""
        with contextlib.suppress(OSError), self.handles.borrow(where.path, where.expected) as file:
            return file.cached_bytes(start, stop - start)
        return 0

    # -- through the page cache, and past it

    def _read_through(
        self, where: FileRange, view: memoryview, *, cached: bool = False, congruent: bool = True
    ) -> None:
        self._read(where, view)
        for_the_memory = not congruent and self._access != "buffered" and where.path not in self._refused
        self._count(
            where,
            cached_bytes=view.nbytes if cached else 0,
            buffered_bytes=0 if cached else view.nbytes,
            incongruent_bytes=view.nbytes if for_the_memory else 0,
        )
        if self._drop == "what it brought in" and not cached:
            self._forget(where, view.nbytes)

    def _read(self, where: FileRange, view: memoryview, *, direct: bool = False) -> None:
        read_fully(
            self.handles,
            where.path,
            where.expected,
            where.start,
            [view],
            retries=self._retries,
            tensor=where.tensor,
            direct=direct,
        )

    def _read_direct(self, where: FileRange, view: memoryview) -> bool:
        """False where the file is, or turns out to be, one to be read through the cache: then all of it is."""
        if where.path in self._refused:
            return False
        start, stop = where.start, where.start + view.nbytes
        first = min(stop, -(-start // DIRECT_BLOCK_BYTES) * DIRECT_BLOCK_BYTES)
        last = max(first, stop // DIRECT_BLOCK_BYTES * DIRECT_BLOCK_BYTES)
        try:
            if first < last:
                self._read(where.moved(first - start), view[first - start : last - start], direct=True)
        except EndOfFileError:
            # Within a block nobody can tell an early end from a read that is cut short; the other way can, and says
            # where the file ends and what was wanted. It returns if the file does not end here.
            self._read_through(where, view)
            self._refuse(where.path, "reads past the page cache end within a block")
            return True
        except ReadError as error:
            if error.errno not in _REFUSALS:
                raise
            self._refuse(where.path, errno.errorcode[error.errno or errno.EINVAL])
            return False
        self._count(where, direct_bytes=last - first)
        for edge_start, edge_stop in ((start, first), (last, stop)):
            if edge_start < edge_stop:
                self._read_edge(where.moved(edge_start - start), view[edge_start - start : edge_stop - start])
        return True

    def _read_edge(self, where: FileRange, view: memoryview) -> None:
        """A part of one block: the block is read into memory of this thread's own, and the part copied over.

        What is out of the ordinary is left to the page cache: a block that comes in parts, the file's end, an error,
        memory that cannot be written to.
        """
        skip = where.start % DIRECT_BLOCK_BYTES
        block = self._block()
        got = 0
        try:
            if where.path not in self._refused:
                with self.handles.borrow(where.path, where.expected, direct=True) as file:
                    got = file.read_into([block.data], where.start - skip)
        except OSError as error:
            if error.errno in _REFUSALS:
                self._refuse(where.path, errno.errorcode[error.errno or errno.EINVAL])
        if got < skip + view.nbytes or not _takes_writes(view):
            self._read_through(where, view)
            return
        view[:] = block.data[skip : skip + view.nbytes]
        self._count(where, direct_bytes=view.nbytes, bounced_bytes=view.nbytes)

    def _block(self) -> npt.NDArray[np.uint8]:
        block: npt.NDArray[np.uint8] | None = getattr(self._of_thread, "block", None)
        if block is None:
            memory = np.empty(2 * DIRECT_BLOCK_BYTES, np.uint8)
            skip = -memory.ctypes.data % DIRECT_BLOCK_BYTES
            block = self._of_thread.block = memory[skip : skip + DIRECT_BLOCK_BYTES]
        return block

    def _refuse(self, path: str, why: str) -> None:
        with self._lock:
            first = path not in self._refused
            self._refused.setdefault(path, why)
        if first:
            _log.info("%s is read through the page cache: %s", path, why)

    # -- behind a read

    def _forget(self, where: FileRange, nbytes: int) -> None:
        try:
            with self.handles.borrow(where.path, where.expected) as file:
                file.drop_cached(where.start, nbytes)
        except (OSError, LoaderError) as error:
            _log.debug("%s: the page cache keeps %d bytes from %d on: %s", where.path, nbytes, where.start, error)

    def _count(self, where: FileRange, **more: int) -> None:
        own = (where.path, where.tensor)
        with self._lock:
            self._statistics = _plus(self._statistics, more)
            self._of_tensor[own] = _plus(self._of_tensor.get(own, RangeStatistics()), more)


def _takes_writes(view: memoryview) -> bool:
    """Whether the system can write to this memory, with zeros. Copying to it would else end the process."""
    try:
        zeros = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True  # unknown: no descriptor is to be had
    try:
        return os.readv(zeros, [view]) == view.nbytes
    except OSError:
        return False
    finally:
        os.close(zeros)


def _plus(statistics: RangeStatistics, more: Mapping[str, int]) -> RangeStatistics:
    return replace(statistics, **{name: getattr(statistics, name) + value for name, value in more.items()})


def describe(requested: Access, done: RangeStatistics) -> PolicyOutcome:
    """A reader's policy in words: `effective` is `direct`, `buffered` or `mixed`."""
    through = done.cached_bytes + done.buffered_bytes
    effective = "mixed" if done.direct_bytes and through else "direct" if done.direct_bytes else "buffered"
    if not done.direct_bytes and not through:
        effective = requested
    parts = []
    if done.direct_bytes:
        bounced = f" ({format_size(done.bounced_bytes)} copied over)" if done.bounced_bytes else ""
        parts.append(f"{format_size(done.direct_bytes)} past the page cache{bounced}")
    if done.cached_bytes:
        parts.append(f"{format_size(done.cached_bytes)} copied from the page cache")
    if done.buffered_bytes:
        parts.append(f"{format_size(done.buffered_bytes)} read through the page cache")
    if done.incongruent_bytes:
        parts.append(f"{format_size(done.incongruent_bytes)} of it into memory that is not congruent with the file")
    if done.refused:
        path, why = next(iter(done.refused.items()))
        more = f" and {len(done.refused) - 1} more files" if len(done.refused) > 1 else ""
        parts.append(f"{path}{more}: {why}")
    return PolicyOutcome(requested, effective, "; ".join(parts) or "nothing was read")


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).ctypes.data
    return address
