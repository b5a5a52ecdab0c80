"""How much the engine takes on: plain numbers, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from hipfire.base.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """How much the core takes on, and what stands in for what neither a request nor the model says.

    `max_queue` turns wait at most, each for `queue_timeout_s` seconds; a ready turn waits `commit_timeout_s`
    for its commit. Prompts are read `prefill_chunk` tokens at a time, at most as many as the model was
    loaded for; None means that many. `default_max_tokens` is cut to what the context holds; None means until
    it is full. `state_budget` is the most bytes of checkpoints of recurrent layers, of which one is taken
    every `state_interval` tokens of a prompt.
    """

    max_queue: int = 64
    queue_timeout_s: float = 600.0
    prefill_chunk: int | None = None
    commit_timeout_s: float = 30.0
    default_sampling: SamplingParams = field(default_factory=SamplingParams)
    default_max_tokens: int | None = None
    state_budget: int = 2 << 30
    state_interval: int = 4096
