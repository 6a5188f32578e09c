"""What a resident service keeps, and how workers come by it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema

from loader_service.config import fields
from loader_service.config.fields import Problem, did_you_mean
from loader_service.config.paths import absolute_path
from loader_service.config.rules import FrozenModel
from loader_service.errors import ConfigError

_NAMES_SCHEMA: dict[str, object] = {"type": "array", "items": {"type": "string", "minLength": 1}}
_MOST_ADDRESS_BYTES: Final = 100  # sockets take 107; several services on a node count theirs


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, list | tuple) and not value:
        return ()
    names = fields.each(fields.sequence(value, "names of loads", "[target, draft]"), fields.text)
    repeated = [
        Problem((position,), f"load {name!r} is named twice; remove one", name)
        for position, name in enumerate(names)
        if name in names[:position]
    ]
    if repeated:
        fields.refuse(repeated)
    return tuple(str(name) for name in names)


def _names_or_none(value: object) -> tuple[str, ...] | None:
    return None if value is None else _names(value)


def _socket(value: object, info: ValidationInfo) -> str:
    text = fields.text(value)
    if text == "auto":
        return text
    if not text.startswith("@"):
        try:
            text = absolute_path(text, (info.context or {}).get("base_dir", "."))
        except ConfigError as error:
            fields.refuse_value(error.message, value)
    if "\0" in text or len(text) < 2 or len(text.encode()) > _MOST_ADDRESS_BYTES:
        fields.refuse_value(
            f"must be auto, a path, or @ and a name, of at most {_MOST_ADDRESS_BYTES} bytes: {len(text.encode())} are "
            "more than a socket takes, or too few",
            value,
        )
    return text


class ServeConfig(FrozenModel):
    """The resident service, `loader-service serve`, and workers that attach to it."""

    keep: Annotated[tuple[str, ...], BeforeValidator(_names), WithJsonSchema(dict(_NAMES_SCHEMA))] = Field(
        default=(),
        description="Loads that the service keeps in memory that its node's workers share: all that the node's ranks "
        "take of them, or their shared host tables alone where memory admits no more.",
    )
    warm: Annotated[tuple[str, ...] | None, BeforeValidator(_names_or_none), WithJsonSchema(dict(_NAMES_SCHEMA))] = (
        Field(
            default=None,
            description="Loads that it brings into the page cache, as far as memory is free. Without the key: every "
            "load that it does not keep.",
        )
    )
    socket: Annotated[str, BeforeValidator(_socket), WithJsonSchema({"type": "string", "minLength": 2})] = Field(
        default="auto",
        description="Where workers of the same user find it. auto: an abstract Unix socket, which has no file, named "
        "after the user and the checkpoint; @NAME: one of that name; a path: a socket file, for workers in another "
        "network namespace.",
    )
    if_absent: Annotated[
        Literal["read", "error"],
        BeforeValidator(fields.choice("read", "error")),
        WithJsonSchema({"enum": ["read", "error"]}),
    ] = Field(
        default="read",
        description="What a worker that attaches does where no service answers, or it has ended. read: it reads the "
        "files itself, and says so; error: its load fails.",
    )


def serve_conflicts(serve: ServeConfig, loads: Collection[str]) -> Iterator[Problem]:
    """Names that are no loads, and loads that are to be both kept and warmed."""
    for key, names in (("keep", serve.keep), ("warm", serve.warm or ())):
        for position, name in enumerate(names):
            path = ("serve", key, position)
            if name not in loads:
                hint = did_you_mean(name, loads)
                yield Problem(path, f"no load is named {name!r}; there are {', '.join(loads)}{hint}", name)
            elif key == "warm" and name in serve.keep:
                yield Problem(path, f"load {name!r} is kept already; remove it here", name)
