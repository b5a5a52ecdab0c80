"""Which weight formats can be packed into panels for the CPU kernels, and as which layout.

Codes keep their values and rotated weights stay rotated. Only the scales and minima of K formats change: they
are products of two numbers of the file, and rounded to halves.
This file does not know files, nor how the threads that share a matrix are run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hipfire.base.errors import UnsupportedError, ValidationError
from hipfire.base.qtypes import BLOCKS, QType
from hipfire.kernels.cpu import pack_blocks as blocks
from hipfire.kernels.cpu.jit import Kernel
from hipfire.kernels.cpu.layouts import LAYOUTS, DenseLayout, Layout
from hipfire.kernels.cpu.pack_kernels import (
    BFLOAT_EXPONENT,
    FLOAT_EXPONENT,
    HALF_EXPONENT,
    MISFIT,
    SOUND,
    code_packer,
    dense_packer,
)

_FLOATS = dense_packer("f32", 4, FLOAT_EXPONENT)
_HALVES = dense_packer("f16", 2, HALF_EXPONENT)
_BFLOATS = dense_packer("bf16", 2, BFLOAT_EXPONENT)
_INT8 = code_packer("int8", "i8g32", 32, 34, blocks.half_scale, blocks.int8_codes)
_FOUR_BY_128 = code_packer("four-128", "u4g128", 128, 72, blocks.float_pair, blocks.stream_4)
_FOUR_BY_256 = code_packer("four-256", "u4g256", 256, 136, blocks.float_pair, blocks.stream_4)
_SIX_BY_256 = code_packer("six-256", "u6g256", 256, 200, blocks.float_pair, blocks.stream_6)
_FOUR_BY_HALVES = code_packer("four-128h", "u4g128h", 256, 136, blocks.half_pair, blocks.stream_4)
_SIX_BY_HALVES = code_packer("six-128h", "u6g128h", 256, 200, blocks.half_pair, blocks.stream_6)
_Q4_0 = code_packer("Q4_0", "o4g32", 32, 18, blocks.half_scale, blocks.q4_0_codes)
_Q4_1 = code_packer("Q4_1", "u4g32", 32, 20, blocks.half_pair, blocks.q4_1_codes)
_Q5_0 = code_packer("Q5_0", "o5g32", 32, 22, blocks.half_scale, blocks.q5_0_codes)
_Q4_K = code_packer("Q4_K", "u4g32", 256, 144, blocks.k_pair, blocks.q4_k_codes, blocks.k_pair_damaged)
_Q5_K = code_packer("Q5_K", "u5g32", 256, 176, blocks.k_pair, blocks.q5_k_codes, blocks.k_pair_damaged)
_Q6_K = code_packer("Q6_K", "o6g16", 256, 210, blocks.q6_k_scales, blocks.q6_k_codes, blocks.q6_k_damaged)


@dataclass(frozen=True, slots=True)
class Packer:
    """How matrices of one format, stored row by row in blocks, become panels.

    `kernel` is described in `pack_kernels`. Rows of `whole` formats must be filled by their blocks.
    """

    name: str
    layout: Layout | DenseLayout
    block_elements: int
    block_bytes: int
    kernel: Kernel
    whole: bool

    def row_nbytes(self, cols: int) -> int:
        """Return the bytes of a source row; UnsupportedError where blocks do not fill it as they must."""
        if self.whole and cols % self.block_elements:
            raise UnsupportedError(
                f"{self.name} rows of {cols} columns cannot be packed: blocks have {self.block_elements}",
                hint="decode the tensor and pack it as F32",
            )
        return -(-cols // self.block_elements) * self.block_bytes


def _packer(qtype: QType, layout: str, kernel: Kernel, *, whole: bool = False) -> Packer:
    block = BLOCKS[qtype]
    return Packer(qtype.name, LAYOUTS[layout], block.elements, block.nbytes, kernel, whole)


# by the format's name; rotated formats are whole because missing weights would be mixed into the others
PACKERS: Mapping[str, Packer] = {
    packer.name: packer
    for packer in (
        _packer(QType.F32, "f32", _FLOATS),
        _packer(QType.F16, "f16", _HALVES),
        _packer(QType.BF16, "bf16", _BFLOATS),
        _packer(QType.Q8F16, "i8g32", _INT8),
        _packer(QType.HFQ4G128, "u4g128", _FOUR_BY_128),
        _packer(QType.HFQ4G256, "u4g256", _FOUR_BY_256),
        _packer(QType.HFQ6G256, "u6g256", _SIX_BY_256),
        _packer(QType.MQ4G256, "u4g256", _FOUR_BY_256, whole=True),
        _packer(QType.MQ6G256, "u6g256", _SIX_BY_256, whole=True),
        _packer(QType.MQ4G256V2, "u4g128h", _FOUR_BY_HALVES, whole=True),
        _packer(QType.MQ6G256V2, "u6g128h", _SIX_BY_HALVES, whole=True),
        _packer(QType.GGUF_F32, "f32", _FLOATS),
        _packer(QType.GGUF_F16, "f16", _HALVES),
        _packer(QType.GGUF_BF16, "bf16", _BFLOATS),
        _packer(QType.GGUF_Q8_0, "i8g32", _INT8, whole=True),
        _packer(QType.GGUF_Q4_0, "o4g32", _Q4_0, whole=True),
        _packer(QType.GGUF_Q4_1, "u4g32", _Q4_1, whole=True),
        _packer(QType.GGUF_Q5_0, "o5g32", _Q5_0, whole=True),
        _packer(QType.GGUF_Q4_K, "u4g32", _Q4_K, whole=True),
        _packer(QType.GGUF_Q5_K, "u5g32", _Q5_K, whole=True),
        _packer(QType.GGUF_Q6_K, "o6g16", _Q6_K, whole=True),
    )
}


def packed_nbytes(name: str, rows: int, cols: int) -> int:
    """Return the bytes of a [rows, cols] matrix of the named format once packed.

    Raises UnsupportedError for a format without a packer, and for columns that it cannot pack.
    """
    packer = PACKERS.get(name)
    if packer is None:
        raise UnsupportedError(
            f"weight format {name} cannot be packed for the CPU kernels",
            hint="decode the tensor and pack it as F32",
        )
    packer.row_nbytes(cols)
    return packer.layout.nbytes(rows, cols)


def worst_fault(faults: Sequence[int]) -> int:
    """Return what the faults of all threads come to: the first damaged block, else MISFIT, else SOUND."""
    damaged = [int(fault) for fault in faults if fault >= 0]
    if damaged:
        return min(damaged)
    return MISFIT if any(fault == MISFIT for fault in faults) else SOUND


def pack_into(
    packer: Packer,
    source: NDArray[np.uint8],
    rows: int,
    cols: int,
    target: NDArray[np.uint8],
    order: NDArray[np.int64] | None = None,
) -> int:
    """Pack uint8 `source` (rows of `packer.row_nbytes(cols)` bytes) into uint8 `target`, on this thread.

    `order` names, for each of `rows` rows, the row of the source that it takes; without it they are the
    source's own. Returns SOUND, MISFIT, or the number of the first damaged block. Raises ValidationError when
    sizes, kinds or row numbers do not fit, UnsupportedError for columns that cannot be packed.
    """
    row_bytes = packer.row_nbytes(cols)
    for name, array in (("source", source), ("target", target)):
        _check(array.dtype == np.uint8 and array.flags.c_contiguous, f"the {name} is not bytes in one piece")
    nbytes = packer.layout.nbytes(rows, cols)
    _check(target.size == nbytes, f"the target has {target.size} bytes, not {nbytes}")
    if order is None:
        _check(source.size == rows * row_bytes, f"the source has {source.size} bytes, not {rows * row_bytes}")
        order_address = 0
    else:
        _check(
            order.dtype == np.int64 and order.flags.c_contiguous and order.shape == (rows,),
            f"the order is not {rows} int64",
        )
        highest = source.size // max(1, row_bytes)
        _check(
            not rows or bool((order.min() >= 0) & (order.max() < highest)),
            f"the order names a row beyond the {highest} of the source",
        )
        order_address = order.ctypes.data
    fault = np.empty(1, np.int64)
    arguments = np.array(
        [
            source.ctypes.data,
            row_bytes,
            rows,
            cols,
            order_address,
            target.ctypes.data,
            fault.ctypes.data,
        ],
        np.int64,
    )
    packer.kernel(arguments.ctypes.data, 0, 1)
    return int(fault[0])


def _check(condition: bool, problem: str) -> None:
    if not condition:
        raise ValidationError(f"cannot pack weights: {problem}", hint="check the shape and the format")
