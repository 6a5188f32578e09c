"""What ranks agree on in each phase: the digest that is compared, the body behind it, and a difference in words.

Also how a rank's exception becomes what the others are told, and how it gets the common verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import TypeAlias, cast

from loader_service.agreement.messages import JSON, Describe, Detail, Phase, PhaseRecord, error_of
from loader_service.agreement.session import Session
from loader_service.checkpoint.catalog import Catalog
from loader_service.checkpoint.differences import Row, describe_difference, describe_tensor_difference
from loader_service.checkpoint.refusal import shown
from loader_service.config.normalised import describe_config_difference, normalised
from loader_service.config.schema import ServiceConfig
from loader_service.errors import AgreementError, LoadCancelledError, LoaderError, RankFailure, name_of, text_of
from loader_service.planning.plan import PLANNER_VERSION, LoadPlan


def config_record(
    config: ServiceConfig,
    load: str,
    *,
    node: str,
    world_size: int,
    coords: Mapping[str, int] | None,
    table: str | None = None,
    serve: JSON = None,
    card: JSON = None,
) -> PhaseRecord:
    """The configuration as far as ranks must share it. `node` is counted, coordinates are listed for all to know, and
    so is `card`, what a rank tells of its node. `table` is the host table that is asked for, if one is;
    `serve` what resident services do, which plan for `world_size` workers.

    Either every rank gives coordinates or none does; what they are may differ, that is their purpose.
    """
    given = None if coords is None else "given"
    facts = {"load": load, "table": table, "planner": PLANNER_VERSION, "world_size": world_size, "coords": given}
    body = cast(JSON, {"serve": serve, **facts, **normalised(config, load)})
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


Who: TypeAlias = tuple[str, str]  # the two ranks, as they are called


def _config_difference(a: JSON, b: JSON, who: Who) -> str:
    first, second = cast(Mapping[str, object], a), cast(Mapping[str, object], b)
    versions = [side.get("planner") for side in (first, second)]
    if versions[0] != versions[1]:  # everything else may differ in consequence
        which = f"the planner has version {versions[0]} on {who[0]} and {versions[1]} on {who[1]}"
        return f"{which}: install the same version of the loader on all ranks"
    found = describe_config_difference(first, second, who=who)
    return f"the configurations differ: {found}" if found else "the configurations differ in a way that has no name"


def _catalog_difference(a: JSON, b: JSON, who: Who) -> str | Detail:
    rows_a, rows_b = cast("list[Row]", a), cast("list[Row]", b)
    for row_a, row_b in zip(rows_a, rows_b, strict=False):
        if row_a[:2] == row_b[:2] and row_a[2:] != row_b[2:]:
            shard = str(row_a[0])
            finer = functools.partial(_tensor_difference, shard, who=who, same_header=row_a[2] == row_b[2])
            return Detail(shard, finer)
        if row_a != row_b:
            break
    found = describe_difference(rows_a, rows_b, who=who)
    return f"the checkpoints differ: {found}" if found else "the checkpoints differ in a way that has no name"


def _tensor_difference(shard: str, a: JSON, b: JSON, *, who: Who, same_header: bool) -> str:
    """Shards of one name and size: other headers, or equal ones of which an index file leaves out other tensors."""
    found = describe_tensor_difference(cast("list[Row]", a), cast("list[Row]", b), who=who)
    if same_header:
        return f"their index files choose otherwise between copies in shard {shown(shard)} and elsewhere: {found}"
    where = f"the headers of shard {shown(shard)} differ"
    return f"{where}: {found}" if found else f"{where} in metadata or spelling, not in tensors"


def _plan_difference(a: JSON, b: JSON, who: Who) -> str:
    plans = f"{json.dumps(a)} on {who[0]} and {json.dumps(b)} on {who[1]}"
    return f"the plans differ although configuration and checkpoint agree: {plans}"


DESCRIBE: Mapping[Phase, Describe] = {
    Phase.CONFIG: _config_difference,
    Phase.CATALOG: _catalog_difference,
    Phase.PLAN: _plan_difference,
}


def as_reported(error: BaseException) -> BaseException:
    """What the other ranks are told: cancellation and interrupts, by whatever name, are one cause. Never raises."""
    if issubclass(type(error), Exception):  # `isinstance` may run code of the caller's own class
        return error
    text, name = text_of(error), name_of(error)
    if issubclass(type(error), asyncio.CancelledError):
        return LoadCancelledError(f"the load was cancelled ({name})" if text == name else text)
    return LoadCancelledError(f"interrupted by {name}" if text == name else f"interrupted by {name} ({text})")


def attach_verdict(error: BaseException, session: Session, phase: Phase) -> None:
    """Completes a rank's own exception: where it happened and, among several ranks, a note with what all of them found.

    The note's text is that of the RankFailure that the other ranks raise, also where this rank is the cause. An error
    that is itself the verdict gets none, nor does any after a success of all ranks. Never raises: a class of the
    caller's own may refuse, with whatever it likes.
    """
    with contextlib.suppress(BaseException):
        if isinstance(error, LoaderError) and not isinstance(error, RankFailure | AgreementError):
            error.rank = session.rank if getattr(error, "rank", None) is None else error.rank
            error.phase = phase.value if getattr(error, "phase", None) is None else error.phase
    with contextlib.suppress(BaseException):
        note = _note_for(error, session)
        if note is not None and note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _note_for(error: BaseException, session: Session) -> str | None:
    if session.world_size == 1 or session.succeeded:
        return None
    if session.final is None:
        return "outcome unknown: the other ranks were told, but no verdict came back in time"
    note = f"verdict of all ranks: {error_of(session.final)}"
    return None if isinstance(error, RankFailure | AgreementError) and text_of(error) in note else note
