"""As much of ray's interface as the documents' example uses: actors are processes that take messages."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

_fork = multiprocessing.get_context("fork")  # no thread runs yet where the example makes its actors
util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")


def _serve(kind: type, pipe: Connection) -> None:
    actor = kind()
    while True:
        method, args = pipe.recv()
        pipe.send(getattr(actor, method)(*args))


class _Method:
    def __init__(self, pipe: Connection, name: str) -> None:
        self._pipe = pipe
        self._name = name

    def remote(self, *args: object) -> Connection:
        self._pipe.send((self._name, args))
        return self._pipe


class _Handle:
    def __init__(self, kind: type) -> None:
        self._pipe, theirs = _fork.Pipe()
        _fork.Process(target=_serve, args=(kind, theirs), daemon=True).start()

    def __getattr__(self, name: str) -> _Method:
        return _Method(self._pipe, name)


def remote(kind: type) -> SimpleNamespace:
    return SimpleNamespace(remote=lambda: _Handle(kind))


def get(waiting: Any) -> Any:
    return [pipe.recv() for pipe in waiting] if isinstance(waiting, list) else waiting.recv()
