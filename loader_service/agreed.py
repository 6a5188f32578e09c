"""What ranks agree on in each phase: the digest that is compared, the body behind it, and a difference in words."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import cast

from loader_service.agreement.messages import JSON, Describe, Detail, Phase, PhaseRecord
from loader_service.checkpoint.catalog import Catalog
from loader_service.checkpoint.differences import Row, describe_difference, describe_tensor_difference
from loader_service.config.normalised import describe_config_difference, normalised
from loader_service.config.schema import ServiceConfig
from loader_service.planning.plan import PLANNER_VERSION, LoadPlan


def config_record(
    config: ServiceConfig,
    load: str,
    *,
    node: str,
    coords: Mapping[str, int] | None,
    table: str | None = None,
    card: JSON = None,
) -> PhaseRecord:
    """The configuration as far as ranks must share it. `node` is counted, coordinates are listed for all to know, and
    so is `card`, what a rank tells of its node. `table` is the host table that is asked for, if one is.

    Either every rank gives coordinates or none does; what they are may differ, that is their purpose.
    """
    given = None if coords is None else "given"
    facts = {"load": load, "table": table, "planner": PLANNER_VERSION, "coords": given}
    body = cast(JSON, {**facts, **normalised(config, load)})
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return PhaseRecord(
        digest=hashlib.sha256(text.encode()).hexdigest(),
        counted={"node": node},
        listed=None if coords is None and card is None else {"coords": coords, "card": card},
        body=lambda: body,
    )


def catalog_record(catalog: Catalog) -> PhaseRecord:
    """The checkpoint: names and sizes of the shards and the hashes of their headers."""
    return PhaseRecord(
        digest=catalog.digest,
        body=lambda: cast(JSON, catalog.summary()),
        body_detail=lambda shard: cast(JSON, catalog.tensor_summary(shard)),
    )


def plan_record(plan: LoadPlan, told: JSON = None) -> PhaseRecord:
    """The plan of all ranks. Equal configurations and catalogs give equal plans, so this guards the planner itself.
    `told` is listed: what each rank wants all to know by then."""
    body: JSON = {"plan_digest": plan.digest, "planner": PLANNER_VERSION}
    return PhaseRecord(digest=plan.digest, listed=told, body=lambda: body)


def _config_difference(a: JSON, b: JSON) -> str:
    found = describe_config_difference(cast(Mapping[str, object], a), cast(Mapping[str, object], b))
    return f"the configurations differ: {found}" if found else "the configurations differ in a way that has no name"


def _catalog_difference(a: JSON, b: JSON) -> str | Detail:
    rows_a, rows_b = cast("list[Row]", a), cast("list[Row]", b)
    for row_a, row_b in zip(rows_a, rows_b, strict=False):
        if row_a[:2] == row_b[:2] and row_a[2] != row_b[2]:
            shard = str(row_a[0])
            return Detail(shard, functools.partial(_header_difference, shard))
        if row_a != row_b:
            break
    found = describe_difference(rows_a, rows_b)
    return f"the checkpoints differ: {found}" if found else "the checkpoints differ: their index files decide otherwise"


def _header_difference(shard: str, a: JSON, b: JSON) -> str:
    found = describe_tensor_difference(cast("list[Row]", a), cast("list[Row]", b))
    where = f"the headers of shard '{shard}' differ"
    return f"{where}: {found}" if found else f"{where} in metadata or spelling, not in tensors"


def _plan_difference(a: JSON, b: JSON) -> str:
    return f"the plans differ although configuration and checkpoint agree: {json.dumps(a)} and {json.dumps(b)}"


DESCRIBE: Mapping[Phase, Describe] = {
    Phase.CONFIG: _config_difference,
    Phase.CATALOG: _catalog_difference,
    Phase.PLAN: _plan_difference,
}
