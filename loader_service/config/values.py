"""Plain values as the configuration takes them: what a file and a caller's dictionary are both turned into first."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from loader_service.config.fields import MAX_INTEGER, UNREADABLE, KeyPath, Problem, found

MAX_DEPTH = 32
"""Deeper nesting than any configuration has: a structure that contains itself ends here, too."""


@dataclass(slots=True)
class Document:
    """A configuration before validation. `data` holds only dict, list, str, int, float and bool, and `UNREADABLE`
    wherever one of `problems` stands; `lines` has the file's line of each key path (empty for a dictionary)."""

    data: object
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, path: KeyPath, message: str, line: int | None = None) -> object:
        self.problems.append(Problem(path, message, UNREADABLE, line))
        return UNREADABLE


def read_dictionary(data: object) -> Document:
    """A caller's dictionary, checked as strictly as a file: no subclasses, no None, no numbers of other libraries."""
    document = Document(None)
    document.data = _plain(data, (), document)
    return document


def _plain(value: object, path: KeyPath, document: Document) -> object:
    if len(path) > MAX_DEPTH:
        return document.refuse(path, f"is nested deeper than {MAX_DEPTH} levels; a configuration never is")
    if type(value) is dict:
        return _plain_mapping(value, path, document)
    if type(value) in (list, tuple) and isinstance(value, list | tuple):
        return [_plain(item, (*path, position), document) for position, item in enumerate(value)]
    if value is None:
        return document.refuse(path, "has no value (None); remove the key, or write a value")
    if type(value) not in (str, bool, int, float):
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        return document.refuse(path, f"must be str, int, float, bool, list, tuple or dict, found {kind}; convert it")
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return document.refuse(path, "is a number larger than 64 bits; write a smaller one")
    if isinstance(value, float) and not math.isfinite(value):
        return document.refuse(path, f"must be a finite number, {found(value)}; write one")
    return value


def _plain_mapping(value: dict[object, object], path: KeyPath, document: Document) -> dict[str, object]:
    plain: dict[str, object] = {}
    for key, item in value.items():
        if type(key) is not str:
            document.refuse(path, f"has the key {key!r}, which is no text but {type(key).__name__}; write it as text")
        else:
            plain[key] = _plain(item, (*path, key), document)
    return plain
