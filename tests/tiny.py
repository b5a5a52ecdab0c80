"""Tiny models as files and as objects: a byte-level tokenizer, safetensors folders, a model that recites."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hipfire.base.types import CacheSpec, TextAssets
from hipfire.cache.kv import KvCache, kv_mode
from hipfire.layers.context import StepContext
from hipfire.models.family import ModelFamily
from hipfire.models.sizes import Sizes
from hipfire.runtime.admission import MemoryPlan
from hipfire.runtime.load import LoadedModel
from hipfire.runtime.runner import Runner
from hipfire.text.template import ChatTemplate
from hipfire.text.tokenizer import Tokenizer as HipfireTokenizer

END = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer_json() -> str:
    """A tokenizer.json with one token per byte (ids 0..255) and two control tokens (256, 257)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken(END, special=True)])
    return engine.to_str()


def byte_assets(template: str | None = TEMPLATE) -> TextAssets:
    """Text assets around the byte tokenizer."""
    return TextAssets(
        tokenizer_json=byte_tokenizer_json(),
        tokenizer_config={"eos_token": END},
        chat_templates={"default": template} if template else {},
    )


def write_folder(folder: Path, family: ModelFamily, change: Mapping[str, Any] | None = None) -> Any:
    """Write a random model of the family as a safetensors folder; returns the transformers model."""
    torch.manual_seed(11)
    fields = {**family.tiny, "vocab_size": 260, "eos_token_id": 257, "bos_token_id": None, **(change or {})}
    config = getattr(transformers, family.oracle_config)(**fields)
    config._attn_implementation = "eager"
    model = getattr(transformers, family.oracle)(config).eval().float()
    for name, parameter in model.named_parameters():
        parameter.data += torch.randn_like(parameter) * (0.3 if "norm" in name else 0.2)
    folder.mkdir(parents=True, exist_ok=True)
    tied = config.tie_word_embeddings
    tensors = {
        name: values.contiguous()
        for name, values in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "tokenizer.json").write_text(byte_tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))
    return model


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
    prompt: Sequence[int], reply: Sequence[int], *, vocab: int = 260, max_seq: int = 64
) -> LoadedModel:
    """A loaded model that answers `prompt` with `reply`, through the real runner and tokenizer."""
    model = Recital([*prompt, *reply], vocab)
    config: Any = _Config(vocab, max_seq)
    cache = KvCache(config.cache_specs(), mode=kv_mode("f32"), slots=1, max_seq=max_seq)
    assets = byte_assets()
    family: Any = None
    return LoadedModel(
        path=Path("recital"),
        family=family,
        config=config,
        model=model,
        runner=Runner(model, cache, chunk=5),
        tokenizer=HipfireTokenizer.from_assets(assets, vocab),
        template=ChatTemplate(TEMPLATE, bos_token=None, eos_token=END),
        end_ids=frozenset({257}),
        assets=assets,
        plan=MemoryPlan(0, 0, 0),
        residency="decoded",
        unknown_tensors=(),
    )
