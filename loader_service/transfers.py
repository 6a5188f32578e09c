"""Transfers: what one range of a file fills, built from a rank's plan and the memory that its bytes go to.

A transfer either reads straight into its destination (bytes that are contiguous in the file and in memory), or reads a
range into scratch memory and copies the wanted elements from there (column slices, small, strided or device
destinations). Both are run by a reading thread.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from loader_service.checkpoint.catalog import Shard
from loader_service.memory.allocators import HostBuffer
from loader_service.memory.tensors import tensor_view
from loader_service.planning.fragments import View
from loader_service.planning.images import BLOCK_BYTES, Image, block_ceil, block_floor, chunks
from loader_service.planning.shared_units import SharedRanges, Stretch
from loader_service.planning.sharing import PRIVATE
from loader_service.reading.file_range import FileRange, Window


class RangeSource(Protocol):
    """Where ranges of files come from. `read_within` fills the window and returns how many bytes it read for that;
    `read_parts` fills several, which begin at the given bytes of the file and follow each other there."""

    def read_within(self, where: FileRange, window: Window) -> int: ...

    def read_parts(self, where: FileRange, parts: Sequence[tuple[int, Window]]) -> int: ...


@dataclass(frozen=True, slots=True)
class DirectTransfer:
    """Bytes of a shard from `start` on, straight into `window`. `tensor` is whose they are, or the first's."""

    shard: int
    start: int
    window: Window
    tensor: str

    @property
    def nbytes(self) -> int:
        return self.window.nbytes

    def run(self, source: RangeSource, shard: Shard) -> int:
        return source.read_within(FileRange(shard.path, shard.identity, self.start, self.tensor), self.window)


@dataclass(frozen=True, slots=True)
class PartsTransfer:
    """Bytes of a shard that follow each other there, (start, window) each, straight into several pieces of memory.
    `tensor` is whose the first are."""

    shard: int
    parts: Sequence[tuple[int, Window]]
    tensor: str

    @property
    def start(self) -> int:
        return self.parts[0][0]

    @property
    def nbytes(self) -> int:
        return sum(window.nbytes for _, window in self.parts)

    def run(self, source: RangeSource, shard: Shard) -> int:
        return source.read_parts(FileRange(shard.path, shard.identity, self.start, self.tensor), self.parts)


class Copy(NamedTuple):
    """Elements of a range, `view` counted from `offset_bytes` of it, for `view.index` of `destination`."""

    offset_bytes: int
    view: View
    destination: torch.Tensor


@dataclass(frozen=True, slots=True)
class CopyTransfer:
    """Bytes [start, start + nbytes) of a shard through scratch memory, and what of them is copied where.

    On a CUDA device the copies are queued on `stream`, where the caller's own work on the destinations is, and are
    waited for: scratch memory is used again. Scratch memory begins with a block and has one more than `nbytes`.
    """

    shard: int
    start: int
    nbytes: int
    copies: Sequence[Copy]
    tensor: str
    stream: torch.cuda.Stream | None = None

    def run(self, source: RangeSource, shard: Shard, scratch: HostBuffer) -> int:
        lead = self.start % BLOCK_BYTES
        where = FileRange(shard.path, shard.identity, self.start, self.tensor)
        read_bytes = source.read_within(where, Window(scratch.memoryview, lead, self.nbytes))
        _copy(scratch, lead, self.copies, self.stream)
        return read_bytes


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Bytes [start, start + nbytes) of a shard that another rank may have read: they lie from `offset` of block `block`
    on. All of them go to `memory`, or, without one, what `copies` say to their destinations, as in `CopyTransfer`."""

    shard: int
    start: int
    nbytes: int
    block: int
    offset: int
    memory: memoryview | None
    copies: Sequence[Copy]
    tensor: str
    stream: torch.cuda.Stream | None = None

    def run(self, slot: HostBuffer) -> None:
        if self.memory is None:
            _copy(slot, self.offset, self.copies, self.stream)
            return
        source = slot.memoryview[self.offset : self.offset + self.nbytes]
        np.copyto(np.frombuffer(self.memory, np.uint8), np.frombuffer(source, np.uint8))  # others run meanwhile


def _copy(source: HostBuffer, first: int, copies: Sequence[Copy], stream: torch.cuda.Stream | None) -> None:
    """Copies elements of a range that begins at `first` of `source` to their destinations."""
    with _queued_on(stream), torch.no_grad():
        for inference, alike in itertools.groupby(copies, lambda copy: copy.destination.is_inference()):
            with torch.inference_mode(inference):
                for offset, view, destination in alike:
                    at = first + offset + view.offset_bytes
                    elements = tensor_view(source.tensor, at, destination.dtype, view.shape, view.strides)
                    whole = view.shape == destination.shape  # needs no index, which costs as much as the copy
                    (destination if whole else destination[view.index]).copy_(elements)


@contextlib.contextmanager
def _queued_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """What this thread gives a device is queued on `stream`; None: nothing is changed, and CUDA not touched."""
    if stream is None:
        yield
        return
    # The device first: leaving a stream of another device would otherwise make a context on this thread's device 0.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


Transfer = DirectTransfer | PartsTransfer | CopyTransfer | BlockTransfer


def image_transfers(
    image: Image, memory: memoryview, chunk_bytes: int, name: Callable[[int], str], shared: SharedRanges | None = None
) -> Iterator[Transfer]:
    """Fills an image. `memory` is all of its buffer, which begins with a block: the image's blocks may be overwritten
    whole, and no other. `name` tells a tensor's. What is in `shared` comes from there."""
    window = _window_of(image, memory)
    whole = (Stretch(image.start, image.stop, PRIVATE, -1),)
    for stretch in whole if shared is None else shared.within(image.shard, image.start, image.stop):
        part = window.part(stretch.start - image.start, stretch.stop - image.start)
        yield from _filled(image.shard, stretch, part, chunk_bytes, lambda at: name(image.tensor_at(at)))


def joined_transfers(
    images: Sequence[Image], buffers: Sequence[memoryview], chunk_bytes: int, name: Callable[[int], str]
) -> Iterator[Transfer]:
    """Fills images of which each has a buffer of its own. What small ones have in neighbouring blocks of a file is read
    together: 385 MiB of small tensors took 0.27 s in reads of 1 MiB, and the disk needs 0.12."""
    group: list[Image] = []
    for image in images:
        if group and not _follows(group[-1], image, group[0].start, chunk_bytes):
            yield from _group_transfers(group, buffers, chunk_bytes, name)
            group = []
        group.append(image)
    if group:
        yield from _group_transfers(group, buffers, chunk_bytes, name)


def _follows(before: Image, image: Image, start: int, most_bytes: int) -> bool:
    neighbours = image.shard == before.shard and block_floor(image.start) <= block_ceil(before.stop)
    return neighbours and block_ceil(image.stop) - block_floor(start) <= most_bytes


def _group_transfers(
    group: Sequence[Image], buffers: Sequence[memoryview], chunk_bytes: int, name: Callable[[int], str]
) -> Iterator[Transfer]:
    if len(group) == 1:
        yield from image_transfers(group[0], buffers[group[0].memory], chunk_bytes, name)
        return
    parts = [(image.start, _window_of(image, buffers[image.memory])) for image in group]
    yield PartsTransfer(group[0].shard, parts, name(group[0].tensors[0]))


def _window_of(image: Image, memory: memoryview) -> Window:
    first, nbytes = block_floor(image.offset), image.stop - image.start
    return Window(memory[first : block_ceil(image.offset + nbytes)], image.offset - first, nbytes)


def memory_transfers(
    shard: int, start: int, memory: memoryview, chunk_bytes: int, tensor: str, shared: SharedRanges | None = None
) -> Iterator[Transfer]:
    """Fills memory of which nothing around may be touched. What is in `shared` comes from there."""
    stop = start + memory.nbytes
    whole = (Stretch(start, stop, PRIVATE, -1),)
    for stretch in whole if shared is None else shared.within(shard, start, stop):
        view = memory[stretch.start - start : stretch.stop - start]
        yield from _filled(shard, stretch, Window(view, 0, view.nbytes), chunk_bytes, lambda _: tensor)


def _filled(
    shard: int, stretch: Stretch, window: Window, chunk_bytes: int, name: Callable[[int], str]
) -> Iterator[Transfer]:
    """Fills a window, from a block or by reads of at most `chunk_bytes`."""
    if stretch.block != PRIVATE:
        start, nbytes = stretch.start, window.nbytes
        yield BlockTransfer(shard, start, nbytes, stretch.block, stretch.offset, window.view, (), name(start))
        return
    for start, stop in chunks(stretch.start, stretch.stop, chunk_bytes):
        yield DirectTransfer(shard, start, window.part(start - stretch.start, stop - stretch.start), name(start))
