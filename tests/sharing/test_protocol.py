"""Node-shared staging always ends, whoever is slow or leaves; nobody sees a slot change; confused ranks are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader_service.sharing.protocol import (
    Action,
    Arrived,
    ConfusedPeerError,
    Kind,
    Message,
    Read,
    Send,
    Staging,
)
from tests.sharing.staging_world import Scene, StagingWorld, check


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    places = draw(st.integers(1, 8))
    blocks = draw(st.integers(0, 24))
    round_robin = draw(st.booleans())
    owner = [block % places if round_robin else draw(st.integers(0, places - 1)) for block in range(blocks)]
    everyone = (1 << places) - 1
    wants = draw(st.lists(st.one_of(st.just(everyone), st.integers(0, everyone)), min_size=blocks, max_size=blocks))
    slots = draw(st.one_of(st.just([1] * places), st.lists(st.integers(1, 4), min_size=places, max_size=places)))
    leaves = draw(st.lists(st.one_of(st.none(), st.integers(0, 10)), min_size=places, max_size=places))
    passes = draw(st.one_of(st.just([]), st.lists(st.integers(0, max(0, blocks - 1)), max_size=6, unique=True)))
    counted = [mask for block, mask in enumerate(wants) if block not in passes]
    wanted = [sum(mask >> place & 1 for mask in counted) for place in range(places)]
    speed = st.tuples(st.sampled_from((0.0, 0.1, 1.0, 50.0)), st.sampled_from((0.0, 0.1, 1.0, 50.0)))
    return Scene(
        owner,
        wants,
        slots,
        [None if after is None or after > most else after for after, most in zip(leaves, wanted, strict=True)],
        draw(st.lists(speed, min_size=places, max_size=places)),
        passes,
        draw(st.sampled_from((0.0, 0.01, 1.0, 20.0))),
        draw(st.integers(0, 2**32)),
    )


@settings(max_examples=150)
@given(scenes())
def test_every_rank_sees_what_it_wants_once_in_order_and_untouched_and_nobody_hangs(scene: Scene) -> None:
    check(StagingWorld(scene).run())


@settings(max_examples=75)
@given(scenes())
def test_with_one_slot_a_rank_nothing_waits_in_a_circle(scene: Scene) -> None:
    check(StagingWorld(replace(scene, slots=[1] * len(scene.slots))).run())


@settings(max_examples=150)
@given(scenes(), st.lists(st.integers(0, 5), min_size=8, max_size=8))
def test_consumers_that_keep_what_they_have_come_to_an_end_or_are_seen_to_be_stuck_for_good(
    scene: Scene, keeps: list[int]
) -> None:
    """Slow ones may take longer than it takes to stand still, and nobody fails for that."""
    world = StagingWorld(replace(scene, passes=(), keeps=keeps, delay_s=scene.delay_s / 5)).run()
    if not world.stuck:
        check(world)


def crossing(keeps: Sequence[int], speed_s: float = 1.0) -> Scene:
    """Ranks 1 and 2 keep each other from going on: a block is wanted by two ranks, by turns."""
    pairs = (0b0011, 0b1100, 0b0101, 0b1010)
    blocks = 48
    owner = [block % 4 for block in range(blocks)]
    wants = [pairs[(block + block // 4) % 4] for block in range(blocks)]
    return Scene(owner, wants, [4] * 4, [None] * 4, [(1.0, speed_s)] * 4, keeps=keeps)


def test_consumers_that_keep_each_other_from_going_on_are_stuck() -> None:
    assert StagingWorld(crossing([0, 99, 99, 0])).run().stuck
    for speed_s in (1.0, 5000.0):
        world = StagingWorld(crossing([1, 1, 1, 1], speed_s)).run()
        assert not world.stuck
        check(world)


# -- the proof that this can fail


class StandsWhateverItDoes(Staging):
    def receive(self, place: int, message: Message) -> list[Action]:
        if message.kind is Kind.ASK:
            return [Send(place, Message(Kind.STANDS, message.block))]
        return super().receive(place, message)


class BelievesAnOldAnswer(Staging):
    def _move(self) -> None:
        self._quiet = 0

    def receive(self, place: int, message: Message) -> list[Action]:
        return super().receive(place, message._replace(block=self._asked) if message.kind is Kind.STANDS else message)

    def tick(self, *, waits: bool, keeps: bool) -> list[Action]:
        before = self._standing
        actions = super().tick(waits=waits, keeps=keeps)
        self._standing |= before
        return actions


class NeverAsks(Staging):
    def tick(self, *, waits: bool, keeps: bool) -> list[Action]:
        return []


@pytest.mark.parametrize(
    ("make", "seen_as"),
    [
        (StandsWhateverItDoes, "is slow, and not stuck|goes on|reads|under way"),
        (BelievesAnOldAnswer, "is slow, and not stuck|goes on|reads|under way"),
        (NeverAsks, "after"),
    ],
)
def test_a_wrong_word_about_standing_still_is_seen(make: type[Staging], seen_as: str) -> None:
    with pytest.raises(AssertionError, match=seen_as):
        for seed in range(20):
            stuck = replace(crossing([0, 99, 99, 0]), seed=seed)
            slow = replace(crossing([1] * 4, 1000.0), wants=[0b1111] * 48, slots=[2] * 4, seed=seed)
            for scene in (stuck, slow):
                StagingWorld(scene, make).run()


class FreesOneAnswerEarly(Staging):
    def _answered(self, block: int, place: int) -> list[Action]:
        slot, waiting = self._lent.get(block, (0, 0))
        others = waiting & ~(1 << place)
        if others and others & (others - 1) == 0:  # one has still to answer
            self._lent[block] = (slot, 1 << place)
        return super()._answered(block, place) if waiting else []

    def receive(self, place: int, message: Message) -> list[Action]:
        if message.kind is Kind.ANSWER and message.block not in self._lent:  # of that one
            return []
        return super().receive(place, message)


class ReadsOutOfOrder(Staging):
    def start(self) -> list[Action]:
        self._own.reverse()
        return super().start()


class AnnouncesBeforeTheReadIsDone(Staging):
    def _read_on(self) -> list[Action]:
        actions: list[Action] = []
        for action in super()._read_on():
            actions.append(action)
            assert isinstance(action, Read)
            actions += super().read_done(action.block)
        return actions

    def read_done(self, block: int) -> list[Action]:
        return []


class GoesOnAfterSomebodyLeft(Staging):
    """It waits for answers of who has left."""

    def receive(self, place: int, message: Message) -> list[Action]:
        return [] if message.kind is Kind.LEAVE else super().receive(place, message)


class ReadsWhatNobodyWants(Staging):
    def _read_on(self) -> list[Action]:
        actions: list[Action] = []
        while self._own and self._free:
            block = self._own.popleft()
            slot = self._reading[block] = self._free.popleft()
            actions.append(Read(block, slot))
        return actions


class UsesASlotTwice(Staging):
    def _read_on(self) -> list[Action]:
        actions = super()._read_on()
        if not self._free:
            self._free.append(0)
        return actions


BREAKS: dict[str, tuple[Callable[..., Staging], str]] = {
    "a slot is freed one answer early": (FreesOneAnswerEarly, "is overwritten|instead of block|finds"),
    "own blocks are read out of order": (ReadsOutOfOrder, "nothing is left to happen"),
    "a block is announced before it is read": (AnnouncesBeforeTheReadIsDone, "instead of block"),
    "who has left is waited for": (GoesOnAfterSomebodyLeft, "nothing is left to happen"),
    "what nobody wants is read": (ReadsWhatNobodyWants, "each wanted block is read once, no other"),
    "a slot is used twice": (UsesASlotTwice, "is overwritten|instead of block|still uses"),
}


def some_scenes() -> list[Scene]:
    """Four ranks that want nearly everything, with one and with two slots."""
    found = []
    for seed in range(20):
        for slots in (1, 2):
            wants = [(seed * 7 + block * 5) % 16 or 15 * (block % 3 != 0) for block in range(20)]
            leaves = [None, None, 3 if seed % 2 else None, None]
            found.append(
                Scene(
                    [block % 4 for block in range(20)],
                    wants,
                    [slots] * 4,
                    leaves,
                    [(1.0, 0.1 if place else 5.0) for place in range(4)],
                    seed=seed,
                )
            )
    return found


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_of_the_protocol_is_seen(name: str) -> None:
    make, seen_as = BREAKS[name]

    def run(make: Callable[..., Staging]) -> None:
        for scene in some_scenes():
            check(StagingWorld(scene, make).run())

    run(Staging)
    with pytest.raises((AssertionError, ConfusedPeerError), match=seen_as):
        run(make)


# -- step by step


def machine(wants: Sequence[int], *, slots: Sequence[int] = (1, 1), place: int = 0) -> Staging:
    """Ranks own blocks in turn."""
    owner = np.arange(len(wants), dtype=np.int64) % len(slots)
    return Staging(owner, np.array(wants, dtype=np.uint64), slots, place)


def announce(block: int, slot: int = 0) -> Message:
    return Message(Kind.ANNOUNCE, block, slot)


def answer(block: int) -> Message:
    return Message(Kind.ANSWER, block)


def test_a_block_goes_through_its_life() -> None:
    owner, user = machine([0b11, 0b11, 0b11]), machine([0b11, 0b11, 0b11], place=1)
    assert owner.start() == [Read(0, 0)]
    assert user.start() == [Read(1, 0)]
    assert owner.read_done(0) == [Send(1, announce(0)), Arrived(0, 0, 0)]
    assert user.receive(0, announce(0)) == [Arrived(0, 0, 0)]
    assert owner.done(0) == []
    assert user.done(0) == [Send(0, answer(0))]
    assert owner.receive(1, answer(0)) == [Read(2, 0)]
    assert not owner.over


def test_blocks_that_nobody_wants_are_not_read_and_need_no_slot() -> None:
    owner = machine([0b01, 0, 0, 0, 0b10, 0])
    assert owner.start() == [Read(0, 0)]
    assert owner.read_done(0) == [Arrived(0, 0, 0)]
    assert owner.done(0) == [Read(4, 0)]
    assert owner.read_done(4) == [Send(1, announce(4))]
    assert owner.receive(1, answer(4)) == []
    assert owner.over
    assert machine([]).start() == []
    assert machine([]).over


def test_a_rank_that_leaves_reads_on_for_the_others_only() -> None:
    owner = machine([0b11, 0, 0b01, 0, 0b11])
    owner.start()
    owner.read_done(0)
    assert owner.leave() == [Send(1, Message(Kind.LEAVE))]
    assert owner.leave() == []
    assert owner.done(0) == [], "its last answer was that it leaves"
    assert owner.receive(1, answer(0)) == [Read(4, 0)]
    assert owner.read_done(4) == [Send(1, announce(4))]


def test_what_is_read_when_the_last_one_leaves_is_not_announced() -> None:
    owner = machine([0b10, 0, 0b10])
    assert owner.start() == [Read(0, 0)]
    assert owner.receive(1, Message(Kind.LEAVE)) == []
    assert owner.read_done(0) == []
    assert owner.over


def test_what_is_announced_to_a_rank_that_has_just_left_needs_no_answer() -> None:
    user = machine([0b11, 0b11], place=1)
    user.start()
    assert user.leave() == [Send(0, Message(Kind.LEAVE))]
    assert user.receive(0, announce(0)) == []


def test_a_block_that_is_not_needed_any_more_is_answered_for_when_it_comes() -> None:
    owner, user = machine([0b11, 0b10]), machine([0b11, 0b10], place=1)
    owner.start()
    assert owner.done(0) == []
    assert not owner.awaits(0)
    assert owner.read_done(0) == [Send(1, announce(0))]
    assert user.done(0) == []
    assert user.receive(0, announce(0)) == [Send(0, answer(0))]
    assert owner.receive(1, answer(0)) == []
    assert owner.over
    for one in (owner, user):
        for block in (0, 9):
            with pytest.raises(KeyError):
                one.done(block)


def test_it_is_not_over_for_a_rank_before_it_has_answered_for_all_that_it_wanted() -> None:
    for ends in ("uses it", "passes it", "leaves"):
        user = machine([0b10], place=1)
        assert user.start() == []
        assert not user.over
        if ends == "leaves":
            user.leave()
        elif ends == "passes it":
            user.done(0)
            assert not user.over
            user.receive(0, announce(0))
        else:
            user.receive(0, announce(0))
            assert not user.over
            user.done(0)
        assert user.over


def test_reads_may_be_done_in_any_order() -> None:
    owner = machine([0b01, 0, 0b01, 0, 0b01], slots=(2, 1))
    assert owner.start() == [Read(0, 0), Read(2, 1)]
    assert owner.read_done(2) == [Arrived(2, 0, 1)]
    assert owner.read_done(0) == [Arrived(0, 0, 0)]
    assert owner.done(0) == [Read(4, 0)]


def test_who_holds_up_the_node_is_named() -> None:
    owner = machine([0b111] * 9, slots=(2, 1, 1))
    assert owner.waits_for(None) is None
    assert owner.waits_for(1) == (1, 1), "the owner of the block that it waits for"
    owner.start()
    owner.read_done(0)
    owner.read_done(3)
    assert owner.waits_for(None) == (0, 0), "its own consumer"
    assert owner.waits_for(1) == (1, 0)
    owner.done(0)
    assert owner.waits_for(1) == (1, 0), "who has not answered for block 0 holds up more than who reads block 1"
    owner.receive(1, answer(0))
    assert owner.waits_for(1) == (2, 0)
    owner.receive(2, answer(0))
    assert owner.waits_for(1) == (1, 1), "it reads again"


# -- confused and hostile ranks

CONFUSED: dict[str, tuple[int, Message]] = {
    "announces what another owns": (2, announce(1)),
    "announces what is not there": (1, announce(99)),
    "announces in a slot that it does not have": (1, announce(1, 2)),
    "announces what this rank does not want": (1, announce(4)),
    "announces a second time": (1, announce(7)),
    "announces in a slot that is still used": (1, announce(10, 1)),
    "answers for what it was not lent": (1, answer(3)),
    "answers for what another owns": (1, answer(1)),
    "answers for what is not there": (1, answer(99)),
    "answers a second time": (2, answer(0)),
    "leaves a second time": (3, Message(Kind.LEAVE)),
}


@pytest.mark.parametrize("name", CONFUSED)
def test_what_cannot_be_is_refused_and_changes_nothing(name: str) -> None:
    """Block 0 is lent to rank 1, rank 2 has answered for it, rank 3 has left; block 7 lies in slot 1 of rank 1."""
    place, message = CONFUSED[name]
    owner = np.array([0, 1, 2, 0, 1, 0, 0, 1, 0, 0, 1], dtype=np.int64)
    wants = np.array([7, 7, 7, 5, 6, 1, 1, 7, 1, 1, 7], dtype=np.uint64)
    one = Staging(owner, wants, (1, 2, 1, 1), 0)
    one.start()
    one.read_done(0)
    one.receive(2, answer(0))
    one.receive(3, Message(Kind.LEAVE))
    one.receive(1, announce(7, 1))
    before = repr(vars(one))
    with pytest.raises(ConfusedPeerError):
        one.receive(place, message)
    assert repr(vars(one)) == before
    one.done(0)
    one.done(7)
    assert one.receive(1, announce(10, 1)) == [Arrived(10, 1, 1)]


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x00" * 7, b"\x06" + b"\x00" * 6, b"\x01" * 8, b"\xff" * 7])
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(ConfusedPeerError):
        Message.decoded(data)


@given(st.sampled_from(list(Kind)), st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1))
def test_messages_survive_the_journey(kind: Kind, block: int, slot: int) -> None:
    message = Message(kind, block, slot)
    data = message.encoded()
    assert len(data) == struct.calcsize("!BIH")
    assert Message.decoded(data) == message


@pytest.mark.parametrize(
    ("owner", "wants", "slots", "place"),
    [
        ([0], [1, 1], (1,), 0),
        ([1], [1], (1,), 0),
        ([-1], [1], (1,), 0),
        ([0], [2], (1,), 0),
        ([0], [1], (0,), 0),
        ([0], [1], (1,), 1),
        ([0], [1], (1 << 17,), 0),
    ],
)
def test_blocks_that_fit_no_ranks_are_refused(
    owner: list[int], wants: list[int], slots: tuple[int, ...], place: int
) -> None:
    with pytest.raises(ValueError, match=r"place|owners|wanted"):
        Staging(np.array(owner, dtype=np.int64), np.array(wants, dtype=np.uint64), slots, place)
