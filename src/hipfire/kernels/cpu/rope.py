"""Rotary embedding kernels: the angles of a step, and the rotation of heads (half-split pairs)."""

from __future__ import annotations

import math

import numpy as np

from hipfire.kernels.cpu.jit import argument, helper, kernel, number, share
from hipfire.kernels.cpu.simd import (
    LANES,
    add_f,
    load_f,
    load_float,
    mul_f,
    store_f,
    store_float,
    sub_f,
)


@kernel("rope-angles")
def rope_angles(arguments: int, thread: int, threads: int) -> None:
    """Write cos and sin. Arguments: rows of (slot, position), T, frequencies, R/2, factor, cos, sin."""
    rows, half = argument(arguments, 0), argument(arguments, 3)
    frequencies, factor = argument(arguments, 2), number(arguments, 4)
    cos, sin = argument(arguments, 5), argument(arguments, 6)
    first, last = share(argument(arguments, 1) * half, thread, threads)
    for unit in range(first, last):
        position = np.float32(argument(rows, 2 * (unit // half) + 1))
        angle = position * load_float(frequencies + 4 * (unit % half))
        store_float(cos + 4 * unit, np.float32(math.cos(angle)) * factor)
        store_float(sin + 4 * unit, np.float32(math.sin(angle)) * factor)


@helper
def _rotate(x: int, size: int, half: int, cos: int, sin: int, out: int) -> None:
    whole = half - half % LANES
    for i in range(0, whole, LANES):
        first, second = load_f(x + 4 * i), load_f(x + 4 * (i + half))
        c, s = load_f(cos + 4 * i), load_f(sin + 4 * i)
        store_f(out + 4 * i, sub_f(mul_f(first, c), mul_f(second, s)))
        store_f(out + 4 * (i + half), add_f(mul_f(second, c), mul_f(first, s)))
    for i in range(whole, half):
        left, right = load_float(x + 4 * i), load_float(x + 4 * (i + half))
        cosine, sine = load_float(cos + 4 * i), load_float(sin + 4 * i)
        store_float(out + 4 * i, left * cosine - right * sine)
        store_float(out + 4 * (i + half), right * cosine + left * sine)
    for i in range(2 * half, size):
        store_float(out + 4 * i, load_float(x + 4 * i))


@kernel("rope")
def rope(arguments: int, thread: int, threads: int) -> None:
    """Rotate [T, H, D]. Arguments: x, T, H, D, bytes of a token of x, R/2, cos, sin, out (in one piece)."""
    x, heads, size = argument(arguments, 0), argument(arguments, 2), argument(arguments, 3)
    stride, half = argument(arguments, 4), argument(arguments, 5)
    cos, sin, out = argument(arguments, 6), argument(arguments, 7), argument(arguments, 8)
    first, last = share(argument(arguments, 1) * heads, thread, threads)
    for unit in range(first, last):
        token = unit // heads
        place = x + token * stride + (unit % heads) * 4 * size
        angles = 4 * half * token
        _rotate(place, size, half, cos + angles, sin + angles, out + 4 * size * unit)
