"""The raw weight cache against a model that knows every byte by itself: what is held, what goes, who has room."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from loader_service.memory.cache import Admission, FileState, WeightCache
from loader_service.memory.held import ByteRanges

FILES = [FileState(name, 0) for name in "ab"]
SIZE = 24
CAPACITY = 20

RANGE = st.tuples(st.integers(0, 1), st.integers(0, SIZE - 1), st.integers(1, 10)).map(
    lambda drawn: (drawn[0], drawn[1], min(SIZE, drawn[1] + drawn[2]))
)
BEGIN = st.tuples(st.just("begin"), st.lists(RANGE, min_size=1, max_size=4), st.integers(1, 40))
STEPS = st.one_of(
    BEGIN,
    st.tuples(st.just("insert"), st.integers(0, 9), RANGE),
    st.tuples(st.just("load"), st.integers(0, 9), st.none()),
    st.tuples(st.just("held"), RANGE, st.none()),
    st.tuples(st.just("close"), st.integers(0, 9), st.none()),
)
Range = tuple[int, int, int]
Bytes = set[tuple[int, int]]


def bytes_of(*ranges: Range) -> Bytes:
    return {(file, byte) for file, start, stop in ranges for byte in range(start, stop)}


@dataclass(eq=False)
class Claim:
    ranges: list[Range]
    wanted: Bytes
    capacity: int
    admission: Admission
    reserved: int = 0
    adds: bool = False


@dataclass
class Model:
    """The rules, written as plainly as can be, beside the cache itself. `entries` in the order of their last use."""

    cache: WeightCache = field(default_factory=WeightCache)
    entries: list[Range] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    evictions: int = 0

    @property
    def held(self) -> Bytes:
        return bytes_of(*self.entries)

    @property
    def reserved(self) -> int:
        return sum(claim.reserved for claim in self.claims)

    def stays(self, entry: Range) -> bool:
        return any(bytes_of(entry) & claim.wanted for claim in self.claims)

    def begin(self, ranges: list[Range], capacity: int) -> None:
        mapping = {
            FILES[number]: ByteRanges.merged(
                [start for file, start, _ in ranges if file == number],
                [stop for file, _, stop in ranges if file == number],
            )
            for number in {file for file, _, _ in ranges}
        }
        held = self.held
        claim = Claim(ranges, bytes_of(*ranges), capacity, self.cache.make_room(mapping, capacity))
        lacking = len(claim.wanted - self.held)
        others = self.reserved
        self.claims.append(claim)
        stays = len(bytes_of(*filter(self.stays, self.entries))) + others
        claim.adds = lacking == 0 or stays + lacking <= capacity
        claim.reserved = lacking if claim.adds else 0
        for entry in tuple(self.entries):
            if len(self.held) + self.reserved > capacity and not self.stays(entry):
                self.entries.remove(entry)
                self.evictions += 1
        assert claim.admission.admitted == claim.adds
        assert all(open_claim.wanted & held == open_claim.wanted & self.held for open_claim in self.claims)
        if claim.adds and lacking:
            assert len(self.held) + self.reserved <= capacity

    def insert(self, claim: Claim, span: Range) -> None:
        file, start, stop = span
        new = 0
        lacking = sorted(byte for _, byte in bytes_of(span) - self.held)
        parts: list[Range] = []
        for byte in lacking:
            if parts and parts[-1][2] == byte:
                parts[-1] = (file, parts[-1][1], byte + 1)
            else:
                parts.append((file, byte, byte + 1))
        for part in parts:
            size = part[2] - part[1]
            beyond = max(0, size - claim.reserved)
            if claim.adds and (not beyond or len(self.held) + self.reserved + beyond <= claim.capacity):
                claim.reserved -= size - beyond
                self.entries.append(part)
                new += size
        memory = memoryview(bytearray(byte + 100 * file for byte in range(start, stop)))
        assert claim.admission.insert(FILES[file], start, memory) == new

    def lookup(self, span: Range) -> bool:
        file, start, stop = span
        found = self.cache.held(FILES[file], start, stop)
        assert (found is not None) == (bytes_of(span) <= self.held)
        if found is None:
            return False
        assert b"".join(each.memory for each in found) == bytes(byte + 100 * file for byte in range(start, stop))
        used = sorted(entry for entry in self.entries if bytes_of(entry) & bytes_of(span))
        assert [each.start for each in found] == [max(start, begin) for _, begin, _ in used]
        assert [each.stop for each in found] == [min(stop, end) for _, _, end in used]
        self.entries = [entry for entry in self.entries if entry not in used] + used
        return True

    def close(self, claim: Claim) -> None:
        claim.admission.close()
        self.claims.remove(claim)

    def step(self, name: str, first: object, second: object) -> None:
        if name == "begin":
            assert isinstance(first, list)
            assert isinstance(second, int)
            self.begin(first, second)
        elif name == "held":
            assert isinstance(first, tuple)
            self.lookup(first)
        elif self.claims:
            assert isinstance(first, int)
            claim = self.claims[first % len(self.claims)]
            if name == "insert":
                assert isinstance(second, tuple)
                self.insert(claim, second)
            elif name == "load":
                for span in claim.ranges:
                    if not self.lookup(span):
                        self.insert(claim, span)
            else:
                self.close(claim)
        self.check()

    def check(self) -> None:
        columns = {
            (FILES.index(file), start, stop)
            for file, held in self.cache._files.items()
            for start, stop in zip(held.starts.tolist(), held.stops.tolist(), strict=True)
        }
        assert columns == set(self.entries)
        statistics = self.cache.statistics()
        assert (statistics.held_bytes, statistics.reserved_bytes) == (len(self.held), self.reserved)
        assert (statistics.entries, statistics.evictions) == (len(self.entries), self.evictions)


@settings(max_examples=300)
@given(steps=st.lists(STEPS, max_size=25))
def test_any_sequence_of_loads_leaves_what_the_model_says(steps: list[tuple[str, object, object]]) -> None:
    model = Model()
    for step in steps:
        model.step(*step)


@settings(max_examples=150)
@given(steps=st.lists(STEPS, max_size=25))
def test_with_one_capacity_it_is_never_exceeded(steps: list[tuple[str, object, object]]) -> None:
    model = Model()
    for name, first, second in steps:
        model.step(name, first, CAPACITY if name == "begin" else second)
        statistics = model.cache.statistics()
        assert statistics.held_bytes + statistics.reserved_bytes <= CAPACITY
