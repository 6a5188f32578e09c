"""Node-shared staging on one rank: its own blocks are read once for the whole node, and all blocks are handed out here.

Drives the machine of `protocol` with what the mesh brings and what reading threads have done. Messages are a few bytes;
from one rank to another at most one for each slot of either is under way, and one more.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from loader_service.agreement.node_mesh import Mesh
from loader_service.checkpoint.catalog import Shard
from loader_service.errors import AgreementError, LoaderError, StateError, text_of
from loader_service.memory.allocators import HostBuffer
from loader_service.planning.sharing import NodeBlocks
from loader_service.sharing.block_reads import BlockReads, ReadingMeans
from loader_service.sharing.protocol import Action, ConfusedPeerError, Message, Read, Send, Staging
from loader_service.sharing.segment import Segment

CHANNEL: Final = 2  # of the mesh
_LOOK_EVERY_S: Final = 1.0


class Consumer(Protocol):
    """Who takes blocks here. `starves`: it waits for one, and nothing else is under way to it or passes from it;
    `leases_out`: how many it keeps."""

    @property
    def starves(self) -> bool: ...

    @property
    def leases_out(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """`read_bytes` that this rank has read for its node, in `blocks_read` blocks; `blocks_arrived` for itself, and how
    often its consumer had to wait for one."""

    read_bytes: int = 0
    blocks_read: int = 0
    blocks_arrived: int = 0
    waits: int = 0


class Stage:
    """One rank's part in one load. Everything on one loop, but for `done`, which any thread may call.

    Take the blocks that this rank wants in plan order: `block`, then `done`, which must not wait for a later block. At
    the end, or after `leave`, wait until all others are `served`, then `stop`. The first error, of a read or of what
    another rank says, goes to `on_failure` and to everyone who waits here. Others hear of it through the agreement, as
    this rank hears of theirs, and of deaths: then `fail`.
    """

    def __init__(
        self,
        mesh: Mesh,
        segment: Segment,
        blocks: NodeBlocks,
        shards: Sequence[Shard],
        means: ReadingMeans,
        *,
        on_failure: Callable[[LoaderError], None],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._mesh = mesh
        self._segment: Segment | None = segment
        self._ranks = segment.ranks
        self._places = {rank: place for place, rank in enumerate(segment.ranks)}
        self._place = self._places[mesh.rank]
        self._stuck_after_s = means.stuck_after_s
        self._look_every_s = min(_LOOK_EVERY_S, means.stuck_after_s / 4)
        patience = math.ceil(means.stuck_after_s / self._look_every_s)
        self._machine = Staging(blocks.owner, blocks.wants, segment.counts, self._place, patience)
        self._consumer: Consumer | None = None
        self._looking: asyncio.Task[None] | None = None
        self._reads = BlockReads(blocks, shards, means, on_read=self._read_done, on_error=self._failed)
        self._on_failure = on_failure
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._arrived: dict[int, HostBuffer] = {}
        self._waiting: dict[int, asyncio.Future[HostBuffer]] = {}
        self._over = asyncio.Event()  # nothing is to come that this rank is concerned with, or it has failed
        self._failure: LoaderError | None = None
        self._stopped = False
        self.slowest: int | None = None  # `waits_for`'s rank after the last message or read, for any thread to look at
        self._blocks_read = self._blocks_arrived = self._waits = 0

    # -- what is known

    @property
    def statistics(self) -> StageStatistics:
        return StageStatistics(self._reads.read_bytes, self._blocks_read, self._blocks_arrived, self._waits)

    @property
    def shards_read(self) -> frozenset[int]:
        """The shards that this rank has read anything of."""
        return frozenset(self._reads.shards_read)

    def waits_for(self) -> tuple[int, int] | None:
        """(rank, block) that holds up the node, as far as this rank sees: who reads the block that is waited for here,
        or who still uses one in this rank's slots, and so keeps it from reading on. None while nothing is held up."""
        found = self._machine.waits_for(min(self._waiting, default=None))
        return None if found is None else (self._ranks[found[0]], found[1])

    # -- what the caller does

    def start(self, consumer: Consumer | None = None) -> None:
        """Begins to read, and to hear of the other ranks. A `consumer` that keeps blocks while it and all others wait
        for more is a failure, after `stuck_after_s`."""
        self._consumer = consumer
        self._do(self._machine.start())
        self._mesh.listen(CHANNEL, self._receive)
        self._looking = self._loop.create_task(self._look())

    async def block(self, number: int) -> HostBuffer:
        """The slot in which a block lies, once it has arrived; it stays as it is until `done`. Look, do not write.

        Raises the failure, also if that comes first. StateError for a block that this rank does not want, is done with,
        or has left.
        """
        if self._failure is not None:
            raise self._failure
        arrived = self._arrived.get(number)
        if arrived is not None:
            return arrived
        if self._stopped or self._machine.left or not self._machine.awaits(number):
            raise StateError(f"block {number} of this node is not waited for by rank {self._mesh.rank}")
        self._waits += 1
        waiting = self._waiting.get(number)
        if waiting is None:
            waiting = self._waiting[number] = self._loop.create_future()
            waiting.add_done_callback(_retrieve)
            self._note_slowest()
        return await asyncio.shield(waiting)

    def done(self, number: int) -> None:
        """Nothing of this rank looks at a block any more; it may be yet to come. Once for each, from any thread."""
        if threading.get_ident() == self._thread:
            self._done(number)
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it what this was for
            self._loop.call_soon_threadsafe(self._done, number)

    def leave(self) -> None:
        """This rank wants no more blocks, and looks at none: others need not keep anything for it. It reads on for
        them."""
        self._arrived.clear()
        self._end_waiting(StateError("the load was left"))
        self._do(self._machine.leave())

    async def served(self) -> None:
        """Returns when nobody needs anything of this rank any more, and all that it wanted was given back, or it has
        left; raises the failure."""
        await self._over.wait()
        if self._failure is not None:
            raise self._failure

    def fail(self, error: LoaderError) -> None:
        """Stops what is queued, and raises `error` for everyone who waits. The first one stays."""
        if self._failure is None:
            self._failure = error
            self._reads.cancel()
            self._end_waiting(error)
            self._over.set()

    async def stop(self, grace_s: float) -> list[str]:
        """Ends everything here; waits up to `grace_s` for reads in flight.

        Returns a line for each that was stuck: its thread may still write to the segment, which nobody may use again.
        """
        self._stopped = True
        self._mesh.ignore(CHANNEL)
        if self._looking is not None:
            self._looking.cancel()
        self._consumer = None
        self._end_waiting(StateError("the load has ended"))
        self._arrived.clear()
        stuck = await self._reads.stop(grace_s)
        self._segment = None  # it ends with who still looks at it, and not with this object, which a report may keep
        return stuck

    # -- what happens

    def _receive(self, rank: int, data: bytes, descriptor: int | None) -> None:
        if descriptor is not None:
            os.close(descriptor)
        if self._failure is not None:
            return
        try:
            place = self._places.get(rank)
            if place is None:
                raise ConfusedPeerError("it does not share memory with this rank")  # noqa: TRY301
            actions = self._machine.receive(place, Message.decoded(data))
        except ConfusedPeerError as error:
            text = f"rank {rank} says what cannot be in memory that ranks of this node share: {error}"
            self._failed(AgreementError(f"{text}; do all ranks run the same version of the loader?"))
            return
        self._do(actions)
        self._check_stuck()

    async def _look(self) -> None:
        while self._failure is None:
            await asyncio.sleep(self._look_every_s)
            consumer = self._consumer
            waits, keeps = (consumer.starves, consumer.leases_out > 0) if consumer is not None else (False, False)
            self._do(self._machine.tick(waits=waits, keeps=keeps))
            self._check_stuck()

    def _check_stuck(self) -> None:
        if self._machine.stuck and self._consumer is not None:
            text = (
                f"the consumers of all ranks of this node wait for more, and have done so for {self._stuck_after_s:g} s"
            )
            kept = f"this one keeps {self._consumer.leases_out} batches whose memory they share"
            self._failed(StateError(f"{text}, while {kept}: leave each `with batch` before taking many more"))

    def _read_done(self, block: int) -> None:
        self._blocks_read += 1
        self._do(self._machine.read_done(block))
        self._on_progress()

    def _done(self, number: int) -> None:
        if self._stopped or self._failure is not None or self._machine.left:
            return
        self._arrived.pop(number, None)
        try:
            actions = self._machine.done(number)
        except KeyError:
            self._failed(StateError(f"block {number} of this node was given back twice, or is not this rank's"))
        else:
            self._do(actions)

    def _do(self, actions: Sequence[Action]) -> None:
        segment = self._segment
        for action in actions if segment is not None else ():
            assert segment is not None
            if isinstance(action, Read):
                self._reads.begin(action.block, segment.slot(self._place, action.slot))
            elif isinstance(action, Send):
                self._send(self._ranks[action.to], action.message)
            else:
                self._blocks_arrived += 1
                buffer = self._arrived[action.block] = segment.slot(action.owner, action.slot)
                waiting = self._waiting.pop(action.block, None)
                if waiting is not None:
                    waiting.set_result(buffer)
        self._note_slowest()
        if self._machine.over:
            self._over.set()

    def _send(self, rank: int, message: Message) -> None:
        try:
            self._mesh.send(rank, CHANNEL, message.encoded())  # to one that has left or is dead there is nothing to say
        except OSError as error:
            text = f"rank {rank} of this node could not be told of what ranks share: {text_of(error)}"
            self._failed(LoaderError(text, errno=error.errno))

    def _note_slowest(self) -> None:
        found = self.waits_for()
        self.slowest = found[0] if found is not None else None

    def _failed(self, error: LoaderError) -> None:
        if self._failure is None and not self._stopped:
            self.fail(error)
            self._on_failure(error)

    def _end_waiting(self, error: LoaderError) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(error)


def _retrieve(future: asyncio.Future[HostBuffer]) -> None:
    """Marks an error as seen: whoever was cancelled away from it has its own."""
    if not future.cancelled():
        future.exception()
