"""Q8F16 (qtype 3), 8.5 bits: 34 bytes hold 32 weights, a float16 scale and 32 int8.

weight = scale · code. A short block is filled with zeros. This file does not know rows.
"""

from __future__ import annotations

from functools import partial

from hipfire.base.qtypes import QType
from hipfire.quant.blocks import block_format
from hipfire.quant.symmetric import decode_int8, encode_int8

FORMATS = (
    block_format(
        QType.Q8F16,
        encode=partial(encode_int8, instead="HFQ6G256 or BF16"),
        decode=decode_int8,
        flat=True,
    ),
)
