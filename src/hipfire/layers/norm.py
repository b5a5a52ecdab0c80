"""RMS normalization with a weight per channel."""

from __future__ import annotations

import torch

from hipfire.kernels.rms_norm import RMS_NORM
from hipfire.layers.context import StepContext


class RmsNorm:
    """x / rms(x) * (offset + weight) over the last dimension, float32."""

    def __init__(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        self.weight = weight
        self.eps = eps
        self.offset = offset

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the normalized tensor, same shape."""
        result: torch.Tensor = step.launcher.run(RMS_NORM, x, self.weight, self.eps, self.offset)
        return result
