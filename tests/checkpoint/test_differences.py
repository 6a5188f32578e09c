"""The first difference between two ranks' checkpoints, in words."""

from __future__ import annotations

import json

import pytest

from loader_service.checkpoint.differences import describe_difference, describe_tensor_difference

ONE = [["a.safetensors", 100, "aa"], ["b.safetensors", 200, "bb"]]
WHO = ("rank 0", "rank 2")


def test_equal_summaries_have_no_difference_also_after_json() -> None:
    assert describe_difference(ONE, json.loads(json.dumps(ONE)), who=WHO) is None
    assert describe_difference([], []) is None
    assert describe_difference(ONE, [tuple(row) for row in ONE]) is None
    shapes = [["t", "U8", (2, 3), 0, 6]]
    assert describe_tensor_difference(shapes, json.loads(json.dumps(shapes))) is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        pytest.param(
            [["a.safetensors", 101, "aa"], ["b.safetensors", 200, "xx"]],
            "shard 'a.safetensors': size in bytes is 100 on rank 0 and 101 on rank 2",
            id="size-first",
        ),
        pytest.param(
            [ONE[0], ["b.safetensors", 200, "xx"]],
            "shard 'b.safetensors': header sha256 is bb on rank 0 and xx on rank 2",
            id="hash",
        ),
        pytest.param(ONE[:1], "'b.safetensors' is on rank 0 and not on rank 2 (2 and 1 in all)", id="missing-there"),
        pytest.param(ONE[1:], "'a.safetensors' is on rank 0 and not on rank 2", id="missing-there-first"),
        pytest.param([*ONE, ["c", 1, "c"]], "'c' is on rank 2 and not on rank 0 (2 and 3 in all)", id="missing-here"),
        pytest.param([["0", 1, "c"], *ONE], "'0' is on rank 2 and not on rank 0", id="missing-here-first"),
        pytest.param([], "'a.safetensors' is on rank 0 and not on rank 2 (2 and 0 in all)", id="nothing-there"),
        pytest.param(ONE[::-1], "another order: 'a.safetensors' on rank 0 where 'b.safetensors'", id="order"),
    ],
)
def test_first_difference_between_shards(other: list[list[str | int]], words: str) -> None:
    text = describe_difference(ONE, other, who=WHO)
    assert text is not None
    assert words in text


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        (1, "I8", "dtype is U8 on one rank and I8 on another"),
        (2, [3, 2], "shape is [2, 3] on one rank and [3, 2] on another"),
        (3, 1, "first byte is 0 on one rank and 1 on another"),
        (4, 7, "end is 6 on one rank and 7 on another"),
        (0, "v", "tensor 't' is on one rank and not on another"),
    ],
)
def test_first_difference_between_tensors(field: int, value: object, words: str) -> None:
    row: list[object] = ["t", "U8", [2, 3], 0, 6]
    other = [*row[:field], value, *row[field + 1 :]]
    text = describe_tensor_difference([["s", "U8", [1], 0, 1], row], [["s", "U8", [1], 0, 1], other])
    assert text is not None
    assert words in text
