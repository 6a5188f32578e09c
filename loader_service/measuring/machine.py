"""What there is to know of this machine before anything is measured."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loader_service.memory.admission import ROOT, memory_rooms
from loader_service.reading.page_cache import read_ahead_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores that this process may use, memory, huge pages, what the kernel reads ahead of the files measured, and the
    kernel's release.

    `huge_pages` is "always", "madvise", "never", or "" where the system does not say; `read_ahead_bytes` 0 and `kernel`
    "" likewise.
    """

    cores: int
    memory_bytes: int
    free_bytes: int
    huge_pages: str
    read_ahead_bytes: int
    kernel: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def this_machine(files: Sequence[str], root: Path = ROOT) -> Machine:
    """Looks at the system, and at the device of the first file. `root` is where /proc and /sys are found. Blocks."""
    rooms = memory_rooms(root)
    device = Path(files[0]).stat().st_dev if files else 0
    return Machine(
        cores=usable_cores(root),
        memory_bytes=min((room.limit_bytes for room in rooms), default=0),
        free_bytes=min((room.free_bytes for room in rooms), default=0),
        huge_pages=_huge_pages(root),
        read_ahead_bytes=read_ahead_bytes(device),
        kernel=_text(root / "proc/sys/kernel/osrelease").strip(),
    )


def usable_cores(root: Path = ROOT) -> int:
    """How many cores this process may keep busy: those it may run on, less where its control group has a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = _text(root / "sys/fs/cgroup/cpu.max").split()
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
        cores = min(cores, max(1, int(words[0]) // int(words[1])))
    return cores


def _huge_pages(root: Path) -> str:
    chosen = re.search(r"\[(\w+)\]", _text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return chosen[1] if chosen else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
