from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.rows.making import Workshop


@pytest.fixture
def workshop() -> Iterator[Callable[..., Workshop]]:
    """Makes readers over fake storages, and ends them."""
    made: list[Workshop] = []

    def make(**options: Any) -> Workshop:
        made.append(Workshop.make(**options))
        return made[-1]

    yield make
    for one in made:
        one.end()
