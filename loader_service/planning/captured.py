"""Numbers in tensor names: which layer, which expert."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from loader_service.checkpoint.slices import joined, slices_of

NO_MATCH: Final = -1
"""In place of a number: the pattern does not occur in the name."""
NO_NUMBER: Final = -2
"""In place of a number: the pattern occurs, but what its group captured is no number that can be counted with."""

_MAX_DIGITS: Final = 18  # below 2**63
_WITHIN_A_LINE: Final = re.compile(r"(?:[\w\-.]|\\\.)*\((?:\\d|\[0-9\])\+\)(?:[\w\-.]|\\\.)*")
"""Patterns of plain text, dots and one group of digits, such as `experts\\.(\\d+)\\.`: no match spans two lines."""


def captured_numbers(index: str, names: Sequence[str]) -> npt.NDArray[np.int64]:
    """The number that the one group of the regular expression `index` captures in each name, where it first occurs.

    NO_MATCH or NO_NUMBER where there is none.
    """
    numbers = _Numbers()
    within_a_line = _WITHIN_A_LINE.fullmatch(index) is not None
    search = re.compile(index).search
    columns: list[npt.NDArray[np.int64]] = []
    for some in slices_of(names):
        texts = _texts_at_once(index, some) if within_a_line else None
        if texts is None:
            texts = [None if (found := search(name)) is None else found.group(1) or "" for name in some]
        columns.append(np.fromiter(map(numbers.__getitem__, texts), dtype=np.int64, count=len(texts)))
    return joined(columns, np.int64)


class _Numbers(dict[str | None, int]):
    """The number of each text, worked out once."""

    def __missing__(self, text: str | None) -> int:
        self[text] = number = _number(text)
        return number


def _texts_at_once(index: str, names: Sequence[str]) -> list[str | None] | None:
    """The captured texts by one search over all names joined (a third of the time), None unless every name has one."""
    lines = "\n".join(names)
    if lines.count("\n") != len(names) - 1:
        return None
    texts: list[str | None] = re.findall(index + ".*", lines)
    return texts if len(texts) == len(names) else None


def _number(text: str | None) -> int:
    if text is None:
        return NO_MATCH
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else NO_NUMBER
