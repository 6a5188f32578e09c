"""What `bench` found: every rank's rounds, the limits, and what bounds the load, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from typing import Any, cast

from loader_service.cli.bench_limits import LABELS, LimitBench
from loader_service.cli.plan_titles import spans
from loader_service.measuring.limits import Rate
from loader_service.measuring.machine import Machine
from loader_service.measuring.verdict import Limits, Loaded, Verdict, fresh_limit, judge, source_limit
from loader_service.report import LoadReport
from loader_service.timeline import Shares, Timeline

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class RankRound:
    """One load on one rank. `cpu_s` of the process; `cached_before`, 0 to 1, of the rank's files, None if unknown;
    `tables` host-resident ones that were left out."""

    rank: int
    seconds: float
    payload_bytes: int
    read_bytes: int
    striped_bytes: int
    tensors: int
    threads: int
    access: str
    sharing: str
    cpu_s: float
    cached_before: float | None
    tables: int
    phases: dict[str, float]
    shares: Shares
    timeline: Timeline

    @classmethod
    def of(
        cls, report: LoadReport, cpu_s: float, cached: float | None, spent: Shares, timeline: Timeline, tables: int
    ) -> RankRound:
        policies = report.policies
        return cls(
            rank=report.rank,
            seconds=report.seconds,
            payload_bytes=report.payload_bytes,
            read_bytes=report.read_bytes,
            striped_bytes=report.striped_bytes,
            tensors=report.tensors,
            threads=int(policies["threads"].effective),
            access=policies["access"].effective,
            sharing=policies["sharing"].effective,
            cpu_s=cpu_s,
            cached_before=cached,
            tables=tables,
            phases=dict(report.phases),
            shares=spent,
            timeline=timeline,
        )

    @property
    def gib_per_s(self) -> float:
        return self.payload_bytes / _GIB / self.seconds if self.seconds > 0 else 0.0

    @property
    def cpu_s_per_gib(self) -> float:
        return self.cpu_s / (self.payload_bytes / _GIB) if self.payload_bytes else 0.0

    @property
    def source_bytes(self) -> int:
        """What it read from files that no other rank did; of what was read ahead into the page cache, its own reads."""
        return self.read_bytes + (self.striped_bytes if self.sharing == "staging" else 0)

    def as_dict(self) -> dict[str, object]:
        document = {each.name: getattr(self, each.name) for each in fields(self)}
        document |= {"gib_per_s": self.gib_per_s, "cpu_s_per_gib": self.cpu_s_per_gib}
        return document | {"shares": asdict(self.shares), "timeline": self.timeline.as_dict()}

    @classmethod
    def from_dict(cls, document: Mapping[str, object]) -> RankRound:
        """What `as_dict` gave, on any rank."""
        known = {each.name: document[each.name] for each in fields(cls)}
        spent = Shares(**cast("dict[str, float]", document["shares"]))
        timeline = Timeline.from_dict(cast("Mapping[str, object]", document["timeline"]))
        return cls(**known | {"shares": spent, "timeline": timeline})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Measured:
    """One limit: its rounds, or why there are none."""

    name: str
    label: str
    rates: tuple[Rate, ...]
    why_not: str = ""

    def values(self, name: str) -> list[float]:
        return [float(getattr(rate, name)) for rate in self.rates]

    @property
    def middle(self) -> float | None:
        """GiB/s, the median."""
        return median(self.values("gib_per_s")) if self.rates else None

    def as_dict(self) -> dict[str, object]:
        return {
            "label": self.label,
            "gib_per_s": self.middle,
            "cpu_s_per_gib": median(self.values("cpu_s_per_gib")) if self.rates else None,
            "rounds": [
                {"bytes": rate.nbytes, "seconds": rate.seconds, "cpu_s": rate.cpu_s, "gib_per_s": rate.gib_per_s}
                for rate in self.rates
            ],
            "why_not": "" if self.rates else self.why_not,
        }

    @classmethod
    def from_dict(cls, name: str, document: Mapping[str, Any]) -> Measured:
        """What `as_dict` gave, on any rank."""
        rates = tuple(Rate(each["bytes"], each["seconds"], each["cpu_s"]) for each in document["rounds"])
        return cls(name, document["label"], rates, document["why_not"])


@dataclass(frozen=True, slots=True)
class Node:
    """One node, and what its first rank measured of it: `ranks` are all that run there, in order, `files_bytes` all
    files that they read."""

    ranks: tuple[int, ...]
    machine: Machine
    files_bytes: int
    measured: tuple[Measured, ...] = ()

    def with_limits(self, found: LimitBench) -> Node:
        """With what was measured."""
        measured = (
            Measured(name, found.label(name), tuple(found.rates[name]), found.left_out.get(name, "")) for name in LABELS
        )
        return replace(self, measured=tuple(measured))

    @property
    def limits(self) -> Limits:
        return Limits(**{each.name: each.middle for each in self.measured})

    @property
    def name(self) -> str:
        """As people read it."""
        return f"node of {spans(self.ranks)}"

    def as_dict(self) -> dict[str, object]:
        return {
            "ranks": list(self.ranks),
            "machine": self.machine.as_dict(),
            "files_bytes": self.files_bytes,
            "limits": {each.name: each.as_dict() for each in self.measured},
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Node:
        """What `as_dict` gave, on any rank."""
        measured = tuple(Measured.from_dict(name, each) for name, each in document["limits"].items())
        machine = Machine(**document["machine"])
        return cls(tuple(document["ranks"]), machine, document["files_bytes"], measured)


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured. `checkpoint` is its path in words, `began_at` the time in ISO 8601."""

    checkpoint: str
    began_at: str
    load: str
    form: str
    cache: str

    def result(self, rounds: Sequence[Sequence[RankRound]], nodes: Sequence[Node]) -> Result:
        """`rounds` has every rank's, by round; `nodes` come in the order of their first ranks."""
        # The round in the middle stands for all: its figures belong together, medians of each would not.
        ordered = sorted(rounds, key=lambda ranks: max(each.seconds for each in ranks))
        middle = ordered[(len(ordered) - 1) // 2]
        judged = []
        for node in nodes:
            loaded = self._loaded(node, middle, rounds)
            judged.append(JudgedNode(node, loaded, judge(loaded, node.limits)))
        return Result(self, tuple(map(tuple, rounds)), tuple(middle), tuple(judged))

    def _loaded(self, node: Node, middle: Sequence[RankRound], rounds: Sequence[Sequence[RankRound]]) -> Loaded:
        here = [each for each in middle if each.rank in node.ranks]
        slowest = max(here, key=lambda each: each.seconds)
        known = [each.cached_before for each in here if each.cached_before is not None]
        return Loaded(
            handed_bytes=sum(each.payload_bytes for each in here),
            source_bytes=min(sum(each.source_bytes for each in here), node.files_bytes),
            seconds=slowest.seconds,
            phases=slowest.phases,
            cpu_s=sum(each.cpu_s for each in here),
            cores=node.machine.cores,
            ranks=len(here),
            threads=slowest.threads,
            capacity_bytes=slowest.timeline.capacity_bytes,
            fresh=self.form == "owned",
            cached=sum(known) / len(known) if known else None,
            direct=all(each.access == "direct" for each in here),
            spent=slowest.shares,
            tensors=slowest.tensors,
            huge_pages=node.machine.huge_pages,
            read_ahead_bytes=node.machine.read_ahead_bytes,
            rounds_s=tuple(max(each.seconds for each in ranks if each.rank in node.ranks) for ranks in rounds),
        )


@dataclass(frozen=True, slots=True)
class JudgedNode:
    """What one node's ranks loaded, beside its limits, and what bounds that."""

    node: Node
    loaded: Loaded
    verdict: Verdict

    @property
    def source_gib_per_s(self) -> float | None:
        """What page cache and storage give together, at best; None where nobody knows."""
        return source_limit(self.loaded, self.node.limits)

    @property
    def of_limits(self) -> dict[str, float]:
        """The load's GiB/s while it reads, all ranks of the node together, by each limit's: 1 is as fast."""
        rates = {each.name: each.middle for each in self.node.measured}
        rates["source"] = self.source_gib_per_s
        if self.loaded.fresh:
            rates["source_and_first_touch"] = fresh_limit(self.loaded, self.node.limits)
        return {name: self.loaded.source_gib_per_s / rate for name, rate in rates.items() if rate}

    def notes(self, cache: str) -> list[str]:
        """What a reader has to know beside the figures. `cache`: the state that was asked for."""
        found = []
        cached = self.loaded.cached
        if cache == "cold" and cached is not None and cached > 0.01:
            found.append(
                f"{100 * cached:.0f} % of the files stayed in the page cache though they were dropped: "
                "they lie in memory, or are in use."
            )
        if cache == "warm" and cached is not None and cached < 0.99:
            found.append(f"Only {100 * cached:.0f} % of the files stayed in the page cache: memory holds no more.")
        if cached is None:
            found.append("The system does not say what the page cache holds of the files.")
        why = next((each.why_not for each in self.node.measured if each.name == "direct"), "")
        if "refuses" in why:
            found.append(f"O_DIRECT cannot be measured: {why}. Storage's limit is then what comes through the cache.")
        return found

    def as_dict(self) -> dict[str, object]:
        return self.node.as_dict() | {"of_limits": self.of_limits, "verdict": self.verdict.as_dict()}


@dataclass(frozen=True, slots=True)
class Result:
    """All of it. `middle` is the round of the load whose figures stand for all rounds."""

    bench: Bench
    rounds: tuple[tuple[RankRound, ...], ...]
    middle: tuple[RankRound, ...]
    nodes: tuple[JudgedNode, ...]

    def seconds(self, rank: int) -> list[float]:
        """A rank's seconds, by round."""
        return [ranks[rank].seconds for ranks in self.rounds]

    @property
    def slowest(self) -> JudgedNode:
        """The node for which the others wait: what bounds it bounds the load of all."""
        return max(self.nodes, key=lambda each: each.loaded.seconds)

    @property
    def notes(self) -> list[str]:
        """What a reader has to know beside the figures."""
        found = []
        tables = max(each.tables for each in self.middle)
        if tables:
            found.append(f"Left out, since they are filled by rows or by host_table: {tables} host-resident.")
        for each in self.nodes:
            found += self.of_node(each, each.notes(self.bench.cache))
        return found

    def of_node(self, judged: JudgedNode, sentences: Sequence[str]) -> list[str]:
        """Sentences on one node, which say so where there are several."""
        where = f"{judged.node.name[0].upper()}{judged.node.name[1:]}: " if len(self.nodes) > 1 else ""
        return [where + sentence for sentence in sentences]

    def as_dict(self) -> dict[str, object]:
        """The JSON document."""
        bench = self.bench
        return {
            "checkpoint": bench.checkpoint,
            "began_at": bench.began_at,
            "load": bench.load,
            "form": bench.form,
            "cache": bench.cache,
            "world_size": len(self.middle),
            "nodes": [each.as_dict() for each in self.nodes],
            "ranks": [
                each.as_dict() | {"rounds": [{"seconds": seconds} for seconds in self.seconds(each.rank)]}
                for each in self.middle
            ],
            "verdict": self.slowest.verdict.as_dict() | {"ranks": list(self.slowest.node.ranks)},
            "notes": self.notes,
        }
