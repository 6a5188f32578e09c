"""Says in words what bounds a load, and which setting would help. Pure: figures in, sentences out.

A setting is named only where a measurement of this very run, or one of the kernel's own facts, speaks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from loader_service.measuring.doubts import doubts
from loader_service.sizes import UNITS, format_rate, format_size
from loader_service.timeline import Shares

Bound = Literal["too small", "fixed costs", "storage", "page cache", "memory", "CPU", "consumer", "budget", "unclear"]

LEAST_BYTES = 64 << 20  # less is read in so short a time that only the fixed costs can be told
NEAR = 0.85  # of a limit: as good as there
_MUCH = 0.3  # of the time
_WORTH = 0.15  # of the time: what a setting has to save
_NO_SETTING = "No setting would help."
_FASTER = 1.15  # what more in flight has to bring to be worth a setting
_SMALL_READ_AHEAD_BYTES = 512 << 10
_GIB = UNITS["GiB"]


@dataclass(frozen=True, slots=True)
class Limits:
    """GiB/s of this machine, None for what was not measured. `direct`: as many in flight as the loader has threads,
    `direct_more`: twice as many. `buffered` is cold, and only measured where `direct` cannot be."""

    direct_one: float | None = None
    direct: float | None = None
    direct_more: float | None = None
    buffered: float | None = None
    cache_copy: float | None = None
    memory_copy: float | None = None
    touch_huge: float | None = None
    touch_ordinary: float | None = None

    @property
    def storage(self) -> float | None:
        """The best that storage gives with as many reads in flight as the loader has, or with one."""
        known = [rate for rate in (self.direct_one, self.direct) if rate is not None]
        return max(known, default=self.buffered)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load, medians of its rounds: the slowest rank's seconds, the bytes of all ranks of the machine together.

    `handed_bytes` went to the consumers, `source_bytes` of them came from files, each once. `fresh`: into memory that
    nobody had touched. `cached` is how much of the files the page cache held before, 0 to 1, None where nobody knows.
    `threads` of a rank; `direct`: whether all of it was read past the page cache. `rounds_s` are the seconds of every
    round.
    """

    handed_bytes: int
    source_bytes: int
    seconds: float
    phases: dict[str, float]
    cpu_s: float
    cores: int
    ranks: int
    threads: int
    capacity_bytes: int
    fresh: bool
    cached: float | None
    direct: bool
    spent: Shares = field(default_factory=Shares)
    tensors: int = 0
    huge_pages: str = ""
    read_ahead_bytes: int = 0
    sharing: str = ""
    rounds_s: tuple[float, ...] = ()

    @property
    def read_s(self) -> float:
        return self.phases.get("read", self.seconds)

    @property
    def fixed_s(self) -> float:
        return max(0.0, self.seconds - self.read_s)

    @property
    def source_gib_per_s(self) -> float:
        return self.source_bytes / _GIB / self.read_s if self.read_s > 0 else 0.0

    @property
    def handed_gib_per_s(self) -> float:
        return self.handed_bytes / _GIB / self.read_s if self.read_s > 0 else 0.0

    @property
    def cpu_share(self) -> float:
        """Of all cores' time, while the load went on."""
        return self.cpu_s / (self.seconds * self.cores) if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Advice:
    """One setting that would help. `setting` is a key of the YAML file, or what else is to be changed."""

    setting: str
    value: str
    why: str

    @property
    def sentence(self) -> str:
        return f"{self.setting}: {self.value} ({self.why})."

    def as_dict(self) -> dict[str, str]:
        return {"setting": self.setting, "value": self.value, "why": self.why}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What bounds a load, in one word and in sentences; and what would help, which may be nothing. `doubts` are those
    of the sentences that say why the word is only what is nearest."""

    bound: Bound
    sentences: tuple[str, ...]
    advice: tuple[Advice, ...] = ()
    doubts: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        return {
            "bound": self.bound,
            "sentences": list(self.sentences),
            "advice": [each.as_dict() for each in self.advice],
            "doubts": list(self.doubts),
        }


def source_limit(loaded: Loaded, limits: Limits) -> float | None:
    """GiB/s at which the bytes can come at best: a part from the page cache, the rest from storage, one after the
    other. None where a limit that counts was not measured."""
    cached = loaded.cached if loaded.cached is not None else 0.0
    seconds_a_gib = 0.0
    for share, rate in ((cached, limits.cache_copy), (1 - cached, limits.storage)):
        if share > 0.01:
            if not rate:
                return None
            seconds_a_gib += share / rate
    return 1 / seconds_a_gib if seconds_a_gib else None


def fresh_limit(loaded: Loaded, limits: Limits) -> float | None:
    """GiB/s at best where every byte's memory is touched for the first time as well, one after the other."""
    source, touch = source_limit(loaded, limits), _touch(loaded, limits)
    return 1 / (1 / source + 1 / touch) if source and touch else None


def _touch(loaded: Loaded, limits: Limits) -> float | None:
    return limits.touch_ordinary if loaded.huge_pages == "never" else limits.touch_huge


def judge(loaded: Loaded, limits: Limits) -> Verdict:
    """What bounds the load. The first that holds of: too little to tell, fixed costs, storage or page cache, the
    consumer, the budget, reading and first touch of memory together, processor time. Where the load is too short, or
    its rounds differ, it says so before, and advises nothing."""
    candidates = (_too_small, _fixed, _source, _consumer, _budget, _read_and_touched, _cpu)
    found = (verdict for candidate in candidates if (verdict := candidate(loaded, limits)) is not None)
    verdict = next(found, None) or _unclear(loaded, limits)
    doubtful = tuple(doubts(loaded.seconds, loaded.rounds_s, margin=1 / NEAR - 1))
    if not doubtful or verdict.bound == "too small":
        return verdict
    first, *more = (sentence for sentence in verdict.sentences if sentence != _NO_SETTING)
    nearest = first if verdict.bound == "unclear" else f"What is nearest: {first}"
    return Verdict(verdict.bound, (*doubtful, nearest, *more), doubts=doubtful)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What reading and first touch would take, each alone, as parts of the time of reading; None where nobody knows.
    One after the other they take the sum, side by side the larger of them: a load lies between the two."""

    source: float | None
    touch: float

    @property
    def explain(self) -> bool:
        """Whether they are all of the time, as near as can be told. One that alone takes longer than the load did was
        measured too slow to bound it."""
        if self.source is None or max(self.source, self.touch) > 1 / NEAR:
            return False
        return self.source + self.touch >= NEAR

    @property
    def text(self) -> str:
        reading = f"reading alone takes {_percent(self.source)} of the time" if self.source is not None else ""
        touching = f"first touch of memory {'' if reading else 'takes '}{_percent(self.touch)}" if self.touch else ""
        return ", ".join(each for each in (reading, touching) if each)


def _parts(loaded: Loaded, limits: Limits) -> _Parts:
    source, touch = source_limit(loaded, limits), _touch(loaded, limits) if loaded.fresh else None
    return _Parts(
        loaded.source_gib_per_s / source if source else None,
        loaded.handed_gib_per_s / touch if touch else 0.0,
    )


def _too_small(loaded: Loaded, _limits: Limits) -> Verdict | None:
    if loaded.handed_bytes >= LEAST_BYTES:
        return None
    fixed = f"{loaded.fixed_s * 1e3:.0f} ms of {loaded.seconds * 1e3:.0f} ms went to headers, plan and agreement"
    return Verdict(
        "too small",
        (
            f"This load has {format_size(loaded.handed_bytes)}, too little to tell what bounds it: {fixed}.",
            f"Measure with a load of {format_size(LEAST_BYTES)} or more.",
        ),
    )


def _fixed(loaded: Loaded, limits: Limits) -> Verdict | None:
    parts = _parts(loaded, limits)
    longest_s = max(parts.source or 0.0, parts.touch) * loaded.read_s
    largest = parts.explain and loaded.fixed_s > max(longest_s, _MUCH * loaded.seconds)
    if loaded.fixed_s <= loaded.read_s and not largest:
        return None
    words = {
        "config": "meeting the other ranks",
        "catalog": "reading headers",
        "plan": "planning",
        "open": "setting up",
        "finish": "the last agreement",
    }
    name, longest_s = max(
        ((name, spent_s) for name, spent_s in loaded.phases.items() if name in words),
        key=lambda pair: pair[1],
        default=("catalog", loaded.fixed_s),
    )
    return Verdict(
        "fixed costs",
        (
            f"Fixed costs bound this load: {loaded.fixed_s:.2f} of {loaded.seconds:.2f} s pass before and after the "
            f"reading, most of it {words[name]} ({longest_s:.2f} s in phase {name}).",
            "They do not grow with the bytes: no setting of reads or memory changes them.",
        ),
    )


def _source(loaded: Loaded, limits: Limits) -> Verdict | None:
    limit, parts = source_limit(loaded, limits), _parts(loaded, limits)
    if limit is None or parts.source is None or not NEAR <= parts.source <= 1 / NEAR:
        return None
    if parts.source < parts.touch <= 1 / NEAR:  # nearer
        return None
    bound = _kind_of_source(loaded)
    warm = bound == "page cache"
    what = "Copying from the page cache bounds this load" if warm else "This load runs at the storage's limit"
    rate, best = (format_rate(each * _GIB) for each in (loaded.source_gib_per_s, limit))
    percent = 100 * loaded.source_gib_per_s / limit
    share = f"{rate}, {percent:.0f} % of {best}" if percent <= 100 else f"{rate}, where reading alone gave {best}"
    advice = tuple(_for_storage(loaded, limits)) if bound == "storage" else ()
    last = () if advice else (_NO_SETTING,)
    return Verdict(bound, (f"{what}: {share}.", *last), advice)


def _kind_of_source(loaded: Loaded) -> Literal["page cache", "storage"]:
    return "page cache" if loaded.cached is not None and loaded.cached > 0.5 else "storage"


def _for_storage(loaded: Loaded, limits: Limits) -> Iterator[Advice]:
    if limits.direct and limits.direct_more and limits.direct_more > _FASTER * limits.direct:
        gain = f"{format_rate(limits.direct_more * _GIB)} with twice as many reads in flight, not "
        yield Advice("reads.threads", str(2 * loaded.threads), f"{gain}{format_rate(limits.direct * _GIB)}")
    elif (
        limits.direct is None
        and loaded.cached is not None
        and loaded.cached < 0.5
        and 0 < loaded.read_ahead_bytes <= _SMALL_READ_AHEAD_BYTES
    ):
        yield Advice(
            "read_ahead_kb of the file system's device",
            "8192",
            f"all is read through the page cache, and the kernel reads ahead only {loaded.read_ahead_bytes >> 10} KiB",
        )


def _consumer(loaded: Loaded, _limits: Limits) -> Verdict | None:
    if loaded.spent.consumer_holds < _MUCH:
        return None
    per_tensor = loaded.seconds / loaded.tensors * 1e6 if loaded.tensors else 0.0
    a_tensor = f" It took {loaded.tensors} tensors, {per_tensor:.0f} us each." if 0 < per_tensor < 200 else ""
    return Verdict(
        "consumer",
        (
            f"The consumer bounds this load: {_percent(loaded.spent.consumer_holds)} of the time the loader waited for "
            f"memory that the consumer had not given back, while there was data to take.{a_tensor}",
            "More memory would fill up as well: take tensors, and leave batches, sooner.",
        ),
    )


def _budget(loaded: Loaded, _limits: Limits) -> Verdict | None:
    if loaded.spent.budget_full < _MUCH:
        return None
    more = 4 * loaded.capacity_bytes
    why = "the loader waited for memory while reading threads were idle and the consumer waited too"
    return Verdict(
        "budget",
        (
            f"Memory for reading ahead bounds this load: {_percent(loaded.spent.budget_full)} of the time all of "
            f"{format_size(loaded.capacity_bytes)} was out, and reading threads were idle.",
        ),
        (Advice("staging.capacity_bytes", _written(more), why),),
    )


def _read_and_touched(loaded: Loaded, limits: Limits) -> Verdict | None:
    parts = _parts(loaded, limits)
    source, touch = source_limit(loaded, limits), _touch(loaded, limits)
    if not parts.explain or source is None or touch is None or parts.source is None:
        return None
    bound: Bound = "memory" if parts.touch > parts.source else _kind_of_source(loaded)
    what = {"memory": "First touch of fresh memory", "storage": "Storage", "page cache": "Copying from the page cache"}
    sentence = (
        f"{what[bound]} bounds this load most: {format_rate(loaded.handed_gib_per_s * _GIB)}, where reading alone "
        f"gives {format_rate(source * _GIB)} and touching memory for the first time {format_rate(touch * _GIB)}; of "
        f"the time of reading that is {_percent(parts.source)} and {_percent(parts.touch)}."
    )
    advice = list(_for_storage(loaded, limits)) if bound == "storage" else []
    if parts.touch > _WORTH:
        advice += _for_pages(loaded, limits)
        advice.append(Advice("the consumer's form", "batches() or into()", "memory is used again"))
    return Verdict(bound, (sentence, *(() if advice else (_NO_SETTING,))), tuple(advice))


def _for_pages(loaded: Loaded, limits: Limits) -> Iterator[Advice]:
    huge, ordinary = limits.touch_huge, limits.touch_ordinary
    if loaded.huge_pages != "never":
        return
    known = "" if not (huge and ordinary) else f"; first touch reaches {format_rate(ordinary * _GIB)} without"
    place = "/sys/kernel/mm/transparent_hugepage/enabled"
    yield Advice(place, "madvise", f"the system gives no huge pages{known}")


def _cpu(loaded: Loaded, limits: Limits) -> Verdict | None:
    if loaded.cpu_share < NEAR:
        return None
    cores = "the one core is" if loaded.cores == 1 else f"all {loaded.cores} cores are"
    sentence = (
        f"Processor time bounds this load: {cores} busy ({_percent(loaded.cpu_share)}), "
        f"{loaded.cpu_s / (loaded.handed_bytes / _GIB):.2f} CPU s for each GiB."
    )
    advice = list(_for_pages(loaded, limits))
    if not loaded.direct and limits.direct is not None and (loaded.cached or 0.0) < 0.5:
        advice.append(Advice("reads.access", "direct", "reading past the page cache copies nothing"))
    return Verdict(
        "CPU", (sentence,) if advice else (sentence, "More cores would help; no setting would."), tuple(advice)
    )


def _unclear(loaded: Loaded, limits: Limits) -> Verdict:
    parts = _parts(loaded, limits)
    spent = loaded.spent
    at = f"it reads {format_rate(loaded.source_gib_per_s * _GIB)}"
    if parts.source is not None and parts.source > 1 / NEAR:
        at += ", faster than the source gave when it was measured: storage varies, and more rounds tell more"
    elif parts.text:
        at += f"; {parts.text}"
    sentences = (
        f"No single limit bounds this load: {at}.",
        f"Of {loaded.threads} reading threads {spent.in_flight:.1f} were at work on average; the consumer waited "
        f"{_percent(spent.consumer_waits)} of the time, and the processors were {_percent(loaded.cpu_share)} busy.",
    )
    return Verdict("unclear", sentences, tuple(_for_storage(loaded, limits)) if spent.threads_busy > NEAR else ())


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _written(size_bytes: int) -> str:
    """A size as the YAML file takes it."""
    for unit in ("GiB", "MiB", "KiB"):
        if size_bytes % UNITS[unit] == 0:
            return f"{size_bytes // UNITS[unit]}{unit}"
    return str(size_bytes)
