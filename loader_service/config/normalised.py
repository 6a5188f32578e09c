"""What ranks must agree on, as plain data, and the first difference between two of them in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest

from loader_service.config.fields import KeyPath, format_key_path
from loader_service.config.schema import LoadConfig, Rule, ServiceConfig


def normalised(config: ServiceConfig, load_name: str) -> dict[str, object]:
    """What all ranks of a load must have in common, ready for JSON, nested as in the YAML file.

    The load's rules, selection and index mode, the mesh, coalescing, sharing and whether the cache is on, with defaults
    filled in, so that a key left out and its default are the same. Paths, threads, pinning, memory and time limits may
    differ by rank and are not in it. `ConfigError` for a load that does not exist.
    """
    load = config.load(load_name)
    return {
        "checkpoint": {"index": config.checkpoint_of(load_name).index},
        # Pairs, not a mapping: the order of the axes is part of what it says.
        "mesh": None if config.mesh is None else [[axis, ranks] for axis, ranks in config.mesh.items()],
        "loads": {load_name: normalised_load(load)},
        "reads": {"coalesce_gap_bytes": config.reads.coalesce_gap_bytes, "sharing": config.reads.sharing},
        "cache": {"on": config.cache.on},
    }


def normalised_load(load: LoadConfig) -> dict[str, object]:
    """A load's own part of it: what is selected and how ranks take it, the same for every way of writing it."""
    prefixes = load.key_prefixes
    return {
        "skip": list(load.skip),
        "key_prefixes": None if prefixes is None else [prefix.removesuffix(".") + "." for prefix in prefixes],
        "on_no_match": load.on_no_match,
        "raw_dtypes": load.raw_dtypes,
        "rules": [_normalised_rule(rule) for rule in load.rules],
    }


def _normalised_rule(rule: Rule) -> dict[str, object]:
    facts: dict[str, object] = rule.model_dump(mode="json", exclude_none=True)
    if rule.assign is not None and rule.assign.effective_how is not None:
        facts["assign"] = {**rule.assign.model_dump(mode="json", exclude_none=True), "how": rule.assign.effective_how}
    return facts


def describe_config_difference(
    a: Mapping[str, object], b: Mapping[str, object], *, who: tuple[str, str] = ("one rank", "another")
) -> str | None:
    """The first key path at which two normalised configurations differ, with both values; None where they are equal.

    Reads "loads.target.rules[0].split.dim is 0 on rank 0 and 1 on rank 2"; `who` names the sides. Order is that of `a`,
    then what only `b` has. Of long lists the first item that differs is named; long values are cut.
    """
    difference = next(_differences((), a, b), None)
    if difference is None:
        return None
    path, left, right = difference
    if isinstance(left, list) and isinstance(right, list) and max(len(_shown(left)), len(_shown(right))) > _SHOWN_CHARS:
        items = enumerate(zip_longest(left, right, fillvalue=_NOT_SET))
        number, (left, right) = next((number, pair) for number, pair in items if pair[0] != pair[1])
        path = (*path, number)
    return f"{format_key_path(path)} is {_cut(_shown(left))} on {who[0]} and {_cut(_shown(right))} on {who[1]}"


_NOT_SET = object()
_SHOWN_CHARS = 300


def _differences(path: KeyPath, a: object, b: object) -> Iterator[tuple[KeyPath, object, object]]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            yield from _differences((*path, key), a.get(key, _NOT_SET), b.get(key, _NOT_SET))
    elif _is_list_of_mappings(a) and _is_list_of_mappings(b) and isinstance(a, list) and isinstance(b, list):
        for position in range(max(len(a), len(b))):
            left, right = (side[position] if position < len(side) else _NOT_SET for side in (a, b))
            yield from _differences((*path, position), left, right)
    elif a != b or isinstance(a, bool) != isinstance(b, bool):
        yield path, a, b


def _is_list_of_mappings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text)} characters)"


def _shown(value: object) -> str:
    return "not set" if value is _NOT_SET or value is None else json.dumps(value, ensure_ascii=False)
