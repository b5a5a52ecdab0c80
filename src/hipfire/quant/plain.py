"""F16, F32 and BF16, as the HFQM container and GGUF files hold them: no groups, no headers.

F16 is written by dropping bits, as all f16 numbers of the container are; BF16 by rounding to nearest even,
so that weights which already have the type pass unchanged. This file does not know rows.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hipfire.base.errors import ValidationError
from hipfire.base.qtypes import QType
from hipfire.quant.blocks import block_format
from hipfire.quant.scalar import as_bytes, from_bytes, header_f16


def _encode_f16(weights: Tensor) -> Tensor:
    return as_bytes(header_f16(weights, what="a weight", instead="F32 or BF16"))


def _encode_f32(weights: Tensor) -> Tensor:
    return as_bytes(weights)


def _encode_bf16(weights: Tensor) -> Tensor:
    rounded = weights.to(torch.bfloat16)
    if not bool(torch.isfinite(rounded).all()):
        raise ValidationError(
            f"a weight of {float(weights.abs().max()):.6g} does not fit in bfloat16",
            hint="use F32 for this tensor",
        )
    return as_bytes(rounded)


def _decode(dtype: torch.dtype, blocks: Tensor) -> Tensor:
    return from_bytes(blocks, dtype).to(torch.float32)


_decode_f16 = partial(_decode, torch.float16)
_decode_f32 = partial(_decode, torch.float32)
_decode_bf16 = partial(_decode, torch.bfloat16)

FORMATS = (
    block_format(QType.F16, encode=_encode_f16, decode=_decode_f16),
    block_format(QType.F32, encode=_encode_f32, decode=_decode_f32),
    block_format(QType.BF16, encode=_encode_bf16, decode=_decode_bf16),
    block_format(QType.GGUF_F16, decode=_decode_f16),
    block_format(QType.GGUF_F32, decode=_decode_f32),
    block_format(QType.GGUF_BF16, decode=_decode_bf16),
)
