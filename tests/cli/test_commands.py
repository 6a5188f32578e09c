"""Commands called in this process: what they print where, and what they return."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from loader_service.cli import app
from loader_service.cli.output import prepare_streams
from loader_service.version import VERSION
from tests.cli.support import ROOT, Fault, payload_fault, write_config, write_small_checkpoint
from tests.support.shards import pattern_bytes, write_index, write_shard

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_small_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def config(tmp_path: Path, checkpoint: Path) -> Path:
    return write_config(tmp_path / "config.yaml", checkpoint)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_tells_its_version(capsys: Capture) -> None:
    assert app.run(["--version"]) == 0
    assert capsys.readouterr() == (f"loader-service {VERSION}\n", "")


def test_a_manifest_tells_of_blobs_only_where_there_are_some(checkpoint: Path, capsys: Capture) -> None:
    assert app.run(["manifest", str(checkpoint)]) == 0
    assert "SHA-256" not in capsys.readouterr().err


def said(err: str) -> list[str]:
    """The lines on stderr that are not of the log."""
    return [line for line in err.splitlines() if not re.match(r"\d{4}-\d\d-\d\d .* (INFO|WARNING) ", line)]


def document(capsys: Capture) -> dict[str, Any]:
    """What was printed on stdout, which must be one JSON document and nothing else."""
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded


class TestInspect:
    def test_json_counts_files_tensors_dtypes_and_namespaces(self, checkpoint: Path, capsys: Capture) -> None:
        assert app.run(["inspect", str(checkpoint), "--json"]) == 0
        found = document(capsys)
        assert found["path"] == str(checkpoint)
        assert (found["tensors"], found["payload_bytes"]) == (8, 84 + 20 + 20 + 4 + 28 + 8 + 12)
        assert found["dtypes"] == {
            "F16": {"tensors": 1, "bytes": 0},
            "BF16": {"tensors": 1, "bytes": 84},
            "F32": {"tensors": 4, "bytes": 56},
            "F8_E4M3": {"tensors": 1, "bytes": 28},
            "F8_E8M0": {"tensors": 1, "bytes": 8},
        }
        assert found["namespaces"]["draft"] == {"tensors": 1, "bytes": 12}
        for file in found["files"]:
            size = (checkpoint / file["name"]).stat().st_size
            assert file["bytes"] == size == file["header_bytes"] + file["payload_bytes"]

    def test_lists_every_tensor_with_its_place_in_the_file(self, checkpoint: Path, capsys: Capture) -> None:
        assert app.run(["inspect", str(checkpoint / "b.safetensors"), "--tensors", "--json"]) == 0
        tensors = {tensor["name"]: tensor for tensor in document(capsys)["tensor_list"]}
        assert list(tensors) == ["down.weight", "down.scale", "draft.norm"]
        start, stop = tensors["down.scale"]["offsets"]
        assert (checkpoint / "b.safetensors").read_bytes()[start:stop] == pattern_bytes(8, 6)
        assert tensors["down.scale"]["shape"] == [4, 2]

    def test_takes_a_list_of_files(self, checkpoint: Path, capsys: Capture) -> None:
        files = [str(checkpoint / name) for name in ("b.safetensors", "a.safetensors")]
        assert app.run(["inspect", *files, "--json"]) == 0
        found = document(capsys)
        assert [file["name"] for file in found["files"]] == ["a.safetensors", "b.safetensors"]
        assert found["path"] == files

    def test_reads_a_snapshot_of_links(self, checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
        snapshot = tmp_path / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        for file in checkpoint.iterdir():
            (snapshot / file.name).symlink_to(file)
        assert app.run(["inspect", str(snapshot), "--json"]) == 0
        assert document(capsys)["tensors"] == 8

    def test_says_what_the_index_omits(self, checkpoint: Path, capsys: Capture) -> None:
        write_index(checkpoint, {"embed.weight": "a.safetensors", "down.weight": "b.safetensors"})
        assert app.run(["inspect", str(checkpoint), "--json"]) == 0
        assert "omits 6 tensors" in str(document(capsys)["notes"])
        assert app.run(["inspect", str(checkpoint), "--ignore-index", "--json"]) == 0
        assert document(capsys)["notes"] == []

    def test_the_table_names_files_and_totals(self, checkpoint: Path, capsys: Capture) -> None:
        assert app.run(["inspect", str(checkpoint), "--tensors"]) == 0
        out = capsys.readouterr().out
        assert "a.safetensors" in out
        assert "8 tensors, 176 bytes of payload in 2 files" in out
        assert "[4, 7]" in out


class TestPlan:
    def test_json_has_the_ranges_of_every_rank_and_they_sum_up(
        self, tmp_path: Path, checkpoint: Path, capsys: Capture
    ) -> None:
        config = write_config(tmp_path / "two.yaml", checkpoint, ranks=2)
        assert app.run(["plan", str(config), "--load", "all", "--json"]) == 0
        plan = document(capsys)
        assert {"load", "world_size", "catalog_digest", "plan_digest", "ranks"} <= plan.keys()
        assert (plan["load"], plan["world_size"]) == ("all", 2)
        assert set(plan["host_memory"].values()) == {0}
        for number, rank in enumerate(plan["ranks"]):
            assert rank.keys() == {"rank", "payload_bytes", "read_bytes", "reads", "files", "tables"}
            ranges = [span for file in rank["files"] for span in file["ranges"]]
            assert rank["rank"] == number
            assert sum(stop - start for start, stop in ranges) == rank["read_bytes"] >= rank["payload_bytes"]
            assert len(ranges) == rank["reads"]
            assert all(os.path.isabs(file["path"]) for file in rank["files"])
        # 3 and 4 of 7 rows, one expert each, 3 and 4 of 7 columns, the rest on both.
        payloads = [rank["payload_bytes"] for rank in plan["ranks"]]
        assert payloads == [36 + 20 + 4 + 12 + 8 + 12, 48 + 20 + 4 + 16 + 8 + 12]

    @pytest.mark.parametrize(
        ("world_size", "args", "ranks"),
        [("5", [], 5), (None, [], 1), ("5", ["--ranks", "3"], 3)],
        ids=["WORLD_SIZE", "alone", "--ranks"],
    )
    def test_without_a_mesh_the_number_of_ranks_comes_from(
        self,
        world_size: str | None,
        args: list[str],
        ranks: int,
        tmp_path: Path,
        checkpoint: Path,
        capsys: Capture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        config = tmp_path / "plain.yaml"
        config.write_text(json.dumps({"checkpoint": {"path": str(checkpoint)}, "loads": {"all": {}}}))
        if world_size is not None:
            monkeypatch.setenv("WORLD_SIZE", world_size)
        assert app.run(["plan", str(config), "--load", "all", "--json", *args]) == 0
        assert document(capsys)["world_size"] == ranks

    def test_the_table_shows_every_rank_and_the_warnings(
        self, tmp_path: Path, checkpoint: Path, capsys: Capture
    ) -> None:
        config = write_config(tmp_path / "two.yaml", checkpoint, ranks=2, loads={"all": {"skip": ["no.such.*"]}})
        assert app.run(["plan", str(config), "--load", "all"]) == 0
        out = capsys.readouterr().out
        assert "tp 0" in out
        assert "tp 1" in out
        assert "no.such.*" in out

    def test_reads_no_payload(self, tmp_path: Path, checkpoint: Path, config: Path, capsys: Capture) -> None:
        for file in checkpoint.iterdir():  # holes: the files keep their sizes, every byte of payload would read as 0
            size = file.stat().st_size
            header = file.read_bytes()[: 8 + int.from_bytes(file.read_bytes()[:8], "little")]
            file.write_bytes(header)
            os.truncate(file, size)
        assert app.run(["plan", str(config), "--load", "all", "--json"]) == 0


class TestLoad:
    def test_report_has_the_contract_s_keys(self, config: Path, capsys: Capture) -> None:
        assert app.run(["load", str(config), "--load", "all", "--json"]) == 0
        report = document(capsys)
        assert report.keys() >= {
            *("load", "rank", "world_size", "tensors", "payload_bytes", "read_bytes", "striped_bytes", "files_opened"),
            *(
                "files_read",
                "seconds",
                "gib_per_s",
                "peak_staging_bytes",
                "phases",
                "policies",
                "fallbacks",
                "verified",
            ),
        }
        assert (report["tensors"], report["payload_bytes"], report["verified"]) == (8, 176, None)
        assert report["files_read"] == ["a.safetensors", "b.safetensors"]
        assert report["complete"] is True

    def test_verifies_and_writes_a_manifest_of_what_safetensors_reads(
        self, config: Path, checkpoint: Path, tmp_path: Path, capsys: Capture
    ) -> None:
        out = tmp_path / "manifest.json"
        assert app.run(["load", str(config), "--load", "all", "--verify", "--manifest", str(out), "--json"]) == 0
        assert document(capsys)["verified"] is True
        manifest = json.loads(out.read_text())
        expected = {}
        for file in sorted(checkpoint.iterdir()):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    part = opened.get_slice(name)
                    expected[name] = (part.get_dtype(), part.get_shape())
        assert {name: (entry["dtype"], entry["shape"]) for name, entry in manifest.items()} == expected
        assert manifest["embed.weight"]["sha256"] == hashlib.sha256(pattern_bytes(84, 1)).hexdigest()
        assert manifest["nothing"]["sha256"] == hashlib.sha256(b"").hexdigest()
        assert [path.name for path in tmp_path.iterdir() if "manifest" in path.name] == ["manifest.json"]

    def test_a_draft_reads_the_file_that_holds_it(self, config: Path, capsys: Capture) -> None:
        assert app.run(["load", str(config), "--load", "draft", "--verify", "--json"]) == 0
        report = document(capsys)
        assert (report["files_read"], report["read_bytes"]) == (["b.safetensors"], 12)

    @pytest.mark.parametrize("command", ["plan", "load"])
    def test_the_only_load_of_a_file_need_not_be_named(
        self, command: str, tmp_path: Path, checkpoint: Path, capsys: Capture
    ) -> None:
        config = write_config(tmp_path / "one.yaml", checkpoint, loads={"draft": {"key_prefixes": ["draft"]}})
        assert app.run([command, str(config), "--json"]) == 0
        assert document(capsys)["load"] == "draft"

    def test_the_table_is_for_people(self, config: Path, capsys: Capture) -> None:
        assert app.run(["load", str(config), "--load", "all"]) == 0
        out = capsys.readouterr().out
        assert "Load all on 1 rank" in out
        assert "not asked for" in out

    def test_packed_and_raw_types_are_verified_and_keep_the_header_s_shape(
        self, tmp_path: Path, capsys: Capture
    ) -> None:
        write_shard(
            tmp_path / "packed" / "p.safetensors",
            {
                "even": ("F4", (4, 6), pattern_bytes(12, 1)),
                "odd": ("F4", (2, 3), pattern_bytes(3, 2)),
                "six": ("F6_E2M3", (4, 4), pattern_bytes(12, 3)),
            },
        )
        rules = [{"match": "even", "split": {"axis": "tp", "dim": 0}}]
        loads = {"all": {"rules": rules, "raw_dtypes": True}}
        config = write_config(tmp_path / "packed.yaml", tmp_path / "packed", loads=loads)
        out = tmp_path / "m.json"
        assert app.run(["load", str(config), "--load", "all", "--verify", "--manifest", str(out), "--json"]) == 0
        shapes = {name: (entry["dtype"], entry["shape"]) for name, entry in json.loads(out.read_text()).items()}
        assert shapes == {"even": ("F4", [4, 6]), "odd": ("F4", [2, 3]), "six": ("F6_E2M3", [4, 4])}


class TestFailures:
    """Every failure: one line on stderr (or one for each problem of a configuration), with --json one record on stdout,
    and the code of its cause."""

    def fail(self, args: list[str], capsys: Capture, problems: int = 1) -> tuple[int, dict[str, object], str]:
        code = app.run([*args, "--json"])
        printed = capsys.readouterr()
        record = json.loads(printed.out)
        assert record.keys() == {"error", "message", "rank", "phase", "path", "tensor", "errno"}
        lines = said(printed.err)
        assert len(lines) == problems, lines
        assert "Traceback" not in printed.err
        assert app.run(args) == code
        without_json = capsys.readouterr()
        assert without_json.out == ""
        assert "\n".join(lines) in without_json.err
        return code, record, "\n".join(lines)

    def test_usage(self, capsys: Capture) -> None:
        code, record, line = self.fail(["load"], capsys)
        assert (code, record["error"]) == (2, "UsageError")
        assert "CONFIG" in line

    @pytest.mark.parametrize("command", ["plan", "load", "bench"])
    def test_a_file_with_several_loads_wants_to_know_which(self, command: str, config: Path, capsys: Capture) -> None:
        code, record, line = self.fail([command, str(config)], capsys)
        assert (code, record["error"], record["path"]) == (2, "ConfigError", str(config))
        assert line.endswith("has several loads: say which with --load, one of all, draft")

    def test_an_unknown_command(self, capsys: Capture) -> None:
        assert self.fail(["lode"], capsys)[:1] == (2,)

    @pytest.mark.parametrize("command", ["plan", "load"])
    def test_a_configuration_with_two_errors_has_a_line_for_each(
        self, command: str, tmp_path: Path, capsys: Capture
    ) -> None:
        config = tmp_path / "bad.yaml"
        config.write_text('checkpoint: {path: .}\nmesh: {tp: "2"}\nloads:\n  all:\n    skipp: []\n')
        code, record, text = self.fail([command, str(config), "--load", "all"], capsys, problems=2)
        assert (code, record["error"], record["path"]) == (2, "ConfigError", str(config))
        first, second = text.splitlines()
        assert first.startswith(f"loader-service: {config}:2: mesh.tp: ")
        assert second.startswith(f"{config}:5: loads.all.skipp: ")
        assert text == f"loader-service: {record['message']}"

    @pytest.mark.parametrize("command", ["plan", "load"])
    def test_an_unknown_load_names_those_that_exist(self, command: str, config: Path, capsys: Capture) -> None:
        code, record, line = self.fail([command, str(config), "--load", "alll"], capsys)
        assert (code, record["error"]) == (2, "ConfigError")
        assert "draft" in line

    def test_a_mesh_for_other_ranks_than_there_are(self, tmp_path: Path, checkpoint: Path, capsys: Capture) -> None:
        config = write_config(tmp_path / "two.yaml", checkpoint, ranks=2)
        code, record, line = self.fail(["load", str(config), "--load", "all"], capsys)
        assert (code, record["error"]) == (2, "ConfigError")
        assert "2 ranks" in line

    @pytest.mark.parametrize("command", ["plan", "load", "inspect"])
    def test_a_checkpoint_that_does_not_exist(self, command: str, tmp_path: Path, capsys: Capture) -> None:
        config = write_config(tmp_path / "config.yaml", tmp_path / "nowhere")
        args = [command, str(config), "--load", "all"] if command != "inspect" else [command, str(tmp_path / "nowhere")]
        code, record, line = self.fail(args, capsys)
        assert (code, record["error"], record["path"]) == (3, "CheckpointError", str(tmp_path / "nowhere"))
        assert "does not exist" in line

    def test_a_malformed_header(self, checkpoint: Path, config: Path, capsys: Capture) -> None:
        (checkpoint / "b.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
        code, record, _ = self.fail(["load", str(config), "--load", "all"], capsys)
        assert (code, record["error"]) == (3, "CheckpointError")
        assert str(record["path"]).endswith("b.safetensors")

    @pytest.mark.parametrize(
        ("place", "what"), [("", "is a folder"), ("nowhere/m.json", "does not exist")], ids=["folder", "no-folder"]
    )
    def test_a_manifest_that_cannot_be_written_is_found_before_the_load(
        self, place: str, what: str, config: Path, tmp_path: Path, capsys: Capture
    ) -> None:
        args = ["load", str(config), "--load", "all", "--manifest", str(tmp_path / place)]
        code, record, line = self.fail(args, capsys)
        assert (code, record["error"]) == (2, "ConfigError")
        assert what in line

    def test_a_byte_that_differs_from_safetensors_reading(
        self, config: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from loader_service.cli import checking

        real: Any = vars(checking)["safe_open"]

        class Different:
            def __init__(self, path: str, framework: str) -> None:
                self._opened: Any = real(path, framework=framework)

            def __enter__(self) -> Different:
                self._file = self._opened.__enter__()
                return self

            def __exit__(self, *exc: object) -> None:
                self._opened.__exit__(*exc)

            def get_tensor(self, name: str) -> object:
                tensor = self._file.get_tensor(name).clone()
                if name == "experts.1.w":
                    checking.raw_bytes(tensor)[9] ^= 1
                return tensor

        monkeypatch.setattr(checking, "safe_open", Different)
        code, record, line = self.fail(["load", str(config), "--load", "all", "--verify"], capsys)
        assert (code, record["error"], record["tensor"]) == (3, "CheckpointError", "experts.1.w")
        assert "1 of 20 bytes differ, the first at byte 9" in line

    def test_a_read_that_fails(self, tmp_path: Path, checkpoint: Path, capsys: Capture) -> None:
        # One thread: of several reads that fail at once, it is not certain which is told.
        config = write_config(tmp_path / "one.yaml", checkpoint, reads={"threads": 1})
        with payload_fault(Fault("input/output error")):
            code, record, _ = self.fail(["load", str(config), "--load", "all"], capsys)
        assert (code, record["error"], record["errno"], record["phase"]) == (5, "ReadError", 5, "read")
        assert record["tensor"] == "embed.weight"
        assert str(record["path"]).endswith("a.safetensors")

    def test_pinned_memory_that_cannot_be_had(self, tmp_path: Path, checkpoint: Path, capsys: Capture) -> None:
        if torch.cuda.is_available():
            pytest.skip("this machine can pin memory")
        config = write_config(tmp_path / "pin.yaml", checkpoint, staging={"pin": "required"})
        code, record, _ = self.fail(["load", str(config), "--load", "all"], capsys)
        assert (code, record["error"]) == (6, "MemoryLimitError")

    def test_a_flipped_bit_is_found_by_comparing_and_not_without(self, config: Path, capsys: Capture) -> None:
        with payload_fault(Fault("flips a bit")):
            assert app.run(["load", str(config), "--load", "all", "--json"]) == 0
            assert document(capsys)["verified"] is None
            code, record, _ = self.fail(["load", str(config), "--load", "all", "--verify"], capsys)
        assert (code, record["error"], record["tensor"]) == (3, "CheckpointError", "embed.weight")

    @pytest.mark.parametrize(("error", "expected"), [(ZeroDivisionError("by zero"), 1), (MemoryError(), 6)])
    def test_anything_unexpected_is_one_line_and_has_its_code(
        self, error: Exception, expected: int, config: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from loader_service.cli import plans

        def broken(*args: object, **more: object) -> object:
            raise error

        monkeypatch.setattr(plans, "make_plan", broken)
        code, record, line = self.fail(["plan", str(config), "--load", "all"], capsys)
        assert (code, record["error"]) == (expected, type(error).__name__)
        assert "--debug" in line

    def test_debug_shows_the_traceback(self, tmp_path: Path, capsys: Capture) -> None:
        for command in (["inspect", str(tmp_path / "nowhere")], ["load", str(tmp_path / "no.yaml"), "--load", "x"]):
            assert app.run([*command, "--debug"]) in (2, 3)
            assert "Traceback" in capsys.readouterr().err

    def test_an_interrupt_is_code_130(self, config: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        from loader_service.cli import plans

        def interrupted(*args: object, **more: object) -> object:
            raise KeyboardInterrupt

        monkeypatch.setattr(plans, "make_plan", interrupted)
        code, record, _ = self.fail(["plan", str(config), "--load", "all"], capsys)
        assert (code, record["error"]) == (130, "LoadCancelledError")

    def test_only_rank_0_complains_about_the_usage(self, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        assert app.run(["load", "--json"]) == 2
        assert capsys.readouterr() == ("", "")


class FullDisk(io.StringIO):
    encoding = "utf-8"

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("json_option", [["--json"], []], ids=["json", "table"])
@pytest.mark.parametrize("command", ["plan", "load", "inspect"])
def test_a_stdout_that_is_full_is_one_line_and_code_1(
    command: str,
    json_option: list[str],
    config: Path,
    checkpoint: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = [command, str(config), "--load", "all"] if command != "inspect" else [command, str(checkpoint)]
    monkeypatch.setattr("sys.stdout", FullDisk())
    assert app.run([*args, *json_option]) == 1
    assert said(capsys.readouterr().err) == ["loader-service: stdout cannot be written: No space left on device"]


@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&-", "</dev/null >&-"])
def test_closed_streams_are_no_failure(streams: str, checkpoint: Path, tmp_path: Path) -> None:
    command = f'"$0" -m loader_service inspect "$1" --json {streams}'
    ended = subprocess.run(
        ["sh", "-c", command, sys.executable, str(checkpoint)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=100,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    if streams == "2>&-":
        assert json.loads(ended.stdout)["tensors"] == 8


def test_a_stdout_in_ascii_gets_pictures_and_names_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "modèle"
    write_small_checkpoint(folder)
    config = write_config(tmp_path / "two.yaml", folder, ranks=2)
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    prepare_streams()
    assert app.run(["plan", str(config), "--load", "all"]) == 0
    assert app.run(["inspect", str(folder)]) == 0
    printed = raw.getvalue().decode("ascii")
    assert re.search(r"all rank 0 +\|[.:*#]{4}\|", printed), printed
    assert "mod\\xe8le" in printed


def test_schema_is_json_with_and_without_being_asked(capsys: Capture) -> None:
    assert app.run(["schema"]) == 0
    plain = document(capsys)
    assert app.run(["schema", "--json"]) == 0
    assert document(capsys) == plain
    assert "loads" in plain["properties"]


def test_help_of_every_command_is_printed(capsys: Capture) -> None:
    for command in ([], ["inspect"], ["plan"], ["load"], ["compare"], ["demo"], ["schema"]):
        assert app.run([*command, "--help"]) == 0
        assert "Usage" in capsys.readouterr().out


def test_nothing_at_all_shows_the_help_and_is_a_usage_error(capsys: Capture) -> None:
    assert app.run([]) == 2
    assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize("buffering", [-1, 1], ids=["noticed at the end", "noticed at the first line"])
def test_a_reader_that_has_gone_away_is_no_failure(
    buffering: int, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w", buffering) as broken:
        monkeypatch.setattr("sys.stdout", broken)
        assert app.run(["plan", str(config), "--load", "all", "--json"]) == 0
        assert app.run(["plan", str(config), "--load", "all"]) == 0
        monkeypatch.undo()
