"""Rows of packed weights as floats: the token embedding."""

from __future__ import annotations

import torch

from hipfire.kernels.gpu.dequantize import dequantize
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.packed import PackedMatrix


def packed_select(engine: GpuEngine, matrix: PackedMatrix, rows: torch.Tensor) -> torch.Tensor:
    """Return the given rows, int64 [T], as float32 [T, cols]."""
    out = engine.empty("selected", (rows.shape[0], matrix.cols))
    dequantize(engine, matrix, out, rows)
    return out
