"""The plan of a load: digests, restriction, JSON, sub-byte types, and what it does not compute."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from loader_service.config.schema import LoadConfig
from loader_service.errors import ConfigError
from loader_service.planning.mesh import Mesh
from loader_service.planning.plan import LoadPlan, make_plan
from tests.planning.making import KIB, Checkpoint, elements, filled, make_checkpoint, names_of, one_shard, plan_of

LOAD: dict[str, object] = {
    "skip": ["mtp.*"],
    "rules": [
        {"match": "*.layers.*", "assign": {"axis": "pp", "index": r"layers\.(\d+)\.", "boundaries": [0, 1, 2]}},
        {"match": "*.qkv.w", "split": {"axis": "tp", "dim": 0, "sections": [2, 1]}},
        {"match": "*.o.w", "split": {"axis": "tp", "dim": 1}},
    ],
}
MESH = {"pp": 2, "tp": 2}


def two_shards() -> Checkpoint:
    layers = [
        [
            (f"m.layers.{i}.o.w", "BF16", (6, 8)),
            (f"m.layers.{i}.qkv.w", "BF16", (12, 6)),
            (f"m.layers.{i}.s", "F32", ()),
        ]
        for i in range(2)
    ]
    return make_checkpoint(
        {
            "b.safetensors": [("m.norm", "F32", (5,)), ("m.empty", "I64", (0, 3)), *layers[1]],
            "a.safetensors": [*layers[0], ("mtp.0.w", "U8", (9,))],
        }
    )


def test_items_come_in_the_order_of_file_name_and_offset_on_every_rank() -> None:
    plan = plan_of(two_shards(), LOAD, MESH)
    assert names_of(plan.for_rank(0)) == ["m.layers.0.o.w", "m.layers.0.qkv.w", "m.layers.0.s", "m.norm", "m.empty"]
    assert names_of(plan.for_rank(3)) == ["m.norm", "m.empty", "m.layers.1.o.w", "m.layers.1.qkv.w", "m.layers.1.s"]


def test_a_whole_load_is_one_extent_a_shard() -> None:
    checkpoint = two_shards()
    part = plan_of(checkpoint).for_rank(0)
    shards = checkpoint.catalog.shards
    assert [(e.path, e.start, e.stop) for e in part.extents] == [
        (shard.path, shard.header_bytes, shard.identity.size_bytes) for shard in shards
    ]
    assert part.read_bytes == part.payload_bytes == sum(int(part.nbytes(i)) for i in range(len(part)))
    assert part.extents[-1] == part.extents[1:][0]


def test_every_tensor_says_what_the_rank_gets_of_it() -> None:
    part = plan_of(two_shards(), LOAD, MESH).for_rank(1)
    i = part.index_of("m.layers.0.qkv.w")
    assert i == 1
    assert (part.storage_shape(i), part.dtype_code(i), part.itemsize(i), part.nbytes(i)) == ((6, 6), "BF16", 2, 72)
    assert part.spec(i).full_shape == (12, 6)
    assert [source for source, _ in part.spec(i).parts] == [(slice(4, 8), slice(0, 6)), (slice(10, 12), slice(0, 6))]
    assert part.index_of("m.layers.1.s") is None
    assert part.index_of("nope") is None
    empty = part.index_of("m.empty")
    assert empty is not None
    assert (part.storage_shape(empty), part.nbytes(empty)) == ((0, 3), 0)


def test_a_plan_says_which_rules_cut_a_tensor() -> None:
    plan = plan_of(two_shards(), LOAD, MESH)
    where = {name: plan.split_rules(name) for name in ("m.layers.1.qkv.w", "m.layers.0.o.w", "m.norm", "mtp.0.w", "no")}
    assert where == {
        "m.layers.1.qkv.w": (f"loads.{plan.load}.rules[1].split",),
        "m.layers.0.o.w": (f"loads.{plan.load}.rules[2].split",),
        "m.norm": (),
        "mtp.0.w": (),
        "no": (),
    }


def test_the_plan_is_frozen() -> None:
    plan = plan_of(two_shards(), LOAD, MESH)
    part = plan.for_rank(0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.load = "other"  # type: ignore[misc]
    columns: list[npt.NDArray[np.integer[Any]]] = [
        part.tensor_ids,
        part.tensor_nbytes,
        part.fragment_start,
        part.fragment_dst,
        part.extent_start,
    ]
    for column in [*columns, plan.tensor_ids, plan.tensor_group, part.extent_first_fragment, part.fragment_shard]:
        with pytest.raises(ValueError, match="read-only"):
            column[...] = 0


def test_a_rank_that_takes_nothing_has_an_empty_plan() -> None:
    load = {"rules": [{"match": "*", "assign": {"axis": "tp", "to": [0]}}]}
    part = plan_of(two_shards(), load, {"tp": 2}).for_rank(1)
    assert (len(part), len(part.extents), part.payload_bytes, part.read_bytes) == (0, 0, 0, 0)
    assert filled(part, {}, max_bytes=8) == []


def test_parts_of_any_rank_are_made_again_after_many_others() -> None:
    plan = plan_of(two_shards(), {"rules": [{"match": "*", "split": {"axis": "tp", "dim": 0}}]}, {"tp": 40})
    first = plan.for_rank(0)
    assert plan.for_rank(0) is first
    digests = [plan.for_rank(rank).digest for rank in range(40)]
    assert len(set(digests)) == 40
    assert plan.for_rank(0).digest == digests[0] == first.digest


def test_ranks_in_one_place_share_columns_but_no_digest() -> None:
    plan = plan_of(two_shards(), LOAD, {"dp": 2, **MESH})
    world = plan.world_size // 2
    first, last = plan.for_rank(1), plan.for_rank(world + 1)
    assert (first.rank, last.rank) == (1, world + 1)
    assert first.fragments is last.fragments
    assert first.streamed.digest != last.streamed.digest
    alone = plan_of(two_shards(), LOAD, {"dp": 2, **MESH}).for_rank(world + 1)
    assert last.digest == alone.digest
    assert plan.for_rank(0).fragments is not first.fragments, "another place along an axis that a rule names"


def test_nothing_is_computed_for_ranks_that_are_not_asked_about() -> None:
    load = {
        "rules": [
            {"match": "*.layers.*", "assign": {"axis": "pp", "index": r"layers\.(\d+)\."}},
            {"match": "*.s", "assign": {"axis": "tp", "to": "all"}},
            {"match": "*", "split": {"axis": "tp", "dim": 0, "pad_to": 2}},
        ]
    }
    plan = plan_of(two_shards(), load, {"pp": 10**9, "tp": 10**9})
    assert names_of(plan.for_rank(10**18 - 1)) == [
        "mtp.0.w",
        "m.norm",
        "m.empty",
        "m.layers.1.o.w",
        "m.layers.1.qkv.w",
        "m.layers.1.s",
    ]


def test_coords_decide_what_a_rank_takes() -> None:
    checkpoint = two_shards()
    load = LoadConfig.model_validate({"rules": [{"match": "*", "split": {"axis": "tp", "dim": 0}}]})
    rows = Mesh.row_major({"tp": 2}, 2)
    swapped = Mesh.with_coords({"tp": 2}, [{"tp": 1}, {"tp": 0}])
    plain, other = (make_plan(checkpoint.catalog, "t", load, mesh, coalesce_gap_bytes=0) for mesh in (rows, swapped))
    assert other.for_rank(0).extents[:] == plain.for_rank(1).extents[:]
    assert other.digest != plain.digest


def test_positions_without_a_rank_are_a_warning() -> None:
    mesh = Mesh.with_coords({"tp": 3}, [{"tp": 0}, {"tp": 2}])
    plan = make_plan(two_shards().catalog, "t", LoadConfig(), mesh, coalesce_gap_bytes=0)
    assert "coords are at 1 of the mesh's positions" in plan.warnings[0]


# Digests -----------------------------------------------------------------------------------------------------------


def fixed_plan() -> LoadPlan:
    checkpoint = two_shards()
    catalog = dataclasses.replace(checkpoint.catalog, digest="0" * 64)
    return plan_of(dataclasses.replace(checkpoint, catalog=catalog), LOAD, MESH)


PLAN_DIGEST = "c7069c1c94928bbdab2250a2a0ebc6a5d3adee762ec6adc07d79c8e92da8203b"
RANK_DIGEST = "de452ab2f124205e39e5ff7d37599feb310833308c7f21f2f24679a2c546ac6e"


def test_digests_are_the_same_in_every_process_and_version() -> None:
    """A change of these values is a change of the plan or of what it depends on: raise PLANNER_VERSION with it."""
    plan = fixed_plan()
    assert (plan.digest, plan.for_rank(1).digest) == (PLAN_DIGEST, RANK_DIGEST)


def test_digests_do_not_depend_on_the_hash_seed() -> None:
    code = "from tests.planning.test_plan import fixed_plan as f; print(f().digest, f().for_rank(1).digest)"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.split() == [PLAN_DIGEST, RANK_DIGEST], done.stderr


@pytest.mark.parametrize(
    ("load", "mesh", "gap"),
    [
        pytest.param({**LOAD, "skip": []}, MESH, 256 * KIB, id="skip"),
        pytest.param({**LOAD, "rules": []}, MESH, 256 * KIB, id="rules"),
        pytest.param({**LOAD, "raw_dtypes": True}, MESH, 256 * KIB, id="raw_dtypes"),
        pytest.param({**LOAD, "key_prefixes": ["m"]}, MESH, 256 * KIB, id="prefixes"),
        pytest.param(LOAD, {"tp": 2, "pp": 2}, 256 * KIB, id="mesh order"),
        pytest.param(LOAD, MESH, 0, id="coalescing"),
    ],
)
def test_the_digest_covers_the_load_the_mesh_and_the_coalescing(
    load: dict[str, object], mesh: dict[str, int], gap: int
) -> None:
    assert plan_of(two_shards(), load, mesh, gap_bytes=gap).digest != plan_of(two_shards(), LOAD, MESH).digest


def test_the_digest_covers_the_checkpoint_but_not_where_it_lies() -> None:
    elsewhere = {**LOAD, "checkpoint": {"path": "/elsewhere"}}
    assert plan_of(two_shards(), elsewhere, MESH).digest == plan_of(two_shards(), LOAD, MESH).digest
    assert fixed_plan().digest != plan_of(two_shards(), LOAD, MESH).digest


def test_ranks_with_different_parts_have_different_digests() -> None:
    plan = plan_of(two_shards(), LOAD, MESH)
    assert len({plan.for_rank(rank).digest for rank in range(4)}) == 4


# Restriction and JSON ----------------------------------------------------------------------------------------------


def test_a_restriction_reads_only_what_it_names_in_plan_order() -> None:
    checkpoint = two_shards()
    part = plan_of(checkpoint, LOAD, MESH).for_rank(1)
    some = part.restrict([3, 1, 3])
    assert names_of(some) == ["m.layers.0.qkv.w", "m.norm"]
    assert some.payload_bytes == some.read_bytes == part.nbytes(1) + part.nbytes(3)
    whole = filled(part, checkpoint.files, max_bytes=16)
    for i, tensor in zip((1, 3), filled(some, checkpoint.files, max_bytes=16), strict=True):
        assert tensor.tobytes() == whole[i].tobytes()
    assert some.digest != part.digest
    assert part.restrict(range(len(part))).digest == part.digest
    assert len(part.restrict([]).extents) == 0


def test_a_restriction_has_its_own_limit_of_extra_bytes() -> None:
    checkpoint = one_shard(("a", "U8", (1000,)), ("b", "U8", (40,)), ("c", "U8", (10,)), ("d", "U8", (40,)))
    part = plan_of(checkpoint, {"skip": ["c"]}).for_rank(0)
    assert len(part.extents) == 1
    assert len(part.restrict([1, 2]).extents) == 2


@pytest.mark.parametrize("indices", [[-1], [0, 5]])
def test_a_restriction_to_tensors_that_do_not_exist_is_refused(indices: list[int]) -> None:
    part = plan_of(two_shards(), LOAD, MESH).for_rank(1)
    assert len(part) == 5
    with pytest.raises(IndexError, match="0 to 4"):
        part.restrict(indices)


def test_the_plan_as_json_has_the_contracts_keys() -> None:
    plan = plan_of(two_shards(), LOAD, MESH)
    document = json.loads(json.dumps(plan.as_json()))
    assert {key: document[key] for key in ("load", "world_size", "catalog_digest", "plan_digest")} == {
        "load": "target",
        "world_size": 4,
        "catalog_digest": plan.catalog.digest,
        "plan_digest": plan.digest,
    }
    assert [entry["rank"] for entry in document["ranks"]] == [0, 1, 2, 3]
    for entry in document["ranks"]:
        part = plan.for_rank(entry["rank"])
        assert (entry["payload_bytes"], entry["read_bytes"]) == (part.payload_bytes, part.read_bytes)
        ranges = [(file["path"], start, stop) for file in entry["files"] for start, stop in file["ranges"]]
        assert ranges == [(extent.path, extent.start, extent.stop) for extent in part.extents]
        assert entry["reads"] == len(ranges)
        assert sum(stop - start for _, start, stop in ranges) == entry["read_bytes"]
    assert plan.as_json([2])["ranks"] == [document["ranks"][2]]


def test_a_rank_without_bytes_reads_no_file() -> None:
    load = {"rules": [{"match": "*", "assign": {"axis": "tp", "to": [0]}}]}
    ranks = plan_of(two_shards(), load, {"tp": 2}).as_json([1])["ranks"]
    assert ranks == [{"rank": 1, "payload_bytes": 0, "read_bytes": 0, "reads": 0, "files": [], "tables": []}]


# Sub-byte types ----------------------------------------------------------------------------------------------------


def split(dim: int, **how: object) -> dict[str, object]:
    return {"rules": [{"match": "*", "split": {"axis": "tp", "dim": dim, **how}}]}


def test_f4_is_halved_in_storage_and_whole_in_the_header() -> None:
    checkpoint = one_shard(("a", "F4", (4, 8)))
    part = plan_of(checkpoint, split(1), {"tp": 2}).for_rank(1)
    assert (part.storage_shape(0), part.header_shape(0), part.nbytes(0)) == ((4, 2), (4, 4), 8)
    assert (part.dtype_code(0), part.storage_dtype_code(0), part.itemsize(0)) == ("F4", "F4", 1)
    assert part.spec(0).full_shape == (4, 4)
    assert part.spec(0).parts == (((slice(0, 4), slice(2, 4)), (slice(0, 4), slice(0, 2))),)
    (tensor,) = filled(part, checkpoint.files, max_bytes=3)
    assert tensor.tobytes() == elements(checkpoint.payload("a"), (4, 4), 1)[:, 2:].tobytes()


@pytest.mark.parametrize(
    ("code", "shape", "load"),
    [
        pytest.param("F4", (4, 6), split(1), id="three F4"),
        pytest.param("F6_E2M3", (4, 8), {**split(1, boundaries=[0, 2, 8]), "raw_dtypes": True}, id="two F6"),
        pytest.param("F4", (2, 3), {**split(1, boundaries=[0, 1, 3]), "raw_dtypes": True}, id="inside an odd row"),
        pytest.param("F4", (6, 3), {**split(0), "raw_dtypes": True}, id="three odd rows"),
        pytest.param("F4", (2, 4, 1), {**split(1), "raw_dtypes": True}, id="under a longer dimension of a flat tensor"),
    ],
)
def test_a_slice_that_splits_a_byte_is_refused(code: str, shape: tuple[int, ...], load: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"rules\[0\]\.split: tensor 'a' of shape .* splits a byte") as caught:
        plan_of(one_shard(("a", code, shape)), load, {"tp": 2})
    assert caught.value.tensor == "a"


@pytest.mark.parametrize(("code", "shape"), [("F4", (2, 3)), ("F6_E2M3", (4, 4)), ("F6_E3M2", (8,)), ("F4", (0, 3))])
def test_what_torch_cannot_hold_is_refused_unless_raw_bytes_are_wanted(code: str, shape: tuple[int, ...]) -> None:
    checkpoint = one_shard(("b", "U8", (2,)), ("a", code, shape))
    with pytest.raises(ConfigError, match=f"'a' is {code} of shape .* set raw_dtypes: true"):
        plan_of(checkpoint)
    assert names_of(plan_of(checkpoint, {"skip": ["a"]}).for_rank(0)) == ["b"]
    part = plan_of(checkpoint, {"raw_dtypes": True}).for_rank(0)
    assert (part.dtype_code(1), part.storage_dtype_code(1), part.itemsize(1)) == (code, "U8", 1)
    assert filled(part, checkpoint.files, max_bytes=2)[1].tobytes() == checkpoint.payload("a")


@pytest.mark.parametrize(
    ("code", "shape", "stored"),
    [
        ("F6_E2M3", (3, 4), (3, 3)),
        ("F6_E2M3", (4, 2), (6,)),
        ("F4", (2, 3), (3,)),
        ("F4", (2, 3, 0), (2, 3, 0)),
        ("F4", (3, 2), (3, 1)),
    ],
)
def test_raw_bytes_keep_their_rows_where_rows_are_whole_bytes(
    code: str, shape: tuple[int, ...], stored: tuple[int, ...]
) -> None:
    part = plan_of(one_shard(("a", code, shape)), {"raw_dtypes": True}).for_rank(0)
    assert part.storage_shape(0) == stored


@pytest.mark.parametrize(
    ("code", "shape", "load", "shapes"),
    [
        pytest.param("F4", (4, 3), split(0), [(3,), (3,)], id="pairs of odd rows"),
        pytest.param("F6_E2M3", (1, 8, 1), split(1), [(3,), (3,)], id="the first long dimension of a flat tensor"),
        pytest.param("F6_E2M3", (2, 8), split(1), [(2, 3), (2, 3)], id="columns of whole bytes"),
        pytest.param("F6_E2M3", (3, 8), split(0), [(1, 6), (2, 6)], id="rows of whole bytes"),
        pytest.param("F4", (2, 3), split(1, boundaries=[0, 0, 3]), [(0,), (3,)], id="all or nothing"),
    ],
)
def test_raw_bytes_are_cut_where_cuts_fall_between_bytes(
    code: str, shape: tuple[int, ...], load: dict[str, object], shapes: list[tuple[int, ...]]
) -> None:
    checkpoint = one_shard(("a", code, shape))
    plan = plan_of(checkpoint, {**load, "raw_dtypes": True}, {"tp": 2})
    parts = [plan.for_rank(rank) for rank in range(2)]
    assert [part.storage_shape(0) for part in parts] == shapes
    assert sum(part.nbytes(0) for part in parts) == len(checkpoint.payload("a"))
    for part in parts:
        (tensor,) = filled(part, checkpoint.files, max_bytes=2)
        full = elements(checkpoint.payload("a"), part.spec(0).full_shape, 1)
        for source, place in part.spec(0).parts:
            assert np.array_equal(tensor[place], full[source])
