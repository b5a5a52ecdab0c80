"""The load run: a sound server passes, each fault of a server is found, and only its engine is killed."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from harness_kit import Run, Script, is_over

from hipfire.validate import identity, load, load_proofs, load_storm
from hipfire.validate.harness_proofs import Proof
from hipfire.validate.load_client import Outcome
from hipfire.validate.load_options import parse
from hipfire.validate.load_processes import Holdings, engine_pid, holdings, kill_engine
from hipfire.validate.load_requests import KINDS, draw, questions
from hipfire.validate.load_storm import Kill, Progress, kill_points

SERVER = Path(__file__).with_name("scripted_load_server.py")
Load = Callable[..., Run]


@pytest.fixture
def run_load(
    tmp_path: Path,
    model: Path,
    port: int,
    script: Script,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Load:
    """Return a function that runs a small load against the scripted server with these faults."""
    del script
    monkeypatch.setattr(load, "PAUSE_S", 0.05)
    monkeypatch.setattr(load, "POLL_S", 0.05)
    monkeypatch.setattr(load, "SETTLE_S", 1.0)
    monkeypatch.setattr(load, "WARM_ROUNDS", 2)
    monkeypatch.setattr(load_storm, "RETRY_PAUSE_S", 0.05)
    monkeypatch.setattr(load_storm, "ENGINE_TIMEOUT_S", 2.0)
    monkeypatch.setattr(load_proofs, "MEMORY_FLOOR", 8 << 20)
    # a small tree, which nobody edits while the tests run
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.py").write_text("pass\n")
    monkeypatch.setattr(identity, "PACKAGE", tree)

    def run(*words: str, faults: tuple[str, ...] = ()) -> Run:
        (tmp_path / "script.json").write_text(json.dumps(faults))
        path = tmp_path / "report.json"
        flags = ["--model", str(model), "--port", str(port), "--out", str(path), "--clients", "8"]
        flags += ["--requests", "60", "--kills", "1", "--request-timeout-secs", "3"]
        flags += ["--server-command", f"{sys.executable} {SERVER}"]
        code = load.main([*flags, *words])
        printed = capsys.readouterr()
        return Run(code, json.loads(path.read_text()) if path.exists() else {}, printed.out, printed.err)

    return run


def failed(run: Run) -> set[str]:
    return {name for name, state in run.proofs.items() if state != "ok"}


def test_a_sound_server_passes_although_its_engine_is_killed(run_load: Load) -> None:
    run = run_load()
    assert (run.code, run.report["verdict"], run.report["reasons"]) == (0, "pass", [])
    assert len(run.report["rows"]) == 60
    totals = run.report["totals"]
    assert sum(totals["ends"].values()) == 60
    assert totals["ends"]["left"] > 0
    assert totals["kinds"]["bad_json"] == {"refused": sum(totals["kinds"]["bad_json"].values())}
    (kill,) = run.report["kills"]
    assert is_over(kill["pid"])
    assert run.report["figures"]["after"]["engine"]["pid"] != kill["pid"]
    assert "verdict: pass" in run.out
    # the same seed sends the same requests
    assert [row["kind"] for row in run.report["rows"]] == [each.kind for each in draw("m", 0, 60)]


def test_wrong_answers_are_found(run_load: Load) -> None:
    run = run_load(faults=("hang", "twice", "untyped", "status", "drift"))
    assert run.code == 1
    assert {"one_end", "no_hang", "same_under_load", "same_after_load"} <= failed(run)
    faults = {row["detail"] for row in run.report["rows"] if row["end"] == "fault"}
    assert "no end within 3 s" in faults
    assert "an event follows [DONE]" in faults
    assert any(text.startswith("an error without message, type or code") for text in faults)


def test_what_a_server_keeps_is_found(run_load: Load) -> None:
    run = run_load(faults=("busy", "slot", "grow", "traceback", "status"))
    leaks = {"idle", "slots", "server_memory", "server_files", "server_threads", "log"}
    assert run.code == 1
    assert failed(run) == {*leaks, "one_end"}
    assert "not 413 too_large" in run.evidence["one_end"]
    assert "3 of 4" in run.evidence["slots"]


def test_an_engine_that_stays_dead_is_no_pass(run_load: Load) -> None:
    run = run_load("--kills", "2", faults=("dead",))
    assert (run.code, run.report["verdict"]) == (3, "incomplete")
    assert run.proofs["kills"] == "unproven"
    assert {"same_after_load", "slots"} <= failed(run)


@pytest.mark.parametrize(
    "words",
    [
        ("--kills", "5"),
        ("--requests", "3"),
        ("--clients", "0"),
        ("--request-timeout-secs", "0"),
        ("--server-command", "'"),
        ("--frobnicate",),
    ],
)
def test_flags_that_make_no_load_are_refused(run_load: Load, words: tuple[str, ...]) -> None:
    run = run_load(*words)
    assert (run.code, run.report) == (2, {})
    assert run.err.startswith("serve_load: ")


def test_every_kind_is_sent_and_the_seed_decides() -> None:
    first = draw("m", 1, 100)
    assert first == draw("m", 1, 100)
    assert first != draw("m", 2, 100)
    assert {each.kind for each in draw("m", 3, len(KINDS))} == set(KINDS)
    assert [each.number for each in first] == list(range(1, 101))
    # what is asked under load is asked alone too
    assert {each.question for each in draw("m", 4, 500)} == {*questions("m"), ""}


def test_kills_come_in_order_while_requests_are_left() -> None:
    points = kill_points(600, 3, 7)
    assert points == kill_points(600, 3, 7)
    counts = [count for count, _ in points]
    assert counts == sorted(counts)
    assert all(60 <= count <= 450 and 0 <= pause <= 0.5 for count, pause in points)


def test_whoever_waits_for_a_moment_to_kill_is_told_that_the_load_was_interrupted() -> None:
    progress, told = Progress(10), []
    thread = threading.Thread(target=lambda: told.append(progress.wait_for(5)), daemon=True)
    thread.start()
    for _ in range(4):
        progress.note()
    assert thread.is_alive()
    progress.stop()
    thread.join(10)
    assert told == [False]


def test_only_the_servers_own_engine_is_killed(tmp_path: Path) -> None:
    """A record of another process, or of one that is not the server's child, is no engine."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        try:
            record = tmp_path / "daemon.pid"
            assert engine_pid(tmp_path, os.getpid()) is None
            record.write_text(str(child.pid))
            assert engine_pid(tmp_path, os.getpid()) == child.pid
            assert engine_pid(tmp_path, child.pid) is None
            assert not kill_engine(child.pid, tmp_path, os.getppid())
            record.write_text(str(os.getppid()))
            assert not kill_engine(child.pid, tmp_path, os.getpid())
            assert child.poll() is None
            record.write_text(str(child.pid))
            assert kill_engine(child.pid, tmp_path, os.getpid())
            assert child.wait(10) == -9
        finally:
            child.kill()


def test_holdings_are_those_of_the_process() -> None:
    before = holdings(os.getpid())
    # mapped, since what an allocator keeps of freed memory would count too
    block = mmap.mmap(-1, 64 << 20)
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    with Path(os.devnull).open():
        after = holdings(os.getpid())
    assert before is not None
    assert after is not None
    assert 60 << 20 < after.resident - before.resident < 80 << 20
    assert after.files == before.files + 1
    block.close()
    assert holdings(2**22 + 1) is None


OUT_OF_TIME = Outcome(1, "plain", "fault", detail="no end within 3 s", hung=True)
BUSY = Outcome(1, "plain", "unavailable", 503, "transient", "busy", retry_after=True)
TOO_LARGE = Outcome(1, "oversized", "refused", 413, "too_large")


@pytest.mark.parametrize(
    ("outcome", "fault"),
    [
        (BUSY, ""),
        (replace(BUSY, retry_after=False), "status 503 without Retry-After"),
        (replace(BUSY, code="internal"), "unavailable as internal: busy"),
        (replace(BUSY, kind="bad_json"), "unavailable with 503 transient: busy"),
        (TOO_LARGE, ""),
        (Outcome(1, "overlong", "refused", 200, "context_length_exceeded"), ""),
        (Outcome(1, "plain", "refused", 200, "internal", "broken"), "refused with 200 internal: broken"),
        (replace(TOO_LARGE, status=400), "refused with 400 too_large, not 413 too_large"),
        (replace(TOO_LARGE, kind="plain"), "refused with 413 too_large"),
        (replace(TOO_LARGE, end="answered"), "answered with 413 too_large"),
        (OUT_OF_TIME, "fault: no end within 3 s"),
        (Outcome(1, "cancel", "left"), ""),
        (Outcome(1, "stream", "left"), "left"),
    ],
)
def test_which_ends_a_kind_may_have(outcome: Outcome, fault: str) -> None:
    assert load_proofs.fault_of(outcome) == fault


def test_a_text_that_broke_off_must_be_the_beginning_of_the_whole() -> None:
    asked = [each for each in draw("m", 0, 200) if each.kind in ("plain", "cancel")][:2]
    alone = {each.question: ["one two three"] for each in asked}
    kinds = [each.kind for each in asked]
    whole = Outcome(1, kinds[0], "answered", texts=["one two three"])

    def proof(text: str) -> Proof:
        outcomes = [whole, Outcome(2, kinds[1], "left", texts=[text])]
        return list(load_proofs.request_proofs(asked, outcomes, alone))[-1]

    assert (proof("one t").name, proof("one t").state) == ("same_under_load", "ok")
    assert proof("one x").state == "failed"
    # without any answer nothing was shown
    nothing = list(load_proofs.request_proofs(asked, [BUSY, BUSY], alone))[-1]
    assert nothing.state == "failed"


def test_a_process_may_not_grow_beyond_the_tolerance() -> None:
    before = Holdings(1, 400 << 20, 0, 9, 3)

    def states(after: Holdings | None) -> list[str]:
        return [each.state for each in load_proofs.holdings_proofs("engine", before, after)]

    assert states(replace(before, resident=439 << 20, files=11, threads=7)) == ["ok"] * 3
    assert states(replace(before, resident=441 << 20, files=12, threads=8)) == ["failed"] * 3
    assert states(None) == ["unproven"] * 3


def test_kills_that_did_not_happen_leave_the_run_incomplete() -> None:
    kills = [Kill(11, 100, 4), Kill(12, 200, 4)]
    assert load_proofs.kill_proof(kills, 2, 13).state == "ok"
    assert load_proofs.kill_proof(kills, 2, 12).state == "failed"
    assert load_proofs.kill_proof(kills, 2, None).state == "failed"
    assert load_proofs.kill_proof(kills, 3, 13).state == "unproven"


def test_books_must_balance() -> None:
    def state(asked: float) -> str:
        counts = {"hipfire_requests_failed_total": 2.0, "hipfire_requests_aborted_total": 3.0}
        counts["hipfire_requests_total"] = asked
        return load_proofs.books_proof(load_proofs.Quiet({"requests_served": 5}, {}, counts)).state

    assert (state(10), state(11), state(9)) == ("ok", "failed", "failed")
    assert load_proofs.books_proof(load_proofs.Quiet({}, {}, {})).state == "unproven"


def test_metrics_are_read_and_histograms_left_out() -> None:
    text = '# HELP a b\na 3\nb{le="1"} 4\nc 1e3\n'
    assert load_proofs.parse_metrics(text) == {"a": 3.0, "c": 1000.0}


def test_the_queue_has_room_for_every_client() -> None:
    options = parse(["--model", "m"])
    assert (options.clients, options.requests, options.kills, options.max_queue) == (32, 600, 3, 48)
