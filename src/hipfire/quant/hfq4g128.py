"""HFQ4G128 (qtype 7), 4.5 bits: 72 bytes hold 128 weights in 4 bits with a float32 header.

weight = step · code + minimum; the header is step, minimum. The fallback for widths that 256 does not
divide. This file does not know rows.
"""

from __future__ import annotations

from functools import partial

from hipfire.base.qtypes import QType
from hipfire.quant.affine import decode_f32_header, encode_f32_header
from hipfire.quant.blocks import block_format

FORMATS = (
    block_format(
        QType.HFQ4G128,
        encode=partial(encode_f32_header, bits=4, elements=128),
        decode=partial(decode_f32_header, bits=4),
        flat=True,
    ),
)
