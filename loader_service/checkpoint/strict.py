"""The strict second look at a header: exact verdicts for whatever the fast look could not prove.

Agrees with the reference parser (safetensors 0.8.0) on what is JSON and what is an entry, and is stricter on purpose in
three places: a tensor name twice, a key twice inside `__metadata__`, and an entry written as an array. Every refusal is
a CheckpointError; nothing else leaves this module, whatever the bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import MutableSequence
from dataclasses import dataclass
from typing import Final

from loader_service.checkpoint.dtypes import DTYPES
from loader_service.checkpoint.refusal import refusal, shown

METADATA_KEY: Final = "__metadata__"
U64_LIMIT: Final = 1 << 64
MAX_NESTING: Final = 127
"""Containers inside containers that the reference allows, the header's own object included."""

_ENTRY_FIELDS: Final = ("dtype", "shape", "data_offsets")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_LONGEST_U64_DIGITS: Final = 20


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """A header's tensors as it lists them, one position per tensor: types are checked, ranges are not."""

    names: list[str]
    codes: list[str]
    shapes: list[tuple[int, ...]]
    begins: MutableSequence[int]
    ends: MutableSequence[int]
    metadata: dict[str, str]


class _NotJSONError(Exception):
    """A token that Python's json takes and the format does not."""


def strict_entries(text: bytes, path: str) -> Entries:
    """Decodes a header's JSON text (padding included). Raises CheckpointError, whatever the bytes."""
    top = _decode(text, path)
    if not isinstance(top, tuple):
        raise refusal(path, f"the header is {_kind(top)}, not a JSON object of tensors")
    entries = Entries([], [], [], [], [], {})
    seen: set[str] = set()
    for name, value in top:
        _check_text(name, "a name", path)
        if name in seen:
            what = "`__metadata__` stands" if name == METADATA_KEY else f"tensor {shown(name)} stands"
            raise refusal(path, f"{what} twice in the header: which one counts is undefined")
        seen.add(name)
        if name == METADATA_KEY:
            entries.metadata.update(_metadata(value, path))
            continue
        code, shape, begin, end = _entry(name, value, path)
        entries.names.append(name)
        entries.codes.append(code)
        entries.shapes.append(shape)
        entries.begins.append(begin)
        entries.ends.append(end)
    return entries


def _decode(text: bytes, path: str) -> object:
    """JSON objects come back as tuples of pairs (so that duplicates show), arrays as lists."""
    if text and not text.strip(b"\0"):
        raise refusal(path, "the header is filled with zero bytes: the download or copy is incomplete, fetch it again")
    try:
        decoder = json.JSONDecoder(
            object_pairs_hook=tuple, parse_int=_integer, parse_float=_real, parse_constant=_constant
        )
        return decoder.decode(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise refusal(path, f"the header is not UTF-8 at byte {8 + error.start}") from None
    except json.JSONDecodeError as error:
        raise refusal(path, f"the header is not strict JSON: {error.msg} at character {error.pos}") from None
    except _NotJSONError as error:
        raise refusal(path, f"the header is not strict JSON: {error}") from None
    except RecursionError:
        raise refusal(path, "the header is nested too deeply") from None


def _integer(digits: str) -> int | float:
    """An int where the reference sees one; `-0` and what exceeds 64 bits are reals to it."""
    if len(digits) > _LONGEST_U64_DIGITS:
        return _real(digits)
    number = int(digits)
    if digits == "-0" or not -(1 << 63) <= number < U64_LIMIT:
        return _real(digits)
    return number


def _real(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _NotJSONError(f"the number {shown(digits)} is out of range")
    return number


def _constant(word: str) -> float:
    raise _NotJSONError(f"{word} is no JSON value")


def _kind(value: object) -> str:
    """What JSON calls the value."""
    if isinstance(value, tuple):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"the string {shown(value)}" if isinstance(value, str) else f"the number {value!r}"


def _check_text(text: str, what: str, path: str) -> None:
    if not text.isascii() and _SURROGATE.search(text):
        raise refusal(path, f"the header is not strict JSON: {what} holds half a surrogate pair ({shown(text)})")


def _metadata(value: object, path: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, tuple):
        raise refusal(path, f"`__metadata__` is {_kind(value)}, not an object of strings")
    metadata: dict[str, str] = {}
    for key, text in value:
        if not isinstance(text, str):
            raise refusal(path, f"`__metadata__` holds {_kind(text)} under {shown(key)}, not a string")
        _check_text(key, "a key of `__metadata__`", path)
        _check_text(text, "a value of `__metadata__`", path)
        if key in metadata:
            raise refusal(path, f"`__metadata__` holds the key {shown(key)} twice")
        metadata[key] = text
    return metadata


def _entry(name: str, value: object, path: str) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(value, tuple):
        raise refusal(path, f"its entry is {_kind(value)}, not an object", tensor=name)
    fields: dict[str, object] = {}
    for field, content in value:
        _check_text(field, "a field's name", path)
        if field not in _ENTRY_FIELDS:
            _check_ignored(field, content, name, path)
        elif field in fields:
            raise refusal(path, f"the field `{field}` stands twice", tensor=name)
        else:
            fields[field] = content
    for field in _ENTRY_FIELDS:
        if field not in fields:
            raise refusal(path, f"the field `{field}` is missing", tensor=name)
    offsets = _integers(fields["data_offsets"], "data_offsets", name, path)
    if len(offsets) != 2:
        raise refusal(path, f"`data_offsets` holds {len(offsets)} numbers, not 2", tensor=name)
    return _dtype(fields["dtype"], name, path), _integers(fields["shape"], "shape", name, path), *offsets


def _dtype(value: object, name: str, path: str) -> str:
    # The reference also takes {"U8": null} for "U8": the long form of a variant in the library that reads its JSON.
    if isinstance(value, tuple) and len(value) == 1 and value[0][1] is None:
        value = value[0][0]
    if not isinstance(value, str):
        raise refusal(path, f"`dtype` is {_kind(value)}, not a string", tensor=name)
    if value not in DTYPES:
        raise refusal(path, f"unknown dtype {shown(value)} (known: {', '.join(DTYPES)})", tensor=name)
    return value


def _integers(value: object, field: str, name: str, path: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise refusal(path, f"`{field}` is {_kind(value)}, not an array", tensor=name)
    for number in value:
        if type(number) is not int or number < 0:
            raise refusal(path, f"`{field}` holds {_kind(number)}, not an integer in [0, 2^64)", tensor=name)
    return tuple(value)


def _check_ignored(field: str, content: object, name: str, path: str) -> None:
    """An unknown field is ignored, but it must be JSON that the reference reads: no half pairs, no deep nesting."""
    pending: list[tuple[object, int]] = [(content, 2)]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, str):
            _check_text(value, "a string", path)
        elif isinstance(value, (list, tuple)):
            if depth >= MAX_NESTING:
                raise refusal(path, f"the field {shown(field)} is nested too deeply", tensor=name)
            items = value if isinstance(value, list) else [part for pair in value for part in pair]
            pending.extend((item, depth + 1) for item in items)
