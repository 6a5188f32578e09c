"""docs/configuration.md says what the schema does."""

from __future__ import annotations

import re

import pytest

from loader_service.config.rules import SplitRule
from loader_service.config.yaml_file import config_from_dict
from loader_service.planning.cuts import Cut
from tests.docs.documents import table_rows, text_of
from tools.docs.yaml_reference import sections

CUTS = [row for row in table_rows(text_of("docs/configuration.md"), columns=6) if row[1].startswith("`")]


def test_every_key_has_a_description() -> None:
    for model in sections():
        for name, field in model.model_fields.items():
            assert len(field.description or "") > 20, name


@pytest.mark.parametrize("row", CUTS, ids=lambda row: row[0])
def test_the_parts_that_the_table_shows_are_those_of_the_rule(row: list[str]) -> None:
    key, _, value = row[0].strip("`").partition(": ")
    ways = {} if not value else {key: [int(n) for n in re.findall(r"\d+", value)] if "[" in value else int(value)}
    rule = SplitRule.model_validate({"axis": "tp", "dim": 0, **ways})
    cut = Cut(rule.align, rule.pad_to, rule.units, rule.boundaries)  # type: ignore[arg-type]
    assert cut.problem(10, 4) is None
    assert [f"`{start}:{stop}`" for start, stop in (cut.interval(10, 4, rank) for rank in range(4))] == row[1:5]


def test_the_table_shows_every_way_to_cut() -> None:
    assert [row[0].strip("`").partition(":")[0] for row in CUTS[1:]] == ["align", "pad_to", "units", "boundaries"]


def test_the_example_is_a_valid_configuration() -> None:
    import yaml

    (example,) = re.findall(r"```yaml\n(.*?)```", text_of("docs/configuration.md"), flags=re.DOTALL)
    assert list(config_from_dict(yaml.safe_load(example)).loads) == ["target", "draft"]
