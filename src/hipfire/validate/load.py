"""The load run: a server of its own, many clients that come, go and err, an engine that is killed meanwhile.

This file puts the parts together: flags, an isolated home, a server, the requests, the proofs, the report.
"""

from __future__ import annotations

import datetime
import http.client
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hipfire.base.errors import HipfireError
from hipfire.checkpoint.library import LocalModel, open_library
from hipfire.checkpoint.registry import load_registry
from hipfire.validate import identity
from hipfire.validate import load_proofs as proofs
from hipfire.validate.harness_client import Address, get_json
from hipfire.validate.harness_home import Home, isolated_home, server_words
from hipfire.validate.harness_proofs import Proof, judged
from hipfire.validate.harness_report import EXIT_CODES, Report, Word, write_report
from hipfire.validate.harness_server import NotWarmError, Server, ServerPlan, start, unwinding_signals
from hipfire.validate.load_client import Outcome, perform
from hipfire.validate.load_options import LoadOptions, parse
from hipfire.validate.load_processes import Holdings, engine_pid, holdings
from hipfire.validate.load_proofs import Quiet
from hipfire.validate.load_requests import MAX_BODY_BYTES, MAX_SEQ, crowd, draw, questions
from hipfire.validate.load_storm import ASK_TIMEOUT_S, Kill, Say, Target, storm, together

SCHEMA: Final = "hipfire-serve-load"
VERSION: Final = 1
EXIT_REFUSED: Final = 2
EXIT_INTERRUPT: Final = 130
PAUSE_S: Final = 3.0
POLL_S: Final = 0.25
# how long a server may take to be idle after its last client has left, and its memory to be given back
SETTLE_S: Final = 20.0
# requests for each client before the first measurement, so that buffers have the size that they need
WARM_ROUNDS: Final = 3
SLOT_TRIES: Final = 3
NONCLAIMS: Final = (
    "times were taken on a machine that runs the clients too; they are no measurement of speed",
    "moments of kills depend on the machine, so a run with the same seed is not the same run",
)


def main(words: Sequence[str] | None = None) -> int:
    """Run the load with these command-line words and return its exit code."""
    given = sys.argv[1:] if words is None else list(words)
    try:
        with unwinding_signals():
            return _run(parse(given), given, _print)
    except HipfireError as error:
        sys.stderr.write(f"serve_load: {error.line()}\n")
        return EXIT_REFUSED
    except KeyboardInterrupt:
        sys.stderr.write("serve_load: interrupted\n")
        return EXIT_INTERRUPT


def judge(report: Report) -> tuple[Word, list[str]]:
    """Return the verdict of a report and every reason for it that is no pass."""
    found = report["proofs"]
    missing = [f"proof {each['name']}: {each['evidence']}" for each in found if each["state"] == "unproven"]
    if "aborted" in report:
        missing.append(f"the run ended early: {report['aborted']}")
    broken = [f"proof {each['name']}: {each['evidence']}" for each in found if each["state"] == "failed"]
    return ("incomplete" if missing else "fail" if broken else "pass"), missing + broken


def _run(options: LoadOptions, words: Sequence[str], say: Say) -> int:
    registry = load_registry(None)
    local = open_library().require(options.model)
    with isolated_home(None, local, registry) as home:
        plan = _plan(options, home, local)
        report = _base_report(options, local, plan, words)
        report |= _evidence(options, plan, home, say)
    after = identity.tree_sha256(identity.PACKAGE)
    same = judged("source", after == report["source"]["tree_sha256"], f"tree_sha256 {after} at the end")
    report["proofs"].append(same.to_json())
    report["finished_utc"] = _now()
    report["nonclaims"] = list(NONCLAIMS)
    report["verdict"], report["reasons"] = judge(report)
    for line in _summary(report):
        say(line)
    if options.out is not None:
        write_report(report, options.out)
        say(f"report: {options.out}")
    return EXIT_CODES[report["verdict"]]


def _plan(options: LoadOptions, home: Home, local: LocalModel) -> ServerPlan:
    words = server_words(
        options.server_command,
        home,
        port=options.port,
        kv="auto",
        max_seq=MAX_SEQ,
        threads=options.threads,
    )
    words += ["--slots", str(options.slots), "--max-queue", str(options.max_queue)]
    beside = None if options.out is None else options.out.with_suffix(".serve.log")
    return ServerPlan(
        words=words,
        environment=home.environment(None) | {"HIPFIRE_MAX_REQUEST_BYTES": str(MAX_BODY_BYTES)},
        folder=home.folder,
        log=(options.serve_log or beside or home.folder / "load-serve.log").absolute(),
        address=Address("127.0.0.1", options.port),
        model=local.path,
        library=home.library,
        warm_timeout_s=options.serve_warm_timeout_secs,
        pause_s=PAUSE_S,
        poll_s=POLL_S,
    )


def _base_report(
    options: LoadOptions, local: LocalModel, plan: ServerPlan, words: Sequence[str]
) -> dict[str, Any]:
    """Return the part of the report that says what is run."""
    config = {name: getattr(options, name) for name in ("clients", "requests", "kills", "seed", "slots")}
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "started_utc": _now(),
        "command": ["serve_load.py", *words],
        "server_command": list(plan.words),
        "source": identity.source_identity(identity.PACKAGE),
        "runtime": identity.runtime_identity(),
        "artifacts": [identity.artifact("model", path) for path in local.parts()],
        "config": config | {"max_queue": options.max_queue, "max_seq": MAX_SEQ},
        "proofs": [],
    }


def _evidence(options: LoadOptions, plan: ServerPlan, home: Home, say: Say) -> dict[str, Any]:
    """Return what the run gave: outcomes, kills, figures and proofs, and why it ended early if it did."""
    try:
        server = start(plan, say)
    except NotWarmError as error:
        return {"aborted": error.line(), "log_tail": error.tail, "rows": [], "kills": []}
    try:
        target = Target(plan.address, home.folder, int(server.health["pid"]))
        found = _Load(options, target, home.model.name, say).run()
        found["proofs"] += [_log_proof(server).to_json()]
    finally:
        gone = server.stop()
    stopped = judged("stopped", gone, "no process of the server's group is left")
    found["proofs"] += [stopped.to_json()]
    return found


def _log_proof(server: Server) -> Proof:
    return proofs.log_proof(server.log.text() if server.log is not None else "")


class _Load:
    """One run against one warm server."""

    def __init__(self, options: LoadOptions, target: Target, model: str, say: Say) -> None:
        self._options = options
        self._target = target
        self._model = model
        self._say = say

    def run(self) -> dict[str, Any]:
        """Return rows, kills, figures and proofs."""
        options = self._options
        before = self._ask_alone()
        self._say(f"{len(before)} questions were asked alone; warming up")
        self._storm(options.clients * WARM_ROUNDS, options.seed + 1, kills=0)
        self._settle()
        start_figures = self._figures()
        requests = draw(self._model, options.seed, options.requests)
        outcomes, kills = self._storm(len(requests), options.seed, kills=options.kills)
        quiet = self._settle()
        after = self._ask_alone()
        engine = engine_pid(self._target.home, self._target.pid)
        found = [
            *proofs.request_proofs(requests, outcomes, before),
            proofs.kill_proof(kills, options.kills, engine),
            proofs.idle_proof(quiet),
            proofs.same_proof("same_after_load", before, after),
            self._slots_proof(),
            proofs.books_proof(self._settle()),
        ]
        end_figures = self._settled_figures(start_figures)
        for name in start_figures:
            found += proofs.holdings_proofs(name, start_figures[name], end_figures[name])
        return {
            "rows": [each.to_json() for each in outcomes],
            "kills": [each.to_json() for each in kills],
            "figures": {"before": _told(start_figures), "after": _told(end_figures)},
            "totals": proofs.totals(outcomes),
            "proofs": [each.to_json() for each in found],
        }

    def _storm(self, count: int, seed: int, *, kills: int) -> tuple[list[Outcome], list[Kill]]:
        options = self._options
        return storm(
            self._target,
            draw(self._model, seed, count),
            clients=options.clients,
            kills=kills,
            seed=seed,
            timeout_s=options.request_timeout_secs,
            say=self._say,
        )

    def _ask_alone(self) -> dict[str, list[str]]:
        """Return the texts of every question, asked one after another; one without an answer is left out."""
        asked = questions(self._model)
        timeout = self._options.request_timeout_secs
        answers = {name: perform(self._target.address, each, timeout) for name, each in asked.items()}
        return {name: each.texts for name, each in answers.items() if each.end == "answered"}

    def _slots_proof(self) -> Proof:
        """Return whether all slots can be used; a try in which the turns did not meet says nothing."""
        outcomes: list[Outcome] = []
        for _ in range(SLOT_TRIES):
            requests = crowd(self._model, self._options.slots)
            outcomes += together(self._target.address, requests, self._options.request_timeout_secs)
            proof = proofs.slots_proof(outcomes, self._options.slots)
            if proof.state == "ok":
                break
        return proof

    def _settle(self) -> Quiet:
        """Wait until the server is idle, for a while, and return what it tells."""
        until = time.monotonic() + SETTLE_S
        while True:
            quiet = Quiet(self._get("/stats"), self._get("/health"), _metrics(self._target.address))
            if proofs.idle_proof(quiet).state == "ok" or time.monotonic() > until:
                return quiet
            time.sleep(POLL_S)

    def _settled_figures(self, before: Mapping[str, Holdings | None]) -> dict[str, Holdings | None]:
        """Return what the processes hold once it is no more than before, or after a while."""
        until = time.monotonic() + SETTLE_S
        while True:
            after = self._figures()
            found = [
                each for name in after for each in proofs.holdings_proofs(name, before[name], after[name])
            ]
            if all(each.state == "ok" for each in found) or time.monotonic() > until:
                return after
            time.sleep(POLL_S)

    def _figures(self) -> dict[str, Holdings | None]:
        engine = engine_pid(self._target.home, self._target.pid)
        return {"server": holdings(self._target.pid), "engine": None if engine is None else holdings(engine)}

    def _get(self, path: str) -> Mapping[str, Any] | None:
        value = get_json(self._target.address, path, ASK_TIMEOUT_S)
        return value if isinstance(value, dict) else None


def _metrics(address: Address) -> dict[str, float] | None:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=ASK_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        return proofs.parse_metrics(connection.getresponse().read().decode("utf-8", errors="replace"))
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _summary(report: Report) -> Iterator[str]:
    totals = report.get("totals")
    if totals:
        for kind, ends in totals["kinds"].items():
            yield f"  {kind:<14}" + ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
        for text, count in totals["unavailable"].items():
            yield f"  unavailable {count} x {text}"
    for proof in report["proofs"]:
        yield f"{proof['state']:<9}{proof['name']}: {proof['evidence']}"
    yield f"verdict: {report['verdict']}"


def _told(figures: Mapping[str, Holdings | None]) -> dict[str, Any]:
    return {name: None if held is None else held.to_json() for name, held in figures.items()}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
