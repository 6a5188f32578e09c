"""What the whole-loader tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def store_server() -> None:
    """Where ranks in one process meet. It is there before any test counts descriptors."""
    from tests.e2e.seats import serve

    serve()
