"""The peers' own environments: what is installed into them, by pip, and what could not be.

One virtual environment has torch and the peers; the pre-release of safetensors lies in a folder that is put in front of
its packages, so that torch is installed once. Versions are those of the two `peers-requirements` files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = Path(__file__).with_name("peers-requirements.txt")
PRE_REQUIREMENTS = Path(__file__).with_name("peers-requirements-pre.txt")
BASE = ("torch", "numpy", "safetensors")
# Without their dependencies: some would bring another torch. Each alone, so that one that is not to be had is one less.
PEERS = {
    "fastsafetensors": ("fastsafetensors",),
    "runai": ("runai-model-streamer", "humanize"),
    "unified": ("unifiedefficientloader",),
}
STAMP = "peers.txt"
INSTALL_TIMEOUT_S = 1800.0


class NotOursError(Exception):
    """A folder holds something else than an environment that was made here: it is left alone."""


@dataclass(frozen=True, slots=True)
class Environments:
    """Where Python processes of the sides run: "own" (this one), "peers", "pre" (the peers', the pre-release in front).

    `missing` has the reasons of what could not be installed, by the peer's name.
    """

    python: str
    pre: Path | None
    missing: dict[str, str] = field(default_factory=dict)

    def command(self, where: str) -> list[str]:
        return [sys.executable if where == "own" else self.python, "-m", "benchmarks.peers_sides"]

    def variables(self, where: str) -> dict[str, str]:
        """The environment variables of such a process, which runs in the repository's root."""
        variables = dict(os.environ)
        if where != "own":
            ahead = [str(self.pre)] if where == "pre" and self.pre is not None else []
            variables["PYTHONPATH"] = os.pathsep.join([*ahead, str(ROOT)])
        return variables


def make_environments(folder: Path) -> Environments:
    """Makes them in `folder` unless they are there, of the same versions; what could not be installed is tried again.

    Raises `NotOursError` where the folder exists and was not made here.
    """
    python, pre, stamp = folder / "bin" / "python", folder / "pre-release", folder / STAMP
    want = f"Python {sys.version.split()[0]}\n{REQUIREMENTS.read_text()}{PRE_REQUIREMENTS.read_text()}"
    if stamp.exists() and stamp.read_text() == want:
        return Environments(str(python), pre)
    if folder.exists() and any(folder.iterdir()) and not stamp.exists():
        raise NotOursError(f"{folder} exists and is no environment of this benchmark: give another one with --venv")
    print(f"making the peers' environment in {folder}: some minutes", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    stamp.write_text("not finished\n")
    missing = _install(folder, python, pre)
    if not missing:
        stamp.write_text(want)
    return Environments(str(python), pre, missing)


def _install(folder: Path, python: Path, pre: Path) -> dict[str, str]:
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    pinned = ["-c", str(REQUIREMENTS)]
    if not python.exists() and (reason := _run([sys.executable, "-m", "venv", str(folder)])):
        return dict.fromkeys(("safetensors", *PEERS, "torch", "pre-release"), reason)
    if reason := _run([*pip, *pinned, *BASE]):
        return dict.fromkeys(("safetensors", *PEERS, "torch", "pre-release"), reason)
    missing = {}
    for peer, packages in PEERS.items():
        if reason := _run([*pip, "--no-deps", *pinned, *packages]):
            missing[peer] = reason
    shutil.rmtree(pre, ignore_errors=True)
    if reason := _run([*pip, "--no-deps", "--target", str(pre), "-r", str(PRE_REQUIREMENTS)]):
        missing["pre-release"] = reason
    return missing


def _run(command: list[str]) -> str:
    """Why it failed, in its last line of errors; nothing where it did not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if not done.returncode:
        return ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
    return errors[-1] if errors else f"{command[0]} ended with {done.returncode}"
