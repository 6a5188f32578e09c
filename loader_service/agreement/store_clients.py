"""Clients of a torch.distributed store: one connection a thread, kept for later sessions, never the caller's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, cast


class Store(Protocol):
    """The part of torch.distributed's `Store` that is used. `compare_set` returns what stands afterwards; `clone` a
    client with a connection of its own."""

    def set(self, key: str, value: str | bytes) -> None: ...

    def get(self, key: str) -> bytes: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...

    def check(self, keys: list[str]) -> bool: ...

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...

    def delete_key(self, key: str) -> bool: ...

    def clone(self) -> Store: ...


class ClientPool:
    """Idle clients of one store. `connect` gives the store to clone and may block.

    Connections are reused because the store's server may look up the name of each peer, one after the other: with a
    slow name server a connection has been seen to hold up all ranks for 5 s.
    """

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._idle: list[Store] = []

    def borrow(self) -> Store:
        """A client for one thread alone. Blocks while the store is not there: call it in a thread that may be left."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._connect().clone()

    def give_back(self, client: Store) -> None:
        with self._lock:
            self._idle.append(client)

    def drop(self) -> None:
        """Closes the idle connections."""
        with self._lock:
            self._idle.clear()


class Meeting:
    """One service's place in a store. The store counts the services of each rank under `prefix`, so that ranks that
    open their services in one order meet in the same one, also after a process was restarted.

    A rank can miss one: it failed before it met the others, who gave it up. So it never joins one that is older than
    the newest that any rank has begun, and the next time all of them meet again.
    """

    def __init__(self, pool: ClientPool, prefix: str, rank: int, *, keep: bool) -> None:
        self.pool = pool
        self._prefix = prefix
        self._rank = rank
        self._keep = keep
        self._lock = threading.Lock()
        self._service: int | None = None

    def session(self, client: Store, session: int) -> Callable[[Store], Store]:
        """What turns a client into one that sees only the keys of this service's session number `session`. Blocks."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but not in its __all__

        with self._lock:
            if self._service is None:
                self._service = self._next_service(client)
        prefix = f"{self._prefix}/{self._service}/{session}"
        return lambda store: cast(Store, PrefixStore(prefix, store))  # type: ignore[arg-type]

    def _next_service(self, client: Store) -> int:
        own, newest = f"{self._prefix}/services/{self._rank}", f"{self._prefix}/services/newest"
        number = client.add(own, 1)
        known = ""
        while int(known or 0) < number:
            stands = bytes(client.compare_set(newest, known, str(number))).decode()
            known = stands or known
        if int(known) > number:
            number = client.add(own, int(known) - number)
        return number

    def close(self) -> None:
        """Drops the connections, unless later services meet in the same store (`keep`)."""
        if not self._keep:
            self.pool.drop()


_stores: dict[tuple[str, int], Store] = {}
_pools: dict[tuple[str, int], ClientPool] = {}
_lock = threading.Lock()


def pool_at(host: str, port: int, *, serves: bool, timeout_s: float) -> ClientPool:
    """This process's clients of the store at an address, and on the serving rank its server.

    Both live as long as the process, so that the next service finds the same store, with its counts. Connects nothing.
    """

    def connect() -> Store:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

        with _lock:
            if (store := _stores.get((host, port))) is not None:
                return store
        made = TCPStore(
            host,
            port,
            None,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=serves,
        )
        with _lock:
            return _stores.setdefault((host, port), cast(Store, made))

    with _lock:
        return _pools.setdefault((host, port), ClientPool(connect))
