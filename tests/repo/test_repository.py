"""What holds for the repository as a whole: entry points, pins, sizes, what it must not name."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MADE = {".git", ".venv", ".demo", "build", "dist", "__pycache__", "node_modules"}
MADE_SUFFIXES = ("_cache", ".egg-info", ".hypothesis")


def own_files() -> list[Path]:
    """The project's text files, without what is made or fetched."""
    found: list[Path] = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in MADE and not name.endswith(MADE_SUFFIXES)]
        kept = [name for name in names if name != ".git" and not name.endswith((".pyc", ".safetensors"))]
        found += [Path(folder) / name for name in kept]
    return found


def requirements(*groups: str) -> list[Requirement]:
    project = PROJECT["project"]
    texts = list(PROJECT["build-system"]["requires"]) + list(project["dependencies"])
    for group in groups:
        texts += project["optional-dependencies"][group]
    return [Requirement(text) for text in texts if not text.startswith(project["name"])]


def pins() -> dict[str, str]:
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    found: dict[str, str] = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, separator, version = line.partition("==")
            assert separator, f"not an exact pin: {line}"
            assert canonicalize_name(name) not in found, f"pinned twice: {name}"
            found[canonicalize_name(name)] = version
    return found


def test_every_dependency_is_pinned_within_its_range() -> None:
    pinned = pins()
    for requirement in requirements("test", "dev"):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(version), f"{requirement} does not admit the pinned {version}"


def test_runtime_dependencies_leave_room() -> None:
    exact = [str(needed) for needed in requirements() if any(part.operator == "==" for part in needed.specifier)]
    assert exact == []


def test_package_modules_stay_readable() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in (ROOT / "loader_service").rglob("*.py")
    }
    assert len(lengths) > 10
    assert {name: length for name, length in lengths.items() if length > 420} == {}


FORBIDDEN = {
    "a registry's host": r"\b(?:[\w-]+\.)*(?:pypi\.org|pythonhosted\.org|pytorch\.org|npmjs\.\w+|debian\.org)\b",
    "a path of one machine": r"(?<![\w.])/(?:root|work|opt/wheels|opt/pypi\S*|tmp/(?:venv|build))\b",
    "a folder outside the project": r"\.\./shared\b",
    "something left to do": r"\b(?:TODO|FIXME|XXX)\b",
}


def test_no_file_names_a_registry_host_or_one_machines_path() -> None:
    findings = []
    files = [path for path in own_files() if path != Path(__file__)]
    assert len(files) > 20
    for path in files:
        text = path.read_text(errors="replace")
        for what, pattern in FORBIDDEN.items():
            findings += [f"{path.relative_to(ROOT)}: {what}: {match.group()}" for match in re.finditer(pattern, text)]
    assert findings == []


def test_ci_runs_on_its_own_and_stops_at_the_first_failure() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    subprocess.run(["bash", "-n", str(script)], check=True)
    for target in ("lint", "test", "demo", "package"):
        assert re.search(rf"^make .*\b{target}\b", text, re.MULTILINE), target
    assert "|| true" not in text


def test_make_without_a_target_lists_every_target() -> None:
    shown = subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory"], capture_output=True, text=True, check=True
    )
    listed = set(re.findall(r"^  make (\w+)", shown.stdout, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert listed == set(phony.group(1).split())


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documents_say_how_to_start(document: str) -> None:
    text = (ROOT / document).read_text()
    assert "make demo" in text
    assert "make test" in text


def test_hooks_come_from_the_project_and_fetch_nothing() -> None:
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    hooks = repos[0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    assert [hook["entry"].split()[0] for hook in hooks] == [
        ".venv/bin/ruff", ".venv/bin/ruff", ".venv/bin/mypy", ".venv/bin/lint-imports",
    ]  # fmt: skip


def test_console_script_and_licence_are_what_the_package_names() -> None:
    project = PROJECT["project"]
    assert project["scripts"] == {"loader-service": "loader_service.cli.app:main"}
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
