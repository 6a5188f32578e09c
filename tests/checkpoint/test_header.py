"""What a parsed header promises: order, columns, the same result from both looks, bounded work, helpful errors."""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
import threading
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader_service.checkpoint.dtypes import DTYPE_LIST, DTYPES, DType, dtype_id
from loader_service.checkpoint.header import ParsedHeader, header_length, parse_header, proven_entries
from loader_service.checkpoint.layout import element_count
from loader_service.errors import CheckpointError
from tests.checkpoint.reference import reference_meaning
from tests.checkpoint.vectors import entry, file_of, one


def parse(file: bytes, path: str = "x.safetensors") -> ParsedHeader:
    length = header_length(file[:8], file_bytes=len(file), path=path)
    return parse_header(file[:length], file_bytes=len(file), path=path)


def refused(file: bytes) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        parse(file)
    return caught.value


def test_columns_are_sorted_by_range_and_then_by_name() -> None:
    parts = {"z": (0, 4), "b": (4, 4), "a": (4, 4), "m": (4, 6), "c": (6, 6)}
    text = ",".join(f'"{name}":{entry("U8", [end - begin], begin, end)}' for name, (begin, end) in parts.items())
    for order in (text, ",".join(reversed(text.replace("},", "}\n").split("\n")))):
        header = parse(file_of(f"{{{order}}}", 6))
        assert header.names == ["z", "a", "b", "m", "c"]
        assert (header.starts - header.header_bytes).tolist() == [0, 4, 4, 4, 6]
        assert (header.stops - header.header_bytes).tolist() == [4, 4, 4, 6, 6]
        assert header.shapes == [(4,), (0,), (0,), (2,), (0,)]


def test_column_types_hash_and_length() -> None:
    file = file_of(f'{{"__metadata__":{{"k":"v"}},"a":{entry("BF16", [2, 3], 0, 12)}}}  ', 12)
    header = parse(file)
    assert [str(column.dtype) for column in (header.dtype_ids, header.starts, header.stops)] == [
        "uint8",
        "int64",
        "int64",
    ]
    assert header.dtype_ids.tolist() == [dtype_id("BF16")]
    assert header.header_bytes == len(file) - 12
    assert header.sha256 == hashlib.sha256(file[:-12]).hexdigest()
    assert header.metadata == {"k": "v"}


def test_every_dtype_is_measured_by_its_bits() -> None:
    for dtype in DTYPE_LIST:
        header = parse(file_of(f'{{"a":{entry(dtype.code, [8, 3], 0, 3 * dtype.bits)}}}', 3 * dtype.bits))
        assert DTYPE_LIST[header.dtype_ids[0]] is DTYPES[dtype.code] is dtype
        assert refused(file_of(f'{{"a":{entry(dtype.code, [8, 3], 0, 3 * dtype.bits - 1)}}}', 3 * dtype.bits - 1))


def test_dtype_ids_fit_their_column_and_torch_names_exist() -> None:
    import torch

    assert len(DTYPE_LIST) < 256
    assert [dtype.code for dtype in DTYPE_LIST if dtype.torch_name is None] == ["F6_E2M3", "F6_E3M2"]
    for dtype in DTYPE_LIST:
        if dtype.torch_name is not None:
            held: torch.dtype = getattr(torch, dtype.torch_name)
            assert held.itemsize * 8 == dtype.bits * (2 if dtype.code == "F4" else 1)
    with pytest.raises(KeyError):
        dtype_id("bf16")


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((), 1),
        ((2, 0), 0),
        ((0, 2**63, 4), 0),
        ((2**63, 4, 0), None),
        ((2**32, 2**32), None),
        ((2, 2**64 - 2), None),
        ((2**64 - 1,), 2**64 - 1),
        ((2**64,), None),
        ((0, 2**64), None),
        ((0, -1), None),
        ((-2, -2), None),
    ],
)
def test_element_count_is_a_u64_multiplied_from_left_to_right(shape: tuple[int, ...], count: int | None) -> None:
    assert element_count(shape) == count


def test_sizes_near_the_limit_of_int64_are_judged_exactly() -> None:
    """No such file exists, but the arithmetic must not wrap: 2^62 bytes are fine, one element more is not."""
    for code, elements in (("U8", 1 << 60), ("F4", 1 << 61), ("F64", 1 << 57)):
        text = f'{{"a":{entry(code, [elements], 0, 1 << 60)}}}'.encode()
        raw = len(text).to_bytes(8, "little") + text
        header = parse_header(raw, file_bytes=len(raw) + (1 << 60), path="x")
        assert header.stops[0] - header.starts[0] == 1 << 60
        text = text.replace(str(elements).encode(), str(elements + 1).encode())
        raw = len(text).to_bytes(8, "little") + text
        with pytest.raises(CheckpointError):
            parse_header(raw, file_bytes=len(raw) + (1 << 60), path="x")


def test_offsets_beyond_int64_are_refused() -> None:
    for begin, end in ((0, 2**63), (0, 2**64 - 1), (2**63, 2**63), (2**64 - 1, 0)):
        error = refused(file_of(one(shape="[0]", offsets=f"[{begin},{end}]")))
        assert error.tensor == "a"


@pytest.mark.parametrize(
    "text",
    [
        one(),
        json.dumps(json.loads(one())),
        f'{{"__metadata__":{{"format":"pt"}},"a":{entry("U8", [4], 0, 4)}}}',
        f'{{"__metadata__": {{"a": "}}", "b": ""}}, "a": {json.dumps(json.loads(one())["a"])}}}',
        '{"__metadata__":{"format":"pt"}}',
        f'{{"\u00e9\U0001f600":{entry("U8", [4], 0, 4)}}}',
        "{}",
    ],
)
def test_texts_of_the_usual_writers_take_the_fast_look(text: str) -> None:
    assert proven_entries(text.encode()) is not None


@pytest.mark.parametrize(
    "text",
    [
        f'{{"a":{entry("U8", [4], 0, 4)},"a":{entry("U8", [4], 0, 4)}}}',
        one(more=',"dtype":"U8"'),
        one(more=',"x":1e999'),
        one(shape="[-0]"),
        one(shape="[4.0]"),
        one(offsets="[0,4,4]"),
        '{"__metadata__":{"k":"1","k":"1"}}',
        '{"__metadata__":{},"__metadata__":{}}',
        '{"__metadata__":{"k":"\\ud800"}}',
        one() + " {}",
        "[" * 100_000,
        one(more=',"x":' + "[" * 100_000 + "]" * 100_000),
        one().replace('"a"', '"\\ud800"'),
        "",
    ],
    ids=lambda text: text[:60] or "empty",
)
def test_what_a_lax_decoder_forgives_is_never_proven(text: str) -> None:
    assert proven_entries(text.encode()) is None


def _sharing_one_range(names: int) -> bytes:
    shared = entry("U8", [4], 0, 4)
    return file_of("{" + ",".join(f'"t{i}":{shared}' for i in range(names)) + "}", 4)


def test_100000_names_that_share_one_range_are_refused_in_bounded_time() -> None:
    file = _sharing_one_range(100_000)
    began = time.process_time()
    error = refused(file)
    assert "overlap" in error.message
    assert time.process_time() - began < 10  # a quadratic look would take minutes


def test_names_that_share_one_range_take_memory_in_proportion_to_the_header() -> None:
    peaks = []
    for names in (2_000, 20_000):
        file = _sharing_one_range(names)
        tracemalloc.start()
        refused(file)
        peaks.append(tracemalloc.get_traced_memory()[1] / len(file))
        tracemalloc.stop()
    assert max(peaks) < 30
    assert peaks[1] < 1.5 * peaks[0]


def test_100000_empty_tensors_at_one_offset_are_accepted_in_name_order() -> None:
    shared = entry("U8", [0], 0, 0)
    names = [f"t{i}" for i in range(100_000)]
    header = parse(file_of("{" + ",".join(f'"{name}":{shared}' for name in names) + "}", 0))
    assert header.names == sorted(names)


def test_deep_nesting_is_refused_also_from_deep_in_a_callers_stack() -> None:
    def descend(levels: int) -> CheckpointError:
        return descend(levels - 1) if levels else refused(file_of("[" * 100_000))

    assert "nested too deeply" in descend(200).message
    outcome: list[CheckpointError] = []
    thread = threading.Thread(target=lambda: outcome.append(refused(file_of('{"a":' * 100_000))))
    thread.start()
    thread.join()
    assert "nested too deeply" in outcome[0].message


def test_the_interpreters_limit_on_digits_does_not_matter() -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        assert "out of range" in refused(file_of(one(shape=f"[{'1' * 5000}]"), 4)).message
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.parametrize("name", ["n" * 5_000_000, "\x1b[31m\n" * 50, "\u202e" * 3000])
def test_hostile_names_are_clipped_and_escaped_in_messages(name: str) -> None:
    error = refused(file_of(f"{{{json.dumps(name)}:null}}"))
    assert len(error.message) < 2000
    assert error.message.isprintable()
    assert error.tensor is not None
    assert len(error.tensor) < 2000


def test_huge_shapes_are_clipped_in_messages() -> None:
    error = refused(file_of(one(shape="[" + "1," * 100_000 + "5]"), 4))
    assert len(error.message) < 1000
    assert error.tensor == "a"


def test_raw_bytes_of_another_length_than_the_header_are_refused() -> None:
    file = file_of(one(), 4)
    for raw in (file, file[:-5], file[:8]):
        with pytest.raises(CheckpointError, match="bytes of its header were given"):
            parse_header(raw, file_bytes=len(file), path="x")


_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_names = _text.filter(lambda name: name != "__metadata__")
_tensors = st.tuples(st.sampled_from(DTYPE_LIST), st.lists(st.integers(0, 5), max_size=3))


@given(
    tensors=st.dictionaries(_names, _tensors, max_size=6),
    metadata=st.none() | st.dictionaries(_text, st.text('a}"\\\u00e9'), max_size=3),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:")]),
    ascii_only=st.booleans(),
    padding=st.text(" \t\r\n", max_size=5),
    randomness=st.randoms(use_true_random=False),
)
def test_any_valid_header_reads_back_as_it_was_written(
    tensors: dict[str, tuple[DType, list[int]]],
    metadata: dict[str, str] | None,
    separators: tuple[str, str],
    ascii_only: bool,
    padding: str,
    randomness: random.Random,
) -> None:
    members: list[tuple[str, object]] = [] if metadata is None else [("__metadata__", metadata)]
    written: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        bits = dtype.bits * math.prod(shape)
        dims, bits = ([*shape, 4], bits * 4) if bits % 8 else (shape, bits)
        members.append((name, {"dtype": dtype.code, "shape": dims, "data_offsets": [offset, offset + bits // 8]}))
        written[name] = (dtype.code, tuple(dims), offset, offset + bits // 8)
        offset += bits // 8
    randomness.shuffle(members)
    text = json.dumps(dict(members), separators=separators, ensure_ascii=ascii_only) + padding
    file = file_of(text, offset)
    header = parse(file)
    base = header.header_bytes
    assert header.metadata == (metadata or {})
    order = sorted(written, key=lambda name: (*written[name][2:], name))
    assert header.names == order
    assert [DTYPE_LIST[i].code for i in header.dtype_ids] == [written[name][0] for name in order]
    assert header.shapes == [written[name][1] for name in order]
    assert header.starts.tolist() == [base + written[name][2] for name in order]
    assert header.stops.tolist() == [base + written[name][3] for name in order]
    meaning = reference_meaning(file)
    assert meaning is not None
    assert {name: data for name, (_, _, data) in meaning.items()} == {
        name: file[base + begin : base + end] for name, (_, _, begin, end) in written.items()
    }


@given(st.binary(max_size=200), st.binary(max_size=10))
def test_no_bytes_raise_anything_but_the_typed_error(text: bytes, payload: bytes) -> None:
    for file in (text, file_of(text, payload)):
        try:
            parse(file)
        except CheckpointError:
            assert reference_meaning(file) is None
