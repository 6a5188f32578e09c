"""A checkpoint and rules with every way to cut, and what each of four ranks gets, written out by hand.

The mesh is `{pp: 2, tp: 2}`. `expected` slices whole tensors with torch alone: nothing of the loader's planning.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.support.checkpoints import Checkpoint, write_checkpoint

Cut = Callable[[torch.Tensor, int, int], torch.Tensor]

MESH = {"pp": 2, "tp": 2}
COORDS = [{"pp": pp, "tp": tp} for pp in range(2) for tp in range(2)]

RULES: list[dict[str, object]] = [
    {"match": "*.layers.*", "assign": {"axis": "pp", "index": r"layers\.(\d+)\.", "boundaries": [0, 1, 3]}},
    {"match": "embed.weight", "assign": {"axis": "pp", "to": [0, -1]}},
    {"match": "lm_head.*", "assign": {"axis": "pp", "to": [-1]}},
    {"match": "first.*", "assign": {"axis": "pp", "to": [0]}},
    {"match": "embed.weight", "split": {"axis": "tp", "dim": 0, "pad_to": 8}},
    {"match": "lm_head.weight", "split": {"axis": "tp", "dim": 0, "pad_to": 2}},
    {"match": "*.experts.*", "assign": {"axis": "tp", "index": r"experts\.(\d+)\.", "how": "round_robin"}},
    {"match": "*.stacked", "split": {"axis": "tp", "dim": 2}},
    {"match": "*.middle", "split": {"axis": "tp", "dim": 1}},
    {"match": "*.qkv", "split": {"axis": "tp", "dim": 0, "sections": [4, 1, 1], "units": [8, 1, 1]}},
    {"match": "*.gate_up", "split": {"axis": "tp", "dim": 0, "sections": [1, 1]}},
    {"match": "*.gate_up_t", "split": {"axis": "tp", "dim": 1, "sections": [1, 1]}},
    {"match": "*.o", "split": {"axis": "tp", "dim": 1}},
    {"match": "*.fp8.weight", "split": {"axis": "tp", "dim": 0, "align": 16}},
    {"match": "*.fp8.scale", "split": {"axis": "tp", "dim": 0}},
    {"match": "*.router", "assign": {"axis": "tp", "to": "all"}},
    {"match": "table", "split": {"axis": ["pp", "tp"], "dim": 0}},
    {"match": "grid", "split": {"axis": "pp", "dim": 1}},
    {"match": "grid", "split": {"axis": "tp", "dim": 0}},
    {"match": "packed", "split": {"axis": "tp", "dim": 1}},
    {"match": "thin", "split": {"axis": ["pp", "tp"], "dim": 0}},
]


def write(folder: Path) -> Checkpoint:
    """Three layers over two shards; odd sizes leave payload unaligned; parts are uneven and some are empty."""
    layer = {
        "qkv": ("BF16", (48, 10)),  # 32 rows of q (8 heads), 8 of k and 8 of v (1 head each)
        "gate_up": ("BF16", (14, 9)),
        "gate_up_t": ("F32", (6, 14)),
        "o": ("BF16", (12, 130)),
        "odd": ("U8", (3,)),
        "stacked": ("F32", (3, 4, 5)),
        "middle": ("BF16", (3, 7, 11)),
        "experts.0.w": ("BF16", (5, 6)),
        "experts.1.w": ("BF16", (5, 6)),
        "experts.2.w": ("BF16", (5, 6)),
        "router": ("F32", (3, 6)),
        "fp8.weight": ("F8_E4M3", (72, 5)),
        "fp8.scale": ("F8_E8M0", (5, 1)),
    }
    return write_checkpoint(
        folder,
        {
            "model-00001-of-00002.safetensors": {
                "embed.weight": ("BF16", (37, 12)),
                "first.bias": ("F32", (7,)),
                **{f"m.layers.0.{name}": tensor for name, tensor in layer.items()},
                "table": ("U8", (10, 3)),
                "thin": ("F32", (2, 5)),
            },
            "model-00002-of-00002.safetensors": {
                **{f"m.layers.{i}.{name}": tensor for i in (1, 2) for name, tensor in layer.items()},
                "grid": ("I32", (5, 9)),
                "packed": ("F4", (4, 12)),
                "scalar": ("F32", ()),
                "empty": ("BF16", (0, 4)),
                "norm": ("BF16", (33,)),
                "lm_head.weight": ("BF16", (37, 12)),
                "lm_head.bias": ("F32", (37,)),
            },
        },
    )


def expected(name: str, whole: torch.Tensor, pp: int, tp: int) -> torch.Tensor | None:
    """The part of a tensor that the rank at (pp, tp) gets; None if it takes none of it."""
    if ".layers." in name and (pp == 0) != (name.split(".")[2] == "0"):
        return None
    if name.startswith("lm_head") and pp == 0:
        return None
    if name.startswith("first") and pp == 1:
        return None
    if ".experts." in name:
        return whole if int(name.split(".experts.")[1][0]) % 2 == tp else None
    kind = name.rpartition(".")[2] if ".fp8." not in name else "fp8." + name.rpartition(".")[2]
    return _part(name if not name.startswith("m.layers") else kind, whole, pp, tp)


def _part(kind: str, whole: torch.Tensor, pp: int, tp: int) -> torch.Tensor:
    cut = _CUTS.get(kind)
    return whole if cut is None else cut(whole, pp, tp)


def _rows(*cuts: int) -> Cut:
    """Rows between the cuts, along tp."""
    return lambda whole, _pp, tp: whole[cuts[tp] : cuts[tp + 1]]


def _rows_of_four(*cuts: int) -> Cut:
    """Rows between the cuts, along pp and tp as one axis."""
    return lambda whole, pp, tp: whole[cuts[2 * pp + tp] : cuts[2 * pp + tp + 1]]


def _joined(dim: int, *parts: tuple[tuple[int, int], ...]) -> Cut:
    """For each place along tp the ranges of one dimension, put together."""
    return lambda whole, _pp, tp: torch.cat([whole.narrow(dim, a, b - a) for a, b in parts[tp]], dim)


_CUTS: dict[str, Cut] = {
    "embed.weight": _rows(0, 20, 37),  # padded to 40
    "lm_head.weight": _rows(0, 19, 37),  # padded to 38
    "qkv": _joined(0, ((0, 16), (32, 48)), ((16, 32), (32, 48))),  # 4 of 8 heads; the one kv head is on both
    "gate_up": _joined(0, ((0, 3), (7, 10)), ((3, 7), (10, 14))),
    "gate_up_t": _joined(1, ((0, 3), (7, 10)), ((3, 7), (10, 14))),
    "o": lambda whole, _pp, tp: whole[:, :65] if tp == 0 else whole[:, 65:],
    "stacked": lambda whole, _pp, tp: whole[:, :, :2] if tp == 0 else whole[:, :, 2:],
    "middle": lambda whole, _pp, tp: whole[:, :3] if tp == 0 else whole[:, 3:],
    "fp8.weight": _rows(0, 32, 72),  # 5 blocks of 16: 2 and 3
    "fp8.scale": _rows(0, 2, 5),
    "table": _rows_of_four(0, 2, 5, 7, 10),
    "thin": _rows_of_four(0, 0, 1, 1, 2),
    "grid": lambda whole, pp, tp: whole[[0, 2][tp] : [2, 5][tp], [0, 4][pp] : [4, 9][pp]],
    "packed": lambda whole, _pp, tp: whole[:, :3] if tp == 0 else whole[:, 3:],  # 12 of 4 bits are 6 bytes
}
