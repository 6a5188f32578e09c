"""The examples of launchers and executors in operations.md run as they stand, with real processes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.documents import ROOT, Block, blocks, shell_lines
from tests.support.checkpoints import write_checkpoint
from tests.support.ranks import Rank, free_port, run_ranks

pytestmark = pytest.mark.processes

EXAMPLES = {
    word: next(block for block in blocks("docs/operations.md", "python") if word in block.text)
    for word in ("init_process_group", "multiprocessing", "ray")
}
NAMES = ["a", "b", "c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("executors")
    write_checkpoint(folder / "checkpoint", {"model.safetensors": dict.fromkeys(NAMES, ("BF16", (3, 2)))})
    (folder / "model.yaml").write_text(yaml.safe_dump({"checkpoint": {"path": "checkpoint"}, "loads": {"target": {}}}))
    return folder


def start(block: Block, folder: Path) -> list[str]:
    """The lines that the example prints as a program, at a free port instead of its own."""
    port = next(word for word in ("29517", "29518") if word in block.text)
    program = folder / "program.py"
    program.write_text(block.text.replace(port, str(free_port())))
    ended = subprocess.run(
        [sys.executable, str(program)],
        cwd=folder,
        env={
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/docs/stand_in")]),
            "OMP_NUM_THREADS": "1",
            "RES_OPTIONS": "timeout:1 attempts:1",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_a_multiprocessing_executor(folder: Path) -> None:
    lines = start(EXAMPLES["multiprocessing"], folder)
    assert sorted(lines) == [f"{rank} {name}" for rank in range(2) for name in NAMES]


def test_a_ray_executor(folder: Path) -> None:
    assert start(EXAMPLES["ray"], folder) == ["[(0, 3), (1, 3)]"]


def run_as_torchrun_does(rank: Rank, text: str, folder: str) -> list[tuple[object, ...]]:
    host, _, port = rank.address.rpartition(":")
    os.environ |= {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.world_size), "MASTER_ADDR": host, "MASTER_PORT": port}
    os.chdir(folder)
    printed: list[tuple[object, ...]] = []
    exec(text, {"print": lambda *words: printed.append(words)})
    return printed


def test_an_engine_under_torchrun(folder: Path) -> None:
    outcomes = run_ranks(run_as_torchrun_does, 2, EXAMPLES["init_process_group"].text, str(folder))
    assert [outcome.get() for outcome in outcomes] == [[(rank, name) for name in NAMES] for rank in range(2)]


def test_the_mpirun_line_sets_where_ranks_meet() -> None:
    """What mpirun then starts is run in tests/e2e/test_who_takes_part.py, with the variables that it sets."""
    (line,) = (shlex.split(line) for line in shell_lines("docs/operations.md") if line.startswith("mpirun"))
    assert {word.partition("=")[0] for word in line if word.startswith("MASTER_")} == {"MASTER_ADDR", "MASTER_PORT"}
    assert line[line.index("loader-service") :] == ["loader-service", "load", "model.yaml", "--load", "target"]
