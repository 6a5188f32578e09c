"""Folders as people have them: links of a hub cache, several weight sets, old indexes, stray files, odd layouts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import loader_service as ls
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from tests.e2e.seats import Seat, all_of, errors, make_seats, payload_bytes_read, payload_reads
from tests.support.checkpoints import Checkpoint, assert_same, make_tensor, write_checkpoint
from tests.support.shards import shard_bytes, write_index, write_shard


async def load(
    path: Path | list[str], storage: FakeStorage | None = None, **checkpoint: object
) -> tuple[dict[str, object], ls.LoadReport]:
    document = {
        "checkpoint": {"path": path if isinstance(path, list) else str(path), **checkpoint},
        "loads": {"all": {}},
    }
    async with ls.LoaderService(ls.config_from_dict(document), "solo", storage=storage) as service:
        async with service.open("all") as opened:
            found: dict[str, object] = {name: tensor async for name, tensor in opened}
    return found, opened.report


def hub_snapshot(cache: Path) -> tuple[Path, Checkpoint]:
    """`models--x/snapshots/<rev>/*.safetensors` are links to `blobs/<hash>`, as the hub's library lays them out."""
    made = write_checkpoint(cache / "plain", {f"m{i}.safetensors": {f"w{i}": ("F32", (9, i))} for i in (1, 2)})
    snapshot = cache / "models--x" / "snapshots" / "0123abcd"
    blobs = cache / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in sorted(made.folder.iterdir()):
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot, Checkpoint(snapshot, made.tensors, made.shard_of)


async def test_a_hub_snapshot_loads_through_its_links(tmp_path: Path) -> None:
    snapshot, made = hub_snapshot(tmp_path)
    found, report = await load(snapshot)
    assert list(found) == list(made.tensors)
    assert report.files_read == ("m1.safetensors", "m2.safetensors"), "named as the links are"


async def test_a_link_that_leads_elsewhere_in_the_middle_is_noticed(tmp_path: Path) -> None:
    snapshot, made = hub_snapshot(tmp_path)
    link = snapshot / "m2.safetensors"
    twin = write_shard(tmp_path / "twin", {"w2": made.tensors["w2"]})
    async with ls.LoaderService(made.config(), "solo") as service:
        with pytest.raises(ls.CheckpointError, match="changed under the reader") as caught:
            async with service.open("target") as opened:
                link.unlink()
                link.symlink_to(twin)
                async for _ in opened:
                    pass
    assert caught.value.path == str(link), "the path as it was given, not what it leads to"


async def test_of_two_weight_sets_only_the_indexed_one_is_read(tmp_path: Path) -> None:
    """`model-*` and `consolidated` hold the same names. With an index it decides; without one nothing is loaded."""
    made = write_checkpoint(
        tmp_path, {f"model-0000{i}-of-00002.safetensors": {f"w{i}": ("BF16", (20, 7))} for i in (1, 2)}
    )
    wrong = {name: (code, shape, bytes(len(data))) for name, (code, shape, data) in made.tensors.items()}
    write_shard(tmp_path / "consolidated.safetensors", wrong)
    storage = FakeStorage(LocalStorage())
    with pytest.raises(ls.CheckpointError, match="consolidated") as caught:
        await load(tmp_path, storage)
    assert "no index" in str(caught.value)
    assert not payload_reads(storage)

    write_index(tmp_path, made.shard_of)
    found, report = await load(tmp_path, storage)
    for name, tensor in found.items():
        assert_same(tensor, made.tensor(name), name)  # type: ignore[arg-type]
    assert "consolidated.safetensors" not in report.files_read
    assert not payload_reads(storage, "*consolidated*")
    assert any("consolidated" in warning for warning in report.warnings), "and the report says so"


async def test_an_index_that_names_absent_shards_stops_the_load_unless_it_is_ignored(tmp_path: Path) -> None:
    """A legacy index names 30 shards where 2 hold everything."""
    made = write_checkpoint(tmp_path, {f"m{i}.safetensors": {f"w{i}": ("U8", (5,))} for i in (1, 2)})
    absent = [f"old-{i:02}-of-30.safetensors" for i in range(30)]
    write_index(tmp_path, {f"w{i % 2 + 1}.old{i}": name for i, name in enumerate(absent)})
    storage = FakeStorage(LocalStorage())
    with pytest.raises(ls.CheckpointError) as caught:
        await load(tmp_path, storage)
    assert not storage.reads_of("*.safetensors")
    assert all(name in str(caught.value) for name in absent), "all are listed"
    assert "ignore" in str(caught.value)
    found, _ = await load(tmp_path, index="ignore")
    assert list(found) == list(made.tensors)


async def test_stray_entries_are_passed_over(tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path, {"model.safetensors": {"w": ("U8", (5,))}})
    (tmp_path / "._model.safetensors").write_bytes(b"\x00\x05\x16\x07 not a shard")
    (tmp_path / "model-2.safetensors.incomplete").write_bytes(b"half")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "config.json").write_text("{}")
    found, report = await load(tmp_path)
    assert list(found) == list(made.tensors)
    assert report.files_read == ("model.safetensors",)


async def test_a_list_of_files_is_read_in_the_order_of_names_wherever_they_lie(tmp_path: Path) -> None:
    left = write_checkpoint(tmp_path / "left", {"b.safetensors": {"from.left": ("F32", (3,))}})
    right = write_checkpoint(
        tmp_path / "right", {"a.safetensors": {"from.right": ("F32", (4,))}, "c.safetensors": {"no": ("F32", (1,))}}
    )
    storage = FakeStorage(LocalStorage())
    files = [str(left.folder / "b.safetensors"), str(right.folder / "a.safetensors")]
    found, _ = await load(files, storage)
    assert list(found) == ["from.right", "from.left"]
    assert not storage.reads_of("*c.safetensors")


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param(None, id="none"),
        pytest.param({}, id="empty"),
        pytest.param({"format": "pt", "note": "ä"}, id="some"),
    ],
)
@pytest.mark.parametrize("padding", [0, 1, 5, 8, 4096])
async def test_headers_of_any_length_and_metadata_lead_to_the_same_bytes(
    tmp_path: Path, metadata: dict[str, str] | None, padding: int
) -> None:
    """The payload begins at any offset; tensors come out aligned and whole."""
    tensors = {"a": make_tensor("F32", (11,), 1), "b": make_tensor("U8", (3,), 2), "c": make_tensor("I64", (5, 3), 3)}
    write_shard(tmp_path / "m.safetensors", tensors, metadata=metadata, padding=padding)
    made = Checkpoint(tmp_path, tensors, dict.fromkeys(tensors, "m.safetensors"))
    storage = FakeStorage(LocalStorage())
    found, report = await load(tmp_path, storage)
    for name, tensor in found.items():
        assert_same(tensor, made.tensor(name), name)  # type: ignore[arg-type]
    assert list(found) == list(tensors)
    assert payload_bytes_read(storage) == report.read_bytes == made.payload_bytes


NOT_SHARDS = [
    pytest.param(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "LFS", id="LFS pointer"),
    pytest.param(b"<!DOCTYPE html><html><body>404</body></html>", "HTML", id="HTML page"),
    pytest.param(b"PK\x03\x04" + bytes(60), "zip", id="zip"),
    pytest.param(bytes(4096), "zero", id="zeros"),
    pytest.param(b"", "empty", id="empty file"),
]


@pytest.mark.parametrize(("content", "words"), NOT_SHARDS)
async def test_what_is_no_shard_is_named_on_every_rank_before_any_payload(
    tmp_path: Path, content: bytes, words: str
) -> None:
    write_checkpoint(tmp_path, {"a.safetensors": {"w": ("U8", (5,))}})
    (tmp_path / "b.safetensors").write_bytes(content)
    document = {"checkpoint": {"path": str(tmp_path)}, "loads": {"all": {}}}
    seats = make_seats(2)

    async def work(seat: Seat) -> None:
        async with seat.service(ls.config_from_dict(document)) as service, service.open("all"):
            pass

    for seat, error in zip(seats, errors(await all_of(seats, work)), strict=True):
        assert isinstance(error, ls.CheckpointError)
        assert words.lower() in str(error).lower()
        assert error.path == str(tmp_path / "b.safetensors")
        assert not payload_reads(seat.storage)


async def test_names_that_look_like_paths_are_names(tmp_path: Path) -> None:
    names = ["../../etc/passwd", "/abs/olute", "a\nb", "ä.ö", "", "~"]
    tensors = {name: make_tensor("U8", (4,), number) for number, name in enumerate(names)}
    (tmp_path / "m.safetensors").write_bytes(shard_bytes(tensors))
    found, _ = await load(tmp_path)
    assert list(found) == names
    assert json.loads(json.dumps(list(found))) == names
