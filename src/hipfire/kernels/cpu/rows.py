"""Kernels over rows of activations: quantization to int8, RMS norms, gated activations, sums, scales.

A row is float32. Rows of a [T, H, D] tensor are found by two strides. This file does not know weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hipfire.kernels.cpu.jit import argument, helper, kernel, number, share
from hipfire.kernels.cpu.simd import (
    LANES,
    abs_f,
    add_f,
    div_f,
    exp_f,
    fma_f,
    load_f,
    load_float,
    max_f,
    mul_f,
    rint_float,
    splat_f,
    store_byte,
    store_codes,
    store_f,
    store_float,
    store_int,
    sub_f,
    sum_f,
    top_f,
    zero_f,
)

GROUP = 32
# bytes of a group's numbers: scale, scale * sum of codes (float32), sums of codes of both halves (int32)
META_BYTES = 16
HALF_BYTES = 4 * LANES
# below this peak 127 / peak could overflow; such a group is as good as zero
SMALLEST_PEAK = np.float32(1e-30)
ONE = np.float32(1.0)


@helper
def copy_row(x: int, columns: int, out: int) -> None:
    """Copy float32."""
    whole = columns - columns % LANES
    for i in range(0, whole, LANES):
        store_f(out + 4 * i, load_f(x + 4 * i))
    for i in range(whole, columns):
        store_float(out + 4 * i, load_float(x + 4 * i))


@helper
def quantize_group(x: int, codes: int, meta: int) -> None:
    """Quantize 32 float32 at `x`: int8 codes, and scale, scale * sum, sums of both halves at `meta`."""
    low, high = load_f(x), load_f(x + HALF_BYTES)
    peak = top_f(max_f(abs_f(low), abs_f(high)))
    scale, inverse = np.float32(0.0), np.float32(0.0)
    if peak > SMALLEST_PEAK:
        scale, inverse = peak / np.float32(127.0), np.float32(127.0) / peak
    factor = splat_f(inverse)
    first = store_codes(codes, mul_f(low, factor))
    second = store_codes(codes + LANES, mul_f(high, factor))
    store_float(meta, scale)
    store_float(meta + 4, scale * np.float32(first + second))
    store_int(meta + 8, first)
    store_int(meta + 12, second)


@helper
def _quantize_rest(x: int, count: int, codes: int, meta: int) -> None:
    """Quantize the last `count` < 32 values of a row; what is missing counts as zeros."""
    peak = np.float32(0.0)
    for i in range(count):
        peak = max(peak, abs(load_float(x + 4 * i)))
    scale, inverse = np.float32(0.0), np.float32(0.0)
    if peak > SMALLEST_PEAK:
        scale, inverse = peak / np.float32(127.0), np.float32(127.0) / peak
    first, second = np.int32(0), np.int32(0)
    for i in range(GROUP):
        code = np.int32(0)
        if i < count:
            code = np.int32(rint_float(load_float(x + 4 * i) * inverse))
        store_byte(codes + i, code)
        if i < LANES:
            first += code
        else:
            second += code
    store_float(meta, scale)
    store_float(meta + 4, scale * np.float32(first + second))
    store_int(meta + 8, first)
    store_int(meta + 12, second)


@helper
def quantize_row(x: int, columns: int, first: int, last: int, codes: int, meta: int) -> None:
    """Quantize the groups first .. last of a row; `codes` and `meta` are the addresses of its first group."""
    for group in range(first, last):
        count = min(GROUP, columns - GROUP * group)
        if count == GROUP:
            quantize_group(x + 4 * GROUP * group, codes + GROUP * group, meta + META_BYTES * group)
        else:
            _quantize_rest(x + 4 * GROUP * group, count, codes + GROUP * group, meta + META_BYTES * group)


@kernel("quantize")
def quantize(arguments: int, thread: int, threads: int) -> None:
    """Quantize rows. Arguments: x, rows, columns, bytes of a row of x, codes, meta."""
    x, rows, columns = argument(arguments, 0), argument(arguments, 1), argument(arguments, 2)
    stride, codes, meta = argument(arguments, 3), argument(arguments, 4), argument(arguments, 5)
    groups = -(-columns // GROUP)
    unit, last = share(rows * groups, thread, threads)
    while unit < last:
        row, group = unit // groups, unit % groups
        end = min(groups, group + last - unit)
        quantize_row(
            x + row * stride,
            columns,
            group,
            end,
            codes + row * groups * GROUP,
            meta + row * groups * META_BYTES,
        )
        unit += end - group


@helper
def norm_row(x: int, weight: int, columns: int, eps: Any, offset: Any, out: int) -> None:
    """RMS-normalize one row: x / sqrt(mean(x^2) + eps) * (offset + weight)."""
    whole = columns - columns % LANES
    squares = zero_f()
    for i in range(0, whole, LANES):
        value = load_f(x + 4 * i)
        squares = fma_f(value, value, squares)
    total = sum_f(squares)
    for i in range(whole, columns):
        total += load_float(x + 4 * i) * load_float(x + 4 * i)
    scale = ONE / np.sqrt(total / np.float32(columns) + eps)
    factor, moved = splat_f(scale), splat_f(offset)
    for i in range(0, whole, LANES):
        store_f(out + 4 * i, mul_f(mul_f(load_f(x + 4 * i), factor), add_f(load_f(weight + 4 * i), moved)))
    for i in range(whole, columns):
        value = load_float(x + 4 * i) * scale
        store_float(out + 4 * i, value * (load_float(weight + 4 * i) + offset))


@kernel("rms-norm")
def rms_norm(arguments: int, thread: int, threads: int) -> None:
    """Normalize rows [T, H, D]. Arguments: x, rows, H, D, token bytes, weight, eps, offset, out, codes, meta.

    Rows of `out` lie side by side. With `codes` they are
    quantized as well.
    """
    x, rows, heads = argument(arguments, 0), argument(arguments, 1), argument(arguments, 2)
    columns, stride, weight = argument(arguments, 3), argument(arguments, 4), argument(arguments, 5)
    eps, offset = number(arguments, 6), number(arguments, 7)
    out, codes, meta = argument(arguments, 8), argument(arguments, 9), argument(arguments, 10)
    groups = -(-columns // GROUP)
    first, last = share(rows, thread, threads)
    for row in range(first, last):
        place = x + (row // heads) * stride + (row % heads) * 4 * columns
        target = out + row * 4 * columns
        norm_row(place, weight, columns, eps, offset, target)
        if codes != 0:
            quantize_row(
                target,
                columns,
                0,
                groups,
                codes + row * groups * GROUP,
                meta + row * groups * META_BYTES,
            )


@helper
def silu_of(x: Any) -> Any:
    """Return x * sigmoid(x)."""
    return div_f(x, add_f(splat_f(ONE), exp_f(sub_f(zero_f(), x))))


@helper
def _times_sigmoid(a: Any, b: Any) -> Any:
    return div_f(a, add_f(splat_f(ONE), exp_f(sub_f(zero_f(), b))))


SQRT_2_OVER_PI = np.float32(0.7978845608028654)
CUBIC = np.float32(0.044715)


@helper
def _gelu_tanh(x: Any) -> Any:
    inner = mul_f(splat_f(SQRT_2_OVER_PI), fma_f(mul_f(mul_f(x, x), x), splat_f(CUBIC), x))
    # 0.5 (1 + tanh u) = 1 / (1 + e^(-2u))
    down = exp_f(mul_f(splat_f(np.float32(-2.0)), inner))
    return div_f(x, add_f(splat_f(ONE), down))


@helper
def tanh_f(x: Any) -> Any:
    """Return tanh of sixteen values: 1 - 2 / (1 + e^(2x))."""
    up = exp_f(add_f(x, x))
    return sub_f(splat_f(ONE), div_f(splat_f(np.float32(2.0)), add_f(splat_f(ONE), up)))


@helper
def _add(a: Any, b: Any) -> Any:
    return add_f(a, b)


@helper
def silu_times(a: Any, b: Any) -> Any:
    """Return silu(a) * b."""
    return mul_f(silu_of(a), b)


@helper
def gelu_times(a: Any, b: Any) -> Any:
    """Return gelu(a) * b with the tanh approximation of GELU."""
    return mul_f(_gelu_tanh(a), b)


@helper
def _scale(a: Any, b: Any) -> Any:
    return mul_f(a, b)


@helper
def _softcap(a: Any, b: Any) -> Any:
    return mul_f(b, tanh_f(div_f(a, b)))


@helper
def _load_rest(x: int, count: int, spare: int) -> Any:
    """Load the last `count` < 16 values of a row by way of 64 spare bytes."""
    for i in range(LANES):
        store_float(spare + 4 * i, load_float(x + 4 * i) if i < count else np.float32(0.0))
    return load_f(spare)


def _elementwise(name: str, combine: Any, *, constant: bool) -> Any:
    """Make a kernel out = combine(a, b) over rows; with `constant` b is one float32.

    Arguments: a, b, rows, columns, bytes of a row of a, of b, out, scratch, scratch bytes of a thread. Rows
    of `out` lie side by side.
    """

    @kernel(name)
    def elementwise(arguments: int, thread: int, threads: int) -> None:
        a, b = argument(arguments, 0), argument(arguments, 1)
        rows, columns = argument(arguments, 2), argument(arguments, 3)
        a_stride, b_stride = argument(arguments, 4), argument(arguments, 5)
        out = argument(arguments, 6)
        spare = argument(arguments, 7) + thread * argument(arguments, 8)
        groups = -(-columns // GROUP)
        first, last = share(rows * groups, thread, threads)
        for unit in range(first, last):
            row, group = unit // groups, unit % groups
            for i in range(GROUP * group, min(columns, GROUP * (group + 1)), LANES):
                left, right = a + row * a_stride + 4 * i, b + row * b_stride + 4 * i
                target = out + row * 4 * columns + 4 * i
                count = columns - i
                if count >= LANES:
                    other = splat_f(number(arguments, 1)) if constant else load_f(right)
                    store_f(target, combine(load_f(left), other))
                else:
                    other = splat_f(number(arguments, 1)) if constant else _load_rest(right, count, spare)
                    store_f(spare, combine(_load_rest(left, count, spare), other))
                    for j in range(count):
                        store_float(target + 4 * j, load_float(spare + 4 * j))

    return elementwise


add = _elementwise("add", _add, constant=False)
silu_mul = _elementwise("silu-mul", silu_times, constant=False)
gelu_mul = _elementwise("gelu-mul", gelu_times, constant=False)
mul_sigmoid = _elementwise("mul-sigmoid", _times_sigmoid, constant=False)
scale = _elementwise("scale", _scale, constant=True)
softcap = _elementwise("softcap", _softcap, constant=True)
