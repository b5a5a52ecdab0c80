"""Detectors over visible text: nothing said, markup that leaked, thinking and tool calls out of shape."""

from __future__ import annotations

import json
import re
from typing import Final

from hipfire.validate.detect import leaked_markers
from hipfire.validate.detectors import OK, Committed, Detector, Trace, Verdict, fail, skip, warn

OPEN_THINK: Final = "<think>"
CLOSE_THINK: Final = "</think>"
OPEN_CALL: Final = "<tool_call>"
CLOSE_CALL: Final = "</tool_call>"
# thinking and tool markup have detectors of their own here
_SHAPED: Final = frozenset({OPEN_THINK, CLOSE_THINK, OPEN_CALL, CLOSE_CALL})
_EMPTY_THINK: Final = re.compile(r"<think>\s*</think>")
_XML_CALL: Final = re.compile(r"<function=[^>\s]+>.*</function>", re.DOTALL)


def eos_immediate(trace: Trace) -> Verdict:
    """Fail a reply that ended before the model said anything."""
    return OK if trace.visible() else fail("no visible text")


def whitespace_only(trace: Trace) -> Verdict:
    """Fail a reply of white space."""
    text = trace.visible()
    if not text:
        return skip("no visible text")
    return OK if text.strip() else fail(f"{len(text)} characters of white space")


def special_leak(trace: Trace) -> Verdict:
    """Fail a reply that shows a control token."""
    found = [marker for marker in leaked_markers(trace.visible()) if marker not in _SHAPED]
    return fail("shows " + " ".join(found)) if found else OK


def think_empty(trace: Trace) -> Verdict:
    """Warn of a thinking span with nothing in it."""
    return warn("an empty thinking span") if _EMPTY_THINK.search(trace.visible()) else OK


def think_stall(trace: Trace) -> Verdict:
    """Fail a thinking span that is not closed within the budget; warn of one that is open at the end."""
    if trace.think_budget is None:
        return skip("not asked for")
    text, inside, spent = "", False, 0
    for event in trace.events:
        if isinstance(event, Committed):
            spent += inside
            if spent > trace.think_budget:
                return fail(f"open after {spent} tokens, the budget is {trace.think_budget}")
            continue
        text += event.text
        was, inside = inside, text.rfind(OPEN_THINK) > text.rfind(CLOSE_THINK)
        if was and not inside:
            spent = 0
    return warn("a thinking span is open at the end") if inside else OK


def toolcall_shape(trace: Trace) -> Verdict:
    """Fail a tool call that cannot be read; warn of one inside a thinking span."""
    text = trace.visible()
    opened = text.find(OPEN_CALL)
    if opened < 0:
        return skip("no tool call")
    inside_thinking = False
    while opened >= 0:
        closed = text.find(CLOSE_CALL, opened)
        body = text[opened + len(OPEN_CALL) : closed if closed >= 0 else len(text)]
        if (fault := _call_fault(body, closed=closed >= 0)) is not None:
            return fail(fault)
        inside_thinking |= text.rfind(OPEN_THINK, 0, opened) > text.rfind(CLOSE_THINK, 0, opened)
        opened = text.find(OPEN_CALL, closed)
    return warn("a tool call inside a thinking span") if inside_thinking else OK


def _call_fault(body: str, *, closed: bool) -> str | None:
    """Return what is wrong with the text between the tags of a call, or None."""
    if OPEN_CALL in body:
        return "an opener within a call"
    if not closed:
        return "a call is not closed"
    if _XML_CALL.fullmatch(body.strip()):
        return None
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return "a call is not JSON"
    missing = [name for name in ("name", "arguments") if not isinstance(call, dict) or name not in call]
    return f"a call without {' and '.join(missing)}" if missing else None


TEXT_DETECTORS: Final = (
    Detector("eos_immediate", eos_immediate),
    Detector("whitespace_only", whitespace_only),
    Detector("special_leak", special_leak),
    Detector("think_empty", think_empty),
    Detector("think_stall", think_stall),
    Detector("toolcall_shape", toolcall_shape),
)
