"""The configuration as frozen data: every key, its type, its meaning and, only here, its default."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from loader_service import sizes
from loader_service.config import fields
from loader_service.config.conflicts import RulePart, mesh_conflicts, missing_checkpoints, rule_parts
from loader_service.config.fields import did_you_mean, found, refuse
from loader_service.config.loads import CheckpointConfig, LoadConfig
from loader_service.config.rules import AssignRule, FrozenModel, HostResidentRule, Rule, SplitRule
from loader_service.config.serve import ServeConfig, serve_conflicts
from loader_service.errors import ConfigError

__all__ = [
    "AgreementConfig",
    "AssignRule",
    "CacheConfig",
    "CheckpointConfig",
    "HostResidentRule",
    "LoadConfig",
    "MemoryConfig",
    "ReadsConfig",
    "Rule",
    "ServeConfig",
    "ServiceConfig",
    "SplitRule",
    "StagingConfig",
    "check_world_size",
]

MIB = 1 << 20


def _loads(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        fields.refuse_value(f"must be a mapping of names to loads, {found(value)}; write {{target: {{}}}}", value)
    if not value:
        fields.refuse_value("has no load; write at least one, such as {target: {}}", value)
    unnamed = [fields.Problem((name,), "a load needs a name", name) for name in value if name == ""]
    if unnamed:
        refuse(unnamed)
    return dict(value)


def _reserve(value: object) -> int | Literal["auto"]:
    return "auto" if value == "auto" else fields.size(0)(value)


def _size_schema(minimum_bytes: int) -> WithJsonSchema:
    return WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": minimum_bytes}, {"type": "string", "pattern": sizes.PATTERN}]}
    )


Seconds = Annotated[
    float,
    BeforeValidator(fields.seconds),
    WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "maximum": fields.MAX_SECONDS}),
]
MAX_THREADS = 1024


class ReadsConfig(FrozenModel):
    """How the bytes are read."""

    threads: Annotated[
        int | Literal["auto"],
        BeforeValidator(fields.integer_or_auto(1, MAX_THREADS)),
        WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": MAX_THREADS}]}),
    ] = Field(
        default="auto",
        description="Reading threads of a rank. `auto`: 8, or a rank's share of `threads_per_node` where that is less.",
    )
    threads_per_node: Annotated[
        int,
        BeforeValidator(fields.integer(1, MAX_THREADS)),
        WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_THREADS}),
    ] = Field(
        default=16,
        description="Cap on the reading threads of all ranks of a node together, for `threads: auto`.",
    )
    chunk_bytes: Annotated[int, BeforeValidator(fields.size(64)), _size_schema(64)] = Field(
        default=16 * MIB, description="The most bytes that one read asks for."
    )
    coalesce_gap_bytes: Annotated[int, BeforeValidator(fields.size(0)), _size_schema(0)] = Field(
        default=256 * 1024,
        description="Wanted ranges closer than this are read as one, never beyond 5 % extra bytes a plan.",
    )
    access: Annotated[
        Literal["auto", "buffered", "direct"],
        BeforeValidator(fields.choice("auto", "buffered", "direct")),
        WithJsonSchema({"enum": ["auto", "buffered", "direct"]}),
    ] = Field(
        default="auto",
        description="How files are read. `auto`: what the page cache holds is copied from there, the rest is read past "
        "it (O_DIRECT); `direct`: past it without a look at what it holds; both go through it where file system or "
        "memory allow nothing else. `buffered`: everything through it.",
    )
    sharing: Annotated[
        Literal["auto", "none", "page_cache", "staging"],
        BeforeValidator(fields.choice("auto", "none", "page_cache", "staging")),
        WithJsonSchema({"enum": ["auto", "none", "page_cache", "staging"]}),
    ] = Field(
        default="auto",
        description="How ranks of a node share bytes that several of them want. `staging`: each is read once, into "
        "memory that the ranks of the node share; `page_cache`: each is read once, into the page cache, by turns; "
        "`none`: each rank reads for itself, with `access: auto` through the page cache where the ranks of the node "
        "would read more than 5 % of their bytes again; `auto`: `staging` or `page_cache` where that spares 64 MiB or "
        "more and can be had.",
    )
    drop_page_cache: Annotated[
        Literal["auto", "always", "never"],
        BeforeValidator(fields.choice("auto", "always", "never")),
        WithJsonSchema({"enum": ["auto", "always", "never"]}),
    ] = Field(
        default="auto",
        description="Whether the page cache is given back behind reads of host-resident tables, where the layout is "
        "`per_rank` and no other rank holds the same rows. `auto`: what these reads brought into it; `always`: what "
        "lay there before, too. Other reads keep it.",
    )
    retries: Annotated[
        int, BeforeValidator(fields.integer(0, 100)), WithJsonSchema({"type": "integer", "minimum": 0, "maximum": 100})
    ] = Field(default=3, description="How often a read that fails with an input/output error is tried again.")
    stuck_after_s: Seconds = Field(
        default=300.0,
        description="A read that has not returned after so long is given up, and the load fails on all ranks.",
    )


class StagingConfig(FrozenModel):
    """Memory for bytes that are read ahead of the consumer."""

    capacity_bytes: Annotated[int, BeforeValidator(fields.size(4096)), _size_schema(4096)] = Field(
        default=1024 * MIB,
        description="The most bytes that a rank reads ahead of its consumer. The slots that it gives to its node are a "
        "part of them.",
    )
    pin: Annotated[
        Literal["auto", "required", "never"],
        BeforeValidator(fields.choice("auto", "required", "never")),
        WithJsonSchema({"enum": ["auto", "required", "never"]}),
    ] = Field(
        default="auto",
        description="Page-locked staging memory, what ranks of a node share of it included, and host-resident tables. "
        "`auto`: where there is an accelerator; pageable, with a warning, where that refuses; `required`: fails in "
        "both cases, without an accelerator and where it refuses.",
    )


class AgreementConfig(FrozenModel):
    """How long ranks wait for each other."""

    timeout_s: Seconds = Field(default=60.0, description="The longest silence of another rank within a load.")
    start_timeout_s: Seconds = Field(default=600.0, description="The longest wait for all ranks to enter a load.")
    grace_s: Seconds = Field(default=10.0, description="How long leaving waits for reads in flight.")


class CacheConfig(FrozenModel):
    """The raw weight cache."""

    capacity_bytes: Annotated[int, BeforeValidator(fields.size(0)), _size_schema(0)] = Field(
        default=0, description="Bytes that the raw weight cache may hold in this process. 0: there is none."
    )

    @property
    def on(self) -> bool:
        """Whether tensors share memory with the raw weight cache, and with later loads."""
        return self.capacity_bytes > 0


class MemoryConfig(FrozenModel):
    """What is left free of host memory."""

    reserve_bytes: Annotated[
        int | Literal["auto"],
        BeforeValidator(_reserve),
        WithJsonSchema(
            {
                "anyOf": [
                    {"const": "auto"},
                    {"type": "integer", "minimum": 0},
                    {"type": "string", "pattern": sizes.PATTERN},
                ]
            }
        ),
    ] = Field(
        default="auto",
        description="Host memory that must stay free beside host-resident tables and what ranks of a node share, on "
        "the machine and in each control group with a limit. `auto`: a tenth of all there is, at most 16 GiB.",
    )


class ServiceConfig(FrozenModel):
    """The whole configuration. Made by `load_config` and `config_from_dict`, which say all that is wrong at once."""

    checkpoint: CheckpointConfig | None = Field(
        default=None,
        description="The checkpoint of every load that has none of its own. A load without any is an error.",
    )
    mesh: Annotated[
        dict[str, int] | None,
        BeforeValidator(fields.mesh_sizes),
        WithJsonSchema(
            {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}, "minProperties": 1}
        ),
    ] = Field(
        default=None,
        description="The axes, and how many ranks lie along each. Ranks get their coordinates row-major, in the order "
        "written: with `{pp: 2, tp: 4}` rank 5 is pp 1, tp 1. The product must be the number of ranks, unless ranks "
        "give their own coordinates in Python (`coords=`). Without the key there is one axis, `world`, over all ranks.",
    )
    loads: Annotated[dict[str, LoadConfig], BeforeValidator(_loads)] = Field(
        description="The loads by their names, which are free. At least one.",
        json_schema_extra={"minProperties": 1},
    )
    reads: ReadsConfig = Field(default_factory=ReadsConfig, description="How the bytes are read.")
    staging: StagingConfig = Field(
        default_factory=StagingConfig, description="Memory for bytes that are read ahead of the consumer."
    )
    agreement: AgreementConfig = Field(
        default_factory=AgreementConfig, description="How long ranks wait for each other."
    )
    cache: CacheConfig = Field(default_factory=CacheConfig, description="The raw weight cache.")
    memory: MemoryConfig = Field(default_factory=MemoryConfig, description="What is left free of host memory.")
    serve: ServeConfig = Field(
        default_factory=ServeConfig, description="The resident service, and workers that attach to it."
    )

    @model_validator(mode="after")
    def _conflicts(self) -> Self:
        problems = mesh_conflicts(self.mesh, self._rule_parts())
        if self.checkpoint is None:
            problems += missing_checkpoints(name for name, load in self.loads.items() if load.checkpoint is None)
        problems += serve_conflicts(self.serve, self.loads)
        if problems:
            refuse(problems)
        return self

    def _rule_parts(self) -> Iterator[RulePart]:
        for name, load in self.loads.items():
            for position, rule in enumerate(load.rules):
                yield from rule_parts(("loads", name, "rules", position), rule)

    def load(self, load_name: str) -> LoadConfig:
        """The load of that name; `ConfigError` with the names that exist where there is none."""
        found_load = self.loads.get(load_name)
        if found_load is None:
            hint = did_you_mean(load_name, self.loads)
            raise ConfigError(f"no load is named {load_name!r}; the configuration has {', '.join(self.loads)}{hint}")
        return found_load

    def checkpoint_of(self, load_name: str) -> CheckpointConfig:
        """The checkpoint that a load reads: its own, else the common one. `ConfigError` for an unknown load."""
        checkpoint = self.load(load_name).checkpoint or self.checkpoint
        if checkpoint is None:  # validation refuses such a load; this is for models made without it
            raise ConfigError(f"load {load_name!r} has no checkpoint; add `checkpoint: {{path: ...}}`")
        return checkpoint


def check_world_size(config: ServiceConfig, world_size: int, coords_given: bool) -> None:
    """Raise `ConfigError` where the mesh is for another number of ranks than there are.

    Called before anything starts. With `coords` given by the caller the mesh only names axes and sizes, and any number
    of ranks is right.
    """
    if coords_given or config.mesh is None:
        return
    product = math.prod(config.mesh.values())
    if product != world_size:
        shape = ", ".join(f"{axis}: {ranks}" for axis, ranks in config.mesh.items())
        raise ConfigError(
            f"mesh: {{{shape}}} is for {product} ranks, but there are {world_size}; "
            f"start (or plan for) {product} ranks, or change the mesh so that its product is {world_size}"
        )
