"""Resident services and workers beside them, in one process: each worker's storage tells what it still reads."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

import loader_service as ls
from loader_service.config.schema import ServiceConfig
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from tests.e2e.seats import Seat
from tests.support.checkpoints import Checkpoint

QUICK = {"timeout_s": 10, "start_timeout_s": 30, "grace_s": 5}
_numbers = itertools.count()


def config_of(
    checkpoint: Checkpoint,
    load: Mapping[str, object] | None = None,
    *,
    serve: Mapping[str, object],
    draft: Mapping[str, object] | None = None,
    **sections: Any,
) -> ServiceConfig:
    """A configuration with small chunks and slots, and a socket of its own."""
    socket = f"@loader-service-test-{os.getpid()}-{next(_numbers)}"
    loads = {"target": dict(load or {})} | ({"draft": dict(draft)} if draft is not None else {})
    given = {
        "checkpoint": {"path": str(checkpoint.folder)},
        "loads": loads,
        "reads": {"chunk_bytes": "64KiB"},
        "staging": {"capacity_bytes": "512KiB"},
        "agreement": QUICK,
        "serve": {"socket": socket, "warm": [], **serve},
    }
    return ls.config_from_dict({**given, **sections})


def storage() -> FakeStorage:
    return FakeStorage(LocalStorage())


def worker(seat: Seat, config: ServiceConfig, coords: Mapping[str, int] | None = None) -> ls.LoaderService:
    return ls.LoaderService(config, seat.group, coords, storage=seat.storage, attach=True)
