"""Messages as bytes: strict JSON, bounded sizes. What does not fit raises `MessageError`, for writers and readers.

Everything read from the board is checked field by field: another rank may run other code, or none of ours.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

from loader_service.agreement.messages import (
    ACTIONS,
    FAILURE_KINDS,
    JSON,
    MAX_BODY_BYTES,
    MAX_BODY_TEXT_BYTES,
    MAX_DEAD_RANKS,
    MAX_ENTRY_BYTES,
    MAX_PROGRESS_CHARS,
    MAX_RECORD_BYTES,
    MAX_STATUS_BYTES,
    OUTCOMES,
    PROTOCOL_VERSION,
    BodyRequest,
    Entry,
    Failure,
    MessageError,
    Phase,
    PhaseRecord,
    Record,
    Status,
    Verdict,
    bounded,
)
from loader_service.errors import FailureRecord


def _dump(value: Mapping[str, object], limit_bytes: int, what: str) -> bytes:
    value = {"protocol": PROTOCOL_VERSION, **value}
    try:
        data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError(f"{what} cannot be written as JSON: {error}") from error
    if len(data) > limit_bytes:
        raise MessageError(f"{what} is {len(data)} bytes long, at most {limit_bytes} are allowed")
    return data


def _failure_json(failure: Failure | None) -> object:
    if failure is None:
        return None
    return {"kind": failure.kind, "record": bounded(failure.record).as_dict()}


def encode_record(record: PhaseRecord) -> bytes:
    """A record's bytes, without its body functions."""
    value = {
        "digest": record.digest,
        "outcome": record.outcome,
        "failure": None if record.failure is None else bounded(record.failure).as_dict(),
        "counted": dict(record.counted),
        "listed": record.listed,
    }
    return _dump(value, MAX_RECORD_BYTES, "the record")


def encode_status(status: Status) -> bytes:
    """A heartbeat's bytes; long progress is cut."""
    value = {
        "beat": status.beat,
        "moved": status.moved,
        "progress": status.progress[:MAX_PROGRESS_CHARS],
        "at": list(status.at),
        "failure": _failure_json(status.failure),
        "dead": list(status.dead[:MAX_DEAD_RANKS]),
        "done": list(status.done),
    }
    return _dump(value, MAX_STATUS_BYTES, "the status")


def encode_entry(entry: Entry) -> bytes:
    """A log entry's bytes: ASCII, so that a store can compare them as text."""
    value: dict[str, object] = {"sequence": entry.sequence, "phase": str(entry.phase)}
    if isinstance(entry, BodyRequest):
        value |= {"ranks": list(entry.ranks), "key": entry.key}
    else:
        value |= {
            "action": entry.action,
            "counts": {key: dict(counts) for key, counts in entry.counts.items()},
            "listed": None if entry.listed is None else list(entry.listed),
            "failure": _failure_json(entry.failure),
        }
    return _dump(value, MAX_ENTRY_BYTES, "the log entry")


def encode_body(body: JSON = None, *, problem: str | None = None) -> bytes:
    """A body, or why there is none. Compressed: catalogs of many shards repeat themselves."""
    text = _dump({"body": body, "problem": problem}, MAX_BODY_TEXT_BYTES, "the body")
    data = zlib.compress(text, 1)
    if len(data) > MAX_BODY_BYTES:
        raise MessageError(f"the body is {len(data)} compressed bytes long, at most {MAX_BODY_BYTES} are allowed")
    return data


def _refuse_constant(text: str) -> object:
    raise MessageError(f"{text} is not JSON")


def _load(data: bytes, limit_bytes: int, what: str) -> dict[str, object]:
    if len(data) > limit_bytes:
        raise MessageError(f"{what} is {len(data)} bytes long, at most {limit_bytes} are allowed")
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except MessageError:
        raise
    except (ValueError, RecursionError) as error:
        raise MessageError(f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise MessageError(f"{what} is not a JSON object")
    version = value.pop("protocol", None)
    if version != PROTOCOL_VERSION and value.get("action") != "final":
        found = f"version {str(version)[:20]}" if version is not None else "no version"
        raise MessageError(f"{what} is in {found} of the protocol, this rank speaks version {PROTOCOL_VERSION}")
    return value


def _expect(value: dict[str, object], keys: frozenset[str], what: str) -> None:
    if value.keys() != keys:
        raise MessageError(f"{what} has the keys {sorted(value)[:10]} instead of {sorted(keys)}")


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise MessageError(f"{what} is not a text")
    return value


def _optional_text(value: object, what: str) -> str | None:
    return None if value is None else _text(value, what)


def _integer(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise MessageError(f"{what} is not an integer")
    return value


def _pair(value: object, what: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise MessageError(f"{what} is not a pair")
    return _integer(value[0], what), _integer(value[1], what)


def _ranks(value: object, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DEAD_RANKS:
        raise MessageError(f"{what} is not a list of at most {MAX_DEAD_RANKS} ranks")
    return tuple(_integer(rank, what) for rank in value)


def _object(value: object, what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise MessageError(f"{what} is not an object")
    return value


def _phase(value: object) -> Phase:
    try:
        return Phase(_text(value, "phase"))
    except ValueError as error:
        raise MessageError(f"unknown phase {value!r}") from error


_RECORD_FIELDS = frozenset({"error", "message", "rank", "phase", "path", "tensor", "errno"})


def _failure_record(value: object) -> FailureRecord:
    fields = _object(value, "failure record")
    _expect(fields, _RECORD_FIELDS, "failure record")
    rank, errno = fields["rank"], fields["errno"]
    record = FailureRecord(
        _text(fields["error"], "error"),
        _text(fields["message"], "message"),
        None if rank is None else _integer(rank, "rank"),
        _optional_text(fields["phase"], "phase"),
        _optional_text(fields["path"], "path"),
        _optional_text(fields["tensor"], "tensor"),
        None if errno is None else _integer(errno, "errno"),
    )
    return bounded(record)


def _failure(value: object) -> Failure | None:
    if value is None:
        return None
    fields = _object(value, "failure")
    _expect(fields, frozenset({"kind", "record"}), "failure")
    for kind in FAILURE_KINDS:
        if fields["kind"] == kind:
            return Failure(kind, _failure_record(fields["record"]))
    raise MessageError(f"unknown kind of failure {str(fields['kind'])[:100]!r}")


def decode_record(data: bytes) -> Record:
    """The record that another rank sent."""
    value = _load(data, MAX_RECORD_BYTES, "the record")
    _expect(value, frozenset({"digest", "outcome", "failure", "counted", "listed"}), "the record")
    outcome = value["outcome"]
    if outcome not in OUTCOMES:
        raise MessageError(f"unknown outcome {str(outcome)[:100]!r}")
    counted = {key: _text(item, "counted") for key, item in _object(value["counted"], "counted").items()}
    failure = None if value["failure"] is None else _failure_record(value["failure"])
    return Record(_text(value["digest"], "digest"), outcome, failure, counted, value["listed"])  # type: ignore[arg-type]


def decode_status(data: bytes) -> Status:
    """The heartbeat that another rank sent."""
    value = _load(data, MAX_STATUS_BYTES, "the status")
    _expect(value, frozenset({"beat", "moved", "progress", "at", "failure", "dead", "done"}), "the status")
    return Status(
        _integer(value["beat"], "beat"),
        _integer(value["moved"], "moved"),
        _text(value["progress"], "progress")[:MAX_PROGRESS_CHARS],
        _pair(value["at"], "at"),
        _failure(value["failure"]),
        _ranks(value["dead"], "dead"),
        _pair(value["done"], "done"),
    )


def decode_entry(data: bytes) -> Entry:
    """The log entry that the leader, or a member in its place, published."""
    value = _load(data, MAX_ENTRY_BYTES, "the log entry")
    if "action" not in value:
        _expect(value, frozenset({"sequence", "phase", "ranks", "key"}), "the log entry")
        return BodyRequest(
            _integer(value["sequence"], "sequence"),
            _phase(value["phase"]),
            _pair(value["ranks"], "ranks"),
            _optional_text(value["key"], "key"),
        )
    _expect(value, frozenset({"sequence", "phase", "action", "counts", "listed", "failure"}), "the log entry")
    action, listed = value["action"], value["listed"]
    if action not in ACTIONS:
        raise MessageError(f"unknown action {str(action)[:100]!r}")
    if listed is not None and not isinstance(listed, list):
        raise MessageError("listed is not a list")
    counts = {
        key: {item: _integer(count, "count") for item, count in _object(per_key, "counts").items()}
        for key, per_key in _object(value["counts"], "counts").items()
    }
    return Verdict(
        _integer(value["sequence"], "sequence"),
        _phase(value["phase"]),
        action,
        counts,
        None if listed is None else tuple(listed),
        _failure(value["failure"]),
    )


def decode_body(data: bytes) -> tuple[JSON, str | None]:
    """(body, problem). Decompression stops at the limit, so that no few bytes become gigabytes."""
    if len(data) > MAX_BODY_BYTES:
        raise MessageError(f"the body is {len(data)} bytes long, at most {MAX_BODY_BYTES} are allowed")
    inflate = zlib.decompressobj()
    try:
        text = inflate.decompress(data, MAX_BODY_TEXT_BYTES + 1)
    except zlib.error as error:
        raise MessageError(f"the body cannot be decompressed: {error}") from error
    if not inflate.eof or inflate.unconsumed_tail or inflate.unused_data:
        raise MessageError("the body is cut off, continued, or larger than allowed once decompressed")
    value = _load(text, MAX_BODY_TEXT_BYTES, "the body")
    _expect(value, frozenset({"body", "problem"}), "the body")
    return value["body"], _optional_text(value["problem"], "problem")  # type: ignore[return-value]
