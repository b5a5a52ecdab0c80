"""The rotation of 256 columns at a time, in registers, and its inverse.

Passes go over strides 1, 2, 4 .. 128 as those of the reference do, with one addition for each element and
pass, so results equal its bit for bit. This file does not know weights.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from hipfire.base.errors import ValidationError
from hipfire.kernels.fwht import SEED_IN, SEED_OUT, SEGMENT, lcg_states
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.prepare import empty_prepared, store_units
from hipfire.kernels.gpu.rowwise import GEMV_ROWS, product_type, row_view
from hipfire.kernels.gpu.target import begin_launch

# segments of a program, which one warp rotates without memory that it shares with others
_SEGMENTS = 2
# under this name the engine keeps the rotation of activations
ROTATED: Final = "rotated"


def _sign_words(seed: int) -> tuple[int, ...]:
    """Return 256 bits, one for each minus sign, as eight int32 words."""
    bits = [1 - (state >> 16 & 1) for state in lcg_states(SEGMENT, seed)]
    words = [
        sum(bit << place for place, bit in enumerate(bits[start : start + 32]))
        for start in range(0, SEGMENT, 32)
    ]
    return tuple(word - (1 << 32) if word >> 31 else word for word in words)


_SIGNS_IN = tl.constexpr(_sign_words(SEED_IN))
_SIGNS_OUT = tl.constexpr(_sign_words(SEED_OUT))


@triton.jit
def _signs(WORDS: tl.constexpr):
    """Return 256 signs, +1.0 and -1.0."""
    index = tl.arange(0, 256)
    word = tl.full((256,), WORDS[0], tl.int32)
    for place in tl.static_range(1, 8):
        word = tl.where((index >> 5) == place, WORDS[place], word)
    return 1.0 - 2.0 * ((word >> (index & 31)) & 1).to(tl.float32)


@triton.jit
def _transform(x):
    """Return the Walsh-Hadamard transform of each row of x [ROWS, 256], unnormalized."""
    ROWS: tl.constexpr = x.shape[0]
    for level in tl.static_range(8):
        pairs = tl.reshape(x, (ROWS * (128 >> level), 2, 1 << level))
        # the sum of two, and the first less the second: the same two values that butterflies make
        second = tl.arange(0, 2)[None, :, None] == 1
        total = tl.sum(pairs, axis=1, keep_dims=True)
        difference = tl.sum(tl.where(second, -pairs, pairs), axis=1, keep_dims=True)
        x = tl.reshape(tl.where(second, difference, total), (ROWS, 256))
    return x


@triton.jit
def rotate256(x):
    """Return the rotation of each row of float32 x [ROWS, 256]."""
    x = _transform(x * _signs(_SIGNS_IN)[None, :])
    return x * (_signs(_SIGNS_OUT) * 0.0625)[None, :]


@triton.jit
def unrotate256(x):
    """Return the inverse rotation of each row of float32 x [ROWS, 256]."""
    x = _transform(x * _signs(_SIGNS_OUT)[None, :])
    return x * (_signs(_SIGNS_IN) * 0.0625)[None, :]


@triton.jit
def _rotate(
    x_ptr, out_ptr, values_ptr, scales_ptr, sums_ptr, segments, x_stride,
    ROWS: tl.constexpr, INVERSE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = segment[:, None] * 256 + tl.arange(0, 256)[None, :]
    mask = (segment < segments)[:, None]
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if INVERSE:
        x = unrotate256(x)
    else:
        x = rotate256(x)
    out = out_ptr + row * segments * 256 + column
    tl.store(out, x.to(out_ptr.dtype.element_ty), mask=mask)
    if values_ptr is not None:
        unit = tl.program_id(1) * (ROWS * 8) + tl.arange(0, ROWS * 8)
        store_units(
            tl.reshape(x, (ROWS * 8, 32)), row, unit, unit < segments * 8,
            values_ptr, scales_ptr, sums_ptr, segments * 8, UNITS=ROWS * 8, INT8=True,
        )  # fmt: skip


def fwht(engine: GpuEngine, x: torch.Tensor) -> torch.Tensor:
    """Run `fwht256` on [..., K]; large steps give bfloat16. A rotation that a norm made is not made again."""
    found: torch.Tensor | None = engine.prepared(ROTATED, x)
    if found is not None:
        return found
    int8 = x.ndim == 2 and x.shape[0] <= GEMV_ROWS and not engine.exact
    return _run(engine, x, product_type(engine, x.shape[0]), int8=int8)


def fwht_int8(engine: GpuEngine, x: torch.Tensor) -> torch.Tensor:
    """Run `fwht256` on [T, K], float32, and leave the engine the int8 form of the result."""
    return _run(engine, x, torch.float32, int8=True)


def inverse_fwht(engine: GpuEngine, x: torch.Tensor) -> torch.Tensor:
    """Run `inverse_fwht256` on [..., K]."""
    return _run(engine, x, torch.float32, inverse=True)


def _run(
    engine: GpuEngine, x: torch.Tensor, kind: torch.dtype, *, inverse: bool = False, int8: bool = False
) -> torch.Tensor:
    columns = x.shape[-1]
    if columns % SEGMENT:
        raise ValidationError(
            f"the rotation needs a multiple of {SEGMENT} columns, not {columns}",
            hint="use a format that is not rotated for this width",
        )
    rows, segments = row_view(x), columns // SEGMENT
    out = engine.empty("rotated", x.shape, kind)
    units = None
    if int8:
        units = empty_prepared(engine, x.shape[0], columns, "int8")
        engine.prepare("int8", out, units)
    made = () if units is None or units.scales is None else (units.values, units.scales, units.sums)
    engine.launch(
        _rotate,
        (rows.shape[0], -(-segments // _SEGMENTS)),
        reads=(x,),
        writes=(out, *made),
        x_ptr=x,
        out_ptr=out,
        values_ptr=units and units.values,
        scales_ptr=units and units.scales,
        sums_ptr=units and units.sums,
        segments=segments,
        x_stride=rows.stride(0),
        constants={"ROWS": _SEGMENTS, "INVERSE": inverse, "TARGET": engine.target},
        warps=1,
    )
    return out


_INT8 = {"values_ptr": "*i8", "scales_ptr": "*fp32", "sums_ptr": "*fp32"}


def _offline(name: str, source: str, out: str, *, inverse: bool = False, int8: bool = False) -> Offline:
    types = {"x_ptr": source, "out_ptr": out, "segments": "i32", "x_stride": "i32"}
    constants = {"ROWS": _SEGMENTS, "INVERSE": inverse}
    aligned = frozenset({"x_stride"})
    if int8:
        return Offline(_rotate, {**types, **_INT8}, constants, 1, name=name, aligned=aligned)
    return Offline(_rotate, types, {**constants, **dict.fromkeys(_INT8)}, 1, name=name, aligned=aligned)


OFFLINE: tuple[Offline, ...] = (
    _offline("fp32", "*fp32", "*fp32"),
    _offline("int8", "*fp32", "*fp32", int8=True),
    _offline("bf16", "*bf16", "*bf16"),
    _offline("inverse", "*fp32", "*fp32", inverse=True),
)
