"""Which blocks a consumer is done with, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loader_service.sharing.uses import BlockUses


def test_a_block_is_given_back_when_its_last_use_is_over_and_it_was_passed() -> None:
    done: list[int] = []
    uses = BlockUses([0, 1], done.append)
    uses.begin(0)
    uses.begin(0)
    uses.end(0)
    uses.end(0)
    assert done == []  # another use of it may follow
    uses.begin(1)
    assert done == [0]
    uses.end(1)
    uses.finish()
    assert done == [0, 1]


def test_a_use_that_outlasts_its_turn_keeps_its_block_alone() -> None:
    done: list[int] = []
    uses = BlockUses([0, 1, 2], done.append)
    uses.begin(0)
    uses.begin(1)
    uses.end(1)
    uses.begin(2)
    assert done == [1]
    uses.end(0)
    assert done == [1, 0]


def test_blocks_that_are_never_used_are_given_back_as_they_are_passed() -> None:
    done: list[int] = []
    uses = BlockUses([3, 5, 8], done.append)
    uses.begin(5)
    assert done == [3]
    uses.finish()
    assert done == [3, 8]
    uses.end(5)
    assert done == [3, 8, 5]


@given(st.lists(st.integers(0, 9), max_size=30), st.sets(st.integers(0, 9)), st.randoms())
def test_each_block_is_given_back_once_and_never_while_it_is_used(order: list[int], blocks: set[int], random) -> None:  # type: ignore[no-untyped-def]
    done: list[int] = []
    used = sorted(block for block in order if block in blocks)
    uses = BlockUses(sorted(blocks), done.append)
    open_uses: list[int] = []
    for block in used:
        uses.begin(block)
        open_uses.append(block)
        while open_uses and random.random() < 0.4:
            uses.end(open_uses.pop(random.randrange(len(open_uses))))
        assert not set(done) & set(open_uses)
    uses.finish()
    assert not set(done) & set(open_uses)
    for block in open_uses:
        uses.end(block)
    assert sorted(done) == sorted(blocks)
