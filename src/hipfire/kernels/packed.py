"""Products with weights that are packed for a GPU, and rows of such weights.

A packed matrix keeps the codes of its file, and their scales apart. The references here decode it to float32,
so a model whose weights are packed also runs without any kernel, slowly. This file does not know file
formats; `quant/packing.py` makes layouts of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from hipfire.kernels.elementwise import gelu_tanh_mul_ref, silu_mul_ref
from hipfire.kernels.launch import Op

# columns that share the scale of int8 activations; rows of codes are filled up to a multiple of it
UNIT = 32

Activation = Literal["silu", "gelu_pytorch_tanh"]
_ACTIVATIONS = {"silu": silu_mul_ref, "gelu_pytorch_tanh": gelu_tanh_mul_ref}


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """weight = scale * (code - offset) + minimum, for codes of 4, 6 or 8 bits.

    `group` columns share scale and minimum; these are float16 if `half`, else float32. Without `minimum`
    there is none. Codes of 8 bits are signed, all others are not.
    """

    name: str
    bits: int
    group: int
    half: bool
    minimum: bool = False
    offset: int = 0

    @property
    def scale_type(self) -> torch.dtype:
        """Return the type of scales and minima."""
        return torch.float16 if self.half else torch.float32

    def nbytes(self, rows: int, cols: int) -> int:
        """Return the bytes of a [rows, cols] matrix."""
        codes, groups = unit_count(cols) * UNIT, -(-cols // self.group)
        header = groups * self.scale_type.itemsize * (2 if self.minimum else 1)
        return rows * (codes * self.bits // 8 + header)


PACKED_LAYOUTS: Mapping[str, PackedLayout] = {
    layout.name: layout
    for layout in (
        PackedLayout("u4g32", 4, 32, half=True, minimum=True),
        PackedLayout("o4g32", 4, 32, half=True, offset=8),
        # five bits are kept as six
        PackedLayout("u5g32", 6, 32, half=True, minimum=True),
        PackedLayout("o5g32", 6, 32, half=True, offset=16),
        PackedLayout("o6g16", 6, 16, half=True, offset=32),
        PackedLayout("i8g32", 8, 32, half=True),
        PackedLayout("u4g128", 4, 128, half=False, minimum=True),
        PackedLayout("u4g256", 4, 256, half=False, minimum=True),
        PackedLayout("u4g128h", 4, 128, half=True, minimum=True),
        PackedLayout("u6g256", 6, 256, half=False, minimum=True),
        PackedLayout("u6g128h", 6, 128, half=True, minimum=True),
    )
}


def unit_count(cols: int) -> int:
    """Return the number of units that a row of `cols` columns is stored as."""
    return -(-cols // UNIT)


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A [rows, cols] matrix; a row has U units of 32 columns, the last one filled up, and G groups.

    A unit's codes are four words of eight codes: word j holds columns 8 j .. 8 j + 7. The words j of all
    units of a row lie side by side, so that neighboring threads, a unit to each, read neighboring words.
    `codes`: for 4 and 6 bits uint8 [rows, 4, 4 U], two codes to a byte, the even one (its low four bits)
    lower. For 8 bits uint8 [rows, 2, 4, 4 U]: the even codes, then the odd ones.
    `high`: for 6 bits uint8 [rows, 4, 2 U], otherwise None: half a byte for each byte of `codes`, the lower
    half first, holds the upper two bits of the even code, and above them those of the odd one. `scales`,
    `minima`: [rows, G] in the layout's type; no minima where the layout has none. Codes past the last column
    may be anything: activations are zero there.
    """

    layout: PackedLayout
    rows: int
    cols: int
    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None
    high: torch.Tensor | None = None

    @property
    def units(self) -> int:
        """Return U."""
        return unit_count(self.cols)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors that hold the matrix."""
        parts = (self.codes, self.scales, self.minima, self.high)
        return tuple(part for part in parts if part is not None)

    @property
    def nbytes(self) -> int:
        """Return the bytes that a product reads."""
        return sum(part.nbytes for part in self.tensors)

    def dense(self) -> torch.Tensor:
        """Return the matrix as float32 [rows, cols]."""
        return _decode(self.layout, self.cols, self.codes, self.high, self.scales, self.minima)

    def select(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the given rows, integers [T], as float32 [T, cols]."""
        high = None if self.high is None else self.high[rows]
        minima = None if self.minima is None else self.minima[rows]
        return _decode(self.layout, self.cols, self.codes[rows], high, self.scales[rows], minima)


def _decode(
    layout: PackedLayout,
    cols: int,
    codes: torch.Tensor,
    high: torch.Tensor | None,
    scales: torch.Tensor,
    minima: torch.Tensor | None,
) -> torch.Tensor:
    rows = codes.shape[0]
    if layout.bits == 8:
        planes = codes.view(torch.int8).float()
        even, odd = planes[:, 0], planes[:, 1]
    else:
        even, odd = (codes & 15).float(), (codes >> 4).float()
    if high is not None:
        nibbles = torch.stack((high & 15, high >> 4), dim=-1).view(even.shape)
        even = even + 16.0 * (nibbles & 3).float()
        odd = odd + 16.0 * (nibbles >> 2).float()
    # [rows, word, unit, byte, parity] -> [rows, unit, word, byte, parity]
    values = torch.stack((even, odd), dim=-1).view(rows, 4, -1, 4, 2).transpose(1, 2)
    values = values.reshape(rows, -1)[:, :cols] - layout.offset
    values = values * _spread(scales, layout.group, cols)
    return values if minima is None else values + _spread(minima, layout.group, cols)


def _spread(headers: torch.Tensor, group: int, cols: int) -> torch.Tensor:
    return headers.float().repeat_interleave(group, dim=1)[:, :cols]


def packed_linear_ref(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    """Return x W^T as float32 [T, rows] for x [T, cols], with activations as they are.

    Kernels may round activations to int8, 32 at a time scaled by their largest, or to bfloat16; results of
    prefill steps may then be bfloat16.
    """
    return torch.nn.functional.linear(x.float(), matrix.dense())


def packed_gated_ref(x: torch.Tensor, matrix: PackedMatrix, activation: Activation) -> torch.Tensor:
    """Return activation(gate) * up as float32 [T, rows / 2] for x [T, cols].

    The first half of the matrix's rows makes the gate, the second half makes up.
    """
    gate, up = packed_linear_ref(x, matrix).chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate, up)


def packed_select_ref(matrix: PackedMatrix, rows: torch.Tensor) -> torch.Tensor:
    """Return the given rows, int64 [T], of the matrix as float32 [T, cols]."""
    return matrix.select(rows)


PACKED_LINEAR = Op(
    "packed_linear", packed_linear_ref, {"triton": "hipfire.kernels.gpu.products.packed_linear"}
)
PACKED_GATED = Op("packed_gated", packed_gated_ref, {"triton": "hipfire.kernels.gpu.products.packed_gated"})
PACKED_SELECT = Op("packed_select", packed_select_ref, {"triton": "hipfire.kernels.gpu.rows.packed_select"})
