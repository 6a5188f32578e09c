"""What `load` does with each tensor beside counting it: compare it with safetensors' own reading, and hash it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from loader_service.errors import CheckpointError, ConfigError
from loader_service.filling import TensorSpec
from loader_service.planning.plan import RankPlan
from loader_service.planning.storage import needs_raw

Index = tuple[slice, ...]


class Reference:
    """safetensors' own reading of the tensors that a rank takes, one file open at a time, as they come in plan order.

    Comparisons are of bytes: NaNs count, and types without arithmetic can be compared. Blocking.
    """

    def __init__(self, plan: RankPlan) -> None:
        self._plan = plan
        self._path = ""
        self._open = contextlib.ExitStack()
        self._file: Any = None  # safetensors has no type for it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    def compare(self, name: str, value: torch.Tensor, spec: TensorSpec) -> None:
        """Raises CheckpointError unless `value` holds exactly what safetensors reads of the tensor for this rank."""
        path = self._path_of(name)
        try:
            pairs = [(value[mine], self._read(name, source, spec)) for source, mine in spec.parts]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{path}: safetensors cannot read tensor '{name}' to compare it: {error}", path=path, tensor=name
            ) from error
        for got, expected in pairs:
            problem = difference(got, expected)
            if problem is not None:
                raise CheckpointError(
                    f"{path}: tensor '{name}' is not what safetensors reads: {problem}; the file changed, or was "
                    "damaged on its way: load again, and check the storage if it happens again",
                    path=path,
                    tensor=name,
                )

    def _path_of(self, name: str) -> str:
        catalog = self._plan.catalog
        tensor_id = catalog.id_of(name)
        if tensor_id is None:
            raise KeyError(name)
        return catalog.shards[int(catalog.shard_ids[tensor_id])].path

    def _read(self, name: str, source: Index, spec: TensorSpec) -> torch.Tensor:
        path = self._path_of(name)
        if path != self._path:
            self._open.close()
            self._file = self._open.enter_context(safe_open(path, framework="pt"))
            self._path = path
        catalog = self._plan.catalog
        tensor_id = catalog.id_of(name)
        assert tensor_id is not None
        dtype, shape = catalog.dtype(tensor_id), catalog.shapes[tensor_id]
        if needs_raw(dtype, shape):
            # safetensors knows no such type; its bytes are read where its header says that they lie.
            return _bytes_at(path, int(catalog.starts[tensor_id]), spec.full_shape)[source]
        whole = all((s.start, s.stop) == (0, size) for s, size in zip(source, spec.full_shape, strict=True))
        if whole or dtype.bits < 8 or 0 in spec.full_shape:  # a slice of packed elements is refused by safetensors
            full: torch.Tensor = self._file.get_tensor(name)
            return full[source]
        part: torch.Tensor = self._file.get_slice(name)[source]
        return part


def _bytes_at(path: str, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    with open(path, "rb") as file:
        file.seek(start)
        data = bytearray(file.read(count))
    if len(data) < count:
        raise OSError(f"the file ends within the {count} bytes at {start}")
    return torch.frombuffer(data, dtype=torch.uint8).view(shape) if count else torch.empty(shape, dtype=torch.uint8)


def difference(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """In words how two tensors differ in dtype, shape or bytes; None where they do not."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"{got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    ours, theirs = raw_bytes(got), raw_bytes(expected)
    if torch.equal(ours, theirs):
        return None
    different = torch.nonzero(ours != theirs).view(-1)
    return f"{len(different)} of {len(ours)} bytes differ, the first at byte {int(different[0])}"


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as bytes, row-major; without a copy where it is contiguous."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    if tensor.itemsize == 1:  # some of these types know no copying
        return tensor.view(torch.uint8).contiguous().view(-1)
    return tensor.contiguous().view(-1).view(torch.uint8)


class Manifest:
    """Name -> dtype (safetensors code), shape (as headers count) and sha256 of what this rank got."""

    def __init__(self, plan: RankPlan) -> None:
        self._plan = plan
        self._hashes: dict[str, Any] = {}  # hashlib has no type for it
        self.entries: dict[str, dict[str, object]] = {}

    def add(self, name: str, value: torch.Tensor) -> None:
        """Hashes a tensor, or rows of one that come in order. Blocking; the interpreter lock is released meanwhile."""
        if name not in self._hashes:
            i = self._plan.index_of(name)
            assert i is not None
            self._hashes[name] = hashlib.sha256()
            self.entries[name] = {"dtype": self._plan.dtype_code(i), "shape": list(self._plan.header_shape(i))}
        self._hashes[name].update(raw_bytes(value).numpy().data)
        self.entries[name]["sha256"] = self._hashes[name].hexdigest()


def manifest_path(out: Path, rank: int, world_size: int) -> Path:
    """`out` itself for one rank; with several, `.rank{rank}` before its suffix."""
    return out if world_size == 1 else out.with_name(f"{out.stem}.rank{rank}{out.suffix}")


def check_writable(path: Path, *, option: str = "--manifest") -> None:
    """Raises ConfigError, before anything is loaded, where the file that an option names cannot be written, or would
    take the place of something else than a file."""
    folder = _target(path, option).parent
    if not folder.is_dir():
        raise ConfigError(f"{option}: the folder {folder} does not exist: make it first", path=str(path))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: the folder {folder} is not writable: choose another one", path=str(path))


def _target(path: Path, option: str) -> Path:
    """The file that is written to: links are followed, so that they stay."""
    target = Path(os.path.realpath(path))
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return target
    except OSError as error:  # a name that is too long, links in a circle
        raise ConfigError(
            f"{option}: {path} cannot be used: {error.strerror}: name another file",
            path=str(path),
            errno=error.errno,
        ) from error
    if stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{option}: {path} is a folder: name a file", path=str(path))
    # A link of /proc may lead to what has no place of its own any more, such as a removed file.
    if not stat.S_ISREG(found.st_mode) or not target.exists():
        raise ConfigError(f"{option}: {path} is not a regular file, or was removed: name another", path=str(path))
    return target


def write_manifest(path: Path, entries: Mapping[str, object]) -> None:
    """Writes the manifest whole or not at all. Blocking."""
    write_text(path, json.dumps(entries, indent=1) + "\n", option="--manifest")


def write_text(path: Path, text: str, *, option: str) -> None:
    """Writes the file that an option names whole or not at all: beside its place, then renamed. Blocking."""
    target = _target(path, option)
    # A name of its own: with the file's in it, it could be too long where the file's is not.
    beside = target.with_name(f".{option.strip('-')}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        beside.write_text(text, encoding="utf-8", errors="backslashreplace")
        beside.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise ConfigError(
            f"{option}: {path} cannot be written: {error.strerror}: choose a place with room and rights",
            path=str(path),
            errno=error.errno,
        ) from error
