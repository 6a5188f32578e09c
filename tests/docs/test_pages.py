"""Pages that a reader can follow from the first line to the last: every block of them does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import loader_service as ls
from loader_service.cli.demo_checkpoint import make_demo_checkpoint
from tests.docs.documents import ROOT
from tests.docs.reader import Reader

HOW_TO = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/how-to").glob("*.md"))
CHECKPOINT_BYTES = 3_000_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.processes
def test_the_quickstart_can_be_followed(folder: Path) -> None:
    reader = Reader("docs/quickstart.md", folder)
    reader.follow()
    assert len(reader.followed) > 10


@pytest.mark.processes
@pytest.mark.parametrize("page", HOW_TO)
def test_a_how_to_can_be_followed(page: str, folder: Path, demo: Path) -> None:
    (folder / ".demo").symlink_to(demo)
    ls.clear_weight_cache()
    reader = Reader(page, folder)
    reader.follow()
    ls.clear_weight_cache()
    assert reader.followed


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `loader-service demo` leaves, in small."""
    folder = tmp_path_factory.mktemp("demo")
    make_demo_checkpoint(folder / "checkpoint", total_bytes=CHECKPOINT_BYTES)
    (folder / "demo.yaml").write_text((ROOT / "loader_service/cli/demo.yaml").read_text())
    return folder


def test_the_commands_of_operations_run(folder: Path, demo: Path) -> None:
    (folder / ".demo").symlink_to(demo)
    (folder / "checkpoint").symlink_to(demo / "checkpoint")
    loads = {"target": {"skip": ["mtp.*"]}, "draft": {"key_prefixes": ["mtp.0.", "mtp.1."]}}
    (folder / "model.yaml").write_text(yaml.safe_dump({"checkpoint": {"path": "checkpoint"}, "loads": loads}))
    reader = Reader("docs/operations.md", folder)
    reader.follow("sh")
    assert reader.followed
