"""Comparing with safetensors' own reading, and manifests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import loader_service as ls
from loader_service.checkpoint.dtypes import DTYPE_LIST
from loader_service.cli.checking import (
    Manifest,
    Reference,
    check_writable,
    difference,
    manifest_path,
    raw_bytes,
    write_manifest,
)
from tests.support.shards import pattern_bytes, write_shard


def opened_parts(
    tmp_path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]], rules: list[dict[str, object]]
) -> list[tuple[str, torch.Tensor, ls.TensorSpec, ls.RankPlan]]:
    """Everything that a rank alone takes of a checkpoint of one file."""
    write_shard(tmp_path / "m.safetensors", tensors)
    config = ls.config_from_dict(
        {
            "checkpoint": {"path": str(tmp_path)},
            "mesh": {"tp": 1},
            "loads": {"all": {"raw_dtypes": True, "rules": rules}},
        }
    )
    with ls.LoaderService.blocking(config, group="solo") as service, service.open("all") as load:
        plan = load.plan.for_rank(0)
        return [(name, value, load.spec(name), plan) for name, value in load]


@pytest.mark.parametrize("code", [dtype.code for dtype in DTYPE_LIST])
def test_every_dtype_is_compared_with_what_safetensors_reads(code: str, tmp_path: Path) -> None:
    bits = next(dtype.bits for dtype in DTYPE_LIST if dtype.code == code)
    data = b"\0\1" * 16 if code == "BOOL" else pattern_bytes(4 * 8 * bits // 8, 3)
    [(name, value, spec, plan)] = opened_parts(tmp_path, {"x": (code, (4, 8), data)}, [])
    with Reference(plan) as reference:
        reference.compare(name, value, spec)
        damaged = value.clone() if value.dtype != getattr(torch, "float4_e2m1fn_x2", None) else value
        raw_bytes(damaged)[5] ^= 1
        with pytest.raises(ls.CheckpointError, match=r"1 of \d+ bytes differ, the first at byte 5") as caught:
            reference.compare(name, damaged, spec)
    assert (caught.value.tensor, caught.value.path) == ("x", str(tmp_path / "m.safetensors"))


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0), (1,), (2, 3, 4)], ids=str)
def test_every_shape_is_compared(shape: tuple[int, ...], tmp_path: Path) -> None:
    data = pattern_bytes(4 * int(np.prod(shape)), 1)
    [(name, value, spec, plan)] = opened_parts(tmp_path, {"x": ("F32", shape, data)}, [])
    with Reference(plan) as reference:
        reference.compare(name, value, spec)


def test_nans_are_equal_to_themselves_and_not_to_other_nans() -> None:
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert difference(quiet, quiet.clone()) is None
    assert "1 of 4 bytes differ, the first at byte 0" in str(difference(quiet, other))


@pytest.mark.parametrize(
    ("got", "expected"),
    [(torch.zeros(2), torch.zeros(3)), (torch.zeros(2), torch.zeros(2, dtype=torch.int32))],
    ids=["shape", "dtype"],
)
def test_another_shape_or_dtype_is_a_difference(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert "instead of" in str(difference(got, expected))


def test_a_file_that_safetensors_cannot_read_is_a_checkpoint_error(tmp_path: Path) -> None:
    [(name, value, spec, plan)] = opened_parts(tmp_path, {"x": ("F32", (2,), pattern_bytes(8))}, [])
    (tmp_path / "m.safetensors").write_bytes(b"no longer")
    with Reference(plan) as reference, pytest.raises(ls.CheckpointError, match="safetensors cannot read tensor 'x'"):
        reference.compare(name, value, spec)


def test_raw_bytes_are_row_major_whatever_the_strides() -> None:
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3).T
    assert raw_bytes(tensor).numpy().tobytes() == np.array([0, 3, 1, 4, 2, 5], dtype="<i2").tobytes()


def test_a_manifest_has_code_shape_and_hash(tmp_path: Path) -> None:
    data = pattern_bytes(12, 9)
    [(name, value, _, plan)] = opened_parts(tmp_path, {"x": ("F4", (3, 8), data)}, [])
    manifest = Manifest(plan)
    manifest.add(name, value)
    expected = {"x": {"dtype": "F4", "shape": [3, 8], "sha256": hashlib.sha256(data).hexdigest()}}
    assert manifest.entries == expected
    write_manifest(tmp_path / "out.json", manifest.entries)
    assert json.loads((tmp_path / "out.json").read_text()) == expected


@pytest.mark.parametrize(
    ("out", "rank", "ranks", "expected"),
    [
        ("out/m.json", 0, 1, "out/m.json"),
        ("out/m.json", 3, 8, "out/m.rank3.json"),
        ("a.b.json", 0, 2, "a.b.rank0.json"),
        ("bare", 1, 2, "bare.rank1"),
    ],
)
def test_the_rank_stands_before_the_suffix(out: str, rank: int, ranks: int, expected: str) -> None:
    assert manifest_path(Path(out), rank, ranks) == Path(expected)


def test_a_manifest_that_cannot_be_written_leaves_nothing_and_keeps_the_old_one(tmp_path: Path) -> None:
    old = tmp_path / "m.json"
    old.write_text("old")
    taken = tmp_path / "folder"
    taken.mkdir()
    with pytest.raises(ls.ConfigError, match="cannot be written"):
        write_manifest(taken, {"x": 1})
    assert old.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "m.json"]


def test_a_manifest_s_folder_must_exist(tmp_path: Path) -> None:
    check_writable(tmp_path / "m.json")
    with pytest.raises(ls.ConfigError, match="does not exist"):
        check_writable(tmp_path / "none" / "m.json")
    with pytest.raises(ls.ConfigError, match="is a folder"):
        check_writable(tmp_path)
