"""HFQ4G256 (qtype 6), 4.25 bits: 136 bytes hold 256 weights in 4 bits with a float32 header.

weight = step · code + minimum; the header is step, minimum. This file does not know rows.
"""

from __future__ import annotations

from functools import partial

from hipfire.base.qtypes import QType
from hipfire.quant.affine import decode_f32_header, encode_f32_header
from hipfire.quant.blocks import block_format

FORMATS = (
    block_format(
        QType.HFQ4G256,
        encode=partial(encode_f32_header, bits=4, elements=256),
        decode=partial(decode_f32_header, bits=4),
        flat=True,
    ),
)
