"""What travels: round trips, and hostile bytes that are refused with a reason and never crash a reader."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader_service.agreement import codec
from loader_service.agreement.messages import (
    MAX_BODY_TEXT_BYTES,
    MAX_MESSAGE_CHARS,
    MAX_RECORD_BYTES,
    BodyRequest,
    Entry,
    Failure,
    MessageError,
    Phase,
    PhaseRecord,
    Status,
    Verdict,
    error_of,
)
from loader_service.errors import AgreementError, FailureRecord, RankFailure, ReadError

RECORD = FailureRecord("ReadError", "EIO äöü \U0001f600", 3, "read", "/a/b", "t", 5)
FAILURE = Failure("error", RECORD)


@pytest.mark.parametrize(
    "entry",
    [
        Verdict(0, Phase.CONFIG, "go", {"node": {"a": 2, "b": 1}}, ({"tp": 1}, None)),
        Verdict(3, Phase.CATALOG, "retry", failure=FAILURE),
        Verdict(7, Phase.READ, "final", failure=Failure("died", FailureRecord("LostRank", "silent"))),
        BodyRequest(2, Phase.PLAN, (0, 3)),
        BodyRequest(2, Phase.CATALOG, (1, 0), "model-1.safetensors"),
    ],
    ids=lambda entry: type(entry).__name__,
)
def test_log_entries_survive_the_journey(entry: Entry) -> None:
    assert codec.decode_entry(codec.encode_entry(entry)) == entry


def test_status_and_record_survive_the_journey() -> None:
    status = Status(4, 2, "shard 1", (3, 1), FAILURE, (0, 5), (7 << 40, 9 << 40))
    assert codec.decode_status(codec.encode_status(status)) == status
    record = codec.decode_record(codec.encode_record(PhaseRecord("d", "retry", RECORD, {"a": "b"}, {"x": [1, None]})))
    assert (record.digest, record.outcome, record.failure) == ("d", "retry", RECORD)
    assert (record.counted, record.listed) == ({"a": "b"}, {"x": [1, None]})


@pytest.mark.parametrize("body", [None, 1, "x", [1, {"a": None}], {"k": ["v"] * 1000}], ids=repr)
def test_bodies_survive_the_journey(body: object) -> None:
    assert codec.decode_body(codec.encode_body(body)) == (body, None)  # type: ignore[arg-type]


def test_texts_of_any_length_travel_cut() -> None:
    long = FailureRecord("E" * 9999, "\U0001f600" * 99_999, 1, "p" * 9999, "/" * 9999, "t" * 9999)
    failure = codec.decode_status(codec.encode_status(Status(1, 1, "x" * 9999, (0, 0), Failure("error", long)))).failure
    assert failure is not None
    assert len(failure.record.message) == MAX_MESSAGE_CHARS
    assert failure.record.message.endswith("...")


@pytest.mark.parametrize(
    "record",
    [
        PhaseRecord("x" * MAX_RECORD_BYTES),
        PhaseRecord(listed=float("nan")),
        PhaseRecord(listed=object()),  # type: ignore[arg-type]
        PhaseRecord(listed={"a": b"bytes"}),
    ],
    ids=["oversized", "not a number", "no JSON", "bytes"],
)
def test_what_cannot_travel_is_refused_by_its_writer(record: PhaseRecord) -> None:
    with pytest.raises(MessageError, match="the record"):
        codec.encode_record(record)


DECODERS: dict[str, Callable[[bytes], object]] = {
    "record": codec.decode_record,
    "status": codec.decode_status,
    "entry": codec.decode_entry,
    "body": codec.decode_body,
}


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"-",
        b"null",
        b"[]",
        b"{}",
        b'{"a": NaN}',
        b"\xff",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b"9" * 10_000,
        zlib.compress(b"{}"),
        zlib.compress(b"[" * 200_000),
        zlib.compress(b"\0" * (MAX_BODY_TEXT_BYTES + 1)),
        zlib.compress(b'{"body":1,"problem":null}') + b"more",
        zlib.compress(b'{"body":1,"problem":null}')[:-3],
    ],
    ids=range(15),
)
def test_hostile_bytes_are_refused(decoder: str, data: bytes) -> None:
    with pytest.raises(MessageError):
        DECODERS[decoder](data)


GOOD = {
    "record": json.loads(codec.encode_record(PhaseRecord("d", "retry", RECORD, {"a": "b"}, [1]))),
    "status": json.loads(codec.encode_status(Status(4, 2, "shard 1", (3, 1), FAILURE, (0, 5), (7 << 40, 9 << 40)))),
    "entry": json.loads(codec.encode_entry(Verdict(0, Phase.READ, "final", {"n": {"a": 1}}, (1,), FAILURE))),
}
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(GOOD)), st.data())
def test_any_field_of_any_wrong_kind_is_refused_or_read_never_a_crash(name: str, data: st.DataObject) -> None:
    value = json.loads(json.dumps(GOOD[name]))
    place = value
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        if data.draw(st.booleans()):
            place[key] = data.draw(JUNK)
        else:
            del place[key]
        break
    with contextlib.suppress(MessageError):
        DECODERS[name](json.dumps(value).encode())


@pytest.mark.parametrize("field", ["action", "phase", "sequence", "listed", "counts", "failure"])
def test_every_field_of_a_verdict_is_checked(field: str) -> None:
    value = dict(GOOD["entry"]) | {field: 1.5}
    with pytest.raises(MessageError):
        codec.decode_entry(json.dumps(value).encode())


def test_a_final_becomes_the_exception_of_its_kind() -> None:
    lost = error_of(Verdict(1, Phase.READ, "final", failure=FAILURE))
    assert isinstance(lost, RankFailure)
    assert (lost.rank, lost.phase, lost.path, lost.errno) == (3, "read", "/a/b", 5)
    assert isinstance(lost.__cause__, ReadError)
    differ = error_of(Verdict(1, Phase.PLAN, "final", failure=Failure("disagreement", FailureRecord("A", "m", 2))))
    assert isinstance(differ, AgreementError)
    assert differ.exit_code == 4


@pytest.mark.parametrize("name", sorted(DECODERS))
@pytest.mark.parametrize("version", [1, None, "2", [], {"x": 2}], ids=repr)
def test_another_version_of_the_protocol_is_named_before_anything_else(name: str, version: object) -> None:
    value = {"protocol": version, "unknown": 1} if version is not None else {"unknown": 1}
    data = json.dumps(value).encode()
    found = "no version" if version is None else "version "
    with pytest.raises(MessageError, match=f"is in {found}.* of the protocol, this rank speaks version 3"):
        DECODERS[name](zlib.compress(data) if name == "body" else data)


def test_a_final_is_read_whatever_its_version() -> None:
    final = Verdict(3, Phase.READ, "final", failure=FAILURE)
    value = json.loads(codec.encode_entry(final))
    for version in (1, None):
        assert codec.decode_entry(json.dumps(value | {"protocol": version}).encode()) == final
    with pytest.raises(MessageError, match="version 1"):
        codec.decode_entry(json.dumps(value | {"protocol": 1, "action": "go", "failure": None}).encode())
