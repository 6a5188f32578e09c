"""Workers beside a service that is none, is stuck, or hands over what cannot be had: they read, and say why."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import loader_service as ls
from loader_service.config.schema import ServiceConfig
from loader_service.errors import MemoryLimitError
from loader_service.keeping import attachment, wire
from loader_service.memory.shared import SharedMemory
from tests.keeping.making import config_of, storage
from tests.support.checkpoints import Checkpoint, assert_same, awkward_checkpoint

NOBODY_GETS_ON_S = 60.0


@pytest.fixture
def small(tmp_path: Path) -> Checkpoint:
    return awkward_checkpoint(tmp_path / "checkpoint", columns=70)


@contextlib.contextmanager
def answering(config: ServiceConfig, answers: Sequence[bytes], *, every_s: float = 0.0) -> Iterator[None]:
    """What looks like a service, and gives these answers to the first that comes."""
    listening = wire.listen(wire.address_of(config, 0))
    listening.settimeout(NOBODY_GETS_ON_S)

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(wire.MOST_BYTES)
            for answer in answers:
                connection.send(answer)
                time.sleep(every_s)

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        yield
    finally:
        serving.join()
        listening.close()


async def loaded(service: ls.LoaderService, checkpoint: Checkpoint) -> ls.LoadReport:
    """Loads everything, looks at every byte."""
    async with service.open("target") as load:
        found = {name: tensor async for name, tensor in load}
    assert found.keys() == checkpoint.tensors.keys()
    for name, tensor in found.items():
        assert_same(tensor, checkpoint.tensor(name))
    return load.report


def ready(**facts: object) -> bytes:
    return json.dumps({"state": "ready", **facts}).encode()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (ready(), "is it one of this loader's?"),
        (ready(services="two", index_bytes=5, descriptors=0), "is it one of this loader's?"),
        (ready(services=1, index_bytes=5, descriptors=0), "was lost on the way"),
        (b"[" * 50_000, "does not attach this worker"),
        (b"\xff\xfe", "does not attach this worker"),
    ],
)
async def test_what_is_no_service_is_done_without(small: Checkpoint, answer: bytes, says: str) -> None:
    config = config_of(small, serve={"keep": ["target"]})
    with answering(config, [answer]):
        async with ls.LoaderService(config, "solo", attach=True) as worker:
            report = await loaded(worker, small)
    assert report.read_bytes >= small.payload_bytes
    assert says in report.policies["service"].reason


async def test_a_service_that_is_not_ready_for_long_is_not_a_stuck_read(small: Checkpoint) -> None:
    """It says the same all the time, as one that waits for the services of other nodes."""
    config = config_of(small, serve={"keep": ["target"]}, reads={"chunk_bytes": "64KiB", "stuck_after_s": 2})
    waiting = b'{"state":"waiting","progress":"the same"}'
    with answering(config, [waiting] * 8, every_s=0.4):
        async with ls.LoaderService(config, "solo", attach=True) as worker:
            report = await loaded(worker, small)
    assert report.policies["service"].effective == "read"  # since it has ended, and not before


async def test_a_stuck_service_whom_many_wait_for(small: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment, "_ANSWER_S", 0.3)
    config = config_of(small, serve={"keep": ["target"]})
    with contextlib.ExitStack() as held:
        listening = held.enter_context(wire.listen(wire.address_of(config, 0)))
        listening.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                knocking = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                knocking.setblocking(False)
                knocking.connect(wire.address_of(config, 0))
        async with ls.LoaderService(config, "solo", attach=True) as worker:
            report = await loaded(worker, small)
    assert "has taken nobody for 0.3 s: it is stuck" in report.policies["service"].reason


async def test_a_worker_with_more_open_files_than_select_knows(small: Checkpoint) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    config = config_of(small, serve={"keep": ["target"]})
    try:
        async with ls.ResidentService(config, "solo") as service:
            await service.fill()
            with contextlib.ExitStack() as held:
                null = os.open(os.devnull, os.O_RDONLY)
                held.callback(os.close, null)
                while (more := os.dup(null)) < 1024:
                    held.callback(os.close, more)
                held.callback(os.close, more)
                async with ls.LoaderService(config, "solo", attach=True) as worker:
                    assert (await loaded(worker, small)).read_bytes == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("if_absent", ["read", "error"])
async def test_no_room_for_what_is_kept(small: Checkpoint, monkeypatch: pytest.MonkeyPatch, if_absent: str) -> None:
    """Attached, and then there are not addresses enough for the load."""
    config = config_of(small, serve={"keep": ["target"], "if_absent": if_absent})
    async with ls.ResidentService(config, "solo") as service:
        await service.fill()
        async with ls.LoaderService(config, "solo", attach=True) as worker:
            await loaded(worker, small)

            def refused(memory: SharedMemory) -> None:
                raise MemoryLimitError(f"no room for {memory.nbytes} bytes")

            monkeypatch.setattr(SharedMemory, "map_private", refused)
            if if_absent == "error":
                with pytest.raises(ls.MemoryLimitError, match="no room"):
                    await loaded(worker, small)
            else:
                report = await loaded(worker, small)
                assert report.read_bytes >= small.payload_bytes
                assert "no room" in report.policies["service"].reason


async def test_a_file_that_was_written_to_and_made_look_old(small: Checkpoint) -> None:
    """Between two loads of one worker, which reads headers only once: size and times are what they were."""
    config = config_of(small, serve={"keep": ["target"]})
    path = small.folder / small.shard_of["big.weight"]
    async with ls.ResidentService(config, "solo") as service:
        await service.fill()
        async with ls.LoaderService(config, "solo", attach=True) as worker:
            assert (await loaded(worker, small)).read_bytes == 0
            times = path.stat()
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 1]))
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            async with worker.open("target") as load:
                found = {name: tensor async for name, tensor in load}
    changed = [name for name in found if not torch.equal(_bytes_of(found[name]), _bytes_of(small.tensor(name)))]
    assert len(changed) == 1
    assert load.report.policies["service"].effective == "partly kept"


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


async def test_what_a_service_kept_ends_with_it(small: Checkpoint) -> None:
    """Also in a worker that goes on: a service that starts anew may need the memory."""
    config = config_of(small, serve={"keep": ["target"]})
    gc.collect()
    before = len(_kept_here())
    gc.disable()
    try:
        async with ls.LoaderService(config, "solo", storage=storage(), attach=True) as worker:
            async with ls.ResidentService(config, "solo") as service:
                await service.fill()
                await loaded(worker, small)
                assert len(_kept_here()) > before
            async with asyncio.timeout(NOBODY_GETS_ON_S):
                while len(_kept_here()) > before:  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.05)
    finally:
        gc.enable()


def _kept_here() -> list[str]:
    """Mappings and descriptors of kept memory in this process."""
    with open("/proc/self/maps") as file:
        found = [line for line in file if "memfd:loader-service" in line]
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [each for each in found if "memfd:loader-service" in each]
