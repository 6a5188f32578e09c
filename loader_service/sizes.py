"""Numbers of bytes: the one grammar in which people write them (YAML, command line), and how people read them."""

from __future__ import annotations

import re
from typing import Final

from loader_service.errors import ConfigError

UNITS: Final[dict[str, int]] = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
MAX_BYTES: Final = (1 << 63) - 1
"""Offsets and sizes of files are signed 64-bit numbers; no size can be larger."""

GRAMMAR: Final = (
    "write a whole number of bytes (16777216), or a number directly followed by B, KiB, MiB, GiB, TiB, KB, MB, GB "
    "or TB (16MiB, 1.5GiB, 64MB = 64000000 bytes)"
)
PATTERN: Final = r"^(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)$"
_SIZE: Final = re.compile(PATTERN.removeprefix("^").removesuffix("$"))


def parse_size(value: object) -> int:
    """Bytes of a size: an `int`, or text such as "16MiB" (case-sensitive units, no space, no sign, no exponent).

    A decimal is accepted where whole bytes result ("1.5KiB" is 1536; "0.1KiB" is refused). Digits alone in quotes are
    refused, as is a leading zero. Raises `ConfigError` with the grammar in its message.
    """
    if type(value) is int:
        if not 0 <= value <= MAX_BYTES:
            raise ConfigError(f"{value} is not a size from 0 to {MAX_BYTES} bytes; {GRAMMAR}")
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"{value!r} is not a size; {GRAMMAR}")
    whole, unit = str(match[1]), str(match[3])
    decimals = str(match[2] or "")[1:]
    # Exact integer arithmetic: a float would round 0.3TB to something that is not whole, or hide that it is not.
    scale: int = 10 ** len(decimals)
    size_bytes, rest = divmod(int(whole + decimals) * UNITS[unit], scale)
    if rest:
        raise ConfigError(f"{value!r} is not a whole number of bytes; {GRAMMAR}")
    if size_bytes > MAX_BYTES:
        raise ConfigError(f"{value!r} is more than {MAX_BYTES} bytes; {GRAMMAR}")
    return size_bytes


def size_option(option: str, text: str) -> int:
    """Bytes of an option of the command line, where a whole number has no quotes to be without. The error names it."""
    try:
        return parse_size(int(text) if re.fullmatch(r"0|[1-9][0-9]{0,18}", text) else text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def format_size(size_bytes: int) -> str:
    """Bytes for people: "1.46 GiB", "16.00 MiB", below 1 MiB "4096 bytes". JSON, exact ranges and comparisons have the
    number itself instead."""
    for unit in ("GiB", "MiB"):
        if abs(size_bytes) >= UNITS[unit]:
            return f"{size_bytes / UNITS[unit]:.2f} {unit}"
    return f"{size_bytes} byte" if abs(size_bytes) == 1 else f"{size_bytes} bytes"


def format_rate(bytes_per_s: float) -> str:
    """Speeds for people, all in one unit: "0.45 GiB/s"."""
    return f"{bytes_per_s / UNITS['GiB']:.2f} GiB/s"
