"""Work in slices finds what work in one go finds: headers, indexes, names that stand twice."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from loader_service.checkpoint import index, slices
from loader_service.checkpoint.header import proven_entries
from loader_service.checkpoint.index import parse_index
from loader_service.checkpoint.slices import (
    AT_ONCE,
    Picked,
    after_white_space,
    any_twice,
    before_white_space,
    column_of,
    members,
    numbers_of,
    slices_of,
)
from loader_service.checkpoint.strict import strict_entries
from loader_service.errors import CheckpointError

COMPACT, SPACED = (",", ":"), (", ", ": ")
ODD_NAMES = ['a]},"b', "a]},", 'q"', "back\\", '\\"]},"x":{', "\u00e9", "", "}", "]}, ", "\n"]


@pytest.fixture(params=[1, 20, 150, 100_000], ids=lambda count: f"slices-of-{count}")
def text_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How long slices of JSON are."""
    count: int = request.param
    monkeypatch.setattr(slices, "TEXT_BYTES", count)
    monkeypatch.setattr(index, "TEXT_BYTES", 0)
    return count


def header_text(names: list[str], separators: tuple[str, str], *, metadata: bool = False) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "]},"}} if metadata else {}
    for i, name in enumerate(names):
        entries[name] = {"dtype": "U8", "shape": [4], "data_offsets": [4 * i, 4 * i + 4]}
    return json.dumps(entries, separators=separators, ensure_ascii=False).encode()


@pytest.mark.parametrize("separators", [COMPACT, SPACED], ids=["compact", "spaced"])
@pytest.mark.parametrize("metadata", [False, True], ids=["bare", "metadata"])
def test_a_header_in_slices_is_the_header(text_bytes: int, separators: tuple[str, str], metadata: bool) -> None:
    text = header_text([f"model.layers.{i}.weight" for i in range(40)], separators, metadata=metadata)
    entries = proven_entries(b" \n" + text + b"  ")
    slow = strict_entries(text, "x")
    assert entries is not None
    for column in ("names", "codes", "shapes", "begins", "ends", "metadata"):
        assert list(getattr(entries, column)) == list(getattr(slow, column))


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_a_name_that_looks_like_the_end_of_an_entry_is_read_or_left_to_the_strict_look(
    text_bytes: int, name: str
) -> None:
    text = header_text(["first", name, "last", name + "more"], COMPACT)
    entries = proven_entries(text)
    assert entries is None or entries.names == strict_entries(text, "x").names
    assert entries is not None or '"' in name or "\\" in name or text_bytes < len(text)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace(b'"n7"', b'"n3"'),  # in another slice
        lambda text: text[:-1] + b",}",
        lambda text: text.replace(b'},"n7"', b'},,"n7"'),
        lambda text: text.replace(b'},"n7"', b'}"n7"'),
        lambda text: text.replace(b'"n7":', b'"n7":\n'),
        lambda text: text[:-1],
        lambda text: text + b"}",
        lambda text: text.replace(b'"n7"', b'"__metadata__"'),
    ],
    ids=["twice", "comma-at-the-end", "two-commas", "no-comma", "odd-space", "open", "closed-twice", "metadata"],
)
def test_what_is_wrong_between_slices_is_never_proven(text_bytes: int, damage: object) -> None:
    text = header_text([f"n{i}" for i in range(12)], COMPACT)
    assert proven_entries(text) is not None
    assert callable(damage)
    assert proven_entries(damage(text)) is None


def weight_map(count: int) -> dict[str, str]:
    return {f"model.layers.{i}.weight": f"s{i % 3}.safetensors" for i in range(count)}


@pytest.mark.parametrize("indent", [None, 2, 0], ids=["line", "indented", "compact"])
@pytest.mark.parametrize(
    "extra", [{}, {"metadata": {"total_size": 5, "note": '"weight_map": {'}}], ids=["bare", "more"]
)
def test_an_index_in_slices_is_the_index(text_bytes: int, indent: int | None, extra: dict[str, object]) -> None:
    separators = COMPACT if indent == 0 else None
    told = {**extra, "weight_map": weight_map(30)}
    raw = json.dumps(told, indent=indent or None, separators=separators).encode() + b"\n"
    assert index._proven_in_slices(raw) is not None
    found = parse_index(raw, "x")
    assert found.weight_map == weight_map(30)
    assert found.shards == {"s0.safetensors", "s1.safetensors", "s2.safetensors"}
    assert len({id(shard) for shard in found.weight_map.values()}) == 3


@pytest.mark.parametrize(
    "raw",
    [
        b'{"metadata":{"weight_map":{"a":"b"}}}',
        b'{"metadata":{"weight_map":{"a":"b"}},"weight_map":""}',
        b'{"weight_map":{"a":"b"},"metadata":{}}',
        b'{"weight_map":"","x\\"weight_map":{"a":"b"}}',
        b'{"weight_map":{"a":"b","c":1}}',
        b'{"weight_map":{"a":"b",}}',
        b'{"weight_map":{"a":"b"}',
        b'{"weight_map":{"a":"b","a":"c"}}',
        b'{"weight_map":{"a":{"weight_map":{"b":"c"}}}}',
        b'{"weight_map": {}',
        b"}}",
        b"",
    ],
    ids=ascii,
)
def test_what_is_not_surely_the_map_is_left_to_the_whole_look(text_bytes: int, raw: bytes) -> None:
    assert index._proven_in_slices(raw) is None


def test_a_name_that_two_slices_of_an_index_hold_is_refused(text_bytes: int) -> None:
    raw = json.dumps({"weight_map": weight_map(30)}).encode().replace(b"layers.17.", b"layers.3.")
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.weight.*twice"):
        parse_index(raw, "x")


def test_members_are_cut_only_after_their_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "TEXT_BYTES", 1)
    text = b'{"a":"1", "b,":"2","c":"3"}'
    found = list(members(text, 1, len(text) - 1, re.compile(b'",')))
    assert found == [b'{"a":"1"}', b'{"b,":"2"}', b'{"c":"3"}']
    assert list(members(memoryview(text), 1, len(text) - 1, re.compile(b'",'))) == found
    assert list(members(b"{}", 1, 1, re.compile(b'",'))) == [b"{}"]
    assert list(members(b'{"a":"1","b":"2",}', 1, 17, re.compile(b'",')))[-1] == b"{}"


@pytest.mark.parametrize(
    "text", [b"", b" ", b"{}", b" \n{ }\t", b" " * 10_000, b"{" + b" " * 10_000 + b"}" + b"\r" * 9_000]
)
def test_white_space_is_passed_over_at_both_ends(text: bytes) -> None:
    start = after_white_space(text, 0, len(text))
    assert text[start : before_white_space(text, start, len(text))] == text.strip(b" \t\n\r")


def test_items_come_in_order_however_many() -> None:
    for count in (0, 1, AT_ONCE, AT_ONCE + 1, 2 * AT_ONCE + 5):
        items = [f"n{i}" for i in range(count)]
        assert [item for some in slices_of(items) for item in some] == items
        ids = np.arange(count)[::-1]
        assert list(numbers_of(ids)) == list(range(count))[::-1]
        chosen = Picked(items, ids)
        assert (len(chosen), list(chosen), chosen[:]) == (count, items[::-1], items[::-1])
        assert [item for some in slices_of(chosen) for item in some] == items[::-1]
        assert not count or chosen[count - 1] == items[0]
        assert column_of(list(range(count)), np.int64).tolist() == list(range(count))
    with pytest.raises(OverflowError):
        column_of([1 << 63], np.int64)


def test_a_text_that_stands_twice_is_found_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [f"n{i}" for i in range(3 * AT_ONCE)]
    assert not any_twice([])
    assert not any_twice([[], many, ["x"]])
    assert any_twice([many, ["n1"]])
    assert any_twice([[*many, "n5000"]])
    monkeypatch.setattr(slices, "hash", lambda text: 7, raising=False)  # texts that differ and have one hash
    assert not any_twice([["a"], ["b"]])
    assert any_twice([["a"], ["b", "a"]])


class Turns:
    """A clock on which each look takes 3 ms, and how often somebody has slept."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept = 0

    def perf_counter(self) -> float:
        self.now_s += 0.003
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds < 0.001
        self.slept += 1


def test_others_have_turns_between_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns()
    monkeypatch.setattr(slices, "time", turns)
    assert sum(map(len, slices_of(range(9 * AT_ONCE)))) == 9 * AT_ONCE
    assert turns.slept == 4, "after every second slice"
    assert sum(map(len, slices_of(range(AT_ONCE)))) == AT_ONCE
    assert turns.slept == 4
