"""What a weight format is to the rest of hipfire: an identity, a geometry, and the way to and from float32.

This file does not know any format, nor how rows are cut into blocks; that is `blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hipfire.base.qtypes import Block

Encoder = Callable[[Tensor], Tensor]
Decoder = Callable[[Tensor, int, int], Tensor]


@dataclass(frozen=True)
class WeightFormat:
    """One way to store a matrix [rows, cols].

    `encode(weight)` takes floating [M, K] on any device and returns uint8 [nbytes] there; it is None for
    formats that hipfire only reads. It raises ValidationError for weights that are not finite, a width that
    the format cannot hold, and values that would overflow its headers.

    `decode(data, rows, cols)` takes uint8 [nbytes] and returns float32 [rows, cols] in the stored basis:
    for a `rotated` format that is the rotated weight. `decode_dense` does the same in the original basis.
    Both raise ArtifactError when the number of bytes does not fit the shape.
    """

    qtype: int
    name: str
    rotated: bool
    block: Block
    encode: Encoder | None
    decode: Decoder
    decode_dense: Decoder

    @property
    def group(self) -> int:
        """Return the number of weights that share one block."""
        return self.block.elements

    @property
    def group_bytes(self) -> int:
        """Return the number of bytes of one block."""
        return self.block.nbytes

    def row_nbytes(self, cols: int) -> int:
        """Return the bytes of one row; rows of this size can be sliced, permuted and concatenated."""
        return -(-cols // self.group) * self.group_bytes

    def nbytes(self, rows: int, cols: int) -> int:
        """Return the bytes that `encode` makes of a [rows, cols] matrix."""
        return rows * self.row_nbytes(cols)

    def has_whole_rows(self, nbytes: int, rows: int, cols: int) -> bool:
        """Tell whether data of this size can be cut into rows of `row_nbytes`; old flat data cannot."""
        return nbytes == self.nbytes(rows, cols)

    def bits_per_weight(self, rows: int, cols: int) -> float:
        """Return stored bits per weight, headers and padding included; 0 for a matrix without weights."""
        return 8.0 * self.nbytes(rows, cols) / (rows * cols) if rows and cols else 0.0

    def dense(self, data: Tensor, rows: int, cols: int) -> Tensor:
        """Return float32 [rows, cols] in the original basis; raises ArtifactError like `decode`."""
        return self.decode_dense(data, rows, cols)
