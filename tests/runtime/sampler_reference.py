"""A slow sampler in plain Python floats, written from the definition: the tests' measure of the real one."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Sequence

import torch

from hipfire.base.sampling import SamplingParams
from hipfire.runtime.sampler import Sampler

SIZES = [1, 31, 32_001, 40_001, 151_669, 262_144]
# a cut that falls closer than this to a token's border depends on the order of float additions
BORDER = 1e-9

EVERYTHING_ON = SamplingParams(
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    min_p=0.02,
    repeat_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.1,
    seed=11,
)


def random_logits(size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def penalized(logits: Sequence[float], params: SamplingParams, history: Sequence[int]) -> list[float]:
    values = list(logits)
    window = params.penalty_window
    recent = list(history) if window == -1 else list(history)[len(history) - min(window, len(history)) :]
    for token, count in Counter(recent).items():
        value = values[token]
        value = value / params.repeat_penalty if value > 0 else value * params.repeat_penalty
        values[token] = value - params.presence_penalty - params.frequency_penalty * count
    return values


def reference(
    logits: Sequence[float], params: SamplingParams, history: Sequence[int] = (), blocked: Sequence[int] = ()
) -> tuple[dict[int, float], float]:
    """Return id -> probability after all stages, and how close top_p and min_p came to a token's border."""
    masked = [-math.inf if i in set(blocked) else value for i, value in enumerate(logits)]
    values = penalized(masked, params, history)
    order = sorted((i for i in range(len(values)) if values[i] > -math.inf), key=lambda i: (-values[i], i))
    if params.greedy:
        return {order[0]: 1.0}, math.inf
    if params.top_k > 0:
        order = order[: params.top_k]
    peak = values[order[0]]
    weights = {i: math.exp((values[i] - peak) / params.temperature) for i in order}
    margin = math.inf
    if params.min_p > 0:
        margin = min(abs(weight - params.min_p) for weight in weights.values())
        order = [i for i in order if weights[i] >= params.min_p]
    if params.top_p < 1:
        total = math.fsum(weights[i] for i in order)
        sums = list(itertools.accumulate(weights[i] / total for i in order))
        margin = min([margin, *(abs(value - params.top_p) for value in sums[:-1])])
        order = order[: bisect.bisect_left(sums[:-1], params.top_p) + 1]
    total = math.fsum(weights[i] for i in order)
    return {i: weights[i] / total for i in order}, margin


def expected_tokens(probabilities: dict[int, float], shares: Sequence[float]) -> list[int | None]:
    """Return for each share the token whose stretch of the unit line holds it; None near a border."""
    ids = sorted(probabilities)
    ends = list(itertools.accumulate(probabilities[i] for i in ids))
    tokens: list[int | None] = []
    for share in shares:
        place = min(bisect.bisect_right(ends, share), len(ids) - 1)
        on_border = min(abs(end - share) for end in ends[max(0, place - 1) : place + 1]) < BORDER
        tokens.append(None if on_border else ids[place])
    return tokens


def draws(sampler: Sampler, logits: torch.Tensor, count: int, history: Sequence[int] = ()) -> list[int]:
    return [sampler.sample(logits, history).id for _ in range(count)]


def chi_square(counts: Counter[int], probabilities: dict[int, float]) -> float:
    total = sum(counts.values())
    return sum((counts[i] - total * p) ** 2 / (total * p) for i, p in probabilities.items())
