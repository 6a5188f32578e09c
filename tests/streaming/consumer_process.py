"""A consumer in a process of its own, for signals: a read stands still in the kernel, it says so, and waits."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import threading
import traceback
from multiprocessing.connection import Connection

import uvloop

import loader_service as ls
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage

TERMINATED = 128 + signal.SIGTERM


def announce(storage: FakeStorage, pipe: Connection, *, comes_back: bool) -> None:
    gate = storage.block("*.safetensors", nth=4)

    def watch() -> None:
        gate.reached.wait()
        pipe.send("reading")
        if comes_back:
            pipe.recv()
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
        raise SystemExit(TERMINATED)

    signal.signal(signal.SIGTERM, terminate)
    with ls.LoaderService.blocking(config, "solo", storage=storage) as service:
        for _ in service.iter_weights("target"):
            pass


def main(pipe: Connection, stderr: str, config_path: str, face: str, comes_back: bool) -> None:
    """`comes_back`: whether the read does when it is told to. The process ends as an interpreter that ran a program."""
    gc.freeze()
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        load(pipe, config_path, face, comes_back=comes_back)
        code = 0
    except SystemExit:
        code = TERMINATED
    except BaseException:
        traceback.print_exc()
        code = 1
    ctypes.pythonapi.Py_Exit(code)


def load(pipe: Connection, config_path: str, face: str, *, comes_back: bool) -> None:
    config, storage = ls.load_config(config_path), FakeStorage(LocalStorage())
    announce(storage, pipe, comes_back=comes_back)
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
        left = sorted(thread.name for thread in threads if thread.is_alive())
        pipe.send((left, storage.in_flight))
