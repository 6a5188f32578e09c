"""The manifest of a checkpoint: what `manifest` writes, and `load --against` and `compare` read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loader_service.checkpoint.dtypes import DTYPES
from loader_service.checkpoint.refusal import shown
from loader_service.cli.checksums import ALL, Cuts, cuts_of
from loader_service.cli.manifest_json import SHA256, ManifestFile, stored_of
from loader_service.planning.storage import storage_form

VERSION: Final = 1
ADVICE: Final = "a file that `loader-service manifest` has written"

_HEX_CRC: Final = 8  # digits of one CRC-32
_CRCS: Final = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: its file's base name, and dtype and shape as the header has them. `crc32` has for each dimension that
    is cut the checksums of its parts, 8 hexadecimal digits each, and for `ALL` that of the whole."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    crc32: Mapping[int, str]

    @property
    def cuts(self) -> tuple[Cuts, ...]:
        """How it is cut: see `checksums.cuts_of`."""
        return stored_cuts(self.dtype, self.shape)

    def checksum(self, cuts: Cuts, part: int) -> int:
        """The checksum of one part."""
        return int(self.crc32[cuts.dim][part * _HEX_CRC : (part + 1) * _HEX_CRC], 16)

    def as_dict(self) -> dict[str, object]:
        crc32 = {_key(dim): digits for dim, digits in self.crc32.items()}
        return {
            "file": self.file,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "sha256": self.sha256,
            "crc32": crc32,
        }


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file, header and all."""

    size_bytes: int
    sha256: str

    def as_dict(self) -> dict[str, object]:
        return {"bytes": self.size_bytes, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """A whole checkpoint: files by base name, tensors by name, in plan order."""

    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]

    def as_dict(self) -> dict[str, object]:
        """The document, in its key names."""
        return {
            "version": VERSION,
            "files": {name: file.as_dict() for name, file in self.files.items()},
            "tensors": {name: tensor.as_dict() for name, tensor in self.tensors.items()},
        }


def stored_cuts(dtype: str, shape: tuple[int, ...]) -> tuple[Cuts, ...]:
    """How a tensor of the header's dtype and shape is cut: in the elements that memory and files share."""
    form = storage_form(DTYPES[dtype], shape)
    return cuts_of(form.shape, form.itemsize)


def _key(dim: int) -> str:
    return "all" if dim == ALL else str(dim)


def digits_of(values: Sequence[int]) -> str:
    """Checksums as the document has them."""
    return "".join(f"{value:0{_HEX_CRC}x}" for value in values)


def is_of_a_checkpoint(top: Mapping[str, object]) -> bool:
    """Whether a document is one of a checkpoint, and not of what one rank got, where every key is a tensor's."""
    return isinstance(top.get("version"), int)


def read_checkpoint_manifest(path: Path) -> CheckpointManifest:
    """The manifest in a file. Raises ConfigError where it cannot be read, or is anything else. Blocking."""
    file = ManifestFile(path, ADVICE)
    return checkpoint_manifest(file, file.read())


def checkpoint_manifest(file: ManifestFile, top: Mapping[str, object]) -> CheckpointManifest:
    """As `read_checkpoint_manifest`, of a document that was read."""
    if not is_of_a_checkpoint(top):
        of_a_rank = all(
            isinstance(value, dict) and value.keys() == {"dtype", "shape", "sha256"} for value in top.values()
        )
        cause = "it is of what one rank got (`load --manifest`)" if top and of_a_rank else "it has no version"
        raise file.refusal(cause)
    if top["version"] != VERSION or isinstance(top["version"], bool):
        raise file.refusal(f"its version is {top['version']}, and only {VERSION} is known here")
    files, tensors = top.get("files"), top.get("tensors")
    if top.keys() != {"version", "files", "tensors"} or not isinstance(files, dict) or not isinstance(tensors, dict):
        raise file.refusal("it must have version, files and tensors, and nothing else")
    return CheckpointManifest(
        {name: _stored_file(file, name, value) for name, value in files.items()},
        {name: _stored_tensor(file, name, value) for name, value in tensors.items()},
    )


def _stored_file(file: ManifestFile, name: str, value: object) -> StoredFile:
    if isinstance(value, dict) and value.keys() == {"bytes", "sha256"}:
        size_bytes, sha256 = value["bytes"], value["sha256"]
        if type(size_bytes) is int and size_bytes >= 0 and isinstance(sha256, str) and SHA256.fullmatch(sha256):
            return StoredFile(size_bytes, sha256)
    raise file.refusal(f"file {shown(name)} must be an object with bytes and sha256, and nothing else")


def _stored_tensor(file: ManifestFile, name: str, value: object) -> StoredTensor:
    if not isinstance(value, dict) or value.keys() != {"file", "dtype", "shape", "sha256", "crc32"}:
        words = "must be an object with file, dtype, shape, sha256 and crc32, and nothing else"
        raise file.refusal(words, tensor=name)
    if not isinstance(value["file"], str):
        raise file.refusal("its file is no name", tensor=name)
    dtype, shape, sha256 = stored_of(file, name, value)
    crc32 = _checksums(value["crc32"], stored_cuts(dtype, shape))
    if crc32 is None:
        words = "its crc32 does not have 8 hexadecimal digits in lower case for each part of each dimension"
        raise file.refusal(words, tensor=name)
    return StoredTensor(value["file"], dtype, shape, sha256, crc32)


def _checksums(value: object, cuts: Sequence[Cuts]) -> dict[int, str] | None:
    """By dimension; None where they are not what a tensor that is cut so has."""
    if not isinstance(value, dict) or value.keys() != {_key(each.dim) for each in cuts}:
        return None
    for each in cuts:
        digits = value[_key(each.dim)]
        if not isinstance(digits, str) or len(digits) != each.parts * _HEX_CRC or not _CRCS.fullmatch(digits):
            return None
    return {each.dim: value[_key(each.dim)] for each in cuts}
