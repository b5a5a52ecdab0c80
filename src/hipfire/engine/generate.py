"""One sequence from prompt to completion: prefill, then draw, decode and stop, token by token.

Text is yielded as soon as no stop string can still take it back. The caller may stop iterating at any time;
nothing of this generation outlives it but the cache rows of its slot, which the next one overwrites.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator

import torch

from hipfire.base.errors import ValidationError
from hipfire.engine.request import (
    Completion,
    FinishReason,
    Request,
    Timings,
    TokenLogprob,
    TopToken,
)
from hipfire.runtime.load import LoadedModel
from hipfire.runtime.sampler import SampledToken, Sampler
from hipfire.runtime.waiting import fetch
from hipfire.text.stops import StopMatcher


class Generation:
    """A running generation; iterate to get text pieces, then read `completion`.

    `continues` tells that the reply continues the prompt's text, so its first space counts; a chat turn
    begins a text of its own. Raises ContextLengthError or ValidationError when constructed, before any
    work.
    """

    def __init__(
        self, loaded: LoadedModel, request: Request, slot: int = 0, *, continues: bool = True
    ) -> None:
        self._loaded = loaded
        self._request = request
        self._slot = slot
        self._budget = request.token_budget(loaded.max_seq, loaded.config.sizes.max_positions)
        tokenizer = loaded.tokenizer
        self._sampler = Sampler(
            request.sampling,
            loaded.config.sizes.vocab_size,
            generation=request.generation,
            end_ids=loaded.end_ids,
            blocked_ids=tokenizer.surplus_ids,
        )
        self._detokenizer = tokenizer.detokenizer(at_start=not continues)
        self._stops = StopMatcher(request.generation.stop)
        self._tokens: list[int] = []
        self._history = list(request.prompt)
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._completion: Completion | None = None
        self._started = False
        self._prefill = self._decoding = 0.0

    @property
    def completion(self) -> Completion | None:
        """Return the finished reply, or None while it is running or if it was abandoned."""
        return self._completion

    def __iter__(self) -> Generator[str, None, None]:
        """Run the generation, yielding non-empty pieces of text; it can be run once."""
        if self._started:
            raise ValidationError("this generation has already run", hint="start a new one")
        self._started = True
        runner = self._loaded.runner
        runner.claim(self._slot, self)
        began = time.perf_counter()
        logits = fetch(runner.prefill(self._slot, self._request.prompt))
        self._prefill = time.perf_counter() - began
        reason: FinishReason = "length"
        while len(self._tokens) < self._budget:
            token = self._draw(logits)
            if token in self._loaded.end_ids and not self._request.generation.ignore_eos:
                reason = "stop"
                break
            result = self._stops.push(self._detokenizer.push(token))
            yield from self._emit(result.text)
            if result.matched is not None:
                reason = "stop"
                break
            if len(self._tokens) < self._budget:
                logits = self._decode(token)
        yield from self._finish(reason)

    def _decode(self, token: int) -> torch.Tensor:
        runner = self._loaded.runner
        runner.hold(self._slot, self)
        # only the engine's own work counts: what the reader does between pieces does not
        began = time.perf_counter()
        logits = fetch(runner.decode(self._slot, token, len(self._history) - 1))
        self._decoding += time.perf_counter() - began
        return logits

    def _finish(self, reason: FinishReason) -> Iterator[str]:
        if self._stops.matched is None:
            yield from self._emit(self._stops.push(self._detokenizer.flush()).text)
            last = self._stops.flush()
            yield from self._emit(last.text)
            reason = "stop" if last.matched is not None else reason
        self._completion = Completion(
            text="".join(self._pieces),
            tokens=tuple(self._tokens),
            prompt_tokens=len(self._request.prompt),
            finish_reason=reason,
            stop=self._stops.matched,
            seed=self._sampler.seed,
            timings=Timings(self._prefill, self._decoding, max(0, len(self._tokens) - 1)),
            logprobs=tuple(self._logprobs),
        )

    def _draw(self, logits: torch.Tensor) -> int:
        began = time.perf_counter()
        sampled = self._sampler.sample(logits, self._history)
        if self._tokens:
            self._decoding += time.perf_counter() - began
        wanted = self._request.generation.top_logprobs
        if wanted is not None:
            self._logprobs.append(self._scored(sampled, logits, wanted))
        self._tokens.append(sampled.id)
        self._history.append(sampled.id)
        return sampled.id

    def _scored(self, sampled: SampledToken, logits: torch.Tensor, wanted: int) -> TokenLogprob:
        top = self._sampler.top_logprobs(logits, wanted)
        return TokenLogprob(
            sampled.id,
            sampled.logprob or 0.0,
            tuple(TopToken(candidate.id, candidate.logprob or 0.0) for candidate in top),
        )

    def _emit(self, text: str) -> Iterator[str]:
        if text:
            self._pieces.append(text)
            yield text
