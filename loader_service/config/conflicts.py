"""Conflicts between parts of the configuration: pure functions over parts that are valid by themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from loader_service.config.fields import KeyPath, Problem, did_you_mean
from loader_service.config.rules import AssignRule, Rule, SplitRule

DEFAULT_AXIS = "world"


def missing_checkpoints(load_names: Iterable[str]) -> list[Problem]:
    """A problem for each named load, none of which has a checkpoint of its own, where there is no common one."""
    message = "has no checkpoint; add `checkpoint: {path: ...}` at the top, or to this load"
    return [Problem(("loads", name), message) for name in load_names]


@dataclass(frozen=True, slots=True)
class RulePart:
    """The `assign` or `split` of a rule at its key path. `part` is None where only its axis is valid."""

    path: KeyPath
    axis: tuple[str, ...]
    part: AssignRule | SplitRule | None


def rule_parts(path: KeyPath, rule: Rule) -> list[RulePart]:
    """The parts of a valid rule that stands at `path`."""
    parts = (("assign", rule.assign), ("split", rule.split))
    return [RulePart((*path, key), part.axis, part) for key, part in parts if part is not None]


def mesh_conflicts(mesh: Mapping[str, int] | None, parts: Iterable[RulePart]) -> list[Problem]:
    """What rules ask of the mesh that it does not have."""
    problems: list[Problem] = []
    for each in parts:
        unknown = list(_unknown_axes(mesh, each.axis))
        problems += [Problem((*each.path, "axis"), text) for text in unknown]
        if mesh is None or unknown or each.part is None:
            continue
        ranks = math.prod(mesh[axis] for axis in each.axis)
        if isinstance(each.part, AssignRule):
            conflicts = _assign_conflicts(each.part, ranks)
        else:
            conflicts = _split_conflicts(each.part, ranks)
        problems += [replace(problem, path=(*each.path, *problem.path)) for problem in conflicts]
    return problems


def _unknown_axes(mesh: Mapping[str, int] | None, axes: tuple[str, ...]) -> Iterator[str]:
    for axis in axes:
        if mesh is None and axis != DEFAULT_AXIS:
            yield (
                f"axis {axis!r} is unknown: without `mesh` the only axis is {DEFAULT_AXIS!r}; "
                f"add `mesh: {{{axis}: N}}` with its number of ranks"
            )
        elif mesh is not None and axis not in mesh:
            hint = did_you_mean(axis, mesh)
            yield f"the mesh has no axis {axis!r}, only {', '.join(mesh)}; correct it or add the axis to `mesh`{hint}"


def _assign_conflicts(rule: AssignRule, ranks: int) -> Iterator[Problem]:
    if rule.boundaries is not None:
        yield from _wrong_length(("boundaries",), rule.boundaries, ranks)
    for position, place in enumerate(rule.to or () if rule.to != "all" else ()):
        if isinstance(place, int) and not -ranks <= place < ranks:
            message = (
                f"{place} is outside the axis, which has {ranks} ranks; write a number from {-ranks} to {ranks - 1}"
            )
            yield Problem(("to", position), message, place)


def _split_conflicts(rule: SplitRule, ranks: int) -> Iterator[Problem]:
    for position, cuts in enumerate(rule.boundaries or ()):
        if isinstance(cuts, tuple):
            yield from _wrong_length(("boundaries", position), cuts, ranks)
    if rule.boundaries and isinstance(rule.boundaries[0], int):
        yield from _wrong_length(("boundaries",), rule.boundaries, ranks)
    units = (rule.units,) if isinstance(rule.units, int) else rule.units or ()
    for position, count in enumerate(units):
        if count % ranks and ranks % count:
            where: KeyPath = ("units",) if isinstance(rule.units, int) else ("units", position)
            message = (
                f"{count} units do not fit {ranks} ranks: the one must divide the other; "
                "correct the number of units, or split over another axis"
            )
            yield Problem(where, message, count)


def _wrong_length(where: KeyPath, cuts: tuple[object, ...], ranks: int) -> Iterator[Problem]:
    if len(cuts) != ranks + 1:
        message = f"has {len(cuts)} numbers, but the axis has {ranks} ranks; write {ranks + 1} numbers, from 0"
        yield Problem(where, message, cuts)
