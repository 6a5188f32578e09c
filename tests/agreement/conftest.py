"""A store for ranks of tests in a process of its own, as torchrun's agent has it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from tests.support.ranks import context, free_port


class Agent(NamedTuple):
    address: str
    pid: int


@pytest.fixture
def agent() -> Iterator[Agent]:
    with serving_agent() as agent:
        yield agent


@contextmanager
def serving_agent() -> Iterator[Agent]:
    address = f"127.0.0.1:{free_port()}"
    ours, theirs = context().Pipe()
    process = context().Process(target=serve_store, args=(address, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(60)
        yield Agent(address, process.pid or 0)
    finally:
        process.kill()
        process.join(10)
        process.close()
        ours.close()


def serve_store(address: str, pipe: Any) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    store = TCPStore("127.0.0.1", int(address.rpartition(":")[2]), None, is_master=True, wait_for_workers=False)
    pipe.send("serves")
    while store is not None:
        time.sleep(60)
