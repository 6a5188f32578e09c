"""Sizes as a configuration writes them."""

from __future__ import annotations

from loader_service.sizes import UNITS, parse_size


def written_size(size_bytes: int) -> str:
    """In the largest binary unit of which it is a whole number: "16MiB"."""
    unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if size_bytes and size_bytes % UNITS[unit] == 0), "B")
    text = f"{size_bytes // UNITS[unit]}{unit}"
    assert parse_size(text) == size_bytes
    return text
