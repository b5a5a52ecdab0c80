"""Affine groups: weight = step · code + zero. The maths that all HFQ and MQ formats share.

A block is an 8-byte header and the packed codes. With float32 headers one (step, zero) serves the whole
block; with float16 headers each half of the block has its own. Encoders take float32 [n, t] with t up to
the block's elements: what is missing is stored as code 0. This file does not know rotation, rows or qtypes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hipfire.base.errors import ValidationError
from hipfire.quant.bitpack import PACK, UNPACK
from hipfire.quant.scalar import (
    as_bytes,
    divide,
    from_bytes,
    group_range,
    header_f16,
    safe_inverse,
    trunc_u8,
)

HEADER = 8


def encode_f32_header(groups: Tensor, *, bits: int, elements: int) -> Tensor:
    """Encode float32 [n, t] into blocks uint8 [n, 8 + elements · bits / 8].

    The header is float32 step and float32 minimum. A constant group has step 1 and codes 0. A step of at most
    2^-128 has no finite inverse: its codes are 0 or the largest. Raises ValidationError when the range of a
    group overflows float32.
    """
    qmax = (1 << bits) - 1
    lo, hi = group_range(groups)
    span = hi - lo
    _refuse_infinite(span)
    ranged = span > 0.0
    step = divide(span, float(qmax))
    codes = trunc_u8((groups - lo).mul_(safe_inverse(step, ranged)), qmax)
    header = torch.cat((torch.where(ranged, step, torch.ones_like(step)), lo), dim=1)
    return _assemble(header, codes, bits, elements)


def decode_f32_header(blocks: Tensor, *, bits: int) -> Tensor:
    """Decode blocks with a float32 header into float32 [n, elements]."""
    header = from_bytes(blocks[:, :HEADER], torch.float32)
    codes = UNPACK[bits](blocks[:, HEADER:]).to(torch.float32)
    return codes.mul_(header[:, :1]).add_(header[:, 1:])


def encode_f16_header(groups: Tensor, *, bits: int, instead: str) -> Tensor:
    """Encode float32 [n, elements] into blocks whose halves have a float16 step and minimum each.

    Codes are made with the header's own (truncated) numbers, so that decoding does not shift them. A half
    whose step truncates to 0 gets codes 0. Raises ValidationError when a step or minimum does not fit in
    float16; `instead` names the formats to use then.
    """
    qmax = (1 << bits) - 1
    n, elements = groups.shape
    halves = groups.reshape(2 * n, elements // 2)
    lo, hi = group_range(halves)
    span = hi - lo
    _refuse_infinite(span)
    step16 = header_f16(divide(span, float(qmax)), what="a quantization step", instead=instead)
    zero16 = header_f16(lo, what="a group minimum", instead=instead)
    step = step16.to(torch.float32)
    scaled = (halves - zero16.to(torch.float32)).mul_(safe_inverse(step, step > 0.0))
    codes = trunc_u8(scaled, qmax).view(n, elements)
    return _assemble(torch.cat((step16, zero16), dim=1).view(n, 4), codes, bits, elements)


def decode_f16_header(blocks: Tensor, *, bits: int) -> Tensor:
    """Decode blocks with two float16 headers into float32 [n, elements]."""
    n = blocks.shape[0]
    header = from_bytes(blocks[:, :HEADER], torch.float16).to(torch.float32).view(2 * n, 2)
    codes = UNPACK[bits](blocks[:, HEADER:]).to(torch.float32)
    halves = codes.view(2 * n, codes.shape[1] // 2)
    return halves.mul_(header[:, :1]).add_(header[:, 1:]).view(n, codes.shape[1])


def _refuse_infinite(span: Tensor) -> None:
    if not bool(torch.isfinite(span).all()):
        raise ValidationError(
            "a group of weights spans more than float32 can hold",
            hint="the tensor is likely damaged; store it as F32 to keep it as it is",
        )


def _assemble(header: Tensor, codes: Tensor, bits: int, elements: int) -> Tensor:
    if codes.shape[1] < elements:
        codes = torch.nn.functional.pad(codes, (0, elements - codes.shape[1]))
    return torch.cat((as_bytes(header), PACK[bits](codes)), dim=1)
