"""What several commands are called with: options and arguments as the parser takes them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class LogLevel(StrEnum):
    """Levels of `--log-level`."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """What a line on stderr is."""

    TEXT = "text"
    JSON = "json"


class ByChecksum(StrEnum):
    """What `load --against` compares whole tensors by."""

    CRC32 = "crc32"
    SHA256 = "sha256"


class BenchForm(StrEnum):
    """What `bench` takes of a load."""

    OWNED = "owned"
    BATCHES = "batches"


class BenchCache(StrEnum):
    """The page cache before a load of `bench`."""

    COLD = "cold"
    WARM = "warm"
    AS_IS = "as-is"


Paths = Annotated[
    list[str],
    typer.Argument(metavar="PATH...", help="A checkpoint's folder, one .safetensors file, or all of its files."),
]
IgnoreIndex = Annotated[bool, typer.Option("--ignore-index", help="Let the headers alone decide.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")]
Level = Annotated[LogLevel, typer.Option("--log-level", help="What is logged to stderr.", case_sensitive=False)]
Format = Annotated[
    LogFormat,
    typer.Option("--log-format", help="What a line on stderr is: text, or one JSON object.", case_sensitive=False),
]
Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file; see `loader-service schema`.")]
LoadName = Annotated[
    str | None, typer.Option("--load", help="Which of the YAML file's loads (default: its only one).", metavar="NAME")
]
