"""The index file beside sharded checkpoints: which shard holds which tensor, as the writer believed.

It is advisory here: headers say what exists, the index only decides between two copies of a name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Final

import msgspec

from loader_service.checkpoint.header import is_canonical
from loader_service.checkpoint.lookalike import lookalike
from loader_service.checkpoint.refusal import refusal, shown
from loader_service.checkpoint.slices import (
    TEXT_BYTES,
    WHITE_SPACE,
    Text,
    after_white_space,
    any_twice,
    before_white_space,
    let_go,
    members,
)
from loader_service.errors import CheckpointError

INDEX_SUFFIX: Final = ".safetensors.index.json"
DEFAULT_INDEX_NAME: Final = "model" + INDEX_SUFFIX
MAX_INDEX_BYTES: Final = 1 << 30
"""Far above the 30 MiB of the largest known; an index beyond it is refused before memory is taken for it."""

_ADVICE: Final = "repair it, or set `index: ignore` to load by the shards' headers alone"


@dataclass(frozen=True)
class IndexFile:
    """Lists of tensor names, and beside each in `holders` the base name of the shard that should hold it. `shards` are
    all of those, `path` is where it was read."""

    path: str
    names: list[list[str]]
    holders: list[list[str]]
    shards: frozenset[str]

    @cached_property
    def weight_map(self) -> Mapping[str, str]:
        """As one dictionary, which takes long to make where there are very many names."""
        return dict(zip(chain.from_iterable(self.names), chain.from_iterable(self.holders), strict=True))

    def clear(self) -> None:
        """Gives its memory back, bit by bit."""
        let_go(self.names)
        let_go(self.holders)


_MAP: Final = re.compile(rb'"weight_map": ?\{')
_ENDING: Final = re.compile(rb'",')
_map_decoder: Final = msgspec.json.Decoder(dict[str, str])


class _Index(msgspec.Struct, gc=False):
    weight_map: dict[str, str]


def parse_index(raw: Text, path: str) -> IndexFile:
    """Decodes an index. Raises CheckpointError naming it; a name mapped twice is refused, other keys are ignored."""
    told = _proven_in_slices(raw) if len(raw) > TEXT_BYTES else None
    if told is None:
        text = bytes(raw)
        proven = _proven_weight_map(text.strip(WHITE_SPACE))
        told = _Told()
        told.add(proven if proven is not None else _strict_weight_map(text, path))
    if "" in told.shards:
        raise refusal(path, f"the index maps a tensor to a file without a name; {_ADVICE}")
    return IndexFile(path, told.names, told.holders, frozenset(told.shards))


class _Told:
    """The map, as it comes in pieces. Equal names of shards become one object."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []
        self.holders: list[list[str]] = []
        self.shards: dict[str, str] = {}

    def add(self, some: dict[str, str]) -> None:
        values = some.values()
        self.names.append(list(some))
        self.holders.append(list(map(self.shards.setdefault, values, values)))


def _proven_in_slices(raw: Text) -> _Told | None:
    """The fast look in slices, where the map is the last key and holds no name twice.

    What surrounds the map is looked at with a text in its place, which shows that it is the map.
    """
    stop = before_white_space(raw, 0, len(raw))
    close = before_white_space(raw, 0, stop - 1) - 1
    key = _MAP.search(raw)
    if key is None or bytes(raw[close:stop]).translate(None, WHITE_SPACE) != b"}}":
        return None
    around = b"".join((raw[: key.end() - 1], b'""', raw[close + 1 : stop])).lstrip(WHITE_SPACE)
    first = after_white_space(raw, key.end(), close)
    told = _Told()
    try:
        whole = msgspec.json.decode(around, type=dict[str, object])
        if whole.get("weight_map") != "" or around.count(b'"weight_map"') != 1 or not _is_written(around, whole):
            return None
        for text in members(raw, first, before_white_space(raw, first, close), _ENDING):
            some = _map_decoder.decode(text)
            if not _is_member_text(text, some) or (told.names and not some):
                return None
            told.add(some)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return None
    return None if any_twice(told.names) else told


def _is_member_text(text: bytes, some: dict[str, str]) -> bool:
    """Whether the members stand as the writers write them: without spaces, with single ones, or each in its line."""
    encoded = msgspec.json.encode(some)
    return is_canonical(text, encoded) or text == b"{%b}" % msgspec.json.format(encoded, indent=4)[1:-1].strip()


def _is_written(text: bytes, value: object) -> bool:
    """Whether the text is the value as the writers write it, in one of their styles."""
    encoded = msgspec.json.encode(value)
    return is_canonical(text, encoded) or text == msgspec.json.format(encoded, indent=2)


def _proven_weight_map(text: bytes) -> dict[str, str] | None:
    """The fast look, as for headers: decode, encode again in the writers' two styles, compare."""
    try:
        whole = msgspec.json.decode(text)
        if not _is_written(text, whole):
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
