"""A scripted model does what models do wrong: each flag of the harness fires, and only where it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness_kit import Harness, Script, one_turn


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({"content": " \n "}, "turn 1: empty"),
        ({"content": "and on " * 90}, "turn 1: attractor, distinct_share 0.016 in first_128"),
        (
            {"content": " ".join(f"w{index % 47}" for index in range(600))},
            "turn 1: attractor, repeated_trigram_share 1.000 in second_half",
        ),
        ({"content": "It is the wind."}, "turn 1: missing 'moon'"),
        ({"content": "It is the wind.", "reasoning": "The moon?"}, "turn 1: missing 'moon'"),
        ({"content": "The moon.<|im_end|>"}, "turn 1: shows <|im_end|>"),
        ({"content": "The moon.", "calls": [["", "{}"]]}, "turn 1: a call without a name"),
    ],
)
def test_a_degenerate_reply_fails(
    harness: Harness, script: Script, tmp_path: Path, reply: dict[str, Any], reason: str
) -> None:
    script(reply)
    expect = ["moon"] if "missing" in reason else []
    run = harness(*one_turn(tmp_path, expect=expect))
    assert (run.code, run.report["verdict"]) == (1, "fail")
    assert run.report["reasons"] == [reason]


def test_a_one_word_answer_is_healthy(harness: Harness, script: Script, tmp_path: Path) -> None:
    script({"content": "Moon"})
    run = harness(*one_turn(tmp_path, expect=["moon"]))
    loop = run.report["rows"][0]["attractor"]
    assert (run.code, loop["fired"], loop["min_window_skipped"]) == (0, False, True)
    assert "replies too short to be judged for loops: 1" in run.report["nonclaims"]


def test_a_reply_cut_at_the_cap_is_seen_but_not_completed(
    harness: Harness, script: Script, tmp_path: Path
) -> None:
    script({"content": "The moon pulls and", "finish": "length"})
    run = harness(*one_turn(tmp_path))
    assert (run.code, run.report["totals"]["runaway"], run.report["totals"]["completed"]) == (0, 1, 0)
    assert "replies cut at max_tokens, seen but not completed: 1" in run.report["nonclaims"]
    run = harness(*one_turn(tmp_path), "--fail-on", "empty,attractor,runaway")
    assert (run.code, run.report["reasons"]) == (1, ["turn 1: runaway"])


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({"status": 503}, "turn 2: status 503: scripted refusal"),
        ({"content": "Half a", "stream_error": "engine died"}, "error in the stream: engine died"),
        ({"content": "Half a", "cut": True}, "turn 2: the stream ended without [DONE]"),
        ({"content": "Yes.", "usage": False}, "turn 2: the counts of tokens are missing"),
    ],
)
def test_a_broken_turn_makes_a_chain_incomplete_even_if_another_one_fails(
    harness: Harness, script: Script, reply: dict[str, Any], reason: str
) -> None:
    script({"content": "and on " * 90}, reply, {"content": "Yes."})
    run = harness("--mode", "chain")
    assert (run.code, run.report["verdict"]) == (3, "incomplete")
    assert any(reason in each for each in run.report["reasons"])
    assert any("attractor" in each for each in run.report["reasons"])
    if "usage" not in reply:
        assert "2 of 5 turns were run" in run.report["reasons"]


def test_a_setting_that_was_not_honoured_fails(harness: Harness, script: Script, tmp_path: Path) -> None:
    script(stats={"kv_mode": "f32"})
    run = harness(*one_turn(tmp_path), "--kv", "q8")
    assert (run.code, run.proofs["kv"]) == (1, "failed")
    assert run.evidence["kv"] == "q8 was asked for, the server uses f32"


def test_settings_that_nobody_can_see_leave_a_run_incomplete(
    harness: Harness, script: Script, tmp_path: Path
) -> None:
    script(stats={"max_seq": None})
    run = harness(*one_turn(tmp_path), "--max-seq", "4096")
    assert (run.code, run.proofs["max_seq"]) == (3, "unproven")


def test_a_failure_in_the_log_of_this_attempt_fails_and_an_older_one_does_not(
    harness: Harness, script: Script, tmp_path: Path
) -> None:
    log = tmp_path / "serve.log"
    log.write_text("Traceback (most recent call last):\n")
    assert harness(*one_turn(tmp_path), "--serve-log", str(log)).code == 0
    script(log="out of memory")
    run = harness(*one_turn(tmp_path), "--serve-log", str(log), "--serve-warm-timeout-secs", "5")
    assert (run.code, run.report["verdict"]) == (3, "incomplete")
    assert "the log says: out of memory" in run.report["aborted"]


def test_a_source_that_changes_during_the_run_fails(harness: Harness, script: Script, tmp_path: Path) -> None:
    script(edits=str(tmp_path / "tree" / "a.py"))
    run = harness(*one_turn(tmp_path))
    assert (run.code, run.proofs["source"]) == (1, "failed")
