"""RMS normalization, alone and together with the residual sum before it.

A row is read once and held in registers, however long; short rows share a program. How a row is summed
depends on its length alone, so equal rows give equal bits whatever stands beside them. Where products of
packed weights may follow, the norm also leaves what they read: the rotated row, and int8 units. This file
does not know models.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hipfire.base.errors import InternalError
from hipfire.kernels.fwht import SEGMENT
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.prepare import empty_prepared, store_units
from hipfire.kernels.gpu.rotate import ROTATED, rotate256
from hipfire.kernels.gpu.rowwise import GEMV_ROWS, product_type, row_view, same_shape
from hipfire.kernels.gpu.target import begin_launch
from hipfire.kernels.packed import UNIT

# elements that a program takes on at least, in whole rows
_TILE = 1024
# what a row may hold: 32 values in each of 512 threads
_LONGEST = 16384
# the longest that a norm also rotates and rounds
_LONGEST_FUSED = 8192
# up to so many rows are rotated in parts, each of so many segments, which one warp keeps to itself
_SPLIT_ROWS = 16
_SEGMENTS = 2


@triton.jit
def normalize(x, weight, eps, offset, COLUMNS: tl.constexpr):
    """Return x / sqrt(mean(x^2) + eps) * (weight + offset) for rows of float32 x [R, C].

    Columns from COLUMNS on must be zero, and stay so; weight [C] is float32.
    """
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / COLUMNS + eps)
    return x * scale[:, None] * (weight + offset)[None, :]


@triton.jit
def _rms_norm(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    heads,
    token_stride,
    head_stride,
    eps,
    offset,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TARGET: tl.constexpr,
):
    begin_launch(TARGET)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    mask = (row < rows)[:, None] & inside[None, :]
    start = (row // heads) * token_stride + (row % heads) * head_stride
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    out = normalize(x, weight, eps, offset, COLUMNS)
    place = out_ptr + row[:, None] * COLUMNS + column[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _residual_norm(
    x_ptr,
    delta_ptr,
    weight_ptr,
    delta_weight_ptr,
    total_ptr,
    normed_ptr,
    rotated_ptr,
    values_ptr,
    scales_ptr,
    sums_ptr,
    x_stride,
    delta_stride,
    eps,
    offset,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    TARGET: tl.constexpr,
):
    begin_launch(TARGET)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    # one row, kept in two dimensions as `normalize` wants it
    place, mask = column[None, :], inside[None, :]
    x = tl.load(x_ptr + row * x_stride + place, mask=mask, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + row * delta_stride + place, mask=mask, other=0.0).to(tl.float32)
    # two weights of the longest rows do not fit into registers at once: one waits until the other is used
    LATE: tl.constexpr = delta_weight_ptr is not None and BLOCK > 8192
    if not LATE:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if delta_weight_ptr is not None:
        delta_weight = tl.load(delta_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        delta = normalize(delta, delta_weight, eps, offset, COLUMNS)
    total = x + delta
    if LATE:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = normalize(total, weight, eps, offset, COLUMNS)
    tl.store(total_ptr + row * COLUMNS + place, total, mask=mask)
    tl.store(normed_ptr + row * COLUMNS + place, normed.to(normed_ptr.dtype.element_ty), mask=mask)
    if rotated_ptr is not None:
        normed = tl.reshape(rotate256(tl.reshape(normed, (BLOCK // 256, 256))), (1, BLOCK))
        rotated = normed.to(rotated_ptr.dtype.element_ty)
        tl.store(rotated_ptr + row * COLUMNS + place, rotated, mask=mask)
    if values_ptr is not None:
        units: tl.constexpr = COLUMNS // 32
        unit = tl.arange(0, BLOCK // 32)
        normed = tl.reshape(normed, (BLOCK // 32, 32))
        store_units(
            normed,
            row,
            unit,
            unit < units,
            values_ptr,
            scales_ptr,
            sums_ptr,
            units,
            UNITS=BLOCK // 32,
            INT8=True,
        )


@triton.jit
def _squares(
    x_ptr, delta_ptr, delta_weight_ptr, delta_factor, offset, COLUMNS: tl.constexpr, STEP: tl.constexpr
):
    """Return the sum of squares of a row of x + delta, or of delta alone where x is None.

    With a weight the delta counts times `delta_factor` and that weight.
    """
    total = tl.zeros((STEP,), tl.float32)
    for first in tl.static_range(0, COLUMNS, STEP):
        column = first + tl.arange(0, STEP)
        inside = column < COLUMNS
        value = tl.load(delta_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if delta_weight_ptr is not None:
            weight = tl.load(delta_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
            value = value * delta_factor * (weight + offset)
        if x_ptr is not None:
            value += tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
        total += value * value
    return tl.sum(total, 0)


@triton.jit
def _residual_parts(
    x_ptr,
    delta_ptr,
    weight_ptr,
    delta_weight_ptr,
    total_ptr,
    normed_ptr,
    rotated_ptr,
    values_ptr,
    scales_ptr,
    sums_ptr,
    x_stride,
    delta_stride,
    eps,
    offset,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TARGET: tl.constexpr,
):
    begin_launch(TARGET)
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_stride
    delta_row = delta_ptr + row * delta_stride
    # every program sums the whole row, which it finds in the cache, and goes on with its own part
    factor = 1.0
    if delta_weight_ptr is not None:
        squares = _squares(None, delta_row, None, factor, offset, COLUMNS, STEP)
        factor = tl.rsqrt(squares / COLUMNS + eps)
    squares = _squares(x_row, delta_row, delta_weight_ptr, factor, offset, COLUMNS, STEP)
    scale = tl.rsqrt(squares / COLUMNS + eps)
    segment = tl.program_id(1) * SEGMENTS + tl.arange(0, SEGMENTS)
    column = segment[:, None] * 256 + tl.arange(0, 256)[None, :]
    mask = column < COLUMNS
    total = tl.load(delta_row + column, mask=mask, other=0.0).to(tl.float32)
    if delta_weight_ptr is not None:
        total *= factor * (tl.load(delta_weight_ptr + column, mask=mask, other=0.0).to(tl.float32) + offset)
    total += tl.load(x_row + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    normed = total * scale * (weight + offset)
    place = row * COLUMNS + column
    tl.store(total_ptr + place, total, mask=mask)
    tl.store(normed_ptr + place, normed.to(normed_ptr.dtype.element_ty), mask=mask)
    normed = rotate256(normed)
    tl.store(rotated_ptr + place, normed.to(rotated_ptr.dtype.element_ty), mask=mask)
    if values_ptr is not None:
        unit = tl.program_id(1) * (SEGMENTS * 8) + tl.arange(0, SEGMENTS * 8)
        store_units(
            tl.reshape(normed, (SEGMENTS * 8, 32)), row, unit, unit < COLUMNS // 32,
            values_ptr, scales_ptr, sums_ptr, COLUMNS // 32, UNITS=SEGMENTS * 8, INT8=True,
        )  # fmt: skip


def _config(columns: int) -> tuple[int, int, int]:
    """Return (columns filled up, rows of a program, warps) for rows of `columns`."""
    if not 1 <= columns <= _LONGEST:
        raise InternalError(f"rows of {columns} columns cannot be normalized: 1 to {_LONGEST} are possible")
    block = max(16, 1 << (columns - 1).bit_length())
    return block, max(1, _TILE // block), 4 if block <= 2048 else 8 if block <= 8192 else 16


def rms_norm(
    engine: GpuEngine, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Run `rms_norm_ref` on [T, D], or on the heads of [T, H, D] which may lie in wider rows.

    The result is float32; rows [T, D] of large steps give bfloat16.
    """
    columns = x.shape[-1]
    block, rows, warps = _config(columns)
    if x.ndim == 3 and x.stride(-1) == 1:
        heads, strides = x.shape[1], (x.stride(0), x.stride(1))
        kind = torch.float32
    else:
        heads, strides = 1, (row_view(x).stride(0), 0)
        kind = product_type(engine, x.shape[0])
    out = engine.empty("rms_norm", x.shape, kind)
    total = x.numel() // columns
    engine.launch(
        _rms_norm,
        (-(-total // rows),),
        reads=(x, weight),
        writes=(out,),
        x_ptr=x,
        weight_ptr=weight,
        out_ptr=out,
        rows=total,
        heads=heads,
        token_stride=strides[0],
        head_stride=strides[1],
        eps=float(eps),
        offset=float(offset),
        constants={"COLUMNS": columns, "ROWS": rows, "BLOCK": block, "TARGET": engine.target},
        warps=warps,
    )
    return out


def _present(*tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)


def residual_norm(
    engine: GpuEngine,
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    delta_weight: torch.Tensor | None = None,
    *,
    rotated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `residual_norm_ref` on [T, D]; the norm of large steps is bfloat16.

    The engine is left the rotation of the norm if it is `rotated`, and where the rows are so few that
    products read int8, that form of it too.
    """
    same_shape(x, delta)
    tokens, columns = x.shape
    block, _, warps = _config(columns)
    fused = block <= _LONGEST_FUSED
    turned, units = None, None
    if fused and rotated and columns % SEGMENT == 0:
        turned = engine.empty("rotated", x.shape, product_type(engine, tokens))
    if fused and tokens <= GEMV_ROWS and columns % UNIT == 0 and not engine.exact:
        units = empty_prepared(engine, tokens, columns, "int8")
    made = (units.values, units.scales, units.sums) if units is not None else ()
    total = engine.empty("residual", x.shape)
    normed = engine.empty("residual_norm", x.shape, product_type(engine, tokens))
    split = turned is not None and tokens <= _SPLIT_ROWS
    parts, sizes = 1, {"COLUMNS": columns, "BLOCK": block}
    if split:
        parts, warps = -(-columns // (SEGMENT * _SEGMENTS)), 1
        sizes = {"COLUMNS": columns, "STEP": _TILE, "SEGMENTS": _SEGMENTS}
    engine.launch(
        _residual_parts if split else _residual_norm,
        (tokens, parts),
        reads=_present(x, delta, weight, delta_weight),
        writes=_present(total, normed, turned, *made),
        x_ptr=x,
        delta_ptr=delta,
        weight_ptr=weight,
        delta_weight_ptr=delta_weight,
        total_ptr=total,
        normed_ptr=normed,
        rotated_ptr=turned,
        values_ptr=units and units.values,
        scales_ptr=units and units.scales,
        sums_ptr=units and units.sums,
        x_stride=row_view(x).stride(0),
        delta_stride=row_view(delta).stride(0),
        eps=float(eps),
        offset=float(offset),
        constants={**sizes, "TARGET": engine.target},
        warps=warps,
    )
    if turned is not None:
        engine.prepare(ROTATED, normed, turned)
    if units is not None:
        engine.prepare("int8", normed if turned is None else turned, units)
    return total, normed


_RMS_TYPES = {
    **{"x_ptr": "*fp32", "weight_ptr": "*fp32", "out_ptr": "*fp32", "rows": "i32", "heads": "i32"},
    **{"token_stride": "i32", "head_stride": "i32", "eps": "fp32", "offset": "fp32"},
}
_RESIDUAL_TYPES = {
    **{"x_ptr": "*fp32", "delta_ptr": "*fp32", "weight_ptr": "*fp32"},
    **{"total_ptr": "*fp32", "normed_ptr": "*fp32", "x_stride": "i32", "delta_stride": "i32"},
    **{"eps": "fp32", "offset": "fp32"},
}


def _offline_rms(name: str, columns: int, types: dict[str, str]) -> Offline:
    block, rows, warps = _config(columns)
    constants = {"COLUMNS": columns, "ROWS": rows, "BLOCK": block}
    return Offline(_rms_norm, {**_RMS_TYPES, **types}, constants, warps, name=name)


def _offline_residual(name: str, columns: int, types: dict[str, str], *, split: bool = False) -> Offline:
    block, _, warps = _config(columns)
    optional = ("delta_weight_ptr", "rotated_ptr", "values_ptr", "scales_ptr", "sums_ptr")
    absent = {name: None for name in optional if name not in types}
    if split:
        sizes = {"COLUMNS": columns, "STEP": _TILE, "SEGMENTS": _SEGMENTS}
        return Offline(_residual_parts, {**_RESIDUAL_TYPES, **types}, {**sizes, **absent}, 1, name=name)
    constants = {"COLUMNS": columns, "BLOCK": block, **absent}
    return Offline(_residual_norm, {**_RESIDUAL_TYPES, **types}, constants, warps, name=name)


_INT8 = {"values_ptr": "*i8", "scales_ptr": "*fp32", "sums_ptr": "*fp32"}
_ROTATED = {"rotated_ptr": "*fp32"}
_SANDWICH = {"delta_weight_ptr": "*fp32"}
_BF16 = {"delta_ptr": "*bf16", "normed_ptr": "*bf16"}
OFFLINE: tuple[Offline, ...] = (
    _offline_rms("heads128", 128, {"x_ptr": "*bf16"}),
    _offline_rms("576", 576, {}),
    _offline_rms("5120", 5120, {"out_ptr": "*bf16"}),
    _offline_rms("16384", 16384, {}),
    _offline_residual("4096", 4096, {}),
    _offline_residual("4096bf16", 4096, {**_BF16, "rotated_ptr": "*bf16"}),
    _offline_residual("4096int8", 4096, _INT8),
    _offline_residual("4096rotated", 4096, {**_INT8, **_ROTATED}),
    _offline_residual("5120rotated", 5120, {**_INT8, **_ROTATED}),
    _offline_residual("4096split", 4096, {**_INT8, **_ROTATED}, split=True),
    _offline_residual("5120split", 5120, {**_INT8, **_ROTATED}, split=True),
    _offline_residual("sandwich2560split", 2560, {**_SANDWICH, **_ROTATED}, split=True),
    _offline_residual("sandwich640", 640, {**_SANDWICH, **_INT8}),
    _offline_residual("sandwich16384", 16384, {**_BF16, **_SANDWICH}),
)
