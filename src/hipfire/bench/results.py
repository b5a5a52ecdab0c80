"""What a benchmark measured: wall times in seconds, and the rates that follow from them.

This file does not know how times are taken or how figures are shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hipfire.bench.summary import Summary, rates, summarize


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """Prefills of `tokens` synthetic tokens from an empty cache; one time per run."""

    tokens: int
    seconds: tuple[float, ...]

    @property
    def tok_s(self) -> Summary:
        """Return prompt tokens per second."""
        return rates(self.tokens, self.seconds)

    def to_json(self) -> dict[str, Any]:
        """Return times and rates as plain JSON values."""
        return {"tokens": self.tokens, "seconds": list(self.seconds), "tok_s": self.tok_s.to_json()}


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """`steps` decode steps of `batch` sequences after `ctx` tokens, without sampling; one time per run."""

    batch: int
    ctx: int
    steps: int
    seconds: tuple[float, ...]

    @property
    def tok_s(self) -> Summary:
        """Return tokens per second, those of all sequences together."""
        return rates(self.batch * self.steps, self.seconds)

    @property
    def ms_step(self) -> Summary:
        """Return milliseconds per step, in which every sequence gains one token."""
        return summarize([1000 * each / self.steps for each in self.seconds])

    def to_json(self) -> dict[str, Any]:
        """Return times and rates as plain JSON values."""
        return {
            "batch": self.batch,
            "ctx": self.ctx,
            "tokens": self.steps,
            "seconds": list(self.seconds),
            "tok_s": self.tok_s.to_json(),
            "ms_per_step": self.ms_step.to_json(),
        }


@dataclass(frozen=True, slots=True)
class ReplyTimes:
    """Seconds from the start of one reply: prompt read, first token drawn, last token drawn."""

    prefill: float
    first: float
    last: float


@dataclass(frozen=True, slots=True)
class ReplyResult:
    """Greedy replies of `tokens` tokens to the real prompt, the choice of each token included."""

    prompt_tokens: int
    tokens: int
    times: tuple[ReplyTimes, ...]

    @property
    def prefill_tok_s(self) -> Summary:
        """Return prompt tokens per second."""
        return rates(self.prompt_tokens, [each.prefill for each in self.times])

    @property
    def ttft_ms(self) -> Summary:
        """Return milliseconds to the first token."""
        return summarize([1000 * each.first for each in self.times])

    @property
    def decode_tok_s(self) -> Summary:
        """Return tokens per second after the first one."""
        return rates(self.tokens - 1, [each.last - each.first for each in self.times])

    @property
    def wall_tok_s(self) -> Summary:
        """Return tokens of the reply per second of the whole run, the prefill included."""
        return rates(self.tokens, [each.last for each in self.times])

    @property
    def decode_ms_token(self) -> Summary:
        """Return milliseconds per token after the first one."""
        return summarize([1000 * (each.last - each.first) / (self.tokens - 1) for each in self.times])

    def to_json(self) -> dict[str, Any]:
        """Return times and rates as plain JSON values."""
        return {
            "tokens": self.tokens,
            "seconds": [
                {"prefill": each.prefill, "first_token": each.first, "last_token": each.last}
                for each in self.times
            ],
            "prefill_tok_s": self.prefill_tok_s.to_json(),
            "ttft_ms": self.ttft_ms.to_json(),
            "decode_tok_s": self.decode_tok_s.to_json(),
            "wall_tok_s": self.wall_tok_s.to_json(),
            "decode_ms_per_token": self.decode_ms_token.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Measurements:
    """Everything that one benchmark measured."""

    prefill: tuple[PrefillResult, ...]
    decode: tuple[DecodeResult, ...]
    reply: ReplyResult

    def to_json(self) -> dict[str, Any]:
        """Return all times and rates as plain JSON values."""
        return {
            "prefill": [each.to_json() for each in self.prefill],
            "decode": [each.to_json() for each in self.decode],
            "reply": self.reply.to_json(),
        }
