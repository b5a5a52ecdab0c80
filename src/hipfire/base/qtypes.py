"""The numeric identities of weight formats, and the block geometry that says how many bytes a tensor takes.

A number below 256 is a `quant_type` of the HFQM container (one byte there). GGML block types live at
`GGUF_BASE + ggml_type`, outside that byte, so that they can never be written into a container by mistake.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

GGUF_BASE = 256


class QType(IntEnum):
    """Formats that hipfire reads; values are facts of the HFQM and GGUF files."""

    F16 = 1
    F32 = 2
    Q8F16 = 3
    HFQ4G256 = 6
    HFQ4G128 = 7
    HFQ6G256 = 8
    MQ4G256 = 13
    MQ6G256 = 15
    BF16 = 16
    MQ4G256V2 = 44
    MQ6G256V2 = 47
    GGUF_F32 = GGUF_BASE + 0
    GGUF_F16 = GGUF_BASE + 1
    GGUF_Q4_0 = GGUF_BASE + 2
    GGUF_Q4_1 = GGUF_BASE + 3
    GGUF_Q5_0 = GGUF_BASE + 6
    GGUF_Q8_0 = GGUF_BASE + 8
    GGUF_Q4_K = GGUF_BASE + 12
    GGUF_Q5_K = GGUF_BASE + 13
    GGUF_Q6_K = GGUF_BASE + 14
    GGUF_BF16 = GGUF_BASE + 30


@dataclass(frozen=True, slots=True)
class Block:
    """A quantization block: `elements` weights stored in `nbytes` bytes."""

    elements: int
    nbytes: int


BLOCKS: dict[int, Block] = {
    QType.F16: Block(1, 2),
    QType.F32: Block(1, 4),
    QType.BF16: Block(1, 2),
    QType.Q8F16: Block(32, 34),
    QType.HFQ4G256: Block(256, 136),
    QType.HFQ4G128: Block(128, 72),
    QType.HFQ6G256: Block(256, 200),
    QType.MQ4G256: Block(256, 136),
    QType.MQ6G256: Block(256, 200),
    QType.MQ4G256V2: Block(256, 136),
    QType.MQ6G256V2: Block(256, 200),
    QType.GGUF_F32: Block(1, 4),
    QType.GGUF_F16: Block(1, 2),
    QType.GGUF_BF16: Block(1, 2),
    QType.GGUF_Q4_0: Block(32, 18),
    QType.GGUF_Q4_1: Block(32, 20),
    QType.GGUF_Q5_0: Block(32, 22),
    QType.GGUF_Q8_0: Block(32, 34),
    QType.GGUF_Q4_K: Block(256, 144),
    QType.GGUF_Q5_K: Block(256, 176),
    QType.GGUF_Q6_K: Block(256, 210),
}


# every tensor type of GGUF, also those that have no weight format of their own here
GGML_NAMES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
}


def qtype_name(qtype: int) -> str:
    """Return the format's name, also of any GGUF type; `qtype N` for a number that hipfire does not know."""
    try:
        return QType(qtype).name
    except ValueError:
        ggml = GGML_NAMES.get(qtype - GGUF_BASE)
        return f"qtype {qtype}" if ggml is None else f"GGUF_{ggml}"


def packed_nbytes(qtype: int, rows: int, cols: int) -> int:
    """Return the bytes of a row-safe [rows, cols] matrix: every row starts with a block of its own."""
    block = BLOCKS[qtype]
    return rows * -(-cols // block.elements) * block.nbytes


def flat_nbytes(qtype: int, rows: int, cols: int) -> int:
    """Return the bytes of the old flat packing, where blocks run over row ends."""
    block = BLOCKS[qtype]
    return -(-rows * cols // block.elements) * block.nbytes
