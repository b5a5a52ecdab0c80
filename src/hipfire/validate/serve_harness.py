"""The serve harness: start a real server, ask it as a client does, and judge what it answered.

This file puts the parts together: flags, settings, an isolated home, a server, turns, proofs, the report.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from hipfire.base.errors import HipfireError, ValidationError
from hipfire.checkpoint.library import LocalModel, open_library
from hipfire.checkpoint.registry import load_registry
from hipfire.validate import harness_text as text
from hipfire.validate import identity, prompts
from hipfire.validate.harness_check import self_test
from hipfire.validate.harness_client import Address, Reply, chat
from hipfire.validate.harness_home import Home, isolated_home, server_words
from hipfire.validate.harness_options import HarnessOptions, parse
from hipfire.validate.harness_proofs import (
    Proof,
    judged,
    log_proof,
    reuse_proof,
    server_proofs,
    transcript_proof,
)
from hipfire.validate.harness_report import (
    EXIT_CODES,
    SCHEMA,
    VERSION,
    Report,
    check_place,
    judge,
    nonclaims,
    read_report,
    totals,
    write_report,
)
from hipfire.validate.harness_resolve import Resolved, find_card, resolve
from hipfire.validate.harness_server import (
    LogSlice,
    NotWarmError,
    Server,
    ServerPlan,
    join,
    start,
    unwinding_signals,
)
from hipfire.validate.harness_turns import Asking, Row, run_script
from hipfire.validate.prompts import Script

EXIT_REFUSED: Final = 2
EXIT_INTERRUPT: Final = 130
PAUSE_S: Final = 3.0
POLL_S: Final = 0.25
Say = Callable[[str], None]


def main(words: Sequence[str] | None = None) -> int:
    """Run the harness and return its exit code; `words` defaults to the command line's."""
    given = list(sys.argv[1:] if words is None else words)
    text.prepare()
    try:
        with unwinding_signals():
            return _run(parse(given), given, text.show)
    except HipfireError as error:
        return text.fail(error.line(), EXIT_REFUSED)
    except KeyboardInterrupt:
        return text.fail("interrupted", EXIT_INTERRUPT)
    except OSError as error:
        # whoever read the output is gone, or a disk is full: neither is a verdict on the server
        return text.fail(f"the run ended early: {error}", EXIT_CODES["incomplete"])


@dataclass(slots=True)
class _Seat:
    """The server that answers: one for all turns, or a fresh one for each."""

    options: HarnessOptions
    plan: ServerPlan
    say: Say
    server: Server
    logs: list[LogSlice] = field(default_factory=list)
    asked: int = 0
    all_gone: bool = True

    def ask(self, body: bytes) -> Reply:
        """Return the reply to a request."""
        if self.options.cold and self.asked:
            self.close()
            self.server = start(self.plan, self.say)
        self.asked += 1
        self._note_log()
        return chat(self.plan.address, body, self.options.request_timeout_secs)

    def close(self) -> None:
        """End the server."""
        self._note_log()
        self.all_gone &= self.server.stop()

    def _note_log(self) -> None:
        if self.server.log is not None and self.server.log not in self.logs:
            self.logs.append(self.server.log)


def _run(options: HarnessOptions, words: Sequence[str], say: Say) -> int:
    if options.self_test:
        return self_test(say)
    if options.out is not None:
        check_place(options.out)
    registry = load_registry(options.registry)
    local = replace(open_library(), registry=registry).require(str(options.model))
    resolved = resolve(options, *find_card(options, registry, local))
    script = _script(options)
    previous = None if options.compare_transcript is None else read_report(options.compare_transcript)
    with isolated_home(options.home, local, registry) as home:
        plan = _plan(options, resolved, home, local)
        for line in text.preflight(resolved, plan.words, home.config_text):
            say(line)
        if options.show_config:
            return 0
        report = _base_report(options, resolved, local, plan, words, len(script.turns))
        report |= _answers(options, resolved, home, plan, script, previous, say)
    _finish(report, resolved)
    for line in text.summary(report, options.mode):
        say(line)
    if options.out is not None:
        write_report(report, options.out)
        say(f"report: {options.out}")
    return EXIT_CODES[report["verdict"]]


def _script(options: HarnessOptions) -> Script:
    readers = (
        (options.prompt_file, prompts.read_prompt),
        (options.prompts_file, prompts.read_prompts),
        (options.niah_file, prompts.read_needles),
        (options.session, prompts.read_session),
    )
    return next((read(path) for path, read in readers if path is not None), Script(prompts.BATTERY))


def _plan(options: HarnessOptions, resolved: Resolved, home: Home, local: LocalModel) -> ServerPlan:
    words = server_words(
        options.server_command,
        home,
        port=options.port,
        kv=resolved.value("kv"),
        max_seq=resolved.value("max_seq"),
        threads=resolved.value("threads"),
    )
    return ServerPlan(
        words=words,
        environment=home.environment(options.registry),
        folder=home.folder,
        log=_log_path(options, home).absolute(),
        address=Address("127.0.0.1", options.port),
        model=local.path,
        library=home.library if options.spawn else open_library(),
        warm_timeout_s=options.serve_warm_timeout_secs,
        pause_s=PAUSE_S,
        poll_s=POLL_S,
    )


def _log_path(options: HarnessOptions, home: Home) -> Path:
    """Return where the server's log goes: as asked for, else beside the report, else in the home."""
    beside = None if options.out is None else options.out.with_suffix(".serve.log")
    path = options.serve_log or beside or home.folder / "harness-serve.log"
    # what is read back from a device is no proof
    if path.exists() and not path.is_file():
        raise ValidationError(f"{path} is no file", hint="name a file for the server's log")
    return path


def _base_report(
    options: HarnessOptions,
    resolved: Resolved,
    local: LocalModel,
    plan: ServerPlan,
    words: Sequence[str],
    turns: int,
) -> Report:
    """Return the part of the report that says what is run."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "started_utc": _now(),
        "command": ["serve_harness.py", *words],
        "server_command": list(plan.words) if options.spawn else ["a server that was already running"],
        "source": identity.source_identity(identity.PACKAGE),
        "runtime": identity.runtime_identity(),
        "artifacts": [
            *(identity.artifact("model", path) for path in local.parts()),
            *(identity.artifact("server", path) for path in _server_files(options)),
        ],
        "config": {
            "resolved": {name: each.value for name, each in resolved.settings.items()},
            "sources": {name: each.source for name, each in resolved.settings.items()},
            "warnings": list(resolved.warnings),
        },
        "mode": options.mode,
        "fail_on": list(options.fail_on),
        "planned_turns": turns,
        "rows": [],
        "proofs": [],
    }


def _answers(
    options: HarnessOptions,
    resolved: Resolved,
    home: Home,
    plan: ServerPlan,
    script: Script,
    previous: Report | None,
    say: Say,
) -> dict[str, Any]:
    """Return the rows and proofs of a run, and why it ended early if it did."""
    rows: list[Row] = []
    proofs: list[Proof] = []

    def keep(row: Row) -> None:
        rows.append(row)
        say(text.row_line(row))

    try:
        with _seated(options, plan, say) as seat:
            proofs += server_proofs(seat.server, resolved)
            asking = Asking(_model_name(seat.server, home), resolved.fields, options.feedback_shape == "rich")
            run_script(script, options.mode, asking, seat.ask, keep)
    except NotWarmError as error:
        found: dict[str, Any] = {"aborted": error.line(), "log_tail": error.tail}
    else:
        found = {}
        proofs.append(log_proof(seat.logs))
        proofs.append(judged("stopped", seat.all_gone, "no process of the server's group is left"))
    if rows and (options.mode != "battery" or options.cold):
        proofs.append(reuse_proof(rows, cold=options.cold, fresh=options.spawn))
    if previous is not None:
        proofs.append(transcript_proof(rows, previous["rows"]))
    return found | {"rows": rows, "proofs": [proof.to_json() for proof in proofs]}


@contextmanager
def _seated(options: HarnessOptions, plan: ServerPlan, say: Say) -> Iterator[_Seat]:
    server = start(plan, say) if options.spawn else join(plan)
    seat = _Seat(options, plan, say, server)
    try:
        yield seat
    finally:
        seat.close()


def _finish(report: Report, resolved: Resolved) -> None:
    """Add what can only be said at the end: the source is still the same, totals, the verdict."""
    after = identity.tree_sha256(identity.PACKAGE)
    same = judged("source", after == report["source"]["tree_sha256"], f"tree_sha256 {after} at the end")
    report["proofs"].append(same.to_json())
    report["finished_utc"] = _now()
    report["totals"] = totals(report["rows"])
    notes = ["the server was a command of its own, not this source tree"] * (_foreign(report))
    report["nonclaims"] = [*notes, *nonclaims(report["rows"])]
    report["verdict"], report["reasons"] = judge(report)


def _foreign(report: Report) -> bool:
    return any(each["role"] == "server" for each in report["artifacts"])


def _server_files(options: HarnessOptions) -> list[Path]:
    """Return the files that a server command of the user's own names."""
    return [path for path in map(Path, options.server_command or ()) if path.is_file()]


def _model_name(server: Server, home: Home) -> str:
    """Return the name by which requests ask for the model: the server's own, unless that is a path.

    Request hashes can only be compared between machines if no path is in the requests.
    """
    name = str(server.health["model"])
    return home.model.name if Path(name).is_absolute() else name


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
