"""Files with known bytes, and storages over them."""

from __future__ import annotations

import random
from pathlib import Path

from loader_service.reading.fake import FakeStorage
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage

# How long a test waits for another thread before it calls that a failure; never how long it is meant to take.
PATIENCE_S = 30.0


def make_file(folder: Path, nbytes: int, name: str = "a.safetensors") -> tuple[str, bytes]:
    """The absolute path of a new file and the bytes in it, the same for the same name and size."""
    content = random.Random(f"{name} {nbytes}").randbytes(nbytes)
    path = folder / name
    path.write_bytes(content)
    return str(path), content


def fake_and_handles(limit: int = 8) -> tuple[FakeStorage, HandleCache]:
    storage = FakeStorage(LocalStorage())
    return storage, HandleCache(storage, limit)
