"""torchrun on two hosts: the command line, and a script with gloo across them and collectives of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.support import write_config, write_small_checkpoint
from tests.e2e import forty
from tests.hosts.host import need_hosts, two_hosts
from tests.hosts.reducing import BESIDE
from tests.hosts.torchrun import Torchrun
from tests.support.checkpoints import sha256

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True, scope="module")
def possible() -> None:
    need_hosts()


def test_ranks_of_two_hosts_verify_write_manifests_and_count_as_two_nodes(tmp_path: Path) -> None:
    checkpoint = write_small_checkpoint(tmp_path / "checkpoint")
    copy = shutil.copytree(checkpoint, tmp_path / "copy")  # where a checkpoint lies is a host's own affair
    configs = [
        write_config(tmp_path / f"{node}.yaml", folder, ranks=4, reads={"threads_per_node": 6})
        for node, folder in enumerate((checkpoint, copy))
    ]
    options = ["--load", "all", "--verify", "--json", "--manifest", str(tmp_path / "m.json")]
    programs = [["-m", "loader_service", "load", str(config), *options] for config in configs]
    with two_hosts() as hosts:
        ended = Torchrun(hosts, programs, tmp_path).end()
    assert ended.codes == [0, 0], ended.logs
    assert [rank.code for rank in ended.ranks] == [0] * 4
    assert [rank.out for rank in ended.ranks[1:]] == [""] * 3
    reports = ended.ranks[0].document["ranks"]
    assert [(report["rank"], report["world_size"], report["verified"]) for report in reports] == [
        (rank, 4, True) for rank in range(4)
    ]
    for report in reports:
        assert report["policies"]["threads"]["reason"] == "reads.threads_per_node is 6 and 2 ranks are on this node"
    assert_manifests(tmp_path, load_file(checkpoint / "a.safetensors")["embed.weight"])


def assert_manifests(folder: Path, embedding: torch.Tensor) -> None:
    """Each rank has its rows, and those of all are the whole."""
    rows = [0, 1, 3, 5, 7]
    for rank in range(4):
        manifest = json.loads((folder / f"m.rank{rank}.json").read_text())
        part = embedding[rows[rank] : rows[rank + 1]].contiguous()
        assert manifest["embed.weight"]["shape"] == list(part.shape)
        assert manifest["embed.weight"]["sha256"] == sha256(part)


def test_a_script_loads_with_all_ranks_and_with_its_hosts_beside_its_own_reductions(tmp_path: Path) -> None:
    checkpoint = forty.write(tmp_path / "checkpoint")
    program = ["-m", "tests.hosts.reducing", str(checkpoint.folder), str(tmp_path)]
    with two_hosts() as hosts:
        ended = Torchrun(hosts, [program, program], tmp_path, rendezvous="c10d").end()
    assert [rank.code for rank in ended.ranks] == [0] * 4, [rank.err for rank in ended.ranks]
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.tensors}
    for rank in range(4):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (told["wrong"], told["reductions"] > BESIDE) == (0, True)
        assert told["whole"] == {name: sha256(tensor) for name, tensor in tensors.items()}
        halves = {name: torch.chunk(tensor, 2)[rank % 2] for name, tensor in tensors.items()}
        assert told["rows"] == {name: sha256(half) for name, half in halves.items()}
