"""Which tensors of a checkpoint a load takes: key prefixes and `skip`, by the headers' names alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loader_service.checkpoint.catalog import Catalog
from loader_service.checkpoint.refusal import shown
from loader_service.checkpoint.slices import Picked
from loader_service.config.schema import LoadConfig
from loader_service.errors import CheckpointError
from loader_service.planning.glob import compile_glob

_NAMESPACES_SHOWN = 16


@dataclass(frozen=True, slots=True)
class Selection:
    """`ids` are the catalog ids taken, ascending. `read_all`: no prefix matched, so that none was applied."""

    ids: npt.NDArray[np.int64]
    warnings: tuple[str, ...]
    read_all: bool


def select(catalog: Catalog, load_name: str, load: LoadConfig) -> Selection:
    """What the load takes of the checkpoint, before any rule.

    Raises CheckpointError when one of several prefixes has no key, or none has one and `on_no_match` is `error`.
    """
    warnings: list[str] = []
    ids = np.arange(len(catalog.names), dtype=np.int64)
    read_all = False
    if load.key_prefixes is not None:
        under = _under_prefixes(catalog, load_name, load, load.key_prefixes)
        read_all = under is None
        if under is None:
            listed = ", ".join(load.key_prefixes)
            warnings.append(
                f"loads.{load_name}: no key of the checkpoint lies under {listed}; on_no_match is read_all, so the "
                "load is done as if no key_prefixes were declared"
            )
        else:
            ids = under
    if load.skip:
        ids = _without_skipped(catalog.names, ids, load_name, load.skip, warnings)
    return Selection(ids, tuple(warnings), read_all)


def _under_prefixes(
    catalog: Catalog, load_name: str, load: LoadConfig, prefixes: Sequence[str]
) -> npt.NDArray[np.int64] | None:
    """Ids of the keys under the prefixes; None where none has any and the load then reads all."""
    roots = tuple(dict.fromkeys(prefix.removesuffix(".") for prefix in prefixes))
    near = [i for i, name in enumerate(catalog.names) if name.startswith(roots)]
    taken: set[int] = set()
    absent: list[str] = []
    for root in roots:
        inside = root + "."
        found = [i for i in near if catalog.names[i].startswith(inside) or catalog.names[i] == root]
        taken.update(found)
        if not found:
            absent.append(root)
    if not taken and load.on_no_match == "read_all":
        return None
    if absent:
        raise CheckpointError(
            f"loads.{load_name}.key_prefixes: no key of the checkpoint lies under {', '.join(map(shown, absent))}; "
            f"it has {_namespaces(catalog.names)}. Correct the prefixes, or remove them to load everything",
            phase="plan",
        )
    return np.fromiter(sorted(taken), dtype=np.int64, count=len(taken))


def _without_skipped(
    names: Sequence[str], ids: npt.NDArray[np.int64], load_name: str, skip: Sequence[str], warnings: list[str]
) -> npt.NDArray[np.int64]:
    for i, pattern in enumerate(skip):
        glob = compile_glob(pattern)
        considered = names if len(ids) == len(names) else Picked(names, ids)
        places = glob.positions(considered)
        if len(places):
            ids = np.delete(ids, places)
        elif not len(glob.positions(names)):
            warnings.append(f"loads.{load_name}.skip[{i}]: {shown(pattern)} matches no name of the checkpoint")
    return ids


def _namespaces(names: Sequence[str]) -> str:
    """The namespaces that the names have, two segments deep (one where that is too long a list), with counts."""
    if not names:
        return "no tensor at all"
    for depth in (2, 1):
        counts = Counter(".".join(name.split(".", depth)[:depth]) for name in names)
        if len(counts) <= _NAMESPACES_SHOWN:
            return ", ".join(f"{shown(name)} ({count})" for name, count in sorted(counts.items()))
    largest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_NAMESPACES_SHOWN]
    listed = ", ".join(f"{shown(name)} ({count})" for name, count in sorted(largest))
    return f"{listed} and {len(counts) - len(largest)} more"
