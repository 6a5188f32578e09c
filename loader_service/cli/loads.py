"""Which of a file's loads a command is about: `plan`, `load` and `bench` take `--load` alike."""

from __future__ import annotations

from pathlib import Path

from loader_service.config.schema import ServiceConfig
from loader_service.config.yaml_file import load_config
from loader_service.errors import ConfigError


def load_of(path: Path, name: str | None) -> tuple[ServiceConfig, str]:
    """The configuration and the load that `name` says; None: its only one. Blocking.

    Raises ConfigError for a file that is wrong, for a name that it does not have, and, with all names that it has,
    where there are several and none was said.
    """
    config = load_config(path)
    if name is None:
        if len(config.loads) > 1:
            names = ", ".join(config.loads)
            raise ConfigError(f"{path} has several loads: say which with --load, one of {names}", path=str(path))
        name = next(iter(config.loads))
    config.checkpoint_of(name)
    return config, name
