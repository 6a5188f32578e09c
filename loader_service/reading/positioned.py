"""Filling memory from a file range, whatever the kernel does on the way: short reads, limits of a call, errors."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from loader_service.errors import CheckpointError, DestinationError, EndOfFileError, LoaderError, ReadError
from loader_service.reading.handles import HandleCache
from loader_service.reading.reader import NOT_REGULAR, FileIdentity, OpenFile

# preadv moves at most 0x7ffff000 bytes and 1024 vectors a call; half of the former keeps calls page-aligned.
MOST_VIEWS_A_CALL = 1024
MOST_BYTES_A_CALL = 1 << 30

# What a direct read is aligned to: a multiple of every usual device's block (512 or 4096), and a page.
DIRECT_BLOCK_BYTES = 4096

# An I/O error that goes away does so when a path or a server has failed over: the pause doubles with each retry.
_FIRST_RETRY_PAUSE_S = 0.01


def read_fully(
    handles: HandleCache,
    path: str,
    expected: FileIdentity | None,
    offset: int,
    views: Sequence[memoryview],
    *,
    retries: int,
    tensor: str | None = None,
    direct: bool = False,
    spare: tuple[int, int] = (0, 0),
) -> None:
    """Fills all `views` in order with the bytes of `path` from `offset` on. Blocks; called on reading threads.

    The wanted range is [offset, offset + the views' bytes), filled completely or not at all as far as the caller may
    rely on it. EIO is tried again `retries` times a call, ESTALE leads to one reopening with a check of the identity,
    nothing else is tried again. Without bytes to read the file is not touched. `direct` goes past the page cache:
    offset, addresses and sizes are then multiples of DIRECT_BLOCK_BYTES, and EINVAL tells that it cannot be done so.
    So many of the views' first and last bytes are `spare`: room for the rest of a block of which not all is wanted, and
    of which the file may not have all.

    Raises CheckpointError if the file is gone or is not `expected` any more, EndOfFileError if it ends early though it
    is the planned one, ReadError for all other failures of the system, DestinationError for views that cannot be
    filled, as where their memory is read-only; all name the path, the range and `tensor`. A direct read that ends
    within a block counts as the file's end.
    """
    step_bytes = DIRECT_BLOCK_BYTES if direct else 1
    planned = expected is not None
    transfer = _Transfer(path, offset, _flatten(views, path, tensor), tensor, step_bytes, spare, planned)
    attempts = _Attempts(retries)
    while transfer.pending:
        file: OpenFile | None = None
        try:
            with handles.borrow(path, expected, direct=direct) as file:
                ended = not transfer.run(file)
                file_bytes = file.identity.size_bytes
        except OSError as error:
            pause_s = attempts.pause_before_retry(error.errno)
            if pause_s is None:
                raise transfer.failure(error) from error
            if error.errno == errno.ESTALE:
                handles.invalidate(path, file)
            time.sleep(pause_s)
            continue
        if ended:
            if expected is not None:
                verify_identity(handles, path, expected, retries=retries)
            raise transfer.end_of_file(file_bytes)


def verify_identity(handles: HandleCache, path: str, expected: FileIdentity, *, retries: int) -> None:
    """As `HandleCache.verify`; what a read would try again, this does, too."""
    attempts = _Attempts(retries)
    while True:
        try:
            handles.verify(path, expected)
        except ReadError as error:
            pause_s = attempts.pause_before_retry(error.errno)
            if pause_s is None:
                raise
            time.sleep(pause_s)
        else:
            return


@dataclass(slots=True)
class _Attempts:
    """Decides which errors are worth another try; one object a call."""

    retries: int
    retried: int = 0
    reopened: bool = False

    def pause_before_retry(self, code: int | None) -> float | None:
        """Seconds to wait before trying again, or None if this error is final."""
        if code == errno.EINTR:
            return 0.0
        if code == errno.ESTALE and not self.reopened:
            self.reopened = True
            return 0.0
        if code == errno.EIO and self.retried < self.retries:
            self.retried += 1
            return float(_FIRST_RETRY_PAUSE_S * 2 ** (self.retried - 1))
        return None


@dataclass(slots=True)
class _Transfer:
    """How far one range has come. `pending` are the views still to fill, the first from where it stands; bytes
    [start, stop) are wanted."""

    path: str
    position: int
    pending: deque[memoryview]
    tensor: str | None
    step_bytes: int
    spare: tuple[int, int]
    planned: bool
    start: int = field(init=False)
    stop: int = field(init=False)

    def __post_init__(self) -> None:
        before, behind = self.spare
        self.start = self.position + before
        self.stop = self.position + sum(view.nbytes for view in self.pending) - behind

    def run(self, file: OpenFile) -> bool:
        """Reads until everything is there (True) or the file ends (False); what was read counts after an error too."""
        while self.pending:
            got = file.read_into(self._next_call(), self.position)
            if got and self.position + got >= self.stop:
                self.pending.clear()
                return True
            if got == 0:
                return False
            usable = got - got % self.step_bytes
            if usable == 0:  # a direct read comes in whole blocks, but at the end of the file
                return False
            self._advance(usable)
        return True

    def _next_call(self) -> list[memoryview]:
        views: list[memoryview] = []
        room = MOST_BYTES_A_CALL
        for view in islice(self.pending, MOST_VIEWS_A_CALL):
            views.append(view if view.nbytes <= room else view[:room])
            room -= view.nbytes
            if room <= 0:
                break
        return views

    def _advance(self, got: int) -> None:
        self.position += got
        while got:
            view = self.pending.popleft()
            if got < view.nbytes:
                self.pending.appendleft(view[got:])
                return
            got -= view.nbytes

    def _where(self) -> str:
        of_tensor = f" of tensor {self.tensor!r}" if self.tensor is not None else ""
        done = max(0, self.position - self.start)
        return f"reading bytes [{self.start}, {self.stop}){of_tensor}, {done} of {self.stop - self.start} bytes in"

    def end_of_file(self, file_bytes: int) -> LoaderError:
        ends_at = min(self.position, file_bytes)  # a range may begin behind the end
        return EndOfFileError(
            f"{self.path}: the file ends at byte {ends_at} while {self._where()}; "
            "compare its size with the original's and fetch it again",
            path=self.path,
            tensor=self.tensor,
        )

    def failure(self, error: OSError) -> LoaderError:
        code = error.errno
        what = error.strerror or str(error)
        name = f" ({errno.errorcode.get(code, code)})" if code is not None else ""
        kind = _KINDS.get(code or 0, ReadError)
        return kind(
            f"{self.path}: {what}{name} while {self._where()}; {_advice(code, what, planned=self.planned)}",
            path=self.path,
            tensor=self.tensor,
            errno=code,
        )


_KINDS: dict[int, type[LoaderError]] = {errno.ENOENT: CheckpointError, errno.EFAULT: DestinationError}

_ADVICE = {
    errno.ENOENT: "the file was there when the load was planned: put it back or point checkpoint.path elsewhere",
    errno.EACCES: "give this user the right to read it",
    errno.EIO: "the device or the file server fails: look at the kernel's log, then load again",
    errno.ESTALE: "the file server lost the file even after it was opened anew: load again when the mount is healthy",
    errno.EFAULT: "the destination's memory cannot be written to (read-only memory, or a file mapped for reading?)",
    errno.EISDIR: "give the path of a file",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the whole machine is out of file handles (fs.file-max)",
}


def _advice(code: int | None, what: str, *, planned: bool) -> str:
    if code == errno.ENOENT and not planned:
        return "check the path"
    if what == NOT_REGULAR:
        return "give the path of a regular file"
    return _ADVICE.get(code or 0, "check the file system that holds it")


def _flatten(views: Sequence[memoryview], path: str, tensor: str | None) -> deque[memoryview]:
    """The non-empty views as plain bytes: the kernel takes vectors of bytes, and empty ones waste places of a call."""
    flat: deque[memoryview] = deque()
    for view in views:
        if view.readonly or not view.c_contiguous:
            raise DestinationError(
                f"{path}: memory to read into must be writable and contiguous", path=path, tensor=tensor
            )
        if view.nbytes:
            flat.append(view if view.ndim == 1 and view.format == "B" else view.cast("B"))
    return flat
