"""What bounds a load, in words: one row of figures a case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loader_service.config.schema import ServiceConfig
from loader_service.measuring.verdict import Limits, Loaded, fresh_limit, judge, source_limit
from loader_service.sizes import parse_size
from loader_service.timeline import Shares

GIB = 1 << 30
LIMITS = Limits(
    direct_one=1.2, direct=2.0, direct_more=2.1, cache_copy=20.0, memory_copy=10.0, touch_huge=8.0, touch_ordinary=2.0
)
REFUSED = replace(LIMITS, direct_one=None, direct=None, direct_more=None, buffered=0.5)
# Of a small virtual machine, whose load of 300 MiB took 0.17 s.
FOUND = Limits(direct_one=1.9, direct=2.46, direct_more=2.5, touch_huge=14.31)
BUSY = Shares(consumer_waits=0.9, threads_busy=0.95, loader_busy=0.05, in_flight=3.9)


def loaded(gib_per_s: float, **more: object) -> Loaded:
    """40 GiB, cold, into memory that is used again, at some rate while reading, and 1 s beside it."""
    read_s = 40 / gib_per_s
    plain = Loaded(
        handed_bytes=40 * GIB,
        source_bytes=40 * GIB,
        seconds=read_s + 1,
        phases={"config": 0.1, "catalog": 0.6, "plan": 0.2, "open": 0.05, "read": read_s, "finish": 0.05},
        cpu_s=1.0,
        cores=8,
        ranks=1,
        threads=4,
        capacity_bytes=GIB,
        fresh=False,
        cached=0.0,
        direct=True,
        spent=BUSY,
        tensors=400,
        huge_pages="madvise",
        read_ahead_bytes=8 << 20,
    )
    return replace(plain, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("figures", "limits", "bound", "says", "settings"),
    [
        (loaded(1.9), LIMITS, "storage", "storage's limit: 1.90 GiB/s, 95 % of 2.00 GiB/s", []),
        (loaded(2.2), LIMITS, "storage", "2.20 GiB/s, where reading alone gave 2.00 GiB/s", []),
        (loaded(1.9), replace(LIMITS, direct_more=2.6), "storage", "storage's limit", ["reads.threads"]),
        (loaded(0.48, direct=False), REFUSED, "storage", "96 % of 0.50", []),
        (
            loaded(0.48, direct=False, read_ahead_bytes=128 << 10),
            REFUSED,
            "storage",
            "96 %",
            ["read_ahead_kb of the file system's device"],
        ),
        (loaded(19.0, cached=1.0), LIMITS, "page cache", "Copying from the page cache bounds this load", []),
        (loaded(3.5, cached=0.5), LIMITS, "storage", "96 % of 3.64", []),
        (
            loaded(0.5, spent=Shares(consumer_holds=0.8, in_flight=0.2), tensors=40_000),
            LIMITS,
            "consumer",
            "80 % of the time the loader waited for memory that the consumer had not given back",
            [],
        ),
        (
            loaded(0.5, spent=Shares(consumer_waits=0.9, budget_full=0.7), capacity_bytes=64 << 20),
            LIMITS,
            "budget",
            "70 % of the time all of 64.00 MiB was out",
            ["staging.capacity_bytes"],
        ),
        (
            loaded(1.55, fresh=True),
            LIMITS,
            "storage",
            "Storage bounds this load most: 1.55 GiB/s, where reading alone gives 2.00 GiB/s and touching memory for "
            "the first time 8.00 GiB/s; of the time of reading that is 78 % and 19 %.",
            ["the consumer's form"],
        ),
        (
            loaded(1.55, fresh=True),
            replace(LIMITS, direct_more=2.6),
            "storage",
            "Storage bounds this load most",
            ["reads.threads", "the consumer's form"],
        ),
        (loaded(1.79, fresh=True), FOUND, "storage", "that is 73 % and 13 %", []),
        (
            loaded(4.0, fresh=True, cached=1.0),
            replace(LIMITS, touch_huge=5.0),
            "memory",
            "First touch of fresh memory bounds this load most: 4.00 GiB/s, where reading alone gives 20.00 GiB/s",
            ["the consumer's form"],
        ),
        (
            loaded(7.0, fresh=True, cached=1.0),
            replace(LIMITS, cache_copy=8.0, touch_huge=40.0),
            "page cache",
            "Copying",
            [],
        ),
        (loaded(1.9, fresh=True), replace(LIMITS, touch_huge=1.5), "storage", "95 % of 2.00", []),
        (
            loaded(4.6, fresh=True, cached=1.0),
            replace(LIMITS, cache_copy=5.3, touch_huge=5.0),
            "memory",
            "that is 87 % and 92 %",
            ["the consumer's form"],
        ),
        (loaded(1.3, fresh=True), replace(LIMITS, touch_huge=1.9), "memory", "65 % and 68 %", ["the consumer's form"]),
        (loaded(2.5), LIMITS, "unclear", "faster than the source gave when it was measured", []),
        (loaded(2.5, fresh=True), LIMITS, "unclear", "faster than the source gave when it was measured", []),
        (loaded(2.5, cpu_s=33.0, cores=2), LIMITS, "CPU", "all 2 cores are busy", []),
        (
            loaded(0.95, fresh=True, huge_pages="never"),
            replace(LIMITS, touch_ordinary=1.9),
            "memory",
            "touching memory for the first time 1.90",
            ["/sys/kernel/mm/transparent_hugepage/enabled", "the consumer's form"],
        ),
        (loaded(1.0, cpu_s=80.0, cores=2), LIMITS, "CPU", "all 2 cores are busy (98 %), 2.00 CPU s", []),
        (loaded(1.0, cpu_s=40.0, cores=1), LIMITS, "CPU", "the one core is busy", []),
        (loaded(1.0, cpu_s=80.0, cores=2, direct=False), LIMITS, "CPU", "all 2 cores", ["reads.access"]),
        (
            loaded(1.0, fresh=True, seconds=70.0, phases={"catalog": 30.0, "read": 40.0}),
            replace(LIMITS, direct_one=None, direct=1.6, touch_huge=4.0),
            "fixed costs",
            "30.00 of 70.00 s pass before and after the reading",
            [],
        ),
        (
            loaded(8.0, seconds=30.0, phases={"catalog": 20.0, "config": 5.0, "read": 5.0}, cached=1.0),
            LIMITS,
            "fixed costs",
            "most of it reading headers (20.00 s in phase catalog)",
            [],
        ),
        (loaded(1.0, handed_bytes=1 << 20), LIMITS, "too small", "too little to tell", []),
        (loaded(1.0), LIMITS, "unclear", "it reads 1.00 GiB/s; reading alone takes 50 % of the time.", []),
        (loaded(1.0, fresh=True), LIMITS, "unclear", "takes 50 % of the time, first touch of memory 12 %.", []),
        (loaded(1.0), Limits(), "unclear", "it reads 1.00 GiB/s.", []),
        (loaded(0.1, handed_bytes=0, source_bytes=0), Limits(), "too small", "0 bytes", []),
    ],
    ids=[
        "storage",
        "faster than measured",
        "more in flight helps",
        "no O_DIRECT",
        "little read-ahead",
        "page cache",
        "half cached",
        "consumer",
        "budget",
        "reading, then first touch",
        "reading, then first touch, more in flight helps",
        "first touch is the least of it",
        "first touch",
        "page cache, and some first touch",
        "first touch was measured too slow to bound it",
        "page cache is near, first touch nearer",
        "reading and first touch overlap",
        "measured too slow to bound it",
        "measured too slow to bound it, fresh",
        "measured too slow, and CPU",
        "no huge pages",
        "CPU",
        "one core",
        "CPU, buffered",
        "fixed costs are the largest part",
        "fixed costs",
        "too small",
        "unclear",
        "unclear, fresh",
        "no limits",
        "nothing",
    ],
)
def test_what_bounds_a_load(figures: Loaded, limits: Limits, bound: str, says: str, settings: list[str]) -> None:
    verdict = judge(figures, limits)
    text = " ".join(verdict.sentences)
    assert (verdict.bound, [advice.setting for advice in verdict.advice]) == (bound, settings)
    assert says in text, text
    assert ("No setting would help." in text) == (bound in ("storage", "page cache") and not settings)


SHORT = loaded(
    1.79,
    handed_bytes=300 << 20,
    source_bytes=300 << 20,
    seconds=0.17,
    phases={"catalog": 0.005, "read": 0.1637},
    fresh=True,
)
CLEAR = loaded(1.9)
HELPED = replace(LIMITS, direct_more=2.6)


@pytest.mark.parametrize(
    ("figures", "limits", "bound", "doubts", "nearest"),
    [
        (
            SHORT,
            FOUND,
            "storage",
            ["0.17 s is too short to tell"],
            "What is nearest: Storage bounds this load most: 1.79 GiB/s",
        ),
        (replace(SHORT, cached=0.2), FOUND, "unclear", ["0.17 s is too short"], "No single limit"),
        (CLEAR, HELPED, "storage", [], ""),
        (replace(CLEAR, rounds_s=(22.0, 20.0, 23.0)), HELPED, "storage", [], ""),
        (
            replace(CLEAR, rounds_s=(22.0, 20.0, 25.0)),
            HELPED,
            "storage",
            ["Rounds differ by 25 % (20.00 to 25.00 s), more than a verdict can bear (18 %): more rounds"],
            "What is nearest: This load runs at the storage's limit",
        ),
        (replace(CLEAR, rounds_s=(22.0, 20.0, 40.0, 22.0, 22.0)), HELPED, "storage", [], ""),
        (
            replace(CLEAR, rounds_s=(22.0, 22.0, 40.0, 40.0)),
            HELPED,
            "storage",
            ["Rounds differ by 82 %"],
            "What is nearest",
        ),
        (
            replace(SHORT, rounds_s=(0.17, 0.3)),
            FOUND,
            "storage",
            ["0.17 s", "Rounds differ by 76 %"],
            "What is nearest: Storage",
        ),
        (replace(SHORT, handed_bytes=1 << 20), FOUND, "too small", [], ""),
    ],
    ids=[
        "too short",
        "too short and unclear",
        "neither",
        "rounds are alike",
        "rounds differ",
        "one of many rounds differs",
        "half of the rounds differ",
        "both",
        "too small, which says it",
    ],
)
def test_a_verdict_says_when_it_cannot_be_sure_and_then_advises_nothing(
    figures: Loaded, limits: Limits, bound: str, doubts: list[str], nearest: str
) -> None:
    verdict = judge(figures, limits)
    assert verdict.bound == bound
    assert len(verdict.doubts) == len(doubts)
    for said, expected in zip(verdict.doubts, doubts, strict=True):
        assert expected in said
    assert verdict.sentences[: len(doubts)] == verdict.doubts
    assert verdict.as_dict()["doubts"] == list(verdict.doubts)
    if doubts:
        assert verdict.sentences[len(doubts)].startswith(nearest)
        assert verdict.advice == ()
        assert "No setting would help." not in verdict.sentences
    else:
        assert (verdict.advice != ()) == (bound == "storage")


@pytest.mark.parametrize(
    ("figures", "limits", "value"),
    [
        (loaded(1.9), replace(LIMITS, direct_more=2.6), 8),
        (loaded(0.5, spent=Shares(budget_full=0.7), capacity_bytes=64 << 20), LIMITS, 256 << 20),
        (loaded(0.5, spent=Shares(budget_full=0.7), capacity_bytes=10_000), LIMITS, 40_000),
    ],
    ids=["threads", "capacity", "an odd capacity"],
)
def test_a_value_that_is_advised_is_one_that_the_configuration_takes(
    figures: Loaded, limits: Limits, value: int
) -> None:
    (advice,) = judge(figures, limits).advice
    section, key = advice.setting.split(".")
    written = int(advice.value) if advice.value.isdigit() else advice.value
    document = {"checkpoint": {"path": "/x"}, "loads": {"all": {}}, section: {key: written}}
    config = ServiceConfig.model_validate(document)
    assert getattr(getattr(config, section), key) == parse_size(written) == value


def test_a_mixed_source_is_as_fast_as_both_parts_one_after_the_other() -> None:
    assert source_limit(loaded(1, cached=0.5), LIMITS) == pytest.approx(1 / (0.5 / 20 + 0.5 / 2))
    assert source_limit(loaded(1, cached=1.0), LIMITS) == pytest.approx(20)
    assert source_limit(loaded(1, cached=None), LIMITS) == pytest.approx(2)
    assert source_limit(loaded(1, cached=1.0), replace(LIMITS, cache_copy=None)) is None
    assert fresh_limit(loaded(1), LIMITS) == pytest.approx(1 / (1 / 2 + 1 / 8))
