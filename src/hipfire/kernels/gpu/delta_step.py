"""The recurrence of gated DeltaNet token by token, and the gated norm behind it: decode steps.

A program takes one value head of one sequence, with its whole state in registers: it is read once and written
once, however many tokens there are. Engines that take activations as they are run prompts like this too. This
file does not know the convolution.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from hipfire.kernels.gpu.delta_input import DeltaCall, DeltaSizes, key_head, move_tails, padded
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.prepare import empty_prepared, store_units
from hipfire.kernels.gpu.rowwise import GEMV_ROWS
from hipfire.kernels.gpu.target import let_next_start, wait_for_earlier
from hipfire.kernels.packed import UNIT


@triton.jit
def log_decay(a, factor, bias):
    """Return factor * softplus(a + bias), what the log of a state's decay is, for float32."""
    x = a + bias
    grown = tl.exp(tl.minimum(x, 20.0))
    # log(1 + y) of a small y by what 1 + y really came to
    total = 1.0 + grown
    off = tl.where(total == 1.0, 1.0, total - 1.0)
    small = tl.where(total == 1.0, grown, tl.log(total) * (grown / off))
    return factor * tl.where(x > 20.0, x, small)


@triton.jit
def gated_norm(x, z, weight, eps, D: tl.constexpr):
    """Return x / sqrt(mean(x^2) + eps) * weight * silu(z) for rows of float32 x, z [R, P]; weight [P].

    Columns from D on must be zero, and stay so.
    """
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    return x * scale[:, None] * weight[None, :] * (z / (1.0 + tl.exp(-z)))


@triton.jit
def _advance(
    matrix, x_ptr, b_ptr, a_ptr, factor, bias, token, head, key, value, b_stride, a_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Return a head's state [DK_PADDED, DV_PADDED] behind a token, and what the token sees [DV_PADDED]."""
    at = x_ptr + token * (2 * KEYS * DK + VALUES * DV)
    at_key = at + key_head(head, KEYS, VALUES, TILED) * DK + key
    q = tl.load(at_key, mask=key < DK, other=0.0)
    k = tl.load(at_key + KEYS * DK, mask=key < DK, other=0.0)
    v = tl.load(at + 2 * KEYS * DK + head * DV + value, mask=value < DV, other=0.0)
    beta = tl.load(b_ptr + token * b_stride + head).to(tl.float32)
    a = tl.load(a_ptr + token * a_stride + head).to(tl.float32)
    decay = tl.exp(log_decay(a, factor, bias))
    beta = 1.0 / (1.0 + tl.exp(-beta))
    # both sums are of the state before the token, so that neither waits for the other
    seen = decay * tl.sum(matrix * k[:, None], 0)
    out = decay * tl.sum(matrix * q[:, None], 0)
    change = beta * (v - seen)
    return decay * matrix + k[:, None] * change[None, :], out + tl.sum(q * k) * change


@triton.jit
def _store_seen(
    out, z_ptr, weight, out_ptr, values_ptr, scales_ptr, sums_ptr, token, head, value, z_stride, eps,
    VALUES: tl.constexpr, DV: tl.constexpr, DV_PADDED: tl.constexpr,
):  # fmt: skip
    """Store the gated norm of what a token sees, and its int8 form where that is wanted."""
    inside = (value < DV)[None, :]
    column = head * DV + value[None, :]
    z = tl.load(z_ptr + token * z_stride + column, mask=inside, other=0.0).to(tl.float32)
    out = gated_norm(out[None, :], z, weight, eps, DV)
    place = out_ptr + token * (VALUES * DV) + column
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=inside)
    if values_ptr is not None:
        unit = head * (DV // 32) + tl.arange(0, DV_PADDED // 32)
        store_units(
            tl.reshape(out, (DV_PADDED // 32, 32)), token, unit, unit < (head + 1) * (DV // 32),
            values_ptr, scales_ptr, sums_ptr, VALUES * (DV // 32), UNITS=DV_PADDED // 32, INT8=True,
        )  # fmt: skip


@triton.jit
def delta_step_kernel(
    x_ptr, mixed_ptr, z_ptr, b_ptr, a_ptr, factor_ptr, bias_ptr, weight_ptr, tail_ptr, matrix_ptr, rows_ptr,
    pieces_ptr, out_ptr, values_ptr, scales_ptr, sums_ptr,
    mixed_stride, z_stride, b_stride, a_stride, tail_stride, matrix_stride, eps,
    KEYS: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr, WIDTH: tl.constexpr, TILED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    let_next_start(TARGET)
    head = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64)
    count = 1
    if pieces_ptr is not None:
        count = tl.load(pieces_ptr + 2 * first + 1)
        first = tl.load(pieces_ptr + 2 * first).to(tl.int64)
    key = tl.arange(0, DK_PADDED)
    value = tl.arange(0, DV_PADDED)
    slot = tl.load(rows_ptr + 2 * first)
    position = tl.load(rows_ptr + 2 * first + 1)
    inside = (key < DK)[:, None] & (value < DV)[None, :]
    own = slot * matrix_stride + tl.cast(head, tl.int64) * (DK * DV)
    state = matrix_ptr + own + key[:, None] * DV + value[None, :]
    matrix = tl.load(state, mask=inside & (position > 0), other=0.0)
    factor = tl.load(factor_ptr + head)
    bias = tl.load(bias_ptr + head)
    weight = tl.load(weight_ptr + value, mask=value < DV, other=0.0)
    # the state is on its way by now: the step before left it, and of this one only this program touches it
    wait_for_earlier(TARGET)
    if pieces_ptr is None:
        matrix, out = _advance(
            matrix, x_ptr, b_ptr, a_ptr, factor, bias, first, head, key, value, b_stride, a_stride,
            KEYS, VALUES, DK, DV, TILED,
        )  # fmt: skip
        tl.store(state, matrix, mask=inside)
        _store_seen(
            out, z_ptr, weight, out_ptr, values_ptr, scales_ptr, sums_ptr, first, head, value, z_stride, eps,
            VALUES, DV, DV_PADDED,
        )  # fmt: skip
    else:
        for token in range(first, first + count):
            matrix, out = _advance(
                matrix, x_ptr, b_ptr, a_ptr, factor, bias, token, head, key, value, b_stride, a_stride,
                KEYS, VALUES, DK, DV, TILED,
            )  # fmt: skip
            _store_seen(
                out, z_ptr, weight, out_ptr, values_ptr, scales_ptr, sums_ptr, token, head, value, z_stride,
                eps, VALUES, DV, DV_PADDED,
            )  # fmt: skip
        tl.store(state, matrix, mask=inside)
        move_tails(
            mixed_ptr, tail_ptr + slot * tail_stride, first, count, position, head, value, mixed_stride,
            KEYS, VALUES, DK, DV, DK_PADDED, WIDTH, TILED,
        )  # fmt: skip


def delta_step(engine: GpuEngine, call: DeltaCall, x: torch.Tensor, out: torch.Tensor) -> None:
    """Write to `out` [T, Hv * Dv] what float32 x [T, C] of `delta_input` makes of the states.

    The matrices move on, and with `pieces` the tails too. Decode steps of a row or two leave the engine the
    int8 form.
    """
    sizes, single = call.sizes, call.pieces is None
    units = None
    if single and call.tokens <= GEMV_ROWS and sizes.dv % UNIT == 0 and not engine.exact:
        units = empty_prepared(engine, call.tokens, out.shape[1], "int8")
        engine.prepare("int8", out, units)
    made = () if units is None or units.scales is None else (units.values, units.scales, units.sums)
    own = (call.z, call.b, call.a, call.decay, call.dt_bias, call.norm_weight, call.matrix, call.rows)
    constants = _constants(sizes)
    engine.launch(
        delta_step_kernel,
        (sizes.values, call.tokens if call.pieces is None else call.pieces.shape[0]),
        reads=(x, *own, *(() if call.pieces is None else (call.pieces, call.mixed, call.tail))),
        writes=(out, call.matrix, *(() if single else (call.tail,)), *made),
        x_ptr=x,
        mixed_ptr=None if single else call.mixed,
        z_ptr=call.z,
        b_ptr=call.b,
        a_ptr=call.a,
        factor_ptr=call.decay,
        bias_ptr=call.dt_bias,
        weight_ptr=call.norm_weight,
        tail_ptr=None if single else call.tail,
        matrix_ptr=call.matrix,
        rows_ptr=call.rows,
        pieces_ptr=call.pieces,
        out_ptr=out,
        values_ptr=units and units.values,
        scales_ptr=units and units.scales,
        sums_ptr=units and units.sums,
        mixed_stride=call.mixed.stride(0),
        z_stride=call.z.stride(0),
        b_stride=call.b.stride(0),
        a_stride=call.a.stride(0),
        tail_stride=call.tail.stride(0),
        matrix_stride=call.matrix.stride(0),
        eps=float(call.eps),
        constants={**constants, "TARGET": engine.target},
        warps=_warps(constants),
    )


def _constants(sizes: DeltaSizes) -> dict[str, Any]:
    own = {"DV_PADDED": max(padded(sizes.dv), UNIT), "WIDTH": sizes.width, "TILED": sizes.tiled}
    return {**sizes.constants(), **own}


def _warps(constants: dict[str, Any]) -> int:
    """Return the warps that hold a state with 64 values in each thread."""
    elements: int = constants["DK_PADDED"] * constants["DV_PADDED"]
    return max(1, min(16, elements // 2048))


_STRIDES = ("mixed_stride", "z_stride", "b_stride", "a_stride", "tail_stride", "matrix_stride")
_INT8 = {"values_ptr": "*i8", "scales_ptr": "*fp32", "sums_ptr": "*fp32"}
_PIECES = {"pieces_ptr": "*i32", "mixed_ptr": "*fp32", "tail_ptr": "*fp32"}
_TYPES = {
    **dict.fromkeys(("x_ptr", "z_ptr", "b_ptr", "a_ptr", "factor_ptr", "bias_ptr", "weight_ptr"), "*fp32"),
    **{"matrix_ptr": "*fp32", "rows_ptr": "*i64", "out_ptr": "*fp32", "eps": "fp32"},
    **dict.fromkeys(_STRIDES, "i32"),
}


def _offline(name: str, sizes: DeltaSizes, types: dict[str, str]) -> Offline:
    constants = _constants(sizes)
    absent = dict.fromkeys({*_PIECES, *_INT8} - set(types))
    return Offline(
        delta_step_kernel,
        {**_TYPES, **types},
        {**constants, **absent},
        _warps(constants),
        name=name,
        aligned=frozenset({"mixed_stride", "z_stride", "tail_stride", "matrix_stride"}),
        unaligned=frozenset({"b_ptr", "a_ptr"}),
    )


_27B, _A3B = DeltaSizes(16, 48, 128, 128), DeltaSizes(16, 32, 128, 128)
OFFLINE: tuple[Offline, ...] = (
    _offline("27b int8", _27B, _INT8),
    _offline("27b", _27B, {}),
    _offline("27b tiled", replace(_27B, tiled=True), {}),
    _offline("a3b int8", _A3B, _INT8),
    _offline("27b prompt", _27B, _PIECES),
    _offline("64", DeltaSizes(4, 8, 64, 64), _INT8),
)
