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
BUSY = Shares(consumer_waits=0.9, threads_busy=0.95, loader_busy=0.05, in_flight=3.9)


def loaded(gib_per_s: float, **more: object) -> Loaded:
    """4 GiB, cold, into memory that is used again, at some rate while reading, and 0.1 s beside it."""
    read_s = 4 / gib_per_s
    plain = Loaded(
        handed_bytes=4 * GIB,
        source_bytes=4 * GIB,
        seconds=read_s + 0.1,
        phases={"config": 0.01, "catalog": 0.06, "plan": 0.02, "open": 0.005, "read": read_s, "finish": 0.005},
        cpu_s=0.1,
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
        (loaded(1.55, fresh=True), LIMITS, "memory", "First touch of fresh memory", ["the consumer's form"]),
        (
            loaded(0.95, fresh=True, huge_pages="never"),
            LIMITS,
            "memory",
            "touching memory for the first time 2.00",
            ["/sys/kernel/mm/transparent_hugepage/enabled", "the consumer's form"],
        ),
        (loaded(1.0, cpu_s=8.0, cores=2), LIMITS, "CPU", "all 2 cores are busy (98 %), 2.00 CPU s", []),
        (loaded(1.0, cpu_s=4.0, cores=1), LIMITS, "CPU", "the one core is busy", []),
        (loaded(1.0, cpu_s=8.0, cores=2, direct=False), LIMITS, "CPU", "all 2 cores", ["reads.access"]),
        (
            loaded(8.0, seconds=3.0, phases={"catalog": 2.0, "config": 0.5, "read": 0.5}, cached=1.0),
            LIMITS,
            "fixed costs",
            "most of it reading headers (2.00 s in phase catalog)",
            [],
        ),
        (loaded(1.0, handed_bytes=1 << 20), LIMITS, "too small", "too little to tell", []),
        (loaded(1.0), LIMITS, "unclear", "50 % of what the source gives", []),
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
        "first touch",
        "no huge pages",
        "CPU",
        "one core",
        "CPU, buffered",
        "fixed costs",
        "too small",
        "unclear",
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
