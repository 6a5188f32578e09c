"""TensorRT-LLM, PyTorch backend: `LLM(model=folder, checkpoint_loader=checkpoint_loader("loader.yaml"))`.

Its models ask for weights by name, from several threads, module by module, and say what they have consumed.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import socket
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

from loader_service.agreement.group import GroupChoice, Rendezvous
from loader_service.errors import ConfigError
from loader_service.integrations.engines import EngineLoad
from loader_service.integrations.weights import ConsumableWeights

_CHECKPOINTS = "tensorrt_llm._torch.models.checkpoints"


def checkpoint_loader(
    config: str | Mapping[str, object] | None = None,
    load: str = "target",
    *,
    draft_load: str | None = None,
    presharded: Sequence[str] = (),
    row_sources: bool = False,
    attach: bool = False,
) -> Any:  # noqa: ANN401 - TensorRT-LLM's HfCheckpointLoader
    """What TensorRT-LLM's `LLM` takes as `checkpoint_loader`: its own for Hugging Face checkpoints, which knows their
    configurations and names, with a weight loader of ours.

    `config`: a file, or a dictionary; without one the model's folder is loaded, whole. `draft_load` is for any other
    folder than the first, which is how TensorRT-LLM loads a draft. `presharded`: globs over names whose parameters hold
    this rank's part. `attach`: what the node's resident service keeps is not read. ConfigError without TensorRT-LLM.
    """
    hf = _engine(f"{_CHECKPOINTS}.hf.checkpoint_loader")
    options: dict[str, object] = {"load": load, "presharded": list(presharded)}
    options |= {"row_sources": row_sources, "attach": attach}
    options |= {"config": config} if config is not None else {}
    options |= {"draft_load": draft_load} if draft_load is not None else {}
    return hf.HfCheckpointLoader(weight_loader=weight_loader(options))


def weight_loader(options: Mapping[str, object]) -> Any:  # noqa: ANN401
    """A weight loader of TensorRT-LLM for the same options as `EngineLoad.of`. It may be sent to other processes."""
    return _weight_loader_class()(options)


@functools.cache
def _weight_loader_class() -> type:
    base = _engine(f"{_CHECKPOINTS}.base_weight_loader").BaseWeightLoader
    return type("LoaderServiceWeightLoader", (_Loading, base), {"__doc__": _Loading.__doc__, "__module__": __name__})


class _Loading:
    """A weight loader of TensorRT-LLM. Each `load_weights` opens a load, over all ranks; the one before is then left,
    as it is by `cleanup`, or when the engine drops its weights."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = dict(options)
        self._first: str | None = None
        self._last: weakref.ref[ConsumableWeights] | None = None
        self._store: Any = None
        self._meetings = itertools.count()

    def __reduce__(self) -> tuple[Any, tuple[dict[str, object]]]:
        return weight_loader, (self._options,)

    def load_weights(self, checkpoint_dir: str, mapping: Any, **_: Any) -> Any:  # noqa: ANN401
        """The weights by name: a `ConsumableWeightsDict` where TensorRT-LLM has it, over a `ConsumableWeights`.

        `mapping` is TensorRT-LLM's, of ranks. Collective over all of its ranks. ConfigError, on all ranks, for rules
        that cut what is streamed.
        """
        self.cleanup()
        folder = str(checkpoint_dir)
        draft = self._first is not None and folder != self._first
        self._first = self._first or folder
        load = EngineLoad.of("TensorRT-LLM", self._options, folder, draft=draft)
        coords = load.coords(_places(mapping))
        group = self._group(mapping)
        weights = ConsumableWeights(load.config, load.load, group, coords, check=load.check, attach=load.attach)
        self._last = weakref.ref(weights)
        made = getattr(_engine(f"{_CHECKPOINTS}.base_weight_loader"), "ConsumableWeightsDict", None)
        return weights if made is None else made(weights)

    def cleanup(self) -> None:
        """Leaves the load, if the engine still has its weights."""
        weights = self._last() if self._last is not None else None
        self._last = None
        if weights is not None:
            weights.close()

    def _group(self, mapping: Any) -> GroupChoice:  # noqa: ANN401
        """torch.distributed's default group where the engine has one; else its MPI ranks, which meet in a store that
        rank 0 serves, since the loader does not speak MPI."""
        import torch.distributed as dist

        if mapping.world_size == 1:
            return "solo"
        if dist.is_initialized():
            return None
        comm = _engine("tensorrt_llm._utils").mpi_comm()
        if comm.Get_size() != mapping.world_size:
            raise ConfigError(
                f"TensorRT-LLM: MPI has {comm.Get_size()} ranks, but its mapping {mapping.world_size}: start as many"
            )
        rank = comm.Get_rank()
        if self._store is None:
            wait, serves = timedelta(seconds=60), rank == 0
            host, port = socket.gethostname(), 0
            if serves:
                self._store = dist.TCPStore(host, port, None, True, wait, wait_for_workers=False)  # type: ignore[attr-defined]
                port = self._store.port
            host, port = comm.bcast((host, port), root=0)
            self._store = self._store or dist.TCPStore(host, port, None, False, wait)  # type: ignore[attr-defined]
        return Rendezvous(self._store, rank, mapping.world_size, f"weights.{next(self._meetings)}")


def _places(mapping: Any) -> dict[str, tuple[int, int]]:  # noqa: ANN401
    """TensorRT-LLM's axes of this rank: (rank, size)."""
    axes = {"pp": "pp", "tp": "tp", "cp": "cp", "ep": "moe_ep", "moe_tp": "moe_tp"}
    return {
        axis: (int(getattr(mapping, f"{name}_rank")), int(getattr(mapping, f"{name}_size")))
        for axis, name in axes.items()
        if hasattr(mapping, f"{name}_size")
    }


def _engine(module: str) -> Any:  # noqa: ANN401
    try:
        return cast("Any", importlib.import_module(module))
    except ImportError as error:
        raise ConfigError(
            f"TensorRT-LLM's {module} cannot be imported ({error}): install tensorrt_llm, with its PyTorch backend"
        ) from error
