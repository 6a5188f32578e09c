"""The peers' benchmark runs at a tiny size, compares bytes, and names peers that cannot run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from safetensors import safe_open

from benchmarks import peers, peers_cases, peers_runs, peers_sides
from benchmarks.common import MIB, TensorShape, cached_share, files_of, make_checkpoint
from benchmarks.peers_cases import (
    CASES,
    DRAFT_SHARDS,
    IN_SHARDS,
    LOADER,
    PEERS,
    SAFE_OPEN,
    TENSORS_A_SHARD,
    Case,
    Side,
    draft_tensors,
    make_case,
)
from benchmarks.peers_runs import REFERENCE, Series, SideFailedError, differences
from benchmarks.peers_venv import Environments
from benchmarks.peers_works import Request

HERE = Environments(sys.executable, None)
TENSORS = (
    TensorShape("model.a", (10, 6)),
    TensorShape("model.b", (7,)),
    TensorShape("mtp.0.c", (9, 5, 4)),
    TensorShape("mtp.0.d", (1, 3)),
    TensorShape("mtp.e", (3, 1)),
    TensorShape("mtpx.f", (2, 2)),
)
WORKS = (
    *("peers_ours.owned", "peers_works.safe_open_cloned", "peers_works.safe_open_pread"),
    *("peers_works.load_file_cloned", "peers_works.load_file_pread", "peers_works.torch_reader"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("peers") / "checkpoint"
    make_checkpoint(folder, TENSORS, 3)
    return tuple(map(str, files_of(folder)))


@pytest.fixture
def no_group_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_cases, "DRAFT_SHARDS", 4)
    monkeypatch.setattr(peers_cases, "IN_SHARDS", (0, 1, 3))


# What each side hands over


def loaded(request: Request) -> dict[str, torch.Tensor]:
    found = asyncio.run(peers_sides._loaded(peers_sides.prepared(request)))
    assert not isinstance(found, int)
    return found


def request_of(files: tuple[str, ...], work: str, take: str) -> Request:
    return Request(work, files, take, 4 * MIB)


@pytest.mark.parametrize(
    ("take", "shape", "part"),
    [
        ("all", (8, 8), (8, 8)),
        ("rows", (8, 6), (2, 6)),
        ("rows", (9, 6), (3, 6)),
        ("rows", (3,), (1,)),
        ("rows", (1, 6), (1, 6)),
        ("columns", (8, 6), (8, 2)),
        ("columns", (8,), (8,)),
        ("columns", (8, 1), (8, 1)),
        ("columns", (), ()),
    ],
)
def test_a_slice_is_the_first_quarter_as_torch_chunks(take: str, shape: tuple[int, ...], part: tuple[int, ...]) -> None:
    request = Request("", (), take)
    assert request.part_of(torch.empty(shape)).shape == part
    if shape != part and request.dim is not None:
        assert torch.empty(shape).chunk(4, request.dim)[0].shape == part


@pytest.mark.parametrize("take", ["all", "rows", "columns", "draft"])
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_every_side_hands_over_what_safetensors_reads(
    work: str, take: str, files: tuple[str, ...], no_group_left: None
) -> None:
    if take in ("rows", "columns") and "load_file" in work:
        pytest.skip("no such side")
    right = peers_sides.digests_of(loaded(request_of(files, REFERENCE, take)), files)
    assert len(right) == (3 if take == "draft" else len(TENSORS))
    assert differences(right, peers_sides.digests_of(loaded(request_of(files, work, take)), files)) == []


def test_other_bytes_types_shapes_and_mapped_memory_are_told(files: tuple[str, ...]) -> None:
    kept = loaded(request_of(files, REFERENCE, "all"))
    right = peers_sides.digests_of(kept, files)
    with safe_open(files[0], framework="pt") as file:
        view = file.get_tensor("model.a")
    same = kept["model.a"]
    for other in (same + 1, same.view(torch.int16), same.reshape(60), view):
        (text,) = differences(right, peers_sides.digests_of({**kept, "model.a": other}, files))
        assert text.startswith(f"'model.a' is {other.dtype} {tuple(other.shape)} in ")
    assert "in a mapped file" in text
    del kept["model.a"]
    found = peers_sides.digests_of({**kept, "g": view.clone()}, files)
    assert [text.split(",")[0] for text in differences(right, found)] == ["'model.a' is missing", text_of_g(found)]


def text_of_g(found: dict[str, str]) -> str:
    return f"'g' is {found['g']}, not wanted".split(",")[0]


def test_a_draft_is_one_percent_in_three_shards() -> None:
    tensors = draft_tensors(64 * MIB)
    drafted = [number for number, tensor in enumerate(tensors) if tensor.name.startswith("mtp.")]
    assert {number // TENSORS_A_SHARD for number in drafted} == set(IN_SHARDS)
    assert len(tensors) == DRAFT_SHARDS * TENSORS_A_SHARD == len({tensor.name for tensor in tensors})
    assert sum(tensors[number].nbytes for number in drafted) == 0.01 * sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("name", CASES)
def test_cases_have_a_checkpoint_and_the_sides_that_were_asked_for(name: str, tmp_path: Path, few: None) -> None:
    case = make_case(name, tmp_path, 10 * MIB, 40, ["runai"])
    assert case.payload_bytes == pytest.approx(10 * MIB if name != "small" else 40 * 5 * 1024, rel=0.3)
    assert {side.peer for side in case.sides} == {"ours", "runai"}
    assert {side.peer for side in make_case(name, tmp_path, 10 * MIB, 40, PEERS).sides} == {"ours", *PEERS}
    labels = [side.label for side in make_case(name, tmp_path, 10 * MIB, 40, PEERS).sides]
    assert len(labels) == len(set(labels))


# What is measured


def test_memory_and_bytes_of_a_side_are_counted(files: tuple[str, ...]) -> None:
    def load() -> dict[str, torch.Tensor]:
        beside = torch.ones(48 * MIB, dtype=torch.uint8)
        return {"a": beside[: 16 * MIB].clone()}

    result = peers_sides.measure(load)
    assert (result.payload_bytes, result.tensors) == (16 * MIB, 1)
    assert 0 <= result.above_bytes < 64 * MIB
    assert result.cpu_s > 0
    assert result.versions.keys() == {"torch", "safetensors"} | others()
    assert peers_sides.measure(lambda: 5).payload_bytes == 5


def others() -> set[str]:
    return {name for name in ("fastsafetensors", "unifiedefficientloader") if importlib.util.find_spec(name)}


def test_a_page_cache_that_stays_in_another_state_is_an_error(
    files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_runs, "condition_memory", lambda nbytes: nbytes)
    case = Case("whole", "", "all", files, 100, (LOADER,))
    assert peers_runs.prepare(case, "warm") == (cached_share([Path(path) for path in files]), 250 + 256 * MIB)
    monkeypatch.setattr(peers_runs, "cached_share", lambda _: 0.5)
    with pytest.raises(RuntimeError, match=r"50\.0% of the files is cached where it is to be cold"):
        peers_runs.prepare(case, "cold")


@pytest.mark.processes
def test_a_side_runs_in_a_process_of_its_own(files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_runs, "condition_memory", lambda nbytes: nbytes)
    case = Case("whole", "", "all", files, 0, (LOADER,))
    result = peers_runs.run(Series(case, LOADER, "warm"), HERE)
    assert (result.tensors, result.payload_bytes) == (6, sum(tensor.nbytes for tensor in TENSORS))
    assert result.conditioned_bytes == 256 * MIB


@dataclasses.dataclass(frozen=True)
class _Scripted(Environments):
    """A process that does what the script says."""

    script: str = ""

    def command(self, where: str) -> list[str]:
        return [sys.executable, "-c", self.script]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param("import no_such_peer", "No module named 'no_such_peer'", id="import"),
        pytest.param("import os; os.abort()", "its process ended with -6", id="signal"),
        pytest.param("print('\"ready\"', flush=True); input(); raise ValueError('no')", "ValueError: no", id="later"),
    ],
)
def test_a_process_that_ends_says_why(
    script: str, reason: str, files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_runs, "condition_memory", lambda nbytes: nbytes)
    series = Series(Case("whole", "", "all", files, 0, ()), SAFE_OPEN, "warm")
    with pytest.raises(SideFailedError, match=reason):
        peers_runs.run(series, _Scripted("", None, script=script))


# Everything, in this process


class _Here:
    """A side that runs in this process, which costs no new import of torch."""

    def __init__(self, request: Request) -> None:
        self.request = request
        try:
            self.load = peers_sides.prepared(request)
        except ModuleNotFoundError as error:
            raise SideFailedError(f"{type(error).__name__}: {error}") from None
        self.said: list[Any] = ["ready"]

    def hear(self) -> Any:
        return self.said.pop()

    def go(self) -> None:
        if self.request.digests:
            peers_sides.check(self.load, self.request)
            self.said.append(None)
        else:
            self.said.append(dataclasses.asdict(peers_sides.measure(self.load)))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(request: Request, where: str, environments: Environments) -> Any:
        return contextlib.nullcontext(_Here(request))

    monkeypatch.setattr(peers_runs, "_started", started)
    monkeypatch.setattr(peers_runs, "condition_memory", lambda nbytes: nbytes)


def lines_of(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("|")]


ARGUMENTS = ("--rounds", "2", "--gib", "0.004", "--tensors", "40", "--cases", "whole", "draft", "--cache", "warm")


@pytest.mark.skipif(bool(others()), reason="a peer is installed here")
def test_every_round_of_every_side_is_in_the_document_and_absent_peers_are_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    in_this_process: None,
    few: None,
) -> None:
    monkeypatch.setattr(peers, "targets_of", lambda _: [])
    arguments = [*ARGUMENTS, "--folder", str(tmp_path), "--sides", "safetensors", "unified"]
    environments = Environments("", None, {"unified": "ERROR: no such version"})
    assert peers.main([*arguments, "--json"], lambda _: environments) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["wrong"] == []
    reason = "ERROR: no such version"
    wanted = ["unifiedefficientloader", "unifiedefficientloader, by name", "unifiedefficientloader, everything"]
    assert [text.split(", ", 1)[1] for text in document["failures"]] == [f"{label}: {reason}" for label in wanted]
    for each in document["series"]:
        absent = each["side"]["peer"] == "unified"
        assert each["failure"] == (reason if absent else "")
        assert len(each["rounds"]) == (0 if absent else 2)
    delivered = {each["rounds"][0]["tensors"] for each in document["series"] if each["rounds"]}
    assert delivered == {1, 73, 48}, "rings, everything, the draft"
    assert peers.main(arguments, lambda _: environments) == 1
    out = capsys.readouterr().out
    assert any(line.startswith(f"| unifiedefficientloader: {reason}") for line in lines_of(out))
    assert f"could not run: whole, unifiedefficientloader: {reason}" in out


@pytest.mark.skipif(bool(others()), reason="a peer is installed here")
def test_a_peer_that_cannot_be_imported_is_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], in_this_process: None, few: None
) -> None:
    arguments = [*ARGUMENTS, "--folder", str(tmp_path), "--sides", "fastsafetensors", "--cases", "draft"]
    assert peers.main(arguments, lambda _: HERE) == 1
    out = capsys.readouterr().out
    reason = "ModuleNotFoundError: No module named 'fastsafetensors'"
    assert any(line.startswith(f"| fastsafetensors, filtered: {reason}") for line in lines_of(out))
    text = f"draft, warm: times as fast as fastsafetensors, everything: not measured ({reason}), target at least 20"
    assert f"{text} (MISSED)" in out


def test_wrong_bytes_are_told_and_fail(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    in_this_process: None,
    few: None,
) -> None:
    monkeypatch.setattr(peers, "targets_of", lambda _: [])
    arguments = ["--rounds", "1", "--gib", "0.002", "--cases", "whole", "--cache", "warm", "--folder", str(tmp_path)]
    arguments += ["--sides", "safetensors"]
    assert peers.main(arguments, lambda _: HERE) == 0
    assert "bytes: the files', on every side" in capsys.readouterr().out
    path = files_of(next(tmp_path.iterdir()))[0]
    monkeypatch.setattr(peers_runs, "REFERENCE", "peers_ours.owned")
    right = peers_runs._digests

    def digests(case: Case, side: Side, *rest: Any) -> dict[str, str]:
        found = right(case, side, *rest)
        if side == SAFE_OPEN:
            found[next(iter(found))] = "other"
        return found

    monkeypatch.setattr(peers_runs, "_digests", digests)
    assert peers.main(arguments, lambda _: HERE) == 1
    with safe_open(path, framework="pt") as file:
        name = file.offset_keys()[0]
    assert f"WRONG: whole, warm, {SAFE_OPEN.label}: '{name}' is other, not torch.bfloat16" in capsys.readouterr().out


def test_a_loader_or_limit_that_fails_is_no_row_of_a_table(files: tuple[str, ...]) -> None:
    each = Series(Case("whole", "", "all", files, 0, ()), LOADER, "warm")
    with pytest.raises(RuntimeError, match=r"whole, warm, loader_service, owned: no"):
        peers_runs._fail(each, "no", HERE)
