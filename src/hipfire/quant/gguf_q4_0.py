"""GGML Q4_0, 4.5 bits: 18 bytes hold 32 weights, a float16 scale and 4-bit codes around 8.

weight = scale · (code - 8). hipfire only reads it. This file does not know rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hipfire.base.qtypes import QType
from hipfire.quant.blocks import block_format
from hipfire.quant.ggml import nibble_runs
from hipfire.quant.scalar import f16_column


def _decode(blocks: Tensor) -> Tensor:
    codes = nibble_runs(blocks[:, 2:]).to(torch.float32).flatten(1)
    return codes.sub_(8.0).mul_(f16_column(blocks, 0))


FORMATS = (block_format(QType.GGUF_Q4_0, decode=_decode, whole=True),)
