"""Byte ranges of files into memory: past the page cache where that is possible and faster, through it otherwise.

A range can be read past the page cache straight into its final memory if that memory is congruent with the file:
address and offset leave the same rest by the block size. Its first and last partial block are read there, too, where
the memory around it is free for the rest of them. What cannot be read straight into its memory is copied over from
memory of the reading thread's own: reading it through the cache would read ahead what others read past it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loader_service import logs
from loader_service.errors import EndOfFileError, LoaderError, ReadError
from loader_service.reading.blocks import Blocks, address_of, neighbours, whole_blocks
from loader_service.reading.file_range import Access, Drop, FileRange, How, RangeStatistics, Window, describe
from loader_service.reading.forked import starts_anew_in_children
from loader_service.reading.handles import HandleCache
from loader_service.reading.positioned import DIRECT_BLOCK_BYTES, read_fully
from loader_service.report import PolicyOutcome

_log = logs.logger(__name__)

_PIECE_BYTES = 1 << 20  # how finely a chunk is looked at of which the page cache holds a part
_OWN_BYTES = 2 << 20  # what a thread copies over at a time; not touched where only edges are
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


class _Piece(NamedTuple):
    start: int
    stop: int
    how: How


class RangeReader:
    """Reads ranges for one purpose, in one way. Thread-safe; `read` blocks: it is called on reading threads.

    `access` "auto": what the page cache holds is copied from it, the rest is read past it, and through it where the
    file system refuses. "direct" does not ask the page cache first, "buffered" always goes through it. A file that
    refused is not asked again. `by_tensor`: it counts for each tensor, too.

    `drop` says what the page cache is asked to forget behind the reads: "what it brought in" leaves what "auto" found
    there. Without such a look nobody knows what was there, since reads ahead: what is read through it is forgotten.
    """

    def __init__(
        self,
        handles: HandleCache,
        *,
        access: Access,
        retries: int,
        drop: Drop = "nothing",
        by_tensor: bool = False,
    ) -> None:
        self.handles = handles
        self._access: Access = access
        self._retries = retries
        self._drop = drop
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._of_tensor: dict[tuple[str, str | None], Counter[str]] | None = {} if by_tensor else None
        self._refused: dict[str, str] = {}
        self._paths_read: set[str] = set()
        self._of_thread = threading.local()
        self._copies = threading.BoundedSemaphore(_copies_at_once())
        starts_anew_in_children(self)

    def start_anew(self) -> None:
        """In a forked child the locks may be those of a thread that is not here."""
        self._lock = threading.Lock()
        self._copies = threading.BoundedSemaphore(_copies_at_once())

    @property
    def statistics(self) -> RangeStatistics:
        with self._lock:
            return RangeStatistics(**self._counts, refused=dict(self._refused))

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
        """As `outcome`, of one tensor's bytes alone; for a reader that counts `by_tensor`."""
        with self._lock:
            counts = (self._of_tensor or {}).get((tensor.path, tensor.tensor), Counter[str]())
            own = RangeStatistics(**counts, refused={})
            refused = {path: why for path, why in self._refused.items() if path == tensor.path and own.buffered_bytes}
        return describe(self._access, replace(own, refused=refused))

    def read(self, where: FileRange, view: memoryview) -> None:
        """Fills `view` (contiguous bytes) with the file's bytes from `where.start` on. Raises as `read_fully` does."""
        self.read_within(where, Window(view, 0, view.nbytes))

    def read_within(self, where: FileRange, window: Window) -> int:
        """As `read`, into a window. What lies around the wanted bytes is then undefined. Returns the bytes read."""
        if not window.nbytes:
            return 0
        with self._lock:
            self._paths_read.add(where.path)
        start = where.start
        congruent = (address_of(window.memory) + window.lead - start) % DIRECT_BLOCK_BYTES == 0
        copied = self._copy_held(where, window.view)
        for piece in self._pieces(where.moved(copied), start + window.nbytes):
            part, at = window.part(piece.start - start, piece.stop - start), where.moved(piece.start - start)
            if piece.how != "direct":
                self._read_through(at, part.view, cached=piece.how == "cached")
            elif not congruent:
                self._copy_over(at, part.view)
            elif not self._read_direct(at, part):
                self._read_through(at, part.view)
        if self._drop == "everything":
            self._forget(where, window.nbytes)
        return window.nbytes

    def read_parts(self, where: FileRange, parts: Sequence[tuple[int, Window]]) -> int:
        """As `read_within`, for several windows, (start in the file, window) each, that follow each other in the file
        from `where.start` on: with one call, if all of it goes past the page cache and their blocks are neighbours."""
        stop = parts[-1][0] + parts[-1][1].nbytes
        blocks = neighbours(parts) if self._is_past_the_cache(where, stop) else None
        if blocks is None or not self._read_blocks(where, stop, blocks):
            return sum(self.read_within(where.moved(start - where.start), window) for start, window in parts)
        nbytes = sum(window.nbytes for _, window in parts)
        with self._lock:
            self._paths_read.add(where.path)
        self._count(where, direct_bytes=nbytes)
        return nbytes

    # -- which way

    def _is_past_the_cache(self, where: FileRange, stop: int) -> bool:
        if self._access == "buffered" or where.path in self._refused:
            return False
        return self._access == "direct" or self._cached(where, where.start, stop) == 0

    def _pieces(self, where: FileRange, stop: int) -> Iterator[_Piece]:
        start = where.start
        if start == stop:
            return
        if self._access == "buffered" or where.path in self._refused:
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

    def _copy_held(self, where: FileRange, view: memoryview) -> int:
        """Copies what the page cache holds from the beginning on, if that has the first page and the last: then it has
        all of them, as a rule, and to count them before takes a twentieth of the time. Returns how many bytes."""
        if self._access != "auto" or where.path in self._refused:
            return 0
        copied = 0
        with contextlib.suppress(OSError), self.handles.borrow(where.path, where.expected) as file:
            if file.cached_bytes(where.start, 1) and file.cached_bytes(where.start + view.nbytes - 1, 1):
                with self._copies:
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

    def _read_through(self, where: FileRange, view: memoryview, *, cached: bool = False) -> None:
        self._read(where, view)
        self._count(where, cached_bytes=view.nbytes if cached else 0, buffered_bytes=0 if cached else view.nbytes)
        if self._drop == "what it brought in" and not cached:
            self._forget(where, view.nbytes)

    def _read(
        self, where: FileRange, view: memoryview, *, direct: bool = False, spare: tuple[int, int] = (0, 0)
    ) -> None:
        read_fully(
            self.handles,
            where.path,
            where.expected,
            where.start,
            [view],
            retries=self._retries,
            tensor=where.tensor,
            direct=direct,
            spare=spare,
        )

    def _copy_over(self, where: FileRange, view: memoryview) -> None:
        """Past the cache into memory that is not congruent; through it from where that is refused on, and all of it
        into memory that cannot be written to, which the system tells then."""
        if not _takes_writes(view[:1]):
            self._read_through(where, view)
            return
        own, done, destination = self._own_memory(), 0, np.frombuffer(view, np.uint8)
        while done < view.nbytes:
            at = where.moved(done)
            lead = at.start % DIRECT_BLOCK_BYTES
            nbytes = min(view.nbytes - done, own.nbytes - lead)
            if not self._read_direct(at, Window(own.data, lead, nbytes), bounced=True):
                self._read_through(at, view[done:])
                return
            destination[done : done + nbytes] = own[lead : lead + nbytes]  # unlike a memoryview's, with no lock held
            done += nbytes

    def _read_direct(self, where: FileRange, window: Window, *, bounced: bool = False) -> bool:
        """False where the file is, or turns out to be, one to be read through the cache: then all of it is."""
        if where.path in self._refused:
            return False
        start, stop = where.start, where.start + window.nbytes
        first, last = whole_blocks(start, window)
        head, tail = max(0, start - first), max(0, last - stop)
        try:
            if first < last:
                at = window.lead + first - start
                body = window.memory[at : at + last - first]
                self._read(where.moved(first - start), body, direct=True, spare=(head, tail))
        except EndOfFileError:
            # Within a block nobody can tell an early end from a read that is cut short; the other way can, and says
            # where the file ends and what was wanted. It returns if the file does not end here.
            self._read_through(where, window.view)
            self._refuse(where.path, "reads past the page cache end within a block")
            return True
        except ReadError as error:
            if error.errno not in _REFUSALS:
                raise
            self._refuse(where.path, errno.errorcode[error.errno or errno.EINVAL])
            return False
        body_bytes = last - first - head - tail
        self._count(where, direct_bytes=body_bytes, bounced_bytes=body_bytes if bounced else 0)
        for edge_start, edge_stop in ((start, first), (last, stop)):
            if edge_start < edge_stop:
                edge = window.view[edge_start - start : edge_stop - start]
                self._read_edge(where.moved(edge_start - start), edge)
        return True

    def _read_blocks(self, where: FileRange, stop: int, blocks: Blocks) -> bool:
        """False where it cannot be done so: part by part it can, or the error names the tensor."""
        head, tail = where.start - blocks.start, blocks.stop - stop
        try:
            read_fully(
                self.handles,
                where.path,
                where.expected,
                blocks.start,
                blocks.views,
                retries=0,
                tensor=where.tensor,
                direct=True,
                spare=(head, tail),
            )
        except ReadError:
            return False
        for block, same in blocks.twice:
            block[:] = same
        return True

    def _read_edge(self, where: FileRange, view: memoryview) -> None:
        """A part of one block: the block is read into memory of this thread's own, and the part copied over.

        What is out of the ordinary is left to the page cache: a block that comes in parts, the file's end, an error,
        memory that cannot be written to.
        """
        skip = where.start % DIRECT_BLOCK_BYTES
        block = self._own_memory()[:DIRECT_BLOCK_BYTES]
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

    def _own_memory(self) -> npt.NDArray[np.uint8]:
        """Whole blocks of this thread's own."""
        memory: npt.NDArray[np.uint8] | None = getattr(self._of_thread, "memory", None)
        if memory is None:
            room = np.empty(_OWN_BYTES + DIRECT_BLOCK_BYTES, np.uint8)
            skip = -room.ctypes.data % DIRECT_BLOCK_BYTES
            memory = self._of_thread.memory = room[skip : skip + _OWN_BYTES]
        return memory

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
        with self._lock:
            self._counts.update(more)
            if self._of_tensor is not None:
                self._of_tensor.setdefault((where.path, where.tensor), Counter()).update(more)


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


def _copies_at_once() -> int:
    """One for each core of this process: more would stand in each other's way, and in that of the caller's loop."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
