"""Node-shared staging as a pure state machine: one rank's part in who reads which block into which slot, and when.

Each block has an owner, which reads it into one of its own slots and announces it to the ranks that want it; each of
them answers when it needs the block no more, and the last answer frees the slot. Owners begin their blocks in plan
order, as slots are free, and ranks use what they want in plan order. So the first block that is not done with can
always be read, and everyone who wants it can use it: nothing ever waits in a circle, even with one slot a rank.

Unless consumers keep what they have while they wait for more. Who waits so, and has stood still for long, asks all
others whether they do, too: if none of them is slow, and could still go on, nothing will ever move again.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

_MESSAGE: Final = struct.Struct("!BIH")
MOST_BLOCKS: Final = 1 << 32
MOST_SLOTS: Final = 1 << 16


class ConfusedPeerError(ValueError):
    """What another rank says cannot be: it runs other code, or has another plan. The text says what was wrong."""


class Kind(IntEnum):
    """What a message to another rank is about."""

    ANNOUNCE = 1
    ANSWER = 2
    LEAVE = 3
    ASK = 4
    STANDS = 5


class Message(NamedTuple):
    """What one rank tells another: `block` lies in `slot` (ANNOUNCE); it needs `block` no more (ANSWER); it needs
    nothing any more (LEAVE). Whether it stands still (ASK) and that it does (STANDS), where `block` numbers the asking.
    """

    kind: Kind
    block: int = 0
    slot: int = 0

    def encoded(self) -> bytes:
        return _MESSAGE.pack(*self)

    @classmethod
    def decoded(cls, data: bytes) -> Message:
        """Raises `ConfusedPeerError` for anything else."""
        try:
            kind, block, slot = _MESSAGE.unpack(data)
            return cls(Kind(kind), block, slot)
        except (struct.error, ValueError) as error:
            raise ConfusedPeerError(f"a message of {len(data)} bytes cannot be read: {error}") from error


class Read(NamedTuple):
    """Read the block into this rank's slot; then say `read_done`."""

    block: int
    slot: int


class Send(NamedTuple):
    """Tell the rank at place `to`. Messages to one place must keep their order."""

    to: int
    message: Message


class Arrived(NamedTuple):
    """The block lies in `slot` of the rank at place `owner`, for this rank to look at until it says `done`."""

    block: int
    owner: int
    slot: int


Action: TypeAlias = Read | Send | Arrived


class Staging:
    """One rank's state. Every method returns the actions to do, in order.

    `owner[b]` is the place of the rank that reads block b; bit p of `wants[b]` says that place p wants it. `slots[p]`
    is how many slots place p has, at least one if it owns anything. After `patience` ticks without any change a rank
    stands still.
    """

    def __init__(
        self,
        owner: npt.NDArray[np.int64],
        wants: npt.NDArray[np.uint64],
        slots: Sequence[int],
        place: int,
        patience: int = 4,
    ) -> None:
        self.place = place
        self.left = False
        self._owner: list[int] = owner.tolist()
        self._wants: list[int] = wants.tolist()
        self._slots = tuple(slots)
        self._check()
        self._own: deque[int] = deque(np.flatnonzero(owner == place).tolist())
        self._free = deque(range(self._slots[place]))
        self._reading: dict[int, int] = {}  # block -> slot
        self._lent: dict[int, tuple[int, int]] = {}  # block -> (slot, places that have not answered)
        self._gone = 0  # places that need nothing any more
        self._awaited: set[int] = set(np.flatnonzero(wants & np.uint64(1 << place)).tolist())
        self._passed: set[int] = set()  # of those awaited: this rank needs them no more
        self._held: dict[int, int] = {}  # block -> slot: arrived, and not yet done with
        self._patience = patience
        self._quiet = 0  # ticks
        self._asked = 0  # the number of the last asking
        self._standing = 0  # places that stand still, as they answered to it

    def _check(self) -> None:
        places = len(self._slots)
        if len(self._owner) != len(self._wants) or len(self._owner) > MOST_BLOCKS:
            raise ValueError(f"{len(self._owner)} owners of {len(self._wants)} blocks")
        if not 0 <= self.place < places or max(self._slots) > MOST_SLOTS:
            raise ValueError(f"place {self.place} of {places}, with {self._slots} slots")
        if any(not 0 <= owner < places or self._slots[owner] < 1 for owner in set(self._owner)):
            raise ValueError(f"owners are {set(self._owner)}, with {self._slots} slots")
        if any(wanted >> places for wanted in set(self._wants)):
            raise ValueError(f"blocks are wanted by places beyond {places}")

    # -- what this rank does

    def start(self) -> list[Action]:
        """The first reads."""
        return self._read_on()

    def read_done(self, block: int) -> list[Action]:
        """A `Read` has filled its slot."""
        slot = self._reading.pop(block)
        self._move()
        wanted = self._wants[block] & ~self._gone
        if not wanted:
            self._free.append(slot)
            return self._read_on()
        self._lent[block] = (slot, wanted)
        actions: list[Action] = [
            Send(to, Message(Kind.ANNOUNCE, block, slot)) for to in _places(wanted) if to != self.place
        ]
        if wanted >> self.place & 1:
            actions += self._arrive(block, self.place, slot)
        return actions

    def done(self, block: int) -> list[Action]:
        """This rank needs a block that it wants no more: nothing of it looks at the slot from now on. Also one that has
        not arrived: it then never does, here. Raises KeyError for any other block.

        Blocks may be done with in any order; but if `done` waited for a later block to arrive, all ranks might wait.
        """
        if self.left:
            return []
        if self.awaits(block):
            self._passed.add(block)
            return []
        del self._held[block]
        self._move()
        owner = self._owner[block]
        if owner != self.place:
            return [Send(owner, Message(Kind.ANSWER, block))]
        return self._answered(block, self.place)

    def leave(self) -> list[Action]:
        """This rank needs nothing any more, and looks at no slot. It goes on reading for the others."""
        if self.left:
            return []
        self.left = True
        self._held.clear()
        others = sorted(set(self._owner) - {self.place})
        return [*(Send(to, Message(Kind.LEAVE)) for to in others), *self._without(self.place)]

    def tick(self, *, waits: bool, keeps: bool) -> list[Action]:
        """To be called at regular times. `waits`: the consumer here waits for a block, and nothing else is under way to
        it or passes from it; `keeps`: it keeps some meanwhile."""
        wants_more = not self.left and bool(self._held or len(self._awaited) > len(self._passed))
        if self._reading or (wants_more and not waits):
            self._move()
            return []
        self._quiet += 1
        if not (keeps and self.stands) or self.stuck:
            return []
        self._asked += 1
        self._standing = 1 << self.place
        others = (place for place in range(len(self._slots)) if place != self.place)
        return [Send(to, Message(Kind.ASK, self._asked)) for to in others]

    # -- what other ranks say

    def receive(self, place: int, message: Message) -> list[Action]:
        """What the rank at `place` says. Raises `ConfusedPeerError`, with nothing changed, for what cannot be."""
        if message.kind is Kind.ANNOUNCE:
            return self._announced(place, message.block, message.slot)
        if message.kind is Kind.ANSWER:
            if not self._lent.get(message.block, (0, 0))[1] >> place & 1:
                raise ConfusedPeerError(f"it answers for block {message.block}, which it was not lent")
            return self._answered(message.block, place)
        if message.kind is Kind.ASK:
            return [Send(place, Message(Kind.STANDS, message.block))] if self.stands else []
        if message.kind is Kind.STANDS:
            if self._standing and message.block == self._asked:
                self._standing |= 1 << place
            return []
        if self._gone >> place & 1:
            raise ConfusedPeerError("it leaves a second time")
        return self._without(place)

    def _announced(self, owner: int, block: int, slot: int) -> list[Action]:
        if block >= len(self._owner) or self._owner[block] != owner or slot >= self._slots[owner]:
            raise ConfusedPeerError(f"it announces block {block} in slot {slot}, which are not its own")
        if not self._wants[block] >> self.place & 1:
            raise ConfusedPeerError(f"it announces block {block}, which this rank does not want")
        if self.left:  # it has not heard of that yet, and then needs no answer
            return []
        if block not in self._awaited:
            raise ConfusedPeerError(f"it announces block {block} a second time")
        if any(taken == slot and self._owner[held] == owner for held, taken in self._held.items()):
            raise ConfusedPeerError(f"it announces block {block} in slot {slot}, which this rank still uses")
        return self._arrive(block, owner, slot)

    # -- what is known

    def awaits(self, block: int) -> bool:
        """Whether this rank still wants a block that has not arrived."""
        return block in self._awaited and block not in self._passed

    @property
    def stands(self) -> bool:
        """Whether nothing has changed here for long, and nothing will by itself."""
        return self._quiet >= self._patience

    @property
    def stuck(self) -> bool:
        """Whether all ranks stand still, and the consumer here keeps what others may wait for.

        All have stood still at once: each answers for the time before, which is longer than from a tick to the next.
        """
        return self.stands and self._standing == (1 << len(self._slots)) - 1

    @property
    def over(self) -> bool:
        """Whether nobody needs anything of this rank any more (all its blocks were read and answered for), and it needs
        nothing of anybody, and has said so."""
        served = not (self._own or self._reading or self._lent)
        return served and (self.left or not (self._awaited or self._held))

    def waits_for(self, block: int | None) -> tuple[int, int] | None:
        """(place, block) that holds up the node, as far as this rank sees; `block` is the one that it waits for itself.

        Either that block's owner; or, where this rank could read on if it had a free slot, who has not answered for the
        oldest block in its slots. Of both the earlier block: what comes later waits for that.
        """
        found: list[tuple[int, int]] = [] if block is None else [(block, self._owner[block])]
        if self._own and not self._free and not self._reading:
            oldest = min(self._lent)
            places = _places(self._lent[oldest][1])
            if block is not None:  # then it is not this rank that is slow
                places = [place for place in places if place != self.place]
            found += [(oldest, place) for place in places[:1]]
        return min(found)[::-1] if found else None

    # -- inside

    def _move(self) -> None:
        self._quiet = self._standing = 0

    def _read_on(self) -> list[Action]:
        """Owned blocks in order, as far as slots are free; without those that nobody wants any more."""
        actions: list[Action] = []
        while self._own:
            wanted = self._wants[self._own[0]] & ~self._gone
            if wanted and not self._free:
                break
            block = self._own.popleft()
            if wanted:
                slot = self._reading[block] = self._free.popleft()
                actions.append(Read(block, slot))
        return actions

    def _arrive(self, block: int, owner: int, slot: int) -> list[Action]:
        self._move()
        self._awaited.remove(block)
        self._held[block] = slot
        if block in self._passed:
            self._passed.remove(block)
            return self.done(block)
        return [Arrived(block, owner, slot)]

    def _answered(self, block: int, place: int) -> list[Action]:
        self._move()
        slot, waiting = self._lent[block]
        waiting &= ~(1 << place)
        if waiting:
            self._lent[block] = (slot, waiting)
            return []
        del self._lent[block]
        self._free.append(slot)
        return self._read_on()

    def _without(self, place: int) -> list[Action]:
        """A place needs nothing any more: it answers for all that it was lent, and is lent nothing more."""
        self._move()
        self._gone |= 1 << place
        actions: list[Action] = []
        for block in [block for block, (_, waiting) in self._lent.items() if waiting >> place & 1]:
            actions += self._answered(block, place)
        return actions + self._read_on()


def _places(mask: int) -> list[int]:
    return [place for place in range(mask.bit_length()) if mask >> place & 1]
