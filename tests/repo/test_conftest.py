"""The suite's own watchdogs bite: a blocked loop, a leaked thread, descriptor or task is found."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable

import blockbuster
import pytest

import loader_service
from tests import conftest


def product_function(source: str) -> Callable[..., object]:
    """A function that counts as the product's: its code's file lies in the package."""
    namespace: dict[str, object] = {"time": time, "threading": threading}
    exec(compile(source, loader_service.__path__[0] + "/probe.py", "exec"), namespace)
    function = namespace["probe"]
    assert callable(function)
    return function


SLEEPS = "def probe():\n    time.sleep(0)\n"
WAITS = "def probe(event):\n    event.wait(0.001)\n"


async def test_a_blocking_call_of_the_product_under_a_loop_raises() -> None:
    with pytest.raises(blockbuster.BlockingError):
        product_function(SLEEPS)()
    with pytest.raises(blockbuster.BlockingError):
        product_function(WAITS)(threading.Event())


async def test_a_thread_without_a_loop_may_block() -> None:
    await asyncio.to_thread(product_function(SLEEPS))


def test_a_loop_on_another_thread_is_watched_in_tests_without_a_loop() -> None:
    caught: list[BaseException] = []

    async def call() -> None:
        try:
            product_function(SLEEPS)()
        except blockbuster.BlockingError as error:
            caught.append(error)

    thread = threading.Thread(target=lambda: asyncio.run(call()))
    thread.start()
    thread.join()
    assert len(caught) == 1


async def test_a_tests_own_blocking_call_is_no_finding() -> None:
    time.sleep(0)  # noqa: ASYNC251 - the point


@pytest.mark.may_block
async def test_the_marker_lets_a_blocking_face_block() -> None:
    product_function(SLEEPS)()


def test_a_loader_thread_that_lives_on_is_found() -> None:
    before = set(threading.enumerate())
    release = threading.Event()
    threads = [threading.Thread(target=release.wait, name=name) for name in ("loader-read-0", "other")]
    for thread in threads:
        thread.start()
    assert [thread.name for thread in conftest._unfinished_threads(before, within_s=0.0)] == ["loader-read-0"]
    release.set()
    assert conftest._unfinished_threads(before) == []
    threads[1].join()


def test_an_open_descriptor_is_seen() -> None:
    before = conftest._descriptors()
    number = os.open("/dev/null", os.O_RDONLY)
    try:
        assert {key: value for key, value in conftest._descriptors().items() if key not in before} == {
            number: "/dev/null"
        }
    finally:
        os.close(number)
    assert conftest._descriptors() == before


async def test_opt_in_checks_are_quiet_after_a_clean_test(no_leaked_descriptors: None, no_leaked_tasks: None) -> None:
    await asyncio.create_task(asyncio.sleep(0))
