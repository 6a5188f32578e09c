"""Rules of a load: how ranks take the tensors whose names match.

Checked here as far as neither a tensor nor the mesh is needed; what needs the mesh is in `conflicts.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from loader_service.config import fields
from loader_service.config.fields import Problem, found, refuse

Text = Annotated[str, BeforeValidator(fields.text), WithJsonSchema({"type": "string", "minLength": 1})]
AxisNames = Annotated[
    tuple[str, ...],
    BeforeValidator(fields.axis_names),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "uniqueItems": True},
            ]
        }
    ),
]
_CUTS_SCHEMA: dict[str, object] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2}
_POSITIVE_SCHEMA: dict[str, object] = {"type": "integer", "minimum": 1}
OneOrOneEach = Annotated[
    int | tuple[int, ...],
    BeforeValidator(fields.one_or_one_each),
    WithJsonSchema({"anyOf": [_POSITIVE_SCHEMA, {"type": "array", "items": _POSITIVE_SCHEMA, "minItems": 1}]}),
]


class FrozenModel(BaseModel):
    """Base of the configuration's models: frozen, strict, and without unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class HostResidentRule(FrozenModel):
    """How host-resident tensors lie in host memory: a part for each rank, or one table that a node's ranks share."""

    layout: Annotated[
        Literal["per_rank", "shared"],
        BeforeValidator(fields.choice("per_rank", "shared")),
        WithJsonSchema({"enum": ["per_rank", "shared"]}),
    ] = Field(
        description="`per_rank`: each rank holds the rows that its `split` gives it. `shared`: each node holds one "
        "whole table, which its ranks fill together and all read.",
    )


def _capture_pattern(value: object) -> str:
    """A regular expression with exactly one group, the number that decides."""
    pattern = fields.text(value)
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        fields.refuse_value(f"is not a regular expression ({error}), {found(value)}", value)
    if groups != 1:
        hint = r"write one such as 'layers\.(\d+)\.', and (?:...) for groups that capture nothing"
        fields.refuse_value(f"must have exactly one group, it has {groups}, {found(value)}; {hint}", value)
    return pattern


class AssignRule(FrozenModel):
    """Gives whole tensors to some ranks of an axis: by a number in the name, or by a fixed place (`to`)."""

    axis: AxisNames = Field(
        description="An axis of the mesh, or a list of axes that are flattened into one, row-major: `[moe_tp, ep]`.",
    )
    index: Annotated[
        str | None, BeforeValidator(_capture_pattern), WithJsonSchema({"type": "string", "minLength": 1})
    ] = Field(
        default=None,
        description="Regular expression, searched in the name, with exactly one group, which captures the number that "
        "decides. Required unless `to` is given. A matched name without the number is an error.",
    )
    how: Annotated[
        Literal["block", "round_robin", "boundaries"] | None,
        BeforeValidator(fields.choice("block", "round_robin", "boundaries")),
        WithJsonSchema({"enum": ["block", "round_robin", "boundaries"]}),
    ] = Field(
        default=None,
        description="How numbers go to ranks. `block`: contiguous ones to each; `round_robin`: in turn; `boundaries`: "
        "as that key says. Without the key: `boundaries` where those are given, else `block`.",
    )
    boundaries: Annotated[
        tuple[int, ...] | None, BeforeValidator(fields.boundaries), WithJsonSchema(dict(_CUTS_SCHEMA))
    ] = Field(
        default=None,
        description="One number more than the axis has ranks, from 0, never falling: rank r takes the numbers from the "
        "r-th up to, and without, the next. A number outside is an error. Not with `count` or another `how`.",
    )
    count: Annotated[int | None, BeforeValidator(fields.integer(1)), WithJsonSchema(dict(_POSITIVE_SCHEMA))] = Field(
        default=None,
        description="How many numbers `block` and `round_robin` share out. Without the key: 1 + the largest number in "
        "the names that the rule matches, before `skip`.",
    )
    to: Annotated[
        tuple[int, ...] | Literal["all"] | None,
        BeforeValidator(fields.positions),
        WithJsonSchema(
            {
                "anyOf": [
                    {"const": "all"},
                    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "uniqueItems": True},
                ]
            }
        ),
    ] = Field(
        default=None,
        description="The places along the axis that take the tensors, whatever their number; negative ones count from "
        "the end. `all`: every rank takes whole what a later, broader rule would split. Not with `index`, `how`, "
        "`boundaries`, `count`.",
    )

    @property
    def effective_how(self) -> Literal["block", "round_robin", "boundaries"] | None:
        """`how` with its default filled in; None where `to` decides."""
        if self.to is not None:
            return None
        return self.how or ("boundaries" if self.boundaries is not None else "block")

    @model_validator(mode="after")
    def _conflicts(self) -> Self:
        if self.to is not None:
            by_number = {"index": self.index, "how": self.how, "boundaries": self.boundaries, "count": self.count}
            problems = [
                Problem(
                    (key,), f"`{key}` and `to` exclude each other: `to` does not look at a number; remove one", value
                )
                for key, value in by_number.items()
                if value is not None
            ]
        else:
            problems = self._number_conflicts()
        if problems:
            refuse(problems)
        return self

    def _number_conflicts(self) -> list[Problem]:
        problems = []
        if self.index is None:
            hint = r"add index: 'layers\.(\d+)\.', or `to` for a fixed place"
            problems.append(Problem((), f"needs `index`, which finds the number in a name; {hint}"))
        if self.how == "boundaries" and self.boundaries is None:
            problems.append(Problem(("how",), "`how: boundaries` needs `boundaries`; add them, such as [0, 31, 61]"))
        if self.boundaries is not None and self.how not in (None, "boundaries"):
            problems.append(
                Problem(("boundaries",), f"`boundaries` and `how: {self.how}` exclude each other; remove one")
            )
        if self.boundaries is not None and self.count is not None:
            message = "`count` and `boundaries` exclude each other: the last boundary is the count; remove `count`"
            problems.append(Problem(("count",), message))
        elif self.how == "boundaries" and self.count is not None:
            problems.append(Problem(("count",), "`count` is only for block and round_robin; remove it"))
        return problems


_SPLIT_WAYS = ("align", "pad_to", "units", "boundaries")


class SplitRule(FrozenModel):
    """Cuts one dimension of a tensor over the ranks of an axis. One of `align`, `pad_to`, `units`, `boundaries`."""

    axis: AxisNames = Field(
        description="An axis of the mesh, or a list of axes that are flattened into one, as in `assign`."
    )
    dim: Annotated[
        int,
        BeforeValidator(fields.integer(0, hint="dimensions count from the front, from 0")),
        WithJsonSchema({"type": "integer", "minimum": 0}),
    ] = Field(
        description="The dimension that is cut, from 0. A tensor that lacks it, or has size 1 there, is taken whole."
    )
    align: OneOrOneEach | None = Field(
        default=None,
        description="Cuts fall on multiples of this many elements. With U blocks of K elements cut r is K times "
        "`U*r//n`, so that a weight agrees with its block scales, which are cut with `align: 1` or by default.",
    )
    pad_to: OneOrOneEach | None = Field(
        default=None,
        description="Cuts as if the dimension were padded to a multiple of this (vocabulary padding).",
    )
    units: OneOrOneEach | None = Field(
        default=None,
        description="The number of units (heads) in the dimension; a cut goes through none. With fewer units than "
        "ranks each goes to several consecutive ranks. It must divide the number of ranks, or be divided by it.",
    )
    boundaries: Annotated[
        tuple[int, ...] | tuple[tuple[int, ...], ...] | None,
        BeforeValidator(fields.boundaries_or_one_each),
        WithJsonSchema({"anyOf": [_CUTS_SCHEMA, {"type": "array", "items": _CUTS_SCHEMA, "minItems": 1}]}),
    ] = Field(
        default=None,
        description="The cuts in elements: one number more than the axis has ranks, from 0 to the dimension's size, "
        "never falling.",
    )
    sections: Annotated[
        tuple[int, ...] | None,
        BeforeValidator(fields.proportions),
        WithJsonSchema({"type": "array", "items": _POSITIVE_SCHEMA, "minItems": 1}),
    ] = Field(
        default=None,
        description="Proportions of a fused dimension (`[4, 1, 1]` for q, k, v). Each section is cut by itself and a "
        "rank's parts are put together. The other keys may then be lists with one value a section.",
    )

    @model_validator(mode="after")
    def _conflicts(self) -> Self:
        ways = {name: getattr(self, name) for name in _SPLIT_WAYS if getattr(self, name) is not None}
        problems = []
        if len(ways) > 1:
            names = ", ".join(f"`{name}`" for name in ways)
            problems.append(Problem((list(ways)[1],), f"only one of {names} may be given; remove the others"))
        for name, value in ways.items():
            listed = isinstance(value, tuple) and (name != "boundaries" or isinstance(value[0], tuple))
            if listed and self.sections is None:
                problems.append(
                    Problem(
                        (name,), "a list with one value a section needs `sections`; add it or write one value", value
                    )
                )
            elif listed and self.sections is not None and len(value) != len(self.sections):
                message = f"has {len(value)} values for {len(self.sections)} `sections`; write one a section"
                problems.append(Problem((name,), message, value))
        if problems:
            refuse(problems)
        return self


class Rule(FrozenModel):
    """What ranks take of the tensors whose names match: for each axis the first matching rule that names it decides.

    A rule that matches nothing is a warning, and so are one that decides nothing, since rules before it did, and a
    `split` whose `dim` none of its tensors has.
    """

    match: Text = Field(
        description="Glob for the whole names of the tensors that the rule is for; case-sensitive, `*` crosses dots.",
    )
    assign: AssignRule | None = Field(default=None, description="Gives whole tensors to some ranks of an axis.")
    split: SplitRule | None = Field(default=None, description="Cuts a dimension over the ranks of an axis.")
    host_resident: HostResidentRule | None = Field(
        default=None,
        description="The tensors stay in host memory: a load hands over row sources for them, `host_table` fills them. "
        "Of several rules with this key the first that matches decides. They are cut by rows only: `dim: 0`.",
    )

    @model_validator(mode="after")
    def _conflicts(self) -> Self:
        if self.assign is None and self.split is None and self.host_resident is None:
            message = "decides nothing; add `assign`, `split` or `host_resident`, or remove it"
            refuse([Problem((), f"the rule for {self.match!r} {message}")])
        if self.host_resident is not None and self.split is not None and (self.split.dim or self.split.sections):
            message = "a host-resident table is cut by contiguous rows: write dim: 0 and no sections"
            refuse([Problem(("split",), message)])
        if self.assign is not None and self.split is not None:
            shared = [axis for axis in self.split.axis if axis in self.assign.axis]
            if shared:
                message = (
                    f"the rule for {self.match!r} both assigns and splits over axis {shared[0]!r}; "
                    "an axis can do one of them: remove one, or use another axis"
                )
                refuse([Problem(("split", "axis"), message)])
        return self


def _rule_list(value: object) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        fields.refuse_value(f"must be a list of rules, {found(value)}; start each rule with '- match:'", value)
    return tuple(value)


Rules = Annotated[tuple[Rule, ...], BeforeValidator(_rule_list)]
