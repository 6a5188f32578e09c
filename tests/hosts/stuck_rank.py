"""A rank of the command line whose reads never return: `python -m tests.hosts.stuck_rank FOLDER load CONFIG ...`.

Its first read of payload makes the file FOLDER/mark.RANK.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from loader_service.cli import app
from tests.cli.support import Fault, payload_fault


def mark_of(folder: Path, rank: int | str) -> Path:
    return folder / f"mark.{rank}"


def main() -> None:
    """Never returns."""
    folder, *args = sys.argv[1:]
    sys.argv = ["loader-service", *args]
    with payload_fault(Fault("never returns", mark_of(Path(folder), os.environ["RANK"]))):
        app.main()


if __name__ == "__main__":
    main()
