"""`bench`: on one rank in this process, on two real ranks, and how it ends early."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

from loader_service.agreement.group import Rendezvous
from loader_service.cli import app, bench, bench_limits, ranks
from loader_service.cli.bench import BenchOptions, _BenchProcess
from loader_service.cli.bench_figures import Bench, Node, RankRound, Result
from loader_service.cli.bench_limits import LABELS, Conditions, LimitBench
from loader_service.cli.bench_page import page_of
from loader_service.cli.bench_table import rows, sentences
from loader_service.config.yaml_file import aload_config
from loader_service.errors import EndOfFileError, RankFailure
from loader_service.measuring import machine
from loader_service.measuring.limits import Rate
from loader_service.measuring.verdict import Limits
from loader_service.sizes import format_size
from loader_service.timeline import Shares, Timeline
from tests.cli.pages import check_alone
from tests.cli.support import CommandLine, Fault, start_ranks, wait_until, write_config, write_small_checkpoint
from tests.support.shards import write_shard

Capture = pytest.CaptureFixture[str]
MIB = 1 << 20
GIB = 1 << 30
QUICK: dict[str, Any] = {
    "agreement": {"timeout_s": 20, "start_timeout_s": 60, "grace_s": 0.2},
    "staging": {"capacity_bytes": "1MiB"},
}
SMALL = ["--rounds", "1", "--max-bytes", "64MiB"]
HOSTILE = "<b onclick='x'>&[red]\""


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is too little to measure, and little memory is touched."""
    for module in (bench, bench_limits):
        monkeypatch.setattr(module, "condition_memory", lambda nbytes, **_: nbytes)
    for name in ("LEAST_BYTES", "_LEAST_MEMORY_BYTES"):
        monkeypatch.setattr(bench_limits, name, 1)
    for name in ("COPY_BYTES", "_COPY_TOTAL_BYTES", "_TOUCH_TOTAL_BYTES"):
        monkeypatch.setattr(bench_limits, name, 2 * MIB)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_small_checkpoint(tmp_path / "checkpoint")


def document(capsys: Capture) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded


KEYS = {
    "checkpoint",
    "began_at",
    "load",
    "form",
    "cache",
    "world_size",
    "nodes",
    "ranks",
    "verdict",
    "notes",
}
RANK_KEYS = {
    "rank", "seconds", "gib_per_s", "payload_bytes", "read_bytes", "striped_bytes", "tensors", "threads", "access",
    "sharing", "cpu_s", "cpu_s_per_gib", "cached_before", "tables", "phases", "shares", "timeline", "rounds",
}  # fmt: skip


@pytest.mark.parametrize("form", ["owned", "batches"])
@pytest.mark.parametrize("cache", ["cold", "warm", "as-is"])
def test_json_has_limits_loads_and_a_verdict(
    form: str, cache: str, checkpoint: Path, small: None, capsys: Capture
) -> None:
    assert app.run(["bench", str(checkpoint), "--rounds", "2", "--form", form, "--cache", cache, "--json"]) == 0
    found = document(capsys)
    assert found.keys() == KEYS
    assert (found["load"], found["form"], found["cache"], found["world_size"]) == ("all", form, cache, 1)
    (node,) = found["nodes"]
    assert node.keys() == {"ranks", "machine", "files_bytes", "limits", "of_limits", "verdict"}
    assert node["limits"].keys() == LABELS.keys() == {*Limits.__dataclass_fields__}
    for limit in node["limits"].values():
        assert (limit["gib_per_s"] is None) == (limit["why_not"] != "") == (limit["rounds"] == [])
    for name in ("memory_copy", "touch_huge", "touch_ordinary"):
        assert len(node["limits"][name]["rounds"]) == 2
    (rank,) = found["ranks"]
    assert rank.keys() == RANK_KEYS
    assert (rank["payload_bytes"], len(rank["rounds"])) == (176, 2)
    assert rank["phases"].keys() == {"config", "catalog", "plan", "open", "read", "finish"}
    assert sum(rank["timeline"]["taken_bytes"]) == 176
    assert found["verdict"] == node["verdict"] | {"ranks": [0]}
    assert found["verdict"]["bound"] == "too small"


def test_the_rings_read_the_files(tmp_path: Path, small: None, capsys: Capture) -> None:
    path = write_shard(tmp_path / "one.safetensors", {"w": ("U8", (3 * MIB + 77,), bytes(3 * MIB + 77))})
    assert app.run(["bench", str(path), "--rounds", "1", "--json", "--max-bytes", str(2 * MIB)]) == 0
    limits = document(capsys)["nodes"][0]["limits"]
    for name in (
        ("cache_copy",) if limits["direct"]["why_not"] else ("direct_one", "direct", "direct_more", "cache_copy")
    ):
        (ring,) = limits[name]["rounds"]
        assert ring["bytes"] == 2 * MIB


def test_where_direct_reads_are_refused_the_cache_is_read_cold(
    checkpoint: Path, small: None, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_limits, "can_read_direct", lambda _: False)
    assert app.run(["bench", str(checkpoint), "--rounds", "1", "--json"]) == 0
    found = document(capsys)
    total = sum(path.stat().st_size for path in checkpoint.iterdir())
    assert [ring["bytes"] for ring in found["nodes"][0]["limits"]["buffered"]["rounds"]] == [total]
    assert "refuses O_DIRECT" in found["nodes"][0]["limits"]["direct"]["why_not"]
    assert "O_DIRECT cannot be measured" in " ".join(found["notes"])


def test_little_memory_is_left_alone(
    checkpoint: Path, small: None, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_limits, "_LEAST_MEMORY_BYTES", MIB)
    monkeypatch.setattr(bench_limits, "spare_memory", lambda: 3 * MIB)
    assert app.run(["bench", str(checkpoint), "--rounds", "1", "--json"]) == 0
    why = document(capsys)["nodes"][0]["limits"]["touch_huge"]["why_not"]
    assert why == "only 3.00 MiB of memory is to spare"


def test_the_table_and_the_page_say_what_bounds_the_load(
    tmp_path: Path, checkpoint: Path, small: None, capsys: Capture
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps({"checkpoint": {"path": str(checkpoint)}, "loads": {HOSTILE: {}}}))
    page = tmp_path / "page.html"
    assert app.run(["bench", str(config), "--rounds", "1", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert HOSTILE in out
    assert "first touch, huge pages" in out
    assert "too little to tell what bounds it" in out
    parsed = check_alone(page.read_text())
    text = "".join(parsed.text)
    assert f"Load {HOSTILE}: what bounds it" in text
    assert "too little to tell what bounds it" in text
    assert f"Checkpoint {checkpoint}, measured 20" in text
    assert "176 bytes on 1 rank, form owned, page cache cold, 1 round." in text
    found = machine.this_machine([])
    memory = format_size(found.memory_bytes)
    assert f"Machine, node of rank 0: {found.cores} core" in text
    assert f"{memory} of memory, kernel {os.uname().release}" in text
    for column in ("measured", "GiB/s", "least-most", "CPU s/GiB", "reading, all ranks"):
        assert column in out
        assert column in parsed.text
    assert re.search(r"the load, 176 bytes in \d", text)
    assert "% of it" in text


def test_the_line_in_a_rank_s_chart_is_its_share_of_what_its_node_s_source_gives() -> None:
    result = a_result(nodes={(0,): 6.0, (1, 2, 3): 6.0})
    lines = [text for text in check_alone(page_of(result)).text if "the source gives" in text]
    name = "its share of what the source gives its node"
    assert lines == [f"{name}: 6 GiB/s", *([f"{name}: 2 GiB/s"] * 3)]
    alone = check_alone(page_of(a_result(nodes={(0,): 6.0}))).text
    assert [text for text in alone if "the source gives" in text] == ["what the source gives: 6 GiB/s"]


def test_rounds_that_differ_on_a_node_are_told_to_its_verdict_alone() -> None:
    result = a_result(nodes={(0,): 1.0, (1,): 1.0}, seconds=((2.0, 9.0), (3.0, 9.0)))
    assert [each.loaded.rounds_s for each in result.nodes] == [(2.0, 3.0), (9.0, 9.0)]
    assert [bool(each.verdict.doubts) for each in result.nodes] == [True, False]


def test_each_node_has_its_limits_and_its_verdict_and_the_slowest_one_s_is_that_of_all() -> None:
    """Both nodes' ranks took a second for 1 GiB each; the second node could have given them twice that."""
    result = a_result(nodes={(0, 2): 2.0, (1, 3): 4.0}, seconds=((1.0, 1.01, 1.0, 1.0),))
    found = Result.as_dict(result)
    assert [each.of_limits["source"] for each in result.nodes] == pytest.approx([1.0, 0.5], rel=0.02)
    assert [each.verdict.bound for each in result.nodes] == ["page cache", "unclear"]
    assert found["verdict"] == result.nodes[1].verdict.as_dict() | {"ranks": [1, 3]}
    cells = [row[0] for row in rows(result)]
    assert [cell for cell in cells if "limit" in cell] == [
        f"node of ranks {ranks}, limit: copy from the page cache" for ranks in ("0, 2", "1, 3")
    ]
    assert [re.findall("load of rank (.)", cell)[0] for cell in cells if "limit" not in cell] == ["0", "2", "1", "3"]
    said = [sentence for sentence in sentences(result) if sentence.startswith("Node of ranks 1, 3: ")]
    assert "No single limit bounds this load" in said[0]


def a_result(*, nodes: Mapping[tuple[int, ...], float], seconds: Sequence[Sequence[float]] = ((1.0,) * 4,)) -> Result:
    """What was found where every rank took 1 GiB from the page cache, in so many seconds by round and rank; `nodes` are
    their ranks, each with the GiB/s that its page cache gives."""
    world_size = sum(map(len, nodes))
    line = Timeline(0, 1.0, 0.5, 4, GIB, filled_bytes=(0, GIB), taken_bytes=(0, GIB), in_flight=(4, 4))
    rounds = [
        [
            RankRound(
                rank=rank,
                seconds=of_rank,
                payload_bytes=GIB,
                read_bytes=GIB,
                striped_bytes=0,
                tensors=1,
                threads=4,
                access="buffered",
                sharing="none",
                cpu_s=0.5,
                cached_before=1.0,
                tables=0,
                phases={"read": of_rank},
                shares=Shares(),
                timeline=replace(line, rank=rank),
            )
            for rank, of_rank in enumerate(of_ranks[:world_size])
        ]
        for of_ranks in seconds
    ]
    found = []
    for here, source_gib_per_s in nodes.items():
        limits = LimitBench(Conditions((), "warm", 4, 2, GIB))
        limits.rates["cache_copy"] = [Rate(int(source_gib_per_s * GIB), 1.0, 1.0)]
        node = Node(here, machine.this_machine([]), len(here) * GIB).with_limits(limits)
        found.append(Node.from_dict(json.loads(json.dumps(node.as_dict()))))
    return Bench("/x", "2030-01-01T00:00:00+00:00", "all", "batches", "warm").result(rounds, found)


def test_host_resident_tables_are_left_out_and_said_so(
    tmp_path: Path, checkpoint: Path, small: None, capsys: Capture
) -> None:
    rules = [{"match": "embed.*", "host_resident": {"layout": "per_rank"}}]
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps({"checkpoint": {"path": str(checkpoint)}, "loads": {"all": {"rules": rules}}}))
    for form in ("owned", "batches"):
        assert app.run(["bench", str(config), "--rounds", "1", "--json", "--form", form]) == 0
        found = document(capsys)
        assert found["ranks"][0]["payload_bytes"] == 176 - 84
        assert "rows or by host_table: 1 host-resident" in " ".join(found["notes"])


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["{config}"], 2, "has several loads: say which with --load, one of all, draft"),
        (["{config}", "--load", "nothing"], 2, "no load is named 'nothing'"),
        (["{checkpoint}", "--load", "all"], 2, "is a checkpoint, which has no loads"),
        (["{checkpoint}", "--max-bytes", "much"], 2, "--max-bytes: 'much' is not a size"),
        (["{checkpoint}", "--html", "/nowhere/page.html"], 2, "--html: the folder /nowhere does not exist"),
        (["{checkpoint}", "--rounds", "0"], 2, "--rounds"),
        (["/nowhere/model.safetensors"], 3, "/nowhere/model.safetensors"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    args: list[str], code: int, says: str, tmp_path: Path, checkpoint: Path, capsys: Capture
) -> None:
    config = write_config(tmp_path / "c.yaml", checkpoint)
    args = [arg.format(config=config, checkpoint=checkpoint) for arg in args]
    assert app.run(["bench", *args]) == code
    assert says in capsys.readouterr().err


@contextlib.asynccontextmanager
async def two_ranks(tmp_path: Path, checkpoint: Path, rounds: int) -> AsyncIterator[list[_BenchProcess]]:
    """Both in this process."""
    path = write_config(tmp_path / "c.yaml", checkpoint, ranks=2, **QUICK)
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
    options = BenchOptions(path, "all", "owned", "as-is", rounds, "64MiB", None, as_json=True, debug=False)
    config = await aload_config(path)
    meetings = [Rendezvous(f"127.0.0.1:{server.port}", rank, 2, "b", served=True) for rank in (0, 1)]
    processes = [
        _BenchProcess(options, ranks.Place(rank, 2, meeting), config, "all", 64 * MIB)
        for rank, meeting in enumerate(meetings)
    ]
    try:
        yield processes
    finally:
        for one in processes:
            one._threads.stop()
        del server


async def both(processes: list[_BenchProcess]) -> list[BaseException | None]:
    async with asyncio.timeout(60):
        return await asyncio.gather(*(one._work() for one in processes), return_exceptions=True)


async def test_the_first_rank_of_each_node_measures_it(
    tmp_path: Path, checkpoint: Path, small: None, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds; the second rank lives on a node of its own, where copying from the page cache is left out."""
    names = itertools.count()
    monkeypatch.setattr(bench, "node_name", lambda: str(next(names)))
    measured: list[LimitBench] = []
    measure: Callable[[LimitBench, int], None] = LimitBench.round

    def note(self: LimitBench, number: int) -> None:
        measured.append(self)
        measure(self, number)

    monkeypatch.setattr(LimitBench, "round", note)
    async with two_ranks(tmp_path, checkpoint, rounds=2) as processes:
        assert await both(processes) == [None, None]
    found = document(capsys)
    assert [node["ranks"] for node in found["nodes"]] == [[0], [1]]
    for node in found["nodes"]:
        assert [len(node["limits"][name]["rounds"]) for name in ("memory_copy", "touch_huge")] == [2, 2]
        assert node["verdict"]["bound"] == "too small"
    assert sorted(map(measured.count, set(measured))) == [2, 2]


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_limit_that_fails_ends_the_other_rank_that_waits_and_is_in_no_phase_of_a_load(
    victim: int, tmp_path: Path, checkpoint: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_ranks(tmp_path, checkpoint, rounds=2) as processes:
        monkeypatch.setattr(bench, "node_name", iter(("a", "b")).__next__)

        def fail(self: LimitBench, number: int) -> None:
            if self is processes[victim]._limits:
                raise EndOfFileError("the file ends early", path="x.safetensors")

        monkeypatch.setattr(LimitBench, "round", fail)
        ended = await both(processes)
    own, other = ended[victim], ended[1 - victim]
    assert isinstance(own, EndOfFileError)
    assert isinstance(other, RankFailure)
    record = other.record()
    assert (record.error, record.rank, record.phase) == ("EndOfFileError", victim, None)


@pytest.mark.processes
def test_two_ranks_are_measured_and_rank_0_alone_prints(tmp_path: Path, checkpoint: Path) -> None:
    config = write_config(tmp_path / "c.yaml", checkpoint, ranks=2, **QUICK)
    page = tmp_path / "page.html"
    args = ["bench", str(config), "--load", "all", *SMALL, "--json", "--html", str(page)]
    first, second = (process.end() for process in start_ranks([args, args], tmp_path))
    assert (first.code, second.code, second.out) == (0, 0, ""), first.err + second.err
    found = first.document
    assert (found["world_size"], [node["ranks"] for node in found["nodes"]]) == (2, [[0, 1]])
    assert [rank["payload_bytes"] for rank in found["ranks"]] == [92, 108]
    parsed = check_alone(page.read_text())
    assert [text for text in parsed.text if re.match(r"Rank \d:", text)] == [
        f"Rank {rank['rank']}: {rank['timeline']['seconds']:.3f} s" for rank in found["ranks"]
    ]


@pytest.mark.processes
def test_a_rank_that_never_comes_is_missed_as_soon_as_by_a_load(tmp_path: Path, checkpoint: Path) -> None:
    impatient = {"agreement": {"timeout_s": 1, "start_timeout_s": 1, "grace_s": 0.2}}
    config = write_config(tmp_path / "c.yaml", checkpoint, ranks=2, **QUICK | impatient)
    args = ["bench", str(config), "--load", "all", *SMALL, "--json"]
    first, second = start_ranks([args, args], tmp_path)
    second.send_signal(signal.SIGKILL)
    ended = first.end()
    assert (ended.code, ended.document["error"], ended.document["rank"]) == (4, "LateRank", 1), ended.err
    second.end()


@pytest.mark.processes
def test_a_configuration_that_is_wrong_on_one_rank_ends_the_other(tmp_path: Path, checkpoint: Path) -> None:
    config = write_config(tmp_path / "c.yaml", checkpoint, ranks=2, **QUICK)
    args = ["bench", str(config), *SMALL, "--json", "--load"]
    first, second = (each.end() for each in start_ranks([[*args, "all"], [*args, "nothing"]], tmp_path))
    assert (first.code, second.code) == (4, 2), first.err + second.err
    assert (first.document["error"], first.document["rank"], second.out) == ("ConfigError", 1, "")


@pytest.mark.processes
def test_a_header_that_one_rank_cannot_read_is_in_the_phase_that_a_load_would_name(
    tmp_path: Path, checkpoint: Path
) -> None:
    other = write_small_checkpoint(tmp_path / "other")
    (other / "b.safetensors").write_bytes(b"no header")
    configs = [
        write_config(tmp_path / f"{i}.yaml", folder, ranks=2, **QUICK) for i, folder in enumerate((checkpoint, other))
    ]
    args = [["bench", str(config), "--load", "all", *SMALL, "--json"] for config in configs]
    first, second = (each.end() for each in start_ranks(args, tmp_path))
    assert (first.code, second.code, second.out) == (4, 3, ""), first.err + second.err
    record = first.document
    assert (record["error"], record["rank"], record["phase"]) == ("CheckpointError", 1, "catalog")


def interrupted(processes: list[CommandLine], mark: Path, victim: int) -> None:
    wait_until(mark.exists)
    processes[victim].send_signal(signal.SIGINT)
    if len(processes) == 1:
        wait_until(lambda: not processes[0].running)


@pytest.mark.processes
def test_an_interrupt_in_the_load_ends_it_with_130(tmp_path: Path, checkpoint: Path) -> None:
    mark = tmp_path / "reading"
    environ = {name: os.environ[name] for name in ("PATH",)}
    fault = Fault("waits", mark)
    config = write_config(tmp_path / "c.yaml", checkpoint, **QUICK)
    process = CommandLine(["bench", str(config), "--load", "all", *SMALL, "--json"], environ, fault, tmp_path)
    interrupted([process], mark, 0)
    ended = process.end()
    assert ended.code == 130, ended.err
    assert (ended.document["error"], "interrupted by SIGINT" in ended.err) == ("LoadCancelledError", True)
    assert "Traceback" not in ended.err


@pytest.mark.processes
def test_an_interrupt_of_one_rank_ends_both(tmp_path: Path, checkpoint: Path) -> None:
    mark = tmp_path / "reading"
    config = write_config(tmp_path / "c.yaml", checkpoint, ranks=2, **QUICK)
    args = ["bench", str(config), "--load", "all", *SMALL, "--json"]
    processes = start_ranks([args, args], tmp_path, faults={1: Fault("waits", mark)})
    interrupted(processes, mark, 1)
    first, second = (process.end() for process in processes)
    assert (first.code, second.code, second.out) == (4, 130, ""), first.err + second.err
    assert (first.document["error"], first.document["rank"]) == ("LoadCancelledError", 1)


def test_an_interrupt_in_a_limit_ends_the_measuring(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first limit has begun when the signal comes; its threads end, and the command by its normal door."""
    ended: list[bool] = []
    measure: Callable[[LimitBench, int], None] = LimitBench.round

    def interrupt(self: LimitBench, number: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert self._stop.wait(30)
        ended.append(True)
        measure(self, number)

    monkeypatch.setattr(LimitBench, "round", interrupt)
    monkeypatch.setattr(bench, "condition_memory", lambda nbytes: nbytes)
    assert app.run(["bench", str(checkpoint), *SMALL]) == 130
    wait_until(lambda: ended == [True])
