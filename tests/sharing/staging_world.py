"""Node-shared staging in virtual time: real machines, random speeds and delays, and memory that remembers who looks.

The world finds by itself what must never happen: a slot that is written while somebody may look at it, a block that
is seen twice, out of order, or with another's content.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from loader_service.sharing.protocol import Action, Arrived, Kind, Message, Read, Send, Staging
from tests.agreement.surroundings import VirtualTime

LIMIT_S = 1e6
TICK_S = 10.0  # where consumers keep blocks, messages take less than half of it


@dataclass(frozen=True)
class Scene:
    """`wants[b]` and `owner[b]` by block, `slots[p]` by place; `leaves_after[p]`: how many blocks it uses before it
    leaves, None: it stays. `speeds[p]`: (seconds a read, seconds a use) at most; `delay_s` of a message at most. The
    blocks `passes` are not used: every rank that wants one says at some time that it needs it no more. `keeps[p]`: how
    many blocks it keeps when it asks for the next one; then a node that stands still for good is looked for."""

    owner: Sequence[int]
    wants: Sequence[int]
    slots: Sequence[int]
    leaves_after: Sequence[int | None]
    speeds: Sequence[tuple[float, float]]
    passes: Sequence[int] = ()
    delay_s: float = 1.0
    seed: int = 0
    keeps: Sequence[int] = ()


@dataclass
class Rank:
    place: int
    machine: Staging
    to_use: list[int]
    arrived: dict[int, tuple[int, int]] = field(default_factory=dict)
    using: dict[int, tuple[int, int]] = field(default_factory=dict)
    used: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    left: bool = False
    busy: bool = False


class StagingWorld:
    def __init__(self, scene: Scene, make: Callable[..., Staging] = Staging) -> None:
        self.scene = scene
        self.time = VirtualTime()
        self.chance = random.Random(scene.seed)
        self.memory: dict[tuple[int, int], int | None] = {}
        self.reads = 0
        self.messages = 0
        self._under_way: dict[tuple[int, int], deque[bytes]] = {}
        owner = np.array(scene.owner, dtype=np.int64)
        wants = np.array(scene.wants, dtype=np.uint64)
        self.ranks = [
            Rank(
                place,
                make(owner, wants, scene.slots, place),
                [b for b, wanted in enumerate(scene.wants) if wanted >> place & 1 and b not in scene.passes],
            )
            for place in range(len(scene.slots))
        ]

    def run(self) -> StagingWorld:
        for rank in self.ranks:
            self._later(1.0, partial(self._begin, rank))
        self.time.run(self._over, limit_s=LIMIT_S)
        return self

    def _begin(self, rank: Rank) -> None:
        self._do(rank, rank.machine.start())
        for block in self.scene.passes:
            if self.scene.wants[block] >> rank.place & 1:
                self._later(self.scene.speeds[rank.place][1], partial(self._pass, rank, block))
        self._use_next(rank)
        if self.scene.keeps:
            self._tick(rank)

    def _tick(self, rank: Rank) -> None:
        self._do(rank, rank.machine.tick(waits=self._waits(rank), keeps=bool(rank.using)))
        self.time.call_later(TICK_S, partial(self._tick, rank))

    def _waits(self, rank: Rank) -> bool:
        return not (rank.busy or rank.left) and bool(rank.to_use) and rank.to_use[0] not in rank.arrived

    @property
    def stuck(self) -> bool:
        return any(rank.machine.stuck for rank in self.ranks)

    def _check_stuck(self) -> None:
        """Nothing but ticks is left to happen."""
        for rank in self.ranks:
            assert self._waits(rank) or rank.left or not rank.to_use, f"rank {rank.place} goes on"
            assert not rank.busy, f"rank {rank.place} is slow, and not stuck"
            assert not rank.machine._reading, f"rank {rank.place} reads"
        for under_way in self._under_way.values():
            kinds = {Message.decoded(data).kind for data in under_way}
            assert kinds <= {Kind.ASK, Kind.STANDS}, f"{kinds} are under way"

    def _pass(self, rank: Rank, block: int) -> None:
        self._do(rank, rank.machine.done(block))
        rank.arrived.pop(block, None)
        rank.passed.append(block)
        self._use_next(rank)

    def _over(self) -> bool:
        if self.stuck:
            self._check_stuck()
            return True
        return all(rank.machine.over for rank in self.ranks)

    def _later(self, most_s: float, callback: Callable[[], None]) -> None:
        self.time.call_later(most_s * self.chance.choice((0.0, 0.1, 1.0)) * self.chance.random(), callback)

    def _do(self, rank: Rank, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Read):
                self._read(rank, action)
            elif isinstance(action, Send):
                self._send(rank.place, action)
            else:
                assert isinstance(action, Arrived)
                assert not rank.left, f"rank {rank.place} is given block {action.block} after it has left"
                assert action.block not in rank.arrived, f"block {action.block} arrives twice"
                assert action.block not in rank.passed, f"block {action.block} arrives although it was passed"
                rank.arrived[action.block] = (action.owner, action.slot)
                self._use_next(rank)

    # -- an owner's side

    def _read(self, rank: Rank, read: Read) -> None:
        where = (rank.place, read.slot)
        assert self.scene.owner[read.block] == rank.place, f"rank {rank.place} reads block {read.block}"
        assert read.slot < self.scene.slots[rank.place]
        for other in self.ranks:
            users = [block for block, place in other.using.items() if place == where]
            assert not users, f"slot {where} is overwritten, rank {other.place} uses block {users} in it"
        self.memory[where] = None  # neither the old content nor the new one
        self.reads += 1
        self._later(self.scene.speeds[rank.place][0], lambda: self._filled(rank, read))

    def _filled(self, rank: Rank, read: Read) -> None:
        self.memory[rank.place, read.slot] = read.block
        self._do(rank, rank.machine.read_done(read.block))

    # -- a user's side

    def _use_next(self, rank: Rank) -> None:
        """In plan order; a block may still be in use when the next one is begun."""
        if rank.left or rank.busy:
            return
        if len(rank.used) == self.scene.leaves_after[rank.place]:
            self._leave_soon(rank)
            return
        if not rank.to_use or rank.to_use[0] not in rank.arrived:
            return
        block = rank.to_use.pop(0)
        rank.using[block] = rank.arrived[block]
        rank.used.append(block)
        self._look(rank, block)
        rank.busy = True
        if not self.scene.keeps:
            self._later(self.scene.speeds[rank.place][1], lambda: self._done(rank, block))
        self._later(self.scene.speeds[rank.place][1], lambda: self._free(rank))

    def _free(self, rank: Rank) -> None:
        rank.busy = False
        if self.scene.keeps:
            ends = not rank.to_use or len(rank.used) == self.scene.leaves_after[rank.place]
            kept = 0 if ends else self.scene.keeps[rank.place]
            for block in list(rank.using)[: max(0, len(rank.using) - kept)]:
                self._done(rank, block)
        self._use_next(rank)

    def _look(self, rank: Rank, block: int) -> None:
        where = rank.using[block]
        assert self.memory.get(where) == block, (
            f"rank {rank.place} finds {self.memory.get(where)} in slot {where} instead of block {block}"
        )

    def _done(self, rank: Rank, block: int) -> None:
        self._look(rank, block)
        del rank.using[block]
        self._do(rank, rank.machine.done(block))
        self._leave_soon(rank)

    def _leave_soon(self, rank: Rank) -> None:
        """Once it looks at nothing any more, as leaving asks for."""
        if len(rank.used) == self.scene.leaves_after[rank.place] and not rank.using and not rank.left:
            rank.left = True
            self._do(rank, rank.machine.leave())

    # -- messages: in order from one rank to another, in any order otherwise

    def _send(self, place: int, send: Send) -> None:
        assert send.to != place
        self.messages += send.message.kind < Kind.ASK
        pair = (place, send.to)
        self._under_way.setdefault(pair, deque()).append(send.message.encoded())
        self.time.call_later(self.scene.delay_s * self.chance.random(), lambda: self._receive(pair))

    def _receive(self, pair: tuple[int, int]) -> None:
        """The oldest of what is under way."""
        sender, place = pair
        rank = self.ranks[place]
        self._do(rank, rank.machine.receive(sender, Message.decoded(self._under_way[pair].popleft())))


def check(world: StagingWorld) -> None:
    """What holds once nothing more will happen."""
    scene = world.scene
    for rank in world.ranks:
        wanted = [block for block, mask in enumerate(scene.wants) if mask >> rank.place & 1]
        wanted = [block for block in wanted if block not in scene.passes]
        after = scene.leaves_after[rank.place]
        assert rank.used == (wanted if after is None else wanted[:after]), f"rank {rank.place} has seen {rank.used}"
        assert not rank.using
        assert rank.machine.over
    if all(after is None for after in scene.leaves_after):
        assert world.reads == sum(mask != 0 for mask in scene.wants), "each wanted block is read once, no other"
    assert world.reads <= sum(mask != 0 for mask in scene.wants)
    most = sum(2 * bin(mask).count("1") for mask in scene.wants) + len(scene.slots) ** 2
    assert world.messages <= most
