from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import nothing_is_left_of_all, store_server  # noqa: F401 - fixtures
from tests.support.checkpoints import Checkpoint
from tests.tables.making import left_behind, write


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write(tmp_path_factory.mktemp("tables"))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Once its tables are gone, no test leaves shared memory, mapped or open, or a listening socket."""
    yield
    if left_behind():
        gc.collect()
    assert not left_behind()
