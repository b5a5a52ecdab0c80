"""Counters, gauges and histograms of a server, and their Prometheus text.

A value that was not measured is not recorded, rather than as zero. This file reads no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from hipfire.server.reply import TurnTrace

BUCKETS = (10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# turns whose speed GET /stats averages
RECENT = 16

_HELP = {
    "hipfire_requests_total": ("counter", "Turns that were asked for."),
    "hipfire_requests_failed_total": ("counter", "Turns that ended with an error."),
    "hipfire_requests_aborted_total": ("counter", "Turns whose client left or cancelled."),
    "hipfire_admission_rejected_total": ("counter", "Turns refused because the queue was full."),
    "hipfire_prompt_tokens_total": ("counter", "Tokens of prompts."),
    "hipfire_cached_tokens_total": ("counter", "Tokens of prompts that were not computed again."),
    "hipfire_completion_tokens_total": ("counter", "Tokens of replies."),
    "hipfire_queue_depth": ("gauge", "Turns that wait."),
    "hipfire_queue_capacity": ("gauge", "Turns that may wait; 0 is no limit."),
    "hipfire_turns_running": ("gauge", "Turns that the engine has."),
    "hipfire_uptime_seconds": ("gauge", "Seconds since the start."),
    "hipfire_model_loaded": ("gauge", "1 if a model is in memory."),
    "hipfire_ttft_milliseconds": ("histogram", "Time to the first piece of a reply."),
    "hipfire_request_latency_milliseconds": ("histogram", "Time to the end of a reply."),
    "hipfire_decode_tokens_per_second": ("histogram", "Speed of writing replies."),
    "hipfire_prefill_tokens_per_second": ("histogram", "Speed of reading prompts."),
}


@dataclass
class Histogram:
    """Counts of values by upper bound, as Prometheus counts: a bucket holds everything up to its bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        """Record one value."""
        self.counts[bisect_left(BUCKETS, value)] += 1
        self.total += value

    def lines(self, name: str) -> list[str]:
        """Return the histogram's lines of text."""
        made, below = [], 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            below += count
            made.append(f'{name}_bucket{{le="{bound}"}} {below}')
        return [*made, f"{name}_sum {self.total:.6g}", f"{name}_count {below}"]


class Metrics:
    """What a server has done since its start."""

    def __init__(self) -> None:
        self.counters = {name: 0 for name, (kind, _) in _HELP.items() if kind == "counter"}
        self.histograms = {name: Histogram() for name, (kind, _) in _HELP.items() if kind == "histogram"}
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.served = 0

    def asked(self) -> None:
        """Count a turn that was asked for."""
        self.counters["hipfire_requests_total"] += 1

    def failed(self) -> None:
        """Count a turn that never reached the engine."""
        self.counters["hipfire_requests_failed_total"] += 1

    def abandoned(self) -> None:
        """Count a turn whose client left before the engine had it."""
        self.counters["hipfire_requests_aborted_total"] += 1

    def rejected(self) -> None:
        """Count a turn for which the queue had no place."""
        self.counters["hipfire_admission_rejected_total"] += 1

    def ended(self, trace: TurnTrace) -> None:
        """Record a turn that the engine has ended."""
        if trace.error is not None:
            self.failed()
        elif not trace.committed:
            self.abandoned()
        if trace.first is not None:
            self._observe("hipfire_ttft_milliseconds", 1000 * (trace.first - trace.opened))
        result = trace.result
        if result is None or trace.last is None:
            return
        # an engine may die while it commits: such a turn has failed
        self.served += trace.committed and trace.error is None
        self._observe("hipfire_request_latency_milliseconds", 1000 * (trace.last - trace.opened))
        self._observe("hipfire_decode_tokens_per_second", result.timings.decode_tok_s)
        self._observe("hipfire_prefill_tokens_per_second", result.timings.prefill_tok_s)
        if result.timings.decode_tok_s > 0:
            self._recent.append(result.timings.decode_tok_s)
        for kind in ("prompt", "cached", "completion"):
            self.counters[f"hipfire_{kind}_tokens_total"] += getattr(result.usage, kind)

    def recent_speed(self) -> float:
        """Return the mean speed of the last turns in tokens per second, 0 if there were none."""
        return sum(self._recent) / len(self._recent) if self._recent else 0.0

    def text(self, gauges: dict[str, float]) -> str:
        """Return everything in Prometheus' text format; `gauges` holds the current values."""
        lines: list[str] = []
        for name, (kind, meaning) in _HELP.items():
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
            if kind == "histogram":
                lines += self.histograms[name].lines(name)
            else:
                value = self.counters[name] if kind == "counter" else gauges[name]
                lines.append(f"{name} {value:.10g}")
        return "\n".join(lines) + "\n"

    def _observe(self, name: str, value: float) -> None:
        if value > 0:
            self.histograms[name].observe(value)
