"""Real models from the registry against transformers in float32; `make models` installs them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gguf_oracle import load_oracle
from hipfire import LLM, GenerationParams, LoadOptions
from hipfire.checkpoint.library import open_library
from hipfire.quantize.pipeline import quantize
from hipfire.runtime.load import load_model
from hipfire.validate.metrics import kl_divergence, relative_rms

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
TEXT = Path(__file__).parents[2] / "benchmarks" / "texts" / "lighthouse.txt"
EXACT = LoadOptions(kv_cache="f32", residency="decoded")
FAST = LoadOptions(kv_cache="f32")


def installed(tag: str) -> Path:
    model = open_library().find(tag)
    if model is None:
        pytest.skip(f"not run: {tag} is not installed (hipfire pull {tag})")
    return model.path


def reference(path: Path, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = load_oracle(path)(torch.tensor([tokens])).logits[0]
    return logits


def test_smollm2_equals_transformers_and_its_formats_stay_close(tmp_path: Path) -> None:
    path = installed("smollm2:135m")
    loaded = load_model(path, EXACT)
    tokens = loaded.tokenizer.encode(TEXT.read_text())[:200]
    expected = reference(path, tokens)
    assert relative_rms(loaded.runner.all_logits(0, tokens), expected) < 1e-4
    # a little above what docs/formats.md lists
    for fmt, rms, kl in (("q8", 0.02, 2e-3), ("hf4", 0.45, 0.55), ("mq4v1", 0.45, 0.55), ("mq4", 0.45, 0.55)):
        out = tmp_path / f"model.{fmt}"
        quantize(path, fmt, out)
        logits = load_model(out, EXACT).runner.all_logits(0, tokens)
        assert 1e-4 < relative_rms(logits, expected) < rms, fmt
        assert kl_divergence(logits, expected) < kl, fmt


@pytest.mark.parametrize("tag", ["smollm2:135m", "gemma3:270m"])
def test_int8_activations_stay_within_what_docs_performance_states(tag: str) -> None:
    path = installed(tag)
    exact, fast = load_model(path, EXACT), load_model(path, FAST)
    assert (exact.residency, fast.residency) == ("decoded", "panels")
    tokens = exact.tokenizer.encode(TEXT.read_text())[:200]
    expected, logits = (loaded.runner.all_logits(0, tokens) for loaded in (exact, fast))
    assert 1e-4 < relative_rms(logits, expected) < 0.04
    assert kl_divergence(logits, expected) < 4e-3
    # token by token gives the bytes of the whole prompt at once
    fast.runner.prefill(0, tokens[:1])
    for position, token in enumerate(tokens[1:40], 1):
        assert torch.equal(fast.runner.decode(0, token, position), logits[position])


def test_smollm2_answers_a_question() -> None:
    llm = LLM(installed("smollm2:135m"), EXACT)
    completion = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        generation=GenerationParams(max_tokens=40),
    )
    assert completion.text == "The capital of France is Paris."
    assert completion.finish_reason == "stop"


def test_gemma3_equals_transformers_beyond_its_window_and_continues_text() -> None:
    path = installed("gemma3:270m")
    llm, oracle = LLM(path, EXACT), load_oracle(path)
    tokenizer = llm.loaded.tokenizer
    tokens = tokenizer.encode(TEXT.read_text())[:700]
    assert llm.loaded.config.cache_specs()[0].window == 512
    assert len(tokens) == 700
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
    assert relative_rms(llm.loaded.runner.all_logits(0, tokens), expected) < 1e-4
    del expected

    prompt = "The old lighthouse stood at the edge of the cliff, and every evening"
    completion = llm.generate(prompt, generation=GenerationParams(max_tokens=24))
    ids = tokenizer.encode(prompt)
    assert ids[0] == tokenizer.bos_id
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*ids, *completion.tokens]])).logits[0]
    assert list(completion.tokens) == logits[len(ids) - 1 : -1].argmax(-1).tolist()
    assert completion.text.startswith(" the light of the moon was reflected in the water.")
