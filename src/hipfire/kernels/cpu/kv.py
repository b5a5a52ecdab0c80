"""Writing keys and values into caches of float32, bfloat16 and q8, position by position."""

from __future__ import annotations

from typing import Any

import numpy as np

from hipfire.kernels.cpu.jit import argument, helper, kernel, share
from hipfire.kernels.cpu.rows import copy_row
from hipfire.kernels.cpu.simd import (
    LANES,
    abs_f,
    bits_of,
    load_f,
    load_float,
    max_f,
    mul_f,
    rint_float,
    splat_f,
    store_bfloat,
    store_codes,
    store_short,
    top_f,
)

Q8_ELEMENTS = 32
Q8_BYTES = 34
# as in the reference: below it the half-precision scale is zero anyway
SMALLEST_PEAK = np.float32(1e-30)
SMALLEST_NORMAL_HALF = np.int32(0x38800000)
INFINITE_HALF = np.int32(0x7C00)


@helper
def half_bits(value: Any) -> Any:
    """Return a float32 that is not negative as the bits of an IEEE half, rounded to nearest even."""
    bits = bits_of(value)
    if bits < SMALLEST_NORMAL_HALF:
        return np.int32(rint_float(value * np.float32(16777216.0)))
    rounded = bits + np.int32(0xFFF) + ((bits >> np.int32(13)) & np.int32(1))
    return min((rounded >> np.int32(13)) - np.int32(112 << 10), INFINITE_HALF)


@helper
def _write_bf16(x: int, size: int, target: int) -> None:
    whole = size - size % LANES
    for i in range(0, whole, LANES):
        store_bfloat(target + 2 * i, load_f(x + 4 * i))
    for i in range(whole, size):
        bits = bits_of(load_float(x + 4 * i))
        rounded = bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))
        store_short(target + 2 * i, rounded >> np.int32(16))


@helper
def _write_q8(x: int, size: int, target: int) -> None:
    for block in range(size // Q8_ELEMENTS):
        low = load_f(x + 4 * Q8_ELEMENTS * block)
        high = load_f(x + 4 * Q8_ELEMENTS * block + 4 * LANES)
        peak = top_f(max_f(abs_f(low), abs_f(high)))
        inverse = np.float32(127.0) / peak if peak > SMALLEST_PEAK else np.float32(0.0)
        place = target + Q8_BYTES * block
        store_short(place, half_bits(peak / np.float32(127.0)))
        store_codes(place + 2, mul_f(low, splat_f(inverse)))
        store_codes(place + 2 + LANES, mul_f(high, splat_f(inverse)))


def _kv_write(mode: str, write: Any) -> Any:
    """Make the kernel of one mode.

    Arguments: x [T, KV, D], T, KV, D, bytes of a token of x, rows of (slot, position), cache, bytes of a
    slot, of a position, of a head.
    """

    @kernel(f"kv-write-{mode}")
    def kv_write(arguments: int, thread: int, threads: int) -> None:
        x, heads, size = argument(arguments, 0), argument(arguments, 2), argument(arguments, 3)
        stride, rows, cache = argument(arguments, 4), argument(arguments, 5), argument(arguments, 6)
        slot_bytes, position_bytes = argument(arguments, 7), argument(arguments, 8)
        head_bytes = argument(arguments, 9)
        first, last = share(argument(arguments, 1) * heads, thread, threads)
        for unit in range(first, last):
            token, head = unit // heads, unit % heads
            place = cache + argument(rows, 2 * token) * slot_bytes
            place += argument(rows, 2 * token + 1) * position_bytes + head * head_bytes
            write(x + token * stride + head * 4 * size, size, place)

    return kv_write


KV_WRITE_KERNELS = {
    "f32": _kv_write("f32", copy_row),
    "bf16": _kv_write("bf16", _write_bf16),
    "q8": _kv_write("q8", _write_q8),
}
