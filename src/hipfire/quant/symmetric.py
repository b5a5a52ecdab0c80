"""Blocks of a float16 scale and 32 int8: the maths of Q8F16 and of GGML's Q8_0, which share their layout.

This file does not know rows or qtypes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hipfire.quant.scalar import (
    as_bytes,
    divide,
    f16_column,
    from_bytes,
    header_f16,
    round_away_i8,
    safe_inverse,
)

_ELEMENTS = 32
_QMAX = 127.0


def encode_int8(groups: Tensor, *, instead: str) -> Tensor:
    """Encode float32 [n, t], t up to 32, into blocks uint8 [n, 34]; missing weights are stored as 0.

    Codes are made with the scale before it is truncated to float16. Raises ValidationError when the scale
    does not fit in float16; `instead` names the formats to use then.
    """
    scale = divide(groups.abs().amax(dim=1, keepdim=True), _QMAX)
    header = header_f16(scale, what="a scale", instead=instead)
    codes = round_away_i8(groups * safe_inverse(scale, scale > 0.0))
    if codes.shape[1] < _ELEMENTS:
        codes = torch.nn.functional.pad(codes, (0, _ELEMENTS - codes.shape[1]))
    return torch.cat((as_bytes(header), codes.view(torch.uint8)), dim=1)


def decode_int8(blocks: Tensor) -> Tensor:
    """Decode blocks uint8 [n, 34] into float32 [n, 32]."""
    return from_bytes(blocks[:, 2:], torch.int8).to(torch.float32).mul_(f16_column(blocks, 0))
