"""What an attached worker tells its service of a load: how far it is, every second, and what became of it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from loader_service.errors import record_of
from loader_service.keeping.attachment import Attachment
from loader_service.report import LoadReport
from loader_service.timeline import Counters

TELL_EVERY_S: Final = 1.0
_BEAT_S: Final = 0.1
_MOST_CHARS: Final = 2048  # of each text of a failure: all of them, escaped, are one packet


class Telling:
    """Of one load. Runs on the service's loop, and measures how late that is. Never waits for the resident service."""

    def __init__(
        self, attachment: Attachment, load: str, rank: int, world_size: int, look: Callable[[], Counters]
    ) -> None:
        self._attachment = attachment
        self._who = {"load": load, "rank": rank, "world_size": world_size, "process": os.getpid()}
        self._look = look
        self._lag_s = 0.0
        self._task = asyncio.ensure_future(self._go_on())

    async def _go_on(self) -> None:
        told_s = 0.0
        while True:
            began_s = time.monotonic()
            if began_s - told_s >= TELL_EVERY_S:
                told_s = began_s
                self._tell()
            await asyncio.sleep(_BEAT_S)
            self._lag_s = max(self._lag_s, time.monotonic() - began_s - _BEAT_S)

    def end(self, report: LoadReport | None = None, error: BaseException | None = None) -> None:
        """The load is over, with a report or an error."""
        self._task.cancel()
        failure = None
        if error is not None:
            facts = record_of(error).as_dict()
            failure = {key: fact[:_MOST_CHARS] if isinstance(fact, str) else fact for key, fact in facts.items()}
        done = report.as_dict() if report is not None else None
        if done is not None:
            del done["files_read"], done["warnings"]  # may be more than a packet takes
        self._tell(report=done, failure=failure)

    def _tell(self, **more: object) -> None:
        facts = {"counters": asdict(self._look()), "loop_lag_s": self._lag_s}
        self._attachment.tell({**self._who, **facts, **more})
