"""RMS normalization over the last dimension."""

from __future__ import annotations

import torch

from hipfire.kernels.launch import Op


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (offset + weight), float32.

    x [..., D], weight [D]. `offset` is 1 for models that store the weight's distance from one (Gemma).
    """
    values = x.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return values * scale * (weight.float() + offset)


RMS_NORM = Op(
    "rms_norm",
    rms_norm_ref,
    {"numba": "hipfire.kernels.cpu.ops.rms_norm", "triton": "hipfire.kernels.gpu.norms.rms_norm"},
)
