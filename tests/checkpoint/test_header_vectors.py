"""Every vector of the format, against the parser and against the reference (safetensors), in memory and as a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loader_service.checkpoint.dtypes import DTYPE_LIST
from loader_service.checkpoint.header import MAX_HEADER_BYTES, ParsedHeader, header_length, parse_header
from loader_service.errors import CheckpointError
from tests.checkpoint.reference import reference_meaning, reference_opens
from tests.checkpoint.vectors import ACCEPTED, REJECTED, Accepted, Rejected, longest_header

PATH = "/checkpoints/demo/model.safetensors"


def parse(file: bytes) -> ParsedHeader:
    """As discovery does it: the length from the first 8 bytes, then exactly the header."""
    length = header_length(file[:8], file_bytes=len(file), path=PATH)
    return parse_header(file[:length], file_bytes=len(file), path=PATH)


@pytest.mark.parametrize("vector", ACCEPTED, ids=lambda vector: vector.name)
def test_accepted_vector_is_parsed_to_its_ranges(vector: Accepted) -> None:
    header = parse(vector.file)
    base = header.header_bytes
    assert base == 8 + int.from_bytes(vector.file[:8], "little")
    found = {
        name: (DTYPE_LIST[header.dtype_ids[i]].code, header.shapes[i], (int(header.starts[i]), int(header.stops[i])))
        for i, name in enumerate(header.names)
    }
    assert found == {
        name: (dtype, shape, (base + begin, base + end))
        for name, (dtype, shape, (begin, end)) in vector.tensors.items()
    }
    assert header.metadata == vector.metadata
    assert (np.diff(header.starts) >= 0).all()


@pytest.mark.parametrize("vector", ACCEPTED, ids=lambda vector: vector.name)
def test_reference_accepts_the_same_file_with_the_same_bytes(vector: Accepted, tmp_path: Path) -> None:
    base = 8 + int.from_bytes(vector.file[:8], "little")
    assert reference_meaning(vector.file) == {
        name: (dtype, shape, vector.file[base + begin : base + end])
        for name, (dtype, shape, (begin, end)) in vector.tensors.items()
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(vector.file)
    assert reference_opens(path) == (set(vector.tensors), vector.metadata)


@pytest.mark.parametrize("vector", REJECTED, ids=lambda vector: vector.name)
def test_rejected_vector_is_one_typed_error_with_path_tensor_and_cause(vector: Rejected) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(vector.file)
    error = caught.value
    assert type(error) is CheckpointError
    assert error.path == PATH
    assert error.message.startswith(PATH)
    assert vector.cause in error.message
    assert len(error.message) < 2000
    if vector.tensor is not None:
        assert error.tensor == vector.tensor
        assert repr(vector.tensor) in error.message


@pytest.mark.parametrize("vector", REJECTED, ids=lambda vector: vector.name)
def test_reference_rejects_the_same_file_except_where_policy_is_stricter(vector: Rejected, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(vector.file)
    assert (reference_meaning(vector.file) is not None) is vector.policy
    assert (reference_opens(path) is not None) is vector.policy


def test_only_the_three_policies_are_stricter() -> None:
    assert {vector.name for vector in REJECTED if vector.policy} == {
        "same-name-twice-alike",
        "same-name-twice-escaped",
        "metadata-key-twice",
        "entry-as-an-array",
    }


def test_vector_ids_are_unique() -> None:
    ids = [vector.name for vector in ACCEPTED] + [vector.name for vector in REJECTED]
    assert len(ids) == len(set(ids))


def test_header_of_exactly_the_cap_is_accepted_by_both() -> None:
    file = longest_header()
    header = parse(file)
    assert header.header_bytes == 8 + MAX_HEADER_BYTES
    assert header.names == []
    assert reference_meaning(file) == {}


def test_length_is_refused_before_anything_of_that_size_is_needed() -> None:
    first = (MAX_HEADER_BYTES + 1).to_bytes(8, "little")
    with pytest.raises(CheckpointError, match="above the format's 100000000"):
        header_length(first, file_bytes=1 << 40, path=PATH)
    with pytest.raises(CheckpointError, match="99000000 are missing"):
        header_length(MAX_HEADER_BYTES.to_bytes(8, "little"), file_bytes=8 + 1_000_000, path=PATH)
