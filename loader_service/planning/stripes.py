"""Who of a node's ranks reads which bytes ahead into the page cache, from where all of them then read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from loader_service.planning.rank_plan import RankPlan
from loader_service.planning.shared_ranges import Line

STRIPE_BYTES: Final = 256 << 20


class Stripe(NamedTuple):
    """Bytes [start, stop) of a shard."""

    shard: int
    start: int
    stop: int


def stripes(
    plans: Sequence[RankPlan], *, ranks: int, stripe_bytes: int = STRIPE_BYTES
) -> tuple[tuple[Stripe, ...], ...]:
    """For each of `ranks` places of a node, its stripes of all extents of `plans`: disjoint, complete, in plan order.

    Extents of several plans that overlap or touch are one. Each is cut at the file's multiples of `stripe_bytes`, so
    that no page is read by two ranks at a cut; stripe i goes to place i % ranks.
    """
    line = Line(plans[0].catalog)
    extents = [line.extents(plan) for plan in plans]
    start = np.concatenate([starts for starts, _ in extents])
    stop = np.concatenate([stops for _, stops in extents])
    if not len(start):
        return ((),) * ranks
    order = np.argsort(start, kind="stable")
    start, reached = start[order], np.maximum.accumulate(stop[order])
    apart = start[1:] > reached[:-1]
    start, stop = start[np.append(True, apart)], reached[np.append(apart, True)]
    shard = line.shards(start)
    start, stop = start - line.shard_start[shard], stop - line.shard_start[shard]
    counts = (stop - 1) // stripe_bytes - start // stripe_bytes + 1
    extent = np.repeat(np.arange(len(start)), counts)
    first = (start // stripe_bytes - np.cumsum(counts) + counts)[extent] + np.arange(len(extent))
    found = list(
        map(
            Stripe,
            shard[extent].tolist(),
            np.maximum(start[extent], first * stripe_bytes).tolist(),
            np.minimum(stop[extent], (first + 1) * stripe_bytes).tolist(),
        )
    )
    return tuple(tuple(found[place::ranks]) for place in range(ranks))
