"""loader_service: streams checkpoints into filled host buffers on every rank, planned up front, agreed by all.

    import loader_service as ls

    config = ls.load_config("configs/demo.yaml")
    async with ls.LoaderService(config) as service:
        async with service.open("target") as load:
            async for name, tensor in load:
                ...

Names are imported when they are first used: what needs no tensors does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING

from loader_service.version import VERSION

if TYPE_CHECKING:
    from loader_service.agreement.group import Rendezvous as Rendezvous
    from loader_service.batches import Batch as Batch
    from loader_service.batches import Piece as Piece
    from loader_service.config.schema import ServiceConfig as ServiceConfig
    from loader_service.config.yaml_file import aload_config as aload_config
    from loader_service.config.yaml_file import config_from_dict as config_from_dict
    from loader_service.config.yaml_file import load_config as load_config
    from loader_service.errors import AgreementError as AgreementError
    from loader_service.errors import AttachError as AttachError
    from loader_service.errors import CheckpointError as CheckpointError
    from loader_service.errors import ConfigError as ConfigError
    from loader_service.errors import DestinationError as DestinationError
    from loader_service.errors import EndOfFileError as EndOfFileError
    from loader_service.errors import FailureRecord as FailureRecord
    from loader_service.errors import LoadCancelledError as LoadCancelledError
    from loader_service.errors import LoaderError as LoaderError
    from loader_service.errors import MemoryLimitError as MemoryLimitError
    from loader_service.errors import RankFailure as RankFailure
    from loader_service.errors import ReadError as ReadError
    from loader_service.errors import StateError as StateError
    from loader_service.filling import TensorSpec as TensorSpec
    from loader_service.logs import JsonFormatter as JsonFormatter
    from loader_service.memory.events import DeviceEvent as DeviceEvent
    from loader_service.memory.process_cache import clear_weight_cache as clear_weight_cache
    from loader_service.planning.plan import LoadPlan as LoadPlan
    from loader_service.planning.plan import RankPlan as RankPlan
    from loader_service.report import LoadReport as LoadReport
    from loader_service.report import PolicyOutcome as PolicyOutcome
    from loader_service.resident import ResidentService as ResidentService
    from loader_service.rows import RowSource as RowSource
    from loader_service.service import BlockingLoaderService as BlockingLoaderService
    from loader_service.service import LoaderService as LoaderService
    from loader_service.service import attach as attach
    from loader_service.service import attach_blocking as attach_blocking
    from loader_service.service import host_resident_weights as host_resident_weights
    from loader_service.service import iter_weights as iter_weights
    from loader_service.stream import BlockingLoad as BlockingLoad
    from loader_service.stream import Load as Load
    from loader_service.tables import HostTable as HostTable

__version__ = VERSION

_HOMES = {
    "agreement.group": ("Rendezvous",),
    "batches": ("Batch", "Piece"),
    "config.schema": ("ServiceConfig",),
    "config.yaml_file": ("aload_config", "config_from_dict", "load_config"),
    "errors": (
        "AgreementError",
        "AttachError",
        "CheckpointError",
        "ConfigError",
        "DestinationError",
        "EndOfFileError",
        "FailureRecord",
        "LoadCancelledError",
        "LoaderError",
        "MemoryLimitError",
        "RankFailure",
        "ReadError",
        "StateError",
    ),
    "filling": ("TensorSpec",),
    "logs": ("JsonFormatter",),
    "memory.process_cache": ("clear_weight_cache",),
    "memory.events": ("DeviceEvent",),
    "planning.plan": ("LoadPlan", "RankPlan"),
    "report": ("LoadReport", "PolicyOutcome"),
    "resident": ("ResidentService",),
    "rows": ("RowSource",),
    "service": (
        "BlockingLoaderService",
        "LoaderService",
        "attach",
        "attach_blocking",
        "host_resident_weights",
        "iter_weights",
    ),
    "stream": ("BlockingLoad", "Load"),
    "tables": ("HostTable",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
