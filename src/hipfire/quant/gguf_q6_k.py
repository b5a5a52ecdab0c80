"""GGML Q6_K, 6.5625 bits: 210 bytes hold 256 weights in 16 sub-blocks of 16 with int8 scales.

Two halves of 128 weights: 64 bytes of nibbles and 32 bytes of upper bit pairs each (all nibbles first, then
all pairs), then 16 scales and a float16 d.

weight = d · scale · (code - 32). hipfire only reads it. This file does not know rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hipfire.base.qtypes import QType
from hipfire.quant.blocks import block_format
from hipfire.quant.ggml import bit_planes, nibble_runs
from hipfire.quant.scalar import f16_column, from_bytes


def _decode(blocks: Tensor) -> Tensor:
    # by half: the low nibbles of 64 bytes, then the high ones, are 128 weights in order; so are the pairs
    # of 32
    low = nibble_runs(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 128)
    upper = bit_planes(blocks[:, 128:192].reshape(-1, 32), 2).view(-1, 2, 128)
    step = f16_column(blocks, 208) * from_bytes(blocks[:, 192:208], torch.int8)
    codes = (low | (upper << 4)).to(torch.float32).view(-1, 16, 16)
    return codes.sub_(32.0).mul_(step.unsqueeze(-1)).flatten(1)


FORMATS = (block_format(QType.GGUF_Q6_K, decode=_decode, whole=True),)
