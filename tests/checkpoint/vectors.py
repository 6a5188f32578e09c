"""The format's accept and reject vectors, byte by byte, as the format note lists them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Tensors: TypeAlias = Mapping[str, tuple[str, tuple[int, ...], tuple[int, int]]]

MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Accepted:
    """A file that must be accepted; `tensors` is name -> (dtype, shape, payload range)."""

    name: str
    file: bytes
    tensors: Tensors
    metadata: dict[str, str]


@dataclass(frozen=True)
class Rejected:
    """A file that must be refused: `cause` stands in the message; `policy` marks what only we refuse."""

    name: str
    file: bytes
    cause: str
    tensor: str | None = None
    policy: bool = False


def file_of(header: str | bytes, payload: int | bytes = 0) -> bytes:
    """A whole file around a header's text; `payload` bytes, or that many of them."""
    text = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    data = payload if isinstance(payload, bytes) else bytes(i * 37 % 251 for i in range(payload))
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}, separators=(",", ":"))


def one(dtype: str = "U8", shape: str = "[4]", offsets: str = "[0,4]", more: str = "") -> str:
    """One tensor `a`; its fields as JSON text, so that they can be wrong."""
    return f'{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}{more}}}}}'


T = one()
_A: Tensors = {"a": ("U8", (4,), (0, 4))}
_E = entry("U8", [4], 0, 4)


def _ok(
    name: str,
    header: str | bytes,
    payload: int = 4,
    tensors: Tensors | None = None,
    metadata: dict[str, str] | None = None,
) -> Accepted:
    return Accepted(name, file_of(header, payload), _A if tensors is None else tensors, metadata or {})


def _named(label: str, name_json: str, name: str) -> Accepted:
    return _ok(label, f"{{{name_json}:{_E}}}", 4, {name: ("U8", (4,), (0, 4))})


def _single(label: str, dtype: str, shape: list[int], size: int) -> Accepted:
    return _ok(label, f'{{"a":{entry(dtype, shape, 0, size)}}}', size, {"a": (dtype, tuple(shape), (0, size))})


ACCEPTED: list[Accepted] = [
    _ok("plain", T),
    _ok("no-tensors", "{}", 0, {}),
    _ok("metadata-alone", '{"__metadata__":{"format":"pt"}}', 0, {}, {"format": "pt"}),
    _ok("metadata-empty", f'{{"__metadata__":{{}},"a":{_E}}}'),
    _ok("metadata-null", f'{{"__metadata__":null,"a":{_E}}}'),
    _ok("metadata-first", f'{{"__metadata__":{{"k":"v"}},"a":{_E}}}', metadata={"k": "v"}),
    _ok("metadata-last", f'{{"a":{_E},"__metadata__":{{"k":"v"}}}}', metadata={"k": "v"}),
    _ok("metadata-with-braces", f'{{"__metadata__":{{"k":"}},\\"{{"}},"a":{_E}}}', metadata={"k": '},"{'}),
    *(
        _ok(f"padding-{count}-{name}", T + character * count)
        for name, character in (("space", " "), ("tab", "\t"), ("cr", "\r"), ("lf", "\n"))
        for count in (1, 7)
    ),
    _ok("leading-white-space", " \n\t\r" + T),
    _ok("spaced-like-json-dumps", json.dumps(json.loads(T))),
    _ok("indented", json.dumps(json.loads(T), indent=2)),
    _ok("fields-in-another-order", '{"a":{"shape":[4],"data_offsets":[0,4],"dtype":"U8"}}'),
    _single("scalar", "I32", [], 4),
    _single("empty-tensor", "U8", [2, 0], 0),
    *(
        _ok(
            f"empty-tensor-{where}",
            f'{{"a":{entry("U8", [4], 0, 4)},"b":{entry("U8", [2], 4, 6)},"e":{entry("F32", [0, 3], at, at)}}}',
            6,
            {"a": ("U8", (4,), (0, 4)), "b": ("U8", (2,), (4, 6)), "e": ("F32", (0, 3), (at, at))},
        )
        for where, at in (("before", 0), ("between", 4), ("after", 6))
    ),
    _single("zero-before-a-huge-dimension", "U8", [0, 2**63, 4], 0),
    _single("product-below-2^64-then-zero", "U8", [2**64 - 1, 0], 0),
    _ok(
        "header-order-unlike-offset-order",
        f'{{"b":{entry("U8", [2], 4, 6)},"a":{_E}}}',
        6,
        {"a": ("U8", (4,), (0, 4)), "b": ("U8", (2,), (4, 6))},
    ),
    _ok("odd-header-length", T + " " * (1 - len(T) % 2)),
    _ok(
        "unaligned-f32",
        f'{{"a":{entry("U8", [3], 0, 3)},"b":{entry("F32", [2], 3, 11)}}}',
        11,
        {"a": ("U8", (3,), (0, 3)), "b": ("F32", (2,), (3, 11))},
    ),
    _single("f8-e8m0", "F8_E8M0", [4], 4),
    _single("f8-e4m3fnuz", "F8_E4M3FNUZ", [4], 4),
    _single("f8-e5m2fnuz", "F8_E5M2FNUZ", [4], 4),
    _single("bf16", "BF16", [2], 4),
    _single("c64", "C64", [2], 16),
    _single("f4", "F4", [8], 4),
    _single("f4-two-dimensions", "F4", [2, 8], 8),
    _single("f6-e2m3", "F6_E2M3", [4], 3),
    _single("f6-e3m2", "F6_E3M2", [4], 3),
    _single("rank-41", "U8", [1] * 40 + [4], 4),
    _named("name-empty", '""', ""),
    _named("name-like-a-path", '"../../x"', "../../x"),
    _named("name-with-escaped-nul", '"a\\u0000b"', "a\0b"),
    _named("name-escaped", '"\\u0061\\/\\ud83d\\ude00"', "a/\U0001f600"),
    _ok(
        "names-unlike-by-normalisation-only",
        f'{{"\u00e9":{_E},"e\u0301":{entry("U8", [2], 4, 6)}}}',
        6,
        {"\u00e9": ("U8", (4,), (0, 4)), "e\u0301": ("U8", (2,), (4, 6))},
    ),
    *(
        _ok(f"unknown-field-{name}", one(more=f',"x":{value}'))
        for name, value in (
            ("string", '"y"'),
            ("null", "null"),
            ("real", "1.5e3"),
            ("minus-zero", "-0"),
            ("beyond-u64", "18446744073709551616"),
            ("nested", '{"y":[1,{"z":[]}]}'),
            ("124-deep", "[" * 124 + "]" * 124),
        )
    ),
    _ok("unknown-field-twice", one(more=',"x":1,"x":2')),
    _ok("dtype-as-a-variant", '{"a":{"dtype":{"U8":null},"shape":[4],"data_offsets":[0,4]}}'),
    _ok("escaped-field-and-dtype", '{"a":{"\\u0064type":"\\u00558","shape":[4],"data_offsets":[0,4]}}'),
]


def longest_header() -> bytes:
    """The header of exactly the format's cap; made on demand, 100 MB."""
    return file_of(b"{}".ljust(MAX_HEADER_BYTES))


def _no(name: str, header: str | bytes, cause: str, payload: int = 4, tensor: str | None = None) -> Rejected:
    return Rejected(name, file_of(header, payload), cause, tensor)


def _bad_entry(name: str, cause: str, payload: int = 4, **fields: str) -> Rejected:
    return _no(name, one(**fields), cause, payload, "a")


def _ranges(name: str, cause: str, payload: int, tensor: str | None, **ranges: tuple[int, int]) -> Rejected:
    entries = ",".join(f'"{name}":{entry("U8", [max(0, e - b)], b, e)}' for name, (b, e) in ranges.items())
    return _no(name, f"{{{entries}}}", cause, payload, tensor)


_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4\n"

REJECTED: list[Rejected] = [
    # too small, or a length that cannot be
    Rejected("empty-file", b"", "0 bytes: too small"),
    Rejected("seven-bytes", b"\x02\0\0\0\0\0\0", "7 bytes: too small"),
    Rejected("length-0", bytes(8), "zero bytes"),
    Rejected("length-beyond-the-file", (100).to_bytes(8, "little") + b"{}", "98 are missing"),
    Rejected("length-100000001", (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", "header length of 100000001"),
    Rejected("length-2^63", (1 << 63).to_bytes(8, "little") + b"{}", "header length of 9223372036854775808"),
    Rejected("length-2^64-1", b"\xff" * 8 + b"{}", "header length of 18446744073709551615"),
    # not a safetensors file
    Rejected("git-lfs-pointer", _POINTER, "Git LFS pointer"),
    Rejected("html-page", b"<!DOCTYPE html>\n<html><body>404</body></html>", "HTML"),
    Rejected("html-page-after-a-newline", b"\n<html><head></head></html>", "HTML"),
    Rejected("zip-of-a-pickle", b"PK\x03\x04" + bytes(60), "zip archive"),
    Rejected("zero-filled-start", bytes(4096) + b"x", "zero bytes"),
    Rejected("zero-filled-header", file_of(bytes(64)), "filled with zero bytes"),
    Rejected("json-without-a-length", T.encode() + b"    ", "JSON text without"),
    Rejected("gguf", b"GGUF\x03\0\0\0" + bytes(60), "GGUF"),
    Rejected("pickle", b"\x80\x02}q\x00(X\x01\0" + bytes(60), "pickle"),
    # not strict JSON
    _no("byte-ff", b"\xff" + T.encode(), "not UTF-8"),
    _no("byte-ff-in-a-name", T.encode().replace(b'"a"', b'"\xff"'), "not UTF-8"),
    _no("bom", b"\xef\xbb\xbf" + T.encode(), "not strict JSON"),
    _no("utf-16", T.encode("utf-16-le"), "not strict JSON"),
    _no("utf-16-bom", T.encode("utf-16"), "not UTF-8"),
    _no("nan", one(more=',"x":NaN'), "not strict JSON"),
    _no("infinity", one(more=',"x":-Infinity'), "not strict JSON"),
    _no("nan-as-offset", one(offsets="[0,NaN]"), "not strict JSON"),
    _no("top-level-list", "[]", "an array", 0),
    _no("top-level-null", "null", "null", 0),
    _no("top-level-string", '"a"', "the string", 0),
    _no("top-level-number", "5", "the number", 0),
    _no("lone-surrogate", T.replace('"a"', '"\\ud800"'), "surrogate"),
    _no("lone-low-surrogate", T.replace('"a"', '"x\\udc00"'), "surrogate"),
    _no("lone-surrogate-raw", T.replace('"a"', '"\ud800"'), "not UTF-8"),
    _no("lone-surrogate-in-metadata", f'{{"__metadata__":{{"k":"\\ud800"}},"a":{_E}}}', "surrogate"),
    _no("lone-surrogate-in-an-unknown-field", one(more=',"x":["\\ud800"]'), "surrogate"),
    _no("metadata-twice", f'{{"__metadata__":{{}},"a":{_E},"__metadata__":{{}}}}', "twice"),
    _no("metadata-twice-null", f'{{"__metadata__":null,"a":{_E},"__metadata__":null}}', "twice"),
    _no("metadata-twice-escaped", f'{{"__metadata__":{{}},"a":{_E},"\\u005f_metadata__":{{}}}}', "twice"),
    _bad_entry("dtype-twice", "`dtype` stands twice", more=',"dtype":"U8"'),
    _bad_entry("shape-twice", "`shape` stands twice", more=',"shape":[4]'),
    _bad_entry("offsets-twice", "`data_offsets` stands twice", more=',"data_offsets":[0,4]'),
    _no("nul-padding", T.encode() + b"\0" * 5, "not strict JSON"),
    _no("form-feed-padding", T + "\f", "not strict JSON"),
    _no("no-break-space-padding", T + "\u00a0", "not strict JSON"),
    _no("trailing-comma", T[:-1] + ",}", "not strict JSON"),
    _no("trailing-comma-in-a-list", one(shape="[4,]"), "not strict JSON"),
    _no("a-second-value", T + "{}", "not strict JSON"),
    _no("leading-zero", one(shape="[04]"), "not strict JSON"),
    _no("raw-newline-in-a-name", T.replace('"a"', '"a\n"'), "not strict JSON"),
    _no("raw-nul-in-a-name", T.replace('"a"', '"a\0"'), "not strict JSON"),
    _no("bad-escape", T.replace('"a"', '"\\x61"'), "not strict JSON"),
    _no("cut-off", T[:-1], "not strict JSON"),
    _no("white-space-only", "   ", "not strict JSON", 0),
    _no("single-quotes", T.replace('"', "'"), "not strict JSON"),
    _no("comment", T + "//x", "not strict JSON"),
    _no("nested-100000-deep", "[" * 100_000 + "]" * 100_000, "nested too deeply", 0),
    _no("nested-100000-deep-objects", '{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply", 0),
    _no("nested-100000-deep-unclosed", "[" * 100_000, "nested too deeply", 0),
    _no("unknown-field-100000-deep", one(more=',"x":' + "[" * 100_000 + "]" * 100_000), "nested too deeply"),
    _no("unknown-field-126-deep", one(more=',"x":' + "[" * 126 + "]" * 126), "nested too deeply"),
    _no("integer-of-5000-digits", one(shape=f"[{'1' * 5000}]"), "out of range"),
    _no("integer-of-5000-digits-ignored", one(more=f',"x":{"1" * 5000}'), "out of range"),
    _no("real-out-of-range", one(more=',"x":1e999'), "out of range"),
    # metadata
    *(
        _no(f"metadata-value-{name}", f'{{"__metadata__":{{"k":{value}}},"a":{_E}}}', "`__metadata__` holds")
        for name, value in (("int", "1"), ("null", "null"), ("object", "{}"), ("list", "[]"), ("true", "true"))
    ),
    _no("metadata-list", f'{{"__metadata__":[],"a":{_E}}}', "`__metadata__` is an array"),
    _no("metadata-string", f'{{"__metadata__":"x","a":{_E}}}', "`__metadata__` is the string"),
    _no(
        "metadata-last-like-a-tensor",
        f'{{"a":{_E},"__metadata__":{entry("U8", [0], 4, 4)}}}',
        "`__metadata__` holds",
    ),
    _no(
        "metadata-twice-the-second-like-a-tensor",
        f'{{"__metadata__":{{}},"a":{_E},"__metadata__":{entry("U8", [0], 4, 4)}}}',
        "twice",
    ),
    _no("metadata-like-a-tensor", f'{{"__metadata__":{_E}}}', "`__metadata__` holds"),
    # entries
    *(
        _bad_entry(f"{label}-{name}", f"`{label}` holds", shape=shape.format(value), offsets=offsets.format(value))
        for label, shape, offsets in (("shape", "[{}]", "[0,4]"), ("data_offsets", "[4]", "[0,{}]"))
        for name, value in (
            ("4.0", "4.0"),
            ("4e0", "4e0"),
            ("string", '"4"'),
            ("true", "true"),
            ("null", "null"),
            ("negative", "-4"),
            ("minus-zero", "-0"),
            ("2^64", "18446744073709551616"),
            ("list", "[4]"),
        )
    ),
    _bad_entry("shape-number", "`shape` is the number", shape="4"),
    _bad_entry("shape-field-null", "`shape` is null", shape="null"),
    _bad_entry("shape-object", "`shape` is an object", shape="{}"),
    _bad_entry("offsets-of-1", "holds 1 numbers", offsets="[0]"),
    _bad_entry("offsets-of-3", "holds 3 numbers", offsets="[0,4,4]"),
    _bad_entry("offsets-field-null", "`data_offsets` is null", offsets="null"),
    *(
        _no(f"missing-{field}", json.dumps({"a": {k: v for k, v in json.loads(_E).items() if k != field}}), "missing")
        for field in ("dtype", "shape", "data_offsets")
    ),
    *(
        _bad_entry(f"dtype-{code or 'empty'}", "unknown dtype", dtype=code)
        for code in ("u8", "float32", "C128", "unknown", "", "F4 ", "F8_E4M3FN")
    ),
    _no("dtype-number", one().replace('"U8"', "8"), "`dtype` is the number"),
    _no("dtype-null", one().replace('"U8"', "null"), "`dtype` is null"),
    _no("dtype-variant-with-a-value", one().replace('"U8"', '{"U8":{}}'), "`dtype` is an object"),
    _no("entry-null", '{"a":null}', "its entry is null"),
    _no("entry-number", '{"a":5}', "its entry is the number"),
    _no("entry-string", '{"a":"U8"}', "its entry is the string"),
    # file length
    Rejected("one-byte-too-many", file_of(T, 5), "1 extra bytes"),
    Rejected("one-byte-too-few", file_of(T, 3), "1 bytes are missing"),
    Rejected("no-payload", file_of(T, 0), "4 bytes are missing"),
    Rejected("trailing-newline", file_of(T, b"1234\n"), "1 extra bytes"),
    Rejected("payload-without-tensors", file_of("{}", 1), "1 extra bytes"),
    # offsets
    _ranges("hole", "1 bytes belong to no tensor", 9, "b", a=(0, 4), b=(5, 9)),
    _ranges("first-offset-above-0", "1 bytes belong to no tensor", 5, "a", a=(1, 5)),
    _ranges("overlap", "overlap", 6, "b", a=(0, 4), b=(3, 6)),
    _ranges("aliasing", "overlap", 4, "b", a=(0, 4), b=(0, 4)),
    _ranges("inside-another", "overlap", 4, "b", a=(0, 4), b=(1, 3)),
    _bad_entry("reversed", "reversed", offsets="[4,0]"),
    _ranges("reversed-after-another", "reversed", 4, "b", a=(0, 4), b=(4, 2)),
    _ranges("empty-inside-another", "overlap", 4, "e", a=(0, 4), e=(2, 2)),
    _ranges("empty-past-the-end", "belong to no tensor", 4, "e", a=(0, 4), e=(5, 5)),
    _no("second-a-elsewhere", f'{{"a":{_E},"a":{entry("U8", [4], 4, 8)}}}', "twice", 8),
    # sizes
    _bad_entry("shape-smaller-than-bytes", "takes 3 bytes, its data_offsets span 4", shape="[3]"),
    _bad_entry("shape-larger-than-bytes", "takes 5 bytes, its data_offsets span 4", shape="[5]"),
    _bad_entry("dtype-wider-than-bytes", "takes 8 bytes, its data_offsets span 4", dtype="U16"),
    _bad_entry("one-element-in-no-bytes", "takes 1 bytes, its data_offsets span 0", 0, shape="[1]", offsets="[0,0]"),
    _bad_entry("no-element-in-4-bytes", "takes 0 bytes, its data_offsets span 4", shape="[0]"),
    _bad_entry("overflow-that-wraps-to-bytes", "overflows", shape="[2,18446744073709551614]"),
    _bad_entry("overflow-that-wraps-to-0", "overflows", 0, shape="[4294967296,4294967296]", offsets="[0,0]"),
    _bad_entry("overflow-before-a-zero", "overflows", 0, shape="[9223372036854775808,4,0]", offsets="[0,0]"),
    _bad_entry("overflow-of-bits", "overflows", 0, dtype="F64", shape="[288230376151711744]", offsets="[0,0]"),
    _bad_entry("f4-odd", "28 bits, not a whole number of bytes", dtype="F4", shape="[7]"),
    _bad_entry("f4-single", "4 bits, not a whole number of bytes", 1, dtype="F4", shape="[1]", offsets="[0,1]"),
    _bad_entry(
        "f6-unaligned", "18 bits, not a whole number of bytes", 3, dtype="F6_E2M3", shape="[3]", offsets="[0,3]"
    ),
    # stricter than the reference on purpose
    Rejected("same-name-twice-alike", file_of(f'{{"a":{_E},"a":{_E}}}', 4), "twice", policy=True),
    Rejected("same-name-twice-escaped", file_of(f'{{"a":{_E},"\\u0061":{_E}}}', 4), "twice", policy=True),
    Rejected("metadata-key-twice", file_of('{"__metadata__":{"k":"1","k":"1"}}'), "twice", policy=True),
    Rejected("entry-as-an-array", file_of('{"a":["U8",[4],[0,4]]}', 4), "an array", "a", policy=True),
]
