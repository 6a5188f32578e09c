"""Scenes on a real device that need a process of their own; each prints one JSON document as its last line.

Arguments: the scene's name, the checkpoint's folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

import loader_service as ls

Report = dict[str, object]


def config(folder: str, pin: str) -> ls.ServiceConfig:
    return ls.config_from_dict(
        {
            "checkpoint": {"path": folder},
            "loads": {"target": {}},
            "reads": {"chunk_bytes": "256KiB"},
            "staging": {"capacity_bytes": "1MiB", "pin": pin},
            "agreement": {"grace_s": 10},
        }
    )


def not_initialised(folder: str) -> Report:
    """CUDA is there, but nobody has chosen a device: the loader must not choose device 0 for this process."""
    with ls.LoaderService.blocking(config(folder, "auto"), "solo") as service, service.open("target") as load:
        for batch in load.batches():
            batch.release()
    outcome = load.report.policies["pin"]
    required = ""
    try:
        with ls.LoaderService.blocking(config(folder, "required"), "solo") as service, service.open("target"):
            pass
    except ls.MemoryLimitError as error:
        required = str(error)
    initialised = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "effective": outcome.effective,
        "reason": outcome.reason,
        "required": required,
        "initialised": initialised,
    }


def spoil_the_device() -> None:
    """An index out of bounds fails an assertion on the device, some time later; nothing works on it from then on."""
    torch.zeros(3, device="cuda")[torch.tensor([99], device="cuda")]


def device_fails(folder: str, *, noticed: bool) -> Report:
    """The device fails while a batch is held. Noticed: in its body, so that not even an event can be recorded then."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.zeros(1, device="cuda")
    error = ""
    service = ls.LoaderService.blocking(config(folder, "required"), "solo")
    with service:
        pool = None
        try:
            with service.open("target") as load:
                pool = service._opened()[1]._pool
                for batch in load.batches():
                    with batch:
                        spoil_the_device()
                        if noticed:
                            torch.cuda.synchronize()
                torch.cuda.synchronize()
        except RuntimeError as caught:
            error = type(caught).__name__
    assert pool is not None
    statistics = pool.statistics()
    return {"error": error, "leases_out": statistics.leases_out, "leases_held": statistics.leases_held}


def device_fails_noticed(folder: str) -> Report:
    return device_fails(folder, noticed=True)


def device_fails_unnoticed(folder: str) -> Report:
    return device_fails(folder, noticed=False)


KEPT: list[object] = []


def ends_holding(folder: str) -> Report:
    """Views of locked memory are still referred to when the interpreter ends."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    with ls.LoaderService.blocking(config(folder, "required"), "solo") as service, service.open("target") as load:
        for batch in load.batches():
            with batch:
                KEPT.extend(piece.tensor for piece in batch if piece.name == "big.weight")
    pinned = any(isinstance(tensor, torch.Tensor) and tensor.is_pinned() for tensor in KEPT)
    return {"pinned": pinned}


SCENES: dict[str, Callable[[str], Report]] = {
    scene.__name__: scene for scene in (not_initialised, device_fails_noticed, device_fails_unnoticed, ends_holding)
}

if __name__ == "__main__":
    print(json.dumps(SCENES[sys.argv[1]](sys.argv[2])))
