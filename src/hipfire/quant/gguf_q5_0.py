"""GGML Q5_0, 5.5 bits: 22 bytes hold 32 weights, a float16 scale, 32 fifth bits and 4-bit codes around 16.

weight = scale · (code - 16). hipfire only reads it. This file does not know rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hipfire.base.qtypes import QType
from hipfire.quant.blocks import block_format
from hipfire.quant.ggml import nibble_runs
from hipfire.quant.scalar import f16_column, from_bytes


def _decode(blocks: Tensor) -> Tensor:
    low = nibble_runs(blocks[:, 6:]).flatten(1)
    places = torch.arange(32, dtype=torch.int32, device=blocks.device)
    fifth = ((from_bytes(blocks[:, 2:6], torch.int32) >> places) & 1).to(torch.uint8)
    codes = (low | (fifth << 4)).to(torch.float32)
    return codes.sub_(16.0).mul_(f16_column(blocks, 0))


FORMATS = (block_format(QType.GGUF_Q5_0, decode=_decode, whole=True),)
