"""Kernels of gated DeltaNet layers: the convolution over a sequence's channels, and the heads' recurrence.

A prompt goes token by token with the same arithmetic as a decode step, so how it is cut up changes no byte. A
head takes its matrix block of columns by block of columns, each through all tokens of a piece: a copy of it
stays in the nearest cache of a core. A piece is what one sequence has in the step; without a table of them
every token is one. This file does not know projections.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from hipfire.kernels.cpu.jit import argument, helper, kernel, number, share
from hipfire.kernels.cpu.rows import ONE, silu_of
from hipfire.kernels.cpu.simd import (
    ADDRESS,
    F16,
    FLOAT,
    FLOATS,
    LANES,
    WORD,
    abs_f,
    add_f,
    constant,
    div_f,
    exp_f,
    fma_f,
    load,
    load_f,
    load_float,
    load_int,
    load_long,
    max_f,
    mul_f,
    operation,
    pointer,
    splat_at,
    splat_f,
    store_f,
    store_float,
    sub_f,
    sum_f,
    zero_f,
)

VECTOR = 4 * LANES
# columns of a matrix that are taken through the tokens together
BLOCK = 2 * LANES
BLOCK_BYTES = 4 * BLOCK
# bytes that a token's numbers take: the factors on query and key, decay, strength
TOKEN_BYTES = 16
L2_EPS = np.float32(1e-6)
# 2 / (2 n + 1): log1p(u) = 2 atanh(s) with s = u / (2 + u), which is below 1 / 3
LOG_TERMS = tuple(2.0 / n for n in (17, 15, 13, 11, 9, 7, 5, 3, 1))


def _emit_gather(builder: ir.IRBuilder, address: Any, stride: Any) -> Any:
    """Load sixteen float32 that lie `stride` bytes apart."""
    value = ir.Constant(FLOATS, ir.Undefined)
    for lane in range(LANES):
        place = builder.add(address, builder.mul(stride, ir.Constant(stride.type, lane)))
        value = builder.insert_element(value, load(builder, place, FLOAT, align=4), ir.Constant(WORD, lane))
    return value


def _emit_scatter(builder: ir.IRBuilder, address: Any, stride: Any, value: Any) -> None:
    """Store sixteen float32 `stride` bytes apart."""
    for lane in range(LANES):
        place = builder.add(address, builder.mul(stride, ir.Constant(stride.type, lane)))
        lane_value = builder.extract_element(value, ir.Constant(WORD, lane))
        builder.store(lane_value, pointer(builder, place, FLOAT)).align = 4


def _emit_log1p(builder: ir.IRBuilder, u: Any) -> Any:
    """Return log(1 + u) for u from 0 to 1, with a relative error of a few units in the last place."""
    s = builder.fdiv(u, builder.fadd(u, constant(FLOATS, 2.0)))
    square = builder.fmul(s, s)
    total = constant(FLOATS, LOG_TERMS[0])
    for term in LOG_TERMS[1:]:
        total = builder.fadd(builder.fmul(total, square), constant(FLOATS, term))
    return builder.fmul(total, s)


gather_f = operation(F16, (ADDRESS, types.int64), _emit_gather)
scatter_f = operation(types.void, (ADDRESS, types.int64, F16), _emit_scatter)
log1p_f = operation(F16, (F16,), _emit_log1p)


@helper
def _piece(pieces: int, index: int) -> Any:
    """Return the first token of a piece, and behind its last."""
    if pieces == 0:
        return index, index + 1
    first = np.int64(load_int(pieces + 8 * index))
    return first, first + np.int64(load_int(pieces + 8 * index + 4))


@kernel("delta-convolution")
def convolution(arguments: int, thread: int, threads: int) -> None:
    """Convolve and activate sixteen channels at a time, and keep the tail.

    Arguments: inputs, bytes of a token of them, channels, width, weights [C, W], tails, bytes of a slot of
    them, rows of (slot, position), pieces, number of pieces, result [T, C], scratch, scratch bytes of a
    thread.
    """
    x, stride, channels = argument(arguments, 0), argument(arguments, 1), argument(arguments, 2)
    width, weights, tails = argument(arguments, 3), argument(arguments, 4), argument(arguments, 5)
    slot_bytes, rows, pieces = argument(arguments, 6), argument(arguments, 7), argument(arguments, 8)
    count, out = argument(arguments, 9), argument(arguments, 10)
    # the last `width` inputs in a ring, then the weights, a vector each
    ring = argument(arguments, 11) + thread * argument(arguments, 12)
    taps = ring + VECTOR * width
    groups, kept = channels // LANES, width - 1
    unit, last = share(count * groups, thread, threads)
    for index in range(unit, last):
        first, end = _piece(pieces, index // groups)
        channel = index % groups * LANES
        slot, position = load_long(rows + 16 * first), load_long(rows + 16 * first + 8)
        tail = tails + slot * slot_bytes + 4 * kept * channel
        for tap in range(width):
            store_f(taps + VECTOR * tap, gather_f(weights + 4 * (width * channel + tap), 4 * width))
        for tap in range(kept):
            before = zero_f()
            if position > 0:
                before = gather_f(tail + 4 * tap, 4 * kept)
            store_f(ring + VECTOR * tap, before)
        oldest = 0
        for token in range(first, end):
            newest = (oldest + kept) % width
            store_f(ring + VECTOR * newest, load_f(x + token * stride + 4 * channel))
            total = zero_f()
            for tap in range(width):
                place = ring + VECTOR * ((oldest + tap) % width)
                total = fma_f(load_f(place), load_f(taps + VECTOR * tap), total)
            store_f(out + 4 * (token * channels + channel), silu_of(total))
            oldest = (oldest + 1) % width
        for tap in range(kept):
            scatter_f(tail + 4 * tap, 4 * kept, load_f(ring + VECTOR * ((oldest + tap) % width)))


@helper
def _length_factor(x: int, size: int) -> Any:
    """Return 1 / sqrt(|x|^2 + eps) of `size` values."""
    squares = zero_f()
    for i in range(0, 4 * size, VECTOR):
        value = load_f(x + i)
        squares = fma_f(value, value, squares)
    return ONE / np.sqrt(sum_f(squares) + L2_EPS)


@helper
def _decay(a: Any, bias: Any, factor: Any) -> Any:
    """Return exp(factor * softplus(a + bias)) in all lanes."""
    x = splat_f(a + bias)
    down = exp_f(sub_f(zero_f(), abs_f(x)))
    softplus = add_f(max_f(x, zero_f()), log1p_f(down))
    return exp_f(mul_f(softplus, splat_f(factor)))


@helper
def _numbers(q: int, k: int, key_dim: int, a: Any, bias: Any, factor: Any, b: Any, target: int) -> None:
    """Write a token's factors on query and key, its decay and its strength."""
    store_float(target, _length_factor(q, key_dim) / np.sqrt(np.float32(key_dim)))
    store_float(target + 4, _length_factor(k, key_dim))
    store_float(target + 8, sum_f(_decay(a, bias, factor)) / np.float32(LANES))
    strength = div_f(splat_f(ONE), add_f(splat_f(ONE), exp_f(splat_f(-b))))
    store_float(target + 12, sum_f(strength) / np.float32(LANES))


@helper
def _clear(block: int, key_dim: int) -> None:
    for i in range(0, BLOCK_BYTES * key_dim, VECTOR):
        store_f(block + i, zero_f())


@helper
def _copy(source: int, source_bytes: int, target: int, target_bytes: int, rows: int) -> None:
    """Copy a block's rows, which lie so many bytes apart."""
    for row in range(rows):
        for i in range(0, BLOCK_BYTES, VECTOR):
            store_f(target + row * target_bytes + i, load_f(source + row * source_bytes + i))


@helper
def _advance(block: int, key_dim: int, q: int, k: int, v: int, numbers: int, out: int) -> None:
    """Let one token act on a block of columns, and write what it sees there."""
    decay = load_float(numbers + 8)
    seen_low, seen_high = zero_f(), zero_f()
    for row in range(key_dim):
        key, place = splat_at(k + 4 * row), block + row * BLOCK_BYTES
        seen_low = fma_f(key, load_f(place), seen_low)
        seen_high = fma_f(key, load_f(place + VECTOR), seen_high)
    # what the matrix says for the key after its decay; the key's own length is divided out here
    said = splat_f(load_float(numbers + 4) * decay)
    written = splat_f(load_float(numbers + 12) * load_float(numbers + 4))
    low = mul_f(written, sub_f(load_f(v), mul_f(said, seen_low)))
    high = mul_f(written, sub_f(load_f(v + VECTOR), mul_f(said, seen_high)))
    factor, out_low, out_high = splat_f(decay), zero_f(), zero_f()
    for row in range(key_dim):
        key, query, place = splat_at(k + 4 * row), splat_at(q + 4 * row), block + row * BLOCK_BYTES
        new_low = fma_f(key, low, mul_f(load_f(place), factor))
        new_high = fma_f(key, high, mul_f(load_f(place + VECTOR), factor))
        store_f(place, new_low)
        store_f(place + VECTOR, new_high)
        out_low = fma_f(query, new_low, out_low)
        out_high = fma_f(query, new_high, out_high)
    scale = splat_f(load_float(numbers))
    store_f(out, mul_f(scale, out_low))
    store_f(out + VECTOR, mul_f(scale, out_high))


@helper
def _gated_norm(out: int, z: int, weight: int, size: int, eps: Any) -> None:
    """Normalize `size` values in place, times the weight and silu(z)."""
    squares = zero_f()
    for i in range(0, 4 * size, VECTOR):
        value = load_f(out + i)
        squares = fma_f(value, value, squares)
    factor = splat_f(ONE / np.sqrt(sum_f(squares) / np.float32(size) + eps))
    for i in range(0, 4 * size, VECTOR):
        normalized = mul_f(mul_f(load_f(out + i), factor), load_f(weight + i))
        store_f(out + i, mul_f(normalized, silu_of(load_f(z + i))))


@kernel("delta-heads")
def heads(arguments: int, thread: int, threads: int) -> None:
    """Take one value head of one piece at a time through its tokens.

    Arguments: convolved channels [T, C], z, bytes of a token of z, b, a, bytes of a token of both, decay,
    dt_bias, norm weight, matrices, bytes of a slot of them, rows, pieces, number of pieces, key heads (below
    zero where value heads are tiled), value heads, key size, value size, eps, result, scratch, scratch bytes
    of a thread.
    """
    x, z, z_stride = argument(arguments, 0), argument(arguments, 1), argument(arguments, 2)
    b, a, gate_stride = argument(arguments, 3), argument(arguments, 4), argument(arguments, 5)
    factors, biases, weight = argument(arguments, 6), argument(arguments, 7), argument(arguments, 8)
    matrices, slot_bytes, rows = argument(arguments, 9), argument(arguments, 10), argument(arguments, 11)
    pieces, count, key_heads = argument(arguments, 12), argument(arguments, 13), argument(arguments, 14)
    value_heads, key_dim = argument(arguments, 15), argument(arguments, 16)
    value_dim = argument(arguments, 17)
    eps, out = number(arguments, 18), argument(arguments, 19)
    block = argument(arguments, 20) + thread * argument(arguments, 21)
    numbers = block + BLOCK_BYTES * key_dim
    tiled, keys = key_heads < 0, abs(key_heads)
    channels, row_bytes = 2 * keys * key_dim + value_heads * value_dim, 4 * value_dim
    unit, last = share(count * value_heads, thread, threads)
    for index in range(unit, last):
        first, end = _piece(pieces, index // value_heads)
        head = index % value_heads
        key_head = head % keys if tiled else head // (value_heads // keys)
        q = x + 4 * key_head * key_dim
        k = q + 4 * keys * key_dim
        v = x + 4 * (2 * keys * key_dim + head * value_dim)
        for token in range(first, end):
            at = 4 * token * channels
            place = numbers + TOKEN_BYTES * (token - first)
            gates = token * gate_stride + 4 * head
            bias, factor = load_float(biases + 4 * head), load_float(factors + 4 * head)
            _numbers(
                q + at, k + at, key_dim, load_float(a + gates), bias, factor, load_float(b + gates), place
            )
        slot, position = load_long(rows + 16 * first), load_long(rows + 16 * first + 8)
        state = matrices + slot * slot_bytes + head * key_dim * row_bytes
        result = out + 4 * head * value_dim
        for column in range(0, row_bytes, BLOCK_BYTES):
            # side by side, or few of the cache's sets would have to hold all rows of a block
            if position == 0:
                _clear(block, key_dim)
            else:
                _copy(state + column, row_bytes, block, BLOCK_BYTES, key_dim)
            for token in range(first, end):
                at, place = 4 * token * channels, numbers + TOKEN_BYTES * (token - first)
                target = result + token * value_heads * row_bytes + column
                _advance(block, key_dim, q + at, k + at, v + at + column, place, target)
            _copy(block, BLOCK_BYTES, state + column, row_bytes, key_dim)
        for token in range(first, end):
            gate = z + token * z_stride + 4 * head * value_dim
            _gated_norm(result + token * value_heads * row_bytes, gate, weight, value_dim, eps)
