"""Random checkpoints, rules and meshes: what every rank gets is what slicing the whole tensors by hand gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from loader_service.checkpoint.dtypes import DTYPES
from loader_service.errors import ConfigError
from loader_service.planning.plan import LoadPlan, RankPlan
from tests.planning.making import Checkpoint, elements, filled, make_checkpoint, plan_of

Rule = dict[str, Any]


@dataclass(frozen=True)
class Case:
    checkpoint: Checkpoint
    rules: list[Rule]
    mesh: dict[str, int]
    gap_bytes: int
    max_bytes: int

    def plan(self) -> LoadPlan:
        try:
            return plan_of(self.checkpoint, {"rules": self.rules}, self.mesh, gap_bytes=self.gap_bytes)
        except ConfigError:  # a cut that is no whole number: other tests say which those are
            reject()


sizes = st.sampled_from([0, 1, 2, 3, 4, 6, 7, 8, 12, 24])
shapes = st.lists(sizes, max_size=4).map(tuple)
codes = st.sampled_from(["U8", "BF16", "F32", "C64"])


@st.composite
def splits(draw: st.DrawFn, axis: object) -> Rule:
    how: dict[str, Any] = {"axis": axis, "dim": draw(st.integers(0, 3))}
    sections = draw(st.sampled_from([None, None, [1, 1], [2, 1, 1]]))
    if sections is not None:
        how["sections"] = sections
    key = draw(st.sampled_from(["even", "align", "pad_to", "units"]))
    if key != "even":
        value = st.sampled_from([1, 2, 3, 4])
        each = st.lists(value, min_size=len(sections or [0]), max_size=len(sections or [0]))
        how[key] = draw(value if sections is None else value | each)
    return how


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mesh = {"pp": draw(st.integers(1, 3)), "tp": draw(st.integers(1, 4)), "ep": draw(st.integers(1, 2))}
    shards: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {"a.safetensors": [], "b.safetensors": []}
    for number in range(draw(st.integers(1, 6))):
        name = f"layers.{draw(st.integers(0, 5))}.{draw(st.sampled_from('xyz'))}.t{number}"
        shards[draw(st.sampled_from(sorted(shards)))].append((name, draw(codes), draw(shapes)))
    rules: list[Rule] = []
    if draw(st.booleans()):
        how = draw(st.sampled_from(["block", "round_robin"]))
        rules.append({"match": "*", "assign": {"axis": "pp", "index": r"layers\.(\d+)\.", "how": how}})
    for match, axis in (("*.x.*", "tp"), ("*.y.*", ["ep", "tp"]), ("*.x.*", "ep"), ("*.z.*", "tp")):
        if draw(st.booleans()):
            rules.append({"match": match, "split": draw(splits(axis))})
    gap_bytes, max_bytes = draw(st.sampled_from([0, 1, 5, 40, 10**6])), draw(st.sampled_from([1, 3, 8, 50, 10**6]))
    return Case(make_checkpoint(shards), rules, mesh, gap_bytes, max_bytes)


def place_of(case: Case, rank: int, axes: str | list[str]) -> tuple[int, int]:
    grid = np.arange(np.prod(list(case.mesh.values()))).reshape(tuple(case.mesh.values()))
    where = dict(zip(case.mesh, (int(at[0]) for at in np.where(grid == rank)), strict=True))
    listed = [axes] if isinstance(axes, str) else axes
    dims = [case.mesh[axis] for axis in listed]
    return int(np.ravel_multi_index([where[axis] for axis in listed], dims)), int(np.prod(dims))


def wanted_indices(size: int, n: int, r: int, split: Rule) -> list[int]:
    """Which indices of a dimension part r of n takes, element by element."""
    proportions = split.get("sections", [1])
    key = next((key for key in ("align", "pad_to", "units") if key in split), "even")
    taken, start = [], 0
    for section, proportion in enumerate(proportions):
        length = size * proportion // sum(proportions)
        value = split.get(key, 1)
        k: int = value[section] if isinstance(value, list) else value
        for i in range(length):
            if key == "align":
                owners = [
                    q for q in range(n) if (-(-length // k) * q // n) * k <= i < (-(-length // k) * (q + 1) // n) * k
                ]
            elif key == "pad_to":
                padded = (length + k - 1) // k * k
                owners = [q for q in range(n) if padded * q // n <= i < padded * (q + 1) // n]
            elif key == "units" and k < n:
                head = i * k // length
                owners = list(range(head * (n // k), (head + 1) * (n // k)))
            else:
                owners = [q for q in range(n) if length * q // n <= i < length * (q + 1) // n]
            if r in owners:
                taken.append(start + i)
        start += length
    return taken


def expected_parts(case: Case, rank: int) -> dict[str, npt.NDArray[np.void]]:
    """What the rank takes, by reading the rules one by one and slicing whole tensors."""
    found = {}
    catalog = case.checkpoint.catalog
    for i, name in enumerate(catalog.names):
        code, shape = catalog.dtype(i).code, catalog.shapes[i]
        tensor = elements(case.checkpoint.payload(name), shape, DTYPES[code].bits // 8)
        decided: set[str] = set()
        taken = True
        for rule in case.rules:
            decision = rule.get("assign") or rule["split"]
            axes = [decision["axis"]] if isinstance(decision["axis"], str) else decision["axis"]
            if f".{rule['match'].strip('*.')}." not in name and rule["match"] != "*":
                continue
            if set(axes) & decided:
                continue
            decided |= set(axes)
            r, n = place_of(case, rank, axes)
            if "assign" in rule:
                number = int(name.split(".")[1])
                count = 1 + max(int(other.split(".")[1]) for other in catalog.names)
                in_block = count * r // n <= number < count * (r + 1) // n
                taken = taken and (number % n == r if decision["how"] == "round_robin" else in_block)
            elif decision["dim"] < len(shape) and shape[decision["dim"]] != 1:
                dim = decision["dim"]
                tensor = np.take(tensor, np.array(wanted_indices(shape[dim], n, r, decision), dtype=np.intp), axis=dim)
        if taken:
            found[name] = tensor
    return found


@settings(max_examples=200)
@given(cases(), st.data())
def test_every_rank_gets_what_slicing_by_hand_gives(case: Case, data: st.DataObject) -> None:
    plan = case.plan()
    ranks = st.integers(0, plan.world_size - 1)
    for rank in data.draw(st.lists(ranks, min_size=1, max_size=2, unique=True)):
        part = plan.for_rank(rank)
        expected = expected_parts(case, rank)
        assert [part.name(i) for i in range(len(part))] == list(expected)
        tensors = filled(part, case.checkpoint.files, max_bytes=case.max_bytes)
        for i, (tensor, wanted) in enumerate(zip(tensors, expected.values(), strict=True)):
            assert tensor.shape == wanted.shape == part.storage_shape(i)
            assert tensor.tobytes() == wanted.tobytes()
            assert part.nbytes(i) == len(wanted.tobytes())
            check_spec(case, part, i, tensor)


def check_spec(case: Case, part: RankPlan, i: int, tensor: npt.NDArray[np.void]) -> None:
    spec = part.spec(i)
    full = elements(case.checkpoint.payload(part.name(i)), spec.full_shape, part.itemsize(i))
    rebuilt = np.zeros_like(tensor)
    for source, place in spec.parts:
        rebuilt[place] = full[source]
    assert rebuilt.tobytes() == tensor.tobytes()


@settings(max_examples=100)
@given(cases())
def test_all_ranks_together_take_everything(case: Case) -> None:
    plan = case.plan()
    catalog = case.checkpoint.catalog
    covered = [np.zeros(shape, dtype=np.bool_) for shape in catalog.shapes]
    held = set()
    for rank in range(plan.world_size):
        part = plan.for_rank(rank)
        for i in range(len(part)):
            held.add(part.name(i))
            for source, _ in part.spec(i).parts:
                covered[part.catalog_id(i)][source] = True
    assert held == set(catalog.names)
    assert all(cover.all() for cover in covered)


@settings(max_examples=150)
@given(cases())
def test_extra_bytes_stay_below_the_cap_and_order_is_the_files(case: Case) -> None:
    plan = case.plan()
    for rank in range(plan.world_size):
        part = plan.for_rank(rank)
        wanted = int((part.fragment_stop - part.fragment_start).sum())
        assert 0 <= part.read_bytes - wanted <= part.payload_bytes * 5 // 100
        direct = part.fragment_dst >= 0
        blocks = int((part.fragment_stop - part.fragment_start)[~direct].sum())
        assert wanted - blocks <= part.payload_bytes <= wanted
        assert (np.diff(part.tensor_ids) > 0).all()
        assert (np.diff(part.fragment_tensor) >= 0).all()
        if case.gap_bytes == 0:
            assert part.read_bytes == part.payload_bytes
        gaps = part.extent_start[1:] - part.extent_stop[:-1]
        assert (gaps[part.extent_shard[1:] == part.extent_shard[:-1]] > 0).all()


@settings(max_examples=60)
@given(cases(), st.data())
def test_a_restriction_fills_the_same_tensors(case: Case, data: st.DataObject) -> None:
    plan = case.plan()
    rank = data.draw(st.integers(0, plan.world_size - 1))
    part = plan.for_rank(rank)
    kept = data.draw(st.lists(st.integers(0, len(part) - 1), max_size=4) if len(part) else st.just([]))
    some = part.restrict(kept)
    expected = expected_parts(case, rank)
    for i, tensor in enumerate(filled(some, case.checkpoint.files, max_bytes=case.max_bytes)):
        assert tensor.tobytes() == expected[some.name(i)].tobytes()
    assert len(some) == len(set(kept))
