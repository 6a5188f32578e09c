"""Clients of a torch.distributed store: one connection a thread, kept for later sessions, never the caller's own."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Literal, Protocol, TypeAlias, cast

from loader_service.agreement.codec import decode_entry
from loader_service.agreement.messages import MessageError, Verdict, entry_key

_NEXT_WITHIN_S = 2.0
_LOOK_S = 0.02
_MOST_IDLE = 4  # what a leader uses at once; more come where a session begins before the last one's have come back


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

    def __init__(self, connect: Callable[[], Store], forget: Callable[[], None] = lambda: None) -> None:
        self._connect = connect
        self._forget = forget
        self._lock = threading.Lock()
        self._idle: list[Store] = []
        self._process = os.getpid()

    def borrow(self) -> Store:
        """A client for one thread alone. Blocks while the store is not there: call it in a thread that may be left."""
        if self._process != os.getpid():  # the parent's connections are the parent's: two would read one's answers
            self._process, self._lock, self._idle = os.getpid(), threading.Lock(), []
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._connect().clone()

    def give_back(self, client: Store) -> None:
        """The client is idle again; closed, where enough are."""
        with self._lock:
            if len(self._idle) < _MOST_IDLE:
                self._idle.append(client)

    def drop(self) -> None:
        """Closes the idle connections, and forgets the one that new ones are made from."""
        with self._lock:
            self._idle.clear()
        self._forget()


class Meeting:
    """One service's way into a store. The store counts the sessions of each rank under `prefix`, so that ranks that
    enter their loads in one order meet in the same one, also after a process was restarted.

    A rank can miss one: it failed before it met the others, who gave it up and went on. It passes over such, up to the
    newest that any rank has begun; and where they have given it up there too, it looks a moment for the next one before
    it takes that end for its own. So all meet again the next time. A session that ended in another way counts.

    Calls side by side get their sessions in the order of their tickets, whichever of them comes to the store first.
    """

    def __init__(self, pool: ClientPool, prefix: str, rank: int, *, keep: bool) -> None:
        self.pool = pool
        self._prefix = prefix
        self._rank = rank
        self._keep = keep
        self._tickets = itertools.count()
        self._numbers: list[int] = []  # in the store, by ticket
        self._lock = threading.Lock()

    def ticket(self) -> int:
        """For one session, at the moment of the call that needs it."""
        return next(self._tickets)

    def session(self, client: Store, ticket: int) -> Callable[[Store], Store]:
        """What turns a client into one that sees only the keys of the ticket's session. Blocks."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but not in its __all__

        with self._lock:
            while len(self._numbers) <= ticket:
                self._numbers.append(self._next(client))
        prefix = f"{self._prefix}/{self._numbers[ticket]}"
        return lambda store: cast(Store, PrefixStore(prefix, store))  # type: ignore[arg-type]

    def _next(self, client: Store) -> int:
        own, newest = f"{self._prefix}/sessions/{self._rank}", f"{self._prefix}/sessions/newest"
        number, known, until_s = client.add(own, 1), 0, time.monotonic() + _NEXT_WITHIN_S
        while True:
            while known < number:
                stands = bytes(client.compare_set(newest, str(known or ""), str(number))).decode()
                known = int(stands or known)
            state = self._state_of(client, number)
            while number < known and state != "over":  # the others have gone on without this rank
                number = client.add(own, 1)
                state = self._state_of(client, number)
            if state != "missed" or time.monotonic() > until_s:
                return number
            time.sleep(_LOOK_S)
            known = int(bytes(client.get(newest)))

    def _state_of(self, client: Store, number: int) -> Literal["open", "missed", "over"]:
        """What this rank finds of a session before it has said a word there: no verdict yet; given up for want of this
        rank; or ended in another way, which is then this rank's end too."""
        first = f"{self._prefix}/{number}/{entry_key(0)}"
        if not client.check([first]):
            return "open"
        try:
            entry = decode_entry(bytes(client.get(first)))
        except MessageError:
            return "over"
        failure = entry.failure if isinstance(entry, Verdict) else None
        given_up = failure is not None and failure.kind == "timeout" and failure.record.rank == self._rank
        return "missed" if given_up else "over"

    def close(self) -> None:
        """Drops the connections, unless later services meet in the same store (`keep`)."""
        if not self._keep:
            self.pool.drop()


_Place: TypeAlias = tuple[int, str, int]  # process, host, port: a forked child shares no connection with its parent
_stores: dict[_Place, Store] = {}
_pools: dict[_Place, ClientPool] = {}
_lock = threading.Lock()


def pool_at(host: str, port: int, *, serves: bool, timeout_s: float) -> ClientPool:
    """This process's clients of the store at an address, and on the serving rank its server.

    Both live as long as the process, so that the next service finds the same store, with its counts. Connects nothing.
    A child that was forked from the serving process is a client of its parent's.
    """
    here = (os.getpid(), host, port)
    parent_serves = any(place[1:] == here[1:] and place != here for place in _stores)
    is_master = serves and not parent_serves

    def connect() -> Store:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

        with _lock:
            if (store := _stores.get(here)) is not None:
                return store
        made = TCPStore(
            host,
            port,
            None,
            is_master=is_master,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=is_master,
        )
        with _lock:
            return _stores.setdefault(here, cast(Store, made))

    def forget() -> None:
        if not is_master:  # its server may be gone, and another one come
            with _lock:
                _stores.pop(here, None)

    with _lock:
        return _pools.setdefault(here, ClientPool(connect, forget))
