from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def nothing_is_thawed(collector_sees_what_a_module_makes: None) -> Iterator[None]:
    """Benchmarks freeze what was there before they measure, and thaw it. Here, where they run in the tests' process,
    each of their collections would then go through all objects of the suite."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
