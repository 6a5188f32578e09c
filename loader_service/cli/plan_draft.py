"""What of a draft the raw weight cache can serve each rank after its target's load. Pure."""

from __future__ import annotations

from typing import NamedTuple

from loader_service.filling.cached import cacheable
from loader_service.planning.plan import LoadPlan, RankPlan


class Served(NamedTuple):
    """Of `wanted_bytes` of files that a rank takes, at most `served_bytes` come from the cache."""

    wanted_bytes: int
    served_bytes: int


def served_by_cache(draft: LoadPlan, *, after: LoadPlan) -> tuple[Served, ...]:
    """By rank, where the cache has room for all that it can hold of the load `after`: no column slices, no tables."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], Served] = {}
    ranks = []
    for rank in range(draft.world_size):
        at = tuple(draft.decisions.places(draft.mesh, rank)), tuple(after.decisions.places(after.mesh, rank))
        if at not in found:
            found[at] = _served(draft.for_rank(rank).streamed, after.for_rank(rank).streamed)
        ranks.append(found[at])
    return tuple(ranks)


def _served(draft: RankPlan, after: RankPlan) -> Served:
    held, _ = cacheable(after)
    start, stop, shard = draft.fragment_start, draft.fragment_stop, draft.fragment_shard
    both = sum(
        int(ranges.overlap_bytes(start[shard == each], stop[shard == each]).sum()) for each, ranges in held.items()
    )
    return Served(int((stop - start).sum()), both)
