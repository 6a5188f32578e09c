"""Makes a small checkpoint in the shape of a large mixture-of-experts model, so that the loader can be tried anywhere.

Five shards hold an embedding, a dense layer, four layers of experts (FP8 weights with block scales), an FP8 row table
and three stages of a speculative draft (`mtp.0`, `mtp.1`, `mtp.2`). The draft lies as such drafts do: stages 0 and 1 in
two of the shards, stage 2 alone in a third, and the index omits one key that the headers have.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from loader_service.errors import ConfigError, LoaderError
from loader_service.sizes import format_size

SHARDS = 5
DENSE_LAYERS = 1
EXPERTS = 12
DRAFT_STAGES = 3
DRAFT_EXPERTS = 4
ENGRAM_LAYER = 1
OMITTED_KEY = "mtp.0.eh_proj.weight"
DEFAULT_TOTAL_BYTES = 300 << 20

_MARKER = "demo_checkpoint.json"
_INDEX = "model.safetensors.index.json"
_LAYOUT_VERSION = 1  # raised when names, shapes or contents change, so that an older folder is made anew
_BYTES_PER_HIDDEN_SQUARED = 300  # all tensors together are about 300 * hidden**2 bytes; the table takes the rest
_SCALES_PER_ROW = 8
_CODES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, slots=True)
class DemoCheckpoint:
    """A finished demo checkpoint on disk.

    `path` is absolute, `files` are the shards' base names in order, `file_bytes` their sizes with headers,
    `payload_bytes` the tensors alone. The headers hold `omitted_key`, the index does not. `created` is False where an
    up-to-date folder was found and used.
    """

    path: Path
    files: tuple[str, ...]
    file_bytes: int
    payload_bytes: int
    tensors: int
    omitted_key: str
    created: bool


@dataclass(frozen=True, slots=True)
class DemoTensor:
    """One tensor of the layout: `shard` counts from 0, `dtype` is a safetensors code."""

    name: str
    shard: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _CODES[self.dtype].itemsize


def make_demo_checkpoint(
    folder: str | os.PathLike[str],
    *,
    seed: int = 0,
    total_bytes: int = DEFAULT_TOTAL_BYTES,
    on_progress: Callable[[int, int], None] | None = None,
) -> DemoCheckpoint:
    """Makes the checkpoint in `folder`, or uses what lies there if it was made with the same arguments.

    The contents follow from `seed`, each tensor's from its name and size too: the same on every machine, and finite
    numbers throughout. The payload comes to `total_bytes` less at most one table row; two million is about the least.
    `on_progress(done_bytes, all_bytes)` is called after each shard. The folder appears whole or not at all: it is
    written beside its place and renamed, and a second process that makes the same one waits and uses it.

    Raises ConfigError where `folder` holds anything that was not made here, `total_bytes` is too small or `seed`
    negative; LoaderError where it cannot be written. Blocking: about two seconds for the default size.
    """
    place = Path(folder).resolve()
    if seed < 0:
        raise ConfigError(f"the demo checkpoint's seed is {seed}: give a number from 0 up")
    tensors = demo_layout(total_bytes)
    key = {"layout_version": _LAYOUT_VERSION, "seed": seed, "total_bytes": total_bytes}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _one_maker(place.parent):
            sizes = _sizes_if_up_to_date(place, key)
            created = sizes is None
            if sizes is None:
                _refuse_foreign(place)
                sizes = _write_beside_and_rename(place, tensors, key, on_progress)
    except (OSError, SafetensorError) as error:
        raise LoaderError(
            f"cannot write the demo checkpoint to {place}: {error}: choose a folder that is writable and has "
            f"{format_size(total_bytes)} free",
            path=str(place),
            errno=error.errno if isinstance(error, OSError) else None,
        ) from error
    files = tuple(_shard_name(shard) for shard in range(SHARDS))
    return DemoCheckpoint(
        path=place,
        files=files,
        file_bytes=sum(sizes[name] for name in files),
        payload_bytes=sum(tensor.nbytes for tensor in tensors),
        tensors=len(tensors),
        omitted_key=OMITTED_KEY,
        created=created,
    )


def demo_layout(total_bytes: int = DEFAULT_TOTAL_BYTES) -> tuple[DemoTensor, ...]:
    """All tensors of a checkpoint of that size, in no particular order.

    The hidden size is the multiple of 64 that fits, the table's rows take what is left over. Raises ConfigError if
    nothing is.
    """
    hidden = max(64, math.isqrt(max(0, total_bytes) // _BYTES_PER_HIDDEN_SQUARED) // 64 * 64)
    tensors = [*_model(hidden), *_draft(hidden)]
    row_bytes = hidden // 4 + _SCALES_PER_ROW
    least_bytes = sum(tensor.nbytes for tensor in tensors) + row_bytes
    if total_bytes < least_bytes:
        raise ConfigError(f"a demo checkpoint of {total_bytes} bytes is too small: give it at least {least_bytes}")
    rows = 1 + (total_bytes - least_bytes) // row_bytes
    table = f"model.layers.{ENGRAM_LAYER}.engram.embed"
    tensors.append(DemoTensor(f"{table}.weight", 1, "F8_E4M3", (rows, hidden // 4)))
    tensors.append(DemoTensor(f"{table}.weight_scale_inv", 1, "F8_E8M0", (rows, _SCALES_PER_ROW)))
    return tuple(tensors)


def _model(hidden: int) -> Iterator[DemoTensor]:
    vocabulary = 16 * hidden - 13  # not a multiple of anything, as real vocabularies are not
    yield DemoTensor("model.embed_tokens.weight", 0, "BF16", (vocabulary, hidden))
    for layer, shard in enumerate((0, 1, 2, 2, 3)):
        prefix = f"model.layers.{layer}."
        yield from _attention(prefix, shard, hidden)
        if layer < DENSE_LAYERS:
            yield from _mlp(prefix + "mlp.", shard, hidden, 11 * hidden // 4)
            continue
        yield DemoTensor(prefix + "mlp.gate.weight", shard, "BF16", (EXPERTS, hidden))
        yield DemoTensor(prefix + "mlp.gate.e_score_correction_bias", shard, "F32", (EXPERTS,))
        yield from _mlp(prefix + "mlp.shared_experts.", shard, hidden, hidden // 2)
        for expert in range(EXPERTS):
            yield from _mlp(f"{prefix}mlp.experts.{expert}.", shard, hidden, hidden // 2)
    yield DemoTensor(f"model.layers.{ENGRAM_LAYER}.engram.gate_scale", 1, "F32", ())
    yield DemoTensor("model.norm.weight", 3, "BF16", (hidden,))
    yield DemoTensor("lm_head.weight", 3, "BF16", (vocabulary, hidden))


def _draft(hidden: int) -> Iterator[DemoTensor]:
    for stage in range(DRAFT_STAGES):
        shard = 2 + stage
        prefix = f"mtp.{stage}."
        yield from _attention(prefix, shard, hidden)
        for norm in ("enorm", "hnorm", "norm"):
            yield DemoTensor(f"{prefix}{norm}.weight", shard, "BF16", (hidden,))
        yield DemoTensor(prefix + "eh_proj.weight", shard, "BF16", (hidden, 2 * hidden))
        for expert in range(DRAFT_EXPERTS):  # stage 0 crosses a shard's end, the later ones lie in one shard each
            yield from _mlp(f"{prefix}mlp.experts.{expert}.", max(shard, 3), hidden, hidden // 2)


def _attention(prefix: str, shard: int, hidden: int) -> Iterator[DemoTensor]:
    yield DemoTensor(prefix + "input_layernorm.weight", shard, "BF16", (hidden,))
    yield DemoTensor(prefix + "post_attention_layernorm.weight", shard, "BF16", (hidden,))
    yield DemoTensor(prefix + "self_attn.q_proj.weight", shard, "BF16", (2 * hidden, hidden))
    yield DemoTensor(prefix + "self_attn.kv_proj.weight", shard, "BF16", (hidden // 2, hidden))
    yield DemoTensor(prefix + "self_attn.o_proj.weight", shard, "BF16", (hidden, 2 * hidden))


def _mlp(prefix: str, shard: int, hidden: int, intermediate: int) -> Iterator[DemoTensor]:
    block = hidden // 8  # 128 at the default size, as in the models that this one resembles
    for name, shape in (
        ("gate_proj", (intermediate, hidden)),
        ("up_proj", (intermediate, hidden)),
        ("down_proj", (hidden, intermediate)),
    ):
        scales = tuple(-(-size // block) for size in shape)
        yield DemoTensor(f"{prefix}{name}.weight", shard, "F8_E4M3", shape)
        yield DemoTensor(f"{prefix}{name}.weight_scale_inv", shard, "F8_E8M0", scales)


def _shard_name(shard: int) -> str:
    return f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"


@contextmanager
def _one_maker(parent: Path) -> Iterator[None]:
    """Lets one process at a time make a checkpoint under `parent`: a lock on the directory itself leaves no file."""
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a filesystem without locks: the rename still keeps a reader from half a folder
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sizes_if_up_to_date(place: Path, key: dict[str, int]) -> dict[str, int] | None:
    """The files' sizes if `place` was made for `key` and every file still has its size, else None."""
    try:
        marker = json.loads((place / _MARKER).read_text(encoding="utf-8"))
        sizes = {str(name): int(size) for name, size in marker["file_bytes"].items()}
        if marker["made_for"] != key or not sizes:
            return None
        if any((place / name).stat().st_size != size for name, size in sizes.items()):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return sizes


def _refuse_foreign(place: Path) -> None:
    """Raises unless `place` may be replaced: it is absent, empty, or a demo checkpoint's marker lies in it."""
    if not place.exists():
        return
    if not place.is_dir():
        raise ConfigError(f"{place} is not a folder: choose another place for the demo checkpoint", path=str(place))
    if any(place.iterdir()) and not (place / _MARKER).is_file():
        raise ConfigError(
            f"{place} holds files that the demo did not make: choose an empty folder, or remove them", path=str(place)
        )


def _write_beside_and_rename(
    place: Path,
    tensors: tuple[DemoTensor, ...],
    key: dict[str, int],
    on_progress: Callable[[int, int], None] | None,
) -> dict[str, int]:
    beside = place.with_name(f".{place.name}.unfinished")
    shutil.rmtree(beside, ignore_errors=True)  # of an earlier process that was killed
    beside.mkdir()
    try:
        sizes = _write_all(beside, tensors, key, on_progress)
        if place.exists():
            shutil.rmtree(place)
        beside.rename(place)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return sizes


def _write_all(
    folder: Path,
    tensors: tuple[DemoTensor, ...],
    key: dict[str, int],
    on_progress: Callable[[int, int], None] | None,
) -> dict[str, int]:
    all_bytes = sum(tensor.nbytes for tensor in tensors)
    done_bytes = 0
    for shard in range(SHARDS):
        held = [tensor for tensor in tensors if tensor.shard == shard]
        contents = {tensor.name: _content(tensor, key["seed"]) for tensor in held}
        save_file(contents, folder / _shard_name(shard), metadata={"format": "pt"})
        done_bytes += sum(tensor.nbytes for tensor in held)
        if on_progress is not None:
            on_progress(done_bytes, all_bytes)
    weight_map = {tensor.name: _shard_name(tensor.shard) for tensor in tensors if tensor.name != OMITTED_KEY}
    index = {"metadata": {"total_size": all_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    mode = stat.S_IMODE((folder / _INDEX).stat().st_mode)  # what the umask makes of a new file
    for shard in range(SHARDS):
        (folder / _shard_name(shard)).chmod(mode)  # safetensors' own files are their owner's alone
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    marker = {"made_for": key, "file_bytes": sizes}
    (folder / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    return sizes


def _content(tensor: DemoTensor, seed: int) -> torch.Tensor:
    """Random bits that form finite numbers: no infinity, no NaN, so that values can be compared and not only bytes."""
    generator = np.random.SFC64([seed, zlib.crc32(tensor.name.encode())])  # raw bits: the same in every numpy version
    words = generator.random_raw(-(-tensor.nbytes // 8)).astype("<u8", copy=False)
    data = words.view(np.uint8)[: tensor.nbytes]
    if tensor.dtype == "F8_E8M0":
        np.bitwise_and(data, 0x0F, out=data)
        np.add(data, 112, out=data)  # powers of two from 2**-15 to 1
    else:
        itemsize = _CODES[tensor.dtype].itemsize
        top = data[itemsize - 1 :: itemsize]
        np.bitwise_and(top, 0xBF, out=top)  # without the exponent's highest bit every number is below 2
    return torch.from_numpy(data).view(_CODES[tensor.dtype]).reshape(tensor.shape)
