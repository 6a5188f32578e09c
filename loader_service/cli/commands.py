"""The commands: what each is called with, and where its work lies.

A command only parses. Its work is imported when it is needed, and runs outside of typer (`app.py`), so that exit codes
and failure lines are the loader's alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from loader_service.cli.options import (
    BenchCache,
    BenchForm,
    ByChecksum,
    Config,
    Debug,
    Format,
    IgnoreIndex,
    Json,
    Level,
    LoadName,
    LogFormat,
    LogLevel,
    Paths,
)
from loader_service.cli.output import PROGRAM, print_document
from loader_service.errors import EXIT_OK, ConfigError
from loader_service.sizes import size_option
from loader_service.version import VERSION


@dataclass(frozen=True, slots=True)
class Invocation:
    """A parsed command line: `work` does the command and returns its exit code. `tells_others`: it does so also when it
    is interrupted, where there are other ranks."""

    work: Callable[[], int]
    json: bool
    debug: bool
    log_level: LogLevel
    log_format: LogFormat
    tells_others: bool = False


app = typer.Typer(
    name=PROGRAM,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    help=(
        "Loads safetensors checkpoints for inference workers: plans every rank's byte ranges from the headers, reads "
        "them with positioned reads, and streams filled buffers to the consumers."
    ),
    epilog=(
        "Exit codes: 0 done; 1 unexpected; 2 usage or configuration; 3 checkpoint missing, malformed or changed, or "
        "tensors that differ; 4 ranks disagree or another rank failed; 5 reading failed; 6 memory; 130 interrupted."
    ),
)


def _print_version(asked_for: bool) -> None:
    if asked_for:
        typer.echo(f"{PROGRAM} {VERSION}")
        raise typer.Exit


@app.callback()
def _any_command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Takes what is no command's own."""


@app.command("inspect")
def inspect_command(
    paths: Paths,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor too.")] = False,
    ignore_index: IgnoreIndex = False,
    json: Json = False,
    debug: Debug = False,
    log_level: Level = LogLevel.INFO,
    log_format: Format = LogFormat.TEXT,
) -> Invocation:
    """Show a checkpoint's files, tensors, dtypes and namespaces. Only headers are read."""

    def work() -> int:
        from loader_service.cli.inspecting import inspect

        return inspect(paths, tensors=tensors, ignore_index=ignore_index, as_json=json)

    return Invocation(work, json, debug, log_level, log_format)


@app.command("plan")
def plan_command(
    config: Config,
    load: LoadName = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", min=1, help="For so many ranks (default: the mesh's product, else WORLD_SIZE, else 1)."
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a picture of it: who reads what of each file, one page."),
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List what each rank takes of every tensor too, and which rule says so.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="List with --tensors what this rank takes, and no other.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
    log_level: Level = LogLevel.INFO,
    log_format: Format = LogFormat.TEXT,
) -> Invocation:
    """Show who would read what, for every rank. No payload is read, and no ranks need to run."""

    def work() -> int:
        from loader_service.cli.plans import PlanOptions, show_plan

        if rank is not None and not tensors:
            raise ConfigError("--rank says whose tensors are listed: give --tensors too")
        return show_plan(PlanOptions(config, load, ranks, html, tensors, rank, as_json=json))

    return Invocation(work, json, debug, log_level, log_format)


@app.command("load")
def load_command(
    config: Config,
    load: LoadName = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every tensor with what safetensors itself reads.")
    ] = False,
    manifest: Annotated[
        Path | None,
        typer.Option(
            "--manifest",
            metavar="OUT.json",
            help="Write dtype, shape and sha256 of every tensor that this rank got. With several ranks the file's "
            "name gets .rank0, .rank1, ... before its suffix.",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="MANIFEST",
            help="Check what this rank takes, as it goes by, against the checkpoint's manifest (see `manifest`).",
        ),
    ] = None,
    checksum: Annotated[
        ByChecksum | None,
        typer.Option("--checksum", help="What --against compares whole tensors by (default: crc32); slices by CRC-32."),
    ] = None,
    attach: Annotated[
        bool, typer.Option("--attach", help="Take from this node's resident service what it keeps (see `serve`).")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write a picture of it, all ranks on one page: what was read, and when."
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
    log_level: Level = LogLevel.INFO,
    log_format: Format = LogFormat.TEXT,
) -> Invocation:
    """Run a load. Several ranks: torchrun --nproc-per-node N -m loader_service load CONFIG [--load NAME]."""

    def work() -> int:
        from loader_service.cli.load import LoadOptions, run_load

        by = ByChecksum.CRC32 if checksum is None else checksum
        if checksum is not None and against is None:
            raise ConfigError("--checksum says what --against compares by: give --against MANIFEST too")
        return run_load(
            LoadOptions(
                config,
                load,
                verify,
                manifest,
                against,
                by.value,
                as_json=json,
                debug=debug,
                html=html,
                attach=attach,
            )
        )

    return Invocation(work, json, debug, log_level, log_format, tells_others=True)


@app.command("serve")
def serve_command(
    config: Config,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", min=1, help="How many workers there are (default: the mesh's product, else as many as services)."
        ),
    ] = None,
    socket: Annotated[
        str | None,
        typer.Option(
            "--socket", metavar="PATH|@NAME", help="Where workers attach, instead of the file's serve.socket."
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="HOST:PORT",
            help="Serve /healthz, /readyz, /metrics, /status and /plan there; other services of a node: one port on.",
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
    log_level: Level = LogLevel.INFO,
    log_format: Format = LogFormat.TEXT,
) -> Invocation:
    """Keep what the YAML file's `serve` names in memory that this node's workers share, until a signal comes. A worker
    that attaches reads nothing from the disk. One a node; several: with torchrun, as `load`."""

    def work() -> int:
        from loader_service.cli.serve import ServeOptions, run_serve

        return run_serve(ServeOptions(config, ranks, socket, http, as_json=json, debug=debug))

    return Invocation(work, json, debug, log_level, log_format, tells_others=True)


@app.command("manifest")
def manifest_command(
    paths: Paths,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it there instead of on stdout.")
    ] = None,
    ignore_index: IgnoreIndex = False,
    json: Json = False,
    debug: Debug = False,
    log_level: Level = LogLevel.INFO,
    log_format: Format = LogFormat.TEXT,
) -> Invocation:
    """Write checksums of a checkpoint's files and tensors, for `load --against`. Every file is read whole, once; one
    that a Hugging Face cache names by its SHA-256 must have it. Code 3 if not."""

    def work() -> int:
        from loader_service.cli.manifest import make_manifest

        return make_manifest(paths, out, ignore_index=ignore_index, as_json=json)

    return Invocation(work, json, debug, log_level, log_format)


@app.command("bench")
def bench_command(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="PATH|CONFIG",
            help="A checkpoint's folder or one .safetensors file, loaded whole; or the YAML file.",
        ),
    ],
    load: LoadName = None,
    form: Annotated[
        BenchForm,
        typer.Option(
            "--form",
            help="What is loaded: tensors that own their memory, as most consumers take them, or batches of memory "
            "that is used again.",
        ),
    ] = BenchForm.OWNED,
    cache: Annotated[
        BenchCache,
        typer.Option(
            "--cache",
            help="What the page cache holds of the load's files before each round. cold: they are dropped from it, no "
            "others; warm: they are read into it; as-is: it is left alone.",
        ),
    ] = BenchCache.COLD,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="Rounds of load and limits, by turns.")] = 3,
    max_bytes: Annotated[
        str, typer.Option("--max-bytes", help="How much of the files is read for each limit, at most.", metavar="SIZE")
    ] = "4GiB",
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a picture of the load over time, one file without others."),
    ] = None,
    json: Json = False,
    debug: Debug = False,
    log_level: Level = LogLevel.INFO,
    log_format: Format = LogFormat.TEXT,
) -> Invocation:
    """Measure this machine's limits and a load, and say what bounds it. Several ranks: with torchrun, as `load`."""

    def work() -> int:
        from loader_service.cli.bench import BenchOptions, run_bench

        return run_bench(
            BenchOptions(target, load, form.value, cache.value, rounds, max_bytes, html, as_json=json, debug=debug)
        )

    return Invocation(work, json, debug, log_level, log_format, tells_others=True)


@app.command("compare")
def compare_command(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="What `load --manifest` or `manifest` has written.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Another one.")],
    json: Json = False,
    debug: Debug = False,
    log_level: Level = LogLevel.INFO,
    log_format: Format = LogFormat.TEXT,
) -> Invocation:
    """Compare two manifests: which tensors differ in dtype, shape or bytes, or are in one alone. Code 3 if any does."""

    def work() -> int:
        from loader_service.cli.comparing import compare_manifests

        return compare_manifests(first, second, as_json=json)

    return Invocation(work, json, debug, log_level, log_format)


@app.command("demo")
def demo_command(
    folder: Annotated[
        Path, typer.Option("--folder", metavar="FOLDER", help="Where the checkpoint is made, or found.")
    ] = Path(".demo"),
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE", help="The checkpoint's size, such as 300MiB.")
    ] = "300MiB",
    json: Json = False,
    debug: Debug = False,
    log_level: Level = LogLevel.INFO,
    log_format: Format = LogFormat.TEXT,
) -> Invocation:
    """Make a small checkpoint and load it on two ranks: target and draft, every byte compared with safetensors' own."""

    def work() -> int:
        from loader_service.cli.demo import run_demo

        return run_demo(folder, size_option("--size", size), as_json=json)

    return Invocation(work, json, debug, log_level, log_format)


@app.command("schema")
def schema_command(
    json: Json = False,
    debug: Debug = False,
    log_level: Level = LogLevel.INFO,
    log_format: Format = LogFormat.TEXT,
) -> Invocation:
    """Print the JSON schema of the YAML file, for editors. Always JSON, with or without --json."""

    def work() -> int:
        from loader_service.config.json_schema import json_schema

        print_document(json_schema())
        return EXIT_OK

    return Invocation(work, json, debug, log_level, log_format)
