"""The timed loops: prefill, decode and a whole reply, each run several times over one runner's slots.

Only the runner's own work, and in a reply the choice of each token, lies between two looks at the clock. What
was started on a GPU is waited for before the second one. This file does not know statistics, text, or how
figures are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from hipfire.base.sampling import SamplingParams
from hipfire.bench.plan import BenchPlan, DecodePoint
from hipfire.bench.results import DecodeResult, Measurements, PrefillResult, ReplyResult, ReplyTimes
from hipfire.bench.workload import Workload
from hipfire.layers.context import Segment
from hipfire.runtime.runner import Runner
from hipfire.runtime.sampler import Sampler
from hipfire.runtime.waiting import fetch, finish

Clock = Callable[[], float]
Result = TypeVar("Result")


def measure(
    runner: Runner,
    plan: BenchPlan,
    workload: Workload,
    *,
    clock: Clock = time.perf_counter,
    progress: Callable[[str], None] = lambda _: None,
) -> Measurements:
    """Measure everything in `plan` with a runner that nothing else uses.

    `clock` returns seconds. `progress` gets one line before each measurement, outside of any timed part.
    Raises ContextLengthError or ValidationError if the runner's cache is too small for the plan.
    """
    prefill, decode = [], []
    for length in plan.prefill:
        progress(f"prefill of {length} tokens")
        work = partial(time_prefill, runner, workload.synthetic(length), clock)
        prefill.append(PrefillResult(length, _repeated(plan, work)))
    for point in plan.decode:
        progress(f"{plan.tg} decode steps, context {point.ctx}, batch {point.batch}")
        rows = _contexts(runner, workload, point, plan.tg)
        work = partial(time_decode, runner, rows, point.ctx, clock)
        decode.append(DecodeResult(point.batch, point.ctx, plan.tg, _repeated(plan, work)))
    progress(f"prompt of {len(workload.prompt)} tokens, reply of {plan.max_tokens}")
    times = _repeated(plan, partial(time_reply, runner, workload, plan.max_tokens, clock))
    reply = ReplyResult(len(workload.prompt), plan.max_tokens, times)
    return Measurements(tuple(prefill), tuple(decode), reply)


def time_prefill(runner: Runner, tokens: Sequence[int], clock: Clock) -> float:
    """Return the seconds of one prefill of slot 0, whose former content is dropped."""
    began = clock()
    runner.prefill(0, tokens)
    finish(runner.site.device)
    return clock() - began


def time_decode(runner: Runner, rows: Sequence[Sequence[int]], ctx: int, clock: Clock) -> float:
    """Return the seconds of decoding `rows`, tokens of one length for each of the slots from 0 on.

    Every slot holds at least `ctx` tokens; the first step is at that position, and drops what lies beyond.
    """
    if len(rows) == 1:
        began = clock()
        for position, token in enumerate(rows[0], ctx):
            runner.decode(0, token, position)
        finish(runner.site.device)
        return clock() - began
    began = clock()
    for position, tokens in enumerate(zip(*rows, strict=True), ctx):
        runner.step([(Segment(slot, position, 1), (token,)) for slot, token in enumerate(tokens)])
    finish(runner.site.device)
    return clock() - began


def time_reply(runner: Runner, workload: Workload, length: int, clock: Clock) -> ReplyTimes:
    """Return the times of one greedy reply in slot 0; end tokens do not end it, so that it has `length`."""
    sampler = Sampler(SamplingParams(temperature=0.0), runner.model.vocab_size, blocked_ids=workload.blocked)
    history = list(workload.prompt)
    began = clock()
    logits = fetch(runner.prefill(0, workload.prompt))
    prefilled = clock()
    token = sampler.sample(logits, history).id
    first = clock()
    for _ in range(length - 1):
        history.append(token)
        logits = fetch(runner.decode(0, token, len(history) - 1))
        token = sampler.sample(logits, history).id
    return ReplyTimes(prefilled - began, first - began, clock() - began)


def _contexts(runner: Runner, workload: Workload, point: DecodePoint, steps: int) -> list[list[int]]:
    """Fill a slot for each sequence with its context; return the tokens that follow in each."""
    rows = []
    for slot in range(point.batch):
        text = workload.synthetic(point.ctx + steps, slot)
        if point.ctx:
            runner.prefill(slot, text[: point.ctx])
        rows.append(text[point.ctx :])
    finish(runner.site.device)
    return rows


def _repeated(plan: BenchPlan, work: Callable[[], Result]) -> tuple[Result, ...]:
    """Return what each counted run of `work` returned."""
    for _ in range(plan.warmups):
        work()
    return tuple(work() for _ in range(plan.runs))
