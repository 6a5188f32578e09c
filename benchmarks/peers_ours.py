"""The loader's own sides of the peers' benchmark, and the limits: they need the development environment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import torch

from benchmarks import limits
from benchmarks.peers_works import PARTS, PREFIX, Loaded, Request
from loader_service import LoaderService, config_from_dict


def owned(request: Request) -> Callable[[], Awaitable[Loaded]]:
    """Tensors of an asynchronous load, all kept; a slice as the first of `PARTS` ranks, a draft by its prefix."""
    document: dict[str, object] = {
        "checkpoint": {"path": request.folder},
        "loads": {"all": {}},
        "staging": {"capacity_bytes": request.capacity_bytes},
    }
    coords = None
    if request.dim is not None:
        split = {"axis": "tp", "dim": request.dim, "pad_to": PARTS}
        document |= {"mesh": {"tp": PARTS}, "loads": {"all": {"rules": [{"match": "*", "split": split}]}}}
        coords = {"tp": 0}
    if request.take == "draft":
        document["loads"] = {"all": {"key_prefixes": [PREFIX]}}
    config = config_from_dict(document)

    async def load() -> Loaded:
        kept: Loaded = {}
        async with LoaderService(config, "solo", coords=coords) as service, service.open("all") as opened:
            async for name, tensor in opened:
                assert isinstance(tensor, torch.Tensor)
                kept[name] = tensor
        return kept

    return load


def ring_direct(request: Request) -> Callable[[], int]:
    """The limit past the page cache: every byte of the files."""
    return lambda: limits.read_direct([Path(path) for path in request.files])


def ring_buffered(request: Request) -> Callable[[], int]:
    """The limit through the page cache."""
    return lambda: limits.read_buffered([Path(path) for path in request.files])
