"""Manifests as files: read with suspicion, refused with the file's name, the cause, and what to give instead."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from loader_service.checkpoint.dtypes import DTYPES
from loader_service.checkpoint.refusal import shown
from loader_service.errors import ConfigError

MAX_MANIFEST_BYTES: Final = 256 << 20
"""More than a million tensors; whatever is larger is another kind of file."""

SHA256: Final = re.compile(r"[0-9a-f]{64}")

_MOST_CHARACTERS: Final = 200


class ManifestFile:
    """One file that should be a manifest; `advice` says which files are. It raises ConfigError only. Blocking."""

    def __init__(self, path: Path, advice: str) -> None:
        self._path = path
        self._advice = advice

    def read(self) -> dict[str, object]:
        """The file's one JSON object, in its order. No key may be in an object of it twice."""
        text = self._text()
        try:
            top: object = json.JSONDecoder(object_pairs_hook=partial(_without_repeats, self)).decode(text)
        except (ValueError, RecursionError) as error:
            raise self.refusal(f"it is not JSON: {error}") from None
        if not isinstance(top, dict):
            raise self.refusal("it is no object of tensor names")
        return top

    def _text(self) -> str:
        path = self._path
        try:
            with open(path, "rb", opener=_without_waiting) as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise self.refusal("it is no regular file")
                if found.st_size > MAX_MANIFEST_BYTES:
                    raise self.refusal(f"it has {found.st_size} bytes, more than {MAX_MANIFEST_BYTES} are not read")
                return file.read(found.st_size).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise self.refusal("it is not UTF-8") from None
        except OSError as error:
            words = f"{path}: the manifest cannot be read: {error.strerror}; check the path and its rights"
            raise ConfigError(words, path=str(path), errno=error.errno) from error

    def refusal(self, cause: str, *, tensor: str | None = None) -> ConfigError:
        """The error to raise about what the file holds."""
        where = "" if tensor is None else f"tensor {shown(tensor)}: "
        words = f"{self._path}: no manifest: {where}{cause}; give {self._advice}"
        return ConfigError(words, path=str(self._path), tensor=None if tensor is None else tensor[:_MOST_CHARACTERS])


class Stored(NamedTuple):
    """What all manifests say of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


def stored_of(file: ManifestFile, name: str, value: Mapping[str, object]) -> Stored:
    """Of a tensor's entry. Raises ConfigError where one of the three is not what it must be."""
    dtype, shape, sha256 = value["dtype"], value["shape"], value["sha256"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        problem = "its dtype is no code of the format"
    elif not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        problem = "its shape is no list of whole numbers"
    elif not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
        problem = "its sha256 is not 64 hexadecimal digits in lower case"
    else:
        return Stored(dtype, tuple(shape), sha256)
    raise file.refusal(problem, tensor=name)


def dump(document: Mapping[str, object]) -> str:
    """A manifest as text, with a line for each of its tensors: ASCII, whatever they are called."""
    lines = []
    for key, value in document.items():
        if isinstance(value, Mapping):
            inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}" if value else f" {json.dumps(key)}: {{}}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _without_waiting(path: str, flags: int) -> int:
    """Opens a pipe, too, that nobody writes to."""
    return os.open(path, flags | os.O_NONBLOCK)


def _without_repeats(file: ManifestFile, pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise file.refusal(f"{shown(name)} is in it twice")
        found[name] = value
    return found
