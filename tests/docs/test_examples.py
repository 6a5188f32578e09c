"""The examples in README and docs run as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open

import loader_service as ls
from loader_service.cli.app import run
from loader_service.cli.demo_checkpoint import make_demo_checkpoint
from tests.docs.documents import ROOT, Block, blocks, shell_lines
from tests.docs.reader import execute

CHECKPOINT_BYTES = 3_000_000
LOADS = {"target": {"skip": ["mtp.*"]}, "draft": {"key_prefixes": ["mtp.0.", "mtp.1."]}}
API = "docs/python-api.md"
FIRST, *OTHERS = blocks(API, "python")
DRAFT_TENSORS = 66
TABLES = "docs/host-tables.md"
TABLE_SHARD = "model-00002-of-00005.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the documents assume it: the demo's checkpoint and configuration, and one for one rank."""
    folder = tmp_path_factory.mktemp("documents")
    make_demo_checkpoint(folder / ".demo/checkpoint", total_bytes=CHECKPOINT_BYTES)
    (folder / ".demo/demo.yaml").write_text((ROOT / "loader_service/cli/demo.yaml").read_text())
    (folder / "checkpoint").symlink_to(folder / ".demo/checkpoint")
    (folder / "model.yaml").write_text(yaml.safe_dump({"checkpoint": {"path": "checkpoint"}, "loads": LOADS}))
    for path, text in written_files("README.md").items():
        (folder / path).write_text(text)
    return folder


def written_files(document: str) -> dict[str, str]:
    """The files that a document's shell blocks write, with their contents."""
    text = "".join(block.text for block in blocks(document, "sh"))
    return dict(re.findall(r"^cat > (\S+) <<'YAML'\n(.*?)^YAML$", text, re.MULTILINE | re.DOTALL))


def test_the_example_of_an_error_prints_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    execute(FIRST, API, names)
    (block,) = (block for block in OTHERS if "ls.ConfigError" in block.text)
    execute(block, API, names)
    printed = capsys.readouterr().out.strip().splitlines()[-1]
    assert printed.startswith("2 no load is named")
    assert printed.split(";")[0] in block.text


@pytest.mark.parametrize("block", [FIRST, *OTHERS], ids=lambda block: f"line-{block.line}")
def test_an_api_example_runs(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    execute(FIRST, API, names)
    if block is not FIRST:
        execute(block, API, names)


@pytest.mark.parametrize("layout", ["per_rank", "shared"])
@pytest.mark.parametrize("block", blocks(TABLES, "python"), ids=lambda block: f"line-{block.line}")
def test_an_example_of_the_tables_runs_with_the_configuration_shown(
    block: Block, layout: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shown,) = blocks(TABLES, "yaml")
    document = yaml.safe_load(shown.text)
    (rule,) = document["loads"]["target"]["rules"]
    assert (document["mesh"], document["staging"]["pin"]) == ({"tp": 4}, "auto")
    rule["host_resident"]["layout"] = layout
    here = {"checkpoint": {"path": str(folder / "checkpoint")}, "mesh": {"tp": 1}, "staging": {"pin": "never"}}
    (tmp_path / "tables.yaml").write_text(yaml.safe_dump(document | here))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    execute(block, TABLES, names)
    found = [value.tensor for value in names.values() if isinstance(value, ls.HostTable)]
    found += [shard for shard in (names.get("shard"),) if isinstance(shard, torch.Tensor)]
    assert found
    with safe_open(folder / "checkpoint" / TABLE_SHARD, framework="pt") as file:
        tables = [file.get_tensor(name) for name in file.keys() if ".engram.embed." in name]  # noqa: SIM118
    for tensor in found:
        (stored,) = (table for table in tables if (table.dtype, table.shape) == (tensor.dtype, tensor.shape))
        assert torch.equal(tensor.view(torch.uint8), stored.view(torch.uint8))


def test_the_api_examples_use_every_form_of_consumption() -> None:
    text = "".join(block.text for block in OTHERS)
    for form in ("load.batches()", "load.into(", "ls.iter_weights(", "LoaderService.blocking(", "service.plan("):
        assert form in text, form


def test_the_readme_program_reads_only_the_draft(folder: Path) -> None:
    (program,) = blocks("README.md", "python")
    ended = subprocess.run(
        [sys.executable, "-c", program.text],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert ended.returncode == 0, ended.stderr
    *tensors, summary = ended.stdout.splitlines()
    assert len(tensors) == DRAFT_TENSORS
    assert all(line.startswith(("mtp.0.", "mtp.1.")) for line in tensors)
    assert summary.startswith(f"{DRAFT_TENSORS} tensors, ")
    assert summary.endswith("('model-00003-of-00005.safetensors', 'model-00004-of-00005.safetensors')")
    assert "Traceback" not in ended.stderr


def commands(document: str, program: str) -> list[list[str]]:
    """The arguments of a program wherever it is called in a document's shell blocks."""
    words = [shlex.split(line, comments=True) for line in shell_lines(document) if line.strip()]
    return [line[1:] for line in words if line and line[0] == program]


README_COMMANDS = [args for args in commands("README.md", "loader-service") if args != ["demo"]]


@pytest.mark.parametrize("args", README_COMMANDS, ids=" ".join)
@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_a_readme_command_runs(
    args: list[str], more: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert run([*args, *more]) == 0
    assert capsys.readouterr().out


def test_following_the_readme_leaves_nothing_in_a_clone_that_git_does_not_ignore() -> None:
    written = written_files("README.md")
    assert written
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert all(f"{Path(path).parts[0]}/" in ignored for path in written)


def test_the_readme_shows_every_command() -> None:
    shown = {args[0] for args in commands("README.md", "loader-service")}
    assert shown == {"inspect", "plan", "load", "manifest", "bench", "compare", "demo", "schema"}


def test_the_torchrun_line_names_what_the_demo_makes() -> None:
    (line,) = commands("README.md", ".venv/bin/torchrun")
    assert line[line.index("-m") + 1 :] == [
        "loader_service",
        *shlex.split("load .demo/demo.yaml --load target --verify"),
    ]
    assert (ROOT / "loader_service/cli/demo.yaml").is_file()


def test_a_broken_example_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    wrong = Block("python", "async with ls.LoaderService(config) as service:\n    await service.plan('no such')\n", 7)
    names: dict[str, object] = {}
    execute(FIRST, API, names)
    with pytest.raises(ls.ConfigError, match="no such"):
        execute(wrong, API, names)
