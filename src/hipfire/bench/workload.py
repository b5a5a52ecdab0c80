"""The tokens that a benchmark feeds: a real prompt, and synthetic texts that are the same in every run.

This file does not know clocks or runners.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hipfire.base.errors import ValidationError

if TYPE_CHECKING:
    from hipfire.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class Workload:
    """The ids of the real prompt, the ids that stand for text, and those that must never be drawn."""

    prompt: tuple[int, ...]
    ordinary: tuple[int, ...]
    blocked: tuple[int, ...]

    def synthetic(self, length: int, stream: int = 0) -> list[int]:
        """Return `length` ids of ordinary tokens: always the same ones, but others for every `stream`.

        A shorter text is the beginning of a longer one.
        """
        return random.Random(stream).choices(self.ordinary, k=length)


def make_workload(llm: LLM, prompt: str) -> Workload:
    """Return the workload of a model; the prompt goes through its chat template if it has one.

    Raises ValidationError for a prompt that is no valid text or has no tokens, and for a vocabulary that
    has nothing but control tokens.
    """
    loaded, tokenizer = llm.loaded, llm.loaded.tokenizer
    if loaded.templates is None:
        ids = tokenizer.encode(prompt)
    else:
        ids = llm.encode_chat([{"role": "user", "content": prompt}])
    if not ids:
        raise ValidationError("the prompt has no tokens", hint="give some text")
    surplus = set(tokenizer.surplus_ids)
    ordinary = tuple(
        number
        for number in range(tokenizer.vocab_size)
        if number not in surplus and not tokenizer.is_special(number)
    )
    if not ordinary:
        raise ValidationError("the model's vocabulary has no tokens of text", hint="use another model")
    return Workload(tuple(ids), ordinary, tokenizer.surplus_ids)
