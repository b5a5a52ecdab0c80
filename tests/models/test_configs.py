"""What the model files read from configurations, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.base.types import TensorInfo
from hipfire.layers.rope import RopeSpec
from hipfire.models.family import families, family_of, family_of_gguf
from hipfire.models.fields import Fields, GgufFields
from hipfire.models.gemma3 import FULL, SLIDING
from hipfire.models.rope_fields import hf_rope

LLAMA, QWEN3, GEMMA3 = family_of("llama"), family_of("qwen3"), family_of("gemma3_text")


def gguf_fields(architecture: str, change: Mapping[str, Any] | None = None) -> GgufFields:
    keys: dict[str, Any] = {
        "block_count": 12,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "context_length": 4096,
        "attention.sliding_window": 32,
        **(change or {}),
    }
    metadata = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    tensors = {"token_embd.weight": TensorInfo("token_embd.weight", 2, (100, 64), 25600)}
    return GgufFields({"general.architecture": architecture, **metadata}, tensors)


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA, {"attention_bias": True}, "attention_bias"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3, {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
    ],
)
def test_what_a_model_does_not_implement_is_refused_by_name(
    family: Any, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedError, match=named):
        family.from_hf({**family.tiny, **change})


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (LLAMA, {"hidden_size": None}, "hidden_size.*missing"),
        (LLAMA, {"hidden_size": "64"}, "hidden_size.*'64'"),
        (LLAMA, {"hidden_size": 10**400}, "hidden_size"),
        (LLAMA, {"num_hidden_layers": -1}, "num_hidden_layers.*-1"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers.*0"),
        (LLAMA, {"num_hidden_layers": 300000}, "300000, more than 4096"),
        (LLAMA, {"num_attention_heads": 2.5}, r"num_attention_heads.*2\.5"),
        (LLAMA, {"num_key_value_heads": 4}, "6 query heads cannot share 4"),
        (LLAMA, {"head_dim": 13}, "head_dim.*even"),
        (LLAMA, {"head_dim": 0}, "head_dim"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings.*not a boolean"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        (LLAMA, {"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        (LLAMA, {"rope_theta": 0}, "rope_theta"),
        (LLAMA, {"rope_parameters": 5}, "rope_parameters.*not an object"),
        (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": None}}, "factor.*missing"),
        (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": [1]}}, "factor"),
        (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor"),
        (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": "8"}}, "factor"),
        (GEMMA3, {"layer_types": 3}, "layer_types.*not a list of strings"),
        (GEMMA3, {"layer_types": [[1], 2, 3, 4]}, "layer_types.*not a list of strings"),
        (GEMMA3, {"layer_types": [FULL]}, "layer_types.*1 entries for 4 layers"),
        (GEMMA3, {"sliding_window": 0}, "sliding_window"),
        (GEMMA3, {"final_logit_softcapping": -3}, "final_logit_softcapping"),
        (GEMMA3, {"final_logit_softcapping": "30"}, "final_logit_softcapping"),
        (GEMMA3, {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar"),
        (GEMMA3, {"rope_parameters": {SLIDING: 1, FULL: {}}}, "rope_parameters"),
        (GEMMA3, {"rope_parameters": {SLIDING: {"rope_type": "default"}}}, "one entry per layer kind"),
    ],
)
def test_damaged_fields_are_named(family: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        family.from_hf({**family.tiny, **change})


def test_llama3_factors_that_divide_by_zero_are_damage() -> None:
    parameters = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 4.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    with pytest.raises(ArtifactError, match=r"high_freq_factor.*4\.0, not above"):
        LLAMA.from_hf({**LLAMA.tiny, "rope_parameters": parameters})


def test_a_null_field_counts_as_absent() -> None:
    nulls = {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "rope_theta": None}
    assert LLAMA.from_hf({**LLAMA.tiny, **nulls}) == LLAMA.from_hf(LLAMA.tiny)


def test_gemma3_layer_kinds_without_a_base_have_their_own_defaults() -> None:
    nested = {SLIDING: {"rope_type": "default"}, FULL: {"rope_type": "default"}}
    config: Any = GEMMA3.from_hf({**GEMMA3.tiny, "rope_parameters": nested})
    assert config.ropes == {SLIDING: RopeSpec(16, 1e4), FULL: RopeSpec(16, 1e6)}


def test_a_multimodal_gemma3_config_may_leave_out_the_class_defaults() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config: Any = GEMMA3.from_hf({"model_type": "gemma3", "text_config": text})
    assert (config.sizes.heads, config.sizes.kv_heads, config.sizes.vocab_size) == (8, 4, 262208)
    assert (config.sizes.head_dim, config.window, len(config.kinds)) == (256, 1024, 34)


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
        ({}, 1.0),
    ],
)
def test_gguf_scaling_keys_of_both_generations(keys: dict[str, Any], factor: float) -> None:
    config: Any = LLAMA.from_gguf(gguf_fields("llama", keys))
    assert config.rope.factor == factor
    assert config.rope.kind == ("linear" if factor != 1 else "default")


def test_llama3_scaling_without_its_parameters_is_refused() -> None:
    with pytest.raises(ArtifactError, match=r"low_freq_factor.*is missing"):
        hf_rope(Fields({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "config "), 64)


def test_llama3_frequencies_equal_transformers() -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        head_dim=128, rope_parameters=parameters, max_position_embeddings=131072
    )
    expected, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config)
    table = hf_rope(Fields({"rope_parameters": parameters}, "config "), 128).table()
    assert torch.allclose(table.inverse_frequencies, expected, rtol=2e-7, atol=0)
    # the factors that GGUF files carry for this scaling run from 1 (kept) to 8 (scaled in full)
    ratio = RopeSpec(128, 500000.0).table().inverse_frequencies / table.inverse_frequencies
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(8.0)


def test_frequency_factors_of_a_gguf_file_divide_the_frequencies() -> None:
    factors = torch.linspace(1.0, 8.0, 6)
    plain = RopeSpec(12, 1000.0).table().inverse_frequencies
    assert torch.equal(RopeSpec(12, 1000.0).table(factors).inverse_frequencies, plain / factors)
    # a linear scaling that the file declares too applies on top
    linear = RopeSpec(12, 1000.0, "linear", 4.0)
    assert torch.equal(linear.table(factors).inverse_frequencies, plain / factors / 4.0)


@pytest.mark.parametrize("form", ["scalar", "uniform", "mixed"])
def test_per_layer_keys_in_every_form(form: str) -> None:
    value: Any = {"scalar": 2, "uniform": [2] * 12, "mixed": [2] * 11 + [1]}[form]
    fields = gguf_fields("llama", {"attention.head_count_kv": value})
    if form == "mixed":
        with pytest.raises(UnsupportedError, match="differs between layers"):
            LLAMA.from_gguf(fields)
    else:
        assert LLAMA.from_gguf(fields).sizes.kv_heads == 2


def test_a_per_layer_list_of_the_wrong_length_is_damage() -> None:
    with pytest.raises(ArtifactError, match="3 entries for 12 layers"):
        LLAMA.from_gguf(gguf_fields("llama", {"feed_forward_length": [1, 2, 3]}))


@pytest.mark.parametrize(
    "change",
    [
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
        {"expert_count": 8},
        {"rope.dimension_count": 8},
    ],
)
def test_gguf_keys_that_are_not_implemented_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        LLAMA.from_gguf(gguf_fields("llama", change))


def test_gemma3_from_gguf_fills_in_what_the_architecture_knows() -> None:
    config: Any = GEMMA3.from_gguf(gguf_fields("gemma3", {"attention.key_length": 32, "rope.freq_base": 1e6}))
    assert [index for index, kind in enumerate(config.kinds) if kind == FULL] == [5, 11]
    assert config.ropes[SLIDING] == RopeSpec(32, 10000.0)
    assert config.ropes[FULL] == RopeSpec(32, 1e6)
    assert config.query_scalar == 32


def test_gemma3_position_scaling_belongs_to_full_layers_alone() -> None:
    old_style = {**GEMMA3.tiny, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2}
    old_style["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    del old_style["layer_types"]
    config: Any = GEMMA3.from_hf(old_style)
    assert config.kinds == (SLIDING, FULL, SLIDING, FULL)
    assert config.ropes[SLIDING] == RopeSpec(16, 1e4)
    assert config.ropes[FULL] == RopeSpec(16, 1e6, "linear", 8.0)
    from_gguf: Any = GEMMA3.from_gguf(
        gguf_fields("gemma3", {"attention.key_length": 16, "rope.scaling.factor": 8.0})
    )
    assert from_gguf.ropes[FULL] == config.ropes[FULL]


def test_a_listed_layer_pattern_wins_over_the_usual_one() -> None:
    listed = [True, False] * 6
    config: Any = GEMMA3.from_gguf(gguf_fields("gemma3", {"attention.sliding_window_pattern": listed}))
    assert config.kinds == (SLIDING, FULL) * 6
    with pytest.raises(ArtifactError, match="2 entries for 12 layers"):
        GEMMA3.from_gguf(gguf_fields("gemma3", {"attention.sliding_window_pattern": [True, False]}))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_a_config_survives_the_way_through_its_hugging_face_form(model_type: str) -> None:
    family = family_of(model_type)
    config = family.from_hf(family.tiny)
    assert family.from_hf(config.to_hf()) == config
    assert config.to_hf()["model_type"] in families()


def test_unknown_families_are_refused_with_what_is_known() -> None:
    with pytest.raises(UnsupportedError, match=r"'mamba'.*llama, qwen3"):
        family_of("mamba")
    with pytest.raises(UnsupportedError, match="'rwkv'"):
        family_of_gguf("rwkv")
