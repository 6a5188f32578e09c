"""The first difference between what two ranks see of a checkpoint, in words that a person can act on.

The inputs are the plain JSON lists of `Catalog.summary` and `Catalog.tensor_summary`, as other ranks sent them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from loader_service.checkpoint.refusal import shown

Row = Sequence[object]

_SHARD_FIELDS = ("name", "size in bytes", "header sha256", "hash of its tensors' names")
_TENSOR_FIELDS = ("name", "dtype", "shape", "first byte", "end")


def describe_difference(
    first: Sequence[Row], second: Sequence[Row], *, who: tuple[str, str] = ("one rank", "another")
) -> str | None:
    """The first shard that two `Catalog.summary` lists disagree on; None if they are equal. `who` names the sides."""
    return _first_difference(first, second, who, "shard", _SHARD_FIELDS)


def describe_tensor_difference(
    first: Sequence[Row], second: Sequence[Row], *, who: tuple[str, str] = ("one rank", "another")
) -> str | None:
    """The first tensor that two `Catalog.tensor_summary` lists of one shard disagree on; None if they are equal.

    None for two headers whose hashes differ means that they differ in metadata, spacing or spelling only.
    """
    return _first_difference(first, second, who, "tensor", _TENSOR_FIELDS)


def _first_difference(
    first: Sequence[Row], second: Sequence[Row], who: tuple[str, str], what: str, fields: tuple[str, ...]
) -> str | None:
    for ours, theirs in zip_longest(first, second):
        if ours is not None and theirs is not None and ours[0] == theirs[0]:
            for field, a, b in zip_longest(fields, ours, theirs):
                if _plain(a) != _plain(b):
                    return f"{what} {shown(str(ours[0]))}: {field} is {a} on {who[0]} and {b} on {who[1]}"
        else:
            return _only_on_one_side(first, second, ours, theirs, who, what)
    return None


def _only_on_one_side(
    first: Sequence[Row], second: Sequence[Row], ours: Row | None, theirs: Row | None, who: tuple[str, str], what: str
) -> str:
    """Rows of different names: one side lacks a name, or has the names in another order."""
    lengths = f"{len(first)} and {len(second)} in all"
    for row, others, here, there in ((ours, second, *who), (theirs, first, *who[::-1])):
        if row is not None and all(other[0] != row[0] for other in others):
            why = f"; it is missing there, or {there}'s index file leaves it out" if what == "shard" else ""
            where = f"is on {here} and not on {there}{_alike(row, others, what)}"
            return f"{what} {shown(str(row[0]))} {where} ({lengths}){why}"
    a, b = (shown(str(row[0])) if row is not None else "nothing" for row in (ours, theirs))
    return f"{what}s stand in another order: {a} on {who[0]} where {b} is on {who[1]}"


def _alike(row: Row, others: Sequence[Row], what: str) -> str:
    """What may be the same under another name: everything but the name is equal."""
    own = [_plain(value) for value in row[1:]]
    alike = next((other for other in others if own and [_plain(value) for value in other[1:]] == own), None)
    how = "of the same size and header" if what == "shard" else "in its place"
    return f", which has {shown(str(alike[0]))} {how}" if alike is not None else ""


def _plain(value: object) -> object:
    """Lists and tuples compare equal: one side has been through JSON, the other not."""
    return list(value) if isinstance(value, tuple) else value
