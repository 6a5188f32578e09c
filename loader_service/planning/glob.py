"""Globs over tensor names: case-sensitive, the whole name, `*` crosses dots; `?` and `[..]` as shells know them.

A checkpoint can hold hundreds of thousands of names, and a load a dozen globs: names are tested with the string methods
that run in C, and a regular expression sees only names that hold every literal part of its glob.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import contains, eq

import numpy as np
import numpy.typing as npt

from loader_service.checkpoint.slices import AT_ONCE, joined, slices_of

_SPECIAL = re.compile(r"\*+|\?|\[!?\]?[^\]]*\]")


@dataclass(frozen=True, slots=True)
class Glob:
    """A compiled glob: a matching name starts with `prefix`, ends with `suffix` and holds `inner` in between.

    `exact`: the glob has no special character, and `prefix` is the name. `settled`: the three literals alone decide;
    otherwise `regex` does, for names that hold them.
    """

    pattern: str
    prefix: str
    inner: str
    suffix: str
    exact: bool
    settled: bool
    regex: re.Pattern[str]

    def matches(self, name: str) -> bool:
        return bool(len(self.positions([name])))

    def positions(self, names: Sequence[str]) -> npt.NDArray[np.int64]:
        """The places in `names` of those that match, ascending."""
        if len(names) <= AT_ONCE:
            return self._positions(names)
        found = [self._positions(some) + i * AT_ONCE for i, some in enumerate(slices_of(names))]
        return joined(found, np.int64)

    def _positions(self, names: Sequence[str]) -> npt.NDArray[np.int64]:
        if self.exact:
            return _where(bytes(map(eq, names, repeat(self.prefix))))
        found: npt.NDArray[np.int64] | None = None
        for literal, test in ((self.suffix, str.endswith), (self.prefix, str.startswith), (self.inner, contains)):
            if literal:
                left = names if found is None else [names[i] for i in found.tolist()]
                hits = _where(bytes(map(test, left, repeat(literal))))
                found = hits if found is None else found[hits]
        if found is None:
            found = np.arange(len(names), dtype=np.int64)
        return found if self._one_literal() else found[_where(self._decided([names[i] for i in found.tolist()]))]

    def _one_literal(self) -> bool:
        return self.settled and sum(map(bool, (self.prefix, self.inner, self.suffix))) <= 1

    def _decided(self, names: Sequence[str]) -> bytes:
        if not self.settled:
            match = self.regex.match
            return bytes([match(name) is not None for name in names])
        # Between prefix and suffix, so that they do not overlap in a short name: "a" is not "a*a".
        inner, start, tail = self.inner, len(self.prefix), len(self.suffix)
        return bytes([name.find(inner, start, len(name) - tail) >= 0 for name in names])


def compile_glob(pattern: str) -> Glob:
    """The glob of a pattern. Every text is one: an opening bracket without its closing one stands for itself."""
    literals = _SPECIAL.split(pattern)
    stars_only = all(set(special) == {"*"} for special in _SPECIAL.findall(pattern))
    regex = re.compile(fnmatch.translate(pattern))
    if len(literals) == 1:
        return Glob(pattern, pattern, "", "", exact=True, settled=True, regex=regex)
    prefix, *between, suffix = literals
    inner = max(between, key=len, default="")
    return Glob(pattern, prefix, inner, suffix, exact=False, settled=stars_only and len(between) <= 1, regex=regex)


def _where(flags: bytes) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.frombuffer(flags, dtype=np.bool_))
