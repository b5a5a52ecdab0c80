"""Matrix products with packed weights, and the token embedding that may share its matrix with the head."""

from __future__ import annotations

import itertools

import torch

from hipfire.kernels.elementwise import SCALE
from hipfire.kernels.packed import PACKED_LINEAR
from hipfire.layers.context import StepContext
from hipfire.layers.weights import Joined, Weight


class Linear:
    """y = x W^T; x [T, K], y float32 [T, N].

    Weights of a rotated format are stored as R W. Since (R w) . (R x) = w . x, the activations are rotated by
    the same R before the product; unrotated formats get them as they are.
    """

    def __init__(self, weight: Weight) -> None:
        self.weight = weight

    @property
    def rotated(self) -> bool:
        """Tell whether the product is made in the basis of rotated weights."""
        return self.weight.format.rotated

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the product for all rows of the step."""
        if self.rotated:
            x = step.rotated(x)
        return self.weight.product(step.launcher, x)


class JoinedLinear:
    """Products of the same activations with several weights: a single one where they are one matrix."""

    def __init__(self, joined: Joined) -> None:
        self.joined = joined
        self._linears = tuple(Linear(part) for part in joined.parts)
        ends = list(itertools.accumulate(part.rows for part in joined.parts))
        self._columns = tuple(zip([0, *ends], ends, strict=False))

    @property
    def rotated(self) -> bool:
        """Tell whether any of the products is made in the basis of rotated weights."""
        return self.joined.rotated

    def __call__(self, x: torch.Tensor, step: StepContext) -> tuple[torch.Tensor, ...]:
        """Return the products [T, rows of a part] for x [T, cols]; they may be columns of one tensor."""
        matrix = self.joined.matrix
        if matrix is None:
            return tuple(linear(x, step) for linear in self._linears)
        whole: torch.Tensor = step.launcher.run(PACKED_LINEAR, self.basis(x, step), matrix)
        return tuple(whole[:, first:last] for first, last in self._columns)

    def basis(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return activations in the basis of the joined matrix."""
        return step.rotated(x) if self.rotated else x


class Embedding:
    """Token id to row of the matrix; ids [T], result [T, D], times `scale` where a model has one."""

    def __init__(self, weight: Weight, scale: float = 1.0) -> None:
        self.weight = weight
        self.scale = scale

    def __call__(self, tokens: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the embedded tokens."""
        rows = self.weight.select(step.launcher, tokens)
        if self.scale != 1.0:
            rows = step.launcher.run(SCALE, rows, self.scale)
        return rows
