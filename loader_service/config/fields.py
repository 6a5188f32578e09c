"""Types of the configuration's values: each checks one value strictly and says what was found and what to write.

Validators are plain functions for pydantic. They never convert text to numbers or numbers to booleans: a value that
only looks right is refused. A problem inside a list is reported at its item.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn, TypeVar

from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from loader_service.errors import ConfigError
from loader_service.sizes import parse_size

KeyPath = tuple[str | int, ...]
"""Where a value stands: keys of mappings and positions in lists, from the top."""

MAX_INTEGER = (1 << 63) - 1
MAX_SECONDS = 31_536_000
"""A year: longer waits are a mistake, and far longer ones overflow the clocks of threads and event loops."""

T = TypeVar("T")


def format_key_path(path: KeyPath) -> str:
    """A key path as it is printed: "loads.target.rules[2].split.axis". List positions count from 0."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, where, and what to write instead. `value` is what was found there.

    `line` is the line of the file where that is not the one that the path leads to (a second key of the same name).
    """

    path: KeyPath
    message: str
    value: object = None
    line: int | None = None


class Unreadable:
    """Stands for a value that was refused before validation, so that it is not reported a second time."""


UNREADABLE = Unreadable()


def refuse(problems: Sequence[Problem]) -> NoReturn:
    """Raise all problems as one pydantic error; their paths are relative to the value that is being validated."""
    raise ValidationError.from_exception_data(
        "configuration",
        [
            InitErrorDetails(
                type=PydanticCustomError("configuration", "{text}", {"text": problem.message}),
                loc=problem.path,
                input=problem.value,
            )
            for problem in problems
        ],
    )


def refuse_value(message: str, value: object) -> NoReturn:
    """Raise one problem with the value that is being validated."""
    refuse([Problem((), message, value)])


def found(value: object) -> str:
    """The value in words, short enough for a message."""
    if isinstance(value, bool):
        return f"found {str(value).lower()}"
    if isinstance(value, str):
        shown = value if len(value) <= 60 else value[:57] + "..."
        return f"found the text {shown!r}"
    if isinstance(value, int | float):
        return f"found the number {value}"
    if isinstance(value, list | tuple):
        return "found a list"
    if isinstance(value, dict):
        return "found a mapping"
    return f"found {type(value).__name__}"


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """A suffix such as "; did you mean 'tp'?", empty when nothing is close."""
    close = closest(word, choices)
    return f"; did you mean {close!r}?" if close is not None else ""


def closest(word: object, choices: Iterable[str]) -> str | None:
    """What was probably meant; None when nothing is close."""
    close = get_close_matches(word, list(choices), n=1, cutoff=0.6) if isinstance(word, str) else []
    return close[0] if close else None


def each(value: Sequence[object], check: Callable[[object], T]) -> tuple[T, ...]:
    """Every item checked; all items' problems are raised together, at their positions."""
    good: list[T] = []
    problems: list[Problem] = []
    for position, item in enumerate(value):
        try:
            good.append(check(item))
        except ValidationError as error:
            problems += [
                Problem((position, *line["loc"]), line["msg"], line["input"])
                for line in error.errors(include_url=False)
            ]
    if problems:
        refuse(problems)
    return tuple(good)


def sequence(value: object, wanted: str, example: str) -> Sequence[object]:
    """The value itself if it is a list that is not empty."""
    if not isinstance(value, list | tuple):
        refuse_value(f"must be a list of {wanted}, {found(value)}; write {example}", value)
    if not value:
        refuse_value(f"is an empty list; write {example} or remove the key", value)
    return value


def integer(minimum: int, maximum: int = MAX_INTEGER, hint: str = "") -> Callable[[object], int]:
    """A validator for a real integer within limits; a boolean is none."""
    limits = f"from {minimum} to {maximum}" if maximum != MAX_INTEGER else f"of at least {minimum}"
    tail = f"; {hint}" if hint else ""

    def check(value: object) -> int:
        if type(value) is not int:
            unquote = f"; write {value} without quotes" if isinstance(value, str) and value.isdecimal() else tail
            refuse_value(f"must be a whole number {limits}, {found(value)}{unquote}", value)
        if not minimum <= value <= maximum:
            refuse_value(f"must be a whole number {limits}, {found(value)}{tail}", value)
        return value

    return check


def integer_or_auto(minimum: int, maximum: int) -> Callable[[object], int | str]:
    """A validator for a real integer within limits, or the word auto."""
    check_integer = integer(minimum, maximum, "or write auto")

    def check(value: object) -> int | str:
        return "auto" if value == "auto" else check_integer(value)

    return check


def size(minimum_bytes: int) -> Callable[[object], int]:
    """A validator for the size grammar of `sizes.py`."""

    def check(value: object) -> int:
        try:
            size_bytes = parse_size(value)
        except ConfigError as error:
            refuse_value(error.message, value)
        if size_bytes < minimum_bytes:
            refuse_value(f"must be at least {minimum_bytes} bytes, {found(value)}", value)
        return size_bytes

    return check


def seconds(value: object) -> float:
    """A positive, finite number of seconds, up to a year."""
    if type(value) not in (int, float) or not isinstance(value, int | float):
        refuse_value(f"must be a number of seconds, {found(value)}; write one such as 60 or 0.5", value)
    if not math.isfinite(value) or not 0 < value <= MAX_SECONDS:
        refuse_value(f"must be more than 0 and at most {MAX_SECONDS} seconds, {found(value)}", value)
    return float(value)


def boolean(value: object) -> bool:
    """A real boolean; no number and no text is one."""
    if not isinstance(value, bool):
        refuse_value(f"must be true or false, {found(value)}", value)
    return value


def choice(*allowed: str) -> Callable[[object], str]:
    """A validator for one of a few words."""

    def check(value: object) -> str:
        if not isinstance(value, str) or value not in allowed:
            hint = did_you_mean(value, allowed)
            refuse_value(f"must be one of {', '.join(allowed)}, {found(value)}{hint}", value)
        return value

    return check


def text(value: object) -> str:
    """Text that is not empty; a number is none."""
    if not isinstance(value, str):
        refuse_value(f"must be text, {found(value)}; put it in quotes if text is meant", value)
    if not value:
        refuse_value("is empty text; write something or remove it", value)
    return value


def _list_of_text(wanted: str, example: str) -> Callable[[object], Sequence[object]]:
    def check(value: object) -> Sequence[object]:
        if isinstance(value, str):
            refuse_value(f"must be a list of {wanted}, {found(value)}; write [{value!r}]", value)
        return sequence(value, wanted, example)

    return check


_prefix_list = _list_of_text("key prefixes", '["mtp.0."]')
_glob_list = _list_of_text("globs", '["mtp.*"]')


def globs(value: object) -> tuple[str, ...]:
    """A list of globs; it may be empty."""
    return () if isinstance(value, list | tuple) and not value else each(_glob_list(value), text)


def _prefix(value: object) -> str:
    prefix = text(value)
    if "*" in prefix:
        plain = prefix.split("*")[0]
        refuse_value(f"is a prefix, not a glob, {found(value)}; write it without '*': {plain!r}", value)
    if not prefix.strip("."):
        refuse_value(f"must name at least one segment, {found(value)}; write one such as 'mtp.0.'", value)
    return prefix


def prefixes(value: object) -> tuple[str, ...]:
    """A list of key prefixes, not empty: an empty declaration must not silently mean "read everything"."""
    return each(_prefix_list(value), _prefix)


def axis_names(value: object) -> tuple[str, ...]:
    """One axis name, or a list of distinct ones that make one flattened axis."""
    if isinstance(value, str):
        return (text(value),)
    names = each(sequence(value, "axis names", "tp, or [moe_tp, ep]"), text)
    repeated = [
        Problem((position,), f"axis {name!r} is named twice; remove one", name)
        for position, name in enumerate(names)
        if name in names[:position]
    ]
    if repeated:
        refuse(repeated)
    return names


def mesh_sizes(value: object) -> dict[str, int]:
    """Axis name -> number of ranks along it; the order is the row-major order of ranks."""
    if not isinstance(value, dict):
        refuse_value(f"must be a mapping of axis names to sizes, {found(value)}; write {{pp: 2, tp: 4}}", value)
    if not value:
        refuse_value("is an empty mapping; write {tp: 2} or remove the key", value)
    check_size = integer(1)
    problems: list[Problem] = []
    for name, ranks in value.items():
        for check, item in ((text, name), (check_size, ranks)):
            try:
                check(item)
            except ValidationError as error:
                problems += [Problem((name,), line["msg"], item) for line in error.errors(include_url=False)]
    if problems:
        refuse(problems)
    return dict(value)


_at_least_1 = integer(1)


def one_or_one_each(value: object) -> int | tuple[int, ...]:
    """A positive number, or a list of them with one for each section."""
    if isinstance(value, list | tuple):
        return each(sequence(value, "whole numbers, one a section", "[128, 128]"), _at_least_1)
    return _at_least_1(value)


def proportions(value: object) -> tuple[int, ...]:
    """The sections of a fused dimension: positive whole numbers in proportion to their sizes."""
    return each(sequence(value, "whole numbers", "[4, 1, 1] for a fused q, k, v"), _at_least_1)


def boundaries(value: object) -> tuple[int, ...]:
    """Cut points: at least two numbers, the first 0, none smaller than the one before it."""
    numbers = each(sequence(value, "whole numbers", "[0, 31, 61]"), integer(0))
    if len(numbers) < 2:
        refuse_value("needs at least two numbers, one more than there are parts; write [0, N]", value)
    problems = [] if numbers[0] == 0 else [Problem((0,), f"must start at 0, {found(numbers[0])}", numbers[0])]
    problems += [
        Problem(
            (i,), f"must not be smaller than the number before it, {numbers[i - 1]}, {found(numbers[i])}", numbers[i]
        )
        for i in range(1, len(numbers))
        if numbers[i] < numbers[i - 1]
    ]
    if problems:
        refuse(problems)
    return numbers


def boundaries_or_one_each(value: object) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
    """Cut points of the dimension, or a list of cut points for each section."""
    items = sequence(value, "whole numbers", "[0, 31, 61]")
    if any(isinstance(item, list | tuple) for item in items):
        return each(items, boundaries)
    return boundaries(value)


def positions(value: object) -> tuple[int, ...] | str:
    """Numbers along an axis, negative ones from its end, or `all`."""
    if value == "all":
        return "all"
    numbers = each(sequence(value, "numbers along the axis", "[0], [-1] or all"), integer(-MAX_INTEGER))
    repeated = [
        Problem((position,), f"{number} is named twice; remove one", number)
        for position, number in enumerate(numbers)
        if number in numbers[:position]
    ]
    if repeated:
        refuse(repeated)
    return numbers
