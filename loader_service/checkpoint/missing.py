"""Says what is wrong with a path where no checkpoint was found: the commonest mistake, so the message must help.

Looks around through the `Storage`; whatever cannot be listed while looking is simply not mentioned.
"""

from __future__ import annotations

import difflib
import errno
import posixpath
from collections import Counter
from collections.abc import Sequence
from typing import Final

from loader_service.checkpoint.refusal import shown_list
from loader_service.errors import CheckpointError
from loader_service.reading.reader import DirectoryEntry, Storage

_OTHER_FORMATS: Final = {
    ".bin": "PyTorch pickles (.bin)",
    ".pt": "PyTorch pickles (.pt)",
    ".pth": "PyTorch pickles (.pth)",
    ".ckpt": "PyTorch checkpoints (.ckpt)",
    ".gguf": "GGUF files",
    ".h5": "HDF5 files",
    ".msgpack": "Flax files",
    ".onnx": "ONNX files",
    ".npz": "numpy archives",
    ".incomplete": "unfinished downloads (.incomplete)",
    ".safetensors": "hidden or unusable .safetensors entries",
}


_PATH_ADVICE = "only local paths are read; one that is relative in a configuration starts from that file's folder"


def missing_error(path: str, storage: Storage) -> CheckpointError:
    """The error for a path that leads nowhere: names a dangling link's target, or the first folder that is missing."""
    parent, name = posixpath.split(path.rstrip("/"))
    entries = _listing(parent or "/", storage)
    if entries is None:
        while parent not in ("", "/") and _listing(posixpath.dirname(parent), storage) is None:
            parent = posixpath.dirname(parent)
        words = f"{path}: does not exist; its folder {parent} is missing too, or cannot be listed: {_PATH_ADVICE}"
    else:
        target = next((entry.link_target for entry in entries if entry.name == name and entry.kind == "dangling"), None)
        similar = difflib.get_close_matches(name, [entry.name for entry in entries], n=1)
        words = f"{path}: does not exist; " + (f"did you mean {similar[0]}?" if similar else _PATH_ADVICE)
        if target is not None:
            words = f"{path}: is a dangling link to {target}, which does not exist: fetch the target again"
    return CheckpointError(words, path=path, errno=errno.ENOENT)


def no_shards_error(path: str, entries: Sequence[DirectoryEntry], storage: Storage) -> CheckpointError:
    """The error for a folder without shards: says what is there, and which folder was probably meant."""
    folders = [entry.name for entry in entries if entry.kind == "directory"]
    hint = _snapshot_hint(path, folders, storage)
    if hint is None:
        hint = f"there are {_contents(entries)}" if entries else "the folder is empty"
    return CheckpointError(f"{path}: no safetensors files here; {hint}", path=path)


def _listing(path: str, storage: Storage) -> list[DirectoryEntry] | None:
    try:
        return storage.list_directory(path)
    except OSError:
        return None


def _snapshot_hint(path: str, folders: Sequence[str], storage: Storage) -> str | None:
    """A hub's cache keeps a repository's files under snapshots/<revision>; people give the folder above it."""
    repository = path.rstrip("/")
    models = sorted(name for name in folders if name.startswith("models--"))
    if models and "snapshots" not in folders:
        more = f" (one of {len(models)} models here)" if len(models) > 1 else ""
        return f"did you mean {posixpath.join(repository, models[0], 'snapshots', '<rev>')}{more}?"
    if posixpath.basename(repository) == "snapshots":
        revisions = sorted(folders)
    elif "snapshots" in folders:
        repository = posixpath.join(repository, "snapshots")
        listing = _listing(repository, storage) or []
        revisions = sorted(entry.name for entry in listing if entry.kind == "directory")
    else:
        return None
    if not revisions:
        return f"this is a download cache and {repository} holds no revision yet: download the model first"
    meant = [posixpath.join(repository, revision) for revision in revisions]
    return f"did you mean {' or '.join(meant[:3])}{' or another revision there' if len(meant) > 3 else ''}?"


def _contents(entries: Sequence[DirectoryEntry]) -> str:
    files = [entry.name for entry in entries if entry.kind != "directory" and not entry.name.startswith(".")]
    known = Counter(_OTHER_FORMATS.get(posixpath.splitext(name)[1].lower()) for name in files)
    parts = [f"{count} {words}" for words, count in known.items() if words is not None]
    if known[None]:
        parts.append(f"{known[None]} other files")
    folders = sorted(entry.name for entry in entries if entry.kind == "directory" and not entry.name.startswith("."))
    if folders:
        parts.append(f"folders, which are not searched ({shown_list(folders, 5)})")
    if not parts:
        parts.append(f"{len(entries)} hidden entries")
    return ", ".join(parts)
