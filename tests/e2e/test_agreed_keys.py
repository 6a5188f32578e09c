"""Every key of the configuration is agreed on, and a difference named with its path and both values, or it is local."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from loader_service.config.rules import FrozenModel
from loader_service.config.schema import CacheConfig, HostResidentRule, ServiceConfig
from tests.e2e.seats import make_seats
from tests.e2e.test_disagreement import (
    assert_disagreement,
    assert_loads_alike,
    changed,
    config_of,
    copy_of,
    load_all,
    open_all,
)
from tests.support.checkpoints import Checkpoint, write_checkpoint

BASE: dict[str, Any] = {
    "mesh": {"pp": 1, "tp": 3},
    "loads": {
        "target": {
            "skip": ["mtp.*"],
            "rules": [
                {"match": "layers.*", "split": {"axis": "tp", "dim": 0}},
                {"match": "mtp.*", "assign": {"axis": "tp", "index": r"mtp\.(\d+)\."}},
            ],
        },
    },
}
TARGET = ("loads", "target")
RULES = (*TARGET, "rules")
SPLIT = (*RULES, 0, "split")
ASSIGN = (*RULES, 1, "assign")
BY_CUTS = {"axis": "tp", "index": r"mtp\.(\d+)\.", "boundaries": [0, 1, 2, 2]}
LONG = [f"layers.{i}.never.there.weight" for i in range(100)]

# Key of the schema -> [(where the second document differs, its value, the words)], with the base's value to compare, or
# with a base of its own in the last place.
AGREED: dict[str, list[tuple[Any, ...]]] = {
    "mesh": [
        (
            ("mesh",),
            {"tp": 3, "pp": 1},
            'mesh is [["pp", 1], ["tp", 3]] on rank 0 and [["tp", 3], ["pp", 1]] on rank 2',
        ),
        (("mesh",), {"tp": 3}, 'mesh is [["pp", 1], ["tp", 3]] on rank 0 and [["tp", 3]] on rank 2'),
    ],
    "checkpoint.index": [
        (("checkpoint",), {"index": "ignore"}, 'checkpoint.index is "advisory" on rank 0 and "ignore" on rank 2')
    ],
    "loads.checkpoint.index": [
        (
            (*TARGET, "checkpoint"),
            {"path": "/own", "index": "ignore"},
            'checkpoint.index is "advisory" on rank 0 and "ignore" on rank 2',
        )
    ],
    "loads.skip": [
        ((*TARGET, "skip"), ["mtp.1.*"], 'loads.target.skip is ["mtp.*"] on rank 0 and ["mtp.1.*"] on rank 2'),
        ((*TARGET, "skip"), [*LONG, "b"], 'loads.target.skip[100] is "a" on rank 0 and "b" on rank 2', [*LONG, "a"]),
        ((*TARGET, "skip"), LONG, 'loads.target.skip[100] is "a" on rank 0 and not set on rank 2', [*LONG, "a"]),
    ],
    "loads.key_prefixes": [
        ((*TARGET, "key_prefixes"), ["mtp"], 'loads.target.key_prefixes is not set on rank 0 and ["mtp."] on rank 2')
    ],
    "loads.on_no_match": [
        ((*TARGET, "on_no_match"), "read_all", 'on_no_match is "error" on rank 0 and "read_all" on rank 2')
    ],
    "loads.raw_dtypes": [
        ((*TARGET, "raw_dtypes"), True, "loads.target.raw_dtypes is false on rank 0 and true on rank 2")
    ],
    "loads.rules.match": [
        (
            (*RULES, 0, "match"),
            "layers.0.*",
            'loads.target.rules[0].match is "layers.*" on rank 0 and "layers.0.*" on rank 2',
        ),
        (RULES, [], 'loads.target.rules[0] is {"match": "layers.*", ', "on rank 0 and not set on rank 2"),
    ],
    "loads.rules.assign.axis": [
        ((*ASSIGN, "axis"), "pp", 'rules[1].assign.axis is ["tp"] on rank 0 and ["pp"] on rank 2')
    ],
    "loads.rules.assign.index": [
        (
            (*ASSIGN, "index"),
            r"\.(\d+)\.",
            r'rules[1].assign.index is "mtp\\.(\\d+)\\." on rank 0 and "\\.(\\d+)\\." on rank 2',
        )
    ],
    "loads.rules.assign.how": [
        ((*ASSIGN, "how"), "round_robin", 'assign.how is "block" on rank 0 and "round_robin" on rank 2')
    ],
    "loads.rules.assign.boundaries": [
        (
            ASSIGN,
            {**BY_CUTS, "boundaries": [0, 0, 1, 2]},
            "rules[1].assign.boundaries is [0, 1, 2, 2] on rank 0 and [0, 0, 1, 2] on rank 2",
            BY_CUTS,
        )
    ],
    "loads.rules.assign.count": [((*ASSIGN, "count"), 4, "rules[1].assign.count is not set on rank 0 and 4 on rank 2")],
    "loads.rules.assign.to": [
        (
            ASSIGN,
            {"axis": "tp", "to": "all"},
            'rules[1].assign.to is [0, -1] on rank 0 and "all" on rank 2',
            {"axis": "tp", "to": [0, -1]},
        )
    ],
    "loads.rules.split.axis": [
        ((*SPLIT, "axis"), ["pp", "tp"], 'split.axis is ["tp"] on rank 0 and ["pp", "tp"] on rank 2')
    ],
    "loads.rules.split.dim": [((*SPLIT, "dim"), 1, "loads.target.rules[0].split.dim is 0 on rank 0 and 1 on rank 2")],
    "loads.rules.split.align": [((*SPLIT, "align"), 2, "rules[0].split.align is not set on rank 0 and 2 on rank 2")],
    "loads.rules.split.pad_to": [((*SPLIT, "pad_to"), 3, "rules[0].split.pad_to is not set on rank 0 and 3 on rank 2")],
    "loads.rules.split.units": [((*SPLIT, "units"), 6, "rules[0].split.units is not set on rank 0 and 6 on rank 2")],
    "loads.rules.split.boundaries": [
        (
            (*SPLIT, "boundaries"),
            [0, 1, 2, 30],
            "rules[0].split.boundaries is not set on rank 0 and [0, 1, 2, 30] on rank 2",
        )
    ],
    "loads.rules.split.sections": [
        ((*SPLIT, "sections"), [2, 1], "rules[0].split.sections is not set on rank 0 and [2, 1] on rank 2")
    ],
    "loads.rules.host_resident.layout": [],  # no file may say so in this version: see below
    "reads.coalesce_gap_bytes": [
        (("reads", "coalesce_gap_bytes"), 0, "reads.coalesce_gap_bytes is 262144 on rank 0 and 0 on rank 2")
    ],
    "reads.sharing": [(("reads", "sharing"), "none", 'reads.sharing is "auto" on rank 0 and "none" on rank 2')],
    "cache.capacity_bytes": [],  # likewise
}

# Key of the schema -> what it may be on one rank alone.
LOCAL: dict[str, Any] = {
    "checkpoint.path": "a copy of it",
    "loads.checkpoint.path": "a copy of it",
    "reads.threads": 1,
    "reads.threads_per_node": 2,
    "reads.chunk_bytes": 64,
    "reads.access": "buffered",
    "reads.drop_page_cache": "never",
    "reads.retries": 0,
    "reads.stuck_after_s": 7,
    "staging.capacity_bytes": 4096,
    "staging.pin": "never",
    "agreement.timeout_s": 9,
    "agreement.start_timeout_s": 99,
    "agreement.grace_s": 3,
    "serve.keep": [],  # of workers; services agree on what they keep
    "serve.warm": [],
    "serve.socket": "@another",
    "serve.if_absent": "error",
    "memory.reserve_bytes": "auto",  # all that this version takes
}


def keys_of(model: type[FrozenModel], path: str = "") -> Iterator[str]:
    """The key path of everything that a file can set; a list's or a mapping's items are not counted."""
    for name, field in model.model_fields.items():
        inner = next(models_in(field.annotation), None)
        if inner is None:
            yield f"{path}{name}"
        else:
            yield from keys_of(inner, f"{path}{name}.")


def models_in(annotation: object) -> Iterator[type[FrozenModel]]:
    if isinstance(annotation, type) and issubclass(annotation, FrozenModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def test_every_key_is_agreed_on_or_local() -> None:
    keys = sorted(keys_of(ServiceConfig))
    assert keys == sorted([*AGREED, *LOCAL]), "decide for a new key whether ranks must agree on it"
    assert not AGREED.keys() & LOCAL.keys()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("keys")
    names = {"layers.0.w": ("F32", (30, 4)), "layers.1.w": ("F32", (30, 4)), "norm": ("F32", (8,))}
    return write_checkpoint(folder, {"a.safetensors": names, "b.safetensors": {"mtp.0.w": ("BF16", (6, 4))}})


async def assert_named(configs: list[ServiceConfig], *words: str) -> None:
    """Three ranks, the last of which differs, stop at once: the words, and who differs."""
    seats = make_seats(3)
    who = ["ranks 0 and 2 differ in config", "(rank 1 agrees with rank 0)"]
    assert_disagreement(seats, await open_all(seats, configs), "config", [*words, *who])
    assert all(not seat.storage.reads for seat in seats), "not even a header was read"


ROWS = [pytest.param(row, id=f"{key} {n}") for key, rows in AGREED.items() for n, row in enumerate(rows)]


@pytest.mark.parametrize("row", ROWS)
async def test_a_difference_in_an_agreed_key_is_named(checkpoint: Checkpoint, row: tuple[Any, ...]) -> None:
    path, value, *rest = row
    words = [item for item in rest if isinstance(item, str)]
    own_base = [item for item in rest if not isinstance(item, str)]
    base: Mapping[str, Any] = changed(BASE, *path, value=own_base[0]) if own_base else BASE
    ours, theirs = (config_of(checkpoint.folder, document) for document in (base, changed(base, *path, value=value)))
    await assert_named([ours, ours, theirs], *words)


async def test_differences_that_no_file_can_make_in_this_version_are_named_too(checkpoint: Checkpoint) -> None:
    ours = config_of(checkpoint.folder, BASE)
    cached = ours.model_copy(update={"cache": CacheConfig.model_construct(capacity_bytes=1)})
    await assert_named([ours, ours, cached], "cache.on is false on rank 0 and true on rank 2")
    load = ours.loads["target"]
    resident = load.rules[0].model_copy(update={"host_resident": HostResidentRule(layout="shared")})
    theirs = ours.model_copy(update={"loads": {"target": load.model_copy(update={"rules": (resident, load.rules[1])})}})
    words = 'loads.target.rules[0].host_resident is not set on rank 0 and {"layout": "shared"} on rank 2'
    await assert_named([ours, ours, theirs], words)


async def test_a_long_value_is_cut(checkpoint: Checkpoint) -> None:
    names = ["x" * 5000, "y" * 5000]
    ours, theirs = (
        config_of(checkpoint.folder, changed(BASE, *RULES, 0, "match", value=f"layers.*{name}")) for name in names
    )
    await assert_named(
        [ours, ours, theirs], 'rules[0].match is "layers.*xxx', '... (5010 characters) on rank 0 and "layers.*yyy'
    )


@pytest.mark.parametrize("who", [0, 2], ids=["leader", "member"])
async def test_local_keys_may_all_differ(checkpoint: Checkpoint, tmp_path: Path, who: int) -> None:
    folder = copy_of(checkpoint, tmp_path / "elsewhere")
    other: dict[str, Any] = BASE
    for key, value in LOCAL.items():
        path = key.split(".")
        if path[0] == "loads":
            path.insert(1, "target")
        other = changed(other, *path, value=str(folder) if path[-1] == "path" else value)
    documents = [other if rank == who else BASE for rank in range(3)]
    assert_loads_alike(checkpoint, await load_all(checkpoint, documents))
