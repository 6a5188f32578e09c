"""The limits that a loader is measured against: those that `loader-service bench` measures too."""

from __future__ import annotations

from loader_service.measuring.limits import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    DIRECT_THREADS,
    can_read_direct,
    read_buffered,
    read_direct,
    read_part,
)

__all__ = [
    "BLOCK_BYTES",
    "CHUNK_BYTES",
    "DIRECT_THREADS",
    "can_read_direct",
    "read_buffered",
    "read_direct",
    "read_part",
]
