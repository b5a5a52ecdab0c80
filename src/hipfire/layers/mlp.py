"""The gated feed-forward block: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from hipfire.base.errors import UnsupportedError
from hipfire.kernels.elementwise import GELU_TANH_MUL, SILU_MUL
from hipfire.kernels.launch import Op
from hipfire.kernels.packed import PACKED_GATED
from hipfire.layers.context import StepContext
from hipfire.layers.linear import JoinedLinear, Linear
from hipfire.layers.weights import WeightSource

GATED_ACTIVATIONS: Mapping[str, Op] = {"silu": SILU_MUL, "gelu_pytorch_tanh": GELU_TANH_MUL}


def mlp_tensors(hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    """Return the tensor names and shapes of one layer's feed-forward block."""
    return {
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }


class GatedMlp:
    """Gate, up and down projections of one layer; x and result [T, hidden]."""

    def __init__(
        self, weights: WeightSource, prefix: str, hidden: int, intermediate: int, activation: str
    ) -> None:
        if activation not in GATED_ACTIVATIONS:
            raise UnsupportedError(
                f"activation {activation!r} is not supported", hint=f"known: {', '.join(GATED_ACTIVATIONS)}"
            )
        self.activation = activation
        names = (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
        self.inputs = JoinedLinear(weights.joined([(name, intermediate) for name in names], hidden))
        self.down = Linear(weights.matrix(f"{prefix}.down_proj.weight", hidden, intermediate))

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the block's output before the residual sum."""
        return self.down(self._gated(x, step), step)

    @property
    def rotated(self) -> bool:
        """Tell whether weights of a rotated format read the block's input."""
        return self.inputs.rotated

    def _gated(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        matrix = self.inputs.joined.matrix
        if matrix is not None:
            x = self.inputs.basis(x, step)
            return cast(torch.Tensor, step.launcher.run(PACKED_GATED, x, matrix, self.activation))
        gate, up = self.inputs(x, step)
        return cast(torch.Tensor, step.launcher.run(GATED_ACTIVATIONS[self.activation], gate, up))
