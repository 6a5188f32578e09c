"""How much memory is there: as the kernel writes it down, with and without cgroups; and who may have how much of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader_service.memory.admission import Room, Supply, memory_rooms, refusal, reserve_of
from tests.memory.trees import mount, tree, v1, v2

GIB = 1 << 30
MACHINE = Room("", 24_000_000 * 1024, 20_000_000 * 1024)
V1_NO_LIMIT = "9223372036854771712"


def rooms_of(root: Path) -> list[tuple[str, int, int]]:
    return [(room.place, room.limit_bytes, room.free_bytes) for room in memory_rooms(root)]


# -- the machine


def test_a_machine_without_cgroups_is_one_room(tmp_path: Path) -> None:
    assert memory_rooms(tree(tmp_path, {})) == (MACHINE,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "MemTotal: 5 kB\n",
        "MemTotal: many kB\nMemAvailable: few kB\n",
        "MemTotal:\nMemAvailable:\n",
        "\0\xff\n::::\n",
    ],
    ids=["empty", "no MemAvailable", "words", "no values", "garbage"],
)
def test_a_machine_that_does_not_tell_is_no_room(tmp_path: Path, text: str) -> None:
    assert memory_rooms(tree(tmp_path, {"proc/meminfo": text})) == ()


def test_a_system_without_proc_has_no_rooms(tmp_path: Path) -> None:
    assert memory_rooms(tmp_path) == ()


def test_this_machine_tells_what_others_find_too() -> None:
    machine = memory_rooms()[0]
    memory = psutil.virtual_memory()
    assert (machine.place, machine.limit_bytes) == ("", memory.total)
    assert abs(machine.free_bytes - memory.available) < memory.total // 10


# -- cgroups


def test_v2_with_ancestors_and_the_lower_of_two_limits(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pods/one/box\n",
            "proc/self/mountinfo": mount("cgroup2", "/sys/fs/cgroup", options="rw"),
            **v2("sys/fs/cgroup/pods/one/box", "max", 6 * GIB, GIB),
            **v2("sys/fs/cgroup/pods/one", 8 * GIB, "max", 5 * GIB),
            **v2("sys/fs/cgroup/pods", "max", "max", 9 * GIB),
        },
    )
    assert rooms_of(root) == [
        ("", MACHINE.limit_bytes, MACHINE.free_bytes),
        ("/sys/fs/cgroup/pods/one/box", 6 * GIB, 5 * GIB),
        ("/sys/fs/cgroup/pods/one", 8 * GIB, 3 * GIB),
    ]


@pytest.mark.parametrize(("most", "high"), [(6 * GIB, 4 * GIB), (4 * GIB, 6 * GIB)])
def test_memory_high_binds_like_memory_max(tmp_path: Path, most: int, high: int) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": mount("cgroup2", "/sys/fs/cgroup", options="rw"),
            **v2("sys/fs/cgroup", most, high, GIB),
        },
    )
    assert rooms_of(root)[1:] == [("/sys/fs/cgroup", 4 * GIB, 3 * GIB)]


def test_what_files_take_of_a_cgroup_counts_as_free_but_shared_memory_does_not(tmp_path: Path) -> None:
    stat = f"anon 1\nfile {3 * GIB}\nshmem {GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}\n"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/box\n",
            "proc/self/mountinfo": mount("cgroup2", "/sys/fs/cgroup", options="rw"),
            **v2("sys/fs/cgroup/box", 4 * GIB, "max", 3 * GIB, stat),
        },
    )
    assert rooms_of(root)[1:] == [("/sys/fs/cgroup/box", 4 * GIB, 4 * GIB - (3 * GIB - GIB - GIB // 2))]


def test_v1_counts_the_groups_below_and_knows_no_limit_by_its_size(tmp_path: Path) -> None:
    stat = f"inactive_file 5\nactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
            "proc/self/mountinfo": mount("cgroup", "/sys/fs/cgroup/cpu", options="rw,cpu")
            + mount("cgroup", "/sys/fs/cgroup/memory"),
            **v1("sys/fs/cgroup/memory/docker/abc", 8 * GIB, 6 * GIB, stat),
            **v1("sys/fs/cgroup/memory/docker", V1_NO_LIMIT, 6 * GIB),
            **v1("sys/fs/cgroup/memory", V1_NO_LIMIT, 6 * GIB),
            **v1("sys/fs/cgroup/cpu/docker/abc", 1, 1),
        },
    )
    assert rooms_of(root)[1:] == [("/sys/fs/cgroup/memory/docker/abc", 8 * GIB, 4 * GIB)]


def test_v1_tells_the_limit_of_an_ancestor_that_a_container_cannot_see(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/kubepods/pod/abc\n",
            "proc/self/mountinfo": mount("cgroup", "/sys/fs/cgroup/memory", "/kubepods/pod/abc"),
            **v1("sys/fs/cgroup/memory", V1_NO_LIMIT, GIB, f"hierarchical_memory_limit {3 * GIB}\n"),
        },
    )
    assert rooms_of(root)[1:] == [("/sys/fs/cgroup/memory", 3 * GIB, 2 * GIB)]


def test_memory_used_beyond_a_lowered_limit_leaves_nothing_free(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/a\n",
            "proc/self/mountinfo": mount("cgroup", "/m"),
            **v1("m/a", GIB, 2 * GIB),
        },
    )
    assert rooms_of(root)[1:] == [("/m/a", GIB, 0)]


def test_hybrid_systems_limit_memory_by_the_older_hierarchy(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/a\n0::/user.slice\n",
            "proc/self/mountinfo": mount("cgroup", "/sys/fs/cgroup/memory")
            + mount("cgroup2", "/sys/fs/cgroup/unified", options="rw"),
            **v1("sys/fs/cgroup/memory/a", 2 * GIB, GIB),
            "sys/fs/cgroup/unified/user.slice/cgroup.procs": "1\n",
        },
    )
    assert rooms_of(root)[1:] == [("/sys/fs/cgroup/memory/a", 2 * GIB, GIB)]


@pytest.mark.parametrize(
    ("path", "part"),
    [
        pytest.param("/docker/abc", "/docker/abc", id="a container that sees its own part"),
        pytest.param("/", "/", id="a cgroup namespace"),
        pytest.param("/", "/../../outer", id="a namespace over the host's mount"),
        pytest.param("/../other", "/", id="moved out of its namespace"),
        pytest.param("/docker/abc", "/docker/ab", id="a part whose name only begins alike"),
        pytest.param("/elsewhere", "/docker/abc", id="a part that is not its own"),
    ],
)
def test_what_cannot_be_seen_is_left_out_and_the_mount_counts(tmp_path: Path, path: str, part: str) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{path}\n",
            "proc/self/mountinfo": mount("cgroup2", "/sys/fs/cgroup", part, "rw"),
            **v2("sys/fs/cgroup", 4 * GIB, "max", GIB),
            **v2("sys/fs/cgroup/c", 1, "max", 1),
            **v2("sys/fs/other", 1, "max", 1),
        },
    )
    assert rooms_of(root)[1:] == [("/sys/fs/cgroup", 4 * GIB, 3 * GIB)]


def test_mount_points_with_spaces_are_found(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a\n",
            "proc/self/mountinfo": mount("cgroup2", r"/my\040groups", options="rw"),
            **v2("my groups/a", GIB, "max", 0),
        },
    )
    assert rooms_of(root)[1:] == [("/my groups/a", GIB, GIB)]


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({"proc/self/cgroup": "nonsense\n\n::\n:::::\n4:memory\n"}, id="cgroup"),
        pytest.param(
            {"proc/self/mountinfo": "30 23\n - \n- cgroup2 x\n30 23 0:26 / - cgroup2 cgroup\n"}, id="mountinfo"
        ),
        pytest.param({"sys/fs/cgroup/a/memory.max": "many\n"}, id="a limit in words"),
        pytest.param({"sys/fs/cgroup/a/memory.max": "²\n"}, id="a digit that is no number"),
        pytest.param({"sys/fs/cgroup/a/memory.max": "9" * 5000}, id="a number without end"),
        pytest.param({"sys/fs/cgroup/a/memory.max": "-5\n"}, id="a negative limit"),
        pytest.param({"sys/fs/cgroup/a/memory.max": ""}, id="an empty file"),
        pytest.param({"sys/fs/cgroup/a/memory.current": "\xff\n"}, id="no usage"),
    ],
)
def test_garbage_is_no_limit_and_no_crash(tmp_path: Path, files: dict[str, str]) -> None:
    usual = {
        "proc/self/cgroup": "0::/a\n",
        "proc/self/mountinfo": mount("cgroup2", "/sys/fs/cgroup", options="rw"),
        **v2("sys/fs/cgroup/a", GIB, "max", 5),
    }
    assert memory_rooms(tree(tmp_path, {**usual, **files})) == (MACHINE,)


@pytest.mark.parametrize("missing", ["memory.max", "memory.current", "memory.stat"])
def test_missing_files_are_no_crash(tmp_path: Path, missing: str) -> None:
    files = {
        "proc/self/cgroup": "0::/a\n",
        "proc/self/mountinfo": mount("cgroup2", "/c", options="rw"),
        **v2("c/a", GIB, "max", 5),
    }
    del files[f"c/a/{missing}"]
    found = memory_rooms(tree(tmp_path, files))[1:]
    assert [room.free_bytes for room in found] == ([GIB - 5] if missing == "memory.stat" else [])


_IN_A_CGROUP = """
import json, os, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
from loader_service.memory.admission import memory_rooms
kept = bytearray(64 << 20)
for start in range(0, len(kept), 4096):
    kept[start] = 1
print(json.dumps([[room.place, room.limit_bytes, room.free_bytes] for room in memory_rooms()]))
"""


@pytest.fixture
def limited_cgroup() -> Iterator[tuple[str, int]]:
    """(path, limit) of a new cgroup below this process's own, with a memory limit."""
    limit_bytes = 512 << 20
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" not in controllers.split(",") and controllers:
            continue
        for top, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
            folder = Path(top, path.lstrip("/"), f"loader-test-{os.getpid()}")
            try:
                folder.mkdir()
            except OSError:
                continue
            try:
                (folder / file).write_text(str(limit_bytes))
            except OSError:
                folder.rmdir()
                continue
            yield str(folder), limit_bytes
            folder.rmdir()
            return
    pytest.skip("no cgroup with a memory limit can be made here")


def test_a_process_in_a_real_cgroup_finds_its_limit(limited_cgroup: tuple[str, int]) -> None:
    folder, limit_bytes = limited_cgroup
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_CGROUP, folder], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    own = [room for room in json.loads(done.stdout) if room[0] == folder]
    assert len(own) == 1
    assert own[0][1] == limit_bytes
    assert 0 < own[0][2] < limit_bytes - (60 << 20)


# -- who may have how much


Demand: TypeAlias = tuple[Supply, int]  # what a rank has to take from, and what it wants


def demand(rank: int, wanted: int, *rooms: Room, node: str = "n", reserve: object = 0) -> Demand:
    return Supply(rank, node, rooms, reserve), wanted  # type: ignore[arg-type]


def refused(demands: Sequence[Demand]) -> str | None:
    return refusal([supply for supply, _ in demands], [wanted for _, wanted in demands])


def machine(free: int, limit: int = 100) -> Room:
    return Room("", limit, free)


FITS: list[tuple[str, list[Demand]]] = [
    ("nobody", []),
    ("nothing wanted, nothing free", [demand(0, 0, machine(0), reserve=50)]),
    ("all that is free", [demand(0, 40, machine(40))]),
    ("all but the reserve", [demand(0, 30, machine(40), reserve=10)]),
    ("no rooms are known", [demand(0, 10**18)]),
    ("two nodes", [demand(0, 40, machine(40), node="a"), demand(1, 40, machine(40), node="b")]),
    ("only one wants", [demand(0, 40, machine(40)), demand(1, 0, machine(40), Room("/c", 5, 0))]),
    ("one cgroup that is mounted twice", [demand(0, 30, Room("/a", 50, 40, "0:7"), Room("/b", 50, 40, "0:7"))]),
    ("containers under one name", [demand(r, 40, Room("/c", 50, 40, f"0:{r}"), machine(80)) for r in (0, 1)]),
]


@pytest.mark.parametrize("demands", [pytest.param(demands, id=name) for name, demands in FITS])
def test_what_fits_is_not_refused(demands: list[Demand]) -> None:
    assert refused(demands) is None


REFUSED: list[tuple[str, list[Demand], str]] = [
    ("a byte too much", [demand(0, 41, machine(40))], "rank 0 wants 41 bytes of host memory, but the machine has 40"),
    ("the reserve", [demand(0, 31, machine(40), reserve=10)], "40 bytes free of 100 bytes, of which 10 bytes are to"),
    (
        "a reserve beyond what is free",
        [demand(3, 1, machine(40), reserve=90)],
        r"rank 3 wants 1 byte .* 40 bytes free of 100 bytes, and 90 bytes are to stay free \(memory\.reserve_bytes\)"
        ": load less on this node, raise the limit, or lower the reserve$",
    ),
    (
        "a reserve beyond the machine",
        [demand(0, 1, machine(40), reserve=101)],
        r"and 101 bytes are to stay free, more than the machine has \(memory\.reserve_bytes\): lower the reserve$",
    ),
    (
        "a reserve beyond a cgroup",
        [demand(0, 1, machine(90), Room("/c", 30, 30), reserve=31)],
        r"31 bytes are to stay free, more than cgroup /c has \(memory.*\): raise the limit, or lower the reserve$",
    ),
    ("a tenth is kept", [demand(0, 31, machine(40), reserve="auto")], "10 bytes are to stay so"),
    ("together", [demand(0, 20, machine(50)), demand(1, 31, machine(60))], r"2 ranks \(lowest: 0\) want 51 bytes"),
    ("one's reserve", [demand(0, 20, machine(50)), demand(1, 20, machine(50), reserve=20)], "20 bytes are to stay"),
    ("a cgroup", [demand(0, 20, machine(90), Room("/c/a", 30, 10))], "cgroup /c/a has 10 bytes free of 30 bytes"),
    (
        "an ancestor of two",
        [demand(r, 20, machine(90), Room(f"/p/{r}", 30, 30), Room("/p", 60, 35)) for r in (0, 1)],
        "2 ranks .* want 40 bytes .* cgroup /p has 35 bytes",
    ),
    (
        "one cgroup under two names",
        [demand(r, 20, Room(f"/seen/{r}", 50, 35, "0:7"), machine(80)) for r in (4, 2)],
        r"2 ranks \(lowest: 2\) want 40",
    ),
    (
        "the other node",
        [demand(0, 10, machine(50), node="a"), demand(1, 60, machine(50), node="b")],
        "rank 1 wants 60 bytes",
    ),
    ("large figures", [demand(0, 3 * GIB, machine(GIB, 4 * GIB))], r"3\.00 GiB .* 1\.00 GiB free of 4\.00 GiB"),
]


@pytest.mark.parametrize(("demands", "text"), [pytest.param(d, text, id=name) for name, d, text in REFUSED])
def test_what_does_not_fit_is_refused_with_figures(demands: list[Demand], text: str) -> None:
    found = refused(demands)
    assert found is not None
    assert re.search(text, found), found
    assert "memory.reserve_bytes" in found


def test_eight_ranks_of_a_machine_with_a_little_too_little() -> None:
    each = [demand(rank, 24 * GIB, machine(200 * GIB, 256 * GIB), reserve="auto") for rank in range(8)]
    found = refused(each)
    assert found is not None
    assert "8 ranks (lowest: 0) want 192.00 GiB" in found
    assert "16.00 GiB are to stay so" in found
    assert refused([demand(rank, 23 * GIB, machine(200 * GIB, 256 * GIB), reserve="auto") for rank in range(8)]) is None


@pytest.mark.parametrize(
    ("limit", "configured", "kept"),
    [(100, "auto", 10), (1000 * GIB, "auto", 16 * GIB), (0, "auto", 0), (100, 0, 0), (100, 500, 500)],
)
def test_the_reserve(limit: int, configured: object, kept: int) -> None:
    assert reserve_of(Room("", limit, limit), configured) == kept  # type: ignore[arg-type]


numbers = st.integers(0, 2**62)
rooms = st.builds(Room, st.sampled_from(["", "/a", "/é"]), numbers, numbers, st.sampled_from(["", "0:1", "0:2"]))
supplies = st.builds(
    Supply,
    st.integers(0, 9),
    st.sampled_from(["m", "n"]),
    st.lists(rooms, max_size=2).map(tuple),
    numbers | st.just("auto"),
)
demands = st.tuples(supplies, numbers)


@given(st.lists(demands, max_size=5))
def test_supplies_go_through_json_and_every_rank_comes_to_the_same_answer(all_of_them: list[Demand]) -> None:
    told = [json.loads(json.dumps(supply.as_json())) for supply, _ in all_of_them]
    heard = [Supply.from_json(supply.rank, facts) for (supply, _), facts in zip(all_of_them, told, strict=True)]
    assert heard == [supply for supply, _ in all_of_them]
    assert refused([(supply, wanted) for supply, (_, wanted) in zip(heard, all_of_them, strict=True)]) == refused(
        all_of_them
    )


@given(st.lists(demands, max_size=4))
def test_a_refusal_is_exactly_a_room_in_which_too_much_is_wanted(all_of_them: list[Demand]) -> None:
    def over(node: str, key: str) -> bool:
        takers = [
            (wanted, [room.free_bytes - reserve_of(room, supply.reserve) for room in supply.rooms if room.key == key])
            for supply, wanted in all_of_them
            if supply.node == node
        ]
        left = min(left for _, found in takers for left in found)
        wanted_bytes = sum(wanted for wanted, found in takers if found)
        return wanted_bytes > max(0, left)

    keys = {(supply.node, room.key) for supply, _ in all_of_them for room in supply.rooms}
    assert (refused(all_of_them) is not None) == any(over(node, key) for node, key in keys)


@pytest.mark.parametrize(
    "change",
    [
        {"rooms": None},
        {"rooms": "ab"},
        {"rooms": [5]},
        {"rooms": [["", 1]]},
        {"rooms": [["", 1, 2, "", 5]]},
        {"rooms": [["", "1", 2, ""]]},
        {"rooms": [["", 1.5, 2, ""]]},
        {"rooms": [["", -1, 2, ""]]},
        {"rooms": [["", True, 2, ""]]},
        {"rooms": [[None, 1, 2, ""]]},
        {"rooms": [["", 1, 2, None]]},
        {"rooms": {"a": 1}},
        {"reserve": None},
        {"reserve": "all"},
        {"reserve": -1},
        {"reserve": True},
        {"reserve": [1]},
        {"node": None},
        {"node": 5},
    ],
    ids=str,
)
def test_what_another_rank_never_says_is_a_value_error(change: dict[str, object]) -> None:
    facts = {**Supply(0, "n", (machine(7),), 0).as_json(), **change}
    with pytest.raises(ValueError):
        Supply.from_json(1, facts)


@pytest.mark.parametrize("told", [{}, None, [], "machine"])
def test_a_rank_that_tells_nothing_is_a_value_error(told: object) -> None:
    with pytest.raises(ValueError):
        Supply.from_json(1, told)
