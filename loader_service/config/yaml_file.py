"""Where a configuration comes from: a YAML file, or a dictionary of an engine. Both are checked alike."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiofiles

from loader_service.config.paths import absolute_path
from loader_service.config.schema import ServiceConfig
from loader_service.config.validate import validate
from loader_service.config.values import read_dictionary
from loader_service.config.yaml_nodes import read_yaml
from loader_service.errors import ConfigError
from loader_service.sizes import format_size

MAX_FILE_BYTES = 4 << 20
"""No configuration is larger; a checkpoint given by mistake is not read into memory."""


def load_config(path: str | os.PathLike[str]) -> ServiceConfig:
    """The configuration of a YAML file; relative checkpoint paths stand on the file's folder (links not resolved).

    Blocking. Raises one `ConfigError`, whose `path` is the file, that lists all problems with their lines.
    """
    file = os.fspath(path)
    absolute = absolute_path(file, ".")
    try:
        with open(absolute, "rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _unreadable(file, error) from error
    return _parse(raw, file, absolute)


async def aload_config(path: str | os.PathLike[str]) -> ServiceConfig:
    """`load_config` for a caller on an event loop, which it does not block."""
    file = os.fspath(path)
    absolute = await asyncio.to_thread(absolute_path, file, ".")
    try:
        async with aiofiles.open(absolute, "rb") as stream:
            raw = await stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise (await asyncio.to_thread(_unreadable, file, error)) from error
    return await asyncio.to_thread(_parse, raw, file, absolute)


def config_from_dict(data: dict[str, object], base_dir: str | os.PathLike[str] = ".") -> ServiceConfig:
    """The configuration of a dictionary, as strict as a file: real str, int, float, bool, list, tuple and dict only.

    Relative checkpoint paths stand on `base_dir`. Raises one `ConfigError` that lists all problems with their
    key paths.
    """
    return validate(read_dictionary(data), base_dir=os.fspath(base_dir))


def _parse(raw: bytes, file: str, absolute: str) -> ServiceConfig:
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{file}: is larger than {format_size(MAX_FILE_BYTES)}; is it a configuration?", path=file)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        message = f"{file}:{line}: is not UTF-8 text (byte {raw[error.start]:#04x}); save it as UTF-8"
        raise ConfigError(message, path=file) from error
    return validate(read_yaml(text, file), base_dir=str(Path(absolute).parent), file=file)


def _unreadable(file: str, error: OSError) -> ConfigError:
    if isinstance(error, FileNotFoundError):
        reason = f"does not exist (looked from {Path.cwd()}); correct the path of the configuration"
    elif isinstance(error, IsADirectoryError):
        reason = "is a folder; give the YAML file itself"
    else:
        reason = f"cannot be read ({error.strerror or error}); check the path and its permissions"
    return ConfigError(f"{file}: {reason}", path=file, errno=error.errno)
