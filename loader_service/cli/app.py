"""The commands: what they are called with, what they return to the shell.

Each command only parses; what it then does lies in a module of its own, imported when it is needed, and runs outside of
typer, so that exit codes and failure lines are the loader's alone.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn, cast

import typer

from loader_service.cli.options import (
    BenchCache,
    BenchForm,
    ByChecksum,
    Config,
    Debug,
    IgnoreIndex,
    Json,
    Level,
    LoadName,
    LogLevel,
    Paths,
)
from loader_service.cli.output import (
    PROGRAM,
    drop_stdout,
    logging_to_stderr,
    prepare_streams,
    print_document,
    print_failure,
    print_line,
    print_traceback,
)
from loader_service.cli.signals import Interruptions, own_signals
from loader_service.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_UNEXPECTED,
    EXIT_USAGE,
    ConfigError,
    FailureRecord,
    LoadCancelledError,
    LoaderError,
    record_of,
)
from loader_service.sizes import parse_size

# typer exports one leaf of its parser's errors; what that derives from is every usage error.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])


@dataclass(frozen=True, slots=True)
class _Invocation:
    """A parsed command line: `work` does the command and returns its exit code. `tells_others`: it does so also when it
    is interrupted, where there are other ranks."""

    work: Callable[[], int]
    json: bool
    debug: bool
    log_level: LogLevel
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


@app.command("inspect")
def inspect_command(
    paths: Paths,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor too.")] = False,
    ignore_index: IgnoreIndex = False,
    json: Json = False,
    debug: Debug = False,
    log_level: Level = LogLevel.INFO,
) -> _Invocation:
    """Show a checkpoint's files, tensors, dtypes and namespaces. Only headers are read."""

    def work() -> int:
        from loader_service.cli.inspecting import inspect

        return inspect(paths, tensors=tensors, ignore_index=ignore_index, as_json=json)

    return _Invocation(work, json, debug, log_level)


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
    json: Json = False,
    debug: Debug = False,
    log_level: Level = LogLevel.INFO,
) -> _Invocation:
    """Show who would read what, for every rank. No payload is read, and no ranks need to run."""

    def work() -> int:
        from loader_service.cli.plans import show_plan

        return show_plan(config, load, ranks, html, as_json=json)

    return _Invocation(work, json, debug, log_level)


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
    json: Json = False,
    debug: Debug = False,
    log_level: Level = LogLevel.INFO,
) -> _Invocation:
    """Run a load. Several ranks: torchrun --nproc-per-node N -m loader_service load CONFIG [--load NAME]."""

    def work() -> int:
        from loader_service.cli.load import LoadOptions, run_load

        by = ByChecksum.CRC32 if checksum is None else checksum
        if checksum is not None and against is None:
            raise ConfigError("--checksum says what --against compares by: give --against MANIFEST too")
        return run_load(LoadOptions(config, load, verify, manifest, against, by.value, as_json=json, debug=debug))

    return _Invocation(work, json, debug, log_level, tells_others=True)


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
) -> _Invocation:
    """Write checksums of a checkpoint's files and tensors, for `load --against`. Every file is read whole, once; one
    that a Hugging Face cache names by its SHA-256 must have it. Code 3 if not."""

    def work() -> int:
        from loader_service.cli.manifest import make_manifest

        return make_manifest(paths, out, ignore_index=ignore_index, as_json=json)

    return _Invocation(work, json, debug, log_level)


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
) -> _Invocation:
    """Measure this machine's limits and a load, and say what bounds it. Several ranks: with torchrun, as `load`."""

    def work() -> int:
        from loader_service.cli.bench import BenchOptions, run_bench

        return run_bench(
            BenchOptions(target, load, form.value, cache.value, rounds, max_bytes, html, as_json=json, debug=debug)
        )

    return _Invocation(work, json, debug, log_level, tells_others=True)


@app.command("compare")
def compare_command(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="What `load --manifest` or `manifest` has written.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Another one.")],
    json: Json = False,
    debug: Debug = False,
    log_level: Level = LogLevel.INFO,
) -> _Invocation:
    """Compare two manifests: which tensors differ in dtype, shape or bytes, or are in one alone. Code 3 if any does."""

    def work() -> int:
        from loader_service.cli.comparing import compare_manifests

        return compare_manifests(first, second, as_json=json)

    return _Invocation(work, json, debug, log_level)


@app.command("demo")
def demo_command(
    folder: Annotated[Path, typer.Option("--folder", help="Where the checkpoint is made, or found.")] = Path(".demo"),
    size: Annotated[str, typer.Option("--size", help="The checkpoint's size, such as 300MiB.")] = "300MiB",
    json: Json = False,
    debug: Debug = False,
    log_level: Level = LogLevel.INFO,
) -> _Invocation:
    """Make a small checkpoint and load it on two ranks: target and draft, every byte compared with safetensors' own."""

    def work() -> int:
        from loader_service.cli.demo import run_demo

        try:
            size_bytes = parse_size(size)
        except ConfigError as error:
            raise ConfigError(f"--size: {error}") from error
        return run_demo(folder, size_bytes, as_json=json)

    return _Invocation(work, json, debug, log_level)


@app.command("schema")
def schema_command(json: Json = False, debug: Debug = False, log_level: Level = LogLevel.INFO) -> _Invocation:
    """Print the JSON schema of the YAML file, for editors. Always JSON, with or without --json."""

    def work() -> int:
        from loader_service.config.json_schema import json_schema

        print_document(json_schema())
        return EXIT_OK

    return _Invocation(work, json, debug, log_level)


def run(args: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. Failures are printed, none is raised."""
    as_json, debug = _asks_for(args, "--json"), _asks_for(args, "--debug")
    try:
        parsed: object = typer.main.get_command(app).main(list(args), prog_name=PROGRAM, standalone_mode=False)
        if not isinstance(parsed, _Invocation):  # --help was printed
            return parsed if isinstance(parsed, int) else EXIT_OK
        if not parsed.tells_others and (signals := Interruptions.installed()) is not None:
            signals.let_go()
        with logging_to_stderr(parsed.log_level, _rank_to_name()):
            return parsed.work()
    except _UsageError as error:
        return _usage_error(error, as_json=as_json)
    except KeyboardInterrupt as error:
        by = f" by {error}" if str(error) else ""
        return _failed(error, LoadCancelledError(f"interrupted{by}").record(), EXIT_INTERRUPTED, as_json, debug)
    except BrokenPipeError:
        drop_stdout()
        return EXIT_UNEXPECTED
    except LoaderError as error:
        return _failed(error, error.record(), error.exit_code, as_json, debug)
    except Exception as error:  # noqa: BLE001 - the last resort: one line, and --debug for the rest
        record = record_of(error)
        line = f"unexpected {record.error}: {record.message} (--debug shows the traceback)"
        return _failed(error, FailureRecord(record.error, line), EXIT_UNEXPECTED, as_json, debug)


def main() -> NoReturn:
    """The entry point of `loader-service` and `python -m loader_service`."""
    prepare_streams()
    signals = own_signals()
    _quiet_torch()
    code = run(sys.argv[1:])
    signals.settle()
    _end_process(code)


def _quiet_torch(environ: MutableMapping[str, str] = os.environ) -> None:
    """Where a store is lost, each of torch's clients would write a native stack to stderr, around the line that says
    what happened. Whoever asks torch for more gets it."""
    if "TORCH_DISTRIBUTED_DEBUG" not in environ:
        environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _end_process(code: int) -> NoReturn:
    """Ends at once: the interpreter's own end takes half a second where torch is loaded, and a thread that is stuck, or
    comes back from the kernel meanwhile, can hold or abort it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            drop_stdout()
    os._exit(code)


def _asks_for(args: Sequence[str], option: str) -> bool:
    """Whether an option is given, also on a command line that cannot be parsed."""
    options = args[: args.index("--")] if "--" in args else args
    return option in options


def _rank_to_name() -> int | None:
    """This process's rank, where a launcher started several."""
    with contextlib.suppress(ValueError, KeyError):
        if int(os.environ["WORLD_SIZE"]) > 1:
            return int(os.environ["RANK"])
    return None


def _usage_error(error: Exception, *, as_json: bool) -> int:
    """The parser's complaint, and how to get help. All ranks have the same command line, so rank 0 alone says it."""
    if _rank_to_name():
        return EXIT_USAGE
    context = getattr(error, "ctx", None)
    # Without any argument the parser has printed the help, and has no more to say.
    message = str(getattr(error, "format_message", error.__str__)()).strip() or "a command is missing"
    command = context.command_path if context is not None else PROGRAM
    record = FailureRecord("UsageError", message)
    if as_json:
        print_document(record.as_dict())
    print_line(f"{PROGRAM}: {message} (see `{command} --help`)")
    return EXIT_USAGE


def _failed(error: BaseException, record: FailureRecord, code: int, as_json: bool, debug: bool) -> int:
    if debug:
        print_traceback(error)
    try:
        print_failure(record, as_json=as_json)
    except LoaderError:  # stdout is full: the line for a person is what is left
        print_failure(record, as_json=False)
    return code
