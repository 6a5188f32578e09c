"""Writes safetensors files byte by byte, so that tests can hold layouts that no library would write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

TensorBytes = tuple[str, Sequence[int], bytes]


def shard_bytes(
    tensors: Mapping[str, TensorBytes], *, metadata: Mapping[str, str] | None = None, padding: int | None = None
) -> bytes:
    """The file's bytes: tensors lie in the mapping's order. `padding` spaces end the header (default: to 8 bytes)."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8 if padding is None else padding)
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())


def write_shard(
    path: Path,
    tensors: Mapping[str, TensorBytes],
    *,
    metadata: Mapping[str, str] | None = None,
    padding: int | None = None,
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(shard_bytes(tensors, metadata=metadata, padding=padding))
    return path


def pattern_bytes(count: int, seed: int = 0) -> bytes:
    """`count` bytes that differ from place to place, so that a wrong offset shows."""
    import numpy as np

    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, size=count, dtype=np.uint8).tobytes()


def write_index(folder: Path, weight_map: Mapping[str, str], name: str = "model.safetensors.index.json") -> Path:
    path = folder / name
    path.write_text(json.dumps({"metadata": {}, "weight_map": dict(weight_map)}))
    return path
