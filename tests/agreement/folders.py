"""How ranks of a test tell each other something before they are connected: files in a folder, each written at once."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from loader_service.agreement.node import Card
from tests.support.ranks import Rank

PATIENCE_S = 30.0


def told(folder: str, name: str, text: str = "") -> None:
    part = Path(folder, f"{name}.{os.getpid()}.part")  # several ranks may tell the same
    part.write_text(text)
    part.rename(Path(folder, name))


def heard(folder: str, name: str) -> str:
    deadline_s = time.monotonic() + PATIENCE_S
    while not Path(folder, name).exists():
        assert time.monotonic() < deadline_s, name
        time.sleep(0.01)
    return Path(folder, name).read_text()


def all_told(folder: str, rank: Rank, name: str) -> None:
    """Every rank has come to `name`, this one too."""
    told(folder, f"{name}{rank.rank}")
    for other in range(rank.world_size):
        heard(folder, f"{name}{other}")


def exchange(folder: str, rank: Rank, card: Card) -> list[Card]:
    """Every rank's card: what the store does in a load."""
    told(folder, f"card{rank.rank}", json.dumps(card.as_json()))
    return [Card.from_json(r, json.loads(heard(folder, f"card{r}"))) for r in range(rank.world_size)]
