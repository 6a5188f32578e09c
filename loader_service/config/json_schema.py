"""The JSON schema of the YAML file, for editors."""

from __future__ import annotations

from loader_service.config.schema import ServiceConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, object]:
    """A JSON schema (draft 2020-12): sizes are integers or text of the size grammar, an axis is text or a list.

    It describes each value by itself; conflicts between keys are found when the file is loaded.
    """
    schema = _without_null(ServiceConfig.model_json_schema(mode="validation"))
    if not isinstance(schema, dict):
        raise TypeError("a model's schema is a mapping")
    return {"$schema": DIALECT, **schema, "title": "loader-service configuration"}


def _without_null(node: object) -> object:
    """The schema without null, which the YAML refuses (a key is left out instead), and without generated titles."""
    if isinstance(node, list):
        return [_without_null(item) for item in node if item != {"type": "null"}]
    if not isinstance(node, dict):
        return node
    kept = {
        key: _without_null(value)
        for key, value in node.items()
        if not (key == "title" and isinstance(value, str)) and not (key == "default" and value is None)
    }
    branches = kept.get("anyOf")
    if isinstance(branches, list) and len(branches) == 1 and isinstance(branches[0], dict):
        del kept["anyOf"]
        return {**branches[0], **kept}
    return kept
