"""docs/reference/api.md: everything public, from signatures and docstrings."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType

import loader_service as ls
from loader_service import errors, integrations
from loader_service.planning.fragments import PartSpec
from loader_service.planning.plan import Extent
from loader_service.planning.tables import HostMemory, TablePart
from loader_service.timeline import Counters
from tools.docs import DOCS
from tools.docs.wording import MADE, table

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Configuration": ("load_config", "aload_config", "config_from_dict", "ServiceConfig"),
    "Services": ("LoaderService", "BlockingLoaderService", "Rendezvous", "iter_weights"),
    "The resident service": ("attach", "attach_blocking", "ResidentService"),
    "Loads": ("Load", "BlockingLoad", "TensorSpec", "Batch", "Piece", "DeviceEvent"),
    "Tables in host memory": ("HostTable", "RowSource", "host_resident_weights"),
    "Plans": ("LoadPlan", "RankPlan"),
    "Reports": ("LoadReport", "PolicyOutcome", "FailureRecord", "JsonFormatter"),
    "More": ("clear_weight_cache",),
}
FIRST_WORDS = {
    "Configuration": "The attributes of a `ServiceConfig` are the keys of [yaml.md](yaml.md).",
    "Plans": "Other attributes of plans are the loader's own, and change with it.",
    "Reports": "Every key of a report is explained in [operations.md](../operations.md#the-report).",
}
CONSTRUCTED = {"LoaderService", "Rendezvous", "ResidentService", "RowSource"}
"""What users make themselves; the others are handed to them."""

FIELDS = {
    "LoadPlan": ("load", "digest", "warnings", "read_all", "catalog", "mesh"),
    "RankPlan": ("rank", "payload_bytes", "read_bytes", "tables"),
}
MEMBERS = {
    "LoadPlan": ("world_size", "for_rank", "tables_of", "table", "split_rules", "host_memory", "as_json"),
    "RankPlan": ("digest", "extents", "name", "index_of", "dtype_code", "storage_shape", "nbytes", "spec"),
    "HostMemory": ("as_json",),
}
"""Of plans, which the loader works with itself: what is meant for users."""

RETURNED = (Counters, Extent, PartSpec, TablePart, HostMemory)
ALIASES = {
    "GroupChoice": '`None`, `"solo"`, a `torch.distributed.ProcessGroup`, or a `Rendezvous`',
    "Weight": "a `torch.Tensor`, or a `RowSource` for what a rule keeps in host memory; typed as `Any`",
    "Storage": "what touches the disk (`loader_service.reading`), to be replaced in tests",
    "Pinner": "what locks memory for a device (`loader_service.memory`), to be replaced in tests",
    "TorchStore": "a `torch.distributed.Store`",
    "Store": "anything that has the methods of one",
    "Rows": "a pair of numbers: rows [start, stop)",
    "Layout": '`"per_rank"` or `"shared"`',
    "Extents": "a sequence of `Extent`s, made when they are asked for",
    "Catalog": "all headers of a checkpoint (`loader_service.checkpoint`)",
    "Mesh": "the ranks' coordinates (`loader_service.planning`)",
    "CheckpointConfig": "a checkpoint's part of the configuration: [yaml.md](yaml.md#checkpoint)",
    "LoadConfig": "a load's part of it: [yaml.md](yaml.md#loadsname)",
    "LogRecord": "a `logging.LogRecord`",
    "ServiceStatus": "plain data, whose keys are in [metrics.md](../metrics.md#status)",
    "Rename": "a function of the checkpoint's name that gives the module's, or `None`",
    "Presharded": "names, or a function of a name",
    "Dtype": 'a `torch.dtype`, its name, or `"auto"`',
}
_KNOWN = {"Any", "AsyncGenerator", "AsyncIterator", "Awaitable", "Callable", "Iterable", "Iterator", "Literal"}
_KNOWN |= {"Mapping", "Module", "PathLike", "Sequence", "Tensor", *vars(builtins)}
_WORD = re.compile(r"\b[A-Z]\w+")

INTRODUCTION = """# Python API reference

`import loader_service as ls`; everything here is in `ls.__all__`, but for the integrations, which are modules of their
own. How it is used, with examples: [python-api.md](../python-api.md). `ls.__version__` is the version.
"""


def page() -> str:
    grouped = {name for names in GROUPS.values() for name in names} | {cls.__name__ for cls in _errors()}
    others = [name for name in ls.__all__ if name not in grouped and name != "__version__"]
    parts = [f"{MADE}\n", INTRODUCTION]
    for group, names in GROUPS.items():
        parts += [f"## {group}\n", *(f"{words}\n" for words in [FIRST_WORDS.get(group)] if words)]
        for name in (*names, *(others if group == "More" else ())):
            parts += _entry(getattr(ls, name), level=3)
    parts += ["## Errors\n", *_error_table(), "## Integrations\n"]
    for module in _integrations():
        parts += [f"### `{module.__name__}`\n", f"{inspect.getdoc(module)}\n"]
        for value in vars(module).values():
            if _is_public(value, module):
                parts += _entry(value, level=4)
    parts.append("## What they return\n")
    for cls in RETURNED:
        parts += _entry(cls, level=3)
    words = [[f"`{word}`", text] for word, text in ALIASES.items()]
    parts += ["## Words in signatures\n", table(["word", "is"], words)]
    return "\n".join(parts)


def _entry(value: object, *, level: int) -> Iterator[str]:
    if isinstance(value, type):
        yield f"{'#' * level} `{value.__name__}`\n"
        if value.__name__ in CONSTRUCTED:
            yield f"`{_signature(value.__name__, value)}`\n"
        yield f"{inspect.getdoc(value)}\n"
        fields, members = _fields(value), list(_members(value))
        if fields:
            yield f"Fields: {', '.join(fields)}.\n"
        if members:
            yield "\n".join(members) + "\n"
    elif isinstance(value, FunctionType):
        yield f"{'#' * level} `{value.__name__}`\n"
        yield f"`{_signature(value.__name__, value)}`\n"
        yield f"{inspect.getdoc(value)}\n"


def _fields(cls: type) -> list[str]:
    if not dataclasses.is_dataclass(cls) or cls.__name__ in CONSTRUCTED:
        return []
    wanted = FIELDS.get(cls.__name__)
    fields = [field for field in dataclasses.fields(cls) if field.name in wanted] if wanted else dataclasses.fields(cls)
    return [f"`{field.name}: {_checked(str(field.type))}`" for field in fields if not field.name.startswith("_")]


def _members(cls: type) -> Iterator[str]:
    """A line for each public method and property that is the loader's own, inherited ones first.

    Of a blocking face only what it does otherwise than the other one.
    """
    owners = [cls] if cls.__name__.startswith("Blocking") else [*reversed(cls.__mro__)]
    found: dict[str, object] = {}
    for owner in owners:
        if owner.__module__.split(".")[0] == ls.__name__:
            found |= dict(sorted(vars(owner).items(), key=lambda item: _line(item[1])))
    wanted = MEMBERS.get(cls.__name__, tuple(found))
    for name in sorted((name for name in found if name in wanted), key=wanted.index):
        value = found[name]
        of = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        of = of.func if isinstance(of, functools.cached_property) else of
        if name.startswith("_") or not isinstance(of, FunctionType):
            continue
        text = re.sub(r"\s*\n\s*", " ", inspect.getdoc(of) or "")
        if not text:
            raise ValueError(f"{cls.__name__}.{name} has no docstring, and the reference has it")
        yield f"- **`{_member(name, value, of)}`** {text}"


def _line(value: object) -> int:
    """Where a member is defined in its file: a class's own order changes when a member is taken away and put back."""
    of = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    of = of.func if isinstance(of, functools.cached_property) else inspect.unwrap(of) if callable(of) else of
    return of.__code__.co_firstlineno if isinstance(of, FunctionType) else 0


def _member(name: str, value: object, function: FunctionType) -> str:
    if isinstance(value, property | functools.cached_property):
        return f"{name}: {_checked(str(inspect.signature(function).return_annotation))}"
    return _signature(name, function)


def _signature(name: str, value: type | FunctionType) -> str:
    """As it is called: without self, annotations as they are written; `await` where a call is to be awaited."""
    signature = inspect.signature(value)
    parts: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        star = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{star}{parameter.name}: {_checked(str(parameter.annotation))}{default}")
    returned = "" if isinstance(value, type) else f" -> {_checked(str(signature.return_annotation))}"
    before = "await " if inspect.iscoroutinefunction(value) else ""
    return f"{before}{name}({', '.join(parts)}){returned}"


def _checked(annotation: str) -> str:
    """The annotation; ValueError for a word in it that this page does not explain."""
    known = {*ls.__all__, *ALIASES, *_KNOWN, *(cls.__name__ for cls in RETURNED)}
    known |= {name for module in _integrations() for name in vars(module) if isinstance(vars(module)[name], type)}
    unknown = set(_WORD.findall(annotation)) - known
    if unknown:
        raise ValueError(f"say in tools/docs/api_reference.py what {', '.join(sorted(unknown))} is")
    return annotation


def _errors() -> list[type[errors.LoaderError]]:
    return [
        value
        for name, value in vars(errors).items()
        if name in ls.__all__ and isinstance(value, type) and issubclass(value, errors.LoaderError)
    ]


def _error_table() -> Iterator[str]:
    rows = [
        [
            f"`{cls.__name__}`",
            ", ".join(f"`{base.__name__}`" for base in cls.__bases__),
            str(cls.exit_code),
            inspect.getdoc(cls) or "",
        ]
        for cls in _errors()
    ]
    yield table(["class", "is a", "exit code", "when"], rows)
    yield f"All have `exit_code`, and `record() -> FailureRecord`: {inspect.getdoc(errors.LoaderError.record)}\n"


def _integrations() -> list[ModuleType]:
    """Those that docs/integrations.md names; the others are their helpers."""
    text = (DOCS / "integrations.md").read_text(encoding="utf-8")
    names = (f"{integrations.__name__}.{found.name}" for found in pkgutil.iter_modules(integrations.__path__))
    return [importlib.import_module(name) for name in names if f"`{name}`" in text]


def _is_public(value: object, module: ModuleType) -> bool:
    own = getattr(value, "__module__", None) == module.__name__
    return own and isinstance(value, type | FunctionType) and not value.__name__.startswith("_")
