"""The frame that all decoder-only models share: embedding, a list of blocks, final norm, head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Protocol

import torch

from hipfire.kernels.elementwise import SOFTCAP
from hipfire.layers.attention import AttentionShape, SelfAttention
from hipfire.layers.context import RopeTable, StepContext
from hipfire.layers.linear import Embedding, Linear
from hipfire.layers.mlp import GatedMlp, mlp_tensors
from hipfire.layers.norm import Residual, RmsNorm
from hipfire.layers.outline import outline
from hipfire.layers.weights import Weight, WeightSource

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


class Block(Protocol):
    """One layer of a decoder."""

    def __call__(self, x: Residual, step: StepContext) -> Residual:
        """Return the layer's output [T, hidden] for its input [T, hidden].

        The last sum is left to the norm that reads it, and so is the first.
        """


class Mixer(Protocol):
    """A part of a layer; x and result [T, hidden]."""

    @property
    def rotated(self) -> bool:
        """Whether weights of a rotated format read its input."""

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return its output before the residual sum."""


class MixerBlock:
    """A layer that adds a mixer of tokens and a feed-forward of the normalized input to its input."""

    def __init__(self, mixer_norm: RmsNorm, mixer: Mixer, mlp_norm: RmsNorm, mlp: Mixer) -> None:
        self.mixer_norm, self.mixer = mixer_norm, mixer
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def __call__(self, x: Residual, step: StepContext) -> Residual:
        """Return the layer's output."""
        total, n = self.mixer_norm.after(x, step, rotated=self.mixer.rotated)
        mixed = Residual(total, self.mixer(n, step))
        total, n = self.mlp_norm.after(mixed, step, rotated=self.mlp.rotated)
        return Residual(total, self.mlp(n, step))


class PreNormBlock(MixerBlock):
    """Such a layer with attention and a gated feed-forward block."""

    def __init__(
        self,
        weights: WeightSource,
        index: int,
        attention: AttentionShape,
        intermediate: int,
        rope: RopeTable,
        *,
        activation: str,
        eps: float,
        head_norms: bool = False,
    ) -> None:
        prefix, hidden = f"model.layers.{index}", attention.hidden
        before_attention = weights.vector(f"{prefix}.input_layernorm.weight", hidden)
        before_mlp = weights.vector(f"{prefix}.post_attention_layernorm.weight", hidden)
        norm_eps = eps if head_norms else None
        mixer = SelfAttention(weights, f"{prefix}.self_attn", index, attention, rope, norm_eps=norm_eps)
        mlp = GatedMlp(weights, f"{prefix}.mlp", hidden, intermediate, activation)
        super().__init__(RmsNorm(before_attention, eps), mixer, RmsNorm(before_mlp, eps), mlp)

    @staticmethod
    def tensors(
        attention: AttentionShape, intermediate: int, *, head_norms: bool = False
    ) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the layer's tensors."""
        return {
            "input_layernorm.weight": (attention.hidden,),
            **attention.tensors(norms=head_norms),
            "post_attention_layernorm.weight": (attention.hidden,),
            **mlp_tensors(attention.hidden, intermediate),
        }


class Decoder:
    """An assembled decoder; `softcap` bounds its logits where a model asks for it."""

    def __init__(
        self, embed: Embedding, blocks: Sequence[Block], norm: RmsNorm, head: Weight, softcap: float | None
    ) -> None:
        self.embed = embed
        self.blocks = tuple(blocks)
        self.norm = norm
        self.head = Linear(head)
        self.softcap = softcap

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding."""
        return self.embed.weight.rows

    def outline(self) -> Decoder:
        """Return a decoder whose steps take the same scratch as this one's, with fewer blocks if it can."""
        shorter = copy(self)
        shorter.blocks = outline(self.blocks)
        return shorter

    def __call__(self, tokens: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the hidden states [T, hidden] of the step's tokens [T], normalized for the head."""
        x = Residual(self.embed(tokens, step))
        for block in self.blocks:
            x = block(x, step)
            step.settle(*x.tensors)
        _, hidden = self.norm.after(x, step, rotated=self.head.rotated)
        return hidden

    def logits(self, hidden: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return float32 logits [R, vocab] of R hidden states [R, hidden]."""
        result = self.head(hidden, step)
        if self.softcap is not None:
            result = step.launcher.run(SOFTCAP, result, self.softcap)
        return result


def head_weight(weights: WeightSource, embedding: Weight, *, tied: bool) -> Weight:
    """Return the matrix of the head: the embedding's own if tied, whatever else the checkpoint holds."""
    return embedding if tied else weights.matrix(HEAD, embedding.rows, embedding.cols)


def decoder_tensors(
    vocab_size: int, hidden: int, blocks: Sequence[Mapping[str, tuple[int, ...]]], *, tied: bool
) -> dict[str, tuple[int, ...]]:
    """Return the canonical names and shapes of a decoder whose blocks have the given tensors."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocab_size, hidden)}
    for index, block in enumerate(blocks):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in block.items()})
    shapes[FINAL_NORM] = (hidden,)
    if not tied:
        shapes[HEAD] = (vocab_size, hidden)
    return shapes
