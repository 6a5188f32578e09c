"""Leaving by any door: reads stop, buffers come back, nothing is left over, and the next load is clean."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

import loader_service as ls
from loader_service.memory.pool import PoolStatistics
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from tests.support.checkpoints import Checkpoint, assert_same, awkward_checkpoint

pytestmark = pytest.mark.usefixtures("no_leaked_descriptors")

# Tests count reads, which differ where a file is not in the page cache any more: the system may take it out any time.
BUFFERED = {"access": "buffered"}
SMALL: dict[str, Any] = {
    "staging": {"capacity_bytes": "64KiB"},
    "reads": {"chunk_bytes": "16KiB", "threads": 2, **BUFFERED},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return awkward_checkpoint(tmp_path_factory.mktemp("awkward"))


def pool_of(service: ls.LoaderService | ls.BlockingLoaderService) -> PoolStatistics:
    assert service._engine is not None
    assert service._engine._pool is not None
    return service._engine._pool.statistics()


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what other threads' counters say; a watchdog ends it."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - counters send no events
            await asyncio.sleep(0.002)


async def assert_next_load_is_whole(service: ls.LoaderService, checkpoint: Checkpoint) -> None:
    assert pool_of(service).out_bytes == 0
    async with service.open("target") as load:
        async for name, tensor in load:
            assert_same(tensor, checkpoint.tensor(name), name)
    assert load.report.complete
    assert pool_of(service).out_bytes == 0


@pytest.mark.usefixtures("no_leaked_tasks")
@pytest.mark.parametrize("after", [0, 1, 7, 56])
@pytest.mark.parametrize("form", ["owned", "batches"])
async def test_break_is_a_success_and_stops_reading(checkpoint: Checkpoint, form: str, after: int) -> None:
    storage = FakeStorage(LocalStorage())
    async with ls.LoaderService(checkpoint.config(**SMALL), "solo", storage=storage) as service:
        async with service.open("target") as load:
            taken = 0
            stream: AsyncIterator[object] = load.batches() if form == "batches" else aiter(load)
            async for item in stream:
                if isinstance(item, ls.Batch):
                    item.release()
                taken += 1
                if taken > after:
                    break
        assert not load.report.complete or taken == len(checkpoint.tensors)
        assert pool_of(service).out_bytes == 0
        if after < 7:
            assert load.report.read_bytes < checkpoint.payload_bytes // 2, "queued reads were stopped"
        await assert_next_load_is_whole(service, checkpoint)


class Oops(Exception):
    pass


@pytest.mark.usefixtures("no_leaked_tasks")
@pytest.mark.parametrize("at", ["first", "middle", "last", "after the last"])
async def test_an_error_in_the_body_comes_out_unchanged(checkpoint: Checkpoint, at: str) -> None:
    count = len(checkpoint.tensors)
    number = {"first": 0, "middle": count // 2, "last": count - 1, "after the last": count}[at]
    async with ls.LoaderService(checkpoint.config(**SMALL), "solo") as service:
        error = Oops("mine")
        with pytest.raises(Oops) as caught:
            async with service.open("target") as load:
                taken = 0
                async for _ in load:
                    if taken == number:
                        raise error
                    taken += 1
                raise error
        assert caught.value is error
        await assert_next_load_is_whole(service, checkpoint)


@pytest.mark.usefixtures("no_leaked_tasks")
@pytest.mark.parametrize("form", ["owned", "batches", "into"])
async def test_cancellation_with_reads_in_flight(checkpoint: Checkpoint, form: str) -> None:
    """Reads stand still in the kernel while the consumer is cancelled; afterwards nothing of them shows anywhere."""
    storage = FakeStorage(LocalStorage())
    config = checkpoint.config(**SMALL)
    kept: list[tuple[str, torch.Tensor]] = []
    params = {name: torch.zeros_like(checkpoint.tensor(name)) for name in checkpoint.tensors}
    async with ls.LoaderService(config, "solo", storage=storage) as service:
        await service.plan("target")
        gate = storage.block("*", nth=3)

        async def consume() -> None:
            async with service.open("target") as load:
                if form == "into":
                    await load.into(params)
                elif form == "batches":
                    async for batch in load.batches():
                        batch.release()
                else:
                    async for item in load:
                        kept.append(item)

        task = asyncio.create_task(consume())
        await asyncio.to_thread(gate.reached.wait, 20)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done(), "leaving waits for the read in flight"
        gate.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert storage.in_flight == 0
        await assert_next_load_is_whole(service, checkpoint)
    for name, tensor in kept:
        assert_same(tensor, checkpoint.tensor(name), name)


@pytest.mark.usefixtures("no_leaked_tasks")
async def test_cancellation_while_leaving_still_gives_everything_back(checkpoint: Checkpoint) -> None:
    """The body has failed and leaving waits for a read; the impatient caller cancels that as well."""
    storage = FakeStorage(LocalStorage())
    async with ls.LoaderService(checkpoint.config(**SMALL), "solo", storage=storage) as service:
        await service.plan("target")
        gate = storage.block("*", nth=20)  # the first tensor takes 19 reads

        failed = asyncio.Event()

        async def consume() -> None:
            async with service.open("target") as load:
                stream = aiter(load)
                await anext(stream)
                await asyncio.to_thread(gate.reached.wait, 20)
                failed.set()
                raise Oops

        task = asyncio.create_task(consume())
        await asyncio.wait_for(failed.wait(), 20)
        task.cancel()
        await asyncio.wait((task,), timeout=0.05)
        assert not task.done(), "it still waits for the read in flight"
        gate.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        await assert_next_load_is_whole(service, checkpoint)


@pytest.mark.usefixtures("no_leaked_tasks")
async def test_cancellation_before_entering_has_begun(checkpoint: Checkpoint) -> None:
    async with ls.LoaderService(checkpoint.config(**SMALL), "solo") as service:

        async def enter() -> None:
            async with service.open("target"):
                raise AssertionError("never entered")

        task = asyncio.create_task(enter())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with service.open("target") as load:
            assert len([name async for name, _ in load]) == len(checkpoint.tensors)


async def test_cancelled_steps_lose_nothing(checkpoint: Checkpoint) -> None:
    """A consumer that gives up waiting and comes back gets every item, in order."""
    storage = FakeStorage(LocalStorage())
    names: list[str] = []
    async with ls.LoaderService(checkpoint.config(**SMALL), "solo", storage=storage) as service:
        await service.plan("target")
        gate = storage.block("*", nth=2)
        async with service.open("target") as load:
            stream = aiter(load)
            gave_up = 0
            while True:
                step = asyncio.ensure_future(anext(stream, None))
                done, _ = await asyncio.wait((step,), timeout=0.01)
                if not done and gave_up < 3:
                    step.cancel()
                    gave_up += 1
                    if gave_up == 3:
                        gate.release()
                    if (await asyncio.gather(step, return_exceptions=True))[0] is None:
                        break
                    continue
                item = await step
                if item is None:
                    break
                names.append(item[0])
                assert_same(item[1], checkpoint.tensor(item[0]), item[0])
    assert gave_up == 3
    assert names == list(checkpoint.tensors)


async def test_one_consumption_for_each_open(checkpoint: Checkpoint) -> None:
    async with ls.LoaderService(checkpoint.config(**SMALL), "solo") as service:
        async with service.open("target") as load:
            async for _ in load:
                break
            with pytest.raises(ls.StateError, match="consumed already"):
                aiter(load)
            with pytest.raises(ls.StateError, match="consumed already"):
                load.batches()
            with pytest.raises(ls.StateError, match="consumed already"):
                await load.into({})
        with pytest.raises(ls.StateError, match="not open"):
            load.batches()
        unopened = service.open("target")
        with pytest.raises(ls.StateError, match="not open"):
            aiter(unopened)


async def test_one_open_load_for_each_service(checkpoint: Checkpoint) -> None:
    async with ls.LoaderService(checkpoint.config(), "solo") as service:
        async with service.open("target"):
            with pytest.raises(ls.StateError, match="still open"):
                service.open("target")
        async with service.open("target"):
            pass
        first, second = service.open("target"), service.open("target")  # one that is never entered holds nobody up
        async with second:
            with pytest.raises(ls.StateError, match="still open"):
                await first.__aenter__()
        with pytest.raises(ls.StateError, match="entered before"):
            await second.__aenter__()
        with pytest.raises(ls.ConfigError, match="no load is named"):
            await service.open("nowhere").__aenter__()
        async with service.open("target") as load:
            pass
    assert not load.report.complete


@pytest.mark.parametrize("config", ["demo.yaml", {"loads": {"target": {}}}], ids=["a path", "a dictionary"])
def test_a_service_takes_a_configuration(config: Any) -> None:
    with pytest.raises(ls.ConfigError, match="load_config"):
        ls.LoaderService(config)


async def test_a_closed_service_says_so(checkpoint: Checkpoint) -> None:
    service = ls.LoaderService(checkpoint.config(), "solo")
    with pytest.raises(ls.StateError, match="not open"):
        service.open("target")
    async with service:
        pass
    with pytest.raises(ls.StateError, match="not open"):
        await service.plan("target")


@pytest.mark.parametrize("form", ["owned", "batches"])
async def test_stepping_on_after_leaving_raises(checkpoint: Checkpoint, form: str) -> None:
    async with ls.LoaderService(checkpoint.config(**SMALL), "solo") as service:
        async with service.open("target") as load:
            stream: AsyncIterator[object] = load.batches() if form == "batches" else aiter(load)
            first = await anext(stream)
            if isinstance(first, ls.Batch):
                first.release()
        for _ in range(2):
            with pytest.raises(ls.StateError, match="was left"):
                await anext(stream)


def test_stepping_on_after_the_service_closed_raises(checkpoint: Checkpoint) -> None:
    with ls.LoaderService.blocking(checkpoint.config(**SMALL), "solo") as service:
        stream = service.iter_weights("target")
        next(stream)
    with pytest.raises(ls.StateError, match="was left"):
        next(stream)


async def test_a_consumer_that_waits_elsewhere_hears_of_the_leaving(checkpoint: Checkpoint) -> None:
    storage = FakeStorage(LocalStorage())
    async with ls.LoaderService(checkpoint.config(**SMALL), "solo", storage=storage) as service:
        await service.plan("target")
        gate = storage.block("*")
        async with service.open("target") as load:
            stream = load.batches()
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.to_thread(gate.reached.wait, 20)
            leaving = asyncio.create_task(load.__aexit__(None, None, None))
            await asyncio.sleep(0)
            gate.release()
            await leaving
            with pytest.raises(ls.StateError, match="was left"):
                (await waiting).release()
                await anext(stream)


def test_a_generator_that_the_collector_ends_on_the_services_thread(checkpoint: Checkpoint) -> None:
    """Its load is left like any other: nothing can be waited for there, so it is left soon."""

    class Cycle:
        pass

    with ls.LoaderService.blocking(checkpoint.config(**SMALL), "solo") as service:
        cycle = Cycle()
        cycle.stream, cycle.me = service.iter_weights("target"), cycle  # type: ignore[attr-defined]
        next(cycle.stream)  # type: ignore[attr-defined]
        gc.disable()
        try:
            del cycle
            collected = threading.Event()
            assert service._loop is not None
            service._loop.post(gc.collect)
            service._loop.post(collected.set)
            assert collected.wait(20)
        finally:
            gc.enable()
        for _ in range(2000):
            if service._engine is not None and service._engine.open_load is None:
                break
            _block_for(0.005)
        assert len(list(service.iter_weights("target"))) == len(checkpoint.tensors)


@pytest.mark.parametrize("operation", ["list", "open", "identify"])
async def test_system_exit_in_a_thread_reaches_the_consumer(
    checkpoint: Checkpoint, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object, **__: object) -> object:
        raise SystemExit("from a library below")

    storage = LocalStorage()
    method = {"list": "list_directory", "open": "open", "identify": "identify"}[operation]
    async with ls.LoaderService(checkpoint.config(), "solo", storage=storage) as service:
        monkeypatch.setattr(storage, method, leave, raising=False)
        with pytest.raises(ls.ReadError, match="SystemExit") as caught:
            async with service.open("target") as load:
                async for _ in load:
                    pass
        assert isinstance(caught.value.__cause__, SystemExit)


def test_a_forked_child_is_told_to_open_its_own_service(checkpoint: Checkpoint) -> None:
    with ls.LoaderService.blocking(checkpoint.config(), "solo") as service:
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tested
            child = os.fork()
        if child == 0:
            try:
                service.plan("target")
            except BaseException as error:
                os.write(writer, type(error).__name__.encode() + b": " + str(error).encode()[:200])
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as answers:
            assert answers.read().startswith(b"StateError: the service was opened before a fork")
        os.waitpid(child, 0)
        assert len(list(service.iter_weights("target"))) == len(checkpoint.tensors)


async def test_closing_the_service_leaves_an_open_load(checkpoint: Checkpoint) -> None:
    async with ls.LoaderService(checkpoint.config(**SMALL), "solo") as service:
        load = await service.open("target").__aenter__()
        name, tensor = await anext(aiter(load))
    assert_same(tensor, checkpoint.tensor(name))
    assert not load.report.complete


def test_an_abandoned_generator_leaves_like_a_break(checkpoint: Checkpoint) -> None:
    with ls.LoaderService.blocking(checkpoint.config(**SMALL), "solo") as service:
        stream: Iterator[tuple[str, torch.Tensor]] | None = service.iter_weights("target")
        assert stream is not None
        next(stream)
        stream = None
        gc.collect()
        assert pool_of(service).out_bytes == 0
        assert len(list(service.iter_weights("target"))) == len(checkpoint.tensors)


def test_an_abandoned_top_level_generator_closes_its_service(checkpoint: Checkpoint) -> None:
    stream: Iterator[tuple[str, torch.Tensor]] | None = ls.iter_weights(checkpoint.config(**SMALL), "target", "solo")
    assert stream is not None
    name, tensor = next(stream)
    stream = None
    gc.collect()
    assert_same(tensor, checkpoint.tensor(name))


async def test_an_abandoned_async_generator_leaves_like_a_break(checkpoint: Checkpoint) -> None:
    async with ls.LoaderService(checkpoint.config(**SMALL), "solo") as service:
        stream = service.iter_weights("target")
        await anext(stream)
        await stream.aclose()
        await assert_next_load_is_whole(service, checkpoint)


async def test_a_consumer_that_blocks_its_loop_does_not_stop_the_reads(checkpoint: Checkpoint) -> None:
    """The caller's loop stands still until everything that fits the memory was read."""
    storage = FakeStorage(LocalStorage())
    async with ls.LoaderService(checkpoint.config(), "solo", storage=storage) as service:
        async with service.open("target") as load:
            stream = aiter(load)
            await anext(stream)
            for _ in range(2000):  # blocks this loop: time.sleep is what a consumer's own code would do
                if load.report.read_bytes == checkpoint.payload_bytes:
                    break
                _block_for(0.005)
            assert load.report.read_bytes == checkpoint.payload_bytes
            assert len([name async for name, _ in stream]) == len(checkpoint.tensors) - 1


def _block_for(seconds: float) -> None:
    import time

    time.sleep(seconds)


async def test_backpressure_bounds_what_is_read_ahead(checkpoint: Checkpoint) -> None:
    """A consumer that takes nothing: reads stop at the capacity, whatever the threads could do."""
    config = checkpoint.config(staging={"capacity_bytes": "64KiB"}, reads={"chunk_bytes": "4KiB", "threads": 4})
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        stream = load.batches()
        batch = await anext(stream)
        await until(lambda: pool_of(service).waiting == 1 and load._run.progress.read_bytes > 0)
        assert pool_of(service).out_bytes <= 64 << 10
        batch.release()
        async for batch in stream:
            batch.release()
    assert load.report.peak_staging_bytes <= 64 << 10


async def test_owned_tensors_are_not_read_ahead_beyond_the_capacity(checkpoint: Checkpoint) -> None:
    capacity = 400_000  # more than the largest tensor but one, less than all
    storage = FakeStorage(LocalStorage())
    config = checkpoint.config(staging={"capacity_bytes": capacity}, reads={"chunk_bytes": "4KiB", "threads": 4})
    async with ls.LoaderService(config, "solo", storage=storage) as service, service.open("target") as load:
        stream = aiter(load)
        _, first = await anext(stream)
        await until(lambda: pool_of(service).waiting == 1 and storage.in_flight == 0)  # it waits for the consumer
        assert load.report.read_bytes - first.nbytes <= capacity
        assert len([name async for name, _ in stream]) == len(checkpoint.tensors) - 1


async def test_queued_reads_never_run_after_leaving(checkpoint: Checkpoint) -> None:
    storage = FakeStorage(LocalStorage())
    config = checkpoint.config(reads={"chunk_bytes": "64KiB", "threads": 1, **BUFFERED})
    async with ls.LoaderService(config, "solo", storage=storage) as service:
        await service.plan("target")
        before = len(storage.reads)
        gate = storage.block("*")
        load = await service.open("target").__aenter__()
        stream = load.batches()
        await asyncio.to_thread(gate.reached.wait, 20)
        leaving = asyncio.create_task(load.__aexit__(None, None, None))
        reading = load._run._reading
        assert reading is not None
        scheduler = reading._scheduler
        assert scheduler is not None
        await until(lambda: scheduler._failed)  # leaving has begun, and waits for the read in flight
        gate.release()
        await leaving
        assert len(storage.reads) == before + 1
        with pytest.raises(ls.StateError, match="was left"):
            await anext(stream)


async def test_a_read_that_never_returns_fails_the_load_and_is_left_behind(checkpoint: Checkpoint) -> None:
    storage = FakeStorage(LocalStorage())
    config = checkpoint.config(
        staging={"capacity_bytes": "64KiB"},
        reads={"chunk_bytes": "16KiB", "threads": 2, "stuck_after_s": 2, **BUFFERED},
        agreement={"grace_s": 1},
    )
    async with ls.LoaderService(config, "solo", storage=storage) as service:
        await service.plan("target")
        gate = storage.block("*", nth=2)
        with pytest.raises(ls.ReadError, match="has not returned") as caught:
            async with service.open("target") as load:
                async for batch in load.batches():
                    batch.release()
        assert caught.value.path is not None
        assert caught.value.path.endswith(".safetensors")
        assert caught.value.tensor is not None
        assert "offset" in str(caught.value)
        assert pool_of(service).abandoned_bytes > 0, "the buffer of the stuck read is never used again"
        await assert_next_load_is_whole(service, checkpoint)
        gate.release()


async def test_a_header_read_that_never_returns_is_given_up_and_read_again(checkpoint: Checkpoint) -> None:
    storage = FakeStorage(LocalStorage())
    gate = storage.block("*-00002-of-*")
    config = checkpoint.config(reads={"stuck_after_s": 2}, agreement={"grace_s": 1})
    async with ls.LoaderService(config, "solo", storage=storage) as service:
        async with service.open("target") as load:
            pass
        assert "headers" in " ".join(load.report.fallbacks)
        gate.release()


async def test_a_listing_that_never_returns_fails_the_load(checkpoint: Checkpoint) -> None:
    storage = FakeStorage(LocalStorage())
    gates = [storage.block("*", operation="list"), storage.block("*", operation="list", nth=1)]
    config = checkpoint.config(reads={"stuck_after_s": 2}, agreement={"grace_s": 1})
    async with ls.LoaderService(config, "solo", storage=storage) as service:
        with pytest.raises(ls.ReadError, match=r"looking at .* has not returned"):
            async with service.open("target"):
                pass
        for gate in gates:
            gate.release()


async def test_a_plan_that_is_asked_for_while_a_load_is_entered_shares_its_catalog(checkpoint: Checkpoint) -> None:
    storage = FakeStorage(LocalStorage())
    async with ls.LoaderService(checkpoint.config(), "solo", storage=storage) as service:
        gate = storage.block("*-00002-of-*")
        asked = asyncio.create_task(service.plan("target"))
        await asyncio.to_thread(gate.reached.wait, 20)
        entering = asyncio.create_task(service.open("target").__aenter__())
        await asyncio.sleep(0)
        gate.release()
        plan, load = await asked, await entering
        assert load.plan.catalog is plan.catalog
        assert load.plan.digest == plan.digest
        assert storage.opens("*-00001-of-*") == 1


async def test_header_reads_that_never_return_fail_the_load(checkpoint: Checkpoint) -> None:
    storage = FakeStorage(LocalStorage())
    gates = [storage.block("*-00002-of-*"), storage.block("*-00002-of-*", nth=1)]
    config = checkpoint.config(reads={"stuck_after_s": 2}, agreement={"grace_s": 1})
    async with ls.LoaderService(config, "solo", storage=storage) as service:
        with pytest.raises(ls.ReadError, match="the read of its header has not returned") as caught:
            async with service.open("target"):
                pass
        assert caught.value.path is not None
        assert caught.value.path.endswith("00002-of-00002.safetensors")
        for gate in gates:
            gate.release()
