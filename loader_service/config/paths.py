"""Paths of the configuration made absolute, without resolving links."""

from __future__ import annotations

import os
from pathlib import Path

from loader_service.errors import ConfigError


def absolute_path(path: str, base_dir: str) -> str:
    """`path` on `base_dir` (itself on the current folder), with a leading ~ expanded and links left as they are.

    `x/..` is shortened only where x is no link: behind a link it leads elsewhere. Raises `ConfigError`.
    """
    if "\0" in path:
        raise ConfigError(f"the path {path!r} contains a zero byte; remove it")
    try:
        # Asked of the text: Path("./~") is Path("~"), and would expand.
        joined = base_dir / (Path(path).expanduser() if path.startswith("~") else Path(path))
    except RuntimeError as error:
        raise ConfigError(
            f"the home folder in {path!r} is unknown; write the path out, or './{path}' for a file of that name"
        ) from error
    if not joined.is_absolute():
        joined = Path.cwd() / joined
    kept: list[str] = []
    for part in joined.parts[1:]:
        if part == ".." and not (kept and (kept[-1] == ".." or Path(os.sep, *kept).is_symlink())):
            del kept[-1:]
        else:
            kept.append(part)
    return str(Path(os.sep, *kept))
