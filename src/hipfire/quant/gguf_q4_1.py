"""GGML Q4_1, 5 bits: 20 bytes hold 32 weights, a float16 scale, a float16 minimum and 4-bit codes.

weight = scale · code + minimum. hipfire only reads it. This file does not know rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hipfire.base.qtypes import QType
from hipfire.quant.blocks import block_format
from hipfire.quant.ggml import nibble_runs
from hipfire.quant.scalar import f16_column


def _decode(blocks: Tensor) -> Tensor:
    codes = nibble_runs(blocks[:, 4:]).to(torch.float32).flatten(1)
    return codes.mul_(f16_column(blocks, 0)).add_(f16_column(blocks, 2))


FORMATS = (block_format(QType.GGUF_Q4_1, decode=_decode, whole=True),)
