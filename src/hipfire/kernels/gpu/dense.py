"""Products with weights that are not packed, and small steps around library products.

This file does not know which weights are kept dense.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.gemv import ACTIVATIONS, gate
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.target import begin_launch

_BLOCK = 1024
# rows of the matrix to a program, and columns at a time
_ROWS = 8
_COLUMNS = 256
_MATRIX_ROWS = 32
_MATRIX_COLUMNS = 32


@triton.jit
def _dense_row(
    x_ptr, weight_ptr, out_ptr, rows, cols, x_stride, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = weight_ptr + row.to(tl.int64)[:, None] * cols
    valid = (row < rows)[:, None]
    begin_launch(TARGET)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, cols, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < cols
        weight = tl.load(at + column[None, :], mask=valid & inside[None, :], other=0.0).to(tl.float32)
        x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        acc += weight * x[None, :]
    tl.store(out_ptr + token * out_stride + row, tl.sum(acc, axis=1), mask=row < rows)


@triton.jit
def _dense(
    x_ptr, weight_ptr, out_ptr, tokens, rows, cols, x_stride, out_stride,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    begin_launch(TARGET)
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for first in range(0, cols, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < cols
        weight = tl.load(
            weight_ptr + row.to(tl.int64)[:, None] * cols + column[None, :],
            mask=(row < rows)[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        x = tl.load(
            x_ptr + token.to(tl.int64)[None, :] * x_stride + column[:, None],
            mask=inside[:, None] & (token < tokens)[None, :],
            other=0.0,
        ).to(tl.float32)
        acc = tl.dot(weight, x, acc, input_precision=PRECISION)
    out_at = out_ptr + token.to(tl.int64)[None, :] * out_stride + row[:, None]
    tl.store(out_at, acc, mask=(row < rows)[:, None] & (token < tokens)[None, :])


@triton.jit
def _cast(x_ptr, out_ptr, columns, x_stride, BLOCK: tl.constexpr, TARGET: tl.constexpr):
    begin_launch(TARGET)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    value = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + column, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated(both_ptr, out_ptr, columns, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, TARGET: tl.constexpr):
    begin_launch(TARGET)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    at = both_ptr + row * (2 * columns) + column
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + columns, mask=mask, other=0.0).to(tl.float32)
    value = gate(first, ACTIVATION) * second
    tl.store(out_ptr + row * columns + column, value.to(out_ptr.dtype.element_ty), mask=mask)


def dense(engine: GpuEngine, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Write x W^T to `out` float32 [T, N], for a contiguous weight [N, K] of any floating type.

    A single row is summed in float32. More rows are multiplied on matrix units: weights of 16 bits exactly,
    activations rounded to eleven bits, unless the engine is exact.
    """
    tokens, rows = out.shape
    arguments: dict[str, Any] = {
        "x_ptr": x,
        "weight_ptr": weight,
        "out_ptr": out,
        "rows": rows,
        "cols": weight.shape[1],
        "x_stride": x.stride(0),
        "out_stride": out.stride(0),
    }
    if tokens == 1:
        engine.launch(
            _dense_row,
            (-(-rows // _ROWS), tokens),
            reads=(x, weight),
            writes=(out,),
            constants={"ROWS": _ROWS, "COLUMNS": _COLUMNS, "TARGET": engine.target},
            **arguments,
        )
        return
    block = 16 if tokens <= 16 else 32
    # only NVIDIA's matrix units have a type of eleven bits with the range of float32
    fast = engine.target == "cuda" and not engine.exact and weight.dtype != torch.float32
    engine.launch(
        _dense,
        (-(-rows // _MATRIX_ROWS), -(-tokens // block)),
        reads=(x, weight),
        writes=(out,),
        tokens=tokens,
        constants={
            "ROWS": _MATRIX_ROWS,
            "TOKENS": block,
            "COLUMNS": _MATRIX_COLUMNS,
            "PRECISION": "tf32" if fast else "ieee",
            "TARGET": engine.target,
        },
        **arguments,
    )


def cast(
    engine: GpuEngine,
    x: torch.Tensor,
    kind: torch.dtype,
    out: torch.Tensor | None = None,
    *,
    name: str = "cast",
) -> torch.Tensor:
    """Return x [T, C] in another floating type, contiguous: x itself where it is so, or `out` if given."""
    if out is None:
        if x.dtype == kind and x.is_contiguous():
            return x
        found: torch.Tensor | None = engine.prepared(f"{name}.{kind}", x)
        if found is not None:
            return found
        out = engine.empty(name, x.shape, kind)
        engine.prepare(f"{name}.{kind}", x, out)
    rows, columns = x.shape
    engine.launch(
        _cast,
        (rows, -(-columns // _BLOCK)),
        reads=(x,),
        writes=(out,),
        x_ptr=x,
        out_ptr=out,
        columns=columns,
        x_stride=x.stride(0),
        constants={"BLOCK": _BLOCK, "TARGET": engine.target},
    )
    return out


def gated(engine: GpuEngine, both: torch.Tensor, out: torch.Tensor, activation: str) -> None:
    """Write activation(gate) * up to `out` [T, N], where `both` [T, 2 N] holds gate and up side by side."""
    rows, columns = out.shape
    engine.launch(
        _gated,
        (rows, -(-columns // _BLOCK)),
        reads=(both,),
        writes=(out,),
        both_ptr=both,
        out_ptr=out,
        columns=columns,
        constants={"ACTIVATION": ACTIVATIONS[activation], "BLOCK": _BLOCK, "TARGET": engine.target},
    )


_STRIDES = {"x_stride": "i32", "out_stride": "i32"}
_SIZES = {"rows": "i32", "cols": "i32"}


def _offline(weight: str) -> tuple[Offline, ...]:
    tensors = {"x_ptr": "*fp32", "weight_ptr": weight, "out_ptr": "*fp32"}
    aligned = frozenset({*_STRIDES, *_SIZES})
    row = Offline(
        _dense_row,
        {**tensors, **_SIZES, **_STRIDES},
        {"ROWS": _ROWS, "COLUMNS": _COLUMNS},
        name=weight[1:],
        aligned=aligned,
    )
    sizes = {"ROWS": _MATRIX_ROWS, "TOKENS": 32, "COLUMNS": _MATRIX_COLUMNS}
    types = {**tensors, "tokens": "i32", **_SIZES, **_STRIDES}
    many = [
        Offline(
            _dense,
            types,
            {**sizes, "PRECISION": precision},
            name=f"{weight[1:]} {precision}",
            aligned=aligned,
            on=frozenset({"cuda"} if precision == "tf32" else {"cuda", "hip"}),
        )
        for precision in ("ieee", "tf32")
        if weight != "*fp32" or precision == "ieee"
    ]
    return (row, *many)


OFFLINE: tuple[Offline, ...] = (
    *_offline("*fp32"),
    *_offline("*fp16"),
    *_offline("*bf16"),
    Offline(
        _cast,
        {"x_ptr": "*fp32", "out_ptr": "*bf16", "columns": "i32", "x_stride": "i32"},
        {"BLOCK": _BLOCK},
        aligned=frozenset({"columns", "x_stride"}),
    ),
    Offline(
        _gated,
        {"both_ptr": "*bf16", "out_ptr": "*bf16", "columns": "i32"},
        {"BLOCK": _BLOCK, "ACTIVATION": 1},
        aligned=frozenset({"columns"}),
    ),
)
