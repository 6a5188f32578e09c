"""vLLM: `--load-format loader_service`, which vLLM finds by itself, once both are installed, by its entry point.

What is to be loaded comes from `--model-loader-extra-config '{"config": "loader.yaml", "load": "target"}'`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Iterator
from typing import Any

from loader_service import logs
from loader_service.agreement.group import GroupChoice
from loader_service.errors import ConfigError
from loader_service.integrations.engines import EngineLoad, groups_of, places_of
from loader_service.stream import Weight

LOAD_FORMAT = "loader_service"

log = logs.logger("loader_service.integrations")


def plug_in() -> None:
    """The entry point of `vllm.general_plugins`, which vLLM calls in each of its processes. Where this vLLM knows no
    plug-ins of model loaders, it goes on without ours."""
    try:
        register()
    except ConfigError as error:
        log.warning("load format '%s' is not there: %s", LOAD_FORMAT, error)


def register() -> None:
    """Makes the load format known to vLLM, once. Raises ConfigError where there is no vLLM, or one that is too old."""
    _register_once()


@functools.cache
def _register_once() -> type:
    try:
        loading = importlib.import_module("vllm.model_executor.model_loader")
        register_model_loader, default = loading.register_model_loader, loading.DefaultModelLoader
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"vLLM's model loaders cannot be imported ({error}): install a vLLM that has register_model_loader"
        ) from error
    made = type("LoaderServiceModelLoader", (_Loading, default), {"__doc__": _Loading.__doc__, "__module__": __name__})
    register_model_loader(LOAD_FORMAT)(made)
    return made


class _Loading:
    """A model loader of vLLM that takes weights from a load. All else, also what it says of weights that are missing,
    is vLLM's own default loader, which this class comes before.

    The ranks that act together are those of torch.distributed's default group, data parallel ones among them where vLLM
    has put them there. A draft under pipeline parallelism is loaded by the last stage alone: its tensor parallel group.
    """

    load_config: Any

    def __init__(self, load_config: Any) -> None:  # noqa: ANN401 - vLLM's LoadConfig
        plain = copy.copy(load_config)
        plain.model_loader_extra_config = {}  # vLLM's default loader refuses keys that are not its own
        super().__init__(plain)  # type: ignore[call-arg]
        self.load_config = load_config
        self._weights: Iterator[tuple[str, Weight]] | None = None

    def download_model(self, model_config: Any) -> None:  # noqa: ANN401
        """Nothing: a checkpoint is a local folder."""

    def load_weights(self, model: Any, model_config: Any) -> None:  # noqa: ANN401
        """Opens the load, collective, and has the model take it; an error of the model fails it on all ranks."""
        with self._opened(model, model_config) as self._weights:
            try:
                super().load_weights(model, model_config)  # type: ignore[misc]
            finally:
                self._weights = None

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Weight]]:  # noqa: ANN401
        """The weights of the load that is open; where vLLM loads anew into a model, of one of its own."""
        if self._weights is not None:
            return self._weights
        return self._opened_anew(model, model_config)

    def _opened_anew(self, model: Any, model_config: Any) -> Iterator[tuple[str, Weight]]:  # noqa: ANN401
        with self._opened(model, model_config) as weights:
            yield from weights

    def _opened(
        self,
        model: Any,  # noqa: ANN401
        model_config: Any,  # noqa: ANN401
    ) -> contextlib.AbstractContextManager[Iterator[tuple[str, Weight]]]:
        if getattr(model, "secondary_weights", ()):
            raise ConfigError(
                f"vLLM: {type(model).__name__} takes weights from further checkpoints (secondary_weights), which no "
                "load has: use another load format"
            )
        draft = getattr(model_config, "runner_type", None) == "draft"
        load = EngineLoad.of("vLLM", self.load_config.model_loader_extra_config, model_config.model, draft=draft)
        groups = _groups()
        return load.weights(_group(groups, draft=draft), places_of(groups))


def _groups() -> dict[str, Any]:
    state = importlib.import_module("vllm.distributed.parallel_state")
    return groups_of(state, {axis: f"get_{axis}_group" for axis in ("dp", "pp", "pcp", "tp", "ep")})


def _group(groups: dict[str, Any], *, draft: bool) -> GroupChoice:
    if draft and "pp" in groups and groups["pp"].world_size > 1:
        return groups["tp"].cpu_group  # type: ignore[no-any-return]
    return None
