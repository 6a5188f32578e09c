"""Hugging Face transformers: `load_pretrained(service, "target")`, which is `from_pretrained` with our reading.

transformers makes the model, converts what its checkpoints name or lay out otherwise (fused experts among it), ties
weights and fills buffers that no checkpoint holds. It does so by its public interface, from the tensors of a load.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, overload

import torch

from loader_service.config.schema import ServiceConfig
from loader_service.errors import ConfigError, DestinationError
from loader_service.integrations.fit import is_small_float
from loader_service.integrations.splits import refuse_splits
from loader_service.report import LoadReport
from loader_service.service import BlockingLoaderService, LoaderService
from loader_service.stream import BlockingLoad, Load

Dtype: TypeAlias = torch.dtype | str

SHOWN_NAMES = 10

_NO_QUANTIZERS = "This adapter knows no quantizers: use from_pretrained, or iterate over the load"

# Of from_pretrained's arguments those that say where weights come from, or that cut them: both are the load's.
_OURS = frozenset(
    {
        *("config", "gguf_file", "revision", "state_dict", "subfolder", "use_safetensors", "variant"),
        *("adapter_kwargs", "adapter_name", "quantization_config"),
        *("device_mesh", "distributed_config", "tp_plan", "tp_size"),
        *("ignore_mismatched_sizes", "output_loading_info"),
    }
)


@dataclass(frozen=True)
class PretrainedModel:
    """`model` as `from_pretrained` would have made it, in eval mode. `unexpected_keys` are the checkpoint's names (as
    transformers renames them) that the model has no place for: the head of a model that was made without, say. `report`
    is the load's."""

    model: Any
    unexpected_keys: tuple[str, ...]
    report: LoadReport


@overload
def load_pretrained(
    service: LoaderService,
    load_name: str,
    model_class: type | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    dtype: Dtype = "auto",
    **options: Any,  # noqa: ANN401 - transformers' own
) -> Awaitable[PretrainedModel]: ...
@overload
def load_pretrained(
    service: BlockingLoaderService,
    load_name: str,
    model_class: type | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    dtype: Dtype = "auto",
    **options: Any,  # noqa: ANN401
) -> PretrainedModel: ...
def load_pretrained(
    service: LoaderService | BlockingLoaderService,
    load_name: str,
    model_class: type | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    dtype: Dtype = "auto",
    **options: Any,
) -> PretrainedModel | Awaitable[PretrainedModel]:
    """Opens a load and makes a transformers model of it; collective. To be awaited with the async service (transformers
    then works on a thread of asyncio's), a plain call with the blocking one.

    `model_class`: a model's class or an Auto class; by default what `config.json` names. `folder`: where `config.json`
    lies, by default beside the checkpoint. `dtype` and `options` (`attn_implementation`, `key_mapping`,
    `trust_remote_code`) mean what they do for `from_pretrained`; those that say where weights come from are a
    ConfigError, as are `split` and `host_resident` rules and quantized checkpoints. DestinationError if a weight of the
    model is missing or has another shape: nothing is left at random values.
    """
    if refused := sorted(_OURS & options.keys()):
        raise ConfigError(f"load_pretrained() does not take {', '.join(refused)}: the load says what is read")
    making = _Making(service.config, load_name, model_class, folder, dtype, options)
    if isinstance(service, BlockingLoaderService):
        return _load(service, load_name, making)
    return _aload(service, load_name, making)


def _load(service: BlockingLoaderService, load_name: str, making: _Making) -> PretrainedModel:
    with service.open(load_name) as load:
        making.check(load, service.rank)
        making.prepare()
        state = {name: making.own(tensor) for name, tensor in load}
        model, unexpected = making.make(state)
    return PretrainedModel(model, unexpected, load.report)


async def _aload(service: LoaderService, load_name: str, making: _Making) -> PretrainedModel:
    async with service.open(load_name) as load:
        making.check(load, service.rank)
        await asyncio.to_thread(making.prepare)
        state = {name: making.own(tensor) async for name, tensor in load}
        model, unexpected = await asyncio.to_thread(making.make, state)
    return PretrainedModel(model, unexpected, load.report)


class _Making:
    """One model from one load: what transformers is asked for, before the tensors and with them."""

    def __init__(
        self,
        config: ServiceConfig,
        load_name: str,
        model_class: type | None,
        folder: str | os.PathLike[str] | None,
        dtype: Dtype,
        options: dict[str, Any],
    ) -> None:
        self._load_name = load_name
        self._class: Any = model_class
        self._folder = os.fspath(folder) if folder is not None else _folder_of(config, load_name)
        self._dtype = dtype
        self._options = options
        self._shared_memory = config.cache.on
        self._config: Any = None

    def check(self, load: Load | BlockingLoad, rank: int) -> None:
        """Raises ConfigError for rules that a whole model has no place for, before anything is read."""
        refuse_splits(load, rank, "transformers")
        if table := next(iter(load.tables), None):
            raise ConfigError(
                f"load '{load.name}': '{table}' stays in host memory by a rule, which no model of transformers can: "
                "take `host_resident` out of the rule",
                tensor=table,
                rank=rank,
            )
        plan = load.plan.for_rank(rank)
        for name in map(plan.name, range(len(plan))):
            if is_small_float(dtype := load.spec(name).dtype):
                raise ConfigError(
                    f"load '{load.name}': '{name}' is stored as {dtype}, which transformers would convert without its "
                    f"scales. {_NO_QUANTIZERS}",
                    tensor=name,
                    rank=rank,
                )

    def prepare(self) -> None:
        """Reads config.json and finds the model's class, which must be known before weights are read."""
        transformers = _transformers()
        if not Path(self._folder, "config.json").is_file():
            raise ConfigError(f"{self._folder} has no config.json: say folder=..., where it lies")
        trust = self._options.get("trust_remote_code")
        self._config = transformers.AutoConfig.from_pretrained(
            self._folder, local_files_only=True, trust_remote_code=trust
        )
        if getattr(self._config, "quantization_config", None) is not None:
            raise ConfigError(
                f"{self._folder}: the checkpoint is quantized ('quantization_config' in config.json). {_NO_QUANTIZERS}"
            )
        self._class = self._class or _named_class(transformers, self._config, self._folder)
        if not issubclass(self._class, transformers.PreTrainedModel):  # an Auto class: whatever it makes of the config
            with torch.device("meta"):
                self._class = type(self._class.from_config(self._config, trust_remote_code=trust))

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The model's own memory: what the raw weight cache holds is copied, since others see it too."""
        return tensor.clone() if self._shared_memory else tensor

    def make(self, state: dict[str, torch.Tensor]) -> tuple[torch.nn.Module, tuple[str, ...]]:
        """The model, and what it has no place for. Tensors that need no conversion become its own without a copy."""
        model, found = self._class.from_pretrained(
            None,
            config=self._config,
            state_dict=state,
            dtype=self._dtype,
            generation_config=self._generation_config(),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # which are an error here, with all names
            **{name: value for name, value in self._options.items() if name != "trust_remote_code"},
        )
        self._check_loaded(model, found)
        model.config.name_or_path = model.name_or_path = self._folder
        return model, tuple(sorted(found["unexpected_keys"]))

    def _generation_config(self) -> object:
        if not Path(self._folder, "generation_config.json").is_file():
            return None
        found: object = _transformers().GenerationConfig.from_pretrained(self._folder, local_files_only=True)
        return found

    def _check_loaded(self, model: torch.nn.Module, found: dict[str, Any]) -> None:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        wrong = {
            "missing": sorted(found["missing_keys"]),
            "of another shape": sorted(map(_mismatch, found["mismatched_keys"])),
            "without memory": [name for name, tensor in tensors if tensor.is_meta],
            "not converted": sorted(str(error) for error in found.get("error_msgs") or ()),
        }
        texts = [f"{what}: {_shown(names)}" for what, names in wrong.items() if names]
        if texts:
            raise DestinationError(
                f"load '{self._load_name}' does not fill {type(model).__name__} of {self._folder}: {'; '.join(texts)}. "
                "Does the load leave names out (skip, key_prefixes, assign), or is it another model's checkpoint?"
            )


def _mismatch(found: Any) -> str:  # noqa: ANN401
    """(name, stored shape, the model's shape) in words; transformers 4 gives the name alone."""
    if isinstance(found, str):
        return found
    name, stored, wanted = found
    return f"{name} ({tuple(stored)} instead of {tuple(wanted)})"


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def _transformers() -> Any:  # noqa: ANN401 - it has no types here
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(f"transformers cannot be imported ({error}): pip install transformers") from error


def _folder_of(config: ServiceConfig, load_name: str) -> str:
    """The folder of a load's checkpoint; of a list of files that of the first."""
    path = config.checkpoint_of(load_name).path
    first = path if isinstance(path, str) else path[0]
    return str(Path(first).parent) if first.endswith(".safetensors") else first


def _named_class(transformers: Any, config: Any, folder: str) -> Any:  # noqa: ANN401
    """The class that config.json names first."""
    names = getattr(config, "architectures", None) or ()
    for name in names[:1]:
        if (found := getattr(transformers, name, None)) is not None:
            return found
    named = f"names {names[0]}, which transformers does not have" if names else "names no architecture"
    raise ConfigError(f"{folder}: config.json {named}: say model_class=..., as AutoModelForCausalLM")
