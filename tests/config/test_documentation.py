"""docs/configuration.md says what the schema says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from loader_service.config.schema import (
    AgreementConfig,
    AssignRule,
    CacheConfig,
    CheckpointConfig,
    HostResidentRule,
    LoadConfig,
    MemoryConfig,
    ReadsConfig,
    Rule,
    ServiceConfig,
    SplitRule,
    StagingConfig,
)
from loader_service.config.yaml_file import config_from_dict
from tests.support.sizes import written_size

DOCUMENT = (Path(__file__).parents[2] / "docs/configuration.md").read_text(encoding="utf-8")
MODELS: dict[str, type[BaseModel]] = {
    "": ServiceConfig,
    "checkpoint.": CheckpointConfig,
    "loads.NAME.": LoadConfig,
    "rules[].": Rule,
    "assign.": AssignRule,
    "split.": SplitRule,
    "host_resident.": HostResidentRule,
    "reads.": ReadsConfig,
    "staging.": StagingConfig,
    "agreement.": AgreementConfig,
    "cache.": CacheConfig,
    "memory.": MemoryConfig,
}


def _default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "see below"
    if field.default is None:
        return "none"
    if isinstance(field.default, tuple):
        return f"`{list(field.default)}`"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    if name.endswith("_bytes") and isinstance(field.default, int):
        return f"`{written_size(field.default)}`"
    return f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"


def _expected() -> Iterator[tuple[str, str]]:
    for prefix, model in MODELS.items():
        for name, field in model.model_fields.items():
            yield prefix + name, _default(name, field)


def _rows() -> dict[str, list[str]]:
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in DOCUMENT.splitlines() if line.startswith("| `")]
    return {row[0].strip().strip("`"): [cell.strip() for cell in row[1:]] for row in cells}


@pytest.mark.parametrize(("key", "default"), list(_expected()), ids=lambda value: value)
def test_every_key_stands_in_a_table_with_its_default(key: str, default: str) -> None:
    kind, stated_default, meaning = _rows()[key]
    assert stated_default == default
    assert kind
    assert len(meaning) > 20


def test_the_tables_name_no_key_that_does_not_exist() -> None:
    assert sorted(_rows()) == sorted(key for key, _ in _expected())


def test_every_key_has_a_description_for_editors() -> None:
    for model in MODELS.values():
        for name, field in model.model_fields.items():
            assert field.description, name


def test_the_example_is_a_valid_configuration() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    assert list(config_from_dict(yaml.safe_load(example)).loads) == ["target", "draft"]


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\((\.\./[^)]+)\)", DOCUMENT)
    assert len(links) >= 4
    for link in links:
        assert (Path(__file__).parents[2] / "docs" / link).is_file(), link
