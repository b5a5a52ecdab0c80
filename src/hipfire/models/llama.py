"""Llama: pre-norm blocks, grouped-query attention, SwiGLU, plain RMSNorm weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hipfire.base.types import CacheSpec, StateSpec
from hipfire.checkpoint.names import DECODER_RULES, NameRule, override_rules
from hipfire.layers.decoder import EMBEDDING, FINAL_NORM, Decoder, PreNormBlock, decoder_tensors, head_weight
from hipfire.layers.linear import Embedding
from hipfire.layers.norm import RmsNorm
from hipfire.layers.rope import RopeSpec
from hipfire.layers.weights import WeightSource
from hipfire.models.family import ModelFamily
from hipfire.models.fields import GgufFields, text_fields
from hipfire.models.rope_fields import gguf_rope, hf_rope
from hipfire.models.sizes import Sizes

MODEL_TYPES = ("llama",)

# frequency factors that newer GGUF files carry in place of the llama3 scaling parameters
ROPE_FACTORS = "rope_freqs.weight"

NAMES = override_rules(
    DECODER_RULES,
    NameRule("model.layers.{i}.self_attn.q_proj.weight", "blk.{i}.attn_q.weight", "q_rows"),
    NameRule("model.layers.{i}.self_attn.k_proj.weight", "blk.{i}.attn_k.weight", "k_rows"),
    NameRule(ROPE_FACTORS, ROPE_FACTORS),
)


@dataclass(frozen=True)
class Config:
    """Sizes and constants of a Llama model."""

    sizes: Sizes
    rope: RopeSpec

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Config:
        """Read a Hugging Face config; UnsupportedError for anything this file does not implement."""
        fields = text_fields(config)
        fields.require("hidden_act", ("silu",), "silu")
        fields.require("attention_bias", (False,), False)
        fields.require("mlp_bias", (False,), False)
        fields.require("partial_rotary_factor", (1.0,), 1.0)
        sizes = Sizes.from_hf(fields, head_dim=None, max_positions=2048, tied=False)
        return cls(sizes, hf_rope(fields, sizes.head_dim))

    @classmethod
    def from_gguf(cls, fields: GgufFields) -> Config:
        """Read the metadata of a GGUF file of this architecture."""
        sizes = Sizes.from_gguf(fields)
        return cls(sizes, gguf_rope(fields, sizes.head_dim, 10000.0))

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Return one full-length cache per layer."""
        return (self.sizes.attention_shape().cache_spec(),) * self.sizes.layers

    def state_specs(self) -> tuple[StateSpec, ...]:
        """Return (): no layer is recurrent."""
        return ()

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Return the canonical names and shapes of all tensors that the model needs."""
        s = self.sizes
        block = PreNormBlock.tensors(self.sizes.attention_shape(), s.intermediate)
        return decoder_tensors(s.vocab_size, s.hidden, [block] * s.layers, tied=s.tied)

    def optional_tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Return the tensors that the model uses where a checkpoint has them."""
        return {ROPE_FACTORS: (self.sizes.head_dim // 2,)}

    def to_hf(self) -> dict[str, Any]:
        """Return the configuration in the form of a Hugging Face `config.json`."""
        names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
        rope = {"rope_parameters": self.rope.to_hf(), "rope_theta": self.rope.theta}
        return {**names, **self.sizes.to_hf(), **rope}


def build(config: Config, weights: WeightSource) -> Decoder:
    """Assemble the model from its weights."""
    sizes, shape = config.sizes, config.sizes.attention_shape()
    divisors = weights.vector(ROPE_FACTORS, sizes.head_dim // 2) if weights.has(ROPE_FACTORS) else None
    rope = config.rope.table(divisors, device=weights.device)

    def block(index: int) -> PreNormBlock:
        return PreNormBlock(weights, index, shape, sizes.intermediate, rope, activation="silu", eps=sizes.eps)

    embedding = weights.matrix(EMBEDDING, sizes.vocab_size, sizes.hidden)
    blocks = [block(index) for index in range(sizes.layers)]
    head = head_weight(weights, embedding, tied=sizes.tied)
    norm = RmsNorm(weights.vector(FINAL_NORM, sizes.hidden), sizes.eps)
    return Decoder(Embedding(embedding), blocks, norm, head, None)


FAMILY = ModelFamily(
    arch_id=0,
    gguf_architectures=("llama",),
    from_hf=Config.from_hf,
    from_gguf=Config.from_gguf,
    build=build,
    names=NAMES,
    oracle="LlamaForCausalLM",
    oracle_config="LlamaConfig",
    tiny={
        "vocab_size": 131,
        "hidden_size": 72,
        "intermediate_size": 104,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 256,
    },
)
