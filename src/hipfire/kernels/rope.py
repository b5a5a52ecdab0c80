"""Rotary position embedding, half-split layout: element i pairs with element i + R/2 of the rotated part."""

from __future__ import annotations

import torch

from hipfire.kernels.launch import Op


def rope_angles_ref(
    rows: torch.Tensor, inverse_frequencies: torch.Tensor, attention_scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin), each [T, R/2] float32, for frequencies [R/2] and the positions in `rows`.

    `rows` int64 [T, 2] holds slot and position of every token. `attention_scale` multiplies both, as scaled
    RoPE variants ask.
    """
    angles = rows[:, 1].float()[:, None] * inverse_frequencies.float()[None, :]
    return angles.cos() * attention_scale, angles.sin() * attention_scale


def rope_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first R dims of every head; x [T, H, D], cos and sin [T, R/2], R <= D; float32 out."""
    half = cos.shape[-1]
    values = x.float()
    first, second = values[..., :half], values[..., half : 2 * half]
    c, s = cos[:, None, :], sin[:, None, :]
    rotated = (first * c - second * s, second * c + first * s, values[..., 2 * half :])
    return torch.cat(rotated, dim=-1)


ROPE_ANGLES = Op(
    "rope_angles",
    rope_angles_ref,
    {"numba": "hipfire.kernels.cpu.ops.rope_angles", "triton": "hipfire.kernels.gpu.rope.rope_angles"},
)
ROPE = Op("rope", rope_ref, {"numba": "hipfire.kernels.cpu.ops.rope"})
