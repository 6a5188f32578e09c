"""A shard's first bytes -> a validated header, in columns. Header bytes are hostile.

Two looks. The fast one decodes with a typed msgspec decoder and then proves strictness by encoding the value again: if
that gives the very text of the file, the text is the encoder's own canonical JSON, so it holds no duplicate name or
field, no `-0`, no unknown field, no bad UTF-8, nothing that a lax decoder forgives. What is not proven (other spacing,
escapes, unknown fields, or a fault) gets the strict look, which is several times slower and exact. On 48 headers with
232,670 tensors decoding and proving take about half of what `json.loads` alone takes. The fast look goes in slices: a
header of 29 MiB that is decoded in one call stops all other threads for most of a second.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from loader_service.checkpoint.dtypes import DTypeCode
from loader_service.checkpoint.layout import fault_of, proven_layout
from loader_service.checkpoint.lookalike import lookalike
from loader_service.checkpoint.refusal import refusal
from loader_service.checkpoint.slices import Text, after_white_space, any_twice, before_white_space, members
from loader_service.checkpoint.strict import METADATA_KEY, Entries, strict_entries

LENGTH_BYTES: Final = 8
"""The header's length stands in the file's first 8 bytes, little-endian."""

MAX_HEADER_BYTES: Final = 100_000_000
"""The format's cap on the JSON text; checked, like the file's size, before anything is allocated."""


@dataclass(frozen=True, slots=True, eq=False)
class ParsedHeader:
    """One shard's validated header: columns over its tensors, sorted by (start, stop, name).

    `starts` and `stops` are absolute file offsets (half open) that tile the payload without a hole. `dtype_ids` index
    `DTYPE_LIST`. `shapes` count elements as the header does (F4: logical elements). `header_bytes` is 8 + N, `sha256`
    the hex digest of those bytes.
    """

    names: list[str]
    dtype_ids: NDArray[np.uint8]
    shapes: list[tuple[int, ...]]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    metadata: dict[str, str]
    header_bytes: int
    sha256: str


class _Offsets(msgspec.Struct, array_like=True, gc=False):
    begin: int
    end: int


class _Entry(msgspec.Struct, gc=False):
    # In the order of the reference writer: encoding again must give the same text.
    dtype: DTypeCode
    shape: tuple[int, ...]
    data_offsets: _Offsets


_ENDING: Final = re.compile(rb"\]\},")
_OPENING: Final = ord("{")
_CLOSING: Final = ord("}")
_entries_decoder: Final = msgspec.json.Decoder(dict[str, _Entry])
_metadata_decoder: Final = msgspec.json.Decoder(dict[str, str])
_LEADING_METADATA: Final = re.compile(rb'\{"__metadata__": ?(\{(?:[^"{}]|"(?:[^"\\]|\\.)*+")*+\})(?:, ?(?=")|(?=\}\Z))')


def header_length(first_bytes: bytes, *, file_bytes: int, path: str) -> int:
    """8 + N of a file of `file_bytes`, from its first 8 bytes (fewer where the file has fewer).

    Raises CheckpointError where that cannot be: it names the missing bytes of a truncated file, and what a file that is
    no safetensors file looks like. So whoever allocates the result is safe from hostile lengths.
    """
    alike = lookalike(first_bytes[:LENGTH_BYTES])
    if alike is not None:
        raise refusal(path, f"not a safetensors file: it looks like {alike}")
    if file_bytes < LENGTH_BYTES or len(first_bytes) < LENGTH_BYTES:
        words = "too small for a safetensors header (empty or truncated): fetch it again"
        raise refusal(path, f"the file has {file_bytes} bytes: {words}")
    length = int.from_bytes(first_bytes[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        words = f"its first 8 bytes give a header length of {length}, above the format's {MAX_HEADER_BYTES}"
        raise refusal(path, f"not a safetensors file, or damaged: {words}")
    missing = LENGTH_BYTES + length - file_bytes
    if missing > 0:
        words = f"its header takes {LENGTH_BYTES + length} bytes, the file has {file_bytes}: {missing} are missing"
        raise refusal(path, f"{words} (the download or copy is incomplete, fetch the file again)")
    return LENGTH_BYTES + length


def parse_header(raw: Text, *, file_bytes: int, path: str) -> ParsedHeader:
    """Validates the 8 + N bytes `raw` at the start of a file of `file_bytes`. Raises CheckpointError, nothing else.

    An accepted header describes the whole file: the tensors' ranges touch each other from the header's end to the end
    of the file, and every range is as long as dtype and shape say.
    """
    header_bytes = header_length(bytes(raw[:LENGTH_BYTES]), file_bytes=file_bytes, path=path)
    if len(raw) != header_bytes:
        raise refusal(path, f"{len(raw)} bytes of its header were given, it has {header_bytes}")
    payload_bytes = file_bytes - header_bytes
    entries = proven_entries(raw, LENGTH_BYTES) or strict_entries(bytes(raw[LENGTH_BYTES:]), path)
    layout = proven_layout(entries, payload_bytes)
    if layout is None:
        raise fault_of(strict_entries(bytes(raw[LENGTH_BYTES:]), path), payload_bytes, path)
    return ParsedHeader(
        names=layout.names,
        dtype_ids=layout.dtype_ids,
        shapes=layout.shapes,
        starts=layout.begins + header_bytes,
        stops=layout.ends + header_bytes,
        metadata=entries.metadata,
        header_bytes=header_bytes,
        sha256=hashlib.sha256(raw).hexdigest(),
    )


def proven_entries(raw: Text, start: int = 0) -> Entries | None:
    """The fast look at raw[start:]: the entries, or None where the text is not canonical JSON of entries, for whatever
    reason."""
    start = after_white_space(raw, start, len(raw))
    stop = before_white_space(raw, start, len(raw))
    if stop - start < 2 or raw[start] != _OPENING or raw[stop - 1] != _CLOSING:
        return None
    found = Entries([], [], [], array("q"), array("q"), {})
    same: dict[tuple[int, ...], tuple[int, ...]] = {}
    try:
        match = _LEADING_METADATA.match(raw, start, stop)
        if match is not None:
            found.metadata.update(_metadata_decoder.decode(match[1]))
            if not is_canonical(match[1], msgspec.json.encode(found.metadata)):
                return None
        first = start + 1 if match is None else match.end()
        for number, text in enumerate(members(raw, first, stop - 1, _ENDING)):
            decoded = _entries_decoder.decode(text)
            if METADATA_KEY in decoded or not is_canonical(text, msgspec.json.encode(decoded)):
                return None
            if number and not decoded:  # nothing comes after the last comma
                return None
            _add(found, decoded, same)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return None
    return None if number and any_twice([found.names]) else found


def _add(found: Entries, decoded: dict[str, _Entry], same: dict[tuple[int, ...], tuple[int, ...]]) -> None:
    """`same` makes equal shapes one object: to let go of 250,000 objects at once takes as long as to make them."""
    values = decoded.values()
    shapes = [entry.shape for entry in values]
    found.names.extend(decoded)
    found.codes.extend([entry.dtype for entry in values])
    found.shapes.extend(map(same.setdefault, shapes, shapes))
    found.begins.extend([entry.data_offsets.begin for entry in values])
    found.ends.extend([entry.data_offsets.end for entry in values])


def is_canonical(text: bytes, encoded: bytes) -> bool:
    """Whether `text` is `encoded` (a value as msgspec writes it), letter by letter.

    True also for the single spaces that Python's `json.dumps` puts after commas and colons: `format` adds those to the
    encoder's text and changes nothing else.
    """
    return text == encoded or (len(text) > len(encoded) and text == msgspec.json.format(encoded, indent=0))
