"""What the hybrid models share: layers of gated DeltaNet, and layers of gated attention between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.base.types import CacheSpec, StateSpec
from hipfire.checkpoint.names import DECODER_RULES, NameRule, override_rules
from hipfire.layers.attention import AttentionShape, SelfAttention
from hipfire.layers.decoder import (
    EMBEDDING,
    FINAL_NORM,
    Decoder,
    Mixer,
    MixerBlock,
    decoder_tensors,
    head_weight,
)
from hipfire.layers.delta import DeltaNet, DeltaShape
from hipfire.layers.linear import Embedding
from hipfire.layers.norm import RmsNorm
from hipfire.layers.rope import RopeSpec
from hipfire.layers.weights import WeightSource
from hipfire.models.fields import Fields, GgufFields, text_fields
from hipfire.models.rope_fields import gguf_rope, rope_object
from hipfire.models.sizes import Sizes

RECURRENT, FULL = "linear_attention", "full_attention"
# every fourth layer is one of attention where a checkpoint does not list its layers
INTERVAL = 4
# the part of a head's dims that is rotated where a checkpoint does not say
PARTIAL = 0.25
THETA = 10000.0
# norms of the hidden stream and of attention's heads are stored as what is added to one
OFFSET = 1.0
# of a container made from GGUF, whose value heads are in another order
TILED = "hipfire_tiled_value_heads"

_LAYER, _BLOCK = "model.layers.{i}", "blk.{i}"
_DELTA = f"{_LAYER}.linear_attn"
HYBRID_RULES = override_rules(
    DECODER_RULES,
    NameRule("model.norm.weight", "output_norm.weight", "minus_one"),
    NameRule(f"{_LAYER}.input_layernorm.weight", f"{_BLOCK}.attn_norm.weight", "minus_one"),
    NameRule(
        f"{_LAYER}.post_attention_layernorm.weight", f"{_BLOCK}.post_attention_norm.weight", "minus_one"
    ),
    NameRule(f"{_LAYER}.self_attn.q_proj.weight", f"{_BLOCK}.attn_q.weight", "gate_rows"),
    NameRule(f"{_LAYER}.self_attn.q_norm.weight", f"{_BLOCK}.attn_q_norm.weight", "minus_one"),
    NameRule(f"{_LAYER}.self_attn.k_norm.weight", f"{_BLOCK}.attn_k_norm.weight", "minus_one"),
    NameRule(f"{_DELTA}.in_proj_qkv.weight", f"{_BLOCK}.attn_qkv.weight"),
    NameRule(f"{_DELTA}.in_proj_z.weight", f"{_BLOCK}.attn_gate.weight"),
    NameRule(f"{_DELTA}.in_proj_b.weight", f"{_BLOCK}.ssm_beta.weight"),
    NameRule(f"{_DELTA}.in_proj_a.weight", f"{_BLOCK}.ssm_alpha.weight"),
    NameRule(f"{_DELTA}.conv1d.weight", f"{_BLOCK}.ssm_conv1d.weight"),
    NameRule(f"{_DELTA}.A_log", f"{_BLOCK}.ssm_a", "log_negative"),
    NameRule(f"{_DELTA}.dt_bias", f"{_BLOCK}.ssm_dt.bias"),
    NameRule(f"{_DELTA}.norm.weight", f"{_BLOCK}.ssm_norm.weight"),
    NameRule(f"{_DELTA}.out_proj.weight", f"{_BLOCK}.ssm_out.weight"),
)


@dataclass(frozen=True)
class Hybrid:
    """Sizes and constants of a hybrid model; `kinds` names every layer's kind of mixer."""

    sizes: Sizes
    kinds: tuple[str, ...]
    rope: RopeSpec
    delta: DeltaShape

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, intermediate: str = "intermediate_size") -> Hybrid:
        """Read a Hugging Face config; UnsupportedError for anything that is not implemented.

        `intermediate` names the field of the feed-forward width.
        """
        fields = text_fields(config)
        fields.require("hidden_act", ("silu",), "silu")
        fields.require("attention_bias", (False,), False)
        # wrappers of several kinds of input say it of the whole
        tied = config.get("tie_word_embeddings") is True
        sizes = Sizes.from_hf(fields, head_dim=256, max_positions=32768, tied=tied, intermediate=intermediate)
        delta = DeltaShape(
            hidden=sizes.hidden,
            key_heads=fields.integer("linear_num_key_heads", 16),
            value_heads=fields.integer("linear_num_value_heads", 32),
            key_dim=fields.integer("linear_key_head_dim", 128),
            value_dim=fields.integer("linear_value_head_dim", 128),
            width=fields.integer("linear_conv_kernel_dim", 4),
            tiled=fields.boolean(TILED, False),
        )
        return cls(sizes, _kinds(fields, sizes.layers), _hf_rope(fields, sizes.head_dim), delta)

    @classmethod
    def from_gguf(cls, fields: GgufFields, *, intermediate: str = "feed_forward_length") -> Hybrid:
        """Read the metadata of a GGUF file; `intermediate` as `Sizes.from_gguf`."""
        rotary = fields.integer("rope.dimension_count")
        drafts = fields.get("nextn_predict_layers", 0) and fields.integer("nextn_predict_layers")
        sizes = Sizes.from_gguf(fields, rotary=rotary, drafts=drafts, intermediate=intermediate)
        value_heads = fields.integer("ssm.time_step_rank")
        inner = fields.integer("ssm.inner_size")
        if inner % value_heads:
            raise ArtifactError(
                f"is {inner}, not a multiple of {value_heads}", field=fields.name("ssm.inner_size")
            )
        delta = DeltaShape(
            hidden=sizes.hidden,
            key_heads=fields.integer("ssm.group_count"),
            value_heads=value_heads,
            key_dim=fields.integer("ssm.state_size"),
            value_dim=inner // value_heads,
            width=fields.integer("ssm.conv_kernel"),
            tiled=True,
        )
        kinds = _patterned(sizes.layers, fields.integer("full_attention_interval", INTERVAL))
        return cls(sizes, kinds, gguf_rope(fields, rotary, THETA), delta)

    def attention_shape(self) -> AttentionShape:
        """Return the sizes of a layer of attention."""
        s = self.sizes
        return AttentionShape(s.hidden, s.heads, s.kv_heads, s.head_dim, s.head_dim**-0.5, gated=True)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Return what every layer of attention needs of the cache."""
        return (self.attention_shape().cache_spec(),) * self.kinds.count(FULL)

    def state_specs(self) -> tuple[StateSpec, ...]:
        """Return what every recurrent layer keeps of a sequence."""
        return (self.delta.state_spec(),) * self.kinds.count(RECURRENT)

    def tensors(self, mlp: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the canonical names and shapes of all tensors; `mlp` has those of a layer's feed-forward."""
        s = self.sizes
        norms: dict[str, tuple[int, ...]] = dict.fromkeys(
            ("input_layernorm.weight", "post_attention_layernorm.weight"), (s.hidden,)
        )
        mixers = {FULL: self.attention_shape().tensors(norms=True), RECURRENT: self.delta.tensors()}
        blocks = [{**norms, **mixers[kind], **mlp} for kind in self.kinds]
        return decoder_tensors(s.vocab_size, s.hidden, blocks, tied=s.tied)

    def to_hf(self) -> dict[str, Any]:
        """Return the fields as `from_hf` reads them."""
        d = self.delta
        partial = self.rope.dims / self.sizes.head_dim
        return {
            "hidden_act": "silu",
            **self.sizes.to_hf(),
            "layer_types": list(self.kinds),
            "rope_parameters": {**self.rope.to_hf(), "partial_rotary_factor": partial},
            "linear_num_key_heads": d.key_heads,
            "linear_num_value_heads": d.value_heads,
            "linear_key_head_dim": d.key_dim,
            "linear_value_head_dim": d.value_dim,
            "linear_conv_kernel_dim": d.width,
            **({TILED: True} if d.tiled else {}),
        }

    def build(self, weights: WeightSource, mlp: Callable[[str], Mixer]) -> Decoder:
        """Assemble the model; `mlp` makes a layer's feed-forward from the prefix of its tensors."""
        sizes, rope = self.sizes, self.rope.table(device=weights.device)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(weights.vector(name, sizes.hidden), sizes.eps, OFFSET)

        def mixer(index: int, kind: str) -> Mixer:
            prefix, place = f"model.layers.{index}", self.kinds[:index].count(kind)
            if kind == RECURRENT:
                return DeltaNet(weights, f"{prefix}.linear_attn", place, self.delta, eps=sizes.eps)
            prefix, shape = f"{prefix}.self_attn", self.attention_shape()
            norms = {"norm_eps": sizes.eps, "norm_offset": OFFSET}
            return SelfAttention(weights, prefix, place, shape, rope, **norms)

        def block(index: int, kind: str) -> MixerBlock:
            prefix = f"model.layers.{index}"
            before = norm(f"{prefix}.input_layernorm.weight")
            after = norm(f"{prefix}.post_attention_layernorm.weight")
            return MixerBlock(before, mixer(index, kind), after, mlp(f"{prefix}.mlp"))

        embedding = weights.matrix(EMBEDDING, sizes.vocab_size, sizes.hidden)
        blocks = [block(index, kind) for index, kind in enumerate(self.kinds)]
        head = head_weight(weights, embedding, tied=sizes.tied)
        return Decoder(Embedding(embedding), blocks, norm(FINAL_NORM), head, None)


def _patterned(layers: int, interval: int) -> tuple[str, ...]:
    return tuple(RECURRENT if (index + 1) % interval else FULL for index in range(layers))


def _kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    listed = fields.strings("layer_types")
    if listed is None:
        return _patterned(layers, fields.integer("full_attention_interval", INTERVAL))
    if len(listed) != layers:
        raise ArtifactError(
            f"has {len(listed)} entries for {layers} layers", field=fields.name("layer_types")
        )
    unknown = set(listed) - {RECURRENT, FULL}
    if unknown:
        raise UnsupportedError(f"layer types {sorted(unknown)} are not supported")
    return tuple(listed)


def _hf_rope(fields: Fields, head_dim: int) -> RopeSpec:
    """Read the rotary parameters; sections of positions say nothing, since of text all three are equal."""
    nested = fields.nested("rope_parameters") or fields.nested("rope_scaling") or Fields({}, fields.what)
    partial = nested.number("partial_rotary_factor", fields.number("partial_rotary_factor", PARTIAL))
    dims = int(head_dim * partial)
    if not 0 < dims <= head_dim or dims % 2:
        raise ArtifactError(f"is {partial}", field=nested.name("partial_rotary_factor"))
    rest = {key: value for key, value in nested.values.items() if key != "partial_rotary_factor"}
    if rest.get("rope_type", rest.get("type")) == "mrope":
        rest["rope_type"] = "default"
    return rope_object(Fields(rest, nested.what), dims, fields.number("rope_theta", THETA))
