"""Runs steps of a model over its caches: prefill in chunks, decode, and whole-text logits for evaluation.

The runner knows token ids and slots; it does not know text, sampling or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hipfire.base.errors import ContextLengthError, ValidationError
from hipfire.cache.kv import KvCache
from hipfire.kernels.launch import Launcher
from hipfire.layers.context import Segment, StepContext
from hipfire.models.family import Model

PREFILL_CHUNK = 256


class Runner:
    """A model with its cache; sequences live in the cache's slots."""

    def __init__(
        self, model: Model, cache: KvCache, launcher: Launcher | None = None, *, chunk: int = PREFILL_CHUNK
    ) -> None:
        if chunk < 1:
            raise ValidationError(f"a prefill chunk of {chunk} tokens is not possible", hint="use 1 or more")
        self.model = model
        self.cache = cache
        self.launcher = launcher or Launcher()
        self.chunk = chunk
        self._owners: dict[int, object] = {}

    def claim(self, slot: int, owner: object) -> None:
        """Give a slot to `owner`; whoever held it before can no longer `hold` it."""
        if not 0 <= slot < self.cache.slots:
            raise ValidationError(f"slot {slot} does not exist: the cache has {self.cache.slots}")
        self._owners[slot] = owner

    def hold(self, slot: int, owner: object) -> None:
        """Raise ValidationError unless `owner` still holds the slot: its cache rows are another's now."""
        if self._owners.get(slot) is not owner:
            raise ValidationError(
                "a newer generation took over this one's cache",
                hint="finish one stream before starting the next",
            )

    @torch.inference_mode()
    def step(
        self, batch: Sequence[tuple[Segment, Sequence[int]]], *, every_row: bool = False
    ) -> torch.Tensor:
        """Run one step over a ragged batch of (segment, its tokens).

        Returns float32 logits [len(batch), vocab] of each segment's last token, or [T, vocab] of all tokens
        with `every_row`. Raises ContextLengthError before anything runs if a segment does not fit the cache.
        """
        for segment, tokens in batch:
            end = segment.start + segment.length
            if segment.length != len(tokens) or not tokens:
                raise ValidationError(f"a segment of {segment.length} tokens came with {len(tokens)}")
            if end > self.cache.max_seq:
                raise ContextLengthError(end, self.cache.max_seq, hint="raise memory.max_seq")
        ids = torch.tensor([token for _, tokens in batch for token in tokens])
        segments = [segment for segment, _ in batch]
        context = StepContext(self.launcher, self.cache, segments, ids.device)
        hidden = self.model(ids, context)
        if not every_row:
            hidden = hidden[context.last_rows()]
        return self.model.logits(hidden, context)

    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        start: int = 0,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Feed `tokens` at positions start.. of a slot, in chunks; returns the last token's logits [vocab].

        `progress` is called with the number of tokens done after every chunk; an exception from it ends the
        prefill between chunks.
        """
        end = start + len(tokens)
        if end > self.cache.max_seq:
            raise ContextLengthError(
                end, self.cache.max_seq, hint="raise memory.max_seq or shorten the prompt"
            )
        if not tokens:
            raise ValidationError("the prompt has no tokens", hint="give some text")
        logits = torch.empty(0)
        for begin in range(0, len(tokens), self.chunk):
            part = tokens[begin : begin + self.chunk]
            logits = self.step([(Segment(slot, start + begin, len(part)), part)])[0]
            if progress is not None:
                progress(begin + len(part))
        return logits

    def decode(self, slot: int, token: int, position: int) -> torch.Tensor:
        """Feed one token at `position` of a slot and return the next token's logits [vocab]."""
        return self.step([(Segment(slot, position, 1), (token,))])[0]

    def all_logits(self, slot: int, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits [T, vocab] at every position of a text that starts at position 0."""
        parts = []
        for begin in range(0, len(tokens), self.chunk):
            part = tokens[begin : begin + self.chunk]
            parts.append(self.step([(Segment(slot, begin, len(part)), part)], every_row=True))
        return torch.cat(parts)
