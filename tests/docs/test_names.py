"""What documents name exists, and what exists is named where a reader looks for it."""

from __future__ import annotations

import json
import logging
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import BaseModel

import loader_service as ls
from loader_service import errors
from loader_service.config.schema import ServiceConfig
from tests.docs.documents import DOCUMENTS, PACKAGE, ROOT, blocks, code_words, modules, prose, table_rows, text_of
from tests.support.checkpoints import awkward_checkpoint
from tools.docs.wording import written_size

ARCHITECTURE = "docs/architecture.md"
OPERATIONS = "docs/operations.md"
OTHERS = [
    path.relative_to(ROOT).as_posix()
    for path in DOCUMENTS
    if path.parent.name in ("docs", "how-to") and path.name not in ("architecture.md", "operations.md")
]
SECTIONS = ("reads", "staging", "agreement", "cache", "memory", "checkpoint")


def test_architecture_names_every_module_and_no_other() -> None:
    named = {word for word in code_words(text_of(ARCHITECTURE)) if word.endswith(".py")}
    assert named == modules()


def test_architecture_says_something_of_every_module() -> None:
    rows = {row[0].strip("`"): row[1] for row in table_rows(text_of(ARCHITECTURE), columns=2)}
    described = {name: text for name, text in rows.items() if name.endswith(".py")}
    assert described.keys() == modules()
    assert all(len(text.split()) >= 3 for text in described.values())


@pytest.mark.parametrize("document", [path.relative_to(ROOT).as_posix() for path in DOCUMENTS])
def test_modules_that_a_document_names_exist(document: str) -> None:
    known = modules() | {Path(name).name for name in modules()}
    known |= {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    named = {word.removeprefix("loader_service/") for word in code_words(prose(document)) if word.endswith(".py")}
    assert named <= known, named - known


def test_architecture_shows_the_floors_that_are_enforced() -> None:
    contracts = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    enforced = next(contract["layers"] for contract in contracts if contract["id"] == "floors")
    (shown,) = blocks(ARCHITECTURE, "text floors")
    assert [line.split() for line in shown.text.splitlines()] == [re.split(r"\s*\|\s*", layer) for layer in enforced]


def error_classes() -> list[type[errors.LoaderError]]:
    return [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.LoaderError)
    ]


def exit_code_rows() -> dict[int, list[str]]:
    rows = table_rows(text_of(OPERATIONS), columns=3)
    return {int(row[0]): row[1:] for row in rows if row[0].isdigit()}


@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
def test_every_error_stands_at_its_exit_code(cls: type[errors.LoaderError]) -> None:
    codes = [code for code, (classes, _) in exit_code_rows().items() if f"`{cls.__name__}`" in classes]
    assert codes == [cls.exit_code]


def test_every_exit_code_has_advice() -> None:
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert exit_code_rows().keys() == codes
    assert all(advice for code, (_, advice) in exit_code_rows().items() if code)


def test_the_shown_failure_record_has_the_keys_of_one() -> None:
    (shown,) = blocks(OPERATIONS, "json")
    assert list(json.loads(shown.text)) == [field.name for field in fields(errors.FailureRecord)]


def test_every_key_and_policy_of_a_report_is_explained(tmp_path: Path) -> None:
    with ls.LoaderService.blocking(awkward_checkpoint(tmp_path).config(), "solo") as service:
        with service.open("target") as load:
            pass
    report = load.report.as_dict()
    rows = [row[0] for row in table_rows(text_of(OPERATIONS), columns=2)]
    explained = set().union(*map(code_words, rows))
    assert report.keys() <= explained, report.keys() - explained
    policies = {row[0].strip("`"): row[2] for row in table_rows(text_of(OPERATIONS), columns=3)}
    for name, outcome in load.report.policies.items():
        assert name in policies
        if name not in {"access", "sharing", "threads", "pin"}:  # which depend on what was read, and where
            assert policies[name] == f"`{outcome.effective}`"


def test_every_logger_is_named_and_no_other() -> None:
    created = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        created |= set(re.findall(r'getLogger\("(loader_service\.\w+)"\)', text))
        if "getLogger(__name__)" in text:
            created.add(".".join(("loader_service", *path.relative_to(PACKAGE).with_suffix("").parts)))
    named = {word for word in code_words(text_of(OPERATIONS)) if re.fullmatch(r"loader_service(\.\w+)+", word)}
    assert named == created
    assert all(logging.getLogger(name).name == name for name in created)


def config_keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from config_keys(field.annotation, f"{prefix}{name}.")


@pytest.mark.parametrize("document", ["README.md", OPERATIONS, ARCHITECTURE, *OTHERS])
def test_configuration_keys_that_a_document_names_exist(document: str) -> None:
    pattern = rf"(?:{'|'.join(SECTIONS)})\.[a-z_]+(?=$|:)"
    named = {match.group() for word in code_words(prose(document)) if (match := re.match(pattern, word))}
    known = {*config_keys(ServiceConfig, ""), "checkpoint.path", "checkpoint.index"}
    known |= {"memory.max", "memory.high", "memory.limit_in_bytes"}  # files of control groups
    assert named <= known, named - known


def stated_defaults() -> list[tuple[str, str]]:
    """(key, default) of every row of operations.md that has both."""
    found = []
    for columns, at in ((4, (1, 2)), (3, (0, 1))):
        for row in table_rows(text_of(OPERATIONS), columns=columns):
            key, default = row[at[0]].strip("`"), row[at[1]]
            if re.fullmatch(r"(?:reads|staging|agreement)\.[a-z_]+", key) and default[:1].isdigit():
                found.append((key, default))
    return found


@pytest.mark.parametrize(("key", "default"), sorted(set(stated_defaults())), ids=lambda value: value)
def test_a_default_that_operations_states_is_the_schemas(key: str, default: str) -> None:
    section, name = key.split(".")
    annotation = ServiceConfig.model_fields[section].annotation
    assert isinstance(annotation, type)
    assert issubclass(annotation, BaseModel)
    value = annotation.model_fields[name].default
    wanted = written_size(value) if name.endswith("_bytes") else f"{value:g} s" if name.endswith("_s") else str(value)
    assert default == wanted


def test_operations_states_defaults() -> None:
    assert len(stated_defaults()) >= 9
