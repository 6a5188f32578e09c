from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader_service.errors import ConfigError
from loader_service.sizes import GRAMMAR, MAX_BYTES, UNITS, format_size, parse_size, size_option


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        (0, 0),
        (16777216, 16777216),
        (MAX_BYTES, MAX_BYTES),
        ("0B", 0),
        ("512B", 512),
        ("64KiB", 65536),
        ("64MiB", 67108864),
        ("1GiB", 1 << 30),
        ("3TiB", 3 << 40),
        ("64KB", 64_000),
        ("64MB", 64_000_000),
        ("1GB", 10**9),
        ("2TB", 2 * 10**12),
        ("1.5GiB", 3 << 29),
        ("1.5KiB", 1536),
        ("0.25KiB", 256),
        ("1.50MB", 1_500_000),
        ("0.3TB", 300_000_000_000),
        ("1.0B", 1),
    ],
)
def test_a_size_is_read_exactly(written: object, size_bytes: int) -> None:
    assert parse_size(written) == size_bytes


@pytest.mark.parametrize(
    "written",
    [
        "1e9",
        "1e9B",
        ".inf",
        "inf",
        "nan",
        "-1",
        "-1MiB",
        "+1MiB",
        "0x10",
        "0x10B",
        "1_000",
        "1_000B",
        "010MiB",
        "1024",
        "64",
        "64 MiB",
        " 64MiB",
        "64MiB ",
        "64MiB\n",
        "64mib",
        "64mb",
        "64Mb",
        "64M",
        "64m",
        "64KIB",
        "64kB",
        "64PiB",
        "64MiB64",
        "MiB",
        ".5GiB",
        "5.GiB",
        "1,5GiB",
        "1.5B",
        "0.1KiB",
        "٣MiB",
        "",
        "auto",
        "9" * 5000 + "B",
        "9999999TiB",
        "8388608TiB",
        -1,
        MAX_BYTES + 1,
        1.0,
        1.5,
        float("inf"),
        True,
        False,
        None,
        [1],
        b"64MiB",
    ],
    ids=lambda value: repr(value)[:24],
)
def test_what_is_no_size_is_refused_with_the_grammar(written: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(GRAMMAR)):
        parse_size(written)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1536, "1536 bytes"),
        ((1 << 20) - 1, "1048575 bytes"),
        (1 << 20, "1.00 MiB"),
        (10**9, "953.67 MiB"),
        (3 << 30, "3.00 GiB"),
        (5 << 40, "5120.00 GiB"),
        (-1536, "-1536 bytes"),
        (-(3 << 29), "-1.50 GiB"),
    ],
)
def test_sizes_are_printed_for_people(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.sampled_from(sorted(UNITS)), st.integers(0, 10**5), st.integers(0, 3), st.integers(0, 999))
def test_a_decimal_is_accepted_exactly_where_whole_bytes_result(unit: str, whole: int, places: int, part: int) -> None:
    decimals = f"{part:03d}"[:places]
    numerator = int(f"{whole}{decimals}") * UNITS[unit]
    text = f"{whole}.{decimals}{unit}" if decimals else f"{whole}{unit}"
    if numerator % 10**places:
        with pytest.raises(ConfigError, match="whole number of bytes"):
            parse_size(text)
    else:
        assert parse_size(text) == numerator // 10**places


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("0", 0), ("16777216", 1 << 24), ("16MiB", 1 << 24), ("1.5KiB", 1536)]
)
def test_an_option_takes_digits_alone_as_well(text: str, size_bytes: int) -> None:
    assert size_option("--size", text) == size_bytes


@pytest.mark.parametrize("text", ["", "-1", "010", "1 ", "9223372036854775808", "much", "\u0663"])
def test_an_option_that_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--size: .*is not a size"):
        size_option("--size", text)
