"""Every model file against its transformers class on a tiny random config, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from helpers import MemoryCheckpoint, make_runner, rms
from hipfire.kernels.launch import Launcher, LaunchRecord
from hipfire.layers.context import Segment
from hipfire.models.family import ModelFamily, families

TOLERANCE = 2e-6
# recurrences: the two forms that transformers has of them differ from each other by up to half of this
RECURRENT_TOLERANCE = 2.5e-5
FAMILIES = {family.oracle: family for family in families().values()}


def tolerance(name: str) -> float:
    recurrent = FAMILIES[name].from_hf(FAMILIES[name].tiny).state_specs()
    return RECURRENT_TOLERANCE if recurrent else TOLERANCE


def variants() -> list[Any]:
    """The tiny config of every family, and the variations that a family's config class allows."""
    extra: dict[str, list[dict[str, Any]]] = {
        "LlamaForCausalLM": [
            {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8},
            {"num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
            {
                "head_dim": 32,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
        ],
        "Qwen3ForCausalLM": [{"tie_word_embeddings": False, "num_key_value_heads": 1}],
        "Qwen3_5MoeForCausalLM": [
            # a shared expert of another size, and every expert for every token
            {"shared_expert_intermediate_size": 56, "num_experts_per_tok": 6, "tie_word_embeddings": True},
            {"num_experts": 9, "num_experts_per_tok": 1, "linear_num_key_heads": 4},
        ],
        "Qwen3_5ForCausalLM": [
            # as many key heads as value heads, and one for all
            {"linear_num_key_heads": 4, "tie_word_embeddings": False},
            {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3},
            # the usual layers, other sizes of keys and values, other rotary parameters
            {
                "layer_types": None,
                "linear_key_head_dim": 32,
                "linear_value_head_dim": 64,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e7,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                },
            },
        ],
        "Gemma3ForCausalLM": [
            {"final_logit_softcapping": 5.0, "num_key_value_heads": 2},
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                }
            },
        ],
    }
    cases = []
    for name in FAMILIES:
        for index, change in enumerate([{}, *extra.get(name, [])]):
            cases.append(pytest.param(name, change, id=f"{name}-{index}"))
    return cases


def oracle(family: ModelFamily, change: dict[str, Any]) -> Any:
    torch.manual_seed(7)
    config = getattr(transformers, family.oracle_config)(**{**family.tiny, **change})
    config._attn_implementation = "eager"
    model = getattr(transformers, family.oracle)(config).eval().float()
    for name, parameter in model.named_parameters():
        # norms at their initial ones or zeros would hide a wrong offset
        scale = 0.3 if "norm" in name else 0.2
        parameter.data += torch.randn_like(parameter) * scale
    return model


def checkpoint_of(model: Any) -> MemoryCheckpoint:
    checkpoint = MemoryCheckpoint("safetensors", model.config.to_dict())
    tied = model.config.tie_word_embeddings
    for name, values in model.state_dict().items():
        if not (tied and name == "lm_head.weight"):
            checkpoint.add(name, values)
    return checkpoint


def prompt(model: Any, length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (length,), generator=generator).tolist()


def reference(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize(("name", "change"), variants())
def test_logits_equal_transformers_beyond_the_window(name: str, change: dict[str, Any]) -> None:
    family = FAMILIES[name]
    model = oracle(family, change)
    tokens = prompt(model, 61)
    runner = make_runner(family, family.from_hf(model.config.to_dict()), checkpoint_of(model))
    assert rms(runner.all_logits(0, tokens), reference(model, tokens)) < tolerance(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_cached_decode_equals_full_forward(name: str) -> None:
    family = FAMILIES[name]
    model = oracle(family, {})
    tokens = prompt(model, 40)
    runner = make_runner(family, family.from_hf(model.config.to_dict()), checkpoint_of(model))
    rows = [runner.prefill(0, tokens[:5])]
    rows += [runner.decode(0, token, 5 + index) for index, token in enumerate(tokens[5:])]
    assert rms(torch.stack(rows), reference(model, tokens)[4:]) < tolerance(name)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 7, 8, 9, 19])
def test_chunked_prefill_equals_one_prefill(name: str, chunk: int) -> None:
    family = FAMILIES[name]
    model = oracle(family, {})
    tokens = prompt(model, 2 * 8 + 3)
    config = family.from_hf(model.config.to_dict())
    whole = make_runner(family, config, checkpoint_of(model)).all_logits(0, tokens)
    parts = make_runner(family, config, checkpoint_of(model), chunk=chunk).all_logits(0, tokens)
    assert rms(parts, whole) < tolerance(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_ragged_batch_equals_single_sequences(name: str) -> None:
    family = FAMILIES[name]
    model = oracle(family, {})
    config = family.from_hf(model.config.to_dict())
    runner = make_runner(family, config, checkpoint_of(model), slots=3)
    texts = [prompt(model, length, seed=length) for length in (13, 1, 22)]
    first = [(Segment(slot, 0, len(text)), text) for slot, text in enumerate(texts)]
    batched = [runner.step(first)]
    following = prompt(model, 3, seed=99)
    second = [(Segment(slot, len(text), 1), [following[slot]]) for slot, text in enumerate(texts)]
    batched.append(runner.step(second))
    for slot, text in enumerate(texts):
        expected = reference(model, [*text, following[slot]])[-2:]
        got = torch.stack([batched[0][slot], batched[1][slot]])
        assert rms(got, expected) < tolerance(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_launch_is_on_the_tape_with_its_buffers(name: str) -> None:
    family = FAMILIES[name]
    model = oracle(family, {})
    tape: list[LaunchRecord] = []
    config = family.from_hf(model.config.to_dict())
    runner = make_runner(family, config, checkpoint_of(model), launcher=Launcher(tape=tape))
    runner.step([(Segment(0, 0, 3), [1, 2, 3])])
    layers, full = config.sizes.layers, len(config.cache_specs())
    counts = {op: sum(record.op == op for record in tape) for op in {record.op for record in tape}}
    recurrent = len(config.state_specs())
    assert counts["attention"] == full == layers - recurrent
    assert counts.get("delta_net", 0) == recurrent
    # a mixture of experts has a router and a gate beside its experts
    mlp = 2 if counts.get("expert_gated") else 3
    assert counts.get("expert_gated", 0) == counts.get("expert_down", 0) == layers * (mlp == 2)
    assert counts["linear"] == (4 + mlp) * full + (5 + mlp) * recurrent + 1
    # the first norm has no sum before it
    assert (counts["rms_norm"], counts["residual_norm"]) == (1, 2 * layers)
    entered = [record for record in tape if record.op == "attention_input"]
    assert len(entered) == full
    assert all({"keys", "values", "result0"} == record.writes.keys() for record in entered)
    assert all({"q", "k", "v", "rows"} <= record.reads.keys() for record in entered)
    # what attention reads must have been produced by an earlier launch
    produced = {buffer.address for record in tape for buffer in record.writes.values()}
    attention = [record for record in tape if record.op == "attention"]
    assert all(record.reads[key].address in produced for record in attention for key in ("keys", "values"))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("mode", "bound"), [("bf16", 2e-2), ("q8", 4e-2)])
def test_cache_modes_stay_close_to_float(name: str, mode: str, bound: float) -> None:
    family = FAMILIES[name]
    model = oracle(family, {"head_dim": 32})
    tokens = prompt(model, 30)
    config = family.from_hf(model.config.to_dict())
    exact = make_runner(family, config, checkpoint_of(model)).all_logits(0, tokens)
    rounded = make_runner(family, config, checkpoint_of(model), mode=mode, chunk=5).all_logits(0, tokens)
    assert 1e-5 < rms(rounded, exact) < bound


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", ["f32", "bf16", "q8"])
def test_slots_do_not_touch_each_other_in_any_cache_mode(name: str, mode: str) -> None:
    family = FAMILIES[name]
    model = oracle(family, {"head_dim": 32})
    config = family.from_hf(model.config.to_dict())
    texts = [prompt(model, length, seed=length) for length in (23, 9)]
    together = make_runner(family, config, checkpoint_of(model), mode=mode, slots=2, chunk=5)
    for slot in (0, 1):
        together.prefill(slot, texts[slot][:5])
    rows = []
    for slot in (0, 1):
        rest = texts[slot][5:]
        rows.append(together.step([(Segment(slot, 5, len(rest)), rest)], every_row=True))
    for slot in (0, 1):
        alone = make_runner(family, config, checkpoint_of(model), mode=mode, chunk=5)
        alone.prefill(0, texts[slot][:5])
        rest = texts[slot][5:]
        assert torch.equal(alone.step([(Segment(0, 5, len(rest)), rest)], every_row=True), rows[slot])
