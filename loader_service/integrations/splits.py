"""Engines slice for themselves: a tensor that a rule has cut already is refused, unless it is marked as pre-sharded."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TypeAlias

import numpy as np

from loader_service.errors import ConfigError
from loader_service.planning.groups import WHOLE
from loader_service.stream import BlockingLoad, Load

Presharded: TypeAlias = Container[str] | Callable[[str], bool]
"""The checkpoint's names whose parameters hold this rank's part already: a set of names, or what says it of a name."""


def refuse_splits(
    load: Load | BlockingLoad, rank: int, engine: str, presharded: Presharded = (), *, how_to_mark: str = ""
) -> None:
    """Raises ConfigError for the first streamed tensor of the rank that rules cut, and that is not marked.

    To be called before anything is consumed. Tables stay out of it: what they are filled into is the caller's. A
    `split` over an axis of one cuts nothing.
    """
    names = {presharded} if isinstance(presharded, str) else presharded  # a text would contain parts of itself
    marked = names if callable(names) else names.__contains__
    plan = load.plan.for_rank(rank)
    for number in np.flatnonzero(plan.tensor_group != WHOLE).tolist():
        name = plan.name(number)
        if number in plan.tables or marked(name):
            continue
        spec = load.spec(name)
        rules = " and ".join(load.plan.split_rules(name))
        raise ConfigError(
            f"load '{load.name}': tensor '{name}' is cut by {rules}: this rank would get {spec.shape} of "
            f"{spec.full_shape}, but {engine} takes whole tensors and slices for itself. Take the rule out"
            f"{how_to_mark}; `assign` and `key_prefixes` still save bytes",
            tensor=name,
            rank=rank,
        )
