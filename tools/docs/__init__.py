"""Makes what the documents have from the code: reference pages and pictures. `make docs` writes all of it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def references() -> Mapping[str, str]:
    """The reference pages, by their names under docs/."""
    from tools.docs import api_reference, cli_reference, yaml_reference

    return {
        "reference/api.md": api_reference.page(),
        "reference/cli.md": cli_reference.page(),
        "reference/yaml.md": yaml_reference.page(),
    }


def pictures() -> Mapping[str, str]:
    """The pictures, by their names under docs/."""
    from tools.docs import bytes_way, plan_pictures

    with tempfile.TemporaryDirectory() as folder:
        return {"bytes.svg": bytes_way.picture(), **plan_pictures.pictures(Path(folder))}
