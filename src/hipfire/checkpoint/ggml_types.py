"""Facts: the element types of GGUF tensors and the geometry of their blocks.

Names are in base/qtypes.py. Does not know how to decode them.
"""

from __future__ import annotations

from typing import NamedTuple

from hipfire.base.qtypes import GGML_NAMES


class GgmlType(NamedTuple):
    """A tensor type: blocks of `elements` weights in `nbytes` bytes. Rows are whole numbers of blocks."""

    name: str
    elements: int
    nbytes: int


_GEOMETRY: dict[int, tuple[int, int]] = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    9: (32, 36),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    15: (256, 292),
    16: (256, 66),
    17: (256, 74),
    18: (256, 98),
    19: (256, 50),
    20: (32, 18),
    21: (256, 110),
    22: (256, 82),
    23: (256, 136),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    29: (256, 56),
    30: (1, 2),
    34: (256, 54),
    35: (256, 66),
    39: (32, 17),
    40: (64, 36),
    41: (128, 18),
    42: (128, 34),
}
GGML_BLOCKS: dict[int, GgmlType] = {
    kind: GgmlType(GGML_NAMES[kind], *geometry) for kind, geometry in _GEOMETRY.items()
}

RETIRED: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
