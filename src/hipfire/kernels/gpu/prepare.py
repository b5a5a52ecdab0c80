"""Activations in the form that products with packed weights read: even and odd columns apart, 32 to a unit.

Codes of a packed row lie two to a byte, so a product takes the even and the odd columns of its activations in
two planes, in the order of the codes. Values are int8 with a scale for each unit, or bfloat16, or float32.
This file does not know weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.target import begin_launch
from hipfire.kernels.packed import UNIT, unit_count

Kind = Literal["int8", "bf16", "f32"]

TYPES: dict[Kind, torch.dtype] = {"int8": torch.int8, "bf16": torch.bfloat16, "f32": torch.float32}
_COLUMNS = 1024


@dataclass(frozen=True, eq=False)
class Prepared:
    """Activations [T, K] in U units of 32 columns, the last one filled up with zeros.

    `values` [T, 2, 4, 4 U]: the even columns, then the odd ones, each in the order of `PackedMatrix.codes`.
    `scales` float32 [T, U] for int8, else None. `sums` float32 [T, U]: the sum of each unit's values as they
    are stored, times their scale.
    """

    values: torch.Tensor
    scales: torch.Tensor | None
    sums: torch.Tensor


@triton.jit
def round_even(x):
    """Round to the nearest integer, halves to even, for |x| up to 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def store_units(
    values,
    row,
    unit,
    mask,
    values_ptr,
    scales_ptr,
    sums_ptr,
    units,
    UNITS: tl.constexpr,
    INT8: tl.constexpr,
):
    """Store float32 `values` [UNITS, 32], units `unit` [UNITS] of `row` where `mask` [UNITS] holds."""
    place = row * units + unit
    if INT8:
        peak = tl.max(tl.abs(values), axis=1)
        scale = peak / 127.0
        inverse = tl.where(peak > 1e-30, 127.0 / peak, 0.0)
        values = round_even(values * inverse[:, None])
        tl.store(scales_ptr + place, scale, mask=mask)
        tl.store(sums_ptr + place, scale * tl.sum(values, axis=1), mask=mask)
    else:
        values = values.to(values_ptr.dtype.element_ty).to(tl.float32)
        tl.store(sums_ptr + place, tl.sum(values, axis=1), mask=mask)
    even, odd = tl.split(tl.reshape(values, (UNITS, 16, 2)))
    item = tl.arange(0, 16)
    at = row * units * 32 + (item // 4 * 4)[None, :] * units + unit[:, None] * 4 + (item % 4)[None, :]
    tl.store(values_ptr + at, even.to(values_ptr.dtype.element_ty), mask=mask[:, None])
    at += tl.cast(units, tl.int64) * 16
    tl.store(values_ptr + at, odd.to(values_ptr.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _prepare(
    x_ptr, values_ptr, scales_ptr, sums_ptr, cols, units, x_stride,
    UNITS: tl.constexpr, INT8: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    column = unit[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + row * x_stride + column, mask=column < cols, other=0.0).to(tl.float32)
    store_units(x, row, unit, unit < units, values_ptr, scales_ptr, sums_ptr, units, UNITS=UNITS, INT8=INT8)


def empty_prepared(engine: GpuEngine, rows: int, cols: int, kind: Kind) -> Prepared:
    """Return memory for the prepared form of activations [rows, cols]."""
    units = unit_count(cols)
    values = engine.empty(f"{kind}.values", (rows, 2, 4, 4 * units), TYPES[kind])
    scales = engine.empty("int8.scales", (rows, units)) if kind == "int8" else None
    return Prepared(values, scales, engine.empty(f"{kind}.sums", (rows, units)))


def prepare(engine: GpuEngine, x: torch.Tensor, kind: Kind) -> Prepared:
    """Return x [T, K], of any floating type and with contiguous rows, in the form `kind`, made once."""
    found: Prepared | None = engine.prepared(kind, x)
    if found is not None:
        return found
    rows, cols = x.shape
    made = empty_prepared(engine, rows, cols, kind)
    units = made.sums.shape[1]
    engine.launch(
        _prepare,
        (rows, -(-units * UNIT // _COLUMNS)),
        reads=(x,),
        writes=tuple(part for part in (made.values, made.scales, made.sums) if part is not None),
        x_ptr=x,
        values_ptr=made.values,
        scales_ptr=made.scales,
        sums_ptr=made.sums,
        cols=cols,
        units=units,
        x_stride=x.stride(0),
        constants={"UNITS": _COLUMNS // UNIT, "INT8": kind == "int8", "TARGET": engine.target},
    )
    engine.prepare(kind, x, made)
    return made


def _offline(source: str, kind: Kind) -> Offline:
    types = {
        **{"x_ptr": source, "sums_ptr": "*fp32", "cols": "i32", "units": "i32", "x_stride": "i32"},
        "values_ptr": {"int8": "*i8", "bf16": "*bf16", "f32": "*fp32"}[kind],
    }
    constants: dict[str, object] = {"UNITS": _COLUMNS // UNIT, "INT8": kind == "int8"}
    if kind == "int8":
        types["scales_ptr"] = "*fp32"
    else:
        constants["scales_ptr"] = None
    aligned = frozenset({"cols", "units", "x_stride"})
    return Offline(_prepare, types, constants, name=f"{source[1:]} {kind}", aligned=aligned)


OFFLINE: tuple[Offline, ...] = (
    _offline("*fp32", "int8"),
    _offline("*bf16", "int8"),
    _offline("*fp32", "bf16"),
    _offline("*fp32", "f32"),
)
