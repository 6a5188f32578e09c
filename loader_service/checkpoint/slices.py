"""Long work in slices. What runs in C holds the interpreter lock to its end, thread or not, so that a caller's event
loop stands still: looking through 1,000,000 names in one call takes 30 to 400 ms. Between slices others run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias, TypeVar, overload

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

_TURN_S: Final = 0.004
_MOMENT_S: Final = 0.00005  # what it takes to wake a thread

_SPACES: Final = re.compile(rb"[ \t\n\r]*")
_PADDING_BYTES: Final = 4096


def slices_of(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """The items, so many at once. A list that is short enough is handed over as it is.

    Between slices others have their turn, for which this sleeps a moment every few milliseconds. To let the interpreter
    lock go for microseconds, as numpy does in each of many calls, is worse than not at all: who is woken each time, and
    finds it taken again, never asks for it in earnest. A loop was seen to wait for 180 ms, until the last slice.
    """
    if len(items) <= AT_ONCE:
        yield items
        return
    since_s = time.perf_counter()
    for at in range(0, len(items), AT_ONCE):
        yield items[at : at + AT_ONCE]
        if time.perf_counter() - since_s > _TURN_S:
            time.sleep(_MOMENT_S)
            since_s = time.perf_counter()


def numbers_of(ids: npt.NDArray[np.integer]) -> Iterator[int]:
    """The column's numbers. As lists: an element of an array costs three times as much."""
    for at in range(0, len(ids), AT_ONCE):
        yield from ids[at : at + AT_ONCE].tolist()


class Picked(Sequence[T]):
    """The items at the places `ids`: no list, which would stop others for long when it goes."""

    def __init__(self, items: Sequence[T], ids: npt.NDArray[np.integer]) -> None:
        self._items = items
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[T]:
        items = self._items
        return (items[i] for i in numbers_of(self._ids))

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        if isinstance(at, slice):
            return [self._items[i] for i in self._ids[at].tolist()]
        return self._items[int(self._ids[at])]


def column_of(values: Sequence[int], dtype: type[Number]) -> npt.NDArray[Number]:
    """The values as an array. Raises OverflowError where one does not fit."""
    if len(values) <= AT_ONCE:
        return np.array(values, dtype=dtype)
    column = np.empty(len(values), dtype=dtype)
    for at in range(0, len(values), AT_ONCE):
        column[at : at + AT_ONCE] = values[at : at + AT_ONCE]
    return column


def joined(columns: Sequence[npt.NDArray[Number]], dtype: type[Number]) -> npt.NDArray[Number]:
    """The columns one behind the other; an empty one if there are none."""
    return np.concatenate(columns) if columns else np.empty(0, dtype=dtype)


def hashes_of(lists: Iterable[Sequence[str]]) -> npt.NDArray[np.int64]:
    """The hash of each text of each list. Sorting them lets others run; a dictionary of 1,000,000 texts stops them for
    30 to 50 ms whenever it grows."""
    columns = (np.fromiter(map(hash, some), np.int64, len(some)) for each in lists for some in slices_of(each))
    return joined(list(columns), np.int64)


def let_go(items: list[T]) -> None:
    """Empties the list, one by one: what is large stops others for long when all of it goes at once."""
    while items:
        items.pop()


def any_twice(lists: Iterable[Sequence[str]]) -> bool:
    """Whether any text is there twice, in one list or in several.

    Texts that differ almost never have one hash, so a set is made only where some do: a set of 1,000,000 stops others
    for 100 ms, and sorting a column of numbers does not.
    """
    kept = list(lists)
    column = np.sort(hashes_of(kept))
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
