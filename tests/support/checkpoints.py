"""Checkpoints for whole-loader tests: many dtypes and awkward shapes, and what each tensor must come out as."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import loader_service as ls
from loader_service.config.schema import ServiceConfig
from loader_service.memory.tensors import torch_dtype
from tests.support.shards import TensorBytes, pattern_bytes, write_shard

BITS = {"F4": 4, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E8M0": 8, "BF16": 16, "F16": 16, "I32": 32, "F32": 32, "I64": 64}


@dataclass(frozen=True)
class Checkpoint:
    """A folder of shards; `tensors` in plan order (file name, offset)."""

    folder: Path
    tensors: Mapping[str, TensorBytes]
    shard_of: Mapping[str, str]

    @property
    def payload_bytes(self) -> int:
        return sum(len(data) for _, _, data in self.tensors.values())

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as torch sees it, made from the bytes that were written."""
        code, shape, data = self.tensors[name]
        dtype = torch_dtype(code)
        assert dtype is not None
        stored = (*shape[:-1], shape[-1] // 2) if code == "F4" else tuple(shape)
        if not data:
            return torch.empty(stored, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(stored)

    def config(self, load: Mapping[str, object] | None = None, **sections: Any) -> ServiceConfig:
        loads = {"target": dict(load or {})}
        return ls.config_from_dict({"checkpoint": {"path": str(self.folder)}, "loads": loads, **sections})


def make_tensor(code: str, shape: tuple[int, ...], seed: int) -> TensorBytes:
    count = math.prod(shape) * BITS[code] // 8
    data = pattern_bytes(count, seed)
    if code == "BOOL":
        data = bytes(byte & 1 for byte in data)
    return code, shape, data


def write_checkpoint(folder: Path, shards: Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]]) -> Checkpoint:
    """Writes shards of `{file: {name: (dtype code, shape)}}` with content that differs from byte to byte."""
    tensors: dict[str, TensorBytes] = {}
    shard_of: dict[str, str] = {}
    for file in sorted(shards):
        held = {}
        for name, (code, shape) in shards[file].items():
            held[name] = make_tensor(code, shape, len(tensors))
            tensors[name] = held[name]
            shard_of[name] = file
        write_shard(folder / file, held)
    return Checkpoint(folder, tensors, shard_of)


def awkward_checkpoint(folder: Path, *, columns: int = 700) -> Checkpoint:
    """About 3 MB: large and tiny tensors, empty ones, scalars, odd sizes that leave later payload unaligned.

    The largest has so many `columns`: with 70 of them all are 0.3 MB.
    """
    return write_checkpoint(
        folder,
        {
            "model-00001-of-00002.safetensors": {
                "embed.weight": ("BF16", (500, 3 * columns // 7)),
                "empty.first": ("F32", (0, 7)),
                "scale": ("F32", ()),
                "odd": ("U8", (13,)),
                "unaligned.f32": ("F32", (33, 5)),
                "unaligned.i64": ("I64", (7,)),
                "flag": ("BOOL", (3,)),
                "table.weight": ("F8_E4M3", (37, 129)),
                "table.scale": ("F8_E8M0", (37, 3)),
                "packed": ("F4", (6, 10)),
            },
            "model-00002-of-00002.safetensors": {
                **{f"layers.{i}.norm.weight": ("BF16", (257,)) for i in range(40)},
                "big.weight": ("F32", (640, columns)),
                "experts": ("BF16", (4, 33, 50)),
                "empty.last": ("BF16", (3, 0)),
            },
        },
    )


def sha256(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return hashlib.sha256(data).hexdigest()


def assert_same(found: torch.Tensor, wanted: torch.Tensor, name: str = "") -> None:
    assert found.dtype == wanted.dtype, (name, found.dtype, wanted.dtype)
    assert tuple(found.shape) == tuple(wanted.shape), (name, found.shape, wanted.shape)
    assert sha256(found) == sha256(wanted), f"{name}: bytes differ"
