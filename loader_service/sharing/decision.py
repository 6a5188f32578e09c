"""How the ranks of a node share what several of them want: what each tells of itself, and what follows from it.

Pure. Two rounds: with the plan each rank tells its facts; with the opening each tells what its own node can do, from
the plans of that node's ranks. The weakest way of any node is then that of all, so that every rank does the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast

from loader_service.agreement.messages import JSON
from loader_service.memory.admission import Supply, refusal
from loader_service.planning.sharing import MOST_RANKS
from loader_service.sizes import format_size

Way: TypeAlias = Literal["none", "page_cache", "staging"]
Request: TypeAlias = Literal["auto", "none", "page_cache", "staging"]

LEAST_SAVED_BYTES: Final = 64 << 20
"""What sharing has to spare a node's storage before `auto` takes the trouble of setting it up."""

LEAST_SLOT_BYTES: Final = 64 << 10
_STRENGTH: Final = {"none": 0, "page_cache": 1, "staging": 2}
_NOTHING_TO_SHARE: Final = "the node's ranks want no common bytes"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a rank tells with its plan. `connected` are the ranks that it can share memory with; `files` is a digest of
    the identities of the shards that it sees; `slots` of `slot_bytes` it can give to staging;
    `held`: it wants nothing that is not in memory already; `refused`: why its system gives it no memory to share."""

    rank: int
    connected: tuple[int, ...]
    files: str
    slot_bytes: int
    slots: int
    held: bool
    supply: Supply
    refused: str | None = None

    @property
    def node(self) -> str:
        return self.supply.node

    def as_json(self) -> JSON:
        facts = {"connected": list(self.connected), "files": self.files}
        slots = {"slot_bytes": self.slot_bytes, "slots": self.slots, "held": self.held, "refused": self.refused}
        return cast(JSON, {**facts, **slots, "supply": self.supply.as_json()})

    @classmethod
    def from_json(cls, rank: int, told: Mapping[str, object]) -> NodeFacts:
        """What another rank told. Raises ValueError or KeyError for anything else."""
        connected, files, slot_bytes, slots = (told[key] for key in ("connected", "files", "slot_bytes", "slots"))
        numbers = [slot_bytes, slots, *(connected if isinstance(connected, list) else [None])]
        whole = [number for number in numbers if type(number) is int and number >= 0]
        held, refused = told["held"], told["refused"]
        known = isinstance(files, str) and isinstance(held, bool) and isinstance(refused, str | None)
        if len(whole) != len(numbers) or not known:
            raise ValueError(f"rank {rank} told the facts of its node in an unknown way")
        supply = Supply.from_json(rank, told["supply"])
        return cls(
            rank,
            tuple(whole[2:]),
            cast(str, files),
            whole[0],
            whole[1],
            cast(bool, held),
            supply,
            cast("str | None", refused),
        )


def neighbours(facts: Sequence[NodeFacts], rank: int) -> list[NodeFacts]:
    """The ranks of the same node, `rank` among them, in their order."""
    own = next(each for each in facts if each.rank == rank)
    return [each for each in facts if each.node == own.node]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the ranks of one node want: `union_bytes` of the files, `wanted_bytes` summed over the ranks, of which
    `shared_bytes` of the files are wanted by more than one."""

    union_bytes: int
    wanted_bytes: int
    shared_bytes: int

    @property
    def saved_bytes(self) -> int:
        return self.wanted_bytes - self.union_bytes


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one node can do at most, and why not more. `way` None: nothing to share there, so any way is right."""

    way: Way | None
    reason: str

    def as_json(self) -> JSON:
        return {"way": self.way, "reason": self.reason}

    @classmethod
    def from_json(cls, rank: int, told: Mapping[str, object]) -> Opinion:
        way, reason = told.get("way"), told.get("reason")
        if not (way is None or way in _STRENGTH) or not isinstance(reason, str):
            raise ValueError(f"rank {rank} told how its node can share in an unknown way")
        return cls(cast("Way | None", way), reason)


def opinion(requested: Request, node: Sequence[NodeFacts], wanted: Wanted) -> Opinion:
    """What the node of the given ranks can do of what is requested. Equal on all ranks of the node."""
    if requested == "none":
        return Opinion("none", "as configured")
    if len(node) < 2:
        return Opinion(None, "one rank on its node")
    if len(node) > MOST_RANKS:  # nobody lays out what so many want
        return Opinion("none", f"{len(node)} ranks on one node; at most {MOST_RANKS} share")
    if all(each.held for each in node):
        return Opinion(None, "memory holds all that the node's ranks want already")
    if not wanted.shared_bytes:
        return Opinion(None, _NOTHING_TO_SHARE)
    if requested == "auto" and wanted.saved_bytes < LEAST_SAVED_BYTES:
        return Opinion(None, f"the node's ranks want only {format_size(wanted.saved_bytes)} twice")
    problem = _differs(node)
    if problem is not None:
        return Opinion("none", problem)
    staging_problem = _staging_problem(node)
    if requested != "page_cache" and staging_problem is None:
        return Opinion("staging", "as configured" if requested == "staging" else _what_is_shared(wanted))
    cache_problem = _page_cache_problem(node, wanted)
    if requested == "staging":
        return Opinion("none", staging_problem or "")
    if cache_problem is not None:
        return Opinion("none", cache_problem)
    why = "as configured" if requested == "page_cache" else f"{_what_is_shared(wanted)}; no staging: {staging_problem}"
    return Opinion("page_cache", why)


def opinion_if_all_can(requested: Request, ranks: int, wanted: Wanted, *, slot_bytes: int) -> Opinion:
    """What a node of so many ranks does that see the same files, can share memory, have all the room that it takes,
    and hold nothing in their caches: as far as plans tell."""
    everybody = tuple(range(ranks))
    supplies = [Supply(rank, "", (), 0) for rank in everybody]
    node = [NodeFacts(each.rank, everybody, "", slot_bytes, 1, held=False, supply=each) for each in supplies]
    return opinion(requested, node, wanted)


def together(opinions: Sequence[Opinion]) -> tuple[Way, str]:
    """(the way of all ranks, why): the weakest that any node can, as its lowest rank told it."""
    weakest: tuple[int, Opinion] | None = None
    for rank, each in enumerate(opinions):
        if each.way is not None and (weakest is None or _STRENGTH[each.way] < _STRENGTH[weakest[1].way or "none"]):
            weakest = rank, each
    if weakest is None:
        reasons = {each.reason for each in opinions}
        return "none", reasons.pop() if len(reasons) == 1 else "no node has ranks that want common bytes"
    rank, chosen = weakest
    assert chosen.way is not None
    alike = all(each.way is None or each == chosen for each in opinions)
    return chosen.way, chosen.reason if alike else f"rank {rank}'s node: {chosen.reason}"


def _what_is_shared(wanted: Wanted) -> str:
    wanted_size, union_size = format_size(wanted.wanted_bytes), format_size(wanted.union_bytes)
    return f"the ranks of a node want {wanted_size}, of which {union_size} are different bytes"


def _differs(node: Sequence[NodeFacts]) -> str | None:
    other = next((each for each in node if each.files != node[0].files), None)
    if other is None:
        return None
    return f"ranks {node[0].rank} and {other.rank} of one node see different files (device, inode, size or time)"


def _staging_problem(node: Sequence[NodeFacts]) -> str | None:
    for one, other in itertools.permutations(node, 2):
        if other.rank not in one.connected:
            return f"ranks {one.rank} and {other.rank} of one node cannot share memory (other users or containers)"
    refused = next((each for each in node if each.refused is not None), None)
    if refused is not None:
        return f"rank {refused.rank}: {refused.refused}"
    slot_bytes = slot_bytes_of(node)
    if slot_bytes < LEAST_SLOT_BYTES:
        return f"staging slots of {format_size(slot_bytes)} are too small to share: raise staging.capacity_bytes"
    return refusal([each.supply for each in node], [each.slots * slot_bytes for each in node])


def _page_cache_problem(node: Sequence[NodeFacts], wanted: Wanted) -> str | None:
    """Whether what the node wants fits the page cache, which each rank fills an equal part of."""
    part_bytes = -(-wanted.union_bytes // len(node))
    return refusal([each.supply for each in node], [part_bytes] * len(node))


def slot_bytes_of(node: Sequence[NodeFacts]) -> int:
    """The size of a slot that every rank of the node can give."""
    return min(each.slot_bytes for each in node)
