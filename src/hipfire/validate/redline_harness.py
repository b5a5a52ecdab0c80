"""The redline harness: prove that replayed decode steps change no byte, and write the report of it.

The step of each batch size is captured several times, in several processes, and must have one key. Then the
same positions are run three ways and compared. This file puts the parts together: flags, models, rows, the
report.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hipfire.base.errors import HipfireError
from hipfire.checkpoint.library import LocalModel, open_library
from hipfire.checkpoint.registry import load_registry
from hipfire.validate import harness_text as text
from hipfire.validate import identity
from hipfire.validate.harness_home import isolated_home
from hipfire.validate.harness_report import EXIT_CODES, Report, check_place, write_report
from hipfire.validate.harness_server import unwinding_signals
from hipfire.validate.redline_bench import Bench, LocalBench, daemon_bench, timed
from hipfire.validate.redline_options import RedlineOptions, parse
from hipfire.validate.redline_report import NONCLAIMS, SCHEMA, VERSION, judge, row, summary

EXIT_REFUSED: Final = 2
EXIT_INTERRUPT: Final = 130
Say = Callable[[str], None]


def main(
    words: Sequence[str] | None = None, *, through_daemon: bool = False, program: str = "redline_harness"
) -> int:
    """Run the harness and return its exit code; `words` defaults to the command line's."""
    given = list(sys.argv[1:] if words is None else words)
    text.prepare()
    try:
        with unwinding_signals():
            options = parse(given, program)
            return _run(options, [program, *given], text.show, through_daemon=through_daemon)
    except HipfireError as error:
        return _fail(program, error.line(), EXIT_REFUSED)
    except KeyboardInterrupt:
        return _fail(program, "interrupted", EXIT_INTERRUPT)
    except OSError as error:
        return _fail(program, f"the run ended early: {error}", EXIT_CODES["incomplete"])


def _run(options: RedlineOptions, command: Sequence[str], say: Say, *, through_daemon: bool) -> int:
    if options.json is not None:
        check_place(options.json)
    local = open_library().require(options.model)
    report = _base_report(options, local, command, through_daemon=through_daemon)
    with isolated_home(None, local, load_registry(None)) as home:

        @contextlib.contextmanager
        def open_bench(*, last: bool) -> Iterator[Bench]:
            if last and not through_daemon:
                yield LocalBench(local.path, options)
                return
            log = home.folder / "engine.log" if options.log is None else options.log
            with daemon_bench(local.path, options, home.environment(None), log) as bench:
                yield bench

        try:
            report |= _evidence(options, open_bench, say)
        except HipfireError as error:
            report["aborted"] = error.line()
    report["finished_utc"] = _now()
    report["verdict"], report["reasons"] = judge(report)
    report["pass"] = report["verdict"] == "pass"
    for line in summary(report):
        say(line)
    if options.json is not None:
        write_report(report, options.json)
        say(f"report: {options.json}")
    return EXIT_CODES[report["verdict"]]


def _evidence(options: RedlineOptions, open_bench: Callable[..., Any], say: Say) -> dict[str, Any]:
    """Capture in every process, and compare the arms in the last one."""
    captures: dict[int, list[dict[str, Any]]] = {size: [] for size in options.batch}
    rows = []
    for process in range(options.processes):
        last = process == options.processes - 1
        with open_bench(last=last) as bench:
            for size in options.batch:
                for index in range(options.captures):
                    say(f"process {process + 1}: capture {index + 1} of batch {size}")
                    # another place each time: positions must not be part of a recording
                    found = bench.capture(options.context + index, size)
                    captures[size].append({"process": process, **found})
            if not last:
                continue
            for size in options.batch:
                say(f"comparing {options.positions} positions of batch {size}")
                shadow = bench.shadow(options.context, options.positions, size)
                rows.append(row(size, captures[size], shadow))
            return {"rows": rows, "loaded": dict(bench.loaded), "measurement": timed(bench, options)}
    raise AssertionError("there is a last process")


def _base_report(
    options: RedlineOptions, local: LocalModel, command: Sequence[str], *, through_daemon: bool
) -> Report:
    """Return the part of the report that says what is run."""
    config: Mapping[str, Any] = {
        "through_daemon": through_daemon,
        "positions": options.positions,
        "context": options.context,
        "batch": list(options.batch),
        "captures": options.captures,
        "processes": options.processes,
        "load": options.load_fields(),
    }
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "started_utc": _now(),
        "command": list(command),
        "source": identity.source_identity(identity.PACKAGE),
        "runtime": identity.runtime_identity(),
        "artifacts": [identity.artifact("model", Path(path)) for path in local.parts()],
        "config": config,
        "rows": [],
        "nonclaims": list(NONCLAIMS),
    }


def _fail(program: str, line: str, code: int) -> int:
    """Write a line to stderr and return the code."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{program}: {line}\n")
    return code


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main())
