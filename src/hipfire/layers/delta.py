"""Gated DeltaNet layers: attention whose memory of a sequence is one matrix for each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from hipfire.base.errors import ArtifactError, InternalError, UnsupportedError
from hipfire.base.types import StateSpec
from hipfire.kernels.delta_net import DELTA_NET, decay_of
from hipfire.layers.context import StepContext
from hipfire.layers.linear import JoinedLinear, Linear
from hipfire.layers.weights import WeightSource

# what head sizes are multiples of: the kernels take them in vectors and tiles
KEY_UNIT, VALUE_UNIT = 16, 32


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The sizes of one layer: `key_heads` of `key_dim` shared by `value_heads` of `value_dim`.

    `width` is the convolution's. Value head h reads key head h // (value_heads / key_heads), or
    h % key_heads where heads are `tiled`, as files in GGUF order them.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    tiled: bool = False

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ArtifactError(
                f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly",
                field="config",
            )
        if self.key_dim % KEY_UNIT or self.value_dim % VALUE_UNIT or self.width < 2:
            raise UnsupportedError(
                f"DeltaNet heads of {self.key_dim} x {self.value_dim} with a convolution of {self.width} "
                "are not supported",
                hint=f"supported: multiples of {KEY_UNIT} x {VALUE_UNIT}, and a convolution of 2 or more",
            )

    @property
    def values(self) -> int:
        """Return the width of the heads' results."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Return the channels of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    def state_spec(self) -> StateSpec:
        """Return what the layer keeps of a sequence."""
        return StateSpec(
            self.channels, self.width, self.key_heads, self.value_heads, self.key_dim, self.value_dim
        )

    def inputs(self) -> dict[str, int]:
        """Return the projections that read the layer's input, by name, with their rows."""
        return {
            "in_proj_qkv": self.channels,
            "in_proj_z": self.values,
            "in_proj_b": self.value_heads,
            "in_proj_a": self.value_heads,
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the layer's tensor names and shapes."""
        inputs = {f"linear_attn.{name}.weight": (rows, self.hidden) for name, rows in self.inputs().items()}
        return {
            **inputs,
            "linear_attn.conv1d.weight": (self.channels, self.width),
            "linear_attn.A_log": (self.value_heads,),
            "linear_attn.dt_bias": (self.value_heads,),
            "linear_attn.norm.weight": (self.value_dim,),
            "linear_attn.out_proj.weight": (self.hidden, self.values),
        }


class DeltaNet:
    """One layer; `layer` is its index among the model's recurrent layers, `eps` that of its output norm."""

    def __init__(
        self, weights: WeightSource, prefix: str, layer: int, shape: DeltaShape, *, eps: float
    ) -> None:
        self.layer = layer
        self.shape = shape
        self.eps = eps
        inputs = [(f"{prefix}.{name}.weight", rows) for name, rows in shape.inputs().items()]
        self.inputs = JoinedLinear(weights.joined(inputs, shape.hidden))
        self.output = Linear(weights.matrix(f"{prefix}.out_proj.weight", shape.hidden, shape.values))
        self._own = (
            weights.vector(f"{prefix}.conv1d.weight", shape.channels, shape.width),
            decay_of(weights.vector(f"{prefix}.A_log", shape.value_heads)),
            weights.vector(f"{prefix}.dt_bias", shape.value_heads),
            weights.vector(f"{prefix}.norm.weight", shape.value_dim),
        )

    @property
    def rotated(self) -> bool:
        """Tell whether weights of a rotated format read the layer's input."""
        return self.inputs.rotated

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the layer's output [T, hidden] of all segments, and move their states on."""
        if step.cache.states is None:
            raise InternalError("a recurrent layer runs over caches without states")
        states = (step.cache.states.tail(self.layer), step.cache.states.matrix(self.layer))
        places = (step.rows, step.pieces, self.eps)
        mixed, z, b, a = self.inputs(x, step)
        seen = step.launcher.run(
            DELTA_NET, mixed, z, b, a, *self._own, *states, *places, tiled=self.shape.tiled
        )
        return self.output(cast(torch.Tensor, seen), step)
