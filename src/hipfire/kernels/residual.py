"""The residual sum and the norm that follows it, in one operation."""

from __future__ import annotations

import torch

from hipfire.kernels.launch import Op
from hipfire.kernels.rms_norm import rms_norm_ref


def residual_norm_ref(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    delta_weight: torch.Tensor | None = None,
    *,
    rotated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, n): y = x + delta, float32 [T, D], and n = rms_norm(y, weight, eps, offset), [T, D].

    x and delta [T, D]; weight [D]. With `delta_weight` [D] the delta is normalized by it first (same eps and
    offset), as in models that normalize a block's output. `rotated` says that products with rotated weights
    will read n; it changes no result. Kernels may return n in bfloat16 in prefill steps.
    """
    if delta_weight is not None:
        delta = rms_norm_ref(delta, delta_weight, eps, offset)
    total = x.float() + delta.float()
    return total, rms_norm_ref(total, weight, eps, offset)


RESIDUAL_NORM = Op(
    "residual_norm",
    residual_norm_ref,
    {
        "numba": "hipfire.kernels.cpu.ops.residual_norm",
        "triton": "hipfire.kernels.gpu.norms.residual_norm",
    },
)
