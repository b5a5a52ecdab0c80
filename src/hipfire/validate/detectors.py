"""The detectors of a recorded generation: what they are given, what they say, and the report of all.

A trace is what one generation did: tokens as they were committed, pieces of text as they were shown, and
the end. Each detector is a pure function of a trace and never changes a generation. The rules are in
detectors_tokens.py and detectors_text.py; this file does not know any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "skip", "fired"]
Severity = Literal["warn", "fail"]


@dataclass(frozen=True, slots=True)
class Committed:
    """A token that the model chose, end tokens included; `t_ms` counts from the request."""

    token: int
    t_ms: float


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of visible text. `synthetic` marks text that the engine added itself."""

    text: str
    t_ms: float
    synthetic: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """One finished generation: its events in order.

    `end_ids` are the tokens that end a turn. `think_budget` is the most tokens of an open thinking span
    (None: not judged). `judge_steps` asks for the times between tokens to be judged, which means something
    on a quiet machine only.
    """

    events: tuple[Committed | Text, ...]
    end_ids: frozenset[int] = frozenset()
    think_budget: int | None = None
    judge_steps: bool = False

    def tokens(self) -> list[int]:
        """Return the committed tokens before the first end token."""
        found: list[int] = []
        for event in self.events:
            if isinstance(event, Committed):
                if event.token in self.end_ids:
                    break
                found.append(event.token)
        return found

    def visible(self) -> str:
        """Return the model's own visible text."""
        return "".join(event.text for event in self.events if isinstance(event, Text) and not event.synthetic)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a detector says: ok, not applicable (`detail` says why), or fired."""

    status: Status
    severity: Severity | None = None
    detail: str = ""


OK = Verdict("ok")
Rule = Callable[[Trace], Verdict]


@dataclass(frozen=True, slots=True)
class Detector:
    """A rule with its name."""

    name: str
    rule: Rule


def skip(reason: str) -> Verdict:
    """Return that a detector does not apply."""
    return Verdict("skip", detail=reason)


def warn(detail: str) -> Verdict:
    """Return a sign that a person should look."""
    return Verdict("fired", "warn", detail)


def fail(detail: str) -> Verdict:
    """Return a sign that the reply is broken."""
    return Verdict("fired", "fail", detail)


def run_detectors(trace: Trace, detectors: Sequence[Detector]) -> dict[str, Any]:
    """Return the report of all detectors: `rows`, the number of `hard_fails` and `soft_warns`, `overall`."""
    verdicts = [(detector.name, detector.rule(trace)) for detector in detectors]
    fails = sum(verdict.severity == "fail" for _, verdict in verdicts)
    warns = sum(verdict.severity == "warn" for _, verdict in verdicts)
    return {
        "rows": [
            {"name": name, "status": each.status, "severity": each.severity, "detail": each.detail}
            for name, each in verdicts
        ],
        "hard_fails": fails,
        "soft_warns": warns,
        "overall": "FAIL" if fails else "WARN" if warns else "OK",
    }
