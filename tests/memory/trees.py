"""What the kernel writes down of memory and control groups, as file trees that `memory_rooms` reads instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

MEMINFO = "MemTotal:       24000000 kB\nMemFree:        1 kB\nMemAvailable:   20000000 kB\nHugePages_Total:   0\n"


def tree(root: Path, files: Mapping[str, str]) -> Path:
    """A root folder with /proc/meminfo and these files."""
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def mount(kind: str, point: str, part: str = "/", options: str = "rw,memory") -> str:
    return f"30 23 0:26 {part} {point} rw,nosuid shared:9 - {kind} cgroup {options}\n"


def v1(at: str, limit: object, used: int, stat: str = "cache 5\n") -> dict[str, str]:
    return {
        f"{at}/memory.limit_in_bytes": f"{limit}\n",
        f"{at}/memory.usage_in_bytes": f"{used}\n",
        f"{at}/memory.stat": stat,
    }


def v2(at: str, most: object, high: object, used: int, stat: str = "anon 5\n") -> dict[str, str]:
    return {
        f"{at}/memory.max": f"{most}\n",
        f"{at}/memory.high": f"{high}\n",
        f"{at}/memory.current": f"{used}\n",
        f"{at}/memory.stat": stat,
    }
