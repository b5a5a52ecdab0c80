"""Proof that the detectors still work: each must fire on a planted fault, and be quiet on a clean reply.

`planted()` has at least one payload per detector. A detector without one is itself a fault, since a
detector that never fired on a planted failure is not a detector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from hipfire.validate.detectors import Committed, Detector, Severity, Text, Trace
from hipfire.validate.detectors_text import TEXT_DETECTORS
from hipfire.validate.detectors_tokens import TOKEN_DETECTORS

DETECTORS: Final = (*TOKEN_DETECTORS, *TEXT_DETECTORS)
STEP_MS: Final = 10.0
END: Final = 2
CLEAN: Final = "The tide comes twice a day because the Earth turns under two bulges of water."


class Planted(NamedTuple):
    """A trace that makes one detector fire at one severity."""

    detector: str
    severity: Severity
    trace: Trace


def trace_of(tokens: Sequence[int], text: str, *, think_budget: int | None = None) -> Trace:
    """Return a trace of tokens at a steady pace, with the whole text after them."""
    committed = (Committed(token, STEP_MS * index) for index, token in enumerate(tokens, 1))
    shown = (Text(text, STEP_MS * len(tokens)),) if text else ()
    return Trace((*committed, *shown), frozenset({END}), think_budget, judge_steps=True)


def clean() -> Trace:
    """Return a healthy reply of 200 tokens."""
    return trace_of([100 + index * 7 % 199 for index in range(200)] + [END], CLEAN, think_budget=50)


def planted() -> Iterator[Planted]:
    """Yield the faults."""
    varied = list(range(1000, 1128))
    yield Planted("attractor_first_128", "fail", trace_of([5] * 100 + varied, CLEAN))
    yield Planted("attractor_first_128", "warn", trace_of([5] * 56 + varied, CLEAN))
    yield Planted("attractor_last_128", "fail", trace_of(varied + list(range(10, 47)) * 4, CLEAN))
    yield Planted("attractor_last_128", "warn", trace_of(varied + list(range(10, 55)) * 4, CLEAN))
    yield Planted("ngram_density", "warn", trace_of([*varied, *[9] * 128], CLEAN))
    yield Planted("loop_guard_mirror", "warn", trace_of(varied + [3, 4, 5, 6, 7] * 9, CLEAN))
    yield Planted("step_time_spike", "warn", _late_step())
    yield Planted("eos_immediate", "fail", trace_of([END], ""))
    yield Planted("whitespace_only", "fail", trace_of([8, END], " \n\t\n"))
    yield Planted("special_leak", "fail", trace_of([8, END], "Yes.<|im_start|>user"))
    yield Planted("think_empty", "warn", trace_of([8, END], "<think>\n\n</think>\nYes."))
    yield Planted("think_stall", "fail", _long_thought())
    yield Planted("think_stall", "warn", trace_of([8, END], "<think>So", think_budget=9))
    yield Planted("toolcall_shape", "fail", trace_of([8], "<tool_call><tool_call>{}</tool_call>"))
    yield Planted("toolcall_shape", "fail", trace_of([8], '<tool_call>{"name": </tool_call>'))
    yield Planted("toolcall_shape", "fail", trace_of([8], '<tool_call>{"name": "now"}</tool_call>'))
    yield Planted("toolcall_shape", "fail", trace_of([8], '<tool_call>{"name": "now", "arguments": {}}'))
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    yield Planted("toolcall_shape", "warn", trace_of([8], f"<think>{call}</think>"))


def faults(detectors: Sequence[Detector] = DETECTORS) -> list[str]:
    """Return what is wrong with these detectors, one line each; nothing if all work."""
    rules = {detector.name: detector.rule for detector in detectors}
    found = []
    tried = set()
    for name, severity, trace in planted():
        tried.add(name)
        verdict = rules[name](trace) if name in rules else None
        if verdict is None or verdict.severity != severity:
            found.append(f"{name} did not {severity} on a planted fault")
    found += [f"{name} has no planted fault" for name in rules if name not in tried]
    for name, rule in rules.items():
        verdict = rule(clean())
        if verdict.status == "fired":
            found.append(f"{name} fired on a clean reply: {verdict.detail}")
    return found


def _late_step() -> Trace:
    steady = [Committed(100 + index, STEP_MS * index) for index in range(20)]
    return Trace((*steady, Committed(200, STEP_MS * 19 + 41.0), Text(CLEAN, 300.0)), judge_steps=True)


def _long_thought() -> Trace:
    thought = [Committed(100 + index, STEP_MS * index) for index in range(12)]
    return Trace((Text("<think>", 0.0), *thought, Text("</think>Yes.", 200.0)), think_budget=10)
