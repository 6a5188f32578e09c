"""Differential fuzzing of the header parser against the reference, in memory.

Every case: nothing but CheckpointError leaves the parser; the verdict is the reference's, except for the three policies
and the values of ignored fields; what both accept means the same; and what the fast look proves, the strict look reads
the same way. LOADER_FUZZ_CASES sets the number of cases.
"""

from __future__ import annotations

import os
import random

import pytest

from loader_service.checkpoint.dtypes import DTYPE_LIST
from loader_service.checkpoint.header import ParsedHeader, header_length, parse_header, proven_entries
from loader_service.checkpoint.strict import strict_entries
from loader_service.errors import CheckpointError
from tests.checkpoint.mutations import damaged, is_policy_case, valid_file, without_unknown_fields
from tests.checkpoint.reference import Meaning, reference_meaning

CASES = int(os.environ.get("LOADER_FUZZ_CASES", "20000"))
_BATCHES = 8


def ours(file: bytes) -> ParsedHeader | None:
    """None where it is refused; any other exception than CheckpointError fails the test."""
    try:
        length = header_length(file[:8], file_bytes=len(file), path="x")
        return parse_header(file[:length], file_bytes=len(file), path="x")
    except CheckpointError:
        return None


def meaning(header: ParsedHeader, file: bytes) -> Meaning:
    rows = zip(header.names, header.dtype_ids, header.shapes, header.starts, header.stops, strict=True)
    return {name: (DTYPE_LIST[dtype].code, shape, file[start:stop]) for name, dtype, shape, start, stop in rows}


def check(file: bytes) -> bool:
    """Asserts everything about one file; True where both accept it."""
    mine, reference = ours(file), reference_meaning(file)
    text = file[8 : 8 + int.from_bytes(file[:8], "little")]
    if (mine is None) != (reference is None):
        bare = without_unknown_fields(text)
        if mine is None and is_policy_case(text):
            return False
        assert bare is not None, f"verdicts differ on {file!r}"
        payload = file[8 + len(text) :]
        alike = len(bare).to_bytes(8, "little") + bare + payload
        assert (ours(alike) is None) == (reference_meaning(alike) is None), (
            f"verdicts differ on {file!r}, not by an ignored field"
        )
        return False
    if mine is None or reference is None:
        return False
    assert meaning(mine, file) == reference, f"meanings differ on {file!r}"
    fast = proven_entries(text.strip(b" \t\r\n"))
    if fast is not None:
        slow = strict_entries(text, "x")
        for column in ("names", "codes", "shapes", "begins", "ends", "metadata"):
            assert list(getattr(fast, column)) == list(getattr(slow, column)), (
                f"{column} differ between looks on {file!r}"
            )
    return True


@pytest.mark.parametrize("batch", range(_BATCHES))
@pytest.mark.timeout(3600)
def test_damaged_headers_get_the_verdict_of_the_reference(batch: int) -> None:
    rng = random.Random(f"headers {batch}")
    accepted = 0
    for _ in range(CASES // _BATCHES):
        accepted += check(damaged(valid_file(rng), rng))
    assert 0 < accepted < CASES // _BATCHES, "the mutations are too mild or too wild to test anything"


def test_undamaged_headers_are_accepted() -> None:
    rng = random.Random("valid headers")
    for _ in range(1000):
        file = valid_file(rng)
        assert check(file), f"refused {file!r}"


def test_the_fast_look_proves_what_the_usual_writers_write() -> None:
    rng = random.Random("canonical headers")
    proven = sum(
        proven_entries(f[8 : 8 + int.from_bytes(f[:8], "little")].strip()) is not None
        for f in (valid_file(rng) for _ in range(1000))
    )
    assert proven > 300
