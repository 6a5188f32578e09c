"""What rules decide: for each tensor, which of them apply, computed once for all ranks.

Each axis of the mesh is decided by the first matching rule that names it. Tensors to which the same decisions apply
share a signature, and those that are cut and have the same shape and dtype share a group: a rank's part is then a few
array operations, and the split arithmetic runs once a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from loader_service.checkpoint.catalog import Catalog
from loader_service.checkpoint.refusal import shown
from loader_service.checkpoint.slices import Picked, numbers_of
from loader_service.config.schema import AssignRule, Rule, SplitRule
from loader_service.errors import ConfigError
from loader_service.planning.captured import NO_MATCH, captured_numbers
from loader_service.planning.cuts import Cut, Division
from loader_service.planning.glob import compile_glob
from loader_service.planning.mesh import Mesh

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

NOT_DECIDED: Final = -1

Layout: TypeAlias = Literal["per_rank", "shared"]


@dataclass(frozen=True, slots=True)
class Term:
    """One `assign` or `split` of a rule, with the places along its axis that it names worked out.

    `where` is its key path, for messages. `takers`: the places that take a tensor whole (`assign ... to`), None where
    all do, a number in the name decides, or the tensor is cut. `division` is how dimension `dim` is cut, None for an
    assign.
    """

    where: str
    axes: tuple[str, ...]
    parts: int
    takers: frozenset[int] | None = None
    dim: int = 0
    division: Division | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A tensor that stays in host memory. `where` is the key path of the rule that says so."""

    layout: Layout
    where: str


@dataclass(frozen=True)
class Decisions:
    """The decisions for the tensors of a selection (T of them, in the order of their catalog ids).

    `signature[t]` is the place in `signatures` of the terms that apply to tensor t, in the order of the rules.
    `owners[i][t]` is the place along term i's axis that takes tensor t by its number, NOT_DECIDED where term i does not
    apply; only terms that go by number have a column. `tables` are the host-resident ones of the tensors.
    """

    terms: tuple[Term, ...]
    signature: Int32s
    signatures: tuple[tuple[int, ...], ...]
    owners: dict[int, Int32s]
    tables: dict[int, Table]
    warnings: tuple[str, ...]

    def places(self, mesh: Mesh, rank: int) -> list[int]:
        """Where the rank stands along each term's axis. Ranks with equal ones take the same of everything."""
        return [mesh.coord_along(rank, term.axes)[0] for term in self.terms]

    def taken_by(self, mesh: Mesh, rank: int) -> npt.NDArray[np.bool_]:
        """For each tensor, whether every assign that applies to it picks the rank."""
        places = self.places(mesh, rank)
        allowed = [term.takers is None or place in term.takers for term, place in zip(self.terms, places, strict=True)]
        picks = [all(allowed[i] for i in applied) for applied in self.signatures]
        taken = np.array(picks, dtype=np.bool_)[self.signature]
        for i, owner in self.owners.items():
            taken &= (owner == places[i]) | (owner == NOT_DECIDED)
        return taken

    def taken(self, tensor: int, mesh: Mesh, rank: int) -> bool:
        """As `taken_by`, for one tensor of the selection."""
        for i in self.signatures[self.signature[tensor]]:
            term = self.terms[i]
            place = mesh.coord_along(rank, term.axes)[0]
            if term.takers is not None and place not in term.takers:
                return False
            if i in self.owners and self.owners[i][tensor] not in (place, NOT_DECIDED):
                return False
        return True

    def splits(self, signature: int) -> tuple[int, ...]:
        """The terms of a signature that cut a dimension."""
        return tuple(i for i in self.signatures[signature] if self.terms[i].division is not None)


def decide(catalog: Catalog, ids: Int64s, load_name: str, rules: Sequence[Rule], mesh: Mesh) -> Decisions:
    """Applies a load's rules to the tensors `ids` (ascending).

    Raises ConfigError, naming the rule and the tensor, for an axis that the mesh lacks, an axis list that is decided in
    part, a matched name without the captured number, and a number that no rank takes.
    """
    names = _Names(catalog.names, ids)
    builder = _Builder(len(ids))
    warnings: list[str] = []
    for position, rule in enumerate(rules):
        where = f"loads.{load_name}.rules[{position}]"
        matched = names.matched(rule.match)
        if not len(matched) and not names.anywhere(rule.match):
            warnings.append(f"{where}: {shown(rule.match)} matches no name of the checkpoint")
        if rule.host_resident is not None:
            table = Table(rule.host_resident.layout, f"{where}.host_resident")
            for tensor in matched.tolist():
                builder.tables.setdefault(tensor, table)
        if rule.assign is not None:
            applied = _assign(builder, names, f"{where}.assign", rule.match, rule.assign, matched, mesh)
            warnings += _too_late(f"{where}.assign", rule.match, matched, applied, rule.assign.axis)
        if rule.split is not None:
            term = _split_term(f"{where}.split", rule.split, mesh)
            applied = builder.apply(term, matched, names)
            warnings += _too_late(term.where, rule.match, matched, applied, term.axes)
            warnings += _without_dim(term, (catalog.shapes[i] for i in numbers_of(ids[applied])))
    return builder.decisions(warnings)


def _too_late(where: str, pattern: str, matched: Int64s, applied: Int64s, axes: tuple[str, ...]) -> Iterator[str]:
    """A rule that matches and decides nothing is one that its author believes to be at work."""
    if len(matched) and not len(applied):
        yield (
            f"{where}: decides nothing: for all {len(matched)} names that {shown(pattern)} matches, rules before it "
            f"decided axis {', '.join(axes)} already; put it before them, or remove it"
        )


def _without_dim(term: Term, shapes: Iterable[tuple[int, ...]]) -> Iterator[str]:
    count = 0
    for count, shape in enumerate(shapes, 1):  # noqa: B007 - counts
        if len(shape) > term.dim:
            return
    if count:
        yield (
            f"{term.where}: none of the {count} tensors that it is for has a dimension {term.dim} (they are counted "
            "from 0), so every rank takes them whole; correct `dim`"
        )


class _Names:
    """The checkpoint's names and those of the selection, with what was already looked up in them."""

    def __init__(self, everywhere: Sequence[str], ids: Int64s) -> None:
        self._everywhere = everywhere
        self._ids = ids
        # A list, since each rule goes through it.
        self._selection = everywhere if len(ids) == len(everywhere) else list(Picked(everywhere, ids))
        self._matched: dict[str, Int64s] = {}
        self._numbers: dict[tuple[str, str], tuple[Int64s, Int64s]] = {}

    def __getitem__(self, tensor: int) -> str:
        return self._selection[tensor]

    def matched(self, pattern: str) -> Int64s:
        """The tensors of the selection whose names match, ascending."""
        if pattern not in self._matched:
            self._matched[pattern] = compile_glob(pattern).positions(self._selection)
        return self._matched[pattern]

    def anywhere(self, pattern: str) -> bool:
        """Whether a name of the checkpoint matches, skipped or not."""
        return self._selection is not self._everywhere and len(compile_glob(pattern).positions(self._everywhere)) > 0

    def numbers(self, index: str, tensors: Int64s) -> Int64s:
        return captured_numbers(index, Picked(self._everywhere, self._ids[tensors]))

    def numbers_everywhere(self, pattern: str, index: str) -> tuple[Int64s, Int64s]:
        """(catalog ids, their numbers) of all names of the checkpoint that match."""
        if (pattern, index) not in self._numbers:
            whole = self._selection is self._everywhere
            ids = self.matched(pattern) if whole else compile_glob(pattern).positions(self._everywhere)
            numbers = captured_numbers(index, Picked(self._everywhere, ids))
            self._numbers[pattern, index] = ids, numbers
        return self._numbers[pattern, index]

    def numbers_and_count(self, pattern: str, index: str, tensors: Int64s) -> tuple[Int64s, int]:
        """The numbers of `tensors`, and 1 + the largest number of all names of the checkpoint that match."""
        ids, numbers = self.numbers_everywhere(pattern, index)
        own: Int64s = numbers[np.searchsorted(ids, self._ids[tensors])]
        return own, 1 + max(int(numbers.max(initial=NO_MATCH)), NO_MATCH)


class _Builder:
    """Collects terms and the tensors that they apply to."""

    def __init__(self, tensors: int) -> None:
        self._terms: list[Term] = []
        self._signature = np.zeros(tensors, dtype=np.int32)
        self._signatures: list[tuple[int, ...]] = [()]
        self.owners: dict[int, Int32s] = {}
        self.tables: dict[int, Table] = {}

    def apply(self, term: Term, matched: Int64s, names: _Names) -> Int64s:
        """Records the term for those of `matched` whose axes no earlier rule decided; returns them."""
        number = len(self._terms)
        self._terms.append(term)
        before = self._signature[matched]
        after = np.full(len(self._signatures), NOT_DECIDED, dtype=np.int32)
        for old in np.flatnonzero(np.bincount(before, minlength=len(self._signatures))).tolist():
            applied = self._signatures[old]
            decided = {axis for i in applied for axis in self._terms[i].axes}
            both = [axis for axis in term.axes if axis in decided]
            if not both:
                after[old] = len(self._signatures)
                self._signatures.append((*applied, number))
            elif len(both) < len(term.axes):
                self._refuse_partly(term, both, applied, names[int(matched[np.argmax(before == old)])])
        changed = after[before]
        newly = changed != NOT_DECIDED
        self._signature[matched[newly]] = changed[newly]
        applied_to: Int64s = matched[newly]
        return applied_to

    def decisions(self, warnings: Sequence[str]) -> Decisions:
        for column in (self._signature, *self.owners.values()):
            column.flags.writeable = False
        return Decisions(
            tuple(self._terms),
            self._signature,
            tuple(self._signatures),
            dict(self.owners),
            dict(self.tables),
            tuple(warnings),
        )

    def by_number(self, tensors: Int64s, owner: Int32s) -> None:
        """Gives the tensors of the latest term to the places `owner` along its axis."""
        column = np.full(len(self._signature), NOT_DECIDED, dtype=np.int32)
        column[tensors] = owner
        self.owners[len(self._terms) - 1] = column

    def _refuse_partly(self, term: Term, both: list[str], applied: tuple[int, ...], name: str) -> NoReturn:
        earlier = next(self._terms[i].where for i in applied if set(both) & set(self._terms[i].axes))
        open_axes = [axis for axis in term.axes if axis not in both]
        raise ConfigError(
            f"{term.where}: tensor {shown(name)}: of the axes {list(term.axes)}, {earlier} already decided "
            f"{', '.join(both)} but not {', '.join(open_axes)}; name the same axes in both rules, or narrow a `match`",
            phase="plan",
            tensor=name,
        )


def _assign(
    builder: _Builder, names: _Names, where: str, pattern: str, rule: AssignRule, matched: Int64s, mesh: Mesh
) -> Int64s:
    """The tensors that it decides."""
    parts = _parts(where, rule.axis, mesh)
    if rule.to is not None:
        return builder.apply(Term(where, rule.axis, parts, takers=_takers(where, rule.to, parts)), matched, names)
    index, how = rule.index, rule.effective_how
    if index is None or how is None:  # validation refuses such a rule; this is for models made without it
        raise ConfigError(f"{where}: needs `index` or `to`", phase="plan")
    tensors = builder.apply(Term(where, rule.axis, parts), matched, names)
    count = rule.count
    if how == "block" and count is None:
        numbers, count = names.numbers_and_count(pattern, index, tensors)
    else:
        numbers = names.numbers(index, tensors)
    _refuse_numbers(where, index, names, tensors, numbers)
    limit = rule.boundaries[-1] if rule.boundaries is not None else count
    if limit is not None and (over := np.flatnonzero(numbers >= limit)).size:
        _refuse_number(where, names[int(tensors[over[0]])], int(numbers[over[0]]), limit, how)
    builder.by_number(tensors, _owners(where, how, numbers, rule.boundaries, count or 0, parts))
    return tensors


def _owners(
    where: str, how: str, numbers: Int64s, boundaries: tuple[int, ...] | None, count: int, parts: int
) -> Int32s:
    """For each number, the place along the axis that takes it."""
    if how == "round_robin":
        return (numbers % parts).astype(np.int32)
    if boundaries is None:
        # Place r takes [count * r // parts, count * (r + 1) // parts): solved for r, so that no list of places is made.
        fits = count * parts < 2**62
        wide = numbers if fits else numbers.astype(object)
        return (((wide + 1) * parts - 1) // max(count, 1)).astype(np.int32)
    if len(boundaries) != parts + 1:
        raise ConfigError(
            f"{where}: boundaries has {len(boundaries)} numbers, but the axis has {parts} ranks; write {parts + 1}",
            phase="plan",
        )
    # Equal boundaries are ranks without items: the last of equal ones begins the rank that has some.
    return (np.searchsorted(np.array(boundaries, dtype=np.int64), numbers, side="right") - 1).astype(np.int32)


def _takers(where: str, to: tuple[int, ...] | Literal["all"], parts: int) -> frozenset[int] | None:
    if to == "all":
        return None
    outside = [place for place in to if not -parts <= place < parts]
    if outside:
        raise ConfigError(
            f"{where}.to: {outside[0]} is outside the axis, which has {parts} ranks; "
            f"write a number from {-parts} to {parts - 1}",
            phase="plan",
        )
    return frozenset(place % parts for place in to)


def _split_term(where: str, rule: SplitRule, mesh: Mesh) -> Term:
    parts = _parts(where, rule.axis, mesh)
    proportions = rule.sections or (1,)
    cuts = tuple(_cut(rule, section) for section in range(len(proportions)))
    return Term(where, rule.axis, parts, dim=rule.dim, division=Division(proportions, cuts))


def _cut(rule: SplitRule, section: int) -> Cut:
    """The section's own way of cutting; a key with one value holds for each section."""

    def of_section(value: int | tuple[int, ...] | None) -> int | None:
        return value[section] if isinstance(value, tuple) else value

    boundaries: tuple[int, ...] | None = None
    if rule.boundaries is not None:
        numbers = rule.boundaries[section] if isinstance(rule.boundaries[0], tuple) else rule.boundaries
        boundaries = tuple(number for number in numbers if isinstance(number, int))
    return Cut(of_section(rule.align), of_section(rule.pad_to), of_section(rule.units), boundaries)


def _parts(where: str, axes: tuple[str, ...], mesh: Mesh) -> int:
    absent = [axis for axis in axes if axis not in mesh.axes]
    if absent:
        raise ConfigError(
            f"{where}.axis: the mesh has no axis {absent[0]!r}, only {', '.join(mesh.axes)}; "
            "correct it or add the axis to `mesh`",
            phase="plan",
        )
    return mesh.size_along(axes)


def _refuse_numbers(where: str, index: str, names: _Names, tensors: Int64s, numbers: Int64s) -> None:
    bad = np.flatnonzero(numbers < 0)
    if not len(bad):
        return
    name = names[int(tensors[bad[0]])]
    found = "does not occur in" if numbers[bad[0]] == NO_MATCH else "captures no number (of at most 18 digits) in"
    raise ConfigError(
        f"{where}: tensor {shown(name)}: index {shown(index)} {found} the name ({len(bad)} such names); "
        "correct `index`, make `match` narrower, or decide these names in an earlier rule",
        phase="plan",
        tensor=name,
    )


def _refuse_number(where: str, name: str, number: int, limit: int, how: str) -> NoReturn:
    key = "boundaries" if how == "boundaries" else "count"
    raise ConfigError(
        f"{where}: tensor {shown(name)}: its number {number} is outside `{key}`, which ends before {limit}; "
        f"correct `{key}`, or `skip` such tensors",
        phase="plan",
        tensor=name,
    )
