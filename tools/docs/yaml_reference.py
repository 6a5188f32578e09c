"""docs/reference/yaml.md: every key of the YAML file, from the schema that checks it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from loader_service import sizes
from loader_service.config.json_schema import json_schema
from loader_service.config.schema import ServiceConfig
from tools.docs.wording import MADE, either, table, written_size

_SIZE = {"type": "string", "pattern": sizes.PATTERN}
_MOST = 1 << 40  # a larger bound is no bound that a reader needs

INTRODUCTION = """# YAML reference

Every key, what it may be, and what it is if it is left out. How values are written, what is refused, and how rules work
together: [configuration.md](../configuration.md). `loader-service schema` prints the same as a JSON schema, with which
editors complete and check the file.

## All that has a default

A file needs `checkpoint` and `loads`; with this it says no more than without:

"""


def page() -> str:
    schema = json_schema()
    models: dict[str, Any] = {ServiceConfig.__name__: schema, **cast("dict[str, Any]", schema["$defs"])}
    return f"{MADE}\n\n{INTRODUCTION}```yaml\n{''.join(_file())}```\n\n" + "\n".join(
        _section(prefix, model, models[model.__name__]) for model, prefix in sections().items()
    )


def sections() -> dict[type[BaseModel], str]:
    """Every mapping of the file, and where it stands first: `loads.NAME.rules[]`."""
    found: dict[type[BaseModel], str] = {}

    def visit(model: type[BaseModel], prefix: str) -> None:
        if model not in found:
            found[model] = prefix
            for name, field in model.model_fields.items():
                for nested, suffix in _models_in(field.annotation):
                    visit(nested, f"{prefix}.{name}{suffix}".removeprefix("."))

    visit(ServiceConfig, "")
    return found


def _models_in(annotation: object) -> Iterator[tuple[type[BaseModel], str]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ""
    origin = get_origin(annotation)
    suffix = ".NAME" if origin is dict else "[]" if origin is tuple else ""
    for part in get_args(annotation):
        yield from ((model, suffix + more) for model, more in _models_in(part))


def _file() -> Iterator[str]:
    yield "checkpoint: {path: checkpoint, index: advisory}\n"
    yield "loads:\n  target: {skip: [], rules: [], on_no_match: error, raw_dtypes: false}\n"
    for model, prefix in sections().items():
        if prefix and "." not in prefix and not any(field.is_required() for field in model.model_fields.values()):
            yield f"{prefix}:\n"
            yield from (f"  {name}: {_default(name, field)}\n" for name, field in model.model_fields.items())


def _section(prefix: str, model: type[BaseModel], schema: Mapping[str, Any]) -> str:
    rows = [
        [
            f"`{name}`",
            _kind(schema["properties"][name]),
            "required" if field.is_required() else f"`{default}`" if (default := _default(name, field)) else "",
            field.description or "",
        ]
        for name, field in model.model_fields.items()
    ]
    heading = f"`{prefix}`" if prefix else "Top level"
    about = schema["description"] if prefix else "Each key has its section below, but `mesh`."
    return f"## {heading}\n\n{about}\n\n{table(['key', 'value', 'default', 'meaning'], rows)}"


def _default(name: str, field: FieldInfo) -> str:
    """As a file says it; empty where there is none."""
    if field.is_required() or field.default_factory is not None or field.default is None:
        return ""
    if isinstance(field.default, bool):
        return str(field.default).lower()
    if name.endswith("_bytes") and isinstance(field.default, int):
        return written_size(field.default)
    if isinstance(field.default, tuple):
        return str(list(field.default))
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def _kind(schema: Mapping[str, Any]) -> str:
    """A value's JSON schema in words."""
    if _SIZE in schema.get("anyOf", ()):
        return _size(schema["anyOf"])
    if "anyOf" in schema:
        return either([_kind(branch) for branch in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return either([f"`{word}`" for word in schema.get("enum", [schema.get("const")])])
    match schema.get("type"):
        case "array":
            return f"list of {_plural(_kind(schema['items']))}"
        case "boolean":
            return "`true` or `false`"
        case "integer":
            return f"whole number{_limits(schema)}"
        case "number":
            return "seconds"
        case "string":
            return "text"
    return _mapping(schema)


def _size(branches: list[Mapping[str, Any]]) -> str:
    least = next((branch["minimum"] for branch in branches if branch.get("minimum")), 0)
    words = [f"size from {written_size(least)}" if least else "size"]
    return either(words + [_kind(branch) for branch in branches if "const" in branch])


def _mapping(schema: Mapping[str, Any]) -> str:
    values = schema.get("additionalProperties")
    if not isinstance(values, Mapping):
        return "mapping"
    return "mapping of names to " + ("mappings" if "$ref" in values else _plural(_kind(values)))


def _plural(kind: str) -> str:
    for word in ("whole number", "list", "mapping"):
        if kind.startswith(word):
            return f"{word}s{kind.removeprefix(word)}"
    return kind


def _limits(schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum", _MOST)
    if least is None:
        return ""
    return f" from {least}" + (f" to {most}" if most < _MOST else "")
