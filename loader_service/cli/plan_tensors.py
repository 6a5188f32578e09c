"""`plan --tensors`: what each rank takes of every tensor, and which rule says so.

From the plan alone, tensor by tensor: nothing is kept of those before, so that 200,000 take no more memory than a few.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from loader_service.cli.output import writing_to_stdout
from loader_service.cli.plan_titles import plain, spans
from loader_service.config.schema import Rule
from loader_service.planning.cuts import Interval
from loader_service.planning.groups import WHOLE
from loader_service.planning.plan import LoadPlan
from loader_service.planning.rules import NOT_DECIDED
from loader_service.sizes import format_size

Slices = tuple[tuple[Interval, ...], ...]
"""Of each dimension the intervals that are taken, in elements as headers count them."""

_PARTS_KEPT = 1 << 16  # tensors that are cut alike share theirs; some MiB
_AT_ONCE = 256  # lines written at once
_WIDEST_NAME = 80
_RULE = re.compile(r"rules\[(\d+)\]\.(\w+)$")


@dataclass(frozen=True, slots=True)
class Part:
    """What some ranks take of a tensor, all of them the same. A rank may take an empty part."""

    ranks: tuple[int, ...]
    slices: Slices

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in dim) for dim in self.slices)


@dataclass(frozen=True, slots=True)
class TensorParts:
    """A tensor, what ranks take of it, and which rules decided. `offsets`: of the whole tensor, in the file."""

    name: str
    dtype_code: str
    bits: int
    shape: tuple[int, ...]
    file: str
    offsets: Interval
    deciding: tuple[str, ...]
    layout: str | None
    parts: tuple[Part, ...]

    def nbytes(self, part: Part) -> int:
        return math.prod(part.shape) * self.bits // 8


def tensor_parts(plan: LoadPlan, rank: int | None = None) -> Iterator[TensorParts]:
    """Every tensor of the load in plan order; with `rank`, those that this rank takes, and its part alone.

    Raises ConfigError for a rank that does not exist.
    """
    if rank is not None:
        plan.mesh.coordinates(rank)
    parts_of = _Parts(plan, range(plan.world_size) if rank is None else (rank,))
    catalog, decisions = plan.catalog, plan.decisions
    for position in range(len(plan.tensor_ids)):
        parts = parts_of(position)
        if rank is not None and not parts:
            continue
        tensor = int(plan.tensor_ids[position])
        dtype, table = catalog.dtype(tensor), decisions.tables.get(position)
        where = [decisions.terms[i].where for i in decisions.signatures[decisions.signature[position]]]
        yield TensorParts(
            catalog.names[tensor],
            dtype.code,
            dtype.bits,
            catalog.shapes[tensor],
            catalog.shards[int(catalog.shard_ids[tensor])].name,
            (int(catalog.starts[tensor]), int(catalog.stops[tensor])),
            (*where, *([table.where] if table is not None else [])),
            None if table is None else table.layout,
            parts,
        )


class _Parts:
    """The parts of a tensor, by its place in the plan. Tensors to which the same decisions apply share the answer."""

    def __init__(self, plan: LoadPlan, ranks: Sequence[int]) -> None:
        self._plan = plan
        self._places = {rank: plan.decisions.places(plan.mesh, rank) for rank in ranks}
        self._terms = {term: i for i, term in enumerate(plan.decisions.terms)}
        self._known: dict[tuple[object, ...], tuple[Part, ...]] = {}
        self._held = 0

    def __call__(self, position: int) -> tuple[Part, ...]:
        plan, decisions = self._plan, self._plan.decisions
        signature, group = int(decisions.signature[position]), int(plan.tensor_group[position])
        shape = plan.catalog.shapes[int(plan.tensor_ids[position])]
        applied = decisions.signatures[signature]
        owners = {i: int(decisions.owners[i][position]) for i in applied if i in decisions.owners}
        key = (signature, *owners.values(), group, shape)
        found = self._known.get(key)
        if found is None:
            found = tuple(self._made(applied, owners, group, shape))
            self._held += len(found)
            if self._held > _PARTS_KEPT:
                self._known.clear()
                self._held = len(found)
            self._known[key] = found
        return found

    def _made(
        self, applied: Sequence[int], owners: dict[int, int], group: int, shape: tuple[int, ...]
    ) -> Iterator[Part]:
        terms = self._plan.decisions.terms
        ranks_of: dict[Slices, list[int]] = {}
        for rank, places in self._places.items():
            takers = ((terms[i].takers, owners.get(i, NOT_DECIDED), places[i]) for i in applied)
            if all((some is None or at in some) and owner in (at, NOT_DECIDED) for some, owner, at in takers):
                ranks_of.setdefault(self._slices(group, shape, places), []).append(rank)
        for slices, ranks in ranks_of.items():
            yield Part(tuple(ranks), slices)

    def _slices(self, group: int, shape: tuple[int, ...], places: Sequence[int]) -> Slices:
        slices: list[tuple[Interval, ...]] = [((0, size),) for size in shape]
        for term in () if group == WHOLE else self._plan.groups[group].splits:
            if term.division is not None:
                slices[term.dim] = term.division.intervals(shape[term.dim], term.parts, places[self._terms[term]])
        return tuple(slices)


def print_json(plan: LoadPlan, rules: Sequence[Rule], rank: int | None) -> None:
    """The plan's document, as without the list, and under `tensors` one entry after the other."""
    head = {**plan.as_json(), "left_out": len(plan.catalog) - len(plan.tensor_ids)}
    entries = (json.dumps(_entry(tensor, rules)) for tensor in tensor_parts(plan, rank))
    listed = (f",\n{entry}" if i else entry for i, entry in enumerate(entries))
    _write(itertools.chain([f'{json.dumps(head)[:-1]}, "tensors": ['], listed, ["]}\n"]))


def _entry(tensor: TensorParts, rules: Sequence[Rule]) -> dict[str, object]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype_code,
        "shape": tensor.shape,
        "file": tensor.file,
        "offsets": tensor.offsets,
        "rules": [{"rule": where, "match": _rule(where, rules)[1]} for where in tensor.deciding],
        "host_resident": tensor.layout,
        "parts": [
            {"ranks": part.ranks, "slices": part.slices, "shape": part.shape, "bytes": tensor.nbytes(part)}
            for part in tensor.parts
        ],
    }


def print_lines(plan: LoadPlan, rules: Sequence[Rule], rank: int | None) -> None:
    """A line for each part of each tensor, and how many tensors of the checkpoint are not in the load."""
    names, ids = plan.catalog.names, plan.tensor_ids
    width = min(_WIDEST_NAME, max((len(names[i]) for i in ids.tolist()), default=0))
    whose = "each rank" if rank is None else f"rank {rank}"
    left_out = len(plan.catalog) - len(ids)
    _write(
        itertools.chain(
            [f"\nWhat {whose} takes of every tensor: ranks, elements, bytes, file, and the rules that decide\n"],
            (line for tensor in tensor_parts(plan, rank) for line in _lines(tensor, rules, plan.world_size, width)),
            [f"{left_out} tensors of the checkpoint are not in this load (skip, key_prefixes)\n"] if left_out else [],
        )
    )


def _lines(tensor: TensorParts, rules: Sequence[Rule], world_size: int, width: int) -> Iterator[str]:
    name, file = plain(tensor.name), plain(tensor.file)
    why = ", ".join(" ".join(_rule(where, rules)) for where in tensor.deciding) or "no rule"
    what = f"{tensor.dtype_code} {list(tensor.shape)}"
    for part in tensor.parts or (None,):
        takes = "no rank takes it" if part is None else _takes(part, tensor.shape, tensor.nbytes(part), world_size)
        yield f"{name:<{width}}  {what:<18}  {takes}  {file}  {why}\n"


@functools.lru_cache(maxsize=4096)
def _takes(part: Part, shape: tuple[int, ...], nbytes: int, world_size: int) -> str:
    slices = ", ".join(map(_elements, part.slices, shape))
    elements = "whole" if part.shape == shape else f"[{slices}]"
    ranks = "all ranks" if len(part.ranks) == world_size > 1 else spans(part.ranks)
    return f"{ranks:<9}  {elements:<18}  {format_size(nbytes):>12}"


def _elements(intervals: Sequence[Interval], size: int) -> str:
    """`:` for a whole dimension; sections stand one behind the other, as the rank gets them: `0:8+32:40`."""
    if list(intervals) == [(0, size)]:
        return ":"
    return "+".join(f"{start}:{stop}" for start, stop in intervals) or "0:0"


def _rule(where: str, rules: Sequence[Rule]) -> tuple[str, str]:
    """(its place in the load, its glob): `rules[4].split` and `*.q_proj.weight`."""
    found = _RULE.search(where)
    return (found[0], rules[int(found[1])].match) if found else (where, "")


def _write(pieces: Iterable[str]) -> None:
    """Writes to stdout, some pieces at once; a reader that has gone away ends it, and is no failure."""
    with writing_to_stdout():
        remaining = iter(pieces)
        while some := "".join(itertools.islice(remaining, _AT_ONCE)):
            sys.stdout.write(some)
        sys.stdout.flush()
