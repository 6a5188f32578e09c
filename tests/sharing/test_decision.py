"""How ranks of a node share: which way follows from what they tell, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loader_service.memory.admission import Room, Supply
from loader_service.sharing.decision import (
    LEAST_SAVED_BYTES,
    NodeFacts,
    Opinion,
    Request,
    Wanted,
    Way,
    neighbours,
    opinion,
    opinion_if_all_can,
    together,
)

GIB = 1 << 30
SLOT = 16 << 20
ALL_THE_SAME = Wanted(union_bytes=3 * GIB, wanted_bytes=6 * GIB, shared_bytes=3 * GIB)
NOTHING_IN_COMMON = Wanted(union_bytes=3 * GIB, wanted_bytes=3 * GIB, shared_bytes=0)


def facts(
    rank: int,
    *,
    connected: tuple[int, ...] = (0, 1, 2, 3),
    files: str = "a",
    free: int = 20 * GIB,
    node: str = "n",
    slot: int = SLOT,
    held: bool = False,
    refused: str | None = None,
) -> NodeFacts:
    supply = Supply(rank, node, (Room("", 24 * GIB, free),), 2 * GIB)
    return NodeFacts(rank, connected, files, slot, 4, held, supply, refused)


TWO = (facts(0), facts(1))


@pytest.mark.parametrize(
    ("requested", "node", "wanted", "way", "reason"),
    [
        ("none", TWO, ALL_THE_SAME, "none", "as configured"),
        ("auto", TWO, ALL_THE_SAME, "staging", "6.00 GiB, of which 3.00 GiB are different"),
        ("staging", TWO, ALL_THE_SAME, "staging", "as configured"),
        ("page_cache", TWO, ALL_THE_SAME, "page_cache", "as configured"),
        ("auto", TWO[:1], ALL_THE_SAME, None, "one rank on its node"),
        ("staging", (facts(0, held=True), facts(1, held=True)), ALL_THE_SAME, None, "memory holds all"),
        ("staging", (facts(0, held=True), facts(1)), ALL_THE_SAME, "staging", "as configured"),
        ("staging", TWO, NOTHING_IN_COMMON, None, "no common bytes"),
        ("auto", TWO, Wanted(GIB, GIB + LEAST_SAVED_BYTES - 1, GIB), None, "twice"),
        ("staging", TWO, Wanted(GIB, GIB + 1, 1), "staging", "as configured"),
        (
            "auto",
            (facts(0), facts(1, files="b")),
            ALL_THE_SAME,
            "none",
            "ranks 0 and 1 of one node see different files",
        ),
        ("auto", (facts(0), facts(1, connected=())), ALL_THE_SAME, "page_cache", "cannot share memory"),
        ("staging", (facts(0), facts(1, connected=())), ALL_THE_SAME, "none", "cannot share memory"),
        ("auto", (facts(0), facts(1, refused="no memfd")), ALL_THE_SAME, "page_cache", "no staging: rank 1: no memfd"),
        ("staging", (facts(0), facts(1, refused="no memfd")), ALL_THE_SAME, "none", "rank 1: no memfd"),
        ("auto", (facts(0), facts(1, slot=4096)), ALL_THE_SAME, "page_cache", "4096 bytes are too small"),
        ("auto", (facts(0), facts(1, free=2 * GIB)), ALL_THE_SAME, "none", "memory.reserve_bytes"),
        ("page_cache", (facts(0), facts(1, free=4 * GIB)), ALL_THE_SAME, "none", "3.00 GiB of host memory"),
        ("auto", (facts(0), facts(1, free=4 * GIB)), ALL_THE_SAME, "staging", "are different"),
    ],
)
def test_what_a_node_can_do(
    requested: Request, node: tuple[NodeFacts, ...], wanted: Wanted, way: Way | None, reason: str
) -> None:
    found = opinion(requested, node, wanted)
    assert found.way == way
    assert reason in found.reason


@pytest.mark.parametrize(
    ("requested", "wanted", "slot_bytes", "way", "reason"),
    [
        ("auto", ALL_THE_SAME, SLOT, "staging", "are different"),
        ("auto", ALL_THE_SAME, 4096, "page_cache", "too small to share"),
        ("auto", Wanted(GIB, GIB + LEAST_SAVED_BYTES - 1, GIB), SLOT, None, "want only 64.00 MiB twice"),
        ("auto", Wanted(GIB, GIB + LEAST_SAVED_BYTES, GIB), SLOT, "staging", "are different"),
        ("staging", Wanted(GIB, GIB + 1, 1), SLOT, "staging", "as configured"),
        ("page_cache", ALL_THE_SAME, SLOT, "page_cache", "as configured"),
        ("none", ALL_THE_SAME, SLOT, "none", "as configured"),
    ],
)
def test_what_plans_alone_tell_is_what_a_node_does_that_lacks_nothing(
    requested: Request, wanted: Wanted, slot_bytes: int, way: Way | None, reason: str
) -> None:
    found = opinion_if_all_can(requested, 4, wanted, slot_bytes=slot_bytes)
    assert found.way == way
    assert reason in found.reason


@pytest.mark.parametrize(
    ("opinions", "way", "reason"),
    [
        ([Opinion("staging", "s"), Opinion("staging", "s")], "staging", "s"),
        ([Opinion(None, "alone"), Opinion("staging", "s")], "staging", "s"),
        ([Opinion("staging", "s"), Opinion("none", "n"), Opinion("page_cache", "p")], "none", "rank 1's node: n"),
        ([Opinion("staging", "s"), Opinion("page_cache", "p")], "page_cache", "rank 1's node: p"),
        ([Opinion(None, "alone"), Opinion(None, "alone")], "none", "alone"),
        ([Opinion(None, "alone"), Opinion(None, "little")], "none", "no node has ranks"),
    ],
)
def test_all_ranks_take_the_weakest_way_of_any_node(opinions: list[Opinion], way: Way, reason: str) -> None:
    assert together(opinions)[0] == way
    assert reason in together(opinions)[1]


def test_what_ranks_tell_survives_the_way_there_and_back() -> None:
    own = facts(3, connected=(0, 2))
    assert NodeFacts.from_json(3, own.as_json()) == own  # type: ignore[arg-type]
    assert Opinion.from_json(0, Opinion(None, "r").as_json()) == Opinion(None, "r")  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["connected", "files", "slot_bytes", "slots", "held"])
def test_unknown_facts_are_refused(key: str) -> None:
    told = dict(facts(0).as_json())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank 1"):
        NodeFacts.from_json(1, told | {key: None})


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 1"):
        Opinion.from_json(1, {"way": "magic", "reason": ""})


def test_neighbours_are_those_of_one_node() -> None:
    everyone = [facts(0), facts(1, node="m"), facts(2), replace(facts(3), connected=())]
    assert [each.rank for each in neighbours(everyone, 2)] == [0, 2, 3]
