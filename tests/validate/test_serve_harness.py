"""Whole runs of the serve harness against a scripted model: modes, identity, isolation, refusals."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness_kit import GOOD, SERVER, Harness, Script, is_over, one_turn

from hipfire.validate import detectors_check, identity
from hipfire.validate.detectors import OK, Detector
from hipfire.validate.harness_check import self_test
from hipfire.validate.harness_client import Address, get_json
from hipfire.validate.prompts import BATTERY

ROOT = Path(__file__).parents[2]
ANSWERS = [
    {"content": "def f(a, b): return sorted(a + b)"},
    {"content": "It travels 100 km."},
    {"content": "Because the axis of the Earth is tilted against its orbit."},
    {"content": "He found it. It pointed home. He followed."},
    {"content": "1. Name things well.\n2. Keep it short.\n3. Test it."},
]


def test_battery_passes_and_says_what_was_run(harness: Harness, script: Script, model: Path) -> None:
    script(*ANSWERS)
    run = harness("--kv", "q8", "--max-seq", "4096", "--seed", "7", "--thinking", "off")
    assert (run.code, run.report["verdict"], run.report["reasons"]) == (0, "pass", [])
    assert [row["content"] for row in run.report["rows"]] == [each["content"] for each in ANSWERS]
    assert [row["genre"] for row in run.report["rows"]] == ["code", "reason", "factual", "prose", "instruct"]
    # each turn is a conversation of its own, with nothing but its first words in common with another
    assert [row["ctx"] for row in run.report["rows"]] == [1 + len(turn.content.split()) for turn in BATTERY]
    expected = [hashlib.md5(turn.content.encode()).hexdigest() for turn in BATTERY]
    assert [row["prompt_md5"] for row in run.report["rows"]] == expected
    body = (
        '{"model": "tiny", "messages": [{"role": "user", "content": %s}], "stream": true, "stream_options": '
        '{"include_usage": true}, "max_tokens": 2048, "temperature": 0.0, "thinking": "off", "seed": 7}'
    )
    request = (body % json.dumps(BATTERY[0].content)).encode()
    # the name of the scripted model is its path, which must not get into a request
    assert run.report["rows"][0]["request_md5"] == hashlib.md5(request).hexdigest()
    assert run.report["source"]["tree_sha256"] == identity.tree_sha256(identity.PACKAGE)
    (artifact,) = [each for each in run.report["artifacts"] if each["role"] == "model"]
    assert artifact["sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()
    names = ["own_server", "loopback", "model", "kv", "max_seq", "log", "stopped", "source"]
    assert run.proofs == dict.fromkeys(names, "ok")
    assert "He found it. It pointed home." in run.out
    assert "verdict: pass" in run.out


def test_chain_reuses_more_each_turn_and_equals_its_cold_run(
    harness: Harness, script: Script, tmp_path: Path
) -> None:
    script(*ANSWERS)
    warm = harness("--mode", "chain", out="warm.json")
    cached = [row["cached"] for row in warm.report["rows"]]
    assert cached[0] == 0
    assert sorted(set(cached)) == cached
    assert (warm.code, warm.proofs["prefix_reuse"]) == (0, "ok")

    # a fresh server answers its first reply, so that the script must be one reply for all
    script({"content": "Yes, quite."})
    warm = harness("--mode", "chain", out="warm.json")
    cold = harness("--mode", "chain", "--cold", "--compare-transcript", str(tmp_path / "warm.json"))
    assert (cold.code, cold.proofs["cold"], cold.proofs["transcript"]) == (0, "ok", "ok")
    assert [row["cached"] for row in cold.report["rows"]] == [0] * 5
    requests = [[row["request_md5"] for row in run.report["rows"]] for run in (warm, cold)]
    assert requests[0] == requests[1]
    assert len(set(requests[0])) == 5


def test_a_changed_byte_fails_the_comparison(harness: Harness, script: Script, tmp_path: Path) -> None:
    turn = one_turn(tmp_path)
    harness(*turn, out="before.json")
    script({"content": "The water rises because the moon pulls at it!"})
    run = harness(*turn, "--compare-transcript", str(tmp_path / "before.json"))
    assert (run.code, run.report["verdict"], run.proofs["transcript"]) == (1, "fail", "failed")
    assert "request 1: content differs at character 44" in run.evidence["transcript"]


def test_a_chain_that_is_read_anew_each_turn_fails(harness: Harness, script: Script) -> None:
    script(*({**answer, "cached": 0} for answer in ANSWERS))
    run = harness("--mode", "chain")
    assert (run.code, run.proofs["prefix_reuse"]) == (1, "failed")
    assert run.evidence["prefix_reuse"] == "cached 0 -> 0 -> 0 -> 0 -> 0"


def test_tools_are_answered_and_the_round_trip_is_judged(
    harness: Harness, script: Script, tmp_path: Path
) -> None:
    session = ROOT / "benchmarks" / "prompts" / "session_tool_roundtrip.json"
    words = ["--mode", "session", "--session", str(session)]
    call = {"calls": [["water_level", '{"harbour": "Skagen"}']]}
    script(call, {"content": "The water is at 143 cm."})
    run = harness(*words)
    assert (run.code, run.report["reasons"]) == (0, [])
    first, second = run.report["rows"]
    assert (first["finish"], second["step"], second["ctx"] > first["ctx"]) == ("tool_calls", 2, True)
    for replies, reason in (
        ([{"content": "I guess 143."}], "turn 1: no tool was called"),
        ([{**call, "finish": "stop"}, {"content": "143"}], "turn 1: calls with finish 'stop'"),
        ([{"calls": [["tide", "{}"]]}, {"content": "143"}], "turn 1: tide was called, for which"),
        ([{"calls": [["water_level", "{]"]]}, {"content": "143"}], "arguments of water_level are not"),
    ):
        script(*replies)
        run = harness(*words)
        assert run.code == 1
        assert any(reason in each for each in run.report["reasons"]), run.report["reasons"]


def test_the_session_remembers_reasoning_only_in_the_rich_shape(
    harness: Harness, script: Script, tmp_path: Path
) -> None:
    script({"content": "Yes.", "reasoning": "Hm."})
    hashes = [
        harness("--mode", "chain", "--feedback-shape", shape).report["rows"][1]["request_md5"]
        for shape in ("rich", "plain")
    ]
    assert hashes[0] != hashes[1]


def test_a_server_that_already_runs_can_be_asked_but_proves_less(
    harness: Harness, tmp_path: Path, model: Path, port: int
) -> None:
    words = [sys.executable, str(SERVER), "serve", str(model), "127.0.0.1", str(port)]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as server:
        try:
            while get_json(Address("127.0.0.1", port), "/health", 1.0) is None:
                assert server.poll() is None
            run = harness(*one_turn(tmp_path), "--no-spawn")
            assert server.poll() is None
        finally:
            server.kill()
    assert (run.code, run.report["verdict"], run.proofs["own_server"]) == (3, "incomplete", "unproven")
    assert run.report["rows"][0]["content"] == GOOD


def test_show_config_prints_sources_and_starts_nothing(harness: Harness, script: Script) -> None:
    script(log="never")
    run = harness("--show-config", "--kv", "q8")
    assert (run.code, run.report) == (0, {})
    lines = [line.split(maxsplit=1) for line in run.out.splitlines()[1:]]
    shown = {line[0]: line[1] for line in lines if len(line) == 2}
    assert shown["kv"] == "q8  (explicit)"
    assert shown["max_tokens"] == "2048  (default)"
    assert shown["sampling.temperature"] == "0.0  (explicit: greedy)"
    assert shown["sampling.top_p"] == "not set  (explicit: greedy)"
    assert "idle_timeout_seconds = 0" in run.out


def test_a_registry_of_ones_own_gives_tag_and_sampling(harness: Harness, tmp_path: Path) -> None:
    entry = {
        **{"file": "tiny.gguf", "size_bytes": 1, "sha256": "0" * 64, "family": "llama", "arch_id": None},
        **{"quant": "q", "min_memory_gb": 1.0, "desc": "d", "license": "l"},
        **{"sources": [{"kind": "hf", "repo": "a/b", "file": "x"}], "recommended_settings": {"top_p": 0.5}},
    }
    path = tmp_path / "registry.json"
    path.write_text(json.dumps({"schema_version": 1, "models": {"tiny:1": entry}, "aliases": {}}))
    words = [*one_turn(tmp_path), "--registry", str(path)]
    run = harness(*words, "--sampling", "registry")
    assert run.err == ""
    resolved, sources = run.report["config"]["resolved"], run.report["config"]["sources"]
    assert (run.code, resolved["tag"], sources["tag"]) == (0, "tiny:1", "file name")
    assert (resolved["sampling.top_p"], sources["sampling.top_p"]) == (0.5, "registry")
    named = harness(*words, "--sampling", "registry", "--tag", "tiny:1")
    assert named.report["config"]["sources"]["tag"] == "explicit"
    hashes = {each.report["rows"][0]["request_md5"] for each in (run, named, harness(*words))}
    assert len(hashes) == 2


def test_the_server_sees_an_isolated_home(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIPFIRE_KV_MODE", "bf16")
    home = tmp_path / "home"
    run = harness(*one_turn(tmp_path), "--home", str(home))
    assert run.code == 0
    assert [path.name for path in (home / "models").iterdir()] == ["tiny.gguf"]
    assert not (tmp_path / "outer").exists()
    # the harness may use its own folder again, but no other one
    assert harness(*one_turn(tmp_path), "--home", str(home)).code == 0
    (home / "config.toml").write_text("[serve]\nport = 1\n")
    refused = harness(*one_turn(tmp_path), "--home", str(home))
    assert (refused.code, refused.report) == (2, {})
    assert "holds files that the harness did not make" in refused.err


def test_no_process_is_left(harness: Harness, script: Script, tmp_path: Path) -> None:
    script(child=str(tmp_path / "child"))
    run = harness(*one_turn(tmp_path))
    assert run.proofs["stopped"] == "ok"
    child = int((tmp_path / "child").read_text())
    assert is_over(child)


def test_a_signal_ends_the_server_too(script: Script, tmp_path: Path, model: Path, port: int) -> None:
    child = tmp_path / "child"
    # never warm, so that the harness waits
    script(child=str(child), first_loads=10**6)
    words = ["--model", str(model), "--port", str(port), "--server-command", f"{sys.executable} {SERVER}"]
    with subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "serve_harness.py"), *words], stdout=subprocess.DEVNULL
    ) as run:
        while not (child.exists() and child.read_text()):
            assert run.poll() is None
            time.sleep(0.02)
        run.terminate()
        assert run.wait(timeout=20) == 128 + signal.SIGTERM
    assert is_over(int(child.read_text()))


def test_refusals_are_one_line_and_code_2(harness: Harness, tmp_path: Path) -> None:
    for words, text in (
        (["--draft", "x"], "--draft is not available in this version"),
        (["--thinking", "med", "--max-tokens", "180"], "not above the thinking cap of 2048"),
        (["--compare-transcript", str(tmp_path / "none.json")], "cannot be read as a report"),
        (["--sampling", "hot"], "--sampling 'hot' is not known"),
        (["--tag", "no:model"], "unknown model"),
        (["--out", "."], "--out: . cannot be written"),
        (["--out", str(Path(__file__) / "new" / "r.json")], "cannot be written: Not a directory"),
        (["--serve-log", os.devnull], "is no file"),
    ):
        run = harness(*words)
        assert (run.code, run.report) == (2, {})
        assert run.err.startswith("serve_harness: ")
        assert text in run.err
        assert run.err.count("\n") == 1


@pytest.mark.parametrize(
    ("redirection", "code"), [("| head -n 1", 3), (">/dev/full", 3), (">&-", 0), ("2>&-", 0)]
)
def test_output_that_cannot_be_written_is_no_verdict(redirection: str, code: int) -> None:
    script = ROOT / "scripts" / "serve_harness.py"
    line = f'{{ "$0" {script} --self-test; echo "$?" >&3; }} {redirection}'
    done = subprocess.run(
        ["/bin/bash", "-c", f"exec 3>&1; {line}", sys.executable], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == str(code)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == (code == 3)


def test_self_test_passes_and_a_broken_detector_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    assert self_test(lines.append) == 0
    assert lines[-1] == "self-test: 8 of 8 checks passed"
    deaf = tuple(Detector(each.name, lambda trace: OK) for each in detectors_check.DETECTORS)
    monkeypatch.setattr(detectors_check.faults, "__defaults__", (deaf,))
    monkeypatch.setattr("hipfire.validate.harness_turns.leaked_markers", lambda text: ())
    assert self_test(lines.append) == 1
    assert any("special_leak did not fail on a planted fault" in line for line in lines)
    assert any("'shows' did not fire" in line for line in lines)
