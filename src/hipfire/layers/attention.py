"""Self-attention with grouped heads, RoPE, optional query/key norms, output gates and a sliding window."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hipfire.base.types import CacheSpec
from hipfire.kernels.elementwise import MUL_SIGMOID
from hipfire.layers.context import RopeTable, StepContext
from hipfire.layers.linear import JoinedLinear, Linear
from hipfire.layers.weights import WeightSource


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of one attention layer: `heads` query heads, `kv_heads` shared key/value heads.

    With `gated` the query projection has gates behind its queries, for the result of every head.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    gated: bool = False

    @property
    def query_rows(self) -> int:
        """Return the rows of the query projection."""
        return self.heads * self.head_dim * (2 if self.gated else 1)

    def cache_spec(self) -> CacheSpec:
        """Return what this layer needs of the cache."""
        return CacheSpec(self.kv_heads, self.head_dim, self.window)

    def tensors(self, *, norms: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the layer's tensor names and shapes, with the head norms where a model has them."""
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (self.query_rows, self.hidden),
            "self_attn.k_proj.weight": (kv_rows, self.hidden),
            "self_attn.v_proj.weight": (kv_rows, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, q_rows),
        }
        if norms:
            shapes["self_attn.q_norm.weight"] = (self.head_dim,)
            shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        return shapes


class SelfAttention:
    """One layer's attention; `layer` is its index among the model's cached layers.

    With `norm_eps` the queries and keys are RMS-normalized per head before RoPE (`norm_offset` as RmsNorm).
    """

    def __init__(
        self,
        weights: WeightSource,
        prefix: str,
        layer: int,
        shape: AttentionShape,
        rope: RopeTable,
        *,
        norm_eps: float | None = None,
        norm_offset: float = 0.0,
    ) -> None:
        self.layer = layer
        self.shape = shape
        self.rope = rope
        q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = {"q": shape.query_rows, "k": kv_size, "v": kv_size}
        inputs = [(f"{prefix}.{name}_proj.weight", size) for name, size in sizes.items()]
        self.inputs = JoinedLinear(weights.joined(inputs, shape.hidden))
        self.output = Linear(weights.matrix(f"{prefix}.o_proj.weight", shape.hidden, q_size))
        self._norms: tuple[torch.Tensor | None, torch.Tensor | None, float, float] = (None, None, 0.0, 0.0)
        if norm_eps is not None:
            q_weight = weights.vector(f"{prefix}.q_norm.weight", shape.head_dim)
            k_weight = weights.vector(f"{prefix}.k_norm.weight", shape.head_dim)
            self._norms = (q_weight, k_weight, norm_eps, norm_offset)

    @property
    def rotated(self) -> bool:
        """Tell whether weights of a rotated format read the layer's input."""
        return self.inputs.rotated

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the attention output [T, hidden] of all segments, and append their keys and values."""
        shape = self.shape
        parts, gate = self.inputs(x, step), None
        if shape.gated:
            queries, gate = parts[0].tensor_split(2, dim=1)
            parts = (queries, *parts[1:])
        q, k, v = (part.view(len(part), -1, shape.head_dim) for part in parts)
        cos, sin = step.angles(self.rope)
        q = step.cache.enter(step, self.layer, q, k, v, cos, sin, *self._norms)
        seen = step.cache.attend(step, self.layer, q, shape.scale, shape.window)
        seen = seen.flatten(1)
        return self.output(seen if gate is None else step.launcher.run(MUL_SIGMOID, seen, gate), step)
