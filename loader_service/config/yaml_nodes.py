"""YAML text -> plain values with the line of each, read more strictly than YAML is.

PyYAML parses and composes; its constructors, which read `010` as 8 and `on` as true, are never used. Problems are
collected, not raised, except where the text is not YAML at all.
"""

from __future__ import annotations

import re

import yaml

from loader_service.config.fields import MAX_INTEGER, UNREADABLE, KeyPath
from loader_service.config.values import MAX_DEPTH, Document
from loader_service.errors import ConfigError

MAX_NODES = 100_000
"""More values than any configuration has: aliases of aliases multiply, and end here."""

_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_DECIMAL = re.compile(r"-?(?:0|[1-9][0-9]*)\.[0-9]+")
_MAX_DIGITS = len(str(MAX_INTEGER)) + 1
_QUOTE = "put it in quotes if text is meant"
_STANDARD_TAG = "tag:yaml.org,2002:"


class _StrictLoader(yaml.SafeLoader):
    """Composes nodes and remembers which of them carry a tag that is written out."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.tagged: dict[yaml.Node, str] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        tag: str | None = getattr(self.peek_event(), "tag", None)  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        if node is not None and tag is not None:
            self.tagged[node] = tag
        return node


def read_yaml(text: str, file: str) -> Document:
    """The text's values, lines and problems. `ConfigError` (with file and line) where the text is no YAML document."""
    try:
        loader = _StrictLoader(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_error(error, text, file), path=file) from error
    except RecursionError as error:
        raise ConfigError(f"{file}: is nested too deeply; a configuration never is", path=file) from error
    document = Document(None)
    if root is None:
        raise ConfigError(f"{file}: is empty; write at least `checkpoint` and `loads`", path=file)
    document.data = _Walk(document, loader.tagged).value(root, ())
    document.lines[()] = _line(root)
    return document


def _syntax_error(error: yaml.YAMLError, text: str, file: str) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}" if mark is not None else file
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        return f"{where}: is not valid YAML: {reason}; {_syntax_hint(reason)}"
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"{file}:{line}: is not valid YAML: it contains the control character {error.character!r}; remove it"
    return f"{file}: is not valid YAML: {error}"


def _syntax_hint(reason: str) -> str:
    if "escape character" in reason:
        return "write regular expressions in single quotes"
    if "alias" in reason or "anchor" in reason:
        return "write what begins with * or & in quotes"
    if "\\t" in reason:
        return "indent with spaces, not tabs"
    if "document" in reason:
        return "write one document, without '---' in between"
    return "check the indentation, brackets and quotes there and on the line before"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


class _Walk:
    """One pass over the composed nodes."""

    def __init__(self, document: Document, tagged: dict[yaml.Node, str]) -> None:
        self._document = document
        self._tagged = tagged
        self._nodes = 0
        self._around: set[yaml.Node] = set()

    def value(self, node: yaml.Node, path: KeyPath) -> object:
        self._document.lines.setdefault(path, _line(node))
        self._nodes += 1
        if node in self._around:
            return self._document.refuse(path, "is an alias of something that it is a part of; write it out")
        if len(path) > MAX_DEPTH:
            return self._document.refuse(path, f"is nested deeper than {MAX_DEPTH} levels; a configuration never is")
        if self._nodes > MAX_NODES:
            return self._too_many(path)
        if node in self._tagged:
            tag = self._tagged[node].replace(_STANDARD_TAG, "!!")
            return self._document.refuse(path, f"carries the tag {tag}, and tags are not read; remove it")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self._around.add(node)
        if isinstance(node, yaml.MappingNode):
            value: object = self._mapping(node, path)
        else:
            value = [self.value(item, (*path, position)) for position, item in enumerate(node.value)]
        self._around.discard(node)
        return value

    def _too_many(self, path: KeyPath) -> object:
        if self._nodes == MAX_NODES + 1:  # every further value would say it again
            self._document.refuse(path, f"is one of more than {MAX_NODES} values (aliases multiply); write fewer")
        return UNREADABLE

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            if key is None:
                continue
            if key in values:
                first = self._document.lines[(*path, key)]
                message = f"the key is given twice, first in line {first}; keep one"
                self._document.refuse((*path, key), message, _line(key_node))
                continue
            self._document.lines[(*path, key)] = _line(key_node)
            values[key] = self.value(value_node, (*path, key))
        return values

    def _key(self, node: yaml.Node, path: KeyPath) -> str | None:
        line = _line(node)
        if node in self._tagged:
            self._document.refuse(path, "has a key with a tag, and tags are not read; remove it", line)
        elif not isinstance(node, yaml.ScalarNode):
            kind = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
            self._document.refuse(path, f"has {kind} as a key; keys are text", line)
        elif node.style is None and node.tag == _STANDARD_TAG + "merge":
            self._document.refuse(path, "has a merge key (<<), which is not read; write the keys out", line)
        elif node.style is None and node.tag != _STANDARD_TAG + "str":
            shown = node.value or "(nothing)"
            self._document.refuse(
                path, f"has the key {shown}, which YAML does not read as text; put it in quotes", line
            )
        else:
            return str(node.value)
        return None

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> object:
        text = str(node.value)
        tag = node.tag.removeprefix(_STANDARD_TAG)
        if node.style is not None or (tag == "str" and not _INTEGER.fullmatch(text) and not _DECIMAL.fullmatch(text)):
            return text
        if text in ("true", "false"):
            return text == "true"
        if _INTEGER.fullmatch(text):
            if len(text) > _MAX_DIGITS or abs(int(text)) > MAX_INTEGER:
                return self._document.refuse(
                    path, f"the number {text[:40]} is larger than 64 bits; write a smaller one"
                )
            return int(text)
        if _DECIMAL.fullmatch(text):
            return float(text)
        return self._document.refuse(path, _scalar_hint(tag, text))


def _scalar_hint(tag: str, text: str) -> str:
    if tag == "null":
        empty = "is null" if text else "has no value"
        return f"{empty}; write a value ({{}} for an empty mapping), or remove the key"
    if tag == "bool":
        meant = "true" if text.lower() in ("true", "yes", "on") else "false"
        return f"{text} is not how a boolean is written; write {meant}, or {_QUOTE}"
    if tag in ("int", "float"):
        return f"{text} is not a plain decimal number; write digits only, such as 10 or 0.5, or {_QUOTE}"
    if tag == "timestamp":
        return f"{text} is a date to YAML, and no key takes one; {_QUOTE}"
    return f"{text} has a special meaning in YAML; {_QUOTE}"
