"""Ranks that differ stop together before any payload byte, with the first difference named; some may differ."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import loader_service as ls
from loader_service.agreement.store_carrier import StoreCarrier
from loader_service.config.schema import ServiceConfig
from tests.e2e.seats import Seat, all_of, errors, make_seats, payload_reads, values
from tests.support.checkpoints import Checkpoint, assert_same, write_checkpoint
from tests.support.shards import pattern_bytes, shard_bytes, write_index, write_shard

BASE: dict[str, Any] = {
    "mesh": {"pp": 1, "tp": 3},
    "loads": {
        "target": {
            "skip": ["mtp.*"],
            "rules": [{"match": "layers.*", "split": {"axis": "tp", "dim": 0}}],
        },
        "draft": {"key_prefixes": ["mtp.0", "mtp.1"]},
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("agreed")
    made = write_checkpoint(
        folder,
        {
            "a.safetensors": {"layers.0.w": ("F32", (30, 4)), "layers.1.w": ("F32", (30, 4)), "norm": ("F32", (8,))},
            "b.safetensors": {"mtp.0.w": ("BF16", (6, 4)), "mtp.1.w": ("BF16", (6, 4))},
        },
    )
    write_index(folder, made.shard_of)
    return made


def changed(base: Mapping[str, Any], *path: str | int, value: object) -> dict[str, Any]:
    """A deep copy of plain data with the value at `path` replaced."""

    def copy(node: Any, rest: tuple[str | int, ...]) -> Any:
        if not rest:
            return value
        if isinstance(node, list):
            return [copy(item, rest[1:]) if number == rest[0] else item for number, item in enumerate(node)]
        return {**node, rest[0]: copy(node.get(rest[0], {}), rest[1:])}

    made: dict[str, Any] = copy(base, path)
    return made


def config_of(folder: Path, document: Mapping[str, Any]) -> ServiceConfig:
    checkpoint = {"path": str(folder), **document.get("checkpoint", {})}
    return ls.config_from_dict({**document, "checkpoint": checkpoint})


async def open_all(
    seats: list[Seat],
    configs: list[ServiceConfig],
    *,
    loads: list[str] | None = None,
    coords: list[dict[str, int] | None] | None = None,
) -> list[object]:
    async def work(seat: Seat) -> None:
        mine = coords[seat.rank] if coords is not None else None
        async with seat.service(configs[seat.rank], mine) as service:
            async with service.open(loads[seat.rank] if loads is not None else "target") as load:
                async for _ in load:
                    pass

    return list(await all_of(seats, work))


def assert_disagreement(seats: list[Seat], results: list[object], phase: str, words: list[str]) -> None:
    """Every rank raises the same AgreementError, which has all these words, and no payload was read anywhere."""
    found = errors(results)
    for seat, error in zip(seats, found, strict=True):
        assert type(error) is ls.AgreementError, error
        assert error.exit_code == 4
        assert error.phase == phase
        for word in words:
            assert word in str(error)
        assert not payload_reads(seat.storage)
    assert len({str(error) for error in found}) == 1


SPLIT = ("loads", "target", "rules", 0, "split")


async def test_the_leader_may_be_the_one_that_differs(checkpoint: Checkpoint) -> None:
    base = config_of(checkpoint.folder, BASE)
    other = config_of(checkpoint.folder, changed(BASE, *SPLIT, "dim", value=1))
    seats = make_seats(3)
    words = ["ranks 1 and 0 differ", "split.dim is 0 on rank 1 and 1 on rank 0", "(rank 2 agrees with rank 1)"]
    assert_disagreement(seats, await open_all(seats, [other, base, base]), "config", words)


async def test_ranks_that_open_different_loads_stop(checkpoint: Checkpoint) -> None:
    seats = make_seats(3)
    results = await open_all(seats, [config_of(checkpoint.folder, BASE)] * 3, loads=["target", "draft", "target"])
    assert_disagreement(seats, results, "config", ['load is "target" on rank 0 and "draft" on rank 1', "ranks 0 and 1"])


async def test_coords_on_some_ranks_only_stop_all(checkpoint: Checkpoint) -> None:
    seats = make_seats(3)
    results = await open_all(
        seats,
        [config_of(checkpoint.folder, BASE)] * 3,
        coords=[{"pp": 0, "tp": 0}, None, {"pp": 0, "tp": 1}],
    )
    assert_disagreement(seats, results, "config", ['coords is "given" on rank 0 and not set on rank 1'])


# Checkpoints ---------------------------------------------------------------------------------------------------------


def extra_shard(folder: Path) -> None:
    write_shard(folder / "c.safetensors", {"other": ("U8", (4,), b"abcd")})


def missing_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    (folder / "b.safetensors").unlink()


def other_payload_size(folder: Path) -> None:
    write_shard(
        folder / "b.safetensors", {"mtp.0.w": ("BF16", (6, 4), bytes(48)), "mtp.1.w": ("BF16", (7, 4), bytes(56))}
    )


def replace_in_header(folder: Path, old: bytes, new: bytes) -> None:
    assert len(old) == len(new)
    path = folder / "a.safetensors"
    data = path.read_bytes()
    assert data.count(old) >= 1
    path.write_bytes(data.replace(old, new, 1))


def other_dtype(folder: Path) -> None:
    path = folder / "a.safetensors"
    before = path.stat().st_size
    replace_in_header(folder, b'"layers.0.w":{"dtype":"F32"', b'"layers.0.w":{"dtype":"I32"')
    assert path.stat().st_size == before


def other_shape(folder: Path) -> None:
    replace_in_header(folder, b'"shape":[30,4],"data_offsets":[480', b'"shape":[60,2],"data_offsets":[480')


def other_order(folder: Path) -> None:
    """The same names, dtypes and shapes; the two layers' bytes have changed places."""
    data = {name: ("F32", (30, 4), pattern_bytes(480, seed)) for seed, name in enumerate(("layers.1.w", "layers.0.w"))}
    write_shard(folder / "a.safetensors", {**data, "norm": ("F32", (8,), bytes(32))})


def other_spelling(folder: Path) -> None:
    replace_in_header(folder, b'"norm":{"dtype":"F32","shape":[8],', b'"norm":{"shape":[8],"dtype":"F32",')


def renamed_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    (folder / "b.safetensors").rename(folder / "model.safetensors")


CHECKPOINTS = [
    pytest.param(extra_shard, ["'c.safetensors' is on rank 2 and not on rank 0 (2 and 3 in all)"], id="one more file"),
    pytest.param(
        missing_shard, ["'b.safetensors' is on rank 0 and not on rank 2 (2 and 1 in all)"], id="one file less"
    ),
    pytest.param(
        renamed_shard,
        ["'b.safetensors' is on rank 0 and not on rank 2, which has 'model.safetensors' of the same size"],
        id="one file renamed",
    ),
    pytest.param(
        other_payload_size,
        ["shard 'b.safetensors': size in bytes is ", " on rank 0 and ", " on rank 2"],
        id="size",
    ),
    pytest.param(
        other_dtype,
        ["'a.safetensors'", "'layers.0.w'", "dtype is F32 on rank 0 and I32 on rank 2"],
        id="dtype, same size",
    ),
    pytest.param(
        other_shape, ["'a.safetensors'", "'layers.1.w'", "shape is [30, 4]", "[60, 2]"], id="shape, same size"
    ),
    pytest.param(other_order, ["'a.safetensors'", "'layers.0.w'", "another order"], id="order in the file"),
    pytest.param(other_spelling, ["'a.safetensors'", "metadata or spelling"], id="spelling of the header"),
]


def copy_of(checkpoint: Checkpoint, folder: Path) -> Path:
    shutil.copytree(checkpoint.folder, folder)
    return folder


@pytest.mark.parametrize(("change", "words"), CHECKPOINTS)
async def test_different_checkpoints_stop_all_ranks_before_any_payload(
    checkpoint: Checkpoint, tmp_path: Path, change: Callable[[Path], None], words: list[str]
) -> None:
    base = config_of(checkpoint.folder, BASE)
    folder = copy_of(checkpoint, tmp_path / "differs")
    change(folder)
    seats = make_seats(3)
    results = await open_all(seats, [base, base, config_of(folder, BASE)])
    assert_disagreement(
        seats, results, "catalog", [*words, "ranks 0 and 2 differ in catalog", "(rank 1 agrees with rank 0)"]
    )


@pytest.mark.parametrize(
    ("own_names", "words"),
    [
        pytest.param(
            False,
            "shard 'x.safetensors' is on rank 0 and not on rank 1, which has 'y.safetensors' of the same size "
            "and header (1 and 1 in all); it is missing there, or rank 1's index file leaves it out",
            id="between whole files",
        ),
        pytest.param(
            True,
            "their index files choose otherwise between copies in shard 'x.safetensors' and elsewhere: "
            "tensor 'w' is on rank 0 and not on rank 1",
            id="between copies of one tensor",
        ),
    ],
)
async def test_an_index_that_decides_otherwise_stops_all_ranks(tmp_path: Path, own_names: bool, words: str) -> None:
    """Equal files, two of which hold the same name; the index says which one counts, and differs."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, holder in zip(folders, ("x.safetensors", "y.safetensors"), strict=True):
        weight_map = {"w": holder}
        for name in ("x.safetensors", "y.safetensors"):
            own = {name[0]: ("U8", (1,), b"z")} if own_names else {}
            write_shard(folder / name, {"w": ("U8", (4,), b"abcd"), **own})
            weight_map.update(dict.fromkeys(own, name))
        write_index(folder, weight_map)
    document: dict[str, Any] = {"loads": {"target": {}}}
    seats = make_seats(2)
    results = await open_all(seats, [config_of(folder, document) for folder in folders])
    assert_disagreement(seats, results, "catalog", ["ranks 0 and 1 differ in catalog", words])


async def test_metadata_that_differs_alone_is_named_as_that(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, by in zip(folders, "xy", strict=True):
        write_shard(folder / "a.safetensors", {"w": ("U8", (4,), b"abcd")}, metadata={"made by": by})
    seats = make_seats(2)
    results = await open_all(seats, [config_of(folder, {"loads": {"target": {}}}) for folder in folders])
    words = ["the headers of shard 'a.safetensors' differ in metadata or spelling, not in tensors"]
    assert_disagreement(seats, results, "catalog", words)


async def test_payload_alone_is_not_compared(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Agreement reads headers: bytes that differ below them load as they are, on each rank its own."""
    folder = copy_of(checkpoint, tmp_path / "differs")
    data = bytearray((folder / "a.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "a.safetensors").write_bytes(bytes(data))
    documents = [BASE, BASE, {**BASE, "checkpoint": {"path": str(folder)}}]
    ranks = await load_all(checkpoint, documents)
    assert_same(ranks[0]["norm"], ranks[1]["norm"])
    assert ranks[2]["norm"][-1] != ranks[0]["norm"][-1]


# How it is found -----------------------------------------------------------------------------------------------------


async def test_only_the_two_ranks_that_are_named_send_their_bodies(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = watch_bodies(monkeypatch)
    folder = copy_of(checkpoint, tmp_path / "differs")
    other_dtype(folder)
    document = {**BASE, "mesh": {"pp": 1, "tp": 8}}
    configs = [config_of(folder if rank in (5, 6) else checkpoint.folder, document) for rank in range(8)]
    seats = make_seats(8)
    words = ["ranks 0 and 5 differ", "(ranks 1, 2, 3, 4 and 7 agree with rank 0, rank 6 agrees with rank 5)"]
    assert_disagreement(seats, await open_all(seats, configs), "catalog", words)
    assert sorted(rank for rank, _ in sent) == [0, 0, 5, 5], "the shards, then the tensors of one shard"


async def test_one_tensor_of_100_000_in_1_000_shards_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = watch_bodies(monkeypatch)
    folders = [tmp_path / "one", tmp_path / "two"]
    tensors = {f"model.layers.{i}.mlp.experts.{i}.down_proj.weight": ("F32", (1,), bytes(4)) for i in range(100)}
    data = shard_bytes(tensors)
    for folder in folders:
        folder.mkdir()
    for number in range(1, 1001):
        ours, theirs = (folder / f"model-{number:05}-of-01000.safetensors" for folder in folders)
        own = data.replace(b"model.layers.", b"m%04d.layers." % number)
        ours.write_bytes(own)
        if number < 1000:
            theirs.hardlink_to(ours)
    theirs.write_bytes(own.replace(b"F32", b"I32").replace(b"I32", b"F32", 99))
    results = await open_all(make_seats(2), [config_of(folder, {"loads": {"target": {}}}) for folder in folders])
    words = (
        "the headers of shard 'model-01000-of-01000.safetensors' differ: "
        "tensor 'm1000.layers.99.mlp.experts.99.down_proj.weight': dtype is F32 on rank 0 and I32 on rank 1"
    )
    assert all(words in str(error) for error in errors(results))
    assert len(sent) == 4
    assert max(size for _, size in sent) < 200_000


def watch_bodies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rank, bytes) of every body that a rank of this process sends."""
    sent: list[tuple[int, int]] = []
    post = StoreCarrier.post

    def watched(carrier: StoreCarrier, key: str, data: bytes) -> None:
        if key.startswith("b/"):
            sent.append((int(key.rpartition("/")[2]), len(data)))
        post(carrier, key, data)

    monkeypatch.setattr(StoreCarrier, "post", watched)
    return sent


# What may differ -----------------------------------------------------------------------------------------------------


async def test_local_matters_may_differ(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Paths, threads, pinning, staging, chunks, retries and time limits are each rank's own."""
    elsewhere = copy_of(checkpoint, tmp_path / "elsewhere")
    listed = [str(elsewhere / "b.safetensors"), str(elsewhere / "a.safetensors")]
    documents: list[dict[str, Any]] = [
        {**BASE, "reads": {"threads": 1, "chunk_bytes": 64, "retries": 0, "stuck_after_s": 7}},
        {**BASE, "staging": {"capacity_bytes": 4096, "pin": "never"}, "checkpoint": {"path": str(elsewhere)}},
        {**BASE, "agreement": {"timeout_s": 9, "grace_s": 3}, "checkpoint": {"path": listed}},
    ]
    assert_loads_alike(checkpoint, await load_all(checkpoint, documents))


async def test_different_spellings_of_the_same_are_no_difference(checkpoint: Checkpoint) -> None:
    """Defaults written out, the dot of a prefix, one axis as a list, the order of keys."""
    rules: list[list[dict[str, Any]]] = [
        [{"match": "mtp.*", "assign": {"axis": "tp", "index": r"mtp\.(\d+)\."}}],
        [{"assign": {"how": "block", "index": r"mtp\.(\d+)\.", "axis": ["tp"]}, "match": "mtp.*"}],
        [{"match": "mtp.*", "assign": {"index": r"mtp\.(\d+)\.", "axis": "tp"}}],
    ]
    loads: list[dict[str, Any]] = [
        {"key_prefixes": ["mtp.0", "mtp.1"]},
        {"key_prefixes": ["mtp.0.", "mtp.1"], "on_no_match": "error", "skip": []},
        {"raw_dtypes": False, "key_prefixes": ["mtp.0", "mtp.1."]},
    ]
    documents = [
        changed(BASE, "loads", "draft", value={**load, "rules": own}) for load, own in zip(loads, rules, strict=True)
    ]
    documents[1]["reads"] = {"coalesce_gap_bytes": "256KiB", "sharing": "auto"}
    taken = await load_all(checkpoint, documents, "draft")
    assert [sorted(names) for names in taken] == [[], ["mtp.0.w"], ["mtp.1.w"]]


async def load_all(
    checkpoint: Checkpoint, documents: list[dict[str, Any]], load_name: str = "target"
) -> list[dict[str, Any]]:
    async def work(seat: Seat) -> dict[str, Any]:
        document = {"checkpoint": {"path": str(checkpoint.folder)}, **documents[seat.rank]}
        async with seat.service(ls.config_from_dict(document)) as service, service.open(load_name) as load:
            return {name: tensor async for name, tensor in load}

    return values(await all_of(make_seats(len(documents)), work))


def assert_loads_alike(checkpoint: Checkpoint, ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert sorted(found) == ["layers.0.w", "layers.1.w", "norm"]
        assert_same(found["layers.1.w"], checkpoint.tensor("layers.1.w")[10 * rank : 10 * rank + 10])
        assert_same(found["norm"], checkpoint.tensor("norm"))
