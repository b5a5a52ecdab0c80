"""Detectors: every rule fires at its limit and not before, and sees the loops that it is there for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hipfire.validate.detect import (
    MIN_WORDS,
    attractor,
    distinct_share,
    leaked_markers,
    missing_texts,
    repeated_trigram_share,
    top_share,
    top_trigram_density,
    words_of,
)
from hipfire.validate.detectors import Committed, Detector, Text, Trace, Verdict, run_detectors
from hipfire.validate.detectors_check import CLEAN, DETECTORS, clean, faults, planted, trace_of
from hipfire.validate.detectors_text import think_empty, think_stall, toolcall_shape
from hipfire.validate.detectors_tokens import (
    attractor_first_128,
    attractor_last_128,
    loop_guard_mirror,
    ngram_density,
    step_time_spike,
)

VARIED = [f"w{index}" for index in range(400)]


def cycle(period: int, length: int = 512) -> list[int]:
    return [100 + index % period for index in range(length)]


@pytest.mark.parametrize("count", range(MIN_WORDS))
def test_a_short_answer_is_no_loop(count: int) -> None:
    judged = attractor(["Paris"] * count)
    assert (judged.fired, judged.words, judged.min_window_skipped) == (False, count, True)


def test_the_shortest_answer_that_is_judged() -> None:
    judged = attractor(["Paris"] * MIN_WORDS)
    assert (judged.fired, judged.rule, judged.window, judged.value) == (
        True,
        "distinct_share",
        "first_128",
        0.125,
    )


@pytest.mark.parametrize(
    ("words", "rule", "window", "value"),
    [
        # 19 of 128 words are 0.1484, 20 are 0.1563
        (VARIED[:18] + ["x"] * 110 + VARIED, "distinct_share", "first_128", 19 / 128),
        (VARIED[:63] + ["x"] * 65 + VARIED, "top_word_share", "first_128", 65 / 128),
        (VARIED + [f"v{index % 38}" for index in range(128)], "distinct_share", "last_128", 38 / 128),
        (VARIED + ["x"] * 65 + [f"v{index}" for index in range(63)], "top_word_share", "last_128", 65 / 128),
        (
            VARIED[:100] + [f"v{index % 47}" for index in range(400)],
            "repeated_trigram_share",
            "second_half",
            1,
        ),
    ],
)
def test_each_rule_fires_alone_and_says_so(words: list[str], rule: str, window: str, value: float) -> None:
    judged = attractor(words)
    assert (judged.fired, judged.rule, judged.window, judged.value) == (True, rule, window, value)


@pytest.mark.parametrize(
    "words",
    [
        VARIED[:19] + ["x"] * 64 + VARIED[:45] + VARIED,
        VARIED[:64] + ["x"] * 64 + VARIED,
        VARIED + ["x"] * 64 + [f"v{index}" for index in range(64)],
    ],
)
def test_just_within_the_limits_nothing_fires(words: list[str]) -> None:
    assert not attractor(words).fired


def test_a_cycle_of_47_words_is_seen_by_the_runs_of_three_only() -> None:
    words = [f"w{index % 47}" for index in range(1500)]
    assert distinct_share(words[:128]) == pytest.approx(47 / 128)
    assert top_share(words[:128]) < 0.5
    assert attractor(words).rule == "repeated_trigram_share"
    # the measure that is only named alike does not see it
    assert top_trigram_density(words) < 0.03


@pytest.mark.parametrize("text", ["!" * 256, "\u4f60\u597d" * 200, "Well, " + "=-" * 300, "0," * 128])
def test_a_loop_may_do_without_spaces(text: str) -> None:
    judged = attractor(text.split())
    assert (judged.fired, judged.rule, judged.window) == (True, "repeated_trigram_share", "longest_word")


@pytest.mark.parametrize(
    "text",
    [
        "-" * 100,
        "".join(map(str, range(200))),
        "".join(chr(0x4E00 + index * 7 % 900) for index in range(600)),
        "\n".join(f"| name{index} | {index * 3} | {index % 7}.5 |" for index in range(9)),
        "\n".join(f"| item{index} |" for index in range(60)),
    ],
)
def test_long_words_and_tables_are_no_loops(text: str) -> None:
    assert not attractor(text.split()).fired


@pytest.mark.parametrize("mark", ["|", "-", "!", "\U0001f600"])
def test_a_loop_of_marks_is_still_one(mark: str) -> None:
    assert attractor(["Here", "it", "is:", *[mark] * 60]).fired


@given(st.lists(st.sampled_from("abcdefghij"), max_size=60))
def test_shares_are_shares(words: list[str]) -> None:
    for share in (distinct_share, top_share, repeated_trigram_share, top_trigram_density):
        assert 0 <= share(words) <= 1
    density, runs = top_trigram_density(words), max(len(words) - 2, 1)
    # a run of three that occurs once is the commonest one, but is not repeated
    assert repeated_trigram_share(words) >= (density if density * runs > 1.5 else 0)


def test_words_are_those_of_reasoning_and_answer() -> None:
    assert words_of("so it\nis", " yes\t") == ["so", "it", "is", "yes"]


def test_missing_texts_ignore_case_and_keep_their_spelling() -> None:
    assert missing_texts(["PARIS", "Seine", "straße"], "paris and STRASSE") == ("Seine",)
    assert leaked_markers("a <|im_end|> b <think> <|im_end|>") == ("<|im_end|>", "<think>")
    assert leaked_markers("if a < b and <b>bold</b>") == ()


def test_every_detector_fires_on_its_planted_fault_and_none_on_a_clean_reply() -> None:
    assert faults() == []
    assert {each.detector for each in planted()} == {detector.name for detector in DETECTORS}
    assert run_detectors(clean(), DETECTORS)["overall"] == "OK"


def test_a_detector_that_cannot_fire_is_found() -> None:
    deaf = Detector("special_leak", lambda trace: Verdict("ok"))
    others = [each for each in DETECTORS if each.name != "special_leak"]
    assert faults([*others, deaf]) == ["special_leak did not fail on a planted fault"]
    assert faults(others) == ["special_leak did not fail on a planted fault"]
    new = Detector("new", lambda trace: Verdict("ok"))
    assert faults([*DETECTORS, new]) == ["new has no planted fault"]


@pytest.mark.parametrize(
    ("rule", "fails_to", "warns_to"),
    [(attractor_first_128, 19, 38), (attractor_last_128, 38, 51)],
)
def test_how_long_a_loop_the_windows_see(rule: object, fails_to: int, warns_to: int) -> None:
    assert callable(rule)
    for period in (1, 2, fails_to, fails_to + 1, warns_to, warns_to + 1):
        verdict = rule(trace_of(cycle(period), CLEAN))
        expected = "fail" if period <= fails_to else "warn" if period <= warns_to else None
        assert verdict.severity == expected, (period, verdict)


def test_how_long_a_loop_the_others_see() -> None:
    assert loop_guard_mirror(trace_of(cycle(36), CLEAN)).severity == "warn"
    assert loop_guard_mirror(trace_of(cycle(37), CLEAN)).severity is None
    assert ngram_density(trace_of(cycle(1), CLEAN)).severity == "warn"
    assert ngram_density(trace_of(cycle(3), CLEAN)).severity is None


def test_what_comes_after_the_end_of_the_turn_does_not_count() -> None:
    healthy = list(range(100, 300))
    trace = Trace(tuple(Committed(token, 0.0) for token in [*healthy, 2, *[5] * 200]), frozenset({2}))
    assert attractor_last_128(trace).status == "ok"
    assert attractor_last_128(Trace(trace.events)).severity == "fail"


def test_too_few_tokens_are_not_judged() -> None:
    assert attractor_first_128(trace_of([5] * 15, CLEAN)).detail == "15 tokens, 16 are needed"
    assert attractor_first_128(trace_of([5] * 16, CLEAN)).severity == "fail"
    assert attractor_first_128(trace_of([], CLEAN)).detail == "no token ids were recorded"
    assert ngram_density(trace_of([5] * 31, CLEAN)).status == "skip"


def test_synthetic_text_is_not_the_models() -> None:
    report = run_detectors(Trace((Text("<|im_end|>", 0.0, synthetic=True),)), DETECTORS)
    verdicts = {row["name"]: row["severity"] for row in report["rows"]}
    assert (verdicts["special_leak"], verdicts["eos_immediate"], report["hard_fails"]) == (None, "fail", 1)


def test_steps_are_compared_with_the_ones_before() -> None:
    times = [10.0 * index for index in range(12)]
    steady = tuple(Committed(index, time) for index, time in enumerate(times))
    assert step_time_spike(Trace(steady)).status == "skip"
    at_limit = (*steady, Committed(99, times[-1] + 40.0))
    assert step_time_spike(Trace(at_limit, judge_steps=True)).status == "ok"
    above = (*steady, Committed(99, times[-1] + 40.1))
    assert step_time_spike(Trace(above, judge_steps=True)).severity == "warn"


def test_thinking_is_timed_span_by_span() -> None:
    short: list[Committed | Text] = [Committed(token, 0.0) for token in range(6)]
    spans: tuple[Committed | Text, ...] = (Text("<think>", 0.0), *short, Text("</think>", 0.0)) * 2
    assert think_stall(Trace((*spans, Text("Yes.", 0.0)), think_budget=6)).status == "ok"
    assert think_stall(Trace(spans, think_budget=5)).severity == "fail"
    split = (Text("<thi", 0.0), Text("nk>", 0.0), *short, Text("</th", 0.0), Text("ink>", 0.0))
    assert think_stall(Trace(split, think_budget=5)).severity == "fail"
    assert think_stall(Trace(split, think_budget=6)).status == "ok"
    assert think_empty(trace_of([1], "<think> a </think>")).status == "ok"


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ('<tool_call>{"name": "now", "arguments": {}}</tool_call>', None),
        ("<tool_call><function=now><parameter=x>\n1\n</parameter></function></tool_call>", None),
        ('<tool_call>{"name": "a", "arguments": {}}</tool_call> <tool_call>{"name"</tool_call>', "fail"),
        ('<tool_call>["now"]</tool_call>', "fail"),
        ("<tool_call>" + "[" * 5000 + "</tool_call>", "fail"),
        ("no call", None),
    ],
)
def test_shapes_of_tool_calls(text: str, severity: str | None) -> None:
    assert toolcall_shape(trace_of([1], text)).severity == severity
