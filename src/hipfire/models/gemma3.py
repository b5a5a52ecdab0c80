"""Gemma 3 (text): sliding-window and full layers with their own RoPE, norms around every sub-block.

The weights of all norms are stored as their distance from one. Sliding layers see the last `window`
positions and rotate with a small base; full layers see everything, rotate with a large base and carry the
position scaling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.base.types import CacheSpec, StateSpec
from hipfire.checkpoint.names import DECODER_RULES, NameRule, override_rules
from hipfire.layers.attention import AttentionShape, SelfAttention
from hipfire.layers.context import RopeTable, StepContext
from hipfire.layers.decoder import EMBEDDING, FINAL_NORM, Decoder, decoder_tensors, head_weight
from hipfire.layers.linear import Embedding
from hipfire.layers.mlp import GatedMlp, mlp_tensors
from hipfire.layers.norm import Residual, RmsNorm
from hipfire.layers.rope import RopeSpec
from hipfire.layers.weights import WeightSource
from hipfire.models.family import ModelFamily
from hipfire.models.fields import Fields, GgufFields, text_fields
from hipfire.models.rope_fields import gguf_rope, hf_rope, rope_object
from hipfire.models.sizes import Sizes

MODEL_TYPES = ("gemma3_text", "gemma3")

SLIDING, FULL = "sliding_attention", "full_attention"
SLIDING_THETA, FULL_THETA = 10000.0, 1000000.0
# every sixth layer is a full one where a checkpoint does not list its layers
PATTERN = 6
# the model of 62 layers scales its queries by hidden / heads, not by the head size; GGUF files do not say so
LAYERS_OF_27B = 62

# published multimodal checkpoints leave out what equals the config class's own values
CLASS_DEFAULTS = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}

LAYER_NORMS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm.weight",
)

LAYER = "model.layers.{i}."
NAMES = override_rules(
    DECODER_RULES,
    NameRule(FINAL_NORM, "output_norm.weight", "minus_one"),
    NameRule(LAYER + "input_layernorm.weight", "blk.{i}.attn_norm.weight", "minus_one"),
    NameRule(LAYER + "self_attn.q_norm.weight", "blk.{i}.attn_q_norm.weight", "minus_one"),
    NameRule(LAYER + "self_attn.k_norm.weight", "blk.{i}.attn_k_norm.weight", "minus_one"),
    NameRule(LAYER + "post_attention_layernorm.weight", "blk.{i}.post_attention_norm.weight", "minus_one"),
    NameRule(LAYER + "pre_feedforward_layernorm.weight", "blk.{i}.ffn_norm.weight", "minus_one"),
    NameRule(LAYER + "post_feedforward_layernorm.weight", "blk.{i}.post_ffw_norm.weight", "minus_one"),
)


@dataclass(frozen=True)
class Config:
    """Sizes and constants of a Gemma 3 text model; `kinds` names every layer's kind of attention."""

    sizes: Sizes
    kinds: tuple[str, ...]
    window: int
    query_scalar: float
    ropes: Mapping[str, RopeSpec]
    softcap: float | None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Config:
        """Read a Hugging Face config; UnsupportedError for anything this file does not implement."""
        fields = text_fields(config, CLASS_DEFAULTS)
        fields.require("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
        fields.require("attention_bias", (False,), False)
        fields.require("attn_logit_softcapping", (None,))
        fields.require("use_bidirectional_attention", (False,), False)
        sizes = Sizes.from_hf(fields, head_dim=256, max_positions=131072, tied=True)
        return cls(
            sizes=sizes,
            kinds=_layer_kinds(fields, sizes.layers),
            window=fields.integer("sliding_window", 4096),
            query_scalar=fields.number("query_pre_attn_scalar", 256.0),
            ropes=_hf_ropes(fields, sizes.head_dim),
            softcap=fields.optional_number("final_logit_softcapping"),
        )

    @classmethod
    def from_gguf(cls, fields: GgufFields) -> Config:
        """Read the metadata of a GGUF file; what GGUF leaves to the architecture is filled in here."""
        sizes = Sizes.from_gguf(fields)
        dims = sizes.head_dim
        scalar = sizes.hidden / sizes.heads if sizes.layers == LAYERS_OF_27B else float(dims)
        listed = fields.get("attention.sliding_window_pattern")
        if isinstance(listed, list):
            if len(listed) != sizes.layers:
                raise ArtifactError(
                    f"has {len(listed)} entries for {sizes.layers} layers",
                    field="GGUF key gemma3.attention.sliding_window_pattern",
                )
            kinds = tuple(SLIDING if sliding else FULL for sliding in listed)
        else:
            kinds = _patterned(sizes.layers, fields.integer("attention.sliding_window_pattern", PATTERN))
        sliding_theta = fields.number("rope.freq_base_swa", SLIDING_THETA)
        return cls(
            sizes=sizes,
            kinds=kinds,
            window=fields.integer("attention.sliding_window"),
            query_scalar=scalar,
            ropes={
                SLIDING: RopeSpec(dims, sliding_theta),
                FULL: gguf_rope(fields, dims, FULL_THETA),
            },
            softcap=fields.optional_number("final_logit_softcapping"),
        )

    def attention_shape(self, kind: str) -> AttentionShape:
        """Return the sizes of a layer's attention; only sliding layers have a window."""
        s = self.sizes
        window = self.window if kind == SLIDING else None
        return AttentionShape(s.hidden, s.heads, s.kv_heads, s.head_dim, self.query_scalar**-0.5, window)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Return what every layer needs of the cache."""
        return tuple(self.attention_shape(kind).cache_spec() for kind in self.kinds)

    def state_specs(self) -> tuple[StateSpec, ...]:
        """Return (): no layer is recurrent."""
        return ()

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Return the canonical names and shapes of all tensors that the model needs."""
        s = self.sizes
        norms: dict[str, tuple[int, ...]] = dict.fromkeys(LAYER_NORMS, (s.hidden,))
        attention = self.attention_shape(FULL).tensors(norms=True)
        block = {**norms, **attention, **mlp_tensors(s.hidden, s.intermediate)}
        return decoder_tensors(s.vocab_size, s.hidden, [block] * s.layers, tied=s.tied)

    def optional_tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Return the tensors that the model uses where a checkpoint has them."""
        return {}

    def to_hf(self) -> dict[str, Any]:
        """Return the configuration in the form of a Hugging Face `config.json`."""
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            **self.sizes.to_hf(),
            "layer_types": list(self.kinds),
            "sliding_window": self.window,
            "query_pre_attn_scalar": self.query_scalar,
            "rope_parameters": {kind: rope.to_hf() for kind, rope in self.ropes.items()},
            "final_logit_softcapping": self.softcap,
        }


def _patterned(layers: int, period: int) -> tuple[str, ...]:
    return tuple(FULL if (index + 1) % period == 0 else SLIDING for index in range(layers))


def _layer_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    listed = fields.strings("layer_types")
    if listed is None:
        return _patterned(layers, fields.integer("sliding_window_pattern", PATTERN))
    if len(listed) != layers:
        raise ArtifactError(
            f"has {len(listed)} entries for {layers} layers", field=fields.name("layer_types")
        )
    unknown = set(listed) - {SLIDING, FULL}
    if unknown:
        raise UnsupportedError(f"layer types {sorted(unknown)} are not supported")
    return tuple(listed)


def _hf_ropes(fields: Fields, dims: int) -> dict[str, RopeSpec]:
    nested = fields.nested("rope_parameters")
    if nested is not None and (SLIDING in nested.values or FULL in nested.values):
        sliding, full = nested.nested(SLIDING), nested.nested(FULL)
        if sliding is None or full is None:
            raise ArtifactError("needs one entry per layer kind", field=fields.name("rope_parameters"))
        return {
            SLIDING: rope_object(sliding, dims, SLIDING_THETA),
            FULL: rope_object(full, dims, FULL_THETA),
        }
    # older configs: the scaling belongs to the full layers alone
    sliding_theta = fields.number("rope_local_base_freq", SLIDING_THETA)
    return {SLIDING: RopeSpec(dims, sliding_theta), FULL: hf_rope(fields, dims, FULL_THETA)}


class SandwichBlock:
    """A layer that normalizes the input and the output of attention and of the feed-forward block."""

    def __init__(
        self, norms: tuple[RmsNorm, RmsNorm, RmsNorm, RmsNorm], attention: SelfAttention, mlp: GatedMlp
    ) -> None:
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = norms
        self.attention = attention
        self.mlp = mlp

    def __call__(self, x: Residual, step: StepContext) -> Residual:
        """Return the layer's output; its last norm is left to whoever reads that."""
        total, n = self.before_attention.after(x, step, rotated=self.attention.rotated)
        attended = Residual(total, self.attention(n, step), self.after_attention.weight)
        total, n = self.before_mlp.after(attended, step, rotated=self.mlp.rotated)
        return Residual(total, self.mlp(n, step), self.after_mlp.weight)


def build(config: Config, weights: WeightSource) -> Decoder:
    """Assemble the model from its weights."""
    sizes = config.sizes
    device = weights.device
    tables: dict[str, RopeTable] = {kind: rope.table(device=device) for kind, rope in config.ropes.items()}

    def norm(name: str) -> RmsNorm:
        return RmsNorm(weights.vector(name, sizes.hidden), sizes.eps, 1.0)

    def block(index: int, kind: str) -> SandwichBlock:
        prefix = f"model.layers.{index}"
        first, second, third, fourth = (norm(f"{prefix}.{name}") for name in LAYER_NORMS)
        attention = SelfAttention(
            weights,
            f"{prefix}.self_attn",
            index,
            config.attention_shape(kind),
            tables[kind],
            norm_eps=sizes.eps,
            norm_offset=1.0,
        )
        mlp = GatedMlp(weights, f"{prefix}.mlp", sizes.hidden, sizes.intermediate, "gelu_pytorch_tanh")
        return SandwichBlock((first, second, third, fourth), attention, mlp)

    embedding = weights.matrix(EMBEDDING, sizes.vocab_size, sizes.hidden)
    blocks = [block(index, kind) for index, kind in enumerate(config.kinds)]
    head = head_weight(weights, embedding, tied=sizes.tied)
    return Decoder(
        Embedding(embedding, scale=sizes.hidden**0.5), blocks, norm(FINAL_NORM), head, config.softcap
    )


FAMILY = ModelFamily(
    # the original's table has no number for Gemma 3; this one lies outside the range that it uses
    arch_id=203,
    gguf_architectures=("gemma3",),
    from_hf=Config.from_hf,
    from_gguf=Config.from_gguf,
    build=build,
    names=NAMES,
    oracle="Gemma3ForCausalLM",
    oracle_config="Gemma3TextConfig",
    tiny={
        "vocab_size": 127,
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
        "max_position_embeddings": 256,
    },
)
