"""Shared by this folder's tests: makes configurations and collects what a wrong one reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from loader_service.config.schema import ServiceConfig
from loader_service.config.yaml_file import config_from_dict, load_config
from loader_service.errors import ConfigError


def minimal(**top: object) -> dict[str, object]:
    """A valid configuration with the given top-level keys besides."""
    return {"checkpoint": {"path": "/models/m"}, "loads": {"target": {}}, **top}


def with_rules(*rules: object, mesh: object = None) -> dict[str, object]:
    data = minimal(loads={"target": {"rules": list(rules)}})
    return data if mesh is None else {**data, "mesh": mesh}


def accepted(data: dict[str, object]) -> ServiceConfig:
    return config_from_dict(data)


def problems(data: object) -> list[str]:
    """The lines of the error that a dictionary gives."""
    with pytest.raises(ConfigError) as caught:
        config_from_dict(data)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2
    return str(caught.value).split("\n")


def write(folder: Path, text: str) -> Path:
    file = folder / "service.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def file_problems(folder: Path, text: str) -> list[str]:
    """The lines of the error that a file gives, without the file's name: "4: reads.threads: ..."."""
    file = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert caught.value.path == str(file)
    lines = str(caught.value).split("\n")
    assert all(line.startswith(f"{file}:") for line in lines)
    return [line.removeprefix(f"{file}:").strip() for line in lines]
