"""The command line: runs one, and makes of whatever happens an exit code and one line that a person can act on."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import MutableMapping, Sequence
from typing import NoReturn, cast

import typer

from loader_service.cli.commands import Invocation, app
from loader_service.cli.options import LogFormat
from loader_service.cli.output import (
    PROGRAM,
    Stderr,
    drop_stdout,
    logging_to_stderr,
    prepare_streams,
    print_document,
    print_failure,
    print_traceback,
)
from loader_service.cli.signals import Interruptions, own_signals
from loader_service.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_UNEXPECTED,
    EXIT_USAGE,
    FailureRecord,
    LoadCancelledError,
    LoaderError,
    exit_code_of,
    record_of,
)

# typer exports one leaf of its parser's errors; what that derives from is every usage error.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])


def run(args: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. Failures are printed, none is raised."""
    as_json, debug = _asks_for(args, "--json"), _asks_for(args, "--debug")
    Stderr.json = _log_format(args) == LogFormat.JSON
    try:
        parsed: object = typer.main.get_command(app).main(list(args), prog_name=PROGRAM, standalone_mode=False)
        if not isinstance(parsed, Invocation):  # --help was printed
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
        return _failed(error, FailureRecord(record.error, line), exit_code_of(error), as_json, debug)


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
    return option in _options(args)


def _options(args: Sequence[str]) -> Sequence[str]:
    return args[: args.index("--")] if "--" in args else args


def _log_format(args: Sequence[str]) -> str:
    """The last `--log-format`, also of a command line that cannot be parsed."""
    found, before = "", ""
    for each in _options(args):
        if before == "--log-format":
            found = each
        elif each.startswith("--log-format="):
            found = each.partition("=")[2]
        before = each
    return found.lower()


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
    if as_json:
        print_document(FailureRecord("UsageError", message).as_dict())
    print_failure(FailureRecord("UsageError", f"{message} (see `{command} --help`)"), as_json=False)
    return EXIT_USAGE


def _failed(error: BaseException, record: FailureRecord, code: int, as_json: bool, debug: bool) -> int:
    if debug:
        print_traceback(error)
    try:
        print_failure(record, as_json=as_json)
    except LoaderError:  # stdout is full: the line for a person is what is left
        print_failure(record, as_json=False)
    return code
