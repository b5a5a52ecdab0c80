"""Rounding and conversion rules that the bytes of every format rest on, vectorised in torch.

All arithmetic is float32 with one rounding per operation. This file does not know groups, headers or packing.
Byte order is that of the host, which is little-endian on every machine that hipfire supports.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hipfire.base.errors import ValidationError

F16_MAX = 65504.0


def f32_to_f16(x: Tensor) -> Tensor:
    """Convert float32 to float16 by dropping bits (round toward zero), as every stored f16 header is made.

    Subnormals are truncated too, magnitudes below 2^-24 become a signed zero, those from 65536 up infinity;
    a NaN stays one.
    """
    bits = x.contiguous().view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) - 112
    fraction = bits & 0x7FFFFF
    normal = (exponent.clamp(0, 30) << 10) | (fraction >> 13)
    # beyond 24 places the shift leaves zero: that is also the rule for exponents below -10
    subnormal = (fraction | 0x800000) >> (14 - exponent).clamp(0, 31)
    magnitude = torch.where(exponent > 0, normal, subnormal)
    overflow = torch.full_like(magnitude, 0x7C00)
    magnitude = torch.where(exponent >= 31, overflow, magnitude)
    magnitude = torch.where(torch.isnan(x), overflow | (fraction >> 13) | 1, magnitude)
    return (((bits >> 16) & 0x8000) | magnitude).to(torch.int16).view(torch.float16)


def header_f16(x: Tensor, *, what: str, instead: str) -> Tensor:
    """Return `f32_to_f16(x)` for values that a file is going to hold; refuse those that float16 cannot.

    `what` names the values and `instead` the formats to use; raises ValidationError with both.
    """
    half = f32_to_f16(x)
    if not bool(torch.isfinite(half).all()):
        worst = float(x.abs().max())
        raise ValidationError(
            f"{what} of {worst:.6g} does not fit in float16 (at most {F16_MAX:.0f})",
            hint=f"use {instead}, whose range is that of float32",
        )
    return half


def trunc_u8(scaled: Tensor, qmax: int) -> Tensor:
    """Turn (value - lo) / step into codes: trunc(scaled + 0.5) in 0..qmax, NaN and negatives to 0.

    Overwrites its float32 argument; returns uint8 of the same shape.
    """
    return scaled.add_(0.5).nan_to_num_(nan=0.0).clamp_(0.0, float(qmax)).to(torch.uint8)


def round_away_i8(scaled: Tensor) -> Tensor:
    """Round to the nearest integer, halves away from zero, limited to -128..127; NaN to 0.

    Overwrites its float32 argument; returns int8 of the same shape.
    """
    scaled.nan_to_num_(nan=0.0).clamp_(-128.0, 127.0)
    whole = scaled.trunc()
    # the remainder is exact, so a half is seen as a half; adding 0.5 first could round 0.49999997 up
    return scaled.sub_(whole).mul_(2.0).trunc_().add_(whole).to(torch.int8)


def group_range(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum of each row of finite float32 [n, g]: two float32 [n, 1].

    Negative zero counts as less than zero, so that the minimum's bits depend neither on device nor on order.
    """
    lo = groups.amin(dim=-1, keepdim=True)
    hi = groups.amax(dim=-1, keepdim=True)
    if bool((lo == 0.0).any()):
        negative = ((groups == 0.0) & torch.signbit(groups)).any(dim=-1, keepdim=True)
        zero = torch.where(negative, -0.0, 0.0).to(lo.dtype)
        lo = torch.where(lo == 0.0, zero, lo)
    return lo, hi


def safe_inverse(step: Tensor, valid: Tensor) -> Tensor:
    """Return 1 / step where `valid`, else 0; a valid step that has underflowed to 0 gives infinity."""
    return torch.where(valid, step.reciprocal(), torch.zeros_like(step))


def divide(x: Tensor, divisor: float) -> Tensor:
    """Return x / divisor correctly rounded on every device."""
    # with a plain number, GPUs multiply by its reciprocal instead, which can differ in the last bit
    return x / torch.full_like(x, divisor)


def as_bytes(x: Tensor) -> Tensor:
    """Return the bytes of [n, k] elements as uint8 [n, k · itemsize]."""
    return x.contiguous().view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Read uint8 [n, k · itemsize] as [n, k] elements of `dtype`, whatever the alignment of the bytes."""
    # a tensor in a file starts at any byte, and neither torch nor a GPU reads wider elements there
    return data.clone(memory_format=torch.contiguous_format).view(dtype)


def f16_column(blocks: Tensor, offset: int) -> Tensor:
    """Read the float16 at byte `offset` of each block of uint8 [n, nbytes]: float32 [n, 1]."""
    return from_bytes(blocks[:, offset : offset + 2], torch.float16).to(torch.float32)
