"""A hybrid model from a folder to replies: converted, loaded, asked, and asked again."""

from __future__ import annotations

from pathlib import Path

import torch

from hipfire.base.sampling import GenerationParams, SamplingParams
from hipfire.engine.llm import LLM
from hipfire.quantize.pipeline import quantize
from hipfire.runtime.load import LoadOptions
from tiny_models import load, tiny_model, write_folder

PROMPT = "hello world, and more than one chunk of it"
GREEDY = SamplingParams(temperature=0.0)


def greedy(path: Path, count: int) -> list[int]:
    """Return the tokens with the largest logits, computed from the beginning for every one of them."""
    loaded = load(path)
    tokens = list(PROMPT.encode())
    for _ in range(count):
        tokens.append(int(torch.argmax(loaded.runner.all_logits(0, tokens)[-1])))
    return tokens[len(PROMPT) :]


def test_a_converted_model_answers_as_its_weights_say(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "src", tiny_model("qwen3_5"))
    quantize(folder, "q8", tmp_path / "m.q8")
    limits = GenerationParams(max_tokens=12, ignore_eos=True)
    path = tmp_path / "m.q8"
    # the way of the references, which replays nothing
    plain = LLM(path, LoadOptions(kv_cache="f32", max_seq=64, residency="decoded"))
    said = plain.generate(PROMPT, GREEDY, limits).tokens
    assert list(said) == greedy(path, 12)
    assert plain.generate(PROMPT, GREEDY, limits).tokens == said
    fast = LLM(path, LoadOptions(kv_cache="f32", max_seq=64, residency="panels", prefill_chunk=7))
    replies = [fast.generate(text, GREEDY, limits).tokens for text in (PROMPT, PROMPT[:20], PROMPT, PROMPT)]
    assert replies[0] == replies[2] == replies[3] != replies[1]
