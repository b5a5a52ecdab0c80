"""What goes into a generation and what comes out of it: plain data, no tensors.

This file knows nothing about models, schedulers or transports.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hipfire.base.errors import ContextLengthError, ValidationError
from hipfire.base.sampling import GenerationParams, SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids to continue, and how."""

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    generation: GenerationParams = field(default_factory=GenerationParams)

    def __post_init__(self) -> None:
        for token in self.prompt:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ValidationError(f"{token!r} is not a token id", hint="use ids from the tokenizer")

    def token_budget(self, max_seq: int, model_limit: int) -> int:
        """Return how many tokens may be generated in a context of `max_seq`; the model allows `model_limit`.

        Raises ValidationError for an empty prompt, ContextLengthError if prompt and reply do not fit.
        """
        if not self.prompt:
            raise ValidationError("the prompt has no tokens", hint="give some text")
        wanted = self.generation.max_tokens
        needed = len(self.prompt) + (wanted if wanted is not None else 1)
        if needed > max_seq:
            hint = "shorten the prompt or lower max_tokens"
            if needed <= model_limit:
                hint += ", or raise memory.max_seq"
            raise ContextLengthError(needed, max_seq, hint=hint)
        return max_seq - len(self.prompt) if wanted is None else wanted


@dataclass(frozen=True, slots=True)
class TopToken:
    """One candidate at a position, with its natural-log probability before any sampling filter."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """What was drawn at a position, and the most probable candidates there."""

    token: int
    logprob: float
    top: tuple[TopToken, ...]


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall times in seconds; `decode_tokens` are the tokens after the first."""

    prefill: float
    decode: float
    decode_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Return the decode rate, 0 where nothing was decoded after the first token."""
        return self.decode_tokens / self.decode if self.decode > 0 and self.decode_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished reply.

    `tokens` are all sampled ids, the end token included; `text` ends before a stop string. `seed` reproduces
    the draw. `logprobs` is empty unless they were asked for.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    stop: str | None
    seed: int
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()
