"""Messages over a torch.distributed store: no collective, no process group, nothing of the caller's is touched.

Every blocking call is made by a daemon thread of the carrier on a client of its own (`Store.clone()`: a client that is
blocked in a wait stalls every other call on it). Nobody waits for these threads without bound: a store that is frozen
ignores its own time limits, so the session looks from outside how long a call takes and gives the store up. Waits have
no time limit of their own, because a store client that times out writes two lines to stderr; they end by writing the
key.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TypeAlias

from loader_service import exits
from loader_service.agreement.carriers import ends_log
from loader_service.agreement.codec import encode_entry
from loader_service.agreement.messages import Entry, Failure, bye_key, entry_key, status_key
from loader_service.agreement.protocol import LEADER, LOOKS_A_BEAT, Collected, Incoming, LogEntry, Lost, Statuses
from loader_service.agreement.store_clients import Meeting, Store
from loader_service.errors import FailureRecord, MemoryLimitError, record_of

_FOREVER = timedelta(days=30)
_ALARM = "alarm"
_NOTHING = ""
_LONG_STEP_S = 1.0

Job: TypeAlias = Callable[[Store], None]


class StoreCarrier:
    """One rank's way to one session's keys in a store.

    Threads: one writes (posts, publishes, heartbeats, looks at statuses), one follows the log; the leader's collects,
    and waits for alarms. Latency of an exchange: a set, a wake-up of the leader, a compare-and-set, a wake-up of all.
    """

    def __init__(
        self,
        *,
        meeting: Meeting,
        rank: int,
        world_size: int,
        heartbeat_s: float,
        host_rank: int | None,
        where: str,
    ) -> None:
        self.host_rank = host_rank
        self._meeting = meeting
        self._ticket = meeting.ticket()
        self._rank = rank
        self._world_size = world_size
        self._look_s = heartbeat_s / (LOOKS_A_BEAT if rank == LEADER else 1)
        self._heartbeat_s = heartbeat_s
        self.where = where
        # Not a SimpleQueue: CPython's forgets its time limit if a signal arrives when the process was stopped.
        self._outbox: queue.Queue[Job | None] = queue.Queue()
        self._wishes: queue.SimpleQueue[tuple[str, ...] | None] = queue.SimpleQueue()
        self._wish: tuple[str, ...] = ()
        self._keys_written: list[str] = []
        self._log_length = 0  # as far as the follower has come
        self._caught_up = 0  # as far as heartbeats have
        self._log_ended = threading.Event()
        self._collect_ended = threading.Event()
        self._overdue: tuple[str, ...] = ()
        self._broken = False
        self._leader_seen = rank == LEADER
        self._connected = False
        self._urgent = False
        self._alarmed = False
        self._alarm_heard = threading.Event()
        self._tidy = False
        self._stopping = False
        self._stopped: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._threads = 0
        self._spare: Store | None = None  # a connection for the last words, where a rank hosts the store
        self._spare_in_session: Store | None = None
        self._in_session: Callable[[Store], Store] | None = None
        self._beat_at_s = 0.0
        self._calls_begun = 0
        self._calls_done = 0
        self._stalled: tuple[int, float, float] = (0, 0.0, 0.0)  # which call, how long, counted until when

    # -- the session's side: nothing blocks

    def start(self, receive: Callable[[Incoming], None], status: Callable[[], bytes]) -> None:
        self._receive = receive
        self._status = status
        self._spawn(self._begin, "write")

    def post(self, key: str, data: bytes) -> None:
        def write(store: Store) -> None:
            self._keys_written.append(key)
            store.set(key, data)

        self._outbox.put(write)
        self._outbox.put(self._show)

    def post_last(self, key: str, data: bytes) -> None:
        def say_bye(store: Store) -> None:
            # What the log's thread still waits for must not be removed by the leader: it would wait for good.
            self._log_ended.wait(_LONG_STEP_S)
            self._remove_own_keys(store)
            store.set(key, data)
            self._look_s = _FOREVER.total_seconds()  # no more beats: nobody would remove them

        self._outbox.put(say_bye)

    def publish(self, entry: Entry) -> None:
        data = encode_entry(entry)

        def compare_and_set(store: Store) -> None:
            stands = store.compare_set(entry_key(entry.sequence), _NOTHING, data.decode("ascii"))
            self._receive(LogEntry(entry.sequence, bytes(stands)))

        self._outbox.put(compare_and_set)

    def last_words(self, entry: Entry) -> None:
        spare, self._spare = self._spare_in_session, None
        in_session = self._in_session
        if in_session is None:
            return

        def leave_behind() -> None:
            with contextlib.suppress(Exception):
                store = spare if spare is not None else in_session(self._meeting.pool.borrow())
                for sequence in itertools.count(entry.sequence):  # others may have gone on meanwhile
                    text = encode_entry(replace(entry, sequence=sequence)).decode("ascii")
                    if ends_log(bytes(store.compare_set(entry_key(sequence), _NOTHING, text))):
                        return

        # What is sent lies in the kernel of a host that was only stopped, also after this process has ended. But it has
        # to be sent: whoever closes the session, and ends, waits a moment for this thread.
        with contextlib.suppress(MemoryLimitError):
            self._spawn(leave_behind, "last")

    def collect(self, keys: tuple[str, ...]) -> None:
        with self._lock:
            before, self._wish = self._wish, keys
        if before:
            self._release(before)
        self._wishes.put(keys)

    def urge(self) -> None:
        self._urgent = True
        self._outbox.put(self._beat)

    def stalled_s(self, now_s: float) -> float:
        call = self._calls_begun
        which, stalled_s, until_s = self._stalled
        if call == self._calls_done or call != which:
            self._stalled = (call, 0.0, now_s)
        else:  # a process that was stopped itself must not hold the whole gap against the store
            step_s = min(now_s - until_s, _LONG_STEP_S, self._heartbeat_s)
            self._stalled = (call, stalled_s + step_s, now_s)
        return self._stalled[1]

    def stop(self, *, tidy: bool, stopped: Callable[[], None]) -> None:
        self._tidy = tidy
        self._stopping = True
        with self._lock:
            self._stopped = stopped
            all_ended = self._threads == 0  # as they do where the store is lost
        if all_ended:
            stopped()
            return
        with self._lock:
            before, self._wish = self._wish, ()
        if before:
            self._release(before)
        self._wishes.put(None)
        self._outbox.put(None)

    def _release(self, keys: tuple[str, ...]) -> None:
        """Ends the collector's wait for keys that may never come. What it then collects is for nobody."""

        def fill(store: Store) -> None:
            for key in keys:
                store.compare_set(key, _NOTHING, "-")
                self._keys_written.append(key)

        self._outbox.put(fill)

    # -- threads

    def _spawn(self, work: Callable[[], None], name: str) -> None:
        with self._lock:
            self._threads += 1
        thread = threading.Thread(target=self._run, args=(work,), name=f"loader-agreement-{name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                self._threads -= 1
            text = (
                f"a thread that speaks to the other ranks could not be started ({error}): raise ulimit -u or pids.max"
            )
            raise MemoryLimitError(text) from error
        exits.wait_at_exit(thread)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the store's failures have many classes; all of them mean: lost
            self._broken = True
            self._meeting.pool.drop()
            if not self._stopping:
                self._receive(self._lost_by(error))
        finally:
            with self._lock:
                self._threads -= 1
                stopped = self._stopped if self._threads == 0 else None
            if stopped is not None:
                stopped()

    def _lost_by(self, error: Exception) -> Lost:
        detail = _first_line(error)
        if not isinstance(error, RuntimeError | OSError):  # the store's own are; a MemoryError, say, is this rank's
            return Lost(detail, own=Failure("error", record_of(error)), may_hear=True)
        if not self._connected:
            return Lost(detail, met=False)
        if self._store_lives():
            text = f"its connection to the store ({self.where}) broke, although the store lives: {detail}"
            return Lost(text, own=Failure("died", FailureRecord("LostStore", text)), may_hear=True)
        return Lost(detail=detail)

    def _store_lives(self) -> bool:
        """Whether the spare connection still answers, where this rank has one."""
        spare = self._spare_in_session
        if spare is None:
            return False
        try:
            spare.check([entry_key(0)])
        except Exception:  # noqa: BLE001 - see above
            return False
        return True

    def _begin(self) -> None:
        """Connects all clients before the first word: no connection is made while ranks are waited for."""
        works: dict[str, Job] = {"log": self._follow}
        if self._rank == LEADER:
            works |= {"collect": self._collect, "alarm": self._await_alarm}
        own = self._meeting.pool.borrow()
        self._in_session = in_session = self._meeting.session(own, self._ticket)
        if self._rank == LEADER:
            for rank in range(self._world_size):
                in_session(own).compare_set(status_key(rank), _NOTHING, "-")
        clients = {name: self._meeting.pool.borrow() for name in works}
        if self._rank not in (LEADER, self.host_rank) and self.host_rank is not None:
            self._spare = self._meeting.pool.borrow()
            self._spare_in_session = in_session(self._spare)
        self._connected = True
        for name, work in works.items():
            self._spawn(self._using(work, clients[name], in_session), name)
        self._using(self._write, own, in_session)()

    def _using(self, work: Job, client: Store, in_session: Callable[[Store], Store]) -> Callable[[], None]:
        def use() -> None:
            work(in_session(client))
            if not self._broken:  # where one connection is dead, the others are not to be trusted
                self._meeting.pool.give_back(client)

        return use

    def _write(self, store: Store) -> None:
        while True:
            try:
                job = self._outbox.get(timeout=max(0.0, self._beat_at_s + self._look_s - time.monotonic()))
            except queue.Empty:
                job = self._beat
            if job is None:
                break
            self._timed(job, store)
        if self._rank == LEADER:
            self._timed(self._leave_as_leader, store)
        if self._spare is not None and not self._broken:
            self._meeting.pool.give_back(self._spare)

    def _timed(self, job: Job, store: Store) -> None:
        self._calls_begun += 1
        job(store)
        self._calls_done = self._calls_begun

    def _show(self, store: Store) -> None:
        store.set(status_key(self._rank), self._status())

    def _beat(self, store: Store) -> None:
        """Says that this rank lives, looks who else does, and catches what a broken connection may have withheld."""
        self._beat_at_s = time.monotonic()
        self._show(store)
        if self._urgent and not self._alarmed:
            store.set(_ALARM, "fail")
            self._alarmed = True
        asked_at_s = time.monotonic()
        if self._rank == LEADER:
            values = store.multi_get([status_key(rank) for rank in range(self._world_size)])
            by_rank = {rank: b"" if value == b"-" else bytes(value) for rank, value in enumerate(values)}
            self._receive(Statuses(by_rank, asked_at_s))
        else:
            self._leader_seen = self._leader_seen or store.check([status_key(LEADER)])
            value = bytes(store.get(status_key(LEADER))) if self._leader_seen else b""
            self._receive(Statuses({LEADER: b"" if value == b"-" else value}, asked_at_s))
        self._catch_up(store)
        self._look_for_wish(store)

    def _look_for_wish(self, store: Store) -> None:
        """What lay there at the last beat, and was not brought since: the collector's connection is dead too."""
        wish = self._wish
        if not wish or self._stopping or not store.check(list(wish)):
            self._overdue = ()
        elif wish != self._overdue:
            self._overdue = wish
        else:
            self._bring(wish, store)

    def _catch_up(self, store: Store) -> None:
        """The log's entries that the follower has not brought by now: its connection may be one that nobody knows."""
        sequence = max(self._log_length, self._caught_up)
        while store.check([entry_key(sequence)]):
            data = bytes(store.get(entry_key(sequence)))
            self._receive(LogEntry(sequence, data))
            if ends_log(data):
                break
            sequence += 1
        self._caught_up = sequence

    def _follow(self, store: Store) -> None:
        while True:
            key = entry_key(self._log_length)
            store.wait([key], _FOREVER)
            data = bytes(store.get(key))
            self._receive(LogEntry(self._log_length, data))
            if ends_log(data):
                self._log_ended.set()
                return
            self._log_length += 1

    def _collect(self, store: Store) -> None:
        while (keys := self._wishes.get()) is not None:
            if keys == self._wish:
                store.wait(list(keys), _FOREVER)
            if keys == self._wish:  # else released: what lies there now is no message, and may be removed at any time
                self._bring(keys, store)
        self._collect_ended.set()

    def _bring(self, keys: tuple[str, ...], store: Store) -> None:
        """Receives the keys' values, once, if they are still wished for."""
        values = tuple(bytes(value) for value in store.multi_get(list(keys)))
        with self._lock:
            wished = keys == self._wish
            if wished:
                self._wish = ()
        if wished:
            self._receive(Collected(keys, values))

    def _await_alarm(self, store: Store) -> None:
        store.wait([_ALARM], _FOREVER)
        self._alarm_heard.set()
        if not self._stopping:
            self._look_s = min(self._look_s, self._heartbeat_s / 20)
            self._outbox.put(self._beat)

    def _remove_own_keys(self, store: Store) -> None:
        """No one reads this rank's records once the log has ended. A long-lived store must not fill up with loads."""
        for key in self._keys_written:
            store.delete_key(key)
        self._keys_written.clear()

    def _leave_as_leader(self, store: Store) -> None:
        store.set(_ALARM, "stop")
        for others in (self._log_ended, self._collect_ended):  # who must not wait for what is removed
            others.wait(_LONG_STEP_S)
        self._remove_own_keys(store)
        if not self._tidy:
            return
        # A store in this process wakes waiters only by the scheduler: the key must outlive the waiter's second look.
        self._alarm_heard.wait(_LONG_STEP_S)
        for key in (_ALARM, *(status_key(rank) for rank in range(self._world_size))):
            store.delete_key(key)
        for rank in range(1, self._world_size):
            store.delete_key(bye_key(rank))
        for sequence in range(max(self._log_length, self._caught_up) + 1):
            store.delete_key(entry_key(sequence))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
