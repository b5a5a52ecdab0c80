"""What hybrid models read of their configurations, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from helpers import MemoryCheckpoint, make_runner, rms
from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.base.types import CacheSpec, StateSpec, TensorInfo
from hipfire.layers.rope import RopeSpec
from hipfire.models.family import families, family_of, family_of_gguf
from hipfire.models.fields import GgufFields
from hipfire.models.hybrid import FULL, RECURRENT

FAMILY = family_of("qwen3_5")
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}


def read(**change: Any) -> Any:
    config: Any = FAMILY.from_hf({**FAMILY.tiny, **change})
    return config.hybrid


def gguf(**change: Any) -> Any:
    keys: dict[str, Any] = {
        "block_count": 9, "embedding_length": 64, "feed_forward_length": 128, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-6, "context_length": 4096, "rope.dimension_count": 8,
        "rope.freq_base": 1e7, "rope.dimension_sections": [11, 11, 10, 0], "ssm.conv_kernel": 4,
        "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.inner_size": 192,
        "full_attention_interval": 4, **{name.replace("__", "."): value for name, value in change.items()},
    }  # fmt: skip
    metadata = {f"qwen35.{key}": value for key, value in keys.items() if value is not None}
    tensors = {"token_embd.weight": TensorInfo("token_embd.weight", 2, (100, 64), 25600)}
    fields = GgufFields({"general.architecture": "qwen35", **metadata}, tensors)
    config: Any = family_of_gguf("qwen35").from_gguf(fields)
    return config.hybrid


def test_both_generations_and_their_wrappers_are_one_family() -> None:
    for name in ("qwen3_5", "qwen3_5_text", "qwen3_6", "qwen3_6_text"):
        assert family_of(name) is FAMILY
    wrapped: Any = FAMILY.from_hf({"model_type": "qwen3_5", "text_config": dict(FAMILY.tiny)})
    assert wrapped == FAMILY.from_hf(FAMILY.tiny)


@pytest.mark.parametrize(
    ("outer", "inner", "tied"), [(True, None, True), (True, False, False), (None, None, False)]
)
def test_a_wrapper_says_whether_the_head_is_tied(outer: Any, inner: Any, tied: bool) -> None:
    text = {**FAMILY.tiny, "tie_word_embeddings": inner}
    assert FAMILY.from_hf({"tie_word_embeddings": outer, "text_config": text}).sizes.tied is tied


def test_sizes_come_from_the_config_and_nowhere_else() -> None:
    config = read(**LINEAR)
    assert config.state_specs() == (StateSpec(2 * 2 * 16 + 6 * 32, 4, 2, 6, 16, 32),) * 3
    assert config.cache_specs() == (CacheSpec(2, 32),) * 2
    assert config.rope == RopeSpec(8, 10000.0)
    # listed layers are taken as they are listed, others follow the interval
    assert config.kinds == (RECURRENT, RECURRENT, FULL, RECURRENT, FULL)
    usual = read(layer_types=None, num_hidden_layers=8)
    assert [index for index, kind in enumerate(usual.kinds) if kind == FULL] == [3, 7]
    assert read(layer_types=None, full_attention_interval=2).kinds[:2] == (RECURRENT, FULL)


def test_rotary_dims_and_sections_of_positions() -> None:
    parameters = {
        "rope_type": "mrope", "rope_theta": 1e7, "partial_rotary_factor": 0.5,
        "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    }  # fmt: skip
    assert read(rope_parameters=parameters).rope == RopeSpec(16, 1e7)
    assert read(rope_theta=5e5, partial_rotary_factor=1.0).rope == RopeSpec(32, 5e5)
    with pytest.raises(UnsupportedError, match="yarn"):
        read(rope_parameters={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(ArtifactError, match="partial_rotary_factor"):
        read(rope_parameters={"rope_type": "default", "partial_rotary_factor": 1.5})


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"linear_num_value_heads": 5}, ArtifactError, "5 value heads cannot share 2"),
        ({"linear_key_head_dim": 24}, UnsupportedError, "24 x 32"),
        ({"linear_value_head_dim": 48}, UnsupportedError, "16 x 48"),
        ({"linear_conv_kernel_dim": 1}, UnsupportedError, "convolution of 1"),
        ({"layer_types": [FULL]}, ArtifactError, "1 entries for 5 layers"),
        ({"layer_types": ["mamba"] * 5}, UnsupportedError, "mamba"),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        read(**change)


def test_gguf_keys_say_the_same() -> None:
    config = gguf()
    assert config.state_specs() == (StateSpec(2 * 2 * 16 + 6 * 32, 4, 2, 6, 16, 32),) * 7
    assert config.rope == RopeSpec(8, 1e7)
    assert (config.delta.tiled, config.sizes.layers) == (True, 9)
    # a head that predicts further tokens is counted among the blocks
    assert gguf(nextn_predict_layers=1).sizes.layers == 8
    with pytest.raises(ArtifactError, match=r"inner_size.*190, not a multiple of 6"):
        gguf(ssm__inner_size=190)
    with pytest.raises(ArtifactError, match=r"ssm\.group_count.*missing"):
        gguf(ssm__group_count=None)


def test_a_config_survives_the_way_through_its_hugging_face_form() -> None:
    family: Any = family_of("qwen3_5")
    for config in (family.from_hf(FAMILY.tiny), family.from_hf({**FAMILY.tiny, **LINEAR, "rope_theta": 3e6})):
        assert family.from_hf(config.to_hf()) == config
    tiled = gguf()
    back: Any = family.from_hf({**tiled.to_hf(), "vocab_size": 100})
    # the order of the heads goes with the tensors of a container
    assert back.hybrid == tiled
    assert FAMILY.arch_id == 5
    assert "qwen3_5_text" in families()


def test_the_recurrence_is_that_of_transformers_token_by_token() -> None:
    torch.manual_seed(3)
    fields = transformers.Qwen3_5TextConfig(**{**FAMILY.tiny, **LINEAR})
    model: Any = transformers.Qwen3_5ForCausalLM(fields)
    model.eval()
    checkpoint = MemoryCheckpoint("safetensors", model.config.to_dict())
    for name, values in model.named_parameters():
        values.data += torch.randn_like(values) * 0.2
        checkpoint.add(name, values)
    tokens = torch.randint(0, 109, (75,)).tolist()
    runner = make_runner(FAMILY, FAMILY.from_hf(model.config.to_dict()), checkpoint, chunk=64)
    cache, wanted = DynamicCache(config=model.config), []
    with torch.no_grad():
        for token in tokens:
            wanted.append(model(torch.tensor([[token]]), cache=cache).logits[0, 0])
    assert rms(runner.all_logits(0, tokens), torch.stack(wanted)) < 1e-5
    # prompts of their chunked form, decoded on from there
    start = 67
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(torch.tensor([tokens[:start]]), cache=cache)
        later = [model(torch.tensor([[t]]), cache=cache).logits[0, 0] for t in tokens[start:]]
    assert rms(torch.stack(later), torch.stack(wanted)[start:]) < 1e-4
    decoded = [runner.prefill(0, tokens[:start])]
    decoded += [runner.decode(0, token, start + index) for index, token in enumerate(tokens[start:])]
    assert rms(torch.stack(decoded), torch.stack(wanted)[start - 1 :]) < 1e-5
