"""One rank of the command line, with faults of a test's choice: `python -m tests.cli.faulty_rank FAULTS.json load ...`.

Nothing that takes long is imported before the rank says that it is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loader_service.cli.signals import own_signals

if TYPE_CHECKING:
    from tests.cli.support import Fault


@dataclass(frozen=True)
class RankFaults:
    """What is wrong with one rank: `reading` befalls every read of payload, `config` is read in place of the command
    line's, `consumer` is what looking at a tensor (`--verify`) raises."""

    reading: Fault | None = None
    config: Path | None = None
    consumer: str | None = None


Faults = Sequence[Mapping[int, RankFaults]]  # by attempt, then by rank


def write_faults(path: Path, faults: Faults) -> None:
    """For `main`, in other processes. An attempt after the last of `faults` has none."""
    told = [{rank: _as_dict(fault) for rank, fault in by_rank.items()} for by_rank in faults]
    path.write_text(json.dumps(told))


def _as_dict(fault: RankFaults) -> dict[str, Any]:
    reading = fault.reading
    return {
        "reading": None if reading is None else [reading.kind, None if reading.mark is None else str(reading.mark)],
        "config": None if fault.config is None else str(fault.config),
        "consumer": fault.consumer,
    }


def main() -> None:
    """Never returns."""
    own_signals()  # as `python -m loader_service` does
    path, *args = sys.argv[1:]
    rank, attempt = os.environ["RANK"], int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    Path(path).with_name(f"pid.{attempt}.{rank}").write_text(str(os.getpid()))
    by_attempt = json.loads(Path(path).read_text())
    told = by_attempt[attempt].get(rank) if attempt < len(by_attempt) else None
    sys.argv = ["loader-service", *args]
    from loader_service.cli import app

    with faults_of(told) if told is not None else contextlib.nullcontext():
        app.main()


@contextlib.contextmanager
def faults_of(told: Mapping[str, Any]) -> Iterator[None]:
    """Brings about what `write_faults` wrote."""
    with contextlib.ExitStack() as faults:
        if told["config"] is not None:
            sys.argv[sys.argv.index("load") + 1] = told["config"]
        if told["reading"] is not None:
            from tests.cli.support import Fault, payload_fault

            kind, mark = told["reading"]
            faults.enter_context(payload_fault(Fault(kind, None if mark is None else Path(mark))))
        if told["consumer"] is not None:
            faults.enter_context(broken_consumer(told["consumer"]))
        yield


@contextlib.contextmanager
def broken_consumer(text: str) -> Iterator[None]:
    """What looks at each tensor of `load --verify` fails."""
    from loader_service.cli.checking import Reference

    def compare(*_: object) -> None:
        raise KeyError(text)

    whole, Reference.compare = Reference.compare, compare  # type: ignore[method-assign, assignment]
    yield
    Reference.compare = whole  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
