"""Transfers: what one positioned read moves, built from a rank's fragments and the memory that they go to.

A transfer either reads straight into its destinations (bytes that are contiguous in the file and in the tensor), or
reads a block into scratch memory and copies the wanted elements from there (column slices, strided or device
destinations). Both are run by a reading thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from loader_service.checkpoint.catalog import Shard
from loader_service.memory.allocators import HostBuffer
from loader_service.memory.tensors import tensor_view
from loader_service.planning.fragments import View
from loader_service.reading.handles import HandleCache
from loader_service.reading.positioned import read_fully

MAX_VIEWS = 1000  # of one system call; the kernel takes 1,024
_DISCARD_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class DirectTransfer:
    """Bytes [start, start + nbytes) of a shard, scattered over `views` in order."""

    shard: int
    start: int
    nbytes: int
    views: Sequence[memoryview]
    tensor: str

    def run(self, handles: HandleCache, shard: Shard, retries: int) -> None:
        read_fully(handles, shard.path, shard.identity, self.start, self.views, retries=retries, tensor=self.tensor)


@dataclass(frozen=True, slots=True)
class CopyTransfer:
    """Bytes [start, start + nbytes) of a shard through scratch memory: `views` of them are copied to `destination`.

    The first `gap_bytes` are read with the rest and belong to no view. On a CUDA device the copies are queued on
    `stream`, where the caller's own work on the destination is, and are waited for: scratch memory is used again.
    """

    shard: int
    start: int
    nbytes: int
    gap_bytes: int
    views: Sequence[View]
    destination: torch.Tensor
    tensor: str
    stream: torch.cuda.Stream | None = None

    def run(self, handles: HandleCache, shard: Shard, retries: int, scratch: HostBuffer) -> None:
        wanted_bytes = self.nbytes - self.gap_bytes
        views = [*discarded(self.gap_bytes), scratch.memoryview[:wanted_bytes]]
        read_fully(handles, shard.path, shard.identity, self.start, views, retries=retries, tensor=self.tensor)
        with _queued_on(self.stream), torch.inference_mode(self.destination.is_inference()), torch.no_grad():
            for view in self.views:
                source = tensor_view(
                    scratch.tensor, view.offset_bytes, self.destination.dtype, view.shape, view.strides
                )
                self.destination[view.index].copy_(source)


@contextlib.contextmanager
def _queued_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """What this thread gives a device is queued on `stream`; None: nothing is changed, and CUDA not touched."""
    if stream is None:
        yield
        return
    # The device first: leaving a stream of another device would otherwise make a context on this thread's device 0.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


Transfer = DirectTransfer | CopyTransfer

_discard = memoryview(bytearray(_DISCARD_BYTES))


def discarded(nbytes: int) -> list[memoryview]:
    """Views for bytes that are read because they lie between wanted ones. All share one memory that no one reads."""
    whole, rest = divmod(nbytes, _DISCARD_BYTES)
    views = [_discard] * whole
    if rest:
        views.append(_discard[:rest])
    return views


class RunBuilder:
    """Joins views whose file ranges touch into transfers of at most `chunk_bytes` and `MAX_VIEWS` views."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._shard = -1
        self._start = 0
        self._nbytes = 0
        self._views: list[memoryview] = []
        self._tensor = ""

    def add(self, shard: int, start: int, gap_bytes: int, view: memoryview, tensor: str) -> Iterator[DirectTransfer]:
        """Adds file range [start, start + len(view)) and the gap before it; yields the transfers that are full."""
        if shard != self._shard or start - gap_bytes != self._start + self._nbytes:
            yield from self.flush()
            self._shard, self._start, self._tensor = shard, start - gap_bytes, tensor
        for part in (*discarded(gap_bytes), view):
            taken = 0
            while taken < len(part):
                if self._nbytes >= self._chunk_bytes or len(self._views) >= MAX_VIEWS:
                    end = self._start + self._nbytes
                    yield from self.flush()
                    self._shard, self._start, self._tensor = shard, end, tensor
                count = min(len(part) - taken, self._chunk_bytes - self._nbytes)
                self._views.append(part if count == len(part) else part[taken : taken + count])
                self._nbytes += count
                taken += count

    def flush(self) -> Iterator[DirectTransfer]:
        if self._nbytes:
            yield DirectTransfer(self._shard, self._start, self._nbytes, self._views, self._tensor)
        self._shard, self._nbytes, self._views = -1, 0, []
