"""The files that an operator starts from, as real parsers read them, and the programs that parse them."""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE, KUBERNETES, MODEL = DEPLOY / "compose.yaml", DEPLOY / "kubernetes.yaml", DEPLOY / "model.yaml"
UNIT = DEPLOY / "loader-service@.service"


def program(name: str) -> str:
    """A program that the test extra installs, as a package's binary."""
    return str(Path(sysconfig.get_path("scripts")) / name)


@cache
def compose() -> dict[str, Any]:
    """compose.yaml as Docker Compose itself understands it: variables filled in, short forms spelled out."""
    done = subprocess.run(
        [program("docker-compose"), "-f", str(COMPOSE), "config", "--format", "json"],
        env={"PATH": os.defpath, "HOME": "/nonexistent", "ENGINE_IMAGE": "engine"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    resolved: dict[str, Any] = json.loads(done.stdout)
    return resolved


@cache
def kubernetes() -> dict[str, dict[str, Any]]:
    """The manifests of kubernetes.yaml by their kind."""
    documents = list(yaml.safe_load_all(KUBERNETES.read_text()))
    assert len(documents) == len({document["kind"] for document in documents})
    return {document["kind"]: document for document in documents}


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = kubernetes()["Deployment"]["spec"]["template"]["spec"]
    return spec


def sidecar() -> dict[str, Any]:
    (found,) = pod()["initContainers"]
    return dict(found)


def engine() -> dict[str, Any]:
    (found,) = pod()["containers"]
    return dict(found)


@cache
def unit() -> configparser.ConfigParser:
    """The systemd unit. A key or section that stands there twice is an error."""
    parser = configparser.ConfigParser(interpolation=None, delimiters="=", comment_prefixes="#", strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # keys of units are case-sensitive
    parser.read_string(UNIT.read_text())
    return parser


@cache
def dockerfile() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def last_stage() -> dict[str, str]:
    """What the image itself says. Of an instruction that stands there several times the last one, which decides."""
    instructions = dockerfile()
    start = max(place for place, (name, _) in enumerate(instructions) if name == "FROM")
    return dict(instructions[start:])
