"""Qwen3.5 and 3.6 with a mixture of experts: the dense model's mixers, and experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.base.types import CacheSpec, StateSpec
from hipfire.checkpoint.names import NameRule, override_rules
from hipfire.layers.decoder import Decoder
from hipfire.layers.experts import ExpertMlp, ExpertShape
from hipfire.layers.weights import WeightSource
from hipfire.models.family import ModelFamily
from hipfire.models.fields import GgufFields, text_fields
from hipfire.models.hybrid import FULL, HYBRID_RULES, RECURRENT, Hybrid
from hipfire.models.sizes import Sizes

# the wrappers of text and images, and their text parts
MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_6_moe", "qwen3_6_moe_text")
# what the kernels that choose experts take
MOST_EXPERTS = 1024
# of the functions that GGUF files name by numbers
SOFTMAX = 1

_LAYER, _BLOCK = "model.layers.{i}.mlp", "blk.{i}"
EXPERT_RULES = override_rules(
    HYBRID_RULES,
    NameRule(f"{_LAYER}.gate.weight", f"{_BLOCK}.ffn_gate_inp.weight"),
    NameRule(
        f"{_LAYER}.experts.gate_up_proj",
        f"{_BLOCK}.ffn_gate_up_exps.weight",
        forms=(
            (f"{_LAYER}.experts.{{x}}.gate_up_proj.weight",),
            (f"{_LAYER}.experts.{{x}}.gate_proj.weight", f"{_LAYER}.experts.{{x}}.up_proj.weight"),
            (f"{_BLOCK}.ffn_gate_exps.weight", f"{_BLOCK}.ffn_up_exps.weight"),
        ),
    ),
    NameRule(
        f"{_LAYER}.experts.down_proj",
        f"{_BLOCK}.ffn_down_exps.weight",
        forms=((f"{_LAYER}.experts.{{x}}.down_proj.weight",),),
    ),
    NameRule(f"{_LAYER}.shared_expert_gate.weight", f"{_BLOCK}.ffn_gate_inp_shexp.weight"),
    NameRule(f"{_LAYER}.shared_expert.gate_proj.weight", f"{_BLOCK}.ffn_gate_shexp.weight"),
    NameRule(f"{_LAYER}.shared_expert.up_proj.weight", f"{_BLOCK}.ffn_up_shexp.weight"),
    NameRule(f"{_LAYER}.shared_expert.down_proj.weight", f"{_BLOCK}.ffn_down_shexp.weight"),
)


@dataclass(frozen=True)
class Config:
    """Sizes and constants of a Qwen3.5 model with experts."""

    hybrid: Hybrid
    experts: ExpertShape

    def __post_init__(self) -> None:
        shape = self.experts
        if shape.experts > MOST_EXPERTS:
            raise UnsupportedError(
                f"{shape.experts} experts are not supported", hint=f"supported: up to {MOST_EXPERTS}"
            )
        if shape.chosen > shape.experts:
            raise ArtifactError(
                f"{shape.chosen} experts for each token cannot be chosen out of {shape.experts}",
                field="config",
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Config:
        """Read a Hugging Face config; UnsupportedError for anything that is not implemented."""
        fields = text_fields(config)
        fields.require("norm_topk_prob", (True,), True)
        fields.require("mlp_only_layers", ([],), [])
        fields.require("decoder_sparse_step", (1,), 1)
        hybrid = Hybrid.from_hf(config, intermediate="moe_intermediate_size")
        shape = ExpertShape(
            hidden=hybrid.sizes.hidden,
            experts=fields.integer("num_experts", 256),
            chosen=fields.integer("num_experts_per_tok", 8),
            intermediate=hybrid.sizes.intermediate,
            shared=fields.integer("shared_expert_intermediate_size", 512),
        )
        return cls(hybrid, shape)

    @classmethod
    def from_gguf(cls, fields: GgufFields) -> Config:
        """Read the metadata of a GGUF file of this architecture."""
        fields.require("expert_gating_func", (SOFTMAX,), SOFTMAX)
        fields.require("expert_weights_norm", (True,), True)
        hybrid = Hybrid.from_gguf(fields, intermediate="expert_feed_forward_length")
        shape = ExpertShape(
            hidden=hybrid.sizes.hidden,
            experts=fields.integer("expert_count"),
            chosen=fields.integer("expert_used_count"),
            intermediate=hybrid.sizes.intermediate,
            shared=fields.integer("expert_shared_feed_forward_length"),
        )
        return cls(hybrid, shape)

    @property
    def sizes(self) -> Sizes:
        """The sizes that all families share; a token's experts are as wide as all of them together."""
        shape = self.experts
        return replace(self.hybrid.sizes, intermediate=shape.chosen * shape.intermediate + shape.shared)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Return what every layer of attention needs of the cache."""
        return self.hybrid.cache_specs()

    def state_specs(self) -> tuple[StateSpec, ...]:
        """Return what every recurrent layer keeps of a sequence."""
        return self.hybrid.state_specs()

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Return the canonical names and shapes of all tensors that the model needs."""
        return self.hybrid.tensors(self.experts.tensors())

    def optional_tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Return the tensors that the model uses where a checkpoint has them."""
        return {}

    def to_hf(self) -> dict[str, Any]:
        """Return the configuration in the form of a Hugging Face `config.json`."""
        shape = self.experts
        return {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            **self.hybrid.to_hf(),
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.chosen,
            "moe_intermediate_size": shape.intermediate,
            "shared_expert_intermediate_size": shape.shared,
        }


def build(config: Config, weights: WeightSource) -> Decoder:
    """Assemble the model from its weights."""

    def mlp(prefix: str) -> ExpertMlp:
        return ExpertMlp(weights, prefix, config.experts, "silu")

    return config.hybrid.build(weights, mlp)


FAMILY = ModelFamily(
    arch_id=6,
    gguf_architectures=("qwen35moe",),
    from_hf=Config.from_hf,
    from_gguf=Config.from_gguf,
    build=build,
    names=EXPERT_RULES,
    oracle="Qwen3_5MoeForCausalLM",
    oracle_config="Qwen3_5MoeTextConfig",
    tiny={
        "vocab_size": 107,
        "hidden_size": 48,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "layer_types": [RECURRENT, FULL, RECURRENT],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
)
