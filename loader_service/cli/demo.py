"""`demo`: makes a small checkpoint, loads it on two ranks, compares every byte, and shows what was read for it.

The ranks are real: the same `load` command under the same launcher that anyone would use. No time is shown: a
checkpoint that was made a moment ago lies in the page cache, and two processes that start take longer than its reads.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import cast

from loader_service.cli.demo_checkpoint import DemoCheckpoint, make_demo_checkpoint
from loader_service.cli.output import print_document, print_line
from loader_service.cli.plans import plan_of
from loader_service.cli.ranks import GONE
from loader_service.config.yaml_file import load_config
from loader_service.errors import EXIT_OK, CheckpointError, FailureRecord, LoaderError, RankFailure, error_from_record
from loader_service.planning.plan import LoadPlan
from loader_service.sizes import format_size

RANKS = 2
LOADS = ("target", "draft")
LIMIT_S = 300.0  # of one run of all ranks; they take seconds
_END_WAIT_S = 10.0

Document = Mapping[str, object]


def run_demo(folder: Path, size_bytes: int, *, as_json: bool) -> int:
    """Makes or finds the checkpoint in `folder`, runs both loads, prints the result. Returns the exit code.

    Raises LoaderError where a rank fails or a byte differs.
    """
    print_line(f"the checkpoint: {folder / 'checkpoint'}")
    checkpoint = make_demo_checkpoint(folder / "checkpoint", total_bytes=size_bytes)
    config_path = _write_config(folder)
    config = load_config(config_path)
    plans = {load: plan_of(config, load, RANKS) for load in LOADS}
    loads = {}
    for load in LOADS:
        print_line(f"{RANKS} ranks load '{load}' and compare every byte with safetensors ...")
        loads[load] = _run_load(config_path, load)
        _check(loads[load], plans[load])
    if as_json:
        print_document(_as_json(checkpoint, config_path, loads))
    else:
        _show(checkpoint, config_path, plans, loads)
    return EXIT_OK


def _write_config(folder: Path) -> Path:
    """The demo's configuration beside its checkpoint, so that it can be read, changed and used by hand."""
    path = folder / "demo.yaml"
    text = resources.files("loader_service.cli").joinpath("demo.yaml").read_text(encoding="utf-8")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LoaderError(
            f"{path} cannot be written: {error.strerror}: choose another --folder", path=str(path)
        ) from error
    return path


def _run_load(config_path: Path, load: str) -> list[Document]:
    document = _launch(["load", str(config_path), "--load", load, "--verify", "--json"])
    return cast("list[Document]", document["ranks"])


def _check(reports: Sequence[Document], plan: LoadPlan) -> None:
    """What the ranks report is what was planned, and compared. Belt and braces: a difference has failed them before."""
    for rank, report in enumerate(reports):
        own = plan.for_rank(rank)
        expected = (len(own), own.payload_bytes, True)
        found = (report["tensors"], report["payload_bytes"], report["verified"])
        read = cast("int", report["read_bytes"])
        # A gap between two pieces of memory is planned, but not read.
        if found != expected or read > own.read_bytes:
            raise CheckpointError(
                f"rank {rank} of load '{plan.load}' reports (tensors, payload, verified) {found} and {read} bytes "
                f"read, planned were {expected} and at most {own.read_bytes}: this is a bug of the loader",
                rank=rank,
            )


def _launch(args: Sequence[str]) -> Document:
    """Runs the program on all ranks with torch's launcher, all on loopback, and returns what rank 0 prints.

    An interrupt ends all of them. Raises the ranks' own error where they fail.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(RANKS), "-m", "loader_service", *args]
    # The store looks up the name of each rank that connects; where no name server answers, that would take seconds.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            _end(process)
            raise LoaderError(f"the demo's ranks did not end within {LIMIT_S:g} s: {' '.join(command)}") from None
        except BaseException:
            _end(process)
            raise
    return _document(out, err, process.returncode)


def _document(out: str, err: str, code: int) -> Document:
    try:
        document = json.loads(out)
    except ValueError:
        last = " | ".join(err.strip().splitlines()[-3:]) or "it printed nothing"
        raise LoaderError(f"the demo's ranks ended with code {code} and without a document: {last}") from None
    if code == EXIT_OK:
        return cast("Document", document)
    record = FailureRecord(**document)
    raise RankFailure(record) if record.error in GONE else error_from_record(record)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the launcher, which ends its ranks; the whole session of processes if it does not."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_WAIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def _as_json(checkpoint: DemoCheckpoint, config_path: Path, loads: Mapping[str, Sequence[Document]]) -> Document:
    return {
        "config": str(config_path.resolve()),
        "checkpoint": {
            "path": str(checkpoint.path),
            "files": list(checkpoint.files),
            "file_bytes": checkpoint.file_bytes,
            "payload_bytes": checkpoint.payload_bytes,
            "tensors": checkpoint.tensors,
            "created": checkpoint.created,
        },
        "loads": {load: {"ranks": list(reports)} for load, reports in loads.items()},
    }


def _show(
    checkpoint: DemoCheckpoint,
    config_path: Path,
    plans: Mapping[str, LoadPlan],
    loads: Mapping[str, Sequence[Document]],
) -> None:
    from rich.markup import escape

    from loader_service.cli.render import STRIPS, shares_of_files, show, table

    files = len(checkpoint.files)
    result = table(
        f"{checkpoint.tensors} tensors, {format_size(checkpoint.payload_bytes)} in {files} shards",
        "load",
        "rank",
        "tensors",
        "handed over",
        "read",
        "of all bytes",
        "shards read",
        "<every byte equal",
    )
    for load, reports in loads.items():
        for report in reports:
            read = cast("int", report["read_bytes"])
            result.add_row(
                load,
                str(report["rank"]),
                str(report["tensors"]),
                format_size(cast("int", report["payload_bytes"])),
                format_size(read),
                f"{100 * read / checkpoint.payload_bytes:.1f} %",
                f"{report['files_opened']} of {files}",
                "yes" if report["verified"] else "no",
            )
    strips = [line for load in LOADS for line in shares_of_files(plans[load])]
    show(
        result,
        *strips,
        STRIPS,
        "",
        "More is read than handed over where a rank takes some columns: whole rows are read for them.",
        f"The index leaves out {checkpoint.omitted_key} on purpose, as indexes do: the draft got it all the same.",
        f"Again by hand: {escape(_torchrun())} --standalone --nproc-per-node 2 -m loader_service load "
        f"{escape(str(config_path))} --load target --verify",
    )


def _torchrun() -> str:
    """This environment's launcher as a shell finds it: by its name only where the environment is active."""
    beside = Path(sys.executable).with_name("torchrun")
    return str(beside) if beside.exists() and shutil.which("torchrun") != str(beside) else "torchrun"
