"""MQ6G256V2 (qtype 47), 6.25 bits: 200 bytes hold 256 rotated weights, two float16 headers and 6-bit codes.

weight = step · code + minimum, with one (step, minimum) for weights 0..127 and one for 128..255. Codes are
made with the truncated numbers of the header. This file does not know rows.
"""

from __future__ import annotations

from functools import partial

from hipfire.base.qtypes import QType
from hipfire.quant.affine import decode_f16_header, encode_f16_header
from hipfire.quant.blocks import block_format

FORMATS = (
    block_format(
        QType.MQ6G256V2,
        encode=partial(encode_f16_header, bits=6, instead="MQ6G256 or HFQ6G256"),
        decode=partial(decode_f16_header, bits=6),
        rotated=True,
        whole=True,
    ),
)
