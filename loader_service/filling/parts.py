"""Tensors that are filled fragment by fragment: in place where bytes are contiguous, else by way of scratch memory, or
from blocks that ranks of the node share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from loader_service.filling.form import Streams
from loader_service.planning.boxes import views_within
from loader_service.planning.fragments import SubRange
from loader_service.planning.plan import RankPlan
from loader_service.planning.shared_units import SharedRanges, Stretch, cut_within
from loader_service.planning.sharing import PRIVATE
from loader_service.planning.units import extents_of_fragments, fragments_of_tensors
from loader_service.transfers import BlockTransfer, Copy, CopyTransfer, Transfer, memory_transfers


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the plan, by its number, and what is filled. With `memory`, all of the tensor's bytes, fragments
    without gaps are read in place; all else is copied into `tensor`."""

    number: int
    tensor: torch.Tensor
    memory: memoryview | None


class _Source(NamedTuple):
    """Where copied bytes come from: with the same one they are copied together. `moved_bytes` lead from a position in
    the file to that in the block's slot; `passed` counts the shared stretches before, which no read may cover."""

    extent: int
    stream: torch.cuda.Stream | None
    block: int
    moved_bytes: int
    passed: int


class PartReads:
    """Makes the transfers of such tensors. Ranges that are copied are joined to reads of at most `scratch_bytes`."""

    def __init__(
        self,
        plan: RankPlan,
        *,
        chunk_bytes: int,
        scratch_bytes: int,
        streams: Streams | None = None,
        shared: SharedRanges | None = None,
    ) -> None:
        self._plan = plan
        self._chunk_bytes = chunk_bytes
        self._scratch_bytes = scratch_bytes
        self._streams = streams or {}
        self._shared = shared
        self._bounds = fragments_of_tensors(plan)
        self._extents = extents_of_fragments(plan)
        self._passed = 0

    def transfers(self, targets: Iterable[Target]) -> Iterator[Transfer]:
        """For targets in plan order; the transfers come in that order."""
        joined: _Joined | None = None
        for target in targets:
            stream = self._streams.get(target.tensor.device)
            for fragment in range(*self._bounds[target.number : target.number + 2].tolist()):
                if target.memory is not None and self._plan.fragment_dst[fragment] >= 0:
                    if joined is not None:
                        yield joined.transfer(self._plan)
                        joined = None
                    yield from self._in_place(fragment, target.memory)
                    continue
                for sub, source in self._pieces(fragment, stream):
                    if joined is None or not joined.takes(fragment, source, sub.stop):
                        if joined is not None:
                            yield joined.transfer(self._plan)
                        joined = _Joined(fragment, source, sub.start, self._scratch_bytes)
                    joined.add(fragment, sub, target.tensor)
        if joined is not None:
            yield joined.transfer(self._plan)

    def in_place(self, number: int) -> Iterator[tuple[int, int, int, int]]:
        """(shard, start, stop, offset in the tensor) of those of its fragments that have no gaps."""
        plan = self._plan
        for fragment in range(*self._bounds[number : number + 2].tolist()):
            if plan.fragment_dst[fragment] >= 0:
                columns = (plan.fragment_shard, plan.fragment_start, plan.fragment_stop, plan.fragment_dst)
                shard, start, stop, dst = (int(column[fragment]) for column in columns)
                yield shard, start, stop, dst

    def _pieces(self, fragment: int, stream: torch.cuda.Stream | None) -> Iterator[tuple[SubRange, _Source]]:
        """What is wanted of a fragment, cut as it is read or shared."""
        plan, extent = self._plan, int(self._extents[fragment])
        start, stop = int(plan.fragment_start[fragment]), int(plan.fragment_stop[fragment])
        shard = int(plan.fragment_shard[fragment])
        whole = (Stretch(start, stop, PRIVATE, -1),)
        for stretch in whole if self._shared is None else self._shared.within(shard, start, stop):
            if stretch.block == PRIVATE:
                for sub in cut_within(plan, fragment, stretch.start, stretch.stop, self._scratch_bytes):
                    yield sub, _Source(extent, stream, PRIVATE, 0, self._passed)
                continue
            self._passed += 1
            geometry, _, first_byte = plan.origin(fragment)
            views = views_within(geometry, stretch.start - first_byte, stretch.stop - first_byte)
            if views:
                sub = SubRange(stretch.start, stretch.stop, views)
                yield sub, _Source(extent, stream, stretch.block, stretch.offset - stretch.start, 0)

    def _in_place(self, fragment: int, memory: memoryview) -> Iterator[Transfer]:
        plan = self._plan
        start, stop, dst = (int(c[fragment]) for c in (plan.fragment_start, plan.fragment_stop, plan.fragment_dst))
        shard, name = int(plan.fragment_shard[fragment]), plan.name(int(plan.fragment_tensor[fragment]))
        view = memory[dst : dst + stop - start]
        yield from memory_transfers(shard, start, view, self._chunk_bytes, name, self._shared)


class _Joined:
    """Ranges of consecutive fragments that are read together into scratch memory, with the gaps between them, or that
    are copied from one block together."""

    def __init__(self, fragment: int, source: _Source, start: int, most_bytes: int) -> None:
        self._first = self._last = fragment
        self._source = source
        self._start = self._stop = start
        self._most_bytes = most_bytes
        self._copies: list[Copy] = []

    def takes(self, fragment: int, source: _Source, stop: int) -> bool:
        """Whether a range that ends at `stop` may join."""
        follows = fragment - self._last <= 1 and source == self._source
        return follows and (source.block != PRIVATE or stop - self._start <= self._most_bytes)

    def add(self, fragment: int, sub: SubRange, destination: torch.Tensor) -> None:
        self._copies += [Copy(sub.start - self._start, view, destination) for view in sub.views]
        self._last, self._stop = fragment, sub.stop

    def transfer(self, plan: RankPlan) -> Transfer:
        shard, name = int(plan.fragment_shard[self._first]), plan.name(int(plan.fragment_tensor[self._first]))
        nbytes, source = self._stop - self._start, self._source
        if source.block == PRIVATE:
            return CopyTransfer(shard, self._start, nbytes, self._copies, name, source.stream)
        offset = self._start + source.moved_bytes
        return BlockTransfer(shard, self._start, nbytes, source.block, offset, None, self._copies, name, source.stream)
