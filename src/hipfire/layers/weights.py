"""Weights as layers hold them: packed bytes with their format, and a decoded copy where memory allows.

Layers and models ask a `WeightSource` for matrices and vectors by canonical name; where the bytes come
from, and whether they are decoded once or at every use, is the loader's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hipfire.kernels.elementwise import GATHER_ROWS
from hipfire.kernels.fwht import INVERSE_FWHT
from hipfire.kernels.launch import Launcher
from hipfire.kernels.linear import DEQUANTIZE
from hipfire.quant.format import WeightFormat


@dataclass(eq=False)
class Weight:
    """A [rows, cols] matrix in its format.

    `data` is uint8 [rows, bytes of a row] in the row-safe layout. `resident`, if present, is the float32
    matrix in the stored basis (rotated formats stay rotated), decoded once at load.
    """

    format: WeightFormat
    data: torch.Tensor
    rows: int
    cols: int
    resident: torch.Tensor | None = None

    def matrix(self, launcher: Launcher) -> torch.Tensor:
        """Return float32 [rows, cols] in the stored basis, decoding it now unless it is resident."""
        if self.resident is not None:
            return self.resident
        decoded: torch.Tensor = launcher.run(
            DEQUANTIZE, self.data.flatten(), self.rows, self.cols, self.format.decode
        )
        return decoded

    def select(self, launcher: Launcher, rows: torch.Tensor) -> torch.Tensor:
        """Return float32 [T, cols] of the given rows [T] in the original basis."""
        if self.resident is not None:
            picked: Any = launcher.run(GATHER_ROWS, self.resident, rows)
        else:
            packed = launcher.run(GATHER_ROWS, self.data, rows)
            picked = launcher.run(
                DEQUANTIZE, packed.flatten(), packed.shape[0], self.cols, self.format.decode
            )
        result: torch.Tensor = launcher.run(INVERSE_FWHT, picked) if self.format.rotated else picked
        return result


class WeightSource(Protocol):
    """Where a model gets its tensors, under canonical names."""

    def matrix(self, name: str, rows: int, cols: int) -> Weight:
        """Return the matrix `name`; ArtifactError if it is missing or not [rows, cols]."""

    def vector(self, name: str, size: int) -> torch.Tensor:
        """Return the vector `name` as float32 [size]; ArtifactError if it is missing or of another size."""

    def has(self, name: str) -> bool:
        """Tell whether the checkpoint holds a tensor of this canonical name."""


def rope_row_order(rows: int, heads: int) -> torch.Tensor:
    """Return the row indices [rows] that turn interleaved rotary rows into half-split ones.

    GGUF files of the llama architecture store row 2 j + p of a head where Hugging Face stores row
    j + p * head_dim / 2 (p = 0, 1); indexing the former by this gives the latter.
    """
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
