"""What a plan takes of which part of which file, and who reads it for a node: the figures behind its picture. Pure.

Blocks and stripes are those of the loader itself, for as many ranks as a node is taken to have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from loader_service.cli.plan_bins import NOTHING, Bins, Floats, Ranges, at_least, nbytes, union
from loader_service.cli.plan_draft import Served, served_by_cache
from loader_service.errors import ConfigError
from loader_service.planning.plan import LoadPlan, RankPlan
from loader_service.planning.shared_ranges import Line
from loader_service.planning.sharing import PRIVATE, NodeBlocks, node_blocks, portions
from loader_service.planning.stripes import Stripe, stripes
from loader_service.sharing.decision import LEAST_SLOT_BYTES, Opinion, Request, Wanted, opinion_if_all_can

NODE_RANKS = 8
"""So many consecutive ranks are drawn as one node, each of them in a row of its own."""

_MORE_ROWS = 7  # for the ranks beyond, in groups


@dataclass(frozen=True, slots=True)
class Node:
    """The first ranks as if they were one node: which way of sharing is asked for, and what follows from the plans.

    What each rank reads for all is there for the way that would be taken: `block_ranges`, and in `reads_apart` the
    bytes that it reads for itself beside them, for staging; `stripe_ranges` for the page cache. Empty else.
    """

    requested: Request
    opinion: Opinion
    blocks: NodeBlocks
    block_ranges: tuple[Ranges, ...]
    stripe_ranges: tuple[Ranges, ...]
    reads_apart: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One rank, or several in a group. Shares are of each bin; bytes are those of the rank that has most.

    `several` and `alone` are taken as they lie in the file, by several ranks of the plan or by one; of `columns` a
    column slice is taken, `tables` are rows that stay in host memory: where ranks of a group differ, a bin counts in
    the first of these.
    """

    ranks: range
    several: Floats
    alone: Floats
    columns: Floats
    tables: Floats
    payload_bytes: int
    read_bytes: int
    columns_bytes: int
    tables_bytes: int


@dataclass(frozen=True, slots=True)
class Figures:
    """All of a plan that is drawn. `several` and `tables` are parts of `taken`, which is what any rank takes, with the
    rows of column slices; `draft_served` has each rank; `titles` are wider bins, and `takers[r, t]` says whether rank r
    takes any of number t."""

    plan: LoadPlan
    line: Line
    bins: Bins
    rows: tuple[Row, ...]
    taken: Ranges
    several: Ranges
    tables: Ranges
    header: Ranges
    node: Node | None
    draft_name: str
    draft: Ranges
    draft_served: tuple[Served, ...]
    titles: Bins
    titles_first: np.ndarray
    takers: np.ndarray


@dataclass(slots=True)
class _Place:
    """What the ranks at one place take: equal for all of them."""

    ranks: list[int]
    whole: Ranges
    columns: Ranges
    tables: Ranges
    plan_bytes: tuple[int, int, int, int]  # payload, read, column slices, tables

    @property
    def streamed(self) -> Ranges:
        return union([self.whole, self.columns])


@dataclass(frozen=True, slots=True)
class _Group:
    """What the ranks of a row take together, and the most that one of them has."""

    ranks: range
    whole: Ranges
    columns: Ranges
    tables: Ranges
    most_bytes: tuple[int, int, int, int]  # as a place's


@dataclass(slots=True)
class _Takers:
    """Bytes by how many ranks take them, as far as ranks were added."""

    streamed: Ranges = NOTHING
    several: Ranges = NOTHING
    tables: Ranges = NOTHING

    def add(self, places: Sequence[_Place]) -> None:
        known = [(self.streamed, 1), (self.several, 1)]
        self.streamed, self.several = at_least([*known, *((each.streamed, len(each.ranks)) for each in places)], 1, 2)
        self.tables = union([self.tables, *(each.tables for each in places)])


def figures_of(
    plan: LoadPlan,
    *,
    slot_bytes: int | None,
    sharing: Request = "auto",
    draft: LoadPlan | None = None,
    most_bins: int,
    most_titles: int,
) -> Figures:
    """The figures of a plan. `slot_bytes` is what a rank's staging slot has (None: no ranks are taken for a node),
    `sharing` how they are asked to share, `draft` another load's plan over the same checkpoint. Blocking: it plans
    every rank. Raises ConfigError for another checkpoint."""
    if draft is not None and draft.catalog.digest != plan.catalog.digest:
        raise ConfigError(f"loads {plan.load!r} and {draft.load!r} read different checkpoints: draw each alone")
    catalog = plan.catalog
    line = Line(catalog)
    bins = Bins.of(line, most_bins)
    titles, titles_first = bins.together(most_titles)
    takers, groups = _Takers(), []
    found = np.zeros((plan.world_size, len(titles)), dtype=np.bool_)
    for ranks in _grouped(plan.world_size):
        places = _places(plan, line, ranks)
        takers.add(places)
        groups.append(_group(ranks, places))
        for each in places:
            found[each.ranks] = titles.bytes_in(union([each.streamed, each.tables])) > 0
    headers = np.array([shard.header_bytes for shard in catalog.shards], dtype=np.int64)
    return Figures(
        plan=plan,
        line=line,
        bins=bins,
        rows=tuple(_row(each, bins, takers.several) for each in groups),
        taken=union([takers.streamed, takers.tables]),
        several=takers.several,
        tables=takers.tables,
        header=(line.shard_start[:-1], line.shard_start[:-1] + headers),
        node=None if slot_bytes is None else _node(plan, line, slot_bytes, sharing),
        draft_name="" if draft is None else draft.load,
        draft=NOTHING if draft is None else _tensors(line, draft),
        draft_served=() if draft is None else served_by_cache(draft, after=plan),
        titles=titles,
        titles_first=titles_first,
        takers=found,
    )


def _grouped(world_size: int) -> Iterator[range]:
    """The ranks of the first node one by one, the others in a few groups of whole nodes."""
    for rank in range(min(world_size, NODE_RANKS)):
        yield range(rank, rank + 1)
    nodes = -(-(world_size - NODE_RANKS) // NODE_RANKS)
    step = -(-nodes // _MORE_ROWS) * NODE_RANKS
    for rank in range(NODE_RANKS, world_size, max(step, 1)):
        yield range(rank, min(rank + step, world_size))


def _places(plan: LoadPlan, line: Line, ranks: range) -> list[_Place]:
    places: dict[tuple[int, ...], _Place] = {}
    for rank in ranks:
        at = tuple(plan.decisions.places(plan.mesh, rank))
        if at in places:
            places[at].ranks.append(rank)
        else:
            places[at] = _place(line, plan.for_rank(rank))
    return list(places.values())


def _place(line: Line, plan: RankPlan) -> _Place:
    start, stop = line.fragments(plan)
    table = np.isin(plan.fragment_tensor, list(plan.tables))
    column = plan.fragment_dst < 0
    kinds = [union([(start[kind], stop[kind])]) for kind in (~table & ~column, ~table & column, table)]
    cut = np.unique(plan.fragment_tensor[column & ~table])
    sizes = (plan.payload_bytes, plan.read_bytes, int(plan.tensor_nbytes[cut].sum()), nbytes(kinds[2]))
    return _Place([plan.rank], kinds[0], kinds[1], kinds[2], sizes)


def _group(ranks: range, places: Sequence[_Place]) -> _Group:
    kinds = [union([getattr(each, kind) for each in places]) for kind in ("whole", "columns", "tables")]
    most = [max(sizes) for sizes in zip(*(each.plan_bytes for each in places), strict=True)]
    return _Group(ranks, kinds[0], kinds[1], kinds[2], (most[0], most[1], most[2], most[3]))


def _row(group: _Group, bins: Bins, several: Ranges) -> Row:
    (common,) = at_least([(group.whole, 1), (several, 1)], 2)
    shares, reached, before = [], NOTHING, np.zeros(len(bins))
    for ranges in (common, group.whole, group.columns, group.tables):
        reached = union([reached, ranges])
        share = bins.share(reached)
        shares.append(share - before)
        before = share
    return Row(group.ranks, shares[0], shares[1], shares[2], shares[3], *group.most_bytes)


def _tensors(line: Line, plan: LoadPlan) -> Ranges:
    """All bytes of a load's tensors, whoever takes them."""
    catalog, ids = plan.catalog, plan.tensor_ids
    shard = catalog.shard_ids[ids]
    start, stop = line.at(shard, catalog.starts[ids]), line.at(shard, catalog.stops[ids])
    some = start < stop
    return union([(start[some], stop[some])])


def _node(plan: LoadPlan, line: Line, slot_bytes: int, requested: Request) -> Node | None:
    """None where there is one rank, or nothing that two of them want."""
    plans = [plan.for_rank(rank).streamed for rank in range(min(plan.world_size, NODE_RANKS))]
    if len(plans) < 2:
        return None
    blocks = node_blocks(plans, slot_bytes=max(slot_bytes, LEAST_SLOT_BYTES))
    if not len(blocks):
        return None
    wanted = Wanted(blocks.union_bytes, blocks.wanted_bytes, blocks.shared_bytes)
    found = opinion_if_all_can(requested, len(plans), wanted, slot_bytes=slot_bytes)
    block_ranges, stripe_ranges, apart = [], [], []
    if found.way == "staging":
        block_ranges, apart = _block_ranges(line, blocks), [_apart(each, blocks) for each in plans]
    elif found.way == "page_cache":
        stripe_ranges = [_striped(line, own) for own in stripes(plans, ranks=len(plans))]
    return Node(requested, found, blocks, tuple(block_ranges), tuple(stripe_ranges), tuple(apart))


def _block_ranges(line: Line, blocks: NodeBlocks) -> list[Ranges]:
    """By rank, the blocks that it reads."""
    owner = np.repeat(blocks.owner, np.diff(blocks.first_range))
    start = line.at(blocks.range_shard, blocks.range_start)
    stop = line.at(blocks.range_shard, blocks.range_stop)
    return [(start[owner == place], stop[owner == place]) for place in range(blocks.ranks)]


def _apart(plan: RankPlan, blocks: NodeBlocks) -> int:
    own = portions(plan, blocks)
    private = own.block == PRIVATE
    return int((own.stop[private] - own.start[private]).sum())


def _striped(line: Line, own: Sequence[Stripe]) -> Ranges:
    shard, start, stop = (np.array([each[i] for each in own], dtype=np.int64) for i in range(3))
    return line.at(shard.astype(np.int32), start), line.at(shard.astype(np.int32), stop)
