"""The package's public names: all there, and none of torch's weight for what needs no tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest

import loader_service as ls


@pytest.mark.parametrize("name", ls.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(ls, name) is not None
    assert name in dir(ls)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ls.nothing  # noqa: B018


def test_configuration_and_planning_do_not_import_torch() -> None:
    script = (
        "import sys, loader_service as ls; ls.config_from_dict, ls.LoadPlan, ls.ConfigError; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
