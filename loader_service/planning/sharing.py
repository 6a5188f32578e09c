"""How the ranks of one node read what several of them want once: in blocks that fill a slot of memory they share.

All ranks of the node compute the same blocks from the same plans; `digest` lets them make sure. Block b is read by one
of them into a slot, and every rank that wants any of it takes its own part from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from loader_service.errors import ConfigError
from loader_service.planning.packing import LEAST_SLOT_BYTES, pack
from loader_service.planning.rank_plan import RankPlan
from loader_service.planning.shared_ranges import Line, segments_of, shared_ranges

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

MOST_RANKS: Final = 64
"""Of a node: one bit each."""

PRIVATE: Final = -1
"""In place of a block: the rank reads these bytes for itself."""

_FRINGE_PART = 256  # of a slot: what one rank wants beside shared bytes costs less in their block than read apart


class BlockRange(NamedTuple):
    """Bytes [start, stop) of a shard, at `offset` of the block's slot."""

    shard: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, eq=False)
class NodeBlocks:
    """What the ranks of a node share, in blocks. Ranks are counted by their places in the node's list.

    Block b holds ranges [first_range[b], first_range[b + 1]), in plan order (shard, start) as the blocks are. A range's
    place in the slot is its place in the file modulo 4096, and it shares no page of 4096 bytes with another of its
    block, so it can be read in whole pages. `owner[b]` reads the block; bit r of `wants[b]` says that rank r has
    portions in it. `shared_bytes` are those of all ranges, with gaps that are read over; `union_bytes` what the node
    wants, each byte once; `wanted_bytes` the same, as often as ranks want it.
    """

    ranks: int
    slot_bytes: int
    range_shard: Int32s
    range_start: Int64s
    range_stop: Int64s
    range_offset: Int64s
    first_range: Int64s
    owner: Int64s
    wants: npt.NDArray[np.uint64]
    shared_bytes: int
    union_bytes: int
    wanted_bytes: int

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self.owner)

    def ranges(self, block: int) -> Iterator[BlockRange]:
        """The ranges of a block, in plan order."""
        for i in range(int(self.first_range[block]), int(self.first_range[block + 1])):
            yield BlockRange(
                int(self.range_shard[i]), int(self.range_start[i]), int(self.range_stop[i]), int(self.range_offset[i])
            )

    @cached_property
    def digest(self) -> str:
        """Of the columns, little-endian: equal where two ranks cut and pack alike."""
        hasher = hashlib.sha256(f"node blocks {self.ranks} {self.slot_bytes}".encode())
        columns = (self.range_shard, self.range_start, self.range_stop, self.range_offset, self.first_range, self.owner)
        for column in (*columns, self.wants.view(np.int64)):
            hasher.update(len(column).to_bytes(8, "little"))
            hasher.update(np.ascontiguousarray(column, dtype="<i8").data)
        return hasher.hexdigest()


@dataclass(frozen=True, eq=False)
class Portions:
    """One rank's fragments, cut where shared ranges begin and end; in plan order, every byte of a fragment once.

    Portion p is bytes [start[p], stop[p]) of the file, all within fragment `fragment[p]` of the rank's plan and cut
    between elements of its tensor. They lie at `offset[p]` of the slot of block `block[p]`; both are -1 where the rank
    reads them for itself. Of a fragment that is a block of wanted and other bytes, a portion can have none wanted.
    """

    fragment: Int64s
    start: Int64s
    stop: Int64s
    block: Int64s
    offset: Int64s

    def __len__(self) -> int:
        return len(self.fragment)


def node_blocks(plans: Sequence[RankPlan], *, slot_bytes: int) -> NodeBlocks:
    """Cuts and packs what the ranks of a node share. `plans` are their streamed plans, in the order of their places.

    Raises ConfigError for more ranks than there are bits, and for slots too small to hold a page wherever it starts.
    """
    if len(plans) > MOST_RANKS:
        raise ConfigError(
            f"{len(plans)} ranks of one node cannot share staging, at most {MOST_RANKS} can; "
            "set reads.sharing to page_cache or none",
            phase="plan",
        )
    if slot_bytes < LEAST_SLOT_BYTES:
        raise ConfigError(
            f"slots of {slot_bytes} bytes are too small to be shared, they need {LEAST_SLOT_BYTES}; "
            "raise reads.chunk_bytes and staging.capacity_bytes, or set reads.sharing to none",
            phase="plan",
        )
    catalog = plans[0].catalog
    line = Line(catalog)
    segments = segments_of(line, plans)
    start, stop = shared_ranges(line, plans, segments, fringe_bytes=slot_bytes // _FRINGE_PART)
    packed = pack(line, catalog, start, stop, slot_bytes=slot_bytes)
    shard = line.shards(packed.start)
    wants = segments.wanted_within(packed.start, packed.stop)
    blocks = len(packed.first) - 1
    found = NodeBlocks(
        ranks=len(plans),
        slot_bytes=slot_bytes,
        range_shard=shard,
        range_start=packed.start - line.shard_start[shard],
        range_stop=packed.stop - line.shard_start[shard],
        range_offset=packed.offset,
        first_range=packed.first,
        owner=np.arange(blocks, dtype=np.int64) % len(plans),
        wants=np.bitwise_or.reduceat(wants, packed.first[:-1]) if blocks else wants,
        shared_bytes=int((packed.stop - packed.start).sum()),
        union_bytes=int(segments.nbytes[segments.wants != 0].sum()),
        wanted_bytes=sum(int((plan.fragment_stop - plan.fragment_start).sum()) for plan in plans),
    )
    for column in vars(found).values():
        if isinstance(column, np.ndarray):
            column.flags.writeable = False
    return found


def portions(plan: RankPlan, blocks: NodeBlocks) -> Portions:
    """What one rank takes of the blocks, and what it reads for itself. `plan` is one of those that were packed."""
    line = Line(plan.catalog)
    start, stop = line.fragments(plan)
    range_start = line.at(blocks.range_shard, blocks.range_start)
    range_stop = line.at(blocks.range_shard, blocks.range_stop)
    ends = np.stack((range_start, range_stop), axis=1).ravel()  # ascending; a range may begin where one ends
    cuts = ends[np.append(True, ends[1:] != ends[:-1])] if len(ends) else ends
    first = np.searchsorted(cuts, start, side="right")
    within = np.searchsorted(cuts, stop, side="left") - first
    fragment = np.repeat(np.arange(len(start), dtype=np.int64), within + 1)
    head = np.cumsum(within + 1) - (within + 1)
    number = np.arange(len(fragment)) - head[fragment]  # of the portion in its fragment
    cut = (first[fragment] + number)[number < within[fragment]]  # after each portion but a fragment's last
    portion_start, portion_stop = start[fragment], stop[fragment]
    portion_start[number > 0] = portion_stop[number < within[fragment]] = cuts[cut]
    block, offset = np.full(len(fragment), PRIVATE, dtype=np.int64), np.full(len(fragment), -1, dtype=np.int64)
    if len(cuts):
        place = np.maximum(np.searchsorted(range_start, portion_start, side="right") - 1, 0)
        shared = (range_start[place] <= portion_start) & (portion_start < range_stop[place])
        place = place[shared]
        block[shared] = np.repeat(np.arange(len(blocks)), np.diff(blocks.first_range))[place]
        offset[shared] = blocks.range_offset[place] + portion_start[shared] - range_start[place]
    shard_start = line.shard_start[plan.fragment_shard][fragment]
    columns = (fragment, portion_start - shard_start, portion_stop - shard_start, block, offset)
    for column in columns:
        column.flags.writeable = False
    return Portions(*columns)


def blocks_used(portions: Portions) -> Int64s:
    """The blocks of which a rank takes anything, ascending."""
    block: Int64s = portions.block[portions.block != PRIVATE]  # never falls
    found: Int64s = block[np.diff(block, prepend=PRIVATE) > 0]
    return found
