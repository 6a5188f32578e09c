"""What holds for every test: nothing blocks an event loop, no loader thread outlives its test, runs repeat."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator

import hypothesis
import pytest
import uvloop
from blockbuster import BlockBuster

# Rank processes that tests start inherit it: one that dies in native code then says where.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
# torch's store client looks up the name of every peer it connects to. Where the resolver drops such a query, the
# connection stands still for the resolver's time limit: five seconds unless it is told otherwise.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A shell that starts the run in the background has it ignore interrupts; tests send some to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests let one read from the page cache stand still and count on another one beside it.
if len(os.sched_getaffinity(0)) == 1:
    os.sched_getaffinity = lambda _: {0, 1}

_STDERR = pytest.StashKey[int]()
_TEARDOWN_ENDS_WITHIN_S = 120
_THREAD_PREFIX = "loader-"
_THREADS_END_WITHIN_S = 5.0

# No deadline and no complaint about slow generation: both measure the machine that the suite shares, not the code.
_SETTINGS = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("ci", _SETTINGS, derandomize=True, database=None, print_blob=True)
hypothesis.settings.register_profile("local", _SETTINGS)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "local"))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # tests have another


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A test whose time was up may have left a thread that waits for ever, and closing its loop waits for that thread:
    then this process ends, and says where. `timeout` has gone off by then, and does so once."""
    faulthandler.dump_traceback_later(_TEARDOWN_ENDS_WITHIN_S, exit=True, file=item.config.stash[_STDERR])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none."""
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and not _has_cuda():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module", autouse=True)
def collector_sees_what_a_module_makes() -> None:
    """Takes all that was there before out of the garbage collector's sight. Many a test collects, to see that nothing
    is left of it; to go through the 380,000 objects of all test modules took 0.3 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def blocking_detector() -> Iterator[BlockBuster]:
    """Makes a blocking call under a running event loop raise, on any thread, if loader_service is in the call stack.

    It is active for the whole session, so that the service's own loop is watched in tests of the blocking face too.
    """
    detector = BlockBuster("loader_service")
    for function in detector.functions.values():
        # An import happens once, in whichever test comes first; a traceback's source lines are read to report a bug.
        function.can_block_in("<frozen importlib._bootstrap>", "_find_and_load")
        function.can_block_in("linecache.py", "updatecache")
    detector.activate()
    yield detector
    detector.deactivate()


@pytest.fixture(autouse=True)
def nothing_blocks_a_loop(request: pytest.FixtureRequest, blocking_detector: BlockBuster) -> Iterator[None]:
    """Watches every test, but for those marked `may_block`: they call the blocking face under a running loop."""
    if request.node.get_closest_marker("may_block") is None:
        yield
        return
    blocking_detector.deactivate()
    yield
    blocking_detector.activate()


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fails a test after which a thread of the loader still runs: a pool was not closed, or its threads do not end."""
    before = set(threading.enumerate())
    yield
    left = _unfinished_threads(before)
    assert not left, f"threads that outlived the test: {sorted(thread.name for thread in left)}"


def _unfinished_threads(
    before: set[threading.Thread], within_s: float = _THREADS_END_WITHIN_S
) -> list[threading.Thread]:
    """The loader's threads that are not in `before` and have not ended in time: closing need not wait for the last."""
    new = [thread for thread in threading.enumerate() if thread not in before]
    loaders = [thread for thread in new if thread.name.startswith(_THREAD_PREFIX)]
    until = time.monotonic() + within_s
    for thread in loaders:
        thread.join(max(0.0, until - time.monotonic()))
    return [thread for thread in loaders if thread.is_alive()]


@pytest.fixture(scope="session")
def process_wide_descriptors() -> None:
    """Opens what is opened once a process and never closed: libuv's pipe for signals."""
    uvloop.new_event_loop().close()


@pytest.fixture
def no_leaked_descriptors(process_wide_descriptors: None) -> Iterator[None]:
    """Fails the test that asks for it if a descriptor is open afterwards that was not before."""
    threads = set(threading.enumerate())
    gc.collect()
    before = _descriptors()
    yield
    _unfinished_threads(threads)
    gc.collect()
    left = {number: target for number, target in _descriptors().items() if before.get(number) != target}
    assert not left, f"descriptors that outlived the test: {left}"


def _descriptors() -> dict[int, str]:
    """Every open descriptor of this process with what it leads to."""
    found: dict[int, str] = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the listing's own
            continue
    return found


@pytest.fixture
async def no_leaked_tasks() -> AsyncIterator[None]:
    """Fails the test that asks for it if a task lives on in the test's loop: cancelling it there would hide it."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not left, f"tasks that outlived the test: {sorted(repr(task.get_coro()) for task in left)}"
