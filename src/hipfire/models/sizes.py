"""The sizes that every decoder-only model has, read from a Hugging Face config or from GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hipfire.base.errors import ArtifactError
from hipfire.layers.attention import AttentionShape
from hipfire.models.fields import Fields, GgufFields

# names are expanded layer by layer, so a hostile count must be refused before that
MOST_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a decoder: counts, widths in elements, `max_positions` in tokens.

    `eps` is the RMSNorm epsilon; `tied` tells that the head uses the embedding's matrix.
    """

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    max_positions: int
    tied: bool

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ArtifactError(
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly",
                field="config",
            )
        if self.head_dim % 2:
            raise ArtifactError(f"is {self.head_dim}, but rotary pairs need an even size", field="head_dim")
        if self.layers > MOST_LAYERS:
            raise ArtifactError(f"is {self.layers}, more than {MOST_LAYERS}", field="number of layers")

    @classmethod
    def from_hf(
        cls,
        fields: Fields,
        *,
        head_dim: int | None,
        max_positions: int,
        tied: bool,
        eps: float = 1e-6,
        intermediate: str = "intermediate_size",
    ) -> Sizes:
        """Read the fields that all families share; the arguments are the family's defaults.

        `head_dim` None means that the hidden width divided by the heads is the default. `intermediate` names
        the field of the feed-forward width.
        """
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden=hidden,
            intermediate=fields.integer(intermediate),
            layers=fields.integer("num_hidden_layers"),
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", head_dim or hidden // max(heads, 1)),
            eps=fields.number("rms_norm_eps", eps),
            max_positions=fields.integer("max_position_embeddings", max_positions),
            tied=fields.boolean("tie_word_embeddings", tied),
        )

    @classmethod
    def from_gguf(
        cls,
        fields: GgufFields,
        *,
        rotary: int | None = None,
        drafts: int = 0,
        intermediate: str = "feed_forward_length",
    ) -> Sizes:
        """Read the keys that all GGUF architectures share; per-layer values must agree.

        `rotary` dims of a head are rotated, all of them unless given. The last `drafts` blocks are no part of
        the model proper. `intermediate` is the key of the feed-forward width; any but the usual one is that
        of a mixture of experts.
        """
        layers = fields.integer("block_count") - drafts
        hidden = fields.integer("embedding_length")
        heads = fields.uniform("attention.head_count", layers)
        head_dim = fields.integer("attention.key_length", hidden // max(heads, 1))
        fields.require("attention.value_length", (head_dim,), head_dim)
        fields.require("rope.dimension_count", (rotary or head_dim,), rotary or head_dim)
        if intermediate == "feed_forward_length":
            fields.require("expert_count", (0,), 0)
        return cls(
            vocab_size=fields.vocab_rows(),
            hidden=hidden,
            intermediate=fields.uniform(intermediate, layers),
            layers=layers,
            heads=heads,
            kv_heads=fields.uniform("attention.head_count_kv", layers, heads),
            head_dim=head_dim,
            eps=fields.number("attention.layer_norm_rms_epsilon"),
            max_positions=fields.integer("context_length"),
            tied="output.weight" not in fields.tensors,
        )

    def attention_shape(self) -> AttentionShape:
        """Return the attention of layers that see everything and scale by the head size."""
        return AttentionShape(self.hidden, self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5)

    def to_hf(self) -> dict[str, Any]:
        """Return the fields as `from_hf` reads them."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.eps,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tied,
        }
