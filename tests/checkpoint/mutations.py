"""Valid headers, ways to damage them, and what makes a difference from the reference legitimate."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from tests.checkpoint.vectors import file_of

_CODES = ["U8", "I8", "BOOL", "F16", "BF16", "F32", "F64", "C64", "F8_E4M3", "F4", "F6_E2M3", "U64"]
_BITS = {"U8": 8, "I8": 8, "BOOL": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "U64": 64}
_BITS |= {"F8_E4M3": 8, "F4": 4, "F6_E2M3": 6}
_NAMES = [
    "a",
    "b",
    "model.layers.0.w",
    "",
    "\u00e9",
    "e\u0301",
    "../../x",
    "\0",
    '"',
    "\\",
    "\U0001f600",
    "__metadata",
    "\x7f",
]
_TOKENS = [
    *('"a"', '"__metadata__"', '"dtype"', '"shape"', '"data_offsets"', '"U8"', '"F4"', '"x"', '"\\ud800"', '"\\u0061"'),
    *("{", "}", "[", "]", ",", ":", " ", "\n", "\t", "\0", "null", "true", "NaN", "[]", "{}", "[0,4]", '{"a":1,"a":2}'),
    *("0", "1", "-1", "-0", "4.0", "4e0", "00", "255", "4294967296", "9223372036854775807", "9223372036854775808"),
    *("18446744073709551615", "18446744073709551616", "1e999", "1" * 400, '"' + "z" * 300 + '"', ',"x":[[[{}]]]'),
]
_BYTES = [*b'{}[]",:\\ \n\t0123456789-+.eEutfn', 0, 0x1F, 0x7F, 0x80, 0xC3, 0xED, 0xFF]


def valid_file(rng: random.Random) -> bytes:
    """A file as some writer might lay it out: any order, any spacing, empty tensors anywhere, metadata anywhere."""
    entries: list[tuple[str, object]] = []
    offset = 0
    for name in rng.sample(_NAMES, rng.randrange(5)):
        code = rng.choice(_CODES)
        shape = [rng.choice((0, 1, 1, 2, 3, 4, 8)) for _ in range(rng.randrange(4))]
        bits = _BITS[code]
        for size in shape:
            bits *= size
        if bits % 8:
            shape, bits = [*shape, 4], bits * 4
        entry: dict[str, object] = {"dtype": code, "shape": [*shape], "data_offsets": [offset, offset + bits // 8]}
        if rng.random() < 0.1:
            entry["x"] = rng.choice(["", 1, None, [{"y": []}], 1.5])
        if rng.random() < 0.1:
            entry = dict(rng.sample(list(entry.items()), len(entry)))
        entries.append((name, entry))
        offset += bits // 8
    if rng.random() < 0.2:
        rng.shuffle(entries)
    if rng.random() < 0.5:
        metadata: object = rng.choice([{}, None, {"format": "pt"}, {"a": "}", "\u00e9": '"{\\'}])
        entries.insert(rng.choice((0, 0, len(entries))), ("__metadata__", metadata))
    separators = rng.choice(((",", ":"), (",", ":"), (", ", ": ")))
    text = json.dumps(dict(entries), separators=separators, ensure_ascii=rng.random() < 0.5)
    text = rng.choice(("", "", "", " ", "\n\t")) + text + rng.choice(("", " ", " " * 5, "\n", "\t\r"))
    return file_of(text, offset)


def damaged(file: bytes, rng: random.Random) -> bytes:
    """The file after one to three mutations; the length before the header is mended most of the time."""
    size = int.from_bytes(file[:8], "little")
    text, payload = file[8 : 8 + size], file[8 + size :]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = rng.choice(_TEXT_MUTATIONS)(text, rng)
    kind = rng.random()
    if kind < 0.04:
        payload += bytes(rng.randrange(1, 9))
    elif kind < 0.08:
        payload = payload[: -rng.randrange(1, 9)]
    elif kind < 0.10:
        return (
            rng.choice(
                (size, size + 1, max(0, size - 1), 1 << 63, rng.getrandbits(64), len(text) + len(payload))
            ).to_bytes(8, "little")
            + text
            + payload
        )
    return file_of(text, payload)


def _flip(text: bytes, rng: random.Random) -> bytes:
    if not text:
        return b"{}"
    at = rng.randrange(len(text))
    return text[:at] + bytes([rng.choice(_BYTES)]) + text[at + 1 :]


def _insert(text: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(text) + 1)
    return text[:at] + bytes([rng.choice(_BYTES)]) + text[at:]


def _delete(text: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(text) + 1)
    return text[:at] + text[at + rng.choice((1, 1, 2, 7)) :]


def _repeat(text: bytes, rng: random.Random) -> bytes:
    a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    return text[:b] + text[a:b] + text[b:]


def _spans(text: bytes) -> list[tuple[int, int]]:
    """Rough tokens: strings, numbers and words; good enough to aim at."""
    spans = []
    at = 0
    while at < len(text):
        end = at + 1
        if text[at] == 0x22:
            closing = text.find(b'"', at + 1)
            end = closing + 1 if closing > 0 else len(text)
        elif text[at : at + 1].isalnum() or text[at] == 0x2D:
            while end < len(text) and text[end : end + 1].isalnum():
                end += 1
        spans.append((at, end))
        at = end
    return spans


def _retoken(text: bytes, rng: random.Random) -> bytes:
    spans = _spans(text)
    if not spans:
        return rng.choice(_TOKENS).encode()
    start, end = rng.choice(spans)
    return text[:start] + rng.choice(_TOKENS).encode() + text[end if rng.random() < 0.7 else start :]


def _swap(text: bytes, rng: random.Random) -> bytes:
    spans = [span for span in _spans(text) if span[1] - span[0] > 1 or text[span[0] : span[1]].isalnum()]
    if len(spans) < 2:
        return text
    (a, b), (c, d) = sorted(rng.sample(spans, 2))
    return text[:a] + text[c:d] + text[b:c] + text[a:b] + text[d:]


def _restructure(text: bytes, rng: random.Random) -> bytes:
    """Doubles, renames, drops or exchanges whole members, so that the damage is in the meaning, not the spelling."""
    try:
        pairs = pairs_of(text)
    except ValueError:
        return text
    if not isinstance(pairs, tuple) or not pairs:
        return text
    members = list(pairs)
    at = rng.randrange(len(members))
    name, value = members[at]
    if isinstance(value, tuple) and value and rng.random() < 0.6:
        inner = list(value)
        i = rng.randrange(len(inner))
        edits: list[list[tuple[str, object]]] = [
            [*inner, inner[i]],
            inner[:i] + inner[i + 1 :],
            [*inner, ("x", inner[i][1])],
            [(key, inner[i][1]) for key, _ in inner],
        ]
        value = [item for _, item in inner] if rng.random() < 0.2 else tuple(rng.choice(edits))
        members[at] = (name, value)
    else:
        members.insert(
            rng.randrange(len(members) + 1), rng.choice([(name, value), ("a", value), (name, []), ("x", None)])
        )
    return text_of(tuple(members)).encode("utf-8", "surrogatepass")


_TEXT_MUTATIONS: list[Callable[[bytes, random.Random], bytes]] = [
    *(_flip, _insert, _delete, _repeat, _retoken, _retoken, _retoken, _swap, _restructure, _restructure, _restructure)
]


def pairs_of(text: bytes) -> object:
    """Python's own reading of a JSON text, objects as tuples of pairs; ValueError where it is none."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=tuple)
    except RecursionError:
        raise ValueError("too deep") from None


def text_of(value: object) -> str:
    if isinstance(value, tuple):
        return "{" + ",".join(f"{json.dumps(key)}:{text_of(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text_of, value)) + "]"
    return json.dumps(value)


def is_policy_case(text: bytes) -> bool:
    """Whether one of the three policies applies: a name twice, a metadata key twice, an entry as an array."""
    top = pairs_of(text)
    if not isinstance(top, tuple):
        return False
    names = [name for name, _ in top]
    if len(names) != len(set(names)):
        return True
    for name, value in top:
        if name == "__metadata__" and isinstance(value, tuple) and len(value) != len({key for key, _ in value}):
            return True
        if name != "__metadata__" and isinstance(value, list):
            return True
    return False


def without_unknown_fields(text: bytes) -> bytes | None:
    """The header less its ignored fields; None where Python cannot read it or it has none."""
    try:
        top = pairs_of(text)
    except ValueError:
        return None
    if not isinstance(top, tuple):
        return None
    found = False
    members = []
    for name, value in top:
        if name != "__metadata__" and isinstance(value, tuple):
            kept = tuple(pair for pair in value if pair[0] in ("dtype", "shape", "data_offsets"))
            found = found or len(kept) < len(value)
            members.append((name, kept))
        else:
            members.append((name, value))
    return text_of(tuple(members)).encode("utf-8", "surrogatepass") if found else None
