"""Detectors over committed tokens and their times: loops, and steps that took far too long."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from statistics import median
from typing import Final

from hipfire.validate.detect import (
    FIRST_DISTINCT,
    LAST_DISTINCT,
    TOP_SHARE,
    WINDOW,
    distinct_share,
    top_share,
    top_trigram_density,
)
from hipfire.validate.detectors import OK, Committed, Detector, Trace, Verdict, fail, skip, warn

MIN_TOKENS: Final = 16
SOFT_FIRST_DISTINCT: Final = 0.30
SOFT_LAST_DISTINCT: Final = 0.40
SOFT_TOP_SHARE: Final = 0.40
DENSITY: Final = 0.50
DENSITY_MIN_TOKENS: Final = 32
LOOP_GRAM: Final = 4
LOOP_COUNT: Final = 8
LOOP_WINDOW: Final = 256
SPIKE_FACTOR: Final = 4.0
SPIKE_HISTORY: Final = 32
SPIKE_MIN_STEPS: Final = 8
NO_TOKENS: Final = "no token ids were recorded"


def attractor_first_128(trace: Trace) -> Verdict:
    """Judge the first 128 tokens before the end of the turn."""
    return _judge_window(trace.tokens()[:WINDOW], FIRST_DISTINCT, SOFT_FIRST_DISTINCT)


def attractor_last_128(trace: Trace) -> Verdict:
    """Judge the last 128 tokens before the end of the turn."""
    return _judge_window(trace.tokens()[-WINDOW:], LAST_DISTINCT, SOFT_LAST_DISTINCT)


def ngram_density(trace: Trace) -> Verdict:
    """Warn of one run of three tokens that fills the second half; only loops of one or two tokens do."""
    tokens = trace.tokens()
    if len(tokens) < DENSITY_MIN_TOKENS:
        return skip(f"{len(tokens)} tokens, {DENSITY_MIN_TOKENS} are needed" if tokens else NO_TOKENS)
    density = top_trigram_density(tokens[len(tokens) // 2 :])
    return warn(f"density {density:.3f} > {DENSITY:g}") if density > DENSITY else OK


def loop_guard_mirror(trace: Trace) -> Verdict:
    """Warn of four tokens in a row that come again and again within the last ones."""
    tokens = trace.tokens()[-LOOP_WINDOW:]
    if len(tokens) < MIN_TOKENS:
        return skip(f"{len(tokens)} tokens, {MIN_TOKENS} are needed" if tokens else NO_TOKENS)
    runs = zip(*(tokens[offset:] for offset in range(LOOP_GRAM)), strict=False)
    run, count = Counter(runs).most_common(1)[0]
    return warn(f"{list(run)} occurs {count} times") if count >= LOOP_COUNT else OK


def step_time_spike(trace: Trace) -> Verdict:
    """Warn of a step far above the median of those before it."""
    if not trace.judge_steps:
        return skip("not asked for")
    times = [event.t_ms for event in trace.events if isinstance(event, Committed)]
    steps = [after - before for before, after in pairwise(times)]
    if len(steps) <= SPIKE_MIN_STEPS:
        return skip(f"{len(steps)} steps, more than {SPIKE_MIN_STEPS} are needed")
    for index in range(SPIKE_MIN_STEPS, len(steps)):
        usual = median(steps[max(0, index - SPIKE_HISTORY) : index])
        if steps[index] > SPIKE_FACTOR * usual:
            return warn(f"step {index} took {steps[index]:.1f} ms, the median is {usual:.1f} ms")
    return OK


def _judge_window(window: list[int], hard_distinct: float, soft_distinct: float) -> Verdict:
    if len(window) < MIN_TOKENS:
        return skip(f"{len(window)} tokens, {MIN_TOKENS} are needed" if window else NO_TOKENS)
    distinct, share = distinct_share(window), top_share(window)
    detail = f"distinct {distinct:.3f}, commonest {share:.3f}"
    if distinct < hard_distinct or share > TOP_SHARE:
        return fail(detail)
    return warn(detail) if distinct < soft_distinct or share > SOFT_TOP_SHARE else OK


TOKEN_DETECTORS: Final = (
    Detector("attractor_first_128", attractor_first_128),
    Detector("attractor_last_128", attractor_last_128),
    Detector("ngram_density", ngram_density),
    Detector("loop_guard_mirror", loop_guard_mirror),
    Detector("step_time_spike", step_time_spike),
)
