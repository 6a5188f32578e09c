"""Long work in slices. What runs in C holds the interpreter lock to its end, thread or not, so that a caller's event
loop stands still: looking through 1,000,000 names in one call takes 30 to 400 ms. Between slices others run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Text: TypeAlias = bytes | memoryview

T = TypeVar("T")
Number = TypeVar("Number", bound=np.generic)

AT_ONCE: Final = 4096
"""Names or numbers: about a millisecond of the slowest work that is done on each."""

TEXT_BYTES: Final = 128 << 10
"""Of JSON text: half a millisecond of decoding and encoding again."""

WHITE_SPACE: Final = b" \t\n\r"
"""Of JSON."""

_SPACES: Final = re.compile(rb"[ \t\n\r]*")
_PADDING_BYTES: Final = 4096


def slices_of(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """The items, so many at once. A list that is short enough is handed over as it is."""
    if len(items) <= AT_ONCE:
        yield items
        return
    for at in range(0, len(items), AT_ONCE):
        yield items[at : at + AT_ONCE]


def numbers_of(ids: npt.NDArray[np.integer]) -> Iterator[int]:
    """The column's numbers. As lists: an element of an array costs three times as much."""
    for at in range(0, len(ids), AT_ONCE):
        yield from ids[at : at + AT_ONCE].tolist()


def picked(items: Sequence[T], ids: npt.NDArray[np.integer]) -> list[T]:
    """The items at the places `ids`."""
    return [items[i] for i in numbers_of(ids)]


def column_of(values: Sequence[int], dtype: type[Number]) -> npt.NDArray[Number]:
    """The values as an array. Raises OverflowError where one does not fit."""
    column = np.empty(len(values), dtype=dtype)
    for at in range(0, len(values), AT_ONCE):
        column[at : at + AT_ONCE] = values[at : at + AT_ONCE]
    return column


def joined(columns: Sequence[npt.NDArray[Number]], dtype: type[Number]) -> npt.NDArray[Number]:
    """The columns one behind the other; an empty one if there are none."""
    return np.concatenate(columns) if columns else np.empty(0, dtype=dtype)


def any_twice(lists: Iterable[Sequence[str]]) -> bool:
    """Whether any text is there twice, in one list or in several.

    Texts that differ almost never have one hash, so a set is made only where some do: a set of 1,000,000 stops others
    for 100 ms, and sorting a column of numbers does not.
    """
    kept = list(lists)
    hashes = [
        np.fromiter(map(hash, some), dtype=np.int64, count=len(some)) for each in kept for some in slices_of(each)
    ]
    column = np.sort(joined(hashes, np.int64))
    if not (column[1:] == column[:-1]).any():
        return False
    return len(set().union(*kept)) < sum(map(len, kept))


def members(text: Text, start: int, stop: int, ending: re.Pattern[bytes]) -> Iterator[bytes]:
    """The members of a JSON object, text[start:stop] without its braces, as objects of about TEXT_BYTES each.

    Cut after a comma with which a match of `ending` ends. Such a comma may lie within a text: then what stands before
    it is no JSON. So where each of the objects can be decoded, each cut was one between two members. White space after
    a cut is left out. After a last comma comes an empty object, which the caller must refuse.
    """
    while (cut := ending.search(text, start + TEXT_BYTES, stop)) is not None:
        yield _object(text, start, cut.end() - 1)
        start = after_white_space(text, cut.end(), stop)
    yield _object(text, start, stop)


def _object(text: Text, start: int, stop: int) -> bytes:
    return b"".join((b"{", memoryview(text)[start:stop], b"}"))


def after_white_space(text: Text, start: int, stop: int) -> int:
    """Where the first byte of text[start:stop] is that is no white space of JSON; `stop` if there is none."""
    found = _SPACES.match(text, start, stop)
    return start if found is None else found.end()


def before_white_space(text: Text, start: int, stop: int) -> int:
    """The end of text[start:stop] without the white space at its end."""
    while stop > start:
        first = max(start, stop - _PADDING_BYTES)
        if left := bytes(text[first:stop]).rstrip(WHITE_SPACE):
            return first + len(left)
        stop = first
    return start


def memory_for(nbytes: int) -> memoryview:
    """Memory to read so many bytes into. Nothing is touched yet: a bytearray of 29 MiB would be filled with zeros first
    and copied to become bytes, each of which stops others for 10 to 20 ms.
    """
    return np.empty(nbytes, dtype=np.uint8).data
