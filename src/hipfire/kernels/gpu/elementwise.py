"""Elementwise steps between the products: gated activations, sums, scales, soft caps, and gathered rows.

One program makes a stretch of one row. This file does not know models.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from hipfire.base.errors import InternalError
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.rowwise import product_type, row_view, same_shape

_BLOCK: Final = 1024
_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) for float32 x."""
    # exp of a negative number at both ends, so nothing overflows
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def silu(x):
    """Return x * sigmoid(x) for float32 x."""
    return x * sigmoid(x)


@triton.jit
def gelu_tanh(x):
    """Return the tanh approximation of GELU for float32 x."""
    # 0.5 * (1 + tanh(y)) is sigmoid(2 y), which keeps its digits where the tanh is near -1
    return x * sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))


@triton.jit
def tanh(x):
    """Return tanh(x) for float32 x, near zero to full relative precision."""
    size = tl.abs(x)
    small = tl.exp(-2.0 * size)
    square = x * x
    series = 1.0 + square * (-0.3333333333 + square * (0.1333333333 + square * -0.0539682540))
    return tl.where(size < 0.1, x * series, tl.where(x < 0, -1.0, 1.0) * (1.0 - small) / (1.0 + small))


@triton.jit
def _combine(
    x_ptr, y_ptr, out_ptr, columns, x_stride, y_stride, OPERATION: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + column, mask=mask, other=0.0).to(tl.float32)
    if OPERATION == "silu_mul":
        out = silu(x) * y
    elif OPERATION == "gelu_tanh_mul":
        out = gelu_tanh(x) * y
    elif OPERATION == "mul_sigmoid":
        out = x * sigmoid(y)
    else:
        out = x + y
    tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _map(x_ptr, out_ptr, factor, columns, x_stride, OPERATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if OPERATION == "softcap":
        out = factor * tanh(x / factor)
    else:
        out = x * factor
    tl.store(out_ptr + row * columns + column, out, mask=mask)


@triton.jit
def _gather(
    table_ptr, rows_ptr, out_ptr, table_rows, columns, table_stride, rows_stride, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + token * rows_stride).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    # a row outside of the table is a fault of the caller's, which must not read foreign memory
    held = inside & (row >= 0) & (row < table_rows)
    words = tl.load(table_ptr + row * table_stride + column, mask=held, other=0)
    tl.store(out_ptr + token * columns + column, words, mask=inside)


def _config(columns: int) -> tuple[int, int]:
    """Return (columns of a program, programs in a row)."""
    block = min(_BLOCK, max(64, 1 << max(columns - 1, 0).bit_length()))
    return block, -(-columns // block)


def _run_combine(
    engine: GpuEngine, operation: str, x: torch.Tensor, y: torch.Tensor, kind: torch.dtype
) -> torch.Tensor:
    same_shape(x, y)
    first, second = row_view(x), row_view(y)
    rows, columns = first.shape
    block, parts = _config(columns)
    out = engine.empty(operation, x.shape, kind)
    engine.launch(
        _combine,
        (rows, parts),
        reads=(x, y),
        writes=(out,),
        x_ptr=x,
        y_ptr=y,
        out_ptr=out,
        columns=columns,
        x_stride=first.stride(0),
        y_stride=second.stride(0),
        constants={"OPERATION": operation, "BLOCK": block},
    )
    return out


def _run_map(engine: GpuEngine, operation: str, x: torch.Tensor, factor: float) -> torch.Tensor:
    rows, columns = row_view(x).shape
    block, parts = _config(columns)
    out = engine.empty(operation, x.shape)
    engine.launch(
        _map,
        (rows, parts),
        reads=(x,),
        writes=(out,),
        x_ptr=x,
        out_ptr=out,
        factor=float(factor),
        columns=columns,
        x_stride=row_view(x).stride(0),
        constants={"OPERATION": operation, "BLOCK": block},
    )
    return out


def silu_mul(engine: GpuEngine, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Run `silu_mul_ref` on [T, D], of any distance between rows; large steps give bfloat16."""
    return _run_combine(engine, "silu_mul", gate, up, product_type(engine, gate.shape[0]))


def gelu_tanh_mul(engine: GpuEngine, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Run `gelu_tanh_mul_ref` on [T, D], of any distance between rows; large steps give bfloat16."""
    return _run_combine(engine, "gelu_tanh_mul", gate, up, product_type(engine, gate.shape[0]))


def mul_sigmoid(engine: GpuEngine, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Run `mul_sigmoid_ref` on [T, D], of any distance between rows; large steps give bfloat16."""
    return _run_combine(engine, "mul_sigmoid", x, gate, product_type(engine, x.shape[0]))


def add(engine: GpuEngine, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Run `add_ref` on two tensors of one shape."""
    return _run_combine(engine, "add", x, y, torch.float32)


def scale(engine: GpuEngine, x: torch.Tensor, factor: float) -> torch.Tensor:
    """Run `scale_ref`."""
    return _run_map(engine, "scale", x, factor)


def softcap(engine: GpuEngine, x: torch.Tensor, cap: float) -> torch.Tensor:
    """Run `softcap_ref`."""
    return _run_map(engine, "softcap", x, cap)


def _flat(table: torch.Tensor) -> torch.Tensor:
    """Return [N, ...] as [N, M], over the same memory."""
    rows = table.flatten(1) if table.ndim > 1 else table.unsqueeze(1)
    if rows.data_ptr() != table.data_ptr() or (rows.shape[1] > 1 and rows.stride(1) != 1):
        raise InternalError("the rows of a table to gather from must be contiguous")
    return rows


def _widest(rows: torch.Tensor) -> torch.dtype:
    """Return the widest integers that rows [N, M] are whole numbers of, and begin at."""
    size = rows.element_size()
    facts = (rows.shape[1] * size, rows.stride(0) * size, rows.storage_offset() * size)
    return next(
        kind for width, kind in _WORDS if width <= max(size, 4) and not any(fact % width for fact in facts)
    )


def gather_rows(engine: GpuEngine, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Run `gather_rows_ref`, but a row outside of the table is all zeros where the reference raises."""
    flat = _flat(table)
    words = flat.view(_widest(flat))
    out = engine.empty("gather_rows", (rows.shape[0], *table.shape[1:]), table.dtype)
    columns = words.shape[1]
    block, parts = _config(columns)
    engine.launch(
        _gather,
        (rows.shape[0], parts),
        reads=(table, rows),
        writes=(out,),
        table_ptr=words,
        rows_ptr=rows,
        out_ptr=_flat(out).view(words.dtype),
        table_rows=words.shape[0],
        columns=columns,
        table_stride=words.stride(0),
        rows_stride=rows.stride(0),
        constants={"BLOCK": block},
    )
    return out


_COMBINE_TYPES = {"columns": "i32", "x_stride": "i32", "y_stride": "i32"}
_GATHER_TYPES = {
    **{"table_ptr": "*i32", "rows_ptr": "*i64", "out_ptr": "*i32", "table_rows": "i32", "columns": "i32"},
    **{"table_stride": "i32", "rows_stride": "i32"},
}


def _offline_combine(operation: str, kind: str, out: str) -> Offline:
    pointers = {"x_ptr": kind, "y_ptr": kind, "out_ptr": out}
    constants = {"OPERATION": operation, "BLOCK": _BLOCK}
    aligned = frozenset(_COMBINE_TYPES)
    return Offline(
        _combine, {**pointers, **_COMBINE_TYPES}, constants, name=f"{operation}{out[1:]}", aligned=aligned
    )


def _offline_map(operation: str) -> Offline:
    types = {"x_ptr": "*fp32", "out_ptr": "*fp32", "factor": "fp32", "columns": "i32", "x_stride": "i32"}
    return Offline(_map, types, {"OPERATION": operation, "BLOCK": _BLOCK}, name=operation)


OFFLINE: tuple[Offline, ...] = (
    _offline_combine("silu_mul", "*fp32", "*fp32"),
    _offline_combine("silu_mul", "*bf16", "*bf16"),
    _offline_combine("gelu_tanh_mul", "*fp32", "*fp32"),
    _offline_combine("mul_sigmoid", "*fp32", "*fp32"),
    _offline_combine("mul_sigmoid", "*bf16", "*bf16"),
    _offline_combine("add", "*fp32", "*fp32"),
    _offline_map("scale"),
    _offline_map("softcap"),
    Offline(_gather, _GATHER_TYPES, {"BLOCK": _BLOCK}),
)
