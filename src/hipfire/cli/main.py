"""The `hipfire` command: the table of subcommands, and how every failure becomes one line and an exit code.

Each subcommand lives in a file of its own that is imported when it is called, so that `--help` stays quick.
This file does not know what any subcommand does.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from hipfire import __version__
from hipfire.base import env, log
from hipfire.base.errors import HipfireError, ValidationError
from hipfire.base.printable import one_line
from hipfire.cli.output import OutputError, write
from hipfire.cli.signals import Endings

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPT, EXIT_BROKEN_PIPE = 1, 2, 130, 141

# name, import path, one line of help
COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("run", "hipfire.cli.run:run", "Answer a prompt with a model."),
    ("chat", "hipfire.cli.chat:chat", "Talk with a model."),
    ("serve", "hipfire.cli.serve:serve", "Serve models over HTTP."),
    ("stop", "hipfire.cli.stop:stop", "End the server that runs."),
    ("restart", "hipfire.cli.serve:restart", "Stop the server and serve again."),
    ("ps", "hipfire.cli.ps:ps", "Show the server that runs."),
    ("pull", "hipfire.cli.pull:pull", "Fetch a model of the registry."),
    ("list", "hipfire.cli.models:list_models", "Show installed models; -r adds those of the registry."),
    ("rm", "hipfire.cli.models:rm", "Remove an installed model."),
    ("verify", "hipfire.cli.models:verify", "Hash an installed model and compare."),
    ("quantize", "hipfire.cli.quantize:quantize", "Convert a model into one of hipfire's formats."),
    ("bench", "hipfire.cli.bench:bench", "Measure how fast a model runs."),
    ("inspect", "hipfire.cli.inspect:inspect", "Show what a model file holds."),
    ("config", "hipfire.cli.config:app", "Read and change settings."),
    ("diag", "hipfire.cli.diag:diag", "Describe this machine and installation."),
    ("version", "hipfire.cli.version:version", "Show versions."),
)
ALIASES = {"rm": ("remove",)}
NAMES = (*(name for name, _, _ in COMMANDS), *(alias for aliases in ALIASES.values() for alias in aliases))


class UsageError(ValidationError):
    """The words on the command line are not a command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; `arguments` defaults to those of the process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = (env.get("HIPFIRE_DEBUG") or "0").lower() not in env.FALSE_WORDS
    for stream in (sys.stdout, sys.stderr):
        # a name that the terminal's code page lacks is shown escaped instead of ending the program
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    log.configure(debug=debug)
    if sys.stdout is None:
        return _fail("standard output is closed; redirect it to a file or to /dev/null", EXIT_ERROR)
    endings = Endings()
    code = _guarded(words, debug, endings)
    try:
        sys.stdout.flush()
    except OSError as error:
        code = _unwritable(error, code)
    # an error that a signal led to, such as a terminal that closed, is not what ended the command
    return endings.code or code


def _guarded(words: list[str], debug: bool, endings: Endings) -> int:
    """Run the command; every failure but that of the final flush becomes a line and a code here."""
    try:
        with endings:
            return _dispatch(words)
    except UsageError as error:
        return _fail(error.line(), EXIT_USAGE)
    except HipfireError as error:
        _trace(debug)
        return _fail(error.line(), EXIT_ERROR)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPT)
    except Exception as error:
        if isinstance(error, OSError) and (fault := _stdout_fault(error)) is not None:
            return _unwritable(fault, 0)
        _trace(debug)
        hint = "" if debug else "; set HIPFIRE_DEBUG=1 for the traceback and report it"
        return _fail(f"internal error: {type(error).__name__}: {one_line(str(error))}{hint}", EXIT_ERROR)


def _stdout_fault(error: OSError) -> OSError | None:
    """Return why standard output cannot be written, or None if `error` is about something else."""
    if isinstance(error, BrokenPipeError):
        return error
    try:
        # what could not be written is still buffered, so that the fault shows again
        sys.stdout.flush()
    except OSError as again:
        return again
    return None


def _unwritable(error: OSError, code: int) -> int:
    """Say why standard output cannot be written, unless its reader left or a failure `code` was reported."""
    # what is still buffered must not raise again at exit
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if code:
        return code
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    return _fail(OutputError(error).line(), EXIT_ERROR)


def _dispatch(words: list[str]) -> int:
    if not words or words in (["--help"], ["-h"]):
        _write_help()
        return 0
    if words == ["--version"]:
        write(__version__)
        return 0
    if words[0] not in NAMES:
        near = difflib.get_close_matches(words[0], NAMES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`hipfire --help` lists the commands"
        raise UsageError(f"unknown command {words[0][:80]!r}", hint=hint)
    return _run_command(words)


def _run_command(words: list[str]) -> int:
    env.let_threads_sleep()
    # cyclopts takes longer to import than the help above takes altogether
    from cyclopts import App  # noqa: PLC0415
    from cyclopts.exceptions import CycloptsError  # noqa: PLC0415

    app = App(
        name="hipfire",
        help_format="plaintext",
        help_formatter="plain",
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for name, target, text in COMMANDS:
        app.command(target, name=[name, *ALIASES.get(name, ())], help=text)
    try:
        result = app(words, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise UsageError(str(error).rstrip("."), hint=f"see `hipfire {words[0]} --help`") from error
    except SystemExit as stopped:
        # the printer of help turns a broken pipe into an exit of its own
        raise BrokenPipeError from stopped
    return result if isinstance(result, int) else 0


def _write_help() -> None:
    width = max(len(name) for name, _, _ in COMMANDS)
    write("Usage: hipfire COMMAND [ARGUMENTS]\n")
    write("Run large language models on the machine in front of you.\n\nCommands:")
    for name, _, text in COMMANDS:
        write(f"  {name:<{width}}  {text}")
    write("\n`hipfire COMMAND --help` describes a command; `hipfire --version` shows the version.")


def _fail(line: str, code: int) -> int:
    # standard error may be closed or its terminal gone; the code says it then
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"hipfire: {line}\n")
    return code


def _trace(debug: bool) -> None:
    if debug:
        traceback.print_exc(file=sys.stderr)
