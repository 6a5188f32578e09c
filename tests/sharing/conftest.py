"""What tests of shared reads have in common: where ranks of one process meet, and that nothing is left of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from tests.conftest import _descriptors, _unfinished_threads
from tests.e2e.conftest import nothing_is_left_of_all, store_server  # noqa: F401 - fixtures, for here as well
from tests.sharing.failing import mappings

_ENDS_WITHIN_S = 5.0


@pytest.fixture
def nothing_is_left(process_wide_descriptors: None) -> Iterator[None]:
    """After each test: no thread of the loader runs, no descriptor is open (files, sockets, processes, memory) and no
    shared memory is mapped that was not before."""
    before = _open()
    yield
    _unfinished_threads(set())
    if _open() - before:
        gc.collect()  # memory ends with who refers to it, which may be an exception's frames
    deadline_s = time.monotonic() + _ENDS_WITHIN_S  # the store's threads close their sockets a moment after
    while (left := _open() - before) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not left


def _open() -> set[tuple[int, str]]:
    return {*_descriptors().items(), *((-1, line) for line in mappings())}
