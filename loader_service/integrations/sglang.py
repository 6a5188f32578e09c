"""SGLang: `--load-format loader_service`, which SGLang finds by itself, once both are installed, by its entry point.

What is to be loaded comes from `--model-loader-extra-config '{"config": "loader.yaml", "load": "target"}'`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Iterator
from typing import Any

from loader_service.agreement.group import GroupChoice
from loader_service.errors import ConfigError
from loader_service.integrations.engines import EngineLoad, groups_of, places_of
from loader_service.stream import Weight

LOAD_FORMAT = "loader_service"

_CHECKING = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
_GETTERS = {"pp": "get_pp_group", "tp": "get_tp_group", "ep": "get_moe_ep_group", "moe_tp": "get_moe_tp_group"}


@functools.cache
def register() -> None:
    """Makes the load format known. The entry point of `sglang.srt.plugins`, which SGLang calls in each process.

    SGLang takes a class for a load format, but not from its command line: a hook puts the class there instead of the
    name. Raises ConfigError where there is no SGLang, or one without plug-ins.
    """
    try:
        choices = importlib.import_module("sglang.srt.arg_groups.choices")
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
        choices.add_load_format_choices([LOAD_FORMAT])
        hooks.HookRegistry.register(_CHECKING, _put_class, hooks.HookType.BEFORE)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"SGLang's plug-ins cannot be imported ({error}): install a version that has sglang.srt.plugins"
        ) from error


@functools.cache
def loader_class() -> type:
    """The class of the model loader, which SGLang's `LoadConfig` takes as `load_format`. ConfigError without SGLang."""
    try:
        default = importlib.import_module("sglang.srt.model_loader.loader").DefaultModelLoader
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"SGLang's model loaders cannot be imported ({error}): install sglang") from error
    return type("LoaderServiceModelLoader", (_Loading, default), {"__doc__": _Loading.__doc__, "__module__": __name__})


def _put_class(load_config: Any) -> None:  # noqa: ANN401 - SGLang's LoadConfig
    if load_config.load_format == LOAD_FORMAT:
        load_config.load_format = loader_class()


class _Loading:
    """A model loader of SGLang that takes weights from a load. All else is SGLang's own default loader, which this
    class comes before.

    The ranks that act together are those of SGLang's load group where it names one (a draft under pipeline parallelism,
    weights that are updated later), else of torch.distributed's default group.
    """

    load_config: Any

    def __init__(self, load_config: Any) -> None:  # noqa: ANN401
        plain = copy.copy(load_config)
        plain.model_loader_extra_config = {}  # SGLang's default loader refuses keys that are not its own
        super().__init__(plain)  # type: ignore[call-arg]
        self.load_config = load_config
        self._weights: Iterator[tuple[str, Weight]] | None = None
        self._given = False

    def download_model(self, model_config: Any) -> None:  # noqa: ANN401
        """Nothing: a checkpoint is a local folder."""

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:  # noqa: ANN401
        """Opens the load, collective, and has SGLang make the model and take it; an error fails it on all ranks."""
        self._given = False
        draft = getattr(model_config, "is_draft_model", False)
        with self._opened(model_config.model_path, draft=draft) as self._weights:
            try:
                model = super().load_model(model_config=model_config, device_config=device_config)  # type: ignore[misc]
            finally:
                self._weights = None
            if not self._given:
                raise ConfigError(
                    f"SGLang has loaded {type(model).__name__} in a way of its own, not from the load: use another "
                    "load format for it"
                )
        return model

    def _get_weights_iterator(self, source: Any, **_: Any) -> Iterator[tuple[str, Weight]]:  # noqa: ANN401
        """SGLang's default loader asks here, once for each checkpoint of a model; for an update, outside load_model."""
        if self._weights is None:
            draft = getattr(getattr(source, "model_config", None), "is_draft_model", False)
            return self._opened_anew(source.model_or_path, draft=draft)
        if self._given:
            raise ConfigError(
                f"SGLang: the model takes weights from a further checkpoint, {source.model_or_path}, which no load "
                "has: use another load format"
            )
        self._given = True
        return self._weights

    def _opened_anew(self, folder: str, *, draft: bool) -> Iterator[tuple[str, Weight]]:
        with self._opened(folder, draft=draft) as weights:
            yield from weights

    def _opened(self, folder: str, *, draft: bool) -> contextlib.AbstractContextManager[Iterator[tuple[str, Weight]]]:
        state = importlib.import_module("sglang.srt.distributed.parallel_state")
        load = EngineLoad.of("SGLang", self.load_config.model_loader_extra_config, folder, draft=draft)
        return load.weights(self._group(), places_of(groups_of(state, _GETTERS)))

    def _group(self) -> GroupChoice:
        """SGLang's load group: a marker for the default one, None for nobody else, or a group of its own."""
        group = getattr(self.load_config, "load_group", NotImplemented)
        if group is None:
            return "solo"
        return getattr(group, "cpu_group", None)
