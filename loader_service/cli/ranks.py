"""What rank processes of one `load` do together beside the load: who prints, reports to rank 0, failures before it.

Everything travels through the store where the load's ranks meet, under names of its own, as JSON.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal, cast

from loader_service.agreed import as_reported
from loader_service.agreement.group import Group, Rendezvous, from_environment, join_group
from loader_service.agreement.messages import (
    MAX_ENTRY_BYTES,
    MAX_RECORD_BYTES,
    PHASES,
    Phase,
    PhaseRecord,
    error_of,
)
from loader_service.agreement.protocol import LEADER
from loader_service.agreement.session import Session
from loader_service.bridge import uninterrupted
from loader_service.config.schema import AgreementConfig
from loader_service.errors import EXIT_AGREEMENT, FailureRecord, LoaderError, RankFailure, error_from_record
from loader_service.reading.threads import ReadPool

GONE = frozenset({"LostRank", "LateRank", "LostStore"})  # records of ranks that nobody hears any more
REPORTS, REPORTS_SUFFIX = "reports", ".reports"  # the session in which documents are gathered, and its store names
WAIT_FOR_LOWER_RANK_S = 2.0
MAX_WAIT_S = 10.0
_CONNECT_S = 2.0
_FRAME_BYTES = 4 << 10  # what a record or a verdict has beside what it lists

Voice = Literal["document", "line", "none"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands among those that a launcher started. `meeting` is None for one rank alone."""

    rank: int
    world_size: int
    meeting: Rendezvous | None

    @property
    def alone(self) -> bool:
        return self.meeting is None


def place_from(environ: Mapping[str, str] = os.environ) -> Place:
    """This process's place. Raises ConfigError where the environment says it in part only."""
    meeting = from_environment(environ)
    if meeting is None:
        return Place(0, 1, None)
    return Place(meeting.rank, meeting.world_size, meeting)


async def tell_others(
    place: Place,
    session_name: str,
    error: BaseException,
    on_verdict: Callable[[LoaderError | None], Awaitable[None]],
    *,
    suffix: str = "",
    phase: Phase | None = Phase.CONFIG,
) -> None:
    """Says on behalf of a rank whose load cannot even be opened that it fails, so that no other rank waits for it.

    It takes part under the name and number that the load (with `suffix`: the reports) would have had. `on_verdict` is
    awaited before anything is cleaned up, with this rank's own error or the other cause that the ranks found; with None
    if there is no verdict.
    Bounded by a few seconds, also where nobody else is there.
    """
    if place.meeting is None:
        await on_verdict(None)
        return
    meeting = replace(place.meeting, nonce=place.meeting.nonce + suffix)
    group = join_group(meeting, settings=AgreementConfig(grace_s=2.0))
    session = group.session(session_name)
    try:
        verdict = await session.fail(error, phase)
        await on_verdict(None if verdict is None or verdict.failure is None else error_of(verdict))
    finally:
        await session.close()
        group.close()


async def gather(
    place: Place,
    own: Mapping[str, object],
    settings: AgreementConfig,
    *,
    phase: Phase | None = None,
    waits_s: float | None = None,
    on_begin: Callable[[], None] = lambda: None,
    on_final: Callable[[LoaderError], None] | None = None,
) -> list[dict[str, object]]:
    """Every rank's document, in rank order, on every rank; collective. An exchange of its own after the load's.

    A document travels in parts, one a phase; one too large for that comes without its longest lists, and says so. A
    rank that has no document must `fail_reports`. Raises RankFailure where another rank did so, or does not bring its
    document within `agreement.timeout_s`, or does not come within `waits_s`, if given. `on_begin` is called when the
    others hear of whatever happens from then on, `on_final` with a common verdict that it has failed, before anything
    is cleaned up.
    """
    if place.meeting is None:
        on_begin()
        return [dict(own)]
    group, session = _reports_session(place.meeting, settings, phase, waits_s, on_final)
    on_begin()
    try:
        part_chars = part_limit(place.world_size)
        packed = _packed_to_fit(own, part_chars * len(PHASES))
        texts = [""] * place.world_size
        for number, step in enumerate(PHASES):  # all of them: the log has to come to its end
            part = packed[number * part_chars : (number + 1) * part_chars]
            verdict = await session.exchange(step, PhaseRecord(listed=part))
            texts = [text + cast("str", more) for text, more in zip(texts, verdict.listed or (), strict=True)]
    except BaseException as error:
        await session.fail(as_reported(error), phase)
        if isinstance(error, RankFailure):
            raise _in_phase(error, phase) from error.__cause__
        raise
    finally:
        await session.close()
        group.close()
    return [_unpacked(text) for text in texts]


async def fail_reports(
    place: Place,
    error: BaseException,
    settings: AgreementConfig,
    *,
    phase: Phase | None = None,
    waits_s: float | None = None,
    on_final: Callable[[LoaderError], None] | None = None,
) -> None:
    """In place of `gather`, where a rank has an error and no document: tells the others, who would wait for it.

    Bounded by the time limits of the agreement. Not cut short by a cancellation, which is raised at the end.
    """
    if place.meeting is None:
        return
    group, session = _reports_session(place.meeting, settings, phase, waits_s, on_final)

    async def tell() -> None:
        try:
            await session.fail(as_reported(error), phase)
        finally:
            await session.close()
            group.close()

    await uninterrupted(tell())


def _reports_session(
    meeting: Rendezvous,
    settings: AgreementConfig,
    phase: Phase | None,
    waits_s: float | None,
    on_final: Callable[[LoaderError], None] | None,
) -> tuple[Group, Session]:
    """An exchange of its own, in the load's store."""
    bounded = settings.model_copy(update={"start_timeout_s": waits_s or settings.timeout_s})
    group = join_group(replace(meeting, nonce=meeting.nonce + REPORTS_SUFFIX), settings=bounded)
    session = group.session(REPORTS)
    if on_final is not None:
        session.on_final(lambda verdict: on_final(_in_phase(error_of(verdict), phase)))
    return group, session


def _in_phase(error: LoaderError, phase: Phase | None) -> LoaderError:
    """The session's own phases are the parts of the documents: of a rank that was lost meanwhile they say nothing."""
    record = error.record()
    return RankFailure(replace(record, phase=phase)) if record.error in GONE else error


def part_limit(world_size: int) -> int:
    """How many characters of a document travel at once: in a rank's record, and all ranks' in one verdict."""
    return min(MAX_RECORD_BYTES - _FRAME_BYTES, (MAX_ENTRY_BYTES - _FRAME_BYTES) // world_size - len('"",'))


def _packed_to_fit(document: Mapping[str, object], limit_chars: int) -> str:
    """What succeeded must not fail because there is much to tell: lists are left out until the rest fits."""
    fallbacks = list(cast("Sequence[object]", document.get("fallbacks", ())))
    kept = dict(document)
    packed = _packed(kept)
    for key in ("files_read", "warnings"):
        if len(packed) <= limit_chars:
            break
        left_out = cast("Sequence[object]", document.get(key, ()))
        fallbacks.append(f"report: {key} of rank {document.get('rank')} ({len(left_out)} texts) is too long to collect")
        kept |= {key: [], "fallbacks": fallbacks}
        packed = _packed(kept)
    return packed


def _packed(document: Mapping[str, object]) -> str:
    """Compressed, since a record's size is bounded and a report can list thousands of files; ASCII, none of it escaped
    in JSON."""
    return base64.b85encode(zlib.compress(json.dumps(document).encode())).decode("ascii")


def _unpacked(text: str) -> dict[str, object]:
    document: dict[str, object] = json.loads(zlib.decompress(base64.b85decode(text)))
    return document


def leader_prints(record: FailureRecord) -> bool:
    """Whether a common verdict can only come from rank 0, which then lives and prints; no other rank need ask."""
    return not (record.error in GONE and record.rank in (None, LEADER))


def turn_to_print(record: FailureRecord, *, rank: int, world_size: int) -> int:
    """How many ranks that may live come before this one; 0 for the one that prints.

    A rank that was given up as lost and reads that itself comes last: the others have printed by then.
    """
    gone = record.rank if record.error in GONE else None
    if rank == gone:
        return world_size - 1
    return rank - (1 if gone is not None and gone < rank else 0)


def exit_code_of(record: FailureRecord) -> int:
    """The code of the rank that a record names, on that rank."""
    return EXIT_AGREEMENT if record.error in GONE else error_from_record(record).exit_code


class Spokesman:
    """Decides, once a load has failed, whether this rank prints the record: the lowest that lives does, alone.

    Where rank 0 is gone, or no verdict came, a rank cannot know who else is: a whole node may have died. So each but
    the first in turn waits for a mark that the printing one leaves in the store, and prints in its place if none comes.
    If the store is gone too, it prints the line only: a person may read it twice, a program may not. `stopped` says
    whether this process stood still for so long that the others may have given it up, and printed.
    """

    def __init__(self, place: Place, *, stopped: Callable[[], bool] = lambda: False) -> None:
        self._place = place
        self._stopped = stopped
        self._marked = False

    async def voice(self, record: FailureRecord, *, agreed: bool) -> Voice:
        """What this rank prints of the failure. `agreed`: the record is the ranks' common verdict. Takes seconds only
        where rank 0 is gone."""
        place = self._place
        if place.meeting is None:
            return "document"
        self._marked = self._marked or record.error == "LostStore"  # there is nowhere to leave a mark
        if record.error == "LostStore" and self._stopped():
            return "line"
        if record.error == "LostStore" and place.meeting.served:
            # No rank hosts the store: rank 0 may live, and each knows only that it is cut off itself.
            return "document" if place.rank == LEADER else "line"
        if agreed and leader_prints(record):
            return "document" if place.rank == LEADER else "none"
        turn = turn_to_print(record, rank=place.rank, world_size=place.world_size)
        if record.error == "LostStore":
            return "document" if turn == 0 else "none"
        self._marked = True
        won = await self._claimed(place.meeting, min(turn * WAIT_FOR_LOWER_RANK_S, MAX_WAIT_S))
        if won is None:
            return "document" if turn == 0 and not self._stopped() else "line"
        return "document" if won else "none"

    async def printed(self) -> None:
        """Leaves the mark of a rank that printed without asking anyone: one that was stopped meanwhile, and given up,
        asks when it goes on."""
        if self._place.meeting is not None and not self._marked:
            self._marked = True
            await self._claimed(self._place.meeting, 0.0)

    async def _claimed(self, meeting: Rendezvous, wait_s: float) -> bool | None:
        """Whether this rank's mark stands, after waiting for another's; None where the store is gone. Bounded."""
        # A thread that may be left behind: a store that is frozen ignores its own time limits.
        threads = ReadPool(1, name="loader-print")
        try:
            asking = asyncio.wrap_future(threads.submit(_claim, meeting, wait_s))
            return await asyncio.wait_for(asking, wait_s + 2 * _CONNECT_S)
        except Exception:  # noqa: BLE001 - the store's failures have many classes; all of them mean: gone
            return None
        finally:
            threads.stop()


def _claim(meeting: Rendezvous, wait_s: float) -> bool:
    """Waits for another rank's mark; sets this rank's if none came. Whether this rank's mark stands. Blocking."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

    assert isinstance(meeting.store_or_address, str)  # from the environment it always is one
    host, _, port = meeting.store_or_address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    # The store's client would write several lines to stderr about an address where nobody answers.
    socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    limit = timedelta(seconds=_CONNECT_S)
    client = TCPStore(host, int(port), None, is_master=False, timeout=limit, wait_for_workers=False)
    store = PrefixStore(f"loader_service.cli/{meeting.nonce}", client)
    until_s = time.monotonic() + wait_s
    while time.monotonic() < until_s:
        if store.check(["printed"]):
            return False
        time.sleep(0.02)
    mine = str(meeting.rank)
    return bytes(store.compare_set("printed", "", mine)) == mine.encode()
