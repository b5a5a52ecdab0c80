"""Products with packed and with dense weights, each by the kernel that fits its number of rows.

One row or two are multiplied in int8 by a kernel that runs at memory speed, some dozens on matrix units with
weights decoded in the tile. For long prompts the matrix is decoded once and the library multiplies. This file
starts kernels and has none.
"""

from __future__ import annotations

import torch

from hipfire.kernels.gpu.dense import cast, dense, gated
from hipfire.kernels.gpu.dequantize import dequantize
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.gemm import gemm
from hipfire.kernels.gpu.gemv import gemv
from hipfire.kernels.gpu.prepare import prepare
from hipfire.kernels.gpu.rowwise import GEMM_ROWS, GEMV_ROWS, product_type
from hipfire.kernels.packed import Activation, PackedMatrix


def packed_linear(engine: GpuEngine, x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    """Return x W^T as [T, rows], float32, or bfloat16 in long steps; see `packed_linear_ref`."""
    tokens = x.shape[0]
    out = engine.empty("product", (tokens, matrix.rows), product_type(engine, tokens))
    _multiply(engine, x, matrix, out, None)
    return out


def packed_gated(
    engine: GpuEngine, x: torch.Tensor, matrix: PackedMatrix, activation: Activation
) -> torch.Tensor:
    """Return activation(gate) * up as [T, rows / 2]; see `packed_gated_ref`."""
    tokens, columns = x.shape[0], matrix.rows // 2
    out = engine.empty("gated", (tokens, columns), product_type(engine, tokens))
    _multiply(engine, x, matrix, out, activation)
    return out


def _multiply(
    engine: GpuEngine, x: torch.Tensor, matrix: PackedMatrix, out: torch.Tensor, activation: str | None
) -> None:
    tokens = x.shape[0]
    if tokens <= GEMV_ROWS and not engine.exact:
        gemv(engine, prepare(engine, x, "int8"), matrix, out, activation)
    elif tokens <= GEMM_ROWS:
        gemm(engine, prepare(engine, x, "f32" if engine.exact else "bf16"), matrix, out, activation)
    else:
        _by_library(engine, x, matrix, out, activation)


def _by_library(
    engine: GpuEngine, x: torch.Tensor, matrix: PackedMatrix, out: torch.Tensor, activation: str | None
) -> None:
    kind = torch.float32 if engine.exact else torch.bfloat16
    weights = engine.empty("dequantized", (matrix.rows, matrix.cols), kind)
    dequantize(engine, matrix, weights)
    x = cast(engine, x, kind)
    if activation is None and out.dtype == kind:
        _mm(engine, x, weights, out)
        return
    whole = engine.empty("product.whole", (x.shape[0], matrix.rows), kind)
    _mm(engine, x, weights, whole)
    if activation is None:
        cast(engine, whole, out.dtype, out)
    else:
        gated(engine, whole, out, activation)


def _mm(engine: GpuEngine, x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    engine.library("mm", lambda: torch.mm(x, weights.t(), out=out), reads=(x, weights), writes=(out,))


def linear(engine: GpuEngine, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T as [T, N] for a dense weight [N, K]; see `linear_ref`."""
    tokens, rows = x.shape[0], weight.shape[0]
    out = engine.empty("product", (tokens, rows), product_type(engine, tokens))
    if tokens <= GEMM_ROWS:
        dense(engine, x, weight, out)
        return out
    kind = torch.float32 if engine.exact else torch.bfloat16
    x, weight = cast(engine, x, kind), cast(engine, weight, kind, name="dequantized")
    if out.dtype == kind:
        _mm(engine, x, weight, out)
    else:
        whole = engine.empty("product.whole", (tokens, rows), kind)
        _mm(engine, x, weight, whole)
        cast(engine, whole, out.dtype, out)
    return out
