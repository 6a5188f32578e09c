"""`serve` as a process, and workers that are processes: signals, deaths, exit codes, and what is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import loader_service as ls
from tests.cli.support import CommandLine, Ended, Fault, start_ranks, wait_until
from tests.reading.disk import bring_code_in, disk_bytes
from tests.support.checkpoints import Checkpoint, assert_same, write_checkpoint
from tests.support.ranks import context

MIB = 1 << 20
RULES = [
    {"match": "*.rows", "split": {"axis": "tp", "dim": 0}},
    {"match": "*.columns", "split": {"axis": "tp", "dim": 1}},
    {"match": "table", "host_resident": {"layout": "shared"}, "split": {"axis": "tp", "dim": 0}},
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    shards: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
        f"{shard}.safetensors": {f"{shard}.rows": ("BF16", (1000, 1000)), f"{shard}.columns": ("BF16", (1000, 1000))}
        for shard in "ab"
    }
    shards["c.safetensors"] = {"table": ("F32", (3000, 100)), "norm": ("F32", (7,))}
    return write_checkpoint(tmp_path / "checkpoint", shards)


def write_config(folder: Path, checkpoint: Checkpoint, *, ranks: int = 2, **serve: object) -> Path:
    config = {
        "checkpoint": {"path": str(checkpoint.folder)},
        "mesh": {"tp": ranks},
        "loads": {"target": {"rules": RULES}},
        "agreement": {"timeout_s": 10, "start_timeout_s": 60, "grace_s": 1},
        "serve": {"keep": ["target"], "socket": str(folder / "s"), **serve},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextlib.contextmanager
def served(folder: Path, config: Path, *more: str) -> Iterator[tuple[CommandLine, dict[str, Any]]]:
    """A service that is ready, and what it printed."""
    service = CommandLine(["serve", str(config), "--json", *more], {}, None, folder)
    try:
        wait_until(lambda: service.printed().endswith("\n") or not service.running)
        yield service, json.loads(service.printed())
    finally:
        with contextlib.suppress(ValueError):  # it has ended
            service.send_signal(signal.SIGKILL)


def ended(service: CommandLine, number: signal.Signals) -> Ended:
    service.send_signal(number)
    return service.end()


def load_on_two_ranks(config: Path, folder: Path) -> list[dict[str, Any]]:
    args = ["load", str(config), "--attach", "--verify", "--json"]
    first, second = (each.end() for each in start_ranks([args, args], folder))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    ranks: list[dict[str, Any]] = first.document["ranks"]
    assert [rank["verified"] for rank in ranks] == [True, True]
    return ranks


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_ranks_beside_it_read_nothing_and_it_ends_without_a_trace(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = write_config(tmp_path, checkpoint)
    with served(tmp_path, config, "--http", "127.0.0.1:0", "--log-format", "json") as (service, document):
        assert (document["ready"], document["socket"]) == (True, str(tmp_path / "s"))
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        for rank in load_on_two_ranks(config, tmp_path):
            assert (rank["read_bytes"], rank["files_opened"]) == (0, 0)
            assert rank["policies"]["service"]["effective"] == "kept"
        assert get(document["http"], "/readyz")[0] == 200
        assert get(document["http"], "/plan")[0] == 200
        _, metrics = get(document["http"], "/metrics")
        assert 'loader_service_worker_payload_bytes{load="target",rank="1"} 4.600028e+06' in metrics
        service.send_signal(signal.SIGTERM)  # launchers repeat it
        end = ended(service, signal.SIGTERM)
    assert end.code == 0, end.err
    assert not (tmp_path / "s").exists()
    records = [json.loads(line) for line in end.err.splitlines()]
    of_workers = [record for record in records if record["message"].startswith("worker")]
    assert len(of_workers) == 4, records
    assert {(record.get("load"), record.get("phase"), record["rank"]) for record in of_workers} == {(None, None, 0)}
    assert [record["load"] for record in records if "kept" in record["message"]] == ["target"]


def test_one_that_was_killed_is_done_without_and_a_new_one_takes_its_place(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    config = write_config(tmp_path, checkpoint)
    with served(tmp_path, config) as (service, _):
        assert ended(service, signal.SIGKILL).code == -signal.SIGKILL
        for rank in load_on_two_ranks(config, tmp_path):
            assert rank["policies"]["service"]["effective"] == "read"
            assert rank["read_bytes"] > 0
    with served(tmp_path, config) as (service, _):  # although the other's socket file is still there
        for rank in load_on_two_ranks(config, tmp_path):
            assert rank["read_bytes"] == 0
        assert ended(service, signal.SIGTERM).code == 0


def test_a_killed_service_without_a_file_leaves_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    name = f"@loader-service-test-{os.getpid()}-{tmp_path.name}"
    config = write_config(tmp_path, checkpoint, socket=name)
    for number in (signal.SIGKILL, signal.SIGTERM):
        with served(tmp_path, config) as (service, _):
            assert name in Path("/proc/net/unix").read_text()
            ended(service, number)
        assert name not in Path("/proc/net/unix").read_text()


def attach_and_hold(config: str, out: str, hold: bool) -> None:
    """A worker: loads everything, says what it has read from the disk meanwhile, and how, and waits to be killed."""
    bring_code_in()
    before = disk_bytes()
    with ls.attach_blocking(ls.load_config(config), "solo") as service:
        with service.open("target") as load:
            found = {name: value for name, value in load if isinstance(value, torch.Tensor)}
        table = service.host_table("target", "table")
        summed = {name: int(value.view(torch.uint8).long().sum()) for name, value in found.items()}
        facts = {
            "disk_bytes": disk_bytes() - before,
            "read_bytes": load.report.read_bytes,
            "sums": summed,
            "rows": int(table.tensor.view(torch.uint8).long().sum()),
            "access": table.access.effective,
        }
        Path(out + ".new").write_text(json.dumps(facts))
        os.rename(out + ".new", out)
        if hold:
            signal.pause()


def sums_of(checkpoint: Checkpoint) -> dict[str, int]:
    return {name: int(checkpoint.tensor(name).view(torch.uint8).long().sum()) for name in checkpoint.tensors}


def test_a_worker_that_crashed_and_starts_again_reads_nothing_from_the_disk(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    config = write_config(tmp_path, checkpoint, ranks=1)
    out = str(tmp_path / "facts")
    with served(tmp_path, config, "--http", "127.0.0.1:0") as (service, document):
        for attempt in range(2):
            for path in checkpoint.folder.iterdir():  # what lies in the page cache would hide a read
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            process = context().Process(target=attach_and_hold, args=(str(config), out, attempt == 0), daemon=True)
            process.start()
            wait_until(lambda: Path(out).exists())
            facts: Mapping[str, Any] = json.loads(Path(out).read_text())
            Path(out).unlink()
            if attempt == 0:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
            process.join()
            assert (facts["read_bytes"], facts["access"]) == (0, "kept")
            assert facts["disk_bytes"] < MIB  # its own code, if anything
            wanted = sums_of(checkpoint)
            assert facts["rows"] == wanted.pop("table")
            assert facts["sums"] == wanted
            wait_until(lambda: json.loads(get(document["http"], "/status")[1])["workers"] == 0)
        assert ended(service, signal.SIGTERM).code == 0


def test_a_service_that_cannot_read_fails_all_and_says_why_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = write_config(tmp_path, checkpoint)
    args = ["serve", str(config), "--json"]
    ranks = start_ranks([args, args], tmp_path, faults={1: Fault("input/output error")})
    first, second = (rank.end() for rank in ranks)
    assert (first.code, second.code) == (4, 5), first.err + second.err
    record = first.document
    assert (record["error"], record["rank"], record["phase"]) == ("ReadError", 1, "read")
    assert second.out == ""
    assert not (tmp_path / "s").exists()
    assert not (tmp_path / "s.1").exists()


def test_a_service_that_is_stopped_while_it_fills(checkpoint: Checkpoint, tmp_path: Path) -> None:
    mark = tmp_path / "reading"
    config = write_config(tmp_path, checkpoint)
    service = CommandLine(["serve", str(config), "--http", "127.0.0.1:0"], {}, Fault("waits", mark), tmp_path)
    wait_until(mark.exists)
    service.send_signal(signal.SIGTERM)
    end = service.end()  # although its read has not come back
    assert end.code == 130, end.err
    assert "interrupted by SIGTERM" in end.err
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--socket", "x" * 200], "--socket: must be auto, a path"),
        (["--http", "nowhere"], "HTTP cannot be served at 'nowhere'"),
        (["--ranks", "3"], "mesh: {tp: 2} is for 2 ranks, but there are 3"),
    ],
)
def test_what_cannot_be_is_refused(checkpoint: Checkpoint, tmp_path: Path, more: list[str], says: str) -> None:
    end = CommandLine(["serve", str(write_config(tmp_path, checkpoint)), *more], {}, None, tmp_path).end()
    assert end.code == 2
    assert says in end.err


def test_tensors_outlive_the_service_and_the_attachment(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = write_config(tmp_path, checkpoint, ranks=1)
    with served(tmp_path, config) as (service, _):
        with ls.attach_blocking(ls.load_config(config), "solo") as attached, attached.open("target") as load:
            found = {name: value for name, value in load if isinstance(value, torch.Tensor)}
        assert ended(service, signal.SIGKILL).code == -signal.SIGKILL
    for name, tensor in found.items():
        assert_same(tensor, checkpoint.tensor(name), name)
