"""What a checkpoint is and what a load takes of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema

from loader_service.config import fields
from loader_service.config.fields import refuse
from loader_service.config.paths import absolute_path
from loader_service.config.rules import FrozenModel, Rules
from loader_service.errors import ConfigError

_TEXTS_SCHEMA: dict[str, object] = {"type": "array", "items": {"type": "string", "minLength": 1}}
Boolean = Annotated[bool, BeforeValidator(fields.boolean), WithJsonSchema({"type": "boolean"})]
Globs = Annotated[tuple[str, ...], BeforeValidator(fields.globs), WithJsonSchema(dict(_TEXTS_SCHEMA))]


def _paths(value: object, info: ValidationInfo) -> str | tuple[str, ...]:
    """Absolute paths; relative ones stand on the folder that the validation's context names, else the current one."""
    base_dir = (info.context or {}).get("base_dir", ".")

    def check(item: object) -> str:
        try:
            return absolute_path(fields.text(item), base_dir)
        except ConfigError as error:
            fields.refuse_value(error.message, item)

    if isinstance(value, list | tuple):
        paths = fields.each(fields.sequence(value, "files", "a folder, or a list of files"), check)
        repeated = [
            fields.Problem((position,), f"the file {path} is listed twice; remove one", path)
            for position, path in enumerate(paths)
            if path in paths[:position]
        ]
        if repeated:
            refuse(repeated)
        return paths
    return check(value)


class CheckpointConfig(FrozenModel):
    """Where a checkpoint lies."""

    path: Annotated[
        str | tuple[str, ...],
        BeforeValidator(_paths),
        WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {**_TEXTS_SCHEMA, "minItems": 1}]}),
    ] = Field(
        description="A folder, one file, or a list of safetensors files, none of them twice. Relative to the YAML "
        "file's folder; `~` expands. Absolute once loaded, links are not resolved.",
    )
    index: Annotated[
        Literal["advisory", "ignore"],
        BeforeValidator(fields.choice("advisory", "ignore")),
        WithJsonSchema({"enum": ["advisory", "ignore"]}),
    ] = Field(
        default="advisory",
        description="The shards' headers say what exists. `advisory`: the index decides between two copies of a name, "
        "and shards that it names must be there; `ignore`: it is not read, which is also the way to load although it "
        "names absent shards.",
    )


class LoadConfig(FrozenModel):
    """One named selection of a checkpoint's tensors, and how ranks take them."""

    checkpoint: CheckpointConfig | None = Field(
        default=None, description="A checkpoint of this load's own, instead of the common one."
    )
    skip: Globs = Field(
        default=(),
        description="Globs for names that the load leaves out; case-sensitive, `*` crosses dots. One that matches "
        "nothing is a warning.",
    )
    key_prefixes: Annotated[
        tuple[str, ...] | None,
        BeforeValidator(fields.prefixes),
        WithJsonSchema({**_TEXTS_SCHEMA, "minItems": 1}),
    ] = Field(
        default=None,
        description="Only names under these prefixes are taken. Whole dotted segments: `mtp.1` and `mtp.1.` mean the "
        "same and never take `mtp.10.x`. No globs: `*` is refused. One of several prefixes without a name is an error. "
        "Without the key every name is taken.",
    )
    on_no_match: Annotated[
        Literal["error", "read_all"],
        BeforeValidator(fields.choice("error", "read_all")),
        WithJsonSchema({"enum": ["error", "read_all"]}),
    ] = Field(
        default="error",
        description="When no prefix matches anything. `read_all`: the load is done as if none were declared, and says "
        "so.",
    )
    rules: Rules = Field(
        default=(),
        description="For each axis the first matching rule that names it decides; what no rule decides is taken whole "
        "by every rank.",
    )
    raw_dtypes: Boolean = Field(
        default=False,
        description="Types that torch cannot hold are handed over as uint8 bytes instead of being an error.",
    )
