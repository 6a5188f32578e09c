"""`plan --tensors`: what it lists is what the ranks' plans hold, and the list is never held as a whole."""

from __future__ import annotations

import io
import itertools
import json
import sys
from pathlib import Path

import pytest

from loader_service.cli import app, plan_tensors
from loader_service.cli.plan_tensors import print_json, tensor_parts
from tests.cli.support import write_config, write_small_checkpoint
from tests.planning.making import one_shard, plan_of

Capture = pytest.CaptureFixture[str]

TENSORS = (
    ("embed", "BF16", (7, 6)),
    ("layers.0.qkv", "BF16", (48, 4)),
    ("layers.0.experts.0.w", "F32", (5,)),
    ("layers.0.experts.5.w", "F32", (6,)),
    ("layers.0.norm", "F32", (1,)),
    ("layers.3.down", "F8_E4M3", (4, 9)),
    ("layers.3.packed", "F4", (4, 16)),
    ("nothing", "F16", (0, 3)),
    ("scalar", "F32", ()),
    ("table", "F32", (10, 2)),
)
RULES = [
    {"match": "layers.*", "assign": {"axis": "pp", "index": r"layers\.(\d+)\.", "boundaries": [0, 2, 4]}},
    {"match": "*.experts.*", "assign": {"axis": "tp", "index": r"experts\.(\d+)\."}},
    {"match": "embed", "assign": {"axis": "pp", "to": [-1]}, "split": {"axis": "tp", "dim": 0}},
    {"match": "*.qkv", "split": {"axis": "tp", "dim": 0, "sections": [4, 1, 1], "units": [8, 2, 2]}},
    {"match": "*.norm", "split": {"axis": "tp", "dim": 0}},
    {"match": "*.down", "split": {"axis": "tp", "dim": 1}},
    {"match": "*.packed", "split": {"axis": "tp", "dim": 1}},
    {"match": "nothing", "split": {"axis": "tp", "dim": 1}},
    {"match": "table", "host_resident": {"layout": "per_rank"}, "split": {"axis": ["pp", "tp"], "dim": 0}},
]


def test_what_is_listed_for_a_rank_is_what_its_plan_takes_of_every_tensor() -> None:
    plan = plan_of(one_shard(*TENSORS), {"rules": RULES}, {"pp": 2, "tp": 2})
    listed = list(tensor_parts(plan))
    assert {tensor.name for tensor in listed} == {name for name, _, _ in TENSORS}
    for rank in range(plan.world_size):
        own = plan.for_rank(rank)
        mine = {tensor.name: (tensor, part) for tensor in listed for part in tensor.parts if rank in part.ranks}
        assert list(mine) == [own.name(i) for i in range(len(own))]
        assert [tensor.name for tensor in tensor_parts(plan, rank)] == list(mine)
        for i, (tensor, part) in enumerate(mine.values()):
            assert (part.shape, tensor.nbytes(part)) == (own.header_shape(i), own.nbytes(i))
            if tensor.bits >= 8:  # else slices count the header's elements, and the spec counts bytes
                taken = [source for source, _ in own.spec(i).parts]
                assert [tuple(itertools.starmap(slice, chosen)) for chosen in itertools.product(*part.slices)] == taken


def test_ranks_that_take_the_same_stand_together_and_the_rules_that_decided_are_named() -> None:
    plan = plan_of(one_shard(*TENSORS), {"rules": RULES}, {"pp": 2, "tp": 2})
    by_name = {tensor.name: tensor for tensor in tensor_parts(plan)}
    assert [part.ranks for part in by_name["scalar"].parts] == [(0, 1, 2, 3)]
    assert by_name["scalar"].deciding == ()
    assert [part.ranks for part in by_name["layers.0.norm"].parts] == [(0, 1)], "of size 1: whole, on its stage"
    assert [part.ranks for part in by_name["layers.0.experts.5.w"].parts] == [(1,)]
    assert by_name["layers.0.experts.5.w"].deciding == ("loads.target.rules[0].assign", "loads.target.rules[1].assign")
    assert by_name["layers.0.qkv"].parts[1].slices == (((16, 32), (36, 40), (44, 48)), ((0, 4),))
    assert by_name["table"].layout == "per_rank"
    assert by_name["table"].deciding[-1] == "loads.target.rules[8].host_resident"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return write_config(tmp_path / "c.yaml", write_small_checkpoint(tmp_path / "checkpoint"), ranks=2)


def test_lines_tell_part_bytes_file_and_rule_and_one_rank_has_its_own(config: Path, capsys: Capture) -> None:
    assert app.run(["plan", str(config), "--load", "all", "--tensors"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "embed.weight BF16 [7, 6] rank 1 [3:7, :] 48 bytes a.safetensors rules[0].split embed.*" in lines
    assert "down.scale F8_E8M0 [4, 2] all ranks whole 8 bytes b.safetensors no rule" in lines
    assert "experts.1.w F32 [5] rank 1 whole 20 bytes a.safetensors rules[1].assign experts.*" in lines
    assert app.run(["plan", str(config), "--load", "draft", "--tensors", "--rank", "1"]) == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if "safetensors" in line)
    assert " ".join(line.split()) == "draft.norm F32 [3] rank 1 whole 12 bytes b.safetensors no rule"
    assert "7 tensors of the checkpoint are not in this load" in out


def test_json_has_the_plan_and_the_tensors_beside_it(config: Path, capsys: Capture) -> None:
    assert app.run(["plan", str(config), "--load", "all", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert app.run(["plan", str(config), "--load", "all", "--json", "--tensors"]) == 0
    found = json.loads(capsys.readouterr().out)
    tensors, left_out = found.pop("tensors"), found.pop("left_out")
    assert (found, left_out) == (plain, 0)
    taken = [part["bytes"] * len(part["ranks"]) for tensor in tensors for part in tensor["parts"]]
    assert sum(taken) == sum(rank["payload_bytes"] for rank in plain["ranks"])
    (entry,) = (tensor for tensor in tensors if tensor["name"] == "down.weight")
    assert entry["rules"] == [{"rule": "loads.all.rules[2].split", "match": "down.weight"}]
    assert (entry["shape"], entry["file"], entry["host_resident"]) == ([4, 7], "b.safetensors", None)
    assert entry["parts"][0] == {"ranks": [0], "slices": [[[0, 4]], [[0, 3]]], "shape": [4, 3], "bytes": 12}


@pytest.mark.parametrize(("args", "text"), [(["--rank", "0"], "--tensors"), (["--tensors", "--rank", "2"], "rank 2")])
def test_a_rank_alone_or_one_that_is_not_there_is_refused_before_anything_is_printed(
    args: list[str], text: str, config: Path, capsys: Capture
) -> None:
    assert app.run(["plan", str(config), "--load", "all", *args]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert text in printed.err


def test_a_long_list_is_written_as_it_is_made_and_ends_with_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(one_shard(*((f"layers.{i}.q", "U8", (4,)) for i in range(2000))), None, {"tp": 4})
    asked: list[int] = []

    class Counted(plan_tensors._Parts):
        def __call__(self, position: int) -> tuple[plan_tensors.Part, ...]:
            asked.append(position)
            return super().__call__(position)

    class Reader(io.StringIO):
        """One that goes away after two writes."""

        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            if self.writes > 2:
                raise BrokenPipeError
            return len(text)

    monkeypatch.setattr(plan_tensors, "_Parts", Counted)
    monkeypatch.setattr(sys, "stdout", Reader())
    print_json(plan, (), None)
    assert 0 < len(asked) < 1000
