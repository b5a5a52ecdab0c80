"""GGML Q4_K, 4.5 bits: 144 bytes hold 256 weights in 8 sub-blocks of 32 with 6-bit scales and minima.

Two float16 (d, dmin), 12 bytes of scales and minima, then four runs of 32 bytes: the low nibbles of a run
are one sub-block, the high nibbles the next.

weight = d · scale · code - dmin · minimum. hipfire only reads it. This file does not know rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hipfire.base.qtypes import QType
from hipfire.quant.blocks import block_format
from hipfire.quant.ggml import nibble_runs, six_bit_scales
from hipfire.quant.scalar import f16_column


def _decode(blocks: Tensor) -> Tensor:
    scales, minima = six_bit_scales(blocks[:, 4:16])
    step = f16_column(blocks, 0) * scales
    offset = f16_column(blocks, 2) * minima
    codes = nibble_runs(blocks[:, 16:].reshape(-1, 4, 32)).to(torch.float32).view(-1, 8, 32)
    return codes.mul_(step.unsqueeze(-1)).sub_(offset.unsqueeze(-1)).flatten(1)


FORMATS = (block_format(QType.GGUF_Q4_K, decode=_decode, whole=True),)
