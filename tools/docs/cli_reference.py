"""docs/reference/cli.md: every command, its arguments and options, as the commands declare them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Union, get_args, get_origin

from typer.models import ArgumentInfo, CommandInfo, OptionInfo

from loader_service.cli.commands import app
from loader_service.cli.output import PROGRAM
from tools.docs.wording import MADE, either, table

INTRODUCTION = f"""# Command line reference

`{PROGRAM} COMMAND ...`, or `python -m loader_service COMMAND ...`; several ranks of `load`, `bench` and
`serve` with `torchrun --nproc-per-node N -m loader_service ...`. What commands print, and what to do at each exit code:
[operations.md](../operations.md). `{PROGRAM} COMMAND --help` says the same as this page, and
`{PROGRAM} --version` which version it is.
"""


@dataclass(frozen=True)
class Parameter:
    """What a command is called with. `choices`: the words that it may be."""

    name: str
    shown: str
    is_argument: bool
    default: str
    meaning: str
    choices: Sequence[str]

    @property
    def row(self) -> list[str]:
        words = f" {either([f'`{choice}`' for choice in self.choices])}." if self.choices else ""
        return [f"`{self.shown}`", self.default, self.meaning + words]


def page() -> str:
    params = {str(command.name): list(_parameters(command)) for command in app.registered_commands}
    first, *others = params.values()
    common = [param for param in first if all(param in other for other in others)]
    parts = [f"{MADE}\n", INTRODUCTION, f"{app.info.epilog}\n", "## Options of every command\n", _table(common)]
    for command in app.registered_commands:
        own = [param for param in params[str(command.name)] if param not in common]
        usage = " ".join([PROGRAM, str(command.name), *(param.shown for param in own if param.is_argument)])
        parts += [f"## `{command.name}`\n", f"`{usage}`\n", f"{inspect.getdoc(command.callback)}\n"]
        parts += [_table(own)] if own else []
    return "\n".join(parts)


def _table(params: Sequence[Parameter]) -> str:
    return table(["argument", "default", "meaning"], [param.row for param in params])


def _parameters(command: CommandInfo) -> Iterator[Parameter]:
    if command.callback is None:
        raise TypeError(f"the command {command.name} does nothing")
    for name, found in inspect.signature(command.callback, eval_str=True).parameters.items():
        if get_origin(found.annotation) is not Annotated:
            raise TypeError(f"{command.name}: {name} does not say what it is")
        kind, info = get_args(found.annotation)
        yield _parameter(name, _without_none(kind), info, found.default)


def _without_none(kind: object) -> object:
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    return kind


def _parameter(name: str, kind: Any, info: ArgumentInfo | OptionInfo, default: object) -> Parameter:
    choices = [str(choice.value) for choice in kind] if isinstance(kind, type) and issubclass(kind, StrEnum) else []
    is_argument = isinstance(info, ArgumentInfo)
    metavar = info.metavar or ("WORD" if choices else {int: "N", str: "TEXT"}.get(kind, "FILE"))
    said = (info.default, *(getattr(info, "param_decls", None) or ()))  # typer takes the first for a default
    option = next((word for word in said if isinstance(word, str)), f"--{name}")
    shown = metavar if is_argument else option if kind is bool else f"{option} {metavar}"
    required = default is inspect.Parameter.empty
    known = "" if required or default in (None, False) else f"`{getattr(default, 'value', default)}`"
    return Parameter(name, shown, is_argument, "required" if required else known, info.help or "", choices)
