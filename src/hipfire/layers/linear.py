"""Matrix products with packed weights, and the token embedding that may share its matrix with the head."""

from __future__ import annotations

import torch

from hipfire.kernels.elementwise import SCALE
from hipfire.layers.context import StepContext
from hipfire.layers.weights import Weight


class Linear:
    """y = x W^T; x [T, K], y float32 [T, N].

    Weights of a rotated format are stored as R W. Since (R w) . (R x) = w . x, the activations are rotated by
    the same R before the product; unrotated formats get them as they are.
    """

    def __init__(self, weight: Weight) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the product for all rows of the step."""
        if self.weight.format.rotated:
            x = step.rotated(x)
        return self.weight.product(step.launcher, x)


class Embedding:
    """Token id to row of the matrix; ids [T], result float32 [T, D], times `scale` where a model has one."""

    def __init__(self, weight: Weight, scale: float = 1.0) -> None:
        self.weight = weight
        self.scale = scale

    def __call__(self, tokens: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the embedded tokens."""
        rows = self.weight.select(step.launcher, tokens)
        if self.scale != 1.0:
            rows = step.launcher.run(SCALE, rows, self.scale)
        return rows
