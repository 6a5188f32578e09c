"""The reference parser (safetensors), typed as these tests use it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from safetensors import SafetensorError, deserialize, safe_open

Meaning: TypeAlias = Mapping[str, tuple[str, tuple[int, ...], bytes]]
"""What a file holds: name -> (dtype code, shape, the tensor's bytes)."""


def reference_meaning(file: bytes) -> Meaning | None:
    """The reference's reading of a whole file in memory; None where it refuses it."""
    try:
        tensors = deserialize(file)  # type: ignore[no-untyped-call]
    except SafetensorError:
        return None
    return {name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"])) for name, tensor in tensors}


def reference_opens(path: Path) -> tuple[set[str], dict[str, str]] | None:
    """Names and metadata of a file on disk as the reference opens it; None where it refuses to."""
    try:
        with safe_open(path, framework="np") as opened:
            return set(opened.keys()), opened.metadata() or {}
    except (SafetensorError, OSError):  # OSError: an empty file cannot be mapped
        return None
