"""Which tensors a model takes from a checkpoint, under which names, and which it refuses to leave out."""

from __future__ import annotations

import pytest
import torch
import transformers

from helpers import MemoryCheckpoint, make_runner, rms
from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.checkpoint.names import DECODER_RULES, NamedCheckpoint
from hipfire.models.family import family_of
from hipfire.runtime.identify import unused_tensors

LLAMA = family_of("llama")


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", ""])
def test_names_with_the_wrappers_that_checkpoints_use(prefix: str) -> None:
    checkpoint = MemoryCheckpoint()
    checkpoint.add(f"{prefix}layers.0.mlp.up_proj.weight", torch.ones(2, 2))
    named = NamedCheckpoint(checkpoint, DECODER_RULES, 1)
    found = named.find("model.layers.0.mlp.up_proj.weight")
    assert found is not None
    assert found.info.name == f"{prefix}layers.0.mlp.up_proj.weight"


def test_tensors_without_a_use_are_reported_not_fatal() -> None:
    checkpoint = MemoryCheckpoint("gguf")
    checkpoint.add("token_embd.weight", torch.ones(2, 2))
    checkpoint.add("something.new", torch.ones(2))
    named = NamedCheckpoint(checkpoint, DECODER_RULES, 1)
    assert named.unknown(["model.embed_tokens.weight"]) == ["something.new"]


@pytest.mark.parametrize(
    "extra",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.3.mlp.up_proj.weight",
        "lm_head.bias",
        "model.language_model.layers.1.self_attn.k_proj.bias",
    ],
)
def test_a_part_of_the_text_model_that_would_be_left_out_is_refused(extra: str) -> None:
    config = LLAMA.from_hf(LLAMA.tiny)
    checkpoint = MemoryCheckpoint()
    for name, shape in config.tensors().items():
        checkpoint.add_raw(name, 2, shape, b"")
    checkpoint.add_raw(extra, 2, (3,), b"")
    with pytest.raises(UnsupportedError, match="such as"):
        unused_tensors(NamedCheckpoint(checkpoint, LLAMA.names, config.sizes.layers), config)


def test_other_unused_tensors_are_listed() -> None:
    config = LLAMA.from_hf({**LLAMA.tiny, "tie_word_embeddings": True})
    checkpoint = MemoryCheckpoint()
    for name, shape in config.tensors().items():
        checkpoint.add_raw(name, 2, shape, b"")
    others = ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "vision_tower.layers.0.bias"]
    for name in others:
        checkpoint.add_raw(name, 2, (3,), b"")
    named = NamedCheckpoint(checkpoint, LLAMA.names, config.sizes.layers)
    assert unused_tensors(named, config) == others


@pytest.mark.parametrize(
    ("tied", "stored", "uses"),
    [(True, False, "embedding"), (True, True, "embedding"), (False, True, "head"), (False, False, "refusal")],
)
def test_tied_and_untied_heads_in_every_form(tied: bool, stored: bool, uses: str) -> None:
    torch.manual_seed(0)
    tiny = {**LLAMA.tiny, "tie_word_embeddings": tied}
    config = LLAMA.from_hf(tiny)
    checkpoint = MemoryCheckpoint()
    for name, shape in config.tensors().items():
        if name != "lm_head.weight":
            checkpoint.add(name, torch.randn(shape) * 0.2)
    head = torch.randn(tiny["vocab_size"], tiny["hidden_size"]) * 0.2
    if stored:
        checkpoint.add("lm_head.weight", head)
    if uses == "refusal":
        with pytest.raises(ArtifactError, match=r"lm_head\.weight"):
            make_runner(LLAMA, config, checkpoint)
        return
    got = make_runner(LLAMA, config, checkpoint).all_logits(0, [3, 1, 4])
    oracle = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**tiny, "tie_word_embeddings": False}))
    state = {
        name: torch.frombuffer(bytearray(checkpoint.raw(name)), dtype=torch.float32).view(info.shape)
        for name, info in checkpoint.tensors.items()
    }
    state["lm_head.weight"] = head if uses == "head" else state["model.embed_tokens.weight"]
    oracle.load_state_dict(state)
    with torch.no_grad():
        expected = oracle.eval()(torch.tensor([[3, 1, 4]])).logits[0]
    assert rms(got, expected) < 2e-6
