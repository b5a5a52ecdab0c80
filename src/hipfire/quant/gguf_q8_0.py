"""GGML Q8_0, 8.5 bits: 34 bytes hold 32 weights, a float16 scale and 32 int8; the layout of Q8F16.

weight = scale · code. hipfire only reads it. This file does not know rows.
"""

from __future__ import annotations

from hipfire.base.qtypes import QType
from hipfire.quant.blocks import block_format
from hipfire.quant.symmetric import decode_int8

FORMATS = (block_format(QType.GGUF_Q8_0, decode=decode_int8, whole=True),)
