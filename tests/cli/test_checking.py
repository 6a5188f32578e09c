"""Comparing with safetensors' own reading, and manifests."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable
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

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="open files have names in /proc")


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


def test_a_manifest_that_cannot_be_written_leaves_nothing_and_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "m.json"
    old.write_text("old")

    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ls.ConfigError, match="cannot be written: No space left") as caught:
        write_manifest(old, {"x": 1})
    assert caught.value.errno == errno.ENOSPC
    assert old.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]


def _make_fifo(folder: Path) -> Path:
    os.mkfifo(folder / "place")
    return folder / "place"


def _link_to_a_fifo(folder: Path) -> Path:
    (folder / "place").symlink_to(_make_fifo(folder).rename(folder / "fifo"))
    return folder / "place"


def _make_socket(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(folder):  # a socket's path is short
        bound.bind("place")
    return folder / "place"


def _link_in_a_circle(folder: Path) -> Path:
    (folder / "place").symlink_to("place")
    return folder / "place"


def _removed_file(folder: Path) -> Path:
    file = os.open(folder / "place", os.O_CREAT)
    (folder / "place").unlink()
    return Path(f"/proc/self/fd/{file}")


def _pipe(folder: Path) -> Path:
    return Path(f"/proc/self/fd/{os.pipe()[1]}")


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (_make_fifo, "not a regular file"),
        (_link_to_a_fifo, "not a regular file"),
        (_make_socket, "not a regular file"),
        (_link_in_a_circle, "Too many levels of symbolic links"),
        pytest.param(_removed_file, "was removed", marks=LINUX),
        pytest.param(_pipe, "not a regular file", marks=LINUX),
    ],
)
def test_a_manifest_never_takes_the_place_of_what_is_no_file(
    make: Callable[[Path], Path], what: str, tmp_path: Path
) -> None:
    place = make(tmp_path)
    before = sorted((path.name, path.lstat().st_mode) for path in tmp_path.iterdir())
    for act in (check_writable, lambda path: write_manifest(path, {"x": 1})):
        with pytest.raises(ls.ConfigError, match=what):
            act(place)
    assert sorted((path.name, path.lstat().st_mode) for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("exists", [True, False], ids=["to a file", "dangling"])
def test_a_manifest_is_written_through_a_link(exists: bool, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "target.json"
    target.parent.mkdir()
    if exists:
        target.write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to("elsewhere/target.json")
    check_writable(link)
    write_manifest(link, {"x": 1})
    assert link.is_symlink()
    assert not target.is_symlink()
    assert json.loads(target.read_text()) == {"x": 1}


def test_a_link_into_a_folder_that_does_not_exist_is_found_before_the_load(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("none/target.json")
    with pytest.raises(ls.ConfigError, match=r"the folder .*none does not exist"):
        check_writable(tmp_path / "link.json")


def test_a_manifest_s_name_may_be_as_long_as_names_are_and_no_longer(tmp_path: Path) -> None:
    longest = tmp_path / ("m" * (os.pathconf(tmp_path, "PC_NAME_MAX") - len(".json")) + ".json")
    check_writable(longest)
    write_manifest(longest, {"x": 1})
    assert json.loads(longest.read_text()) == {"x": 1}
    with pytest.raises(ls.ConfigError, match="File name too long"):
        check_writable(manifest_path(longest, 0, 2))


def test_a_manifest_s_folder_must_exist(tmp_path: Path) -> None:
    check_writable(tmp_path / "m.json")
    with pytest.raises(ls.ConfigError, match="does not exist"):
        check_writable(tmp_path / "none" / "m.json")
    with pytest.raises(ls.ConfigError, match="is a folder"):
        check_writable(tmp_path)
