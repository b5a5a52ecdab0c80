"""RMS normalization with a weight per channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hipfire.kernels.residual import RESIDUAL_NORM
from hipfire.kernels.rms_norm import RMS_NORM
from hipfire.layers.context import StepContext


@dataclass(frozen=True, slots=True, eq=False)
class Residual:
    """The residual stream, [T, hidden]: `total`, and `delta` that the next norm adds to it as it reads it.

    With `delta_weight` [hidden] the delta is normalized by it before it is added.
    """

    total: torch.Tensor
    delta: torch.Tensor | None = None
    delta_weight: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return what a step has computed of it."""
        return (self.total,) if self.delta is None else (self.total, self.delta)


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

    def after(
        self, x: Residual, step: StepContext, *, rotated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the summed residual stream, the same normalized), both [T, hidden].

        `rotated` says that weights of a rotated format will read what is normalized. A delta that is to be
        normalized too has this norm's epsilon and offset.
        """
        if x.delta is None:
            return x.total, self(x.total, step)
        total, normalized = step.launcher.run(
            RESIDUAL_NORM,
            *(x.total, x.delta, self.weight, self.eps, self.offset, x.delta_weight),
            rotated=rotated,
        )
        return total, normalized
