"""A load as a mapping: names from the start, tensors as they come, memory back as soon as they are consumed."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import loader_service as ls
from loader_service.integrations.splits import refuse_splits
from loader_service.integrations.weights import ConsumableWeights, Weights
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from tests.e2e.seats import WATCHDOG_S, payload_bytes_read
from tests.support.checkpoints import Checkpoint, assert_same, awkward_checkpoint, write_checkpoint
from tests.support.ranks import Rank, run_ranks

MIB = 1 << 20
PATIENT = {"agreement": {"grace_s": 100}}  # waits for reads in flight
# Buffered: what is read when differs where a file is not in the page cache any more.
SMALL: dict[str, Any] = {
    "reads": {"chunk_bytes": "64KiB", "access": "buffered"},
    "staging": {"capacity_bytes": "512KiB"},
}


@pytest.fixture(scope="module")
def awkward(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return awkward_checkpoint(tmp_path_factory.mktemp("awkward"))


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Twelve layers of two tensors of 1 MiB, each with memory of its own, and a norm."""
    names = [f"model.layers.{i:d}.{part}.weight" for i in range(12) for part in ("down", "up")]
    tensors = dict.fromkeys(names, ("F32", (512, 512))) | {"model.norm": ("F32", (8,))}
    return write_checkpoint(tmp_path_factory.mktemp("layers"), {"model.safetensors": tensors})


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def opened(checkpoint: Checkpoint, load: dict[str, object] | None = None, **options: Any) -> ConsumableWeights:
    sections = {**SMALL, **options.pop("sections", {})}
    return ConsumableWeights(checkpoint.config(load, **sections), "target", "solo", **options)


def result(future: Future[Any]) -> Any:
    return future.result(WATCHDOG_S)


def when_waiting(weights: ConsumableWeights, count: int) -> None:
    """Returns once so many different names are waited for."""
    stream, until = weights._stream, time.monotonic() + WATCHDOG_S
    while time.monotonic() < until:
        with stream._changed:
            if len(stream._wanted) >= count:
                return
    raise AssertionError(f"{len(stream._wanted)} names are waited for")


def test_many_threads_get_every_tensor_whatever_they_ask_for_first(
    awkward: Checkpoint, pool: ThreadPoolExecutor
) -> None:
    with opened(awkward) as weights:
        assert list(weights) == list(awkward.tensors)
        assert len(weights) == len(awkward.tensors)
        names = list(awkward.tensors) * 2
        random.Random(5).shuffle(names)
        for name, tensor in zip(names, pool.map(weights.__getitem__, names), strict=True):
            assert_same(tensor, awkward.tensor(name), name)
        assert weights.held_bytes == awkward.payload_bytes
    assert weights.report.complete
    assert weights.report.payload_bytes == awkward.payload_bytes


def test_items_come_in_plan_order_and_leave_out_what_others_consume(awkward: Checkpoint) -> None:
    with opened(awkward) as weights:
        found = []
        for name, tensor in weights.items():
            assert_same(tensor, awkward.tensor(name), name)
            found.append(name)
            del weights[name]
            if name == "scale":
                assert weights.mark_consumed("layers") == 40
    assert found == [name for name in awkward.tensors if not name.startswith("layers.")]


CONSUMED: dict[str, Callable[[Weights, str], object]] = {
    "del": lambda weights, name: weights.__delitem__(name),
    "mark_consumed": lambda weights, name: weights.mark_consumed(name),
    "the prefix": lambda weights, name: weights.mark_consumed(name.rpartition(".")[0]),
    "a view": lambda weights, name: weights.under("model.layers").mark_consumed(name.removeprefix("model.layers.")),
    "clearing a view": lambda weights, name: weights.under(name.rpartition(".")[0]).clear(),
    "clear": lambda weights, name: weights.clear(),
}


@pytest.mark.parametrize("way", CONSUMED)
def test_what_is_consumed_is_free_at_once(layers: Checkpoint, way: str) -> None:
    name = "model.layers.0.down.weight"
    with opened(layers) as weights:
        gone = threading.Event()
        weakref.finalize(weights[name], gone.set)
        assert weights.held_bytes == MIB
        assert not gone.is_set()
        CONSUMED[way](weights, name)
        assert gone.is_set()  # nothing else refers to it, and nothing needs the garbage collector
        assert weights.held_bytes == 0
        assert name not in weights
        with pytest.raises(KeyError, match="is consumed"):
            weights[name]


def test_what_is_popped_is_the_callers_alone(layers: Checkpoint) -> None:
    with opened(layers) as weights:
        tensor = weights.pop("model.layers.0.down.weight")
        assert (weights.held_bytes, len(weights)) == (0, 24)
        gone = threading.Event()
        weakref.finalize(tensor, gone.set)
        del tensor
        assert gone.is_set()
        assert weights.pop("no.such", None) is None


def test_only_what_is_asked_for_comes_and_no_more_is_read_ahead_than_staging_holds(layers: Checkpoint) -> None:
    storage = FakeStorage(LocalStorage())
    header = 8 + int.from_bytes((layers.folder / "model.safetensors").read_bytes()[:8], "little")
    with opened(layers, storage=storage) as weights:
        assert weights.held_bytes == 0
        for i in range(12):
            for part in ("up", "down"):  # in another order than they lie in
                weights[f"model.layers.{i}.{part}.weight"]
            assert weights.held_bytes == 2 * MIB
            assert storage.bytes_read() <= 2 * MIB * (i + 1) + 2 * MIB + 512 * 1024 + 4 * header
            assert weights.mark_consumed(f"model.layers.{i}") == 2
        assert list(weights) == ["model.norm"]
    assert not weights.report.complete


def test_a_view_has_the_names_of_whole_segments_without_the_prefix(layers: Checkpoint) -> None:
    with opened(layers) as weights:
        for prefix in ("model.layers.1", "model.layers.1."):
            assert list(weights.under(prefix)) == ["down.weight", "up.weight"]
        view = weights.under("model").under("layers.1")
        assert (len(view), "up.weight" in view, "0.up.weight" in view) == (2, True, False)
        assert_same(view["up.weight"], layers.tensor("model.layers.1.up.weight"))
        assert [name for name, _ in view.items()] == ["down.weight", "up.weight"]
        assert [tensor.shape for tensor in view.values()] == [(512, 512)] * 2
        del view["up.weight"]
        assert list(weights.under("model.layers.1")) == ["down.weight"]
        assert "model.layers.10.up.weight" in weights
        with pytest.raises(KeyError, match=r"'model\.layers\.1\.side'"):
            view["side"]


def test_a_value_of_the_callers_takes_the_place_of_the_loads(layers: Checkpoint) -> None:
    mine = torch.ones(3)
    with opened(layers) as weights:
        weights["model.layers.0.up.weight"] = mine
        weights.under("model")["extra"] = mine
        weights["model.norm"]  # all has come
        assert weights["model.layers.0.up.weight"] is mine
        assert weights["model.extra"] is mine
        assert weights.mark_consumed("model.extra") == 1
        weights["model.extra"] = mine
        assert list(weights.under("model"))[-2:] == ["norm", "extra"]


def test_what_nobody_can_ask_for_any_more_is_not_read(layers: Checkpoint) -> None:
    storage = FakeStorage(LocalStorage())
    with opened(layers, storage=storage) as weights:
        weights["model.layers.0.down.weight"]
        weights.clear()
        weights._stream._thread.join(WATCHDOG_S)
        assert weights._stream.over
    assert not weights.report.complete
    assert storage.bytes_read() < layers.payload_bytes / 4


def test_an_error_reaches_every_thread_that_waits_or_asks_later(layers: Checkpoint, pool: ThreadPoolExecutor) -> None:
    storage = FakeStorage(LocalStorage())
    gate = storage.block("*", nth=0, within=(12 * MIB, 13 * MIB), times=1)
    storage.fail("*", errno.EIO, within=(13 * MIB, 14 * MIB), times=None)
    weights = opened(layers, storage=storage)
    waiting = [pool.submit(weights.__getitem__, f"model.layers.{i}.up.weight") for i in (7, 8, 11)]
    when_waiting(weights, 3)
    gate.release()
    for future in waiting:
        with pytest.raises(ls.ReadError, match="Input/output error"):
            result(future)
    for late in (lambda: weights["model.norm"], weights.close):
        with pytest.raises(ls.ReadError):
            late()


def test_leaving_in_the_middle_is_a_break_and_wakes_who_waits(layers: Checkpoint, pool: ThreadPoolExecutor) -> None:
    storage = FakeStorage(LocalStorage())
    gate = storage.block("*", within=(12 * MIB, 13 * MIB))
    with opened(layers, storage=storage, sections=PATIENT) as weights:
        first = weights["model.layers.0.down.weight"]
        waiting = [pool.submit(weights.__getitem__, name) for name in ("model.norm", "model.layers.11.up.weight")]
        when_waiting(weights, 2)
        leaving = pool.submit(weights.close)
        for future in waiting:
            with pytest.raises(ls.StateError, match="was left before"):
                result(future)
        assert not leaving.done()  # the read in flight
        gate.release()
        result(leaving)
    assert not weights.report.complete
    assert_same(first, layers.tensor("model.layers.0.down.weight"))
    assert_same(weights["model.layers.0.down.weight"], first)  # what has come stays
    with pytest.raises(ls.StateError):
        weights["model.norm"]


def test_dropping_the_mapping_leaves_the_load_and_the_next_one_begins_after_it(
    layers: Checkpoint, pool: ThreadPoolExecutor
) -> None:
    storage = FakeStorage(LocalStorage())
    gate = storage.block("*", within=(MIB + 65536, 2 * MIB))
    weights = opened(layers, storage=storage, sections=PATIENT)
    view = weights.under("model")
    stream = weights._stream
    del weights
    view["layers.0.down.weight"]  # a view keeps it
    assert gate.reached.wait(WATCHDOG_S)
    del view
    gc.collect()
    beginning = pool.submit(opened, layers)
    with pytest.raises(TimeoutError):
        beginning.result(0.2)
    gate.release()
    with result(beginning) as again:
        assert stream.over
        assert stream.error is None
        assert len(again) == 25


def test_an_interrupt_while_the_load_opens_ends_the_opening(layers: Checkpoint) -> None:
    storage = FakeStorage(LocalStorage())
    gate = storage.block("*", nth=0)
    threads: list[threading.Thread] = []
    main = threading.get_ident()

    def interrupt() -> None:
        assert gate.reached.wait(WATCHDOG_S)
        threads.extend(thread for thread in threading.enumerate() if thread.name == "loader-weights-target")
        signal.pthread_kill(main, signal.SIGINT)

    timer = threading.Timer(0, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        opened(layers, storage=storage)
    gate.release()
    timer.join()
    (thread,) = threads
    thread.join(WATCHDOG_S)
    assert not thread.is_alive()


def test_a_check_refuses_before_anything_is_read(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, {"model.safetensors": {"up": ("F32", (4, 4))}})
    config = checkpoint.config({"rules": [{"match": "up", "split": {"axis": "tp", "dim": 0}}]}, mesh={"tp": 2})
    storage = FakeStorage(LocalStorage())
    with pytest.raises(ls.ConfigError, match=r"'up' is cut by .*it takes whole tensors"):
        ConsumableWeights(
            config, "target", "solo", {"tp": 1}, check=lambda load, r: refuse_splits(load, r, "it"), storage=storage
        )
    assert payload_bytes_read(storage) == 0


def test_a_row_source_lives_until_it_is_consumed(layers: Checkpoint) -> None:
    load: dict[str, object] = {"rules": [{"match": "model.norm", "host_resident": {"layout": "per_rank"}}]}
    with opened(layers, load) as weights:
        source = weights["model.norm"]
        assert isinstance(source, ls.RowSource)
        for name in list(weights)[:-1]:
            del weights[name]
        weights._stream._thread.join(0.2)  # time enough for one that does not wait for it
        assert not weights._stream.over
        rows = torch.empty(8)
        source.read_rows_into(rows, 0)
        assert_same(rows, layers.tensor("model.norm"))
        del weights["model.norm"]
        weights._stream._thread.join(WATCHDOG_S)
        assert weights._stream.over


def test_the_weight_cache_is_not_handed_out(layers: Checkpoint) -> None:
    sections = {"cache": {"capacity_bytes": "64MiB"}}
    try:
        with opened(layers, sections=sections) as weights:
            for tensor in weights.values():
                tensor.zero_()
        with opened(layers, sections=sections) as weights:
            assert_same(weights["model.layers.0.up.weight"], layers.tensor("model.layers.0.up.weight"))
        assert weights.report.read_bytes == 0
    finally:
        ls.clear_weight_cache()


# Two processes


def _first_and_last(rank: Rank, config: ls.ServiceConfig) -> tuple[str, bool]:
    """Rank 0 wants the last tensor. Rank 1 wants the first, and then waits for rank 0 without asking for more: what it
    does not take lies in memory of the node that rank 0 needs."""
    import torch.distributed as dist

    rank.init_process_group()
    with ConsumableWeights(config, "target") as weights:
        names = list(weights)
        tensor = weights[names[0] if rank.rank else names[-1]]
        dist.barrier()
        total = float(tensor.double().sum())
    report = weights.report
    dist.destroy_process_group()
    return f"{total}", report.policies["sharing"].effective == "staging"


def test_a_rank_that_asks_for_no_more_does_not_keep_others_waiting(tmp_path: Path) -> None:
    checkpoint = awkward_checkpoint(tmp_path)
    config = checkpoint.config(None, reads={"chunk_bytes": "64KiB", "sharing": "staging"}, staging=SMALL["staging"])
    first, last = (checkpoint.tensor(name) for name in ("embed.weight", "experts"))
    outcomes = run_ranks(_first_and_last, 2, config)
    assert [outcome.get()[1] for outcome in outcomes] == [True, True]
    assert first.dtype == last.dtype


class _Broken(Exception):
    pass


def _fails_on_rank_1(rank: Rank, config: ls.ServiceConfig) -> str:
    meeting = ls.Rendezvous(rank.address, rank.rank, rank.world_size, "broken")
    weights = ConsumableWeights(config, "target", meeting)
    if rank.rank == 1:
        with pytest.raises(_Broken) as own, weights:
            weights["model.layers.0.up.weight"]
            raise _Broken("the engine's own")
        return "\n".join(own.value.__notes__)
    with pytest.raises(ls.RankFailure) as failure, weights:
        weights._stream._thread.join(WATCHDOG_S)  # it hears of it although nobody asks
        weights["model.norm"]
    assert failure.value.rank == 1
    return str(failure.value)


def test_an_error_of_the_body_fails_the_load_on_all_ranks(layers: Checkpoint) -> None:
    outcomes = run_ranks(_fails_on_rank_1, 2, layers.config(None, **SMALL))
    told, notes = (outcome.get() for outcome in outcomes)
    assert "the engine's own" in told
    assert "verdict of all ranks" in notes


_HALF_TAKEN = """
import atexit, sys, threading

def left():
    print([thread.name for thread in threading.enumerate() if thread.name.startswith("loader-weights")])

atexit.register(left)  # before the loader's own, and so called after them
import loader_service as ls
from loader_service.integrations import weight_stream
from loader_service.integrations.weights import ConsumableWeights

weight_stream._EXIT_S = 60
weights = ConsumableWeights(ls.load_config(sys.argv[1]), "target", "solo")
weights[next(iter(weights))]
"""


def test_a_process_that_ends_with_weights_half_taken_ends_their_load_before_the_interpreter(
    layers: Checkpoint, tmp_path: Path
) -> None:
    """Its thread would be at work while the interpreter is taken down, which crashes now and then."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"checkpoint": {"path": str(layers.folder)}, "loads": {"target": {}}, **SMALL}))
    command = [sys.executable, "-c", _HALF_TAKEN, str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def _asks_in_a_child(rank: Rank, config: ls.ServiceConfig) -> str:
    with ConsumableWeights(config, "target", "solo") as weights:
        first, *_, last = weights
        weights[first]
        ours, theirs = os.pipe()
        if os.fork() == 0:
            try:
                weights[last]
            except ls.StateError as error:
                os.write(theirs, str(error).encode())
            os._exit(0)
        os.close(theirs)
        with open(ours) as told:
            text = told.read()
        os.wait()
        weights[last]
        return text


def test_a_forked_child_hears_that_nothing_comes_there(layers: Checkpoint) -> None:
    (outcome,) = run_ranks(_asks_in_a_child, 1, layers.config(**SMALL))
    assert "was opened before a fork" in outcome.get()
