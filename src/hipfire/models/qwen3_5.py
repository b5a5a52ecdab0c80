"""Qwen3.5 and 3.6 dense: three layers of gated DeltaNet to one of gated attention, each with a SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hipfire.base.types import CacheSpec, StateSpec
from hipfire.layers.decoder import Decoder
from hipfire.layers.mlp import GatedMlp, mlp_tensors
from hipfire.layers.weights import WeightSource
from hipfire.models.family import ModelFamily
from hipfire.models.fields import GgufFields
from hipfire.models.hybrid import FULL, HYBRID_RULES, RECURRENT, Hybrid
from hipfire.models.sizes import Sizes

# the wrappers of text and images, and their text parts
MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_6", "qwen3_6_text")


@dataclass(frozen=True)
class Config:
    """Sizes and constants of a dense Qwen3.5 model."""

    hybrid: Hybrid

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Config:
        """Read a Hugging Face config; UnsupportedError for anything that is not implemented."""
        return cls(Hybrid.from_hf(config))

    @classmethod
    def from_gguf(cls, fields: GgufFields) -> Config:
        """Read the metadata of a GGUF file of this architecture."""
        return cls(Hybrid.from_gguf(fields))

    @property
    def sizes(self) -> Sizes:
        """The sizes that all families share."""
        return self.hybrid.sizes

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Return what every layer of attention needs of the cache."""
        return self.hybrid.cache_specs()

    def state_specs(self) -> tuple[StateSpec, ...]:
        """Return what every recurrent layer keeps of a sequence."""
        return self.hybrid.state_specs()

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Return the canonical names and shapes of all tensors that the model needs."""
        return self.hybrid.tensors(mlp_tensors(self.sizes.hidden, self.sizes.intermediate))

    def optional_tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Return the tensors that the model uses where a checkpoint has them."""
        return {}

    def to_hf(self) -> dict[str, Any]:
        """Return the configuration in the form of a Hugging Face `config.json`."""
        names = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
        return {**names, **self.hybrid.to_hf()}


def build(config: Config, weights: WeightSource) -> Decoder:
    """Assemble the model from its weights."""
    sizes = config.sizes

    def mlp(prefix: str) -> GatedMlp:
        return GatedMlp(weights, prefix, sizes.hidden, sizes.intermediate, "silu")

    return config.hybrid.build(weights, mlp)


FAMILY = ModelFamily(
    arch_id=5,
    gguf_architectures=("qwen35",),
    from_hf=Config.from_hf,
    from_gguf=Config.from_gguf,
    build=build,
    names=HYBRID_RULES,
    oracle="Qwen3_5ForCausalLM",
    oracle_config="Qwen3_5TextConfig",
    tiny={
        "vocab_size": 109,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 5,
        "layer_types": [RECURRENT, RECURRENT, FULL, RECURRENT, FULL],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    },
)
