"""A consumer in a process of its own, for signals: reads stand still in the kernel, it says so, and waits to be ended.

Arguments: config (YAML path), face (asyncio, uvloop, blocking), whether the read comes back when asked to stop.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading

import uvloop

import loader_service as ls
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage


def announce(storage: FakeStorage, *, comes_back: bool) -> None:
    gate = storage.block("*.safetensors", nth=4)

    def watch() -> None:
        gate.reached.wait()
        print("reading", flush=True)
        if comes_back:
            sys.stdin.readline()
            gate.release()

    threading.Thread(target=watch, daemon=True).start()


async def consume(config: ls.ServiceConfig, storage: FakeStorage) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with ls.LoaderService(config, "solo", storage=storage) as service, service.open("target") as load:
        async for _ in load:
            pass


def consume_blocking(config: ls.ServiceConfig, storage: FakeStorage) -> None:
    def terminate(*_: object) -> None:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, terminate)
    with ls.LoaderService.blocking(config, "solo", storage=storage) as service:
        for _ in service.iter_weights("target"):
            pass


def main() -> None:
    config, face, comes_back = ls.load_config(sys.argv[1]), sys.argv[2], sys.argv[3] == "returns"
    storage = FakeStorage(LocalStorage())
    announce(storage, comes_back=comes_back)
    try:
        if face == "blocking":
            consume_blocking(config, storage)
        elif face == "uvloop":
            uvloop.run(consume(config, storage))
        else:
            asyncio.run(consume(config, storage))
    finally:
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("loader-")]
        for thread in threads:
            thread.join(5 if comes_back else 0.5)
        left = [thread.name for thread in threads if thread.is_alive()]
        print("left", sorted(left), "in flight", storage.in_flight, flush=True)


if __name__ == "__main__":
    main()
