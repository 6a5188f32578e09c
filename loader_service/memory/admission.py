"""Whether memory can be had before it is asked for: what the machine and the tightest cgroup leave, on all ranks.

The kernel grants memory that it does not have and kills later. So ranks tell each other what they are about to take and
what is free, and all of them go on or none does.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from loader_service.sizes import format_size

RESERVE_SHARE: Final = 10
MOST_RESERVE_BYTES: Final = 16 << 30
_NO_LIMIT_BYTES: Final = 1 << 60  # cgroup v1 writes a huge number where there is no limit
_MOST_DIGITS: Final = 20

ROOT: Final = Path("/")


@dataclass(frozen=True, slots=True)
class Room:
    """Where memory comes from: a machine (`place` "") or a cgroup, its `limit_bytes`, and what is free of them.

    Cached file contents that the kernel can give up count as free. `identity` tells cgroups of a machine apart where
    processes see them under other names, or other ones under the same name, as containers do.
    """

    place: str
    limit_bytes: int
    free_bytes: int
    identity: str = ""

    @property
    def key(self) -> str:
        return self.identity or self.place


def memory_rooms(root: Path = ROOT) -> tuple[Room, ...]:
    """The machine's memory, and each cgroup with a limit that this process is in, ancestors included. Blocks.

    `root` is where /proc and /sys are found. Linux only: elsewhere there is nothing to read, and nothing is refused.
    """
    rooms = [*_machine(root)]
    for directory, name in _cgroups(root):
        rooms += _cgroup(directory, name)
    return tuple(rooms)


def free_in_words(rooms: Sequence[Room]) -> str:
    """How much memory a process in these rooms may still take, for messages; none where it can open nothing to look."""
    if not rooms:
        return "how much memory is available cannot be told"
    return f"{format_size(min(room.free_bytes for room in rooms))} of memory is available"


def reserve_of(room: Room, configured: int | Literal["auto"]) -> int:
    """What must stay free of a room."""
    if configured != "auto":
        return configured
    return min(room.limit_bytes // RESERVE_SHARE, MOST_RESERVE_BYTES)


@dataclass(frozen=True, slots=True)
class Supply:
    """The rooms on its `node` that one rank's host memory comes from, and how much of each is to stay free."""

    rank: int
    node: str
    rooms: tuple[Room, ...]
    reserve: int | Literal["auto"]

    def as_json(self) -> dict[str, object]:
        rooms = [[room.place, room.limit_bytes, room.free_bytes, room.identity] for room in self.rooms]
        return {"node": self.node, "rooms": rooms, "reserve": self.reserve}

    @classmethod
    def from_json(cls, rank: int, told: object) -> Supply:
        """What another rank told. Raises ValueError for anything else."""
        facts: Mapping[object, object] = told if isinstance(told, Mapping) else {}
        node, rooms, reserve = facts.get("node"), facts.get("rooms"), facts.get("reserve")
        if not (isinstance(node, str) and isinstance(rooms, list)):
            raise ValueError(f"rank {rank} told its memory in an unknown way")  # noqa: TRY004 - it is not the caller's
        return cls(rank, node, tuple(map(_room, rooms)), "auto" if reserve == "auto" else _whole(reserve))


def _room(told: object) -> Room:
    if not isinstance(told, list) or len(told) != 4 or not (isinstance(told[0], str) and isinstance(told[3], str)):
        raise ValueError(f"{told!r} does not say how much memory there is")
    return Room(told[0], _whole(told[1]), _whole(told[2]), told[3])


def refusal(supplies: Sequence[Supply], wanted_bytes: Sequence[int]) -> str | None:
    """Why not all of it can be had, with figures; None if it can. `wanted_bytes`: what each rank of `supplies` takes by
    itself. Pure: every rank comes to the same answer.

    What several ranks take of one room is added up, against the least that any of them found free there.
    """
    takers: defaultdict[tuple[str, str], dict[int, int]] = defaultdict(dict)  # each once, also of a cgroup seen twice
    tightest: dict[tuple[str, str], tuple[Room, int]] = {}
    for at, supply in enumerate(supplies):
        for room in supply.rooms:
            key = (supply.node, room.key)
            takers[key][at] = wanted_bytes[at]
            reserve = reserve_of(room, supply.reserve)
            if key not in tightest or room.free_bytes - reserve < tightest[key][0].free_bytes - tightest[key][1]:
                tightest[key] = room, reserve
    for key, wanted in takers.items():
        room, reserve = tightest[key]
        total_bytes = sum(wanted.values())
        if total_bytes > max(room.free_bytes - reserve, 0):
            return _in_words(total_bytes, [supplies[at].rank for at in wanted if wanted[at]], room, reserve)
    return None


def _in_words(wanted_bytes: int, ranks: Sequence[int], room: Room, reserve_bytes: int) -> str:
    who = f"rank {ranks[0]} wants" if len(ranks) == 1 else f"{len(ranks)} ranks (lowest: {min(ranks)}) want"
    where = "the machine" if not room.place else f"cgroup {room.place}"
    reserve, advice = format_size(reserve_bytes), "load less on this node, raise the limit, or lower the reserve"
    kept = f"of which {reserve} are to stay so"
    if reserve_bytes > room.free_bytes:
        kept = f"and {reserve} are to stay free"
    if reserve_bytes > room.limit_bytes:
        kept += f", more than {where} has"
        advice = "raise the limit, or lower the reserve" if room.place else "lower the reserve"
    return (
        f"{who} {format_size(wanted_bytes)} of host memory, but {where} has {format_size(room.free_bytes)} free of "
        f"{format_size(room.limit_bytes)}, {kept} (memory.reserve_bytes): {advice}"
    )


# -- reading what the kernel says -------------------------------------------------------------------------------------


def _machine(root: Path) -> Iterator[Room]:
    facts = _pairs(root / "proc/meminfo", separator=":")
    if "MemTotal" in facts and "MemAvailable" in facts:
        yield Room("", facts["MemTotal"] * 1024, facts["MemAvailable"] * 1024)


def _cgroups(root: Path) -> Iterator[tuple[Path, str]]:
    """(directory, name) of each cgroup of this process that can limit memory, and of its ancestors."""
    mounts = list(_mounts(root))
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for kind, options, mounted_part, mount_point in mounts:
            unified = controllers == "" and kind == "cgroup2"
            if not unified and not ("memory" in controllers.split(",") and kind == "cgroup" and "memory" in options):
                continue
            top = root / mount_point.lstrip("/")
            directory = top / _below(PurePosixPath(path), PurePosixPath(mounted_part))
            for part in (directory, *directory.parents):
                yield part, "/" + str(part.relative_to(root))
                if part == top:
                    break


def _below(path: PurePosixPath, mounted_part: PurePosixPath) -> PurePosixPath:
    """A cgroup's place under a mount of `mounted_part` of the hierarchy; the mount itself where it is not below it, as
    in containers and cgroup namespaces: that is then the nearest ancestor that can be seen."""
    if ".." in path.parts or not path.is_relative_to(mounted_part):
        return PurePosixPath()
    return path.relative_to(mounted_part)


def _mounts(root: Path) -> Iterator[tuple[str, list[str], str, str]]:
    """(file system, its options, which part of it, mount point) of everything that is mounted."""
    for line in _lines(root / "proc/self/mountinfo"):
        mounted, _, behind = line.partition(" - ")
        fields, kinds = mounted.split(), behind.split()
        if len(fields) >= 5 and len(kinds) >= 3:
            yield kinds[0], kinds[2].split(","), _unescaped(fields[3]), _unescaped(fields[4])


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _cgroup(directory: Path, name: str) -> Iterator[Room]:
    facts = _pairs(directory / "memory.stat")
    limits = [_number(directory / file) for file in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    limits.append(facts.get("hierarchical_memory_limit"))  # v1: of ancestors, also of those that cannot be seen
    known = [limit for limit in limits if limit is not None and limit < _NO_LIMIT_BYTES]
    used = _number(directory / "memory.current")
    if used is None:
        used = _number(directory / "memory.usage_in_bytes")
    if not known or used is None:
        return
    prefix = "total_" if "total_inactive_file" in facts else ""  # v1 counts the groups below only under this name
    cached = facts.get(f"{prefix}inactive_file", 0) + facts.get(f"{prefix}active_file", 0)
    yield Room(name, min(known), max(0, min(known) - max(0, used - cached)), _identity(directory))


def _identity(directory: Path) -> str:
    try:
        status = directory.stat()
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return _whole_text(lines[0].strip()) if lines else None


def _pairs(path: Path, separator: str | None = None) -> dict[str, int]:
    """The lines "name number ..." of a file."""
    found = {}
    for line in _lines(path):
        words = line.replace(separator, " ").split() if separator else line.split()
        number = _whole_text(words[1]) if len(words) >= 2 else None
        if number is not None:
            found[words[0]] = number
    return found


def _whole_text(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no number of bytes")
    return value
