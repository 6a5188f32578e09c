"""Each benchmark's machinery runs at tiny sizes and counts what it should. No timing is asserted."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from benchmarks import common, limits, sides, small, stream
from benchmarks.common import (
    MIB,
    Side,
    TensorShape,
    cached_share,
    drop_from_cache,
    files_of,
    layered_tensors,
    make_checkpoint,
    read_into_cache,
    run_rounds,
    run_side,
    small_tensors,
)
from loader_service.errors import ReadError


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch anew for every side would cost seconds; only what is measured would differ."""
    monkeypatch.setattr(common, "run_side", sides.measure)


Made = tuple[Path, list[TensorShape], int]

WORKS = ("owned_kept", "owned_dropped", "batches", "safetensors_cloned", "ring_direct", "ring_buffered", "idle")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("bench") / "checkpoint"
    tensors = [*layered_tensors(4 * MIB), *small_tensors(50)]
    return folder, tensors, make_checkpoint(folder, tensors, 3)


def test_checkpoint_is_what_safetensors_reads(checkpoint: Made) -> None:
    folder, tensors, payload_bytes = checkpoint
    found: dict[str, torch.Tensor] = {}
    for path in files_of(folder):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {t.name: t.shape for t in tensors}
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert sum(tensor.nbytes for tensor in found.values()) == payload_bytes


def test_checkpoint_is_made_once(checkpoint: Made) -> None:
    folder, tensors, payload_bytes = checkpoint
    before = [(path.name, path.stat().st_mtime_ns) for path in files_of(folder)]
    assert make_checkpoint(folder, tensors, 3) == payload_bytes
    assert [(path.name, path.stat().st_mtime_ns) for path in files_of(folder)] == before


def test_another_checkpoint_replaces_the_one_in_the_folder(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, small_tensors(20), 4)
    make_checkpoint(tmp_path, small_tensors(10), 2)
    assert len(files_of(tmp_path)) == 2


def test_page_cache_is_emptied_and_filled(checkpoint: Made) -> None:
    files = files_of(checkpoint[0])
    read_into_cache(files)
    full = cached_share(files)
    if full is None or full == 0:
        pytest.skip("this kernel or file system does not say what is cached")
    drop_from_cache(files)
    assert full > 0.99
    left = cached_share(files)
    assert left is not None
    assert left < 0.01


@pytest.mark.parametrize("read", [limits.read_direct, limits.read_buffered])
def test_limits_read_every_byte(checkpoint: Made, read: Callable[[Sequence[Path]], int]) -> None:
    files = files_of(checkpoint[0])
    try:
        assert read(files) == sum(path.stat().st_size for path in files)
    except ReadError as error:
        pytest.skip(f"no direct reads here: {error}")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_every_side_delivers_the_payload(checkpoint: Made, loop: str, in_this_process: None) -> None:
    folder, _, payload_bytes = checkpoint
    file_bytes = sum(path.stat().st_size for path in files_of(folder))
    works = WORKS if loop == "asyncio" else ("owned_kept",)
    measured = [Side(work, str(folder), "warm", MIB, loop, 4 * MIB) for work in works]
    for series in run_rounds(measured, 1):
        expected = {"idle": 1}.get(series.side.work, file_bytes if "ring" in series.side.work else payload_bytes)
        assert series.outcomes[0].payload_bytes == expected, series.side.work
        assert series.outcomes[0].conditioned_bytes == MIB


def test_a_side_runs_in_a_process_of_its_own(checkpoint: Made) -> None:
    folder, _, payload_bytes = checkpoint
    assert run_side(Side("owned_kept", str(folder), "cold", MIB, capacity_bytes=4 * MIB)).payload_bytes == payload_bytes


def test_a_side_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="CheckpointError"):
        run_side(Side("owned_kept", str(tmp_path / "absent"), "warm", MIB, capacity_bytes=4 * MIB))


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        pytest.param(stream.main, ["--gib", "0.004", "--capacity-mib", "4", "--cache", "warm"], id="stream"),
        pytest.param(small.main, ["--tensors", "40"], id="small"),
    ],
)
def test_benchmarks_print_one_document(
    main: Callable[[list[str]], int],
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    in_this_process: None,
) -> None:
    main([*arguments, "--rounds", "1", "--folder", str(tmp_path), "--json"])  # a missed target is no failure here
    document = json.loads(capsys.readouterr().out)
    assert all(len(series["rounds"]) == 1 for series in document["series"])
    assert {
        series["medians"]["payload_bytes"] for series in document["series"] if series["side"]["work"] == "batches"
    } == {document["payload_bytes"]}


def test_tables_are_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str], in_this_process: None) -> None:
    small.main(["--tensors", "40", "--rounds", "1", "--folder", str(tmp_path)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) >= 5
    assert len({line.count("|") for line in lines}) == 1
