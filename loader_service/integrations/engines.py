"""What adapters for engines share: what an engine's configuration says of a load, and who this rank is in the mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch

from loader_service import logs
from loader_service.agreement.group import GroupChoice
from loader_service.config.schema import ServiceConfig
from loader_service.config.yaml_file import config_from_dict, load_config
from loader_service.errors import ConfigError
from loader_service.integrations.splits import refuse_splits
from loader_service.planning.glob import compile_glob
from loader_service.service import LoaderService
from loader_service.stream import BlockingLoad, Load, Weight

log = logs.logger("loader_service.integrations")

_KEYS = ("config", "load", "draft_load", "presharded", "row_sources", "attach")
_SWITCHES = ("row_sources", "attach")


@dataclass(frozen=True)
class EngineLoad:
    """A load as an engine's configuration names it.

    `presharded` are globs over names whose parameters hold this rank's part. `row_sources`: the model knows what to do
    with the `RowSource` of a host-resident table; without it such rules are refused. `attach`: what the node's resident
    service keeps is not read (see `ls.attach`).
    """

    engine: str
    config: ServiceConfig
    load: str
    presharded: tuple[str, ...] = ()
    row_sources: bool = False
    attach: bool = False

    @classmethod
    def of(cls, engine: str, options: object, folder: str, *, draft: bool = False) -> Self:
        """From what the engine passes on, `{"config": "loader.yaml", "load": "target"}`, all of it optional.

        `config` is a path, or the same as a dictionary; without one all of `folder`, the model's, is loaded, whole. For
        a draft `draft_load` comes before `load`. Raises ConfigError for anything else.
        """
        options = {} if options is None else options
        if not isinstance(options, Mapping) or (unknown := sorted(set(options) - set(_KEYS), key=str)):
            found = f"has {', '.join(map(repr, unknown))}" if isinstance(options, Mapping) else f"is {options!r}"
            raise ConfigError(f"{engine}: the loader's extra configuration {found}; it takes {', '.join(_KEYS)}")
        texts = {key: options[key] for key in ("load", "draft_load") if key in options}
        globs, switches = options.get("presharded", ()), {key: options.get(key, False) for key in _SWITCHES}
        wrong = [f"{key} is {value!r}, not a text" for key, value in texts.items() if not isinstance(value, str)]
        if not isinstance(globs, list | tuple) or not all(isinstance(glob, str) for glob in globs):
            wrong.append(f"presharded is {globs!r}, not a list of globs")
        wrong += [
            f"{key} is {value!r}, not true or false" for key, value in switches.items() if type(value) is not bool
        ]
        if wrong:
            raise ConfigError(f"{engine}: in the loader's extra configuration {'; '.join(wrong)}")
        load = texts.get("load", "target")
        load = texts.get("draft_load", load) if draft else load
        return cls(engine, _config(options.get("config"), folder, load, engine), load, tuple(globs), **switches)

    def check(self, load: Load | BlockingLoad, rank: int) -> None:
        """Raises ConfigError for rules that the engine has no place for, before anything is read."""
        marked = [compile_glob(pattern) for pattern in self.presharded]
        how = ", or, where the parameter holds this rank's part already, match its name in `presharded`"
        refuse_splits(load, rank, self.engine, lambda name: any(glob.matches(name) for glob in marked), how_to_mark=how)
        if not self.row_sources and (table := next(iter(load.tables), None)):
            raise ConfigError(
                f"load '{load.name}': '{table}' stays in host memory by a rule, which {self.engine}'s models do not "
                "know: take `host_resident` out of the rule, or, for a model that takes row sources, say "
                "`row_sources: true` in the loader's extra configuration",
                tensor=table,
                rank=rank,
            )

    def coords(self, places: Mapping[str, tuple[int, int]]) -> dict[str, int] | None:
        """Where this rank stands in the mesh, from the engine's (rank, size) of each axis that it knows.

        None, which is row-major by rank, where the mesh has other axes, or there is none. Raises ConfigError where it
        has another size of an axis than the engine.
        """
        mesh = self.config.mesh
        if mesh is None or not mesh.keys() <= places.keys():
            return None
        for axis, size in mesh.items():
            if places[axis][1] != size:
                raise ConfigError(
                    f"mesh: {axis} is {size}, but {self.engine} runs with {axis} {places[axis][1]}: write the sizes "
                    "that the engine is started with"
                )
        return {axis: places[axis][0] for axis in mesh}

    @contextlib.contextmanager
    def weights(
        self, group: GroupChoice, places: Mapping[str, tuple[int, int]]
    ) -> Iterator[Iterator[tuple[str, Weight]]]:
        """Opens the load, which is collective over `group`, and gives its (name, tensor) pairs, in plan order."""
        with (
            LoaderService.blocking(self.config, group, self.coords(places), attach=self.attach) as service,
            service.open(self.load) as load,
        ):
            self.check(load, service.rank)
            shared = self.config.cache.on
            yield ((name, _own(value) if shared else value) for name, value in load)
        report = load.report
        log.info(
            "load '%s': %d tensors, %d bytes in %.2f s", self.load, report.tensors, report.payload_bytes, report.seconds
        )


def groups_of(state: object, getters: Mapping[str, str]) -> dict[str, Any]:
    """An engine's groups of ranks by axis, from its module `state`: those that are initialised there.

    `getters` names the function for each axis. A group has `rank_in_group` and `world_size`, as in vLLM and SGLang.
    """
    found = {}
    for axis, getter in getters.items():
        with contextlib.suppress(AssertionError, AttributeError, RuntimeError):  # not initialised, or there is none
            found[axis] = getattr(state, getter)()
    return found


def places_of(groups: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(this rank, how many) by axis."""
    return {axis: (group.rank_in_group, group.world_size) for axis, group in groups.items()}


def _own(value: Weight) -> Weight:
    """A copy of what the raw weight cache holds, since later loads see it too."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _config(given: object, folder: str, load: str, engine: str) -> ServiceConfig:
    if given is None:
        if not Path(folder).is_dir():
            raise ConfigError(
                f"{engine}: the model is {folder!r}, which is no folder of this machine: download it and give its "
                "path, or write a configuration and name it as `config` in the loader's extra configuration"
            )
        return config_from_dict({"checkpoint": {"path": folder}, "loads": {load: {}}})
    if isinstance(given, str):
        return load_config(given)
    if isinstance(given, Mapping):
        return config_from_dict(cast("dict[str, object]", dict(given)))
    raise ConfigError(f"{engine}: in the loader's extra configuration config is {given!r}, not a path")
