"""A mixture-of-experts checkpoint of any number of tensors, sparse: only headers and the index take space on the disk.

Bytes a tensor stay the same whatever the number: what grows is the number of experts, as it does from model to model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from loader_service.config.schema import ServiceConfig
from loader_service.config.yaml_file import config_from_dict
from loader_service.planning.mesh import Mesh

A_SHARD = 5_000
LAYERS = 56
LEAST_TENSORS = 8 * (LAYERS + 1) + 3

_OF_A_LAYER = (
    ("self_attn.q_proj.weight", "BF16", [256, 128]),
    ("self_attn.k_proj.weight", "BF16", [256, 128]),
    ("self_attn.v_proj.weight", "BF16", [256, 128]),
    ("self_attn.o_proj.weight", "BF16", [128, 256]),
    ("mlp.gate.weight", "BF16", [256, 128]),
    ("mlp.gate.e_score_correction_bias", "F32", [256]),
    ("input_layernorm.weight", "BF16", [256]),
    ("post_attention_layernorm.weight", "BF16", [256]),
)
_OF_AN_EXPERT = (
    ("gate_proj.weight", "F8_E4M3", [256, 512]),
    ("gate_proj.weight_scale_inv", "F32", [2, 4]),
    ("up_proj.weight", "F8_E4M3", [256, 512]),
    ("up_proj.weight_scale_inv", "F32", [2, 4]),
    ("down_proj.weight", "F8_E4M3", [512, 256]),
    ("down_proj.weight_scale_inv", "F32", [4, 2]),
)
_OF_THE_MODEL = (
    ("model.embed_tokens.weight", "BF16", [1024, 128]),
    ("model.norm.weight", "BF16", [256]),
    ("lm_head.weight", "BF16", [1024, 128]),
)
_ITEM_BYTES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}

Entry = tuple[str, str, list[int]]

RULES: list[dict[str, object]] = [
    {"match": "model.layers.*", "assign": {"axis": "pp", "index": r"layers\.(\d+)\.", "how": "block"}},
    {"match": "*.experts.*", "assign": {"axis": "ep", "index": r"experts\.(\d+)\.", "how": "block"}},
    {"match": "*.o_proj.weight", "split": {"axis": "tp", "dim": 1}},
    {"match": "*.down_proj.weight", "split": {"axis": "tp", "dim": 1}},
    {"match": "*.self_attn.*", "split": {"axis": "tp", "dim": 0}},
    {"match": "*.experts.*.weight", "split": {"axis": "tp", "dim": 0}},
]


def entries(tensors: int) -> Iterator[Entry]:
    """(name, dtype, shape) of so many tensors, in the order in which the shards hold them.

    Experts go to the layers and to the draft, `mtp.0`, by turns; for what is left over, the first layers have sinks.
    """
    if tensors < LEAST_TENSORS:
        raise ValueError(f"a growth checkpoint has at least {LEAST_TENSORS} tensors, not {tensors}")
    stacks = [*(f"model.layers.{layer}" for layer in range(LAYERS)), "mtp.0"]
    experts, left = divmod(tensors - LEAST_TENSORS, len(_OF_AN_EXPERT))
    yield from _OF_THE_MODEL
    for place, stack in enumerate(stacks):
        yield from ((f"{stack}.{name}", dtype, shape) for name, dtype, shape in _OF_A_LAYER)
        for expert in range((experts + len(stacks) - 1 - place) // len(stacks)):
            yield from ((f"{stack}.mlp.experts.{expert}.{name}", dtype, shape) for name, dtype, shape in _OF_AN_EXPERT)
    yield from ((f"model.layers.{i}.self_attn.sinks", "F32", [256]) for i in range(left))


def make_growth_checkpoint(folder: Path, tensors: int, *, a_shard: int = A_SHARD) -> int:
    """Writes shards of `a_shard` tensors and their index; returns the bytes of all headers."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = list(entries(tensors))
    shards = math.ceil(tensors / a_shard)
    header_bytes = payload_bytes = 0
    weight_map: dict[str, str] = {}
    for number in range(shards):
        own = everything[number * a_shard : (number + 1) * a_shard]
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        size, payload = _write_shard(folder / name, own)
        header_bytes += size
        payload_bytes += payload
        weight_map |= dict.fromkeys((entry[0] for entry in own), name)
    index = {"metadata": {"total_size": payload_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return header_bytes


def _write_shard(path: Path, own: list[Entry]) -> tuple[int, int]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in own:
        nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return 8 + len(text), offset


def mesh_sizes(ranks: int) -> dict[str, int]:
    """Pipeline, expert and tensor parallel places of so many ranks, as even as the factors of two allow."""
    sizes = {"pp": 1, "ep": 1, "tp": 1}
    axes, rest = ("tp", "ep", "pp"), ranks
    for number in range(ranks.bit_length()):
        if rest % 2:
            break
        sizes[axes[number % 3]] *= 2
        rest //= 2
    sizes["pp"] *= rest
    return sizes


def growth_config(folder: Path, ranks: int) -> tuple[ServiceConfig, Mesh]:
    """The loads of the benchmark: `whole`, `parts` by rules, `draft` by prefix."""
    config = config_from_dict(
        {
            "checkpoint": {"path": str(folder)},
            "mesh": mesh_sizes(ranks),
            "loads": {
                "whole": {},
                "parts": {"skip": ["mtp.*"], "rules": RULES},
                "draft": {"key_prefixes": ["mtp.0"]},
            },
        }
    )
    return config, Mesh.row_major(config.mesh, ranks)
