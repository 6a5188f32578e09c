"""What a load did, as plain frozen data: the same numbers for Python (`load.report`) and for `--json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """One policy: what the configuration asked for, what was done, and why."""

    requested: str
    effective: str
    reason: str

    def as_dict(self) -> dict[str, str]:
        """The same as plain data."""
        return {"requested": self.requested, "effective": self.effective, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One rank's account of one load. Bytes are bytes, `seconds` wall time from entering to leaving.

    `read_bytes` is what this rank read of payload for its own use (headers not counted), `striped_bytes` what it read
    ahead for its node, `files_opened` how many shards it opened for payload, `files_read` their base names.
    `verified` is True or False after a comparison, None when none was asked for, or not of all bytes. `checked_bytes`
    and `unchecked_bytes` count those that a manifest could tell of, and the others; None without one. `complete` is
    False after a `break`.
    """

    load: str
    rank: int
    world_size: int
    tensors: int
    payload_bytes: int
    read_bytes: int
    striped_bytes: int
    files_opened: int
    files_read: tuple[str, ...]
    seconds: float
    peak_staging_bytes: int
    complete: bool
    catalog_digest: str
    plan_digest: str
    phases: Mapping[str, float] = field(default_factory=dict)
    policies: Mapping[str, PolicyOutcome] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    verified: bool | None = None
    checked_bytes: int | None = None
    unchecked_bytes: int | None = None

    @property
    def gib_per_s(self) -> float:
        """Payload handed over per second of the whole load, in GiB/s."""
        return self.payload_bytes / (1 << 30) / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, object]:
        """The JSON document of the contract, in its key names."""
        return {
            "load": self.load,
            "rank": self.rank,
            "world_size": self.world_size,
            "tensors": self.tensors,
            "payload_bytes": self.payload_bytes,
            "read_bytes": self.read_bytes,
            "striped_bytes": self.striped_bytes,
            "files_opened": self.files_opened,
            "files_read": list(self.files_read),
            "seconds": self.seconds,
            "gib_per_s": self.gib_per_s,
            "peak_staging_bytes": self.peak_staging_bytes,
            "complete": self.complete,
            "catalog_digest": self.catalog_digest,
            "plan_digest": self.plan_digest,
            "phases": dict(self.phases),
            "policies": {name: outcome.as_dict() for name, outcome in self.policies.items()},
            "fallbacks": list(self.fallbacks),
            "warnings": list(self.warnings),
            "verified": self.verified,
            "checked_bytes": self.checked_bytes,
            "unchecked_bytes": self.unchecked_bytes,
        }
