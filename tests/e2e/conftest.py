"""What the whole-loader tests share."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest

from tests.conftest import _descriptors, _unfinished_threads


@pytest.fixture(scope="session", autouse=True)
def store_server() -> None:
    """Where ranks in one process meet. It is there before any test counts descriptors."""
    from tests.e2e.seats import serve

    serve()


class _Errors(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture(scope="module")
def nothing_is_left_of_all(process_wide_descriptors: None) -> Iterator[None]:
    """Once for a module, for each look costs a collection: no descriptor is left, and asyncio has logged no error
    (an exception that nobody retrieved, a task that was destroyed while it was pending)."""
    gc.collect()
    before, errors = _descriptors(), _Errors()
    logging.getLogger().addHandler(errors)
    yield
    _unfinished_threads(set())
    gc.collect()
    logging.getLogger().removeHandler(errors)
    left = {number: target for number, target in _descriptors().items() if before.get(number) != target}
    assert (left, errors.texts) == ({}, [])
