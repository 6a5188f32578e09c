"""What the loader does about devices, seen where there is none: streams and events that tests control."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

import loader_service as ls
from tests.support.checkpoints import Checkpoint, assert_same, awkward_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return awkward_checkpoint(tmp_path_factory.mktemp("awkward"))


def test_a_batch_whose_event_cannot_be_recorded_is_written_off(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device may still read the batch, and cannot say until when: the error is raised, the memory never reused."""
    config = checkpoint.config(staging={"capacity_bytes": "64KiB"}, reads={"chunk_bytes": "16KiB"})

    def record() -> None:
        raise RuntimeError("device lost")

    pools = []
    with ls.LoaderService.blocking(config, "solo") as service:
        with pytest.raises(RuntimeError, match="device lost"), service.open("target") as load:
            pools.append(service._opened()[1]._pool)
            batch = next(load.batches())
            monkeypatch.setattr("loader_service.stream.current_device_event", record)
            with batch:
                pass
        batch.release()  # a second time without effect
    pool = pools[0]
    assert pool is not None
    found = pool.statistics()
    assert (found.leases_out, found.leases_held) == (0, 0)
    assert found.abandoned_bytes == pool.slot_bytes
    assert len(pool._kept) == 1, "nothing else keeps the memory from the system while the device may read it"


class Streams:
    """Stands for torch.cuda's contexts: which device and stream a thread has entered, and for what it did so."""

    def __init__(self) -> None:
        self.entered: list[tuple[str, object]] = []

    @contextlib.contextmanager
    def device(self, device: object) -> Iterator[None]:
        self.entered.append((threading.current_thread().name, device))
        yield

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.entered.append((threading.current_thread().name, stream))
        yield


class Stream:
    device = torch.device("cuda:5")


async def test_copies_of_into_are_queued_on_the_callers_stream(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, streams, asked_on = Stream(), Streams(), []

    def current_streams(devices: object) -> dict[torch.device, Stream]:
        asked_on.append(threading.current_thread())
        return {torch.device("cpu"): stream}

    monkeypatch.setattr("loader_service.stream.current_streams", current_streams)
    monkeypatch.setattr(torch.cuda, "device", streams.device)
    monkeypatch.setattr(torch.cuda, "stream", streams.stream)
    params = {"big.weight": torch.zeros(700, 640).t()}
    async with ls.LoaderService(checkpoint.config(), "solo") as service, service.open("target") as load:
        await load.into(params)
    assert_same(params["big.weight"], checkpoint.tensor("big.weight"))
    assert asked_on == [threading.current_thread()]
    assert {what for _, what in streams.entered} == {stream, Stream.device}
    assert all(thread.startswith("loader-read") for thread, _ in streams.entered)
    devices_first = [what is Stream.device for _, what in streams.entered]
    assert devices_first[0], "leaving a stream puts back the device that was current when it was entered"


async def test_into_of_memory_on_no_device_enters_no_stream(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "device", streams.device)
    monkeypatch.setattr(torch.cuda, "stream", streams.stream)
    params = {"big.weight": torch.zeros(700, 640).t()}
    async with ls.LoaderService(checkpoint.config(), "solo") as service, service.open("target") as load:
        await load.into(params)
    assert_same(params["big.weight"], checkpoint.tensor("big.weight"))
    assert streams.entered == []
