"""A model that recites a script, so that tests of the loop around a model know every token in advance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hipfire.base.types import CacheSpec, TextAssets
from hipfire.cache.kv import KvCache, kv_mode
from hipfire.layers.context import StepContext
from hipfire.models.sizes import Sizes
from hipfire.runtime.admission import MemoryPlan
from hipfire.runtime.load import LoadedModel
from hipfire.runtime.runner import Runner
from hipfire.runtime.templates import Templates
from hipfire.text.template import ChatTemplate
from hipfire.text.tokenizer import Tokenizer as HipfireTokenizer
from tiny_models import IM_END, ROWS, TEMPLATE, tokenizer_text

END = "<|im_end|>"


class Recital:
    """A model whose most likely next token at position p is `script[p]`, whatever it was fed.

    `fed` collects (position, token) of everything that went through it.
    """

    def __init__(self, script: Sequence[int], vocab: int) -> None:
        self.script = list(script)
        self.vocab = vocab
        self.fed: list[tuple[int, int]] = []

    @property
    def vocab_size(self) -> int:
        return self.vocab

    def __call__(self, tokens: torch.Tensor, step: StepContext) -> torch.Tensor:
        self.fed += list(zip(step.positions.tolist(), tokens.tolist(), strict=True))
        return step.positions[:, None].float()

    def logits(self, hidden: torch.Tensor, step: StepContext) -> torch.Tensor:
        del step
        rows = torch.zeros(len(hidden), self.vocab)
        for row, position in enumerate(hidden[:, 0].long().tolist()):
            # past its end a recital repeats its last token for ever
            rows[row, self.script[min(position + 1, len(self.script) - 1)]] = 10.0
        return rows


class _Config:
    def __init__(self, vocab: int, max_positions: int) -> None:
        self.sizes = Sizes(vocab, 4, 4, 1, 1, 1, 4, 1e-6, max_positions, True)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return (CacheSpec(1, 4),)


def recite(
    prompt: Sequence[int], reply: Sequence[int], *, vocab: int = ROWS, max_seq: int = 64
) -> LoadedModel:
    """A loaded model that answers `prompt` with `reply`, through the real runner and tokenizer."""
    model = Recital([*prompt, *reply], vocab)
    config: Any = _Config(vocab, max_seq)
    cache = KvCache(config.cache_specs(), mode=kv_mode("f32"), slots=1, max_seq=max_seq)
    assets = TextAssets(
        tokenizer_json=tokenizer_text(),
        tokenizer_config={"eos_token": END},
        chat_templates={"default": TEMPLATE},
    )
    family: Any = None
    template = ChatTemplate(TEMPLATE, bos_token=None, eos_token=END)
    return LoadedModel(
        path=Path("recital"),
        family=family,
        config=config,
        model=model,
        runner=Runner(model, cache, chunk=5),
        tokenizer=HipfireTokenizer.from_assets(assets, vocab),
        templates=Templates(template, template),
        end_ids=frozenset({IM_END}),
        assets=assets,
        plan=MemoryPlan(0, 0, 0),
        residency="decoded",
        unknown_tensors=(),
    )
