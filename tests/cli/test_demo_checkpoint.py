"""The demo checkpoint: what lies in it, where, and when it is made anew."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from loader_service.cli import demo_checkpoint
from loader_service.cli.demo_checkpoint import DemoCheckpoint, demo_layout, make_demo_checkpoint
from loader_service.errors import ConfigError, LoaderError

SMALL_BYTES = 2_000_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> DemoCheckpoint:
    return make_demo_checkpoint(tmp_path_factory.mktemp("demo") / "small", total_bytes=SMALL_BYTES)


def contents(checkpoint: DemoCheckpoint) -> dict[str, tuple[str, torch.Tensor]]:
    found: dict[str, tuple[str, torch.Tensor]] = {}
    for name in checkpoint.files:
        with safe_open(checkpoint.path / name, framework="pt") as shard:
            for key in shard.keys():  # noqa: SIM118 - not a mapping
                found[key] = (name, shard.get_tensor(key))
    return found


def test_files_hold_exactly_the_layout_with_finite_numbers(made: DemoCheckpoint) -> None:
    found = contents(made)
    layout = demo_layout(SMALL_BYTES)
    assert len({tensor.name for tensor in layout}) == len(layout) == made.tensors == len(found)
    for tensor in layout:
        shard, value = found[tensor.name]
        assert (made.files.index(shard), tuple(value.shape)) == (tensor.shard, tensor.shape), tensor.name
        assert value.dtype == demo_checkpoint._CODES[tensor.dtype]
        assert bool(torch.isfinite(value.float()).all()), tensor.name
    assert made.payload_bytes == sum(value.nbytes for _, value in found.values())
    assert made.file_bytes == sum((made.path / name).stat().st_size for name in made.files)


def test_neighbouring_tensors_differ_so_that_a_wrong_offset_shows(made: DemoCheckpoint) -> None:
    large = [value.reshape(-1).view(torch.uint8).numpy().tobytes() for _, value in contents(made).values()]
    large = [data for data in large if len(data) >= 64]
    assert len(set(large)) == len(large)
    assert all(len(set(data)) > 8 for data in large)


@pytest.mark.parametrize(
    ("namespace", "shards"),
    [("mtp.0.", {2, 3}), ("mtp.1.", {3}), ("mtp.2.", {4}), ("model.layers.1.engram.", {1}), ("lm_head.", {3})],
    ids=["stage 0", "stage 1", "stage 2", "row table", "head"],
)
def test_namespaces_lie_in_their_shards(made: DemoCheckpoint, namespace: str, shards: set[int]) -> None:
    holding = {made.files.index(shard) for name, (shard, _) in contents(made).items() if name.startswith(namespace)}
    assert holding == shards


def test_last_shard_holds_nothing_but_the_third_draft_stage(made: DemoCheckpoint) -> None:
    assert {name[:6] for name, (shard, _) in contents(made).items() if shard == made.files[-1]} == {"mtp.2."}


def test_index_omits_one_draft_key_and_nothing_else(made: DemoCheckpoint) -> None:
    index = json.loads((made.path / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: shard for name, (shard, _) in contents(made).items()}
    assert found.pop(made.omitted_key)
    assert made.omitted_key.startswith("mtp.0.")
    assert index == found


@pytest.mark.parametrize("total_bytes", [1_300_000, 5_000_000, 30 << 20, 300 << 20])
def test_payload_comes_to_what_was_asked_for_less_one_row(total_bytes: int) -> None:
    layout = demo_layout(total_bytes)
    rows = next(tensor for tensor in layout if tensor.name.endswith("engram.embed.weight"))
    row_bytes = rows.shape[1] + demo_checkpoint._SCALES_PER_ROW
    assert 0 <= total_bytes - sum(tensor.nbytes for tensor in layout) < row_bytes


def test_default_layout_is_that_of_the_documentation() -> None:
    shapes = {tensor.name: (tensor.dtype, tensor.shape) for tensor in demo_layout()}
    assert shapes["lm_head.weight"] == ("BF16", (16371, 1024))
    assert shapes["model.layers.1.engram.embed.weight"] == ("F8_E4M3", (189258, 256))
    assert shapes["model.layers.1.engram.embed.weight_scale_inv"] == ("F8_E8M0", (189258, 8))
    assert shapes["model.layers.4.mlp.experts.11.down_proj.weight_scale_inv"] == ("F8_E8M0", (8, 4))


def test_same_arguments_give_the_same_bytes_and_another_seed_others(made: DemoCheckpoint, tmp_path: Path) -> None:
    again = make_demo_checkpoint(tmp_path / "again", total_bytes=SMALL_BYTES)
    other = make_demo_checkpoint(tmp_path / "other", total_bytes=SMALL_BYTES, seed=1)
    for name in made.files:
        data = (made.path / name).read_bytes()
        assert data == (again.path / name).read_bytes()
        assert data != (other.path / name).read_bytes()


def test_an_up_to_date_folder_is_used_and_not_written(tmp_path: Path) -> None:
    first = make_demo_checkpoint(tmp_path / "demo", total_bytes=SMALL_BYTES)
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in first.path.iterdir()}
    calls: list[tuple[int, int]] = []
    second = make_demo_checkpoint(
        tmp_path / "demo", total_bytes=SMALL_BYTES, on_progress=lambda *counts: calls.append(counts)
    )
    assert (first.created, second.created) == (True, False)
    assert (second.payload_bytes, second.file_bytes) == (first.payload_bytes, first.file_bytes)
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in second.path.iterdir()} == before
    assert calls == []


def _cut_a_shard(folder: Path) -> None:
    os.truncate(folder / "model-00003-of-00005.safetensors", 1000)


def _lose_a_shard(folder: Path) -> None:
    (folder / "model-00005-of-00005.safetensors").unlink()


def _lose_the_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def _spoil_the_marker(folder: Path) -> None:
    (folder / "demo_checkpoint.json").write_text("{")


@pytest.mark.parametrize("harm", [_cut_a_shard, _lose_a_shard, _lose_the_index, _spoil_the_marker])
def test_a_damaged_folder_is_made_anew(made: DemoCheckpoint, tmp_path: Path, harm: object) -> None:
    folder = make_demo_checkpoint(tmp_path / "demo", total_bytes=SMALL_BYTES).path
    assert callable(harm)
    harm(folder)
    assert make_demo_checkpoint(folder, total_bytes=SMALL_BYTES).created
    for name in [*made.files, "model.safetensors.index.json"]:
        assert (folder / name).read_bytes() == (made.path / name).read_bytes()


@pytest.mark.parametrize(("seed", "total_bytes"), [(7, SMALL_BYTES), (0, 1_500_000)], ids=["seed", "size"])
def test_other_arguments_replace_the_folder(tmp_path: Path, seed: int, total_bytes: int) -> None:
    make_demo_checkpoint(tmp_path / "demo", total_bytes=SMALL_BYTES)
    assert make_demo_checkpoint(tmp_path / "demo", total_bytes=total_bytes, seed=seed).created
    assert not make_demo_checkpoint(tmp_path / "demo", total_bytes=total_bytes, seed=seed).created


def test_an_interrupted_making_leaves_nothing_and_the_old_folder_whole(made: DemoCheckpoint, tmp_path: Path) -> None:
    folder = make_demo_checkpoint(tmp_path / "demo", total_bytes=SMALL_BYTES).path

    def interrupt(done_bytes: int, all_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_demo_checkpoint(folder, total_bytes=SMALL_BYTES, seed=1, on_progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    assert not make_demo_checkpoint(folder, total_bytes=SMALL_BYTES).created


def test_what_a_killed_process_left_beside_does_not_disturb(tmp_path: Path) -> None:
    (tmp_path / ".demo.unfinished").mkdir()
    (tmp_path / ".demo.unfinished" / "model-00001-of-00005.safetensors").write_bytes(b"half")
    assert make_demo_checkpoint(tmp_path / "demo", total_bytes=SMALL_BYTES).created
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_two_processes_at_once_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        results = pool.map(_make_small, [str(tmp_path / "demo")] * 2, chunksize=1)
    assert sorted(results) == [False, True]


def _make_small(folder: str) -> bool:
    return make_demo_checkpoint(folder, total_bytes=SMALL_BYTES).created


def test_files_of_others_are_never_replaced(tmp_path: Path) -> None:
    own = tmp_path / "mine"
    own.mkdir()
    (own / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(ConfigError, match="did not make"):
        make_demo_checkpoint(own, total_bytes=SMALL_BYTES)
    with pytest.raises(ConfigError, match="not a folder"):
        make_demo_checkpoint(own / "model.safetensors", total_bytes=SMALL_BYTES)
    assert (own / "model.safetensors").read_bytes() == b"precious"


@pytest.mark.parametrize("mask", [0o022, 0o077], ids=oct)
def test_files_have_the_mode_that_the_umask_says(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        made = make_demo_checkpoint(tmp_path / "demo", total_bytes=SMALL_BYTES)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made.path.iterdir()}
    assert modes == dict.fromkeys(modes, 0o666 & ~mask)


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    assert make_demo_checkpoint(tmp_path, total_bytes=SMALL_BYTES).path == tmp_path


@pytest.mark.parametrize(
    ("seed", "total_bytes", "message"),
    [(0, 100_000, "give it at least 1"), (-1, SMALL_BYTES, "seed is -1")],
    ids=["too small", "negative seed"],
)
def test_impossible_arguments_are_refused(tmp_path: Path, seed: int, total_bytes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_demo_checkpoint(tmp_path / "demo", total_bytes=total_bytes, seed=seed)
    assert list(tmp_path.iterdir()) == []


def test_the_size_that_the_refusal_names_is_accepted() -> None:
    with pytest.raises(ConfigError) as refusal:
        demo_layout(0)
    least = int(str(refusal.value).rsplit(" ", 1)[1])
    assert demo_layout(least)
    with pytest.raises(ConfigError):
        demo_layout(least - 1)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LoaderError, match=r"file/demo.*choose a folder") as failure:
        make_demo_checkpoint(tmp_path / "file" / "demo", total_bytes=SMALL_BYTES)
    assert failure.value.errno is not None


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    made = make_demo_checkpoint(
        tmp_path / "demo", total_bytes=SMALL_BYTES, on_progress=lambda *counts: calls.append(counts)
    )
    assert len(calls) == len(made.files)
    assert calls == sorted(calls)
    assert calls[-1] == (made.payload_bytes, made.payload_bytes)
