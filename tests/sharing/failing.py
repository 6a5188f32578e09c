"""Loads of ranks that share what they read, for tests of what goes wrong in them, and what is left of such loads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

import loader_service as ls
from loader_service.agreement.messages import Verdict
from loader_service.config.schema import ServiceConfig
from loader_service.errors import FailureRecord
from loader_service.node_sharing import NodeSharing
from loader_service.run import LoadRun
from tests.conftest import _unfinished_threads
from tests.e2e import forty
from tests.e2e.doors import Left, Service, destinations, left
from tests.e2e.seats import Seat
from tests.sharing.test_staging_processes import what_is_left
from tests.support.checkpoints import Checkpoint, assert_same

T = TypeVar("T")

WAYS = ("staging", "page_cache")
FIRST = "model-00001-of-00002.safetensors"  # before `forty.LAST`
SHAPE = (500, 41)  # of each of forty tensors: some 1.6 MB, 26 blocks
SLOT_BYTES = 64 << 10
SLOTS = 4  # of each rank
PATIENCE_S = 30.0
SECTIONS: dict[str, dict[str, Any]] = {
    "staging": {"capacity_bytes": 2 * SLOTS * SLOT_BYTES},
    "reads": {"chunk_bytes": SLOT_BYTES, "threads": 2, "retries": 1},
    "agreement": {"timeout_s": 20, "start_timeout_s": 30, "grace_s": 10},
}


def write(folder: Path) -> Checkpoint:
    return forty.write(folder, SHAPE)


def written(folder: str) -> Checkpoint:
    """What `write` has made there, without the bytes."""
    names = {f"s{shard}.w{number:02}": ("BF16", SHAPE, b"") for shard in (1, 2) for number in range(20)}
    return Checkpoint(Path(folder), names, {})


def config_of(
    checkpoint: Checkpoint, way: str, load: dict[str, object] | None = None, **sections: dict[str, Any]
) -> ServiceConfig:
    """`sections` add to `SECTIONS`."""
    names = {*SECTIONS, *sections}
    made = {name: {**SECTIONS.get(name, {}), **sections.get(name, {})} for name in names}
    made["reads"] = {"sharing": way, **made["reads"]}
    return checkpoint.config(load, **made)


# Loading --------------------------------------------------------------------------------------------------------------


async def load_all(
    seat: Seat,
    config: ServiceConfig,
    names: Sequence[str],
    checkpoint: Checkpoint,
    meanwhile: Callable[[], None] = lambda: None,
) -> ls.LoadReport:
    """A whole load of exactly these tensors, with their bytes. In the middle it waits until all is read ahead."""
    taken = {}
    async with seat.service(config) as service, service.open("target") as load:
        ahead = sharing_of(service)._ahead
        async for name, tensor in load:
            taken[name] = tensor
            if len(taken) == 5:
                meanwhile()
                await until(lambda: ahead is None or ahead.over)
    assert list(taken) == list(names)
    for name, tensor in taken.items():
        assert_same(tensor, checkpoint.tensor(name), name)
    return load.report


async def go_through(service: ls.LoaderService, body: Callable[[ls.Load], Awaitable[object]]) -> Left:
    """One load with this body. Never raises: what came out is in the result."""
    load, caught = service.open("target"), None
    try:
        async with load:
            await body(load)
    except BaseException as error:
        caught = error
    return left(service, load, caught)


async def take_all(load: ls.Load) -> None:
    async for _ in load:
        pass


async def take_in_steps(
    load: ls.Load,
    form: str,
    checkpoint: Checkpoint,
    step: Callable[[int], None],
    take: Callable[[str, torch.Tensor], None] = lambda name, tensor: None,
) -> None:
    """All of a load; `step(number of items taken)` is the consumer's body, `step(0)` before the first. `take` gets what
    is iterated over."""
    taken = 0
    step(taken)
    if form == "into":
        await load.into(destinations(checkpoint))
        step(1)
    elif form == "batches":
        async for batch in load.batches():
            with batch:
                step(taken := taken + 1)
    else:
        async for name, tensor in load:
            take(name, tensor)
            step(taken := taken + 1)


async def all_at_once(cases: Sequence[T], check: Callable[[T], Awaitable[None]]) -> None:
    """All cases side by side: what takes its time (that causes are gathered) is then waited for only once."""
    async with asyncio.timeout(2 * PATIENCE_S):
        results = await asyncio.gather(*(_named(case, check) for case in cases), return_exceptions=True)
    failed = [result for result in results if isinstance(result, Exception)]
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(cases)} cases", failed)


async def _named(case: T, check: Callable[[T], Awaitable[None]]) -> None:
    try:
        await check(case)
    except Exception as error:
        error.add_note(f"in the case {case}")
        raise


# Looking --------------------------------------------------------------------------------------------------------------


def run_of(service: Service) -> LoadRun:
    """The load that is open in a service."""
    assert service._engine is not None
    run = service._engine.open_load
    assert isinstance(run, LoadRun)
    return run


def sharing_of(service: Service) -> NodeSharing:
    reading = run_of(service)._reading
    assert reading is not None
    return reading._sharing


def progress_of(service: Service) -> str:
    """What this rank tells the others of how far it has come."""
    session = run_of(service)._session
    assert session is not None
    return session._progress[1]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - it sends no event
            await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], object]) -> None:
    """As `until`, for a thread."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


# What is left ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """How one rank came out of one load, as plain data, and what is left of it in its process."""

    error: str | None
    message: str
    verdict: FailureRecord | None
    log: tuple[Verdict, ...]
    left: tuple[str, ...] = ()


def seen(result: Left) -> Seen:
    error = result.error
    return Seen(None if error is None else type(error).__name__, str(error), result.verdict, result.log)


def with_remains(result: Seen) -> Seen:
    return replace(result, left=tuple(remains()))


def remains() -> list[str]:
    """What this process still has of its loads, once its threads had time to end."""
    _unfinished_threads(set())
    return what_is_left()


def mappings() -> list[str]:
    """The shared memory that this process has mapped."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:loader" in line]
