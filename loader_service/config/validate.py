"""Plain values -> `ServiceConfig`, or one `ConfigError` that lists everything that is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from loader_service.config import fields
from loader_service.config.conflicts import RulePart, mesh_conflicts, missing_checkpoints
from loader_service.config.fields import UNREADABLE, KeyPath, Problem, closest, did_you_mean, format_key_path, found
from loader_service.config.rules import AssignRule, SplitRule
from loader_service.config.schema import ServiceConfig
from loader_service.config.values import Document
from loader_service.errors import ConfigError

MAX_REPORTED = 100
"""So many problems are written out; nobody reads more, and aliases can multiply one to many."""


def validate(document: Document, *, base_dir: str, file: str | None = None) -> ServiceConfig:
    """The configuration; relative paths stand on `base_dir`.

    Raises one `ConfigError` with a line for each problem, in the file's order: "file:line: key.path: what is wrong;
    what to write instead". `file` is its `path`; without a file a line starts with the key path.
    """
    problems = list(document.problems)
    try:
        config = ServiceConfig.model_validate(document.data, context={"base_dir": base_dir})
        if not problems:
            return config
    except ValidationError as error:
        lines = error.errors(include_url=False)
        meant = {path for line in lines if (path := _meant(line)) is not None}
        problems += [
            _translated(line)
            for line in lines
            if (line["input"] is not UNREADABLE or line["type"] == "extra_forbidden")
            and not (line["type"] == "missing" and line["loc"] in meant)
        ]
        # Pydantic compares parts only once all of them are valid. People want to hear of these conflicts at once.
        known = {(problem.path, problem.message) for problem in problems}
        problems += [p for p in _conflicts_of_valid_parts(document.data, meant) if (p.path, p.message) not in known]
    raise ConfigError(_message(problems, document.lines, file), path=file)


def _message(problems: list[Problem], lines: Mapping[KeyPath, int], file: str | None) -> str:
    def line_of(problem: Problem) -> int:
        if problem.line is not None:
            return problem.line
        known = (problem.path[:length] for length in range(len(problem.path), -1, -1))
        return next((lines[path] for path in known if path in lines), 0)

    texts = []
    for problem in sorted(problems, key=line_of)[:MAX_REPORTED]:  # stable: within a line, the order found
        place = [f"{file}:{line_of(problem)}"] if file is not None else []
        key_path = [format_key_path(problem.path)] if problem.path else []
        texts.append(": ".join([*place, *key_path, problem.message]))
    if len(problems) > MAX_REPORTED:
        texts.append(f"{file}: " * (file is not None) + f"and {len(problems) - MAX_REPORTED} more problems")
    return "\n".join(texts)


def _translated(line: ErrorDetails) -> Problem:
    """Pydantic's error in the configuration's own words."""
    path: KeyPath = line["loc"]
    kind, value = line["type"], line["input"]
    if kind == "extra_forbidden":
        return Problem(path, _unknown_key(path))
    if kind == "missing":
        parent = _model_at(path[:-1])
        meaning = parent.model_fields[str(path[-1])].description if parent is not None else None
        return Problem(path, f"is missing; add it: {meaning}")
    if kind in ("model_type", "model_attributes_type"):
        model = _model_at(path)
        keys = f" with keys of {', '.join(model.model_fields)}" if model is not None else ""
        return Problem(path, f"must be a mapping{keys}, {found(value)}")
    return Problem(path, line["msg"])


def _meant(line: ErrorDetails) -> KeyPath | None:
    """The key beside an unknown one that it probably is, misspelt: that one is then not missing."""
    if line["type"] != "extra_forbidden":
        return None
    *parent, key = line["loc"]
    model = _model_at(tuple(parent))
    meant = closest(key, model.model_fields) if model is not None else None
    return None if meant is None else (*parent, meant)


def _unknown_key(path: KeyPath) -> str:
    key = str(path[-1])
    if path == ("coords",):
        return "is no key of the file: each rank gives its own coordinates, as `LoaderService(coords=...)`; remove it"
    model = _model_at(path[:-1])
    siblings = list(model.model_fields) if model is not None else []
    places = dict(_places(ServiceConfig, ()))
    elsewhere = [place for place, names in places.items() if key in names]
    if elsewhere:
        return f"is unknown here; `{key}` belongs under {' or '.join(f'`{place}`' for place in elsewhere)}"
    hint = did_you_mean(key, siblings)
    if not hint:
        hint = did_you_mean(key, (f"{place}.{name}" for place, names in places.items() for name in names))
    return f"is an unknown key{hint or '; remove it, or write one of ' + ', '.join(siblings)}"


_STEPS: Mapping[str, tuple[str, ...]] = {"loads": ("loads", "<name>"), "rules": ("rules[N]",)}


def _places(model: type[BaseModel], path: KeyPath) -> Iterator[tuple[str, list[str]]]:
    """Every place of the file that has keys of its own, with their names; "the top" for the file itself."""
    yield format_key_path(path) or "the top", list(model.model_fields)
    for name, field in model.model_fields.items():
        inner = _inner_model(field.annotation)
        if inner is not None:
            yield from _places(inner, (*path, *_STEPS.get(name, (name,))))


def _inner_model(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation if issubclass(annotation, BaseModel) else None
    return next(filter(None, map(_inner_model, get_args(annotation))), None)


def _model_at(path: KeyPath) -> type[BaseModel] | None:
    """The model whose keys stand at a key path; None where the path leads to a value."""
    model: type[BaseModel] | None = ServiceConfig
    names = iter(path)
    for name in names:
        field = model.model_fields.get(str(name)) if model is not None else None
        if field is None:
            return None
        model = _inner_model(field.annotation)
        if get_origin(field.annotation) in (dict, tuple):
            next(names, None)  # a load's name, or a rule's position
    return model


def _conflicts_of_valid_parts(data: object, meant: Set[KeyPath]) -> list[Problem]:
    """Conflicts between the mesh and what is valid of the rules, and loads without a checkpoint.

    `meant` are keys that others, misspelt, stand for: they are there. Where the top has an unknown key, that may be a
    misspelt `mesh` or `checkpoint`: nothing is said to be missing then.
    """
    top = _mapping(data)
    misspelt = any(key not in ServiceConfig.model_fields for key in top)
    loads = {name: load for name, load in _mapping(top.get("loads")).items() if isinstance(load, dict)}
    problems: list[Problem] = []
    if "checkpoint" not in top and not misspelt:
        problems += missing_checkpoints(
            name
            for name, load in loads.items()
            if "checkpoint" not in load and ("loads", name, "checkpoint") not in meant
        )
    if "mesh" in top or not misspelt:
        try:
            mesh = fields.mesh_sizes(top["mesh"]) if "mesh" in top else None
        except ValidationError:
            return problems
        problems += mesh_conflicts(mesh, _valid_parts(loads))
    return problems


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _valid_parts(loads: Mapping[str, object]) -> Iterator[RulePart]:
    for name, load in loads.items():
        rules = _mapping(load).get("rules")
        for position, rule in enumerate(rules if isinstance(rules, list) else ()):
            for key, model in (("assign", AssignRule), ("split", SplitRule)):
                raw = _mapping(rule).get(key)
                try:
                    axis = fields.axis_names(_mapping(raw).get("axis"))
                except ValidationError:
                    continue  # reported where the whole is validated
                yield RulePart(("loads", name, "rules", position, key), axis, _valid_part(model, raw))


def _valid_part(model: type[AssignRule | SplitRule], raw: object) -> AssignRule | SplitRule | None:
    try:
        return model.model_validate(raw)
    except ValidationError:
        return None
