"""loader_service: streams checkpoints into filled host buffers on every rank, planned up front, agreed by all.

import loader_service as ls

config = ls.load_config("configs/demo.yaml")
async with ls.LoaderService(config) as service:
    async with service.open("target") as load:
        async for name, tensor in load:
            ...
"""

from loader_service.agreement.group import Rendezvous
from loader_service.config.schema import ServiceConfig
from loader_service.config.yaml_file import config_from_dict, load_config
from loader_service.errors import (
    AgreementError,
    CheckpointError,
    ConfigError,
    DestinationError,
    EndOfFileError,
    FailureRecord,
    LoadCancelledError,
    LoaderError,
    MemoryLimitError,
    RankFailure,
    ReadError,
    StateError,
)
from loader_service.memory.events import DeviceEvent
from loader_service.planning.plan import LoadPlan, RankPlan
from loader_service.report import LoadReport, PolicyOutcome
from loader_service.service import BlockingLoaderService, LoaderService, iter_weights
from loader_service.stream import Batch, BlockingLoad, Load, Piece, TensorSpec

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "Batch",
    "BlockingLoad",
    "BlockingLoaderService",
    "CheckpointError",
    "ConfigError",
    "DestinationError",
    "DeviceEvent",
    "EndOfFileError",
    "FailureRecord",
    "Load",
    "LoadCancelledError",
    "LoadPlan",
    "LoadReport",
    "LoaderError",
    "LoaderService",
    "MemoryLimitError",
    "Piece",
    "PolicyOutcome",
    "RankFailure",
    "RankPlan",
    "ReadError",
    "Rendezvous",
    "ServiceConfig",
    "StateError",
    "TensorSpec",
    "__version__",
    "config_from_dict",
    "iter_weights",
    "load_config",
]
