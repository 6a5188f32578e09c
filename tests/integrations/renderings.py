"""Engines as the adapters see them: the modules, names and call sequences of their loading, without all else.

Written after vLLM 0.33, SGLang 0.5.23 and TensorRT-LLM's main branch of late 2026. What was run of the engines
themselves stands in docs/integrations.md; tests of these renderings run where the engines do not.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

Groups = Mapping[str, tuple[int, int]]


def install(monkeypatch: pytest.MonkeyPatch, modules: Mapping[str, Mapping[str, object]]) -> None:
    """Puts modules with these contents where `import` finds them, and packages above them."""
    for name, contents in modules.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            path = ".".join(parts[:i])
            if path not in sys.modules:
                made = ModuleType(path)
                made.__path__ = []
                monkeypatch.setitem(sys.modules, path, made)
                if i > 1:
                    monkeypatch.setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], made, raising=False)
        for key, value in contents.items():
            setattr(sys.modules[name], key, value)


def _getters(names: Mapping[str, str], groups: Groups) -> dict[str, Callable[[], Any]]:
    """Functions that give a group of this rank, or raise where there is none."""

    def getter(axis: str) -> Callable[[], Any]:
        def get() -> Any:
            assert axis in groups, f"{axis} is not initialised"
            rank, size = groups[axis]
            return SimpleNamespace(rank_in_group=rank, world_size=size, cpu_group=f"group of {axis}")

        return get

    return {name: getter(axis) for axis, name in names.items()}


class TakingModel(nn.Module):
    """A model as engines have them: it takes all weights at once and says which parameters it has filled."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.places = {name: f"p{i}" for i, name in enumerate(shapes)}
        for name, shape in shapes.items():
            self.register_parameter(self.places[name], nn.Parameter(torch.zeros(shape), requires_grad=False))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            self.get_parameter(self.places[name]).copy_(tensor)
            loaded.add(self.places[name])
        return loaded

    def state(self) -> dict[str, torch.Tensor]:
        return {name: self.get_parameter(place) for name, place in self.places.items()}


# vLLM


@dataclass
class LoadConfig:
    """vLLM's and SGLang's alike, as far as it matters here."""

    load_format: Any = "auto"
    model_loader_extra_config: Any = field(default_factory=dict)


def vllm(monkeypatch: pytest.MonkeyPatch, groups: Groups) -> ModuleType:
    """vLLM's loading; returns `vllm.model_executor.model_loader`."""
    registry: dict[str, type] = {}

    class DefaultModelLoader:
        def __init__(self, load_config: Any) -> None:
            self.load_config = load_config
            if unknown := load_config.model_loader_extra_config.keys() - {"num_threads"}:
                raise ValueError(f"unexpected extra configuration: {unknown}")

        def download_model(self, model_config: Any) -> None:
            raise AssertionError("looks for the model's files")

        def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
            raise AssertionError("reads the model's files")

        def load_weights(self, model: Any, model_config: Any) -> None:
            loaded = model.load_weights(self.get_all_weights(model_config, model))
            wanted = {name for name, _ in model.named_parameters()}
            if model_config.quantization is None and loaded is not None and (left := wanted - loaded):
                raise ValueError(f"these weights were not initialized: {left}")

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
            model: nn.Module = model_config.make()
            self.download_model(model_config)
            self.load_weights(model, model_config)
            return model.eval()

    def register_model_loader(load_format: str) -> Callable[[type], type]:
        def registered(made: type) -> type:
            assert issubclass(made, DefaultModelLoader)
            assert load_format not in registry, "registered twice"
            registry[load_format] = made
            return made

        return registered

    def get_model_loader(load_config: LoadConfig) -> Any:
        return registry[load_config.load_format](load_config)

    loading = {
        "DefaultModelLoader": DefaultModelLoader,
        "register_model_loader": register_model_loader,
        "get_model_loader": get_model_loader,
    }
    state = _getters({axis: f"get_{axis}_group" for axis in ("dp", "pp", "tp", "ep")}, groups)
    install(monkeypatch, {"vllm.model_executor.model_loader": loading, "vllm.distributed.parallel_state": state})
    return sys.modules["vllm.model_executor.model_loader"]


# SGLang


class SGLangLoadConfig(LoadConfig):
    """Takes names that it knows, and classes."""

    def __init__(self, load_format: Any = "auto", model_loader_extra_config: Any = None, **more: Any) -> None:
        super().__init__(load_format, model_loader_extra_config or {})
        vars(self).update(more)
        self._verify_load_format()

    def _verify_load_format(self) -> None:
        if isinstance(self.load_format, str) and self.load_format not in ("auto", "dummy"):
            raise ValueError(f"'{self.load_format}' is not a valid LoadFormat")


class SGLangModelLoader:
    """`DefaultModelLoader`."""

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config
        assert load_config.model_loader_extra_config.keys() <= {"num_threads"}

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        model: Any = model_config.make()
        if not model_config.own_way:
            model.load_weights(self._get_all_weights(model_config, model))
        return model.eval()  # type: ignore[no-any-return]

    def _get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        primary = SimpleNamespace(model_or_path=model_config.model_path, model_config=model_config)
        for source in (primary, *getattr(model, "secondary_weights", ())):
            yield from self._get_weights_iterator(source)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("reads the model's files")


class SGLangHooks:
    """`HookRegistry`, of which each test has its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._hooks: list[tuple[str, Callable[..., None], str]] = []

    def register(self, target: str, hook: Callable[..., None], hook_type: str) -> None:
        self._hooks.append((target, hook, hook_type))

    def load_plugins(self, plugin: Callable[[], None]) -> None:
        plugin()
        for target, hook, hook_type in self._hooks:
            assert target == "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
            assert hook_type == "before"
            self._put_before(hook, SGLangLoadConfig._verify_load_format)

    def _put_before(self, hook: Callable[..., None], original: Callable[[Any], None]) -> None:
        def wrapped(config: SGLangLoadConfig) -> None:
            assert hook(config) is None  # type: ignore[func-returns-value]  # anything else would be other arguments
            original(config)

        self._monkeypatch.setattr(SGLangLoadConfig, "_verify_load_format", wrapped)


def sglang(monkeypatch: pytest.MonkeyPatch, groups: Groups) -> SimpleNamespace:
    """SGLang's loading: `load_plugins(register)`, `choices` and `get_model_loader`."""
    choices = ["auto"]
    hooks = SGLangHooks(monkeypatch)

    def get_model_loader(load_config: LoadConfig) -> Any:
        made = load_config.load_format
        return made(load_config) if isinstance(made, type) else SGLangModelLoader(load_config)

    before = SimpleNamespace(BEFORE="before")
    getters = _getters({"pp": "get_pp_group", "tp": "get_tp_group", "ep": "get_moe_ep_group"}, groups)
    modules: dict[str, Mapping[str, object]] = {
        "sglang.srt.arg_groups.choices": {"add_load_format_choices": choices.extend},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": hooks, "HookType": before},
        "sglang.srt.model_loader.loader": {"DefaultModelLoader": SGLangModelLoader},
        "sglang.srt.distributed.parallel_state": getters,
    }
    install(monkeypatch, modules)
    return SimpleNamespace(load_plugins=hooks.load_plugins, choices=choices, get_model_loader=get_model_loader)


# TensorRT-LLM


class RankMapping:
    """TensorRT-LLM's `Mapping`: this rank among all, and its place along the axes."""

    def __init__(self, rank: int, world_size: int, tp_size: int = 1, pp_size: int = 1) -> None:
        assert world_size == tp_size * pp_size
        self.rank, self.world_size = rank, world_size
        self.tp_size, self.pp_size = tp_size, pp_size
        self.pp_rank, self.tp_rank = divmod(rank, tp_size)


class ConsumableWeightsDict:
    """TensorRT-LLM's own: a dictionary of weights behind a lock, of which modules are deleted once they are loaded."""

    def __init__(self, weights: Any) -> None:
        self._weights = weights
        self._lock = threading.Lock()

    def __getitem__(self, key: str) -> Any:
        return self._weights[key]

    def keys(self) -> list[str]:
        with self._lock:
            return list(self._weights.keys())

    def items(self) -> list[tuple[str, Any]]:
        with self._lock:
            return list(self._weights.items())

    def filter_prefix(self, prefix: str) -> dict[str, Any]:
        with self._lock:
            names = [name for name in sorted(self._weights) if name.startswith(prefix)]
            return {name[len(prefix) + 1 :]: self._weights[name] for name in names if name in self._weights}

    def mark_consumed(self, prefix: str) -> int:
        with self._lock:
            names = [name for name in self._weights if name.startswith(prefix + ".")]
            for name in names:
                del self._weights[name]
            return len(names)


def tensorrt_llm(monkeypatch: pytest.MonkeyPatch, comm: Any = None, *, consumable: bool = True) -> None:
    """TensorRT-LLM's checkpoint loaders. `comm`: its MPI ranks."""

    class BaseWeightLoader:
        def load_weights(self, checkpoint_dir: str, mapping: Any, **options: Any) -> Any:
            raise NotImplementedError

        def cleanup(self) -> None:
            pass

    class HfCheckpointLoader:
        def __init__(self, *, weight_loader: Any = None, weight_mapper: Any = None, config_loader: Any = None) -> None:
            assert isinstance(weight_loader, BaseWeightLoader)
            self.weight_loader = weight_loader
            self.checkpoint_format = "HF"

        def load_weights(self, checkpoint_dir: str, mapping: Any, **options: Any) -> Any:
            return self.weight_loader.load_weights(checkpoint_dir, mapping=mapping, **options)

        def cleanup(self) -> None:
            self.weight_loader.cleanup()

    base: dict[str, object] = {"BaseWeightLoader": BaseWeightLoader}
    if consumable:
        base["ConsumableWeightsDict"] = ConsumableWeightsDict
    checkpoints = "tensorrt_llm._torch.models.checkpoints"
    install(
        monkeypatch,
        {
            f"{checkpoints}.base_weight_loader": base,
            f"{checkpoints}.hf.checkpoint_loader": {"HfCheckpointLoader": HfCheckpointLoader},
            "tensorrt_llm._utils": {"mpi_comm": lambda: comm},
        },
    )


def load_modules(model: nn.Module, weights: Any, workers: int = 4) -> None:
    """How TensorRT-LLM's models load: each module with parameters filters its weights out by its name, copies them, and
    says that they are consumed, on several threads at once."""

    def load(name: str, module: nn.Module) -> None:
        if not module._parameters:
            return
        found = weights.filter_prefix(name) if hasattr(weights, "filter_prefix") else None
        if found is None:
            found = {k[len(name) + 1 :]: v for k, v in weights.items() if k.startswith(name)}
        for leaf, parameter in module.named_parameters(recurse=False):
            parameter.data.copy_(found[leaf][:])
        weights.mark_consumed(name)

    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(load, name, module) for name, module in model.named_modules()]:
            done.result(60)
