"""The index file beside sharded checkpoints: which shard holds which tensor, as the writer believed.

It is advisory here: headers say what exists, the index only decides between two copies of a name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from loader_service.checkpoint.header import is_canonical
from loader_service.checkpoint.lookalike import lookalike
from loader_service.checkpoint.refusal import refusal, shown
from loader_service.errors import CheckpointError

INDEX_SUFFIX: Final = ".safetensors.index.json"
DEFAULT_INDEX_NAME: Final = "model" + INDEX_SUFFIX
MAX_INDEX_BYTES: Final = 1 << 30
"""Far above the 30 MiB of the largest known; an index beyond it is refused before memory is taken for it."""

_ADVICE: Final = "repair it, or set `index: ignore` to load by the shards' headers alone"


@dataclass(frozen=True, slots=True)
class IndexFile:
    """`weight_map`: tensor name -> base name of the shard that should hold it; `path` is where it was read."""

    path: str
    weight_map: Mapping[str, str]


class _Index(msgspec.Struct, gc=False):
    weight_map: dict[str, str]


def parse_index(raw: bytes, path: str) -> IndexFile:
    """Decodes an index. Raises CheckpointError naming it; a name mapped twice is refused, other keys are ignored."""
    weight_map = _proven_weight_map(raw.strip(b" \t\n\r"))
    if weight_map is None:
        weight_map = _strict_weight_map(raw, path)
    if "" in weight_map.values():
        raise refusal(path, f"the index maps a tensor to a file without a name; {_ADVICE}")
    return IndexFile(path, weight_map)


def _proven_weight_map(text: bytes) -> dict[str, str] | None:
    """The fast look, as for headers: decode, encode again in the writers' two styles, compare."""
    try:
        whole = msgspec.json.decode(text)
        encoded = msgspec.json.encode(whole)
        if not is_canonical(text, encoded) and text != msgspec.json.format(encoded, indent=2):
            return None
        return msgspec.convert(whole, _Index).weight_map
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return None


def _strict_weight_map(raw: bytes, path: str) -> dict[str, str]:
    try:
        top = json.JSONDecoder(object_pairs_hook=tuple, parse_int=float).decode(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        alike = None if raw.lstrip().startswith(b"{") else lookalike(raw[:8])
        cause = f"it looks like {alike}" if alike else str(error)
        raise refusal(path, f"the index is not JSON: {cause}; {_ADVICE}") from None
    maps = [value for key, value in top if key == "weight_map"] if isinstance(top, tuple) else []
    if len(maps) != 1 or not isinstance(maps[0], tuple):
        raise refusal(path, f"the index must be a JSON object with one object `weight_map`; {_ADVICE}")
    weight_map: dict[str, str] = {}
    for name, shard in maps[0]:
        if not isinstance(shard, str):
            raise refusal(path, f"the index maps it to something that is no file name; {_ADVICE}", tensor=name)
        if name in weight_map:
            both = f"{shown(weight_map[name])} and {shown(shard)}"
            raise refusal(path, f"the index maps it twice, to {both}; {_ADVICE}", tensor=name)
        weight_map[name] = shard
    return weight_map


def absent_shards_error(index: IndexFile, absent: list[str]) -> CheckpointError:
    """The error for an index that names shards which are not there: all of them are listed."""
    listing = ", ".join(map(shown, absent))
    words = f"{index.path}: the index names {len(absent)} shards that are not in its folder: {listing}. Fetch them"
    return CheckpointError(f"{words}, or set `index: ignore` to load what is there", path=index.path)
