"""Which copy counts where shards overlap, and what an index says that the headers do not.

Headers say what exists. Without an index two copies of a name are refused; with one, the copy in the shard that the
index names wins, and a whole shard that the index does not list is left out if listed shards hold all of its names
(a second weight set side by side with the first).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from loader_service.checkpoint.index import IndexFile
from loader_service.checkpoint.refusal import shown, shown_list
from loader_service.checkpoint.slices import any_twice, hashes_of, joined
from loader_service.errors import CheckpointError

_OF_A_SET: Final = re.compile(r"(?P<head>.*?)-\d+(?P<tail>-of-\d+.*)", re.DOTALL)
_EXAMPLES: Final = 3


@dataclass(frozen=True, slots=True)
class Choices:
    """What is left out of a catalog. `shards` whole files; `tensors` names by the file whose copy does not count.

    `notes` say in words what was decided and what the index gets wrong; reports hand them on.
    """

    shards: frozenset[str] = frozenset()
    tensors: Mapping[str, frozenset[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def choose(names_by_shard: Mapping[str, Sequence[str]], index: IndexFile | None) -> Choices:
    """Decides between copies. `names_by_shard`: tensor names by file, each name once a file.

    Raises CheckpointError that lists the sets of files where nothing decides.
    """
    overlap = any_twice(names_by_shard.values())
    if index is None:
        if overlap:
            raise _undecided(_copies(names_by_shard), None)
        return Choices()
    if not overlap and _agrees(names_by_shard, index):
        return Choices()
    listed = index.shards
    dropped, notes = _unlisted(names_by_shard, listed)
    kept = {shard: names for shard, names in names_by_shard.items() if shard not in dropped}
    winners, left_out = _decide(_copies(kept), index, listed) if overlap else ({}, {})
    holder = {name: shard for shard, names in kept.items() for name in names} | winners
    notes += _decided_notes(winners, left_out) + _index_notes(holder, index, listed)
    return Choices(dropped, {shard: frozenset(names) for shard, names in left_out.items()}, tuple(notes))


def _agrees(names_by_shard: Mapping[str, Sequence[str]], index: IndexFile) -> bool:
    """Whether the index says just what the files hold, none of which holds a name that another one has.

    By the names' hashes: two names that have one would cost no more than a note.
    """
    lists = names_by_shard.values()
    numbers = {shard: number for number, shard in enumerate(names_by_shard)}
    held, told = hashes_of(lists), hashes_of(index.names)
    if len(held) != len(told) or not index.shards <= numbers.keys():
        return False
    holders = (np.fromiter(map(numbers.__getitem__, some), np.int64, len(some)) for some in index.holders)
    held_order, told_order = np.argsort(held), np.argsort(told)
    return bool(
        np.array_equal(held[held_order], told[told_order])
        and np.array_equal(
            np.repeat(np.arange(len(numbers)), list(map(len, lists)))[held_order],
            joined(list(holders), np.int64)[told_order],
        )
    )


def _copies(names_by_shard: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The files of every name that more than one holds."""
    counts = Counter(name for names in names_by_shard.values() for name in names)
    copies: dict[str, list[str]] = {}
    for shard, names in names_by_shard.items():
        for name in names:
            if counts[name] > 1:
                copies.setdefault(name, []).append(shard)
    return copies


def _unlisted(names_by_shard: Mapping[str, Sequence[str]], listed: frozenset[str]) -> tuple[frozenset[str], list[str]]:
    """The files to leave out because listed ones hold all of their names, and a note on each file not listed."""
    in_listed = {name for shard in listed for name in names_by_shard.get(shard, ())}
    dropped: set[str] = set()
    notes = []
    for shard, names in names_by_shard.items():
        if shard in listed or not names:
            continue
        others = [name for name in names if name not in in_listed]
        if others:
            notes.append(f"{shard}: kept though the index does not list it: it holds {_some(others)} besides")
        else:
            dropped.add(shard)
            notes.append(f"{shard}: left out: the index does not list it and listed shards hold all its names")
    return frozenset(dropped), notes


def _decide(
    copies: Mapping[str, list[str]], index: IndexFile, listed: frozenset[str]
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """(the file that wins by name, the names that lose by file). Raises CheckpointError where the index is silent."""
    winners: dict[str, str] = {}
    left_out: dict[str, list[str]] = {}
    undecided: dict[str, list[str]] = {}
    for name, shards in copies.items():
        candidates = [shard for shard in shards if shard == index.weight_map.get(name)]
        candidates = candidates or [shard for shard in shards if shard in listed]
        if len(candidates) != 1:
            undecided[name] = shards
            continue
        winners[name] = candidates[0]
        for shard in shards:
            if shard != candidates[0]:
                left_out.setdefault(shard, []).append(name)
    if undecided:
        raise _undecided(undecided, index)
    return winners, left_out


def _decided_notes(winners: Mapping[str, str], left_out: Mapping[str, list[str]]) -> list[str]:
    return [
        f"{shard}: its copy of {_some(names)} does not count: the index prefers {shown(winners[names[0]])}"
        + (" and others" if len({winners[name] for name in names}) > 1 else "")
        for shard, names in left_out.items()
    ]


def _index_notes(holder: Mapping[str, str], index: IndexFile, listed: frozenset[str]) -> list[str]:
    """What the index gets wrong about names that need no decision; none of it stands in a load's way."""
    omitted = [name for name, shard in holder.items() if name not in index.weight_map and shard in listed]
    missing = [name for name in index.weight_map if name not in holder]
    elsewhere = [name for name, shard in index.weight_map.items() if holder.get(name, shard) != shard]
    notes = []
    if omitted:
        notes.append(f"the index omits {_some(omitted)}, which the headers hold")
    if missing:
        notes.append(f"the index names {_some(missing)}, which no shard holds")
    if elsewhere:
        first = elsewhere[0]
        where = f"{shown(holder[first])}, not in {shown(index.weight_map[first])}"
        notes.append(f"the index misplaces {_some(elsewhere)}: {shown(first)} lies in {where}")
    return notes


def _some(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({shown_list(names, _EXAMPLES)})"


def _undecided(copies: Mapping[str, list[str]], index: IndexFile | None) -> CheckpointError:
    name, shards = next(iter(copies.items()))
    files = sorted({shard for holders in copies.values() for shard in holders})
    sets = Counter(_set_of(shard) for shard in files)
    listing = ", ".join(f"{shown(label)} ({count} file{'s' * (count > 1)})" for label, count in sorted(sets.items()))
    why = "there is no index to decide" if index is None else f"the index {index.path} does not decide"
    return CheckpointError(
        f"{_some(list(copies))} are held by more than one file and {why}: {shown(name)} is in "
        f"{' and in '.join(map(shown, shards[:_EXAMPLES]))}. Weight sets that overlap: {listing}. Keep one set in the "
        "folder, or list the files of one under checkpoint.path",
        tensor=name,
    )


def _set_of(shard: str) -> str:
    """`model-00001-of-00003.safetensors` -> `model-*-of-00003.safetensors`; a file that is no part of a set: itself."""
    match = _OF_A_SET.fullmatch(shard)
    return f"{match['head']}-*{match['tail']}" if match else shard
