"""The harness's own test, without a model: faults are planted, and each must be found.

A harness whose flags cannot fire proves nothing. This file plants; the rules are where they always are.
"""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from hipfire.base.errors import HipfireError
from hipfire.validate import detectors_check
from hipfire.validate.harness_client import Reply, merge_call
from hipfire.validate.harness_home import config_text
from hipfire.validate.harness_options import parse
from hipfire.validate.harness_proofs import Proof, facts, log_proof, reuse_proof, transcript_proof
from hipfire.validate.harness_report import SCHEMA, VERSION, Report, judge, totals
from hipfire.validate.harness_resolve import Resolved, resolve
from hipfire.validate.harness_server import LogSlice
from hipfire.validate.harness_turns import Asking, Row, make_row, run_script
from hipfire.validate.prompts import Script, Turn, read_needles

GOOD: Final = "The capital of France is Paris, and the Seine runs through it."
USAGE: Final = {
    "prompt_tokens": 20,
    "completion_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 0},
}
Check = Callable[[], Iterator[str]]


def self_test(say: Callable[[str], None]) -> int:
    """Run every check, say what it found, and return 0 if no fault was found and else 1."""
    failed = 0
    for check in CHECKS:
        found = list(check())
        failed += bool(found)
        say(f"{'FAIL' if found else 'ok  '} {check.__name__.strip('_')}")
        for fault in found:
            say(f"     {fault}")
    say(f"self-test: {len(CHECKS) - failed} of {len(CHECKS)} checks passed")
    return int(failed > 0)


def good_reply(**changes: Any) -> Reply:
    """Return a healthy reply with some fields changed."""
    fields: dict[str, Any] = {"id": "r", "status": 200, "content": GOOD, "finish": "stop", "usage": USAGE}
    return Reply(**(fields | changes))


def row_of(reply: Reply, turn: Turn | None = None) -> Row:
    """Return the row of a reply to one request."""
    return make_row(turn or Turn("factual", "Where?"), reply, b"{}", turn_number=1, step=1)


def report_of(*rows: Row, **changes: Any) -> Report:
    """Return a whole report with these rows, as if all were turns of one run."""
    digest = "0" * 64
    report: Report = {
        "schema": SCHEMA,
        "version": VERSION,
        "command": ["x"],
        "server_command": ["x"],
        "source": {"commit": None, "dirty": None, "tree_sha256": digest},
        "runtime": {"hipfire": "1", "python": "3", "torch": "2"},
        "artifacts": [{"role": "model", "path": "m", "bytes": 1, "sha256": digest}],
        "planned_turns": len(rows),
        "fail_on": ["empty", "attractor"],
        "proofs": [],
        "rows": [row | {"turn": number} for number, row in enumerate(rows, 1)],
    }
    return report | {"totals": totals(report["rows"])} | changes


def _detectors() -> Iterator[str]:
    yield from detectors_check.faults()


def _flags() -> Iterator[str]:
    """Yield the flags that a planted reply does not raise, and those that a healthy one does."""
    call = {"id": "c", "type": "function", "function": {"name": "", "arguments": "{}"}}
    varied = " ".join(f"w{index}" for index in range(200))
    planted: tuple[tuple[str, Reply, Turn | None], ...] = (
        ("empty", good_reply(content=" \n"), None),
        ("attractor", good_reply(content="again and " * 100), None),
        ("attractor", good_reply(content=f"{varied} {'no ' * 120}"), None),
        ("attractor", good_reply(content=" ".join(f"w{index % 47}" for index in range(1500))), None),
        ("attractor", good_reply(content="ha" * 200), None),
        ("missing", good_reply(content="No idea."), Turn("x", "?", ("Paris",))),
        ("missing", good_reply(content="No idea.", reasoning="Paris"), Turn("x", "?", ("Paris",))),
        ("shows", good_reply(content="Yes.<|im_end|>"), None),
        ("without a name", good_reply(tool_calls=[call], finish="tool_calls"), None),
        ("calls with finish", good_reply(tool_calls=[call]), None),
        ("no tool was called", good_reply(), Turn("x", "?", tool_results={"now": "12"})),
    )
    for word, reply, turn in planted:
        verdict, reasons = judge(report_of(row_of(reply, turn)))
        if verdict != "fail" or not any(word in reason for reason in reasons):
            yield f"{word!r} did not fire on {reply.content[:30]!r}: {verdict} {reasons}"
    if not row_of(good_reply(finish="length"))["runaway"]:
        yield "runaway did not fire"
    for healthy in (GOOD, "Paris", "Paris."):
        verdict, reasons = judge(report_of(row_of(good_reply(content=healthy))))
        if verdict != "pass":
            yield f"{healthy!r} is healthy but: {reasons}"


def _verdicts() -> Iterator[str]:
    """Yield where the order incomplete, fail, pass is not kept, or evidence is not missed."""
    good, empty = row_of(good_reply()), row_of(good_reply(content=""))
    cases: tuple[tuple[str, Report], ...] = (
        ("pass", report_of(good)),
        ("fail", report_of(good, empty)),
        ("incomplete", report_of(empty, row_of(Reply(fault="gone")))),
        ("incomplete", report_of(empty, planned_turns=2)),
        ("incomplete", report_of(good, source={})),
        ("incomplete", report_of(good, artifacts=[])),
        ("incomplete", report_of(good, proofs=[Proof("x", "unproven", "").to_json()])),
        ("fail", report_of(good, proofs=[Proof("x", "failed", "").to_json()])),
        ("incomplete", report_of(row_of(good_reply(usage={})))),
    )
    for expected, report in cases:
        if (found := judge(report))[0] != expected:
            yield f"{found} instead of {expected}"


def _log_slices() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_text("Traceback (most recent call last)\n")
        now = LogSlice(path, path.stat().st_size)
        if log_proof([now]).state != "ok":
            yield "an earlier attempt's failure counts"
        with path.open("a") as file:
            file.write("warning: 5 MiB are available\n")
        if log_proof([now]).state != "failed":
            yield "this attempt's failure does not count"


def _files() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "needle.json"
        needle = {"filler_text": "hay\r\n", "question": "q?", "expected_answer_substring": "n"}
        path.write_text(json.dumps(needle))
        if read_needles(path).turns[0].content != "hay\r\n\n\nq?":
            yield "a needle's prompt is not its bytes"
        path.write_text(json.dumps({"filler_text": "hay", "question": "q?"}))
        if not _refused(lambda: read_needles(path)):
            yield "a needle that nothing looks for is accepted"
    if tomllib.loads(config_text()).get("serve") != {"idle_timeout_seconds": 0}:
        yield "the isolated settings are not what a run needs"


def _settings() -> Iterator[str]:
    cases: tuple[tuple[list[str], dict[str, Any]], ...] = (
        (["--sampling", "greedy"], {"temperature": 0.0}),
        (["--sampling", "greedy", "--thinking", "off"], {"temperature": 0.0, "thinking": "off"}),
        (
            ["--sampling", "greedy", "--thinking-effort", "high"],
            {"temperature": 0.0, "max_think_tokens": 0, "reasoning_effort": "high"},
        ),
        (
            ["--sampling", "greedy", "--thinking", "low"],
            {"temperature": 0.0, "thinking": "on", "max_think_tokens": 512},
        ),
    )
    for words, expected in cases:
        fields = _resolved(words).fields
        if fields != {"max_tokens": 2048} | expected:
            yield f"{words} gives {fields}"
    for words in (["--thinking", "med"], ["--max-seq", "1024"]):
        if not _refused(partial(_resolved, words)):
            yield f"{words} leaves no answer but is accepted"
    for words in (["--draft", "d"], ["--dflash", "on"], ["--kv-backend", "vmm"], ["--mtp-ngram-k", "2"]):
        if not _refused(partial(_resolved, words)):
            yield f"{words} cannot be honoured but is accepted"
    if not _resolved([]).warnings:
        yield "sampling that the registry lacks is replaced without a word"


def _history() -> Iterator[str]:
    for rich in (True, False):
        replayed = _second_request(rich=rich)["messages"][1]
        if replayed.get("content") != GOOD or ("reasoning_content" in replayed) != rich:
            yield f"a reply goes back as {replayed}"
    calls: list[dict[str, Any]] = []
    for delta in (
        {"index": 1, "id": "b", "function": {"name": "two", "arguments": '{"x"'}},
        {"index": 0, "id": "a", "function": {"name": "one", "arguments": "{}"}},
        {"index": 1, "function": {"arguments": ": 1}"}},
    ):
        merge_call(calls, delta)
    if [call["function"]["arguments"] for call in calls] != ["{}", '{"x": 1}']:
        yield f"pieces of calls are joined to {calls}"


def _comparisons() -> Iterator[str]:
    row = row_of(good_reply())
    for other, expected in (
        (row, "ok"),
        (row | {"content": GOOD + " "}, "failed"),
        (row | {"request_md5": "0" * 32}, "failed"),
    ):
        if transcript_proof([row], [other]).state != expected:
            yield f"transcripts are not told apart: {other['content']!r}"
    if transcript_proof([row, row], [row]).state != "failed":
        yield "a transcript that is longer passes"
    for counts, cold, state in (
        ((0, 10, 30), False, "ok"),
        ((0, 10, 10), False, "failed"),
        ((5, 10, 30), False, "failed"),
        ((0, 0, 0), True, "ok"),
        ((0, 10), True, "failed"),
        ((0, None), False, "unproven"),
    ):
        rows = [row | {"cached": count, "ctx": 40} for count in counts]
        if reuse_proof(rows, cold=cold, fresh=True).state != state:
            yield f"cached {counts} with cold {cold} is not {state}"
    if facts({"engine": [{"kv_mode": "q8"}]}, ("kv_mode",)) != ["q8"]:
        yield "what a server tells of itself is not found"


def _second_request(*, rich: bool) -> dict[str, Any]:
    """Return what a chain sends after one reply with reasoning."""
    sent: list[dict[str, Any]] = []

    def post(body: bytes) -> Reply:
        sent.append(json.loads(body))
        return good_reply(reasoning="hm")

    script = Script((Turn("a", "one"), Turn("a", "two")))
    run_script(script, "chain", Asking("m", {}, rich), post, lambda row: None)
    return sent[1]


def _resolved(words: list[str]) -> Resolved:
    return resolve(parse(["--model", "m", *words]), None, "default")


def _refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except HipfireError:
        return True
    return False


CHECKS: Final[tuple[Check, ...]] = (
    *(_detectors, _flags, _verdicts, _log_slices),
    *(_files, _settings, _history, _comparisons),
)
