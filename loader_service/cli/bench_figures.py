"""What `bench` found: every rank's rounds, the limits, and what bounds the load, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import cast

from loader_service.cli.bench_limits import LABELS, LimitBench
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

    def as_dict(self) -> dict[str, object]:
        if not self.rates:
            return {"gib_per_s": None, "cpu_s_per_gib": None, "rounds": [], "why_not": self.why_not}
        return {
            "gib_per_s": median(self.values("gib_per_s")),
            "cpu_s_per_gib": median(self.values("cpu_s_per_gib")),
            "rounds": [
                {"bytes": rate.nbytes, "seconds": rate.seconds, "cpu_s": rate.cpu_s, "gib_per_s": rate.gib_per_s}
                for rate in self.rates
            ],
            "why_not": "",
        }


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured, and where: `here` are the ranks of rank 0's machine, `files_bytes` all files that they read.
    `checkpoint` is its path in words, `began_at` the time in ISO 8601."""

    checkpoint: str
    began_at: str
    load: str
    form: str
    cache: str
    here: Sequence[int]
    machine: Machine
    files_bytes: int

    def result(self, rounds: Sequence[Sequence[RankRound]], limits: LimitBench) -> Result:
        measured = tuple(
            Measured(name, limits.label(name), tuple(limits.rates[name]), limits.left_out.get(name, ""))
            for name in LABELS
        )
        # The round in the middle stands for all: its figures belong together, medians of each would not.
        ordered = sorted(rounds, key=lambda ranks: max(each.seconds for each in ranks))
        middle = ordered[(len(ordered) - 1) // 2]
        known = limits.limits()
        loaded = self._loaded(middle, rounds)
        return Result(self, tuple(map(tuple, rounds)), tuple(middle), measured, known, loaded, judge(loaded, known))

    def _loaded(self, middle: Sequence[RankRound], rounds: Sequence[Sequence[RankRound]]) -> Loaded:
        here = [each for each in middle if each.rank in self.here]
        slowest = max(here, key=lambda each: each.seconds)
        known = [each.cached_before for each in here if each.cached_before is not None]
        return Loaded(
            handed_bytes=sum(each.payload_bytes for each in here),
            source_bytes=min(sum(each.source_bytes for each in here), self.files_bytes),
            seconds=slowest.seconds,
            phases=slowest.phases,
            cpu_s=sum(each.cpu_s for each in here),
            cores=self.machine.cores,
            ranks=len(here),
            threads=slowest.threads,
            capacity_bytes=slowest.timeline.capacity_bytes,
            fresh=self.form == "owned",
            cached=sum(known) / len(known) if known else None,
            direct=all(each.access == "direct" for each in here),
            spent=slowest.shares,
            tensors=slowest.tensors,
            huge_pages=self.machine.huge_pages,
            read_ahead_bytes=self.machine.read_ahead_bytes,
            rounds_s=tuple(max(each.seconds for each in ranks if each.rank in self.here) for ranks in rounds),
        )


@dataclass(frozen=True, slots=True)
class Result:
    """All of it. `middle` is the round of the load whose figures stand for all rounds."""

    bench: Bench
    rounds: tuple[tuple[RankRound, ...], ...]
    middle: tuple[RankRound, ...]
    measured: tuple[Measured, ...]
    limits: Limits
    loaded: Loaded
    verdict: Verdict

    def seconds(self, rank: int) -> list[float]:
        """A rank's seconds, by round."""
        return [ranks[rank].seconds for ranks in self.rounds]

    @property
    def of_limits(self) -> dict[str, float]:
        """The load's GiB/s while it reads, all ranks of the machine together, by each limit's: 1 is as fast."""
        rates = {each.name: median(each.values("gib_per_s")) for each in self.measured if each.rates}
        source, fresh = source_limit(self.loaded, self.limits), fresh_limit(self.loaded, self.limits)
        rates |= {"source": source} if source else {}
        rates |= {"source_and_first_touch": fresh} if fresh and self.loaded.fresh else {}
        return {name: self.loaded.source_gib_per_s / rate for name, rate in rates.items() if rate}

    @property
    def notes(self) -> list[str]:
        """What a reader has to know beside the figures."""
        found = []
        tables = max(each.tables for each in self.middle)
        if tables:
            found.append(f"Left out, since they are filled by rows or by host_table: {tables} host-resident.")
        cached = self.loaded.cached
        if self.bench.cache == "cold" and cached is not None and cached > 0.01:
            found.append(
                f"{100 * cached:.0f} % of the files stayed in the page cache though they were dropped: "
                "they lie in memory, or are in use."
            )
        if self.bench.cache == "warm" and cached is not None and cached < 0.99:
            found.append(f"Only {100 * cached:.0f} % of the files stayed in the page cache: memory holds no more.")
        if cached is None:
            found.append("The system does not say what the page cache holds of the files.")
        why = next((each.why_not for each in self.measured if each.name == "direct"), "")
        if "refuses" in why:
            found.append(f"O_DIRECT cannot be measured: {why}. Storage's limit is then what comes through the cache.")
        return found

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
            "ranks_here": list(bench.here),
            "machine": bench.machine.as_dict(),
            "limits": {each.name: each.as_dict() for each in self.measured},
            "ranks": [
                each.as_dict() | {"rounds": [{"seconds": seconds} for seconds in self.seconds(each.rank)]}
                for each in self.middle
            ],
            "of_limits": self.of_limits,
            "verdict": self.verdict.as_dict(),
            "notes": self.notes,
        }
