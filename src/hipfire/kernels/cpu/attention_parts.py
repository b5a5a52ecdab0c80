"""Attention of single queries over one chunk of keys and values in float32, and how chunks are put together.

Two queries are taken at a time where they see the same keys, so that each key and value is loaded once for
both. A query's result is the same alone and beside another. This file does not know caches, positions or
windows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from hipfire.kernels.cpu.jit import helper
from hipfire.kernels.cpu.simd import (
    ADDRESS,
    F16,
    FLOAT,
    LANES,
    WORD,
    add_f,
    exp_f,
    fma_f,
    load_f,
    load_float,
    max_f,
    mul_f,
    operation,
    splat,
    splat_at,
    splat_f,
    store,
    store_f,
    store_float,
    sub_f,
    sum_f,
    top_f,
    zero_f,
)

# keys of a chunk: with their values they stay in the cache of a core
CHUNK = 64
LOWEST = np.float32(-3.0e38)
LINE = 64


def partial_nbytes(head_dim: int) -> int:
    """Return the bytes of a partial result: D sums, the largest score, the sum of weights; whole lines."""
    return -(-4 * (head_dim + 2) // LINE) * LINE


partial = helper(partial_nbytes)


def _emit_store_sums(builder: ir.IRBuilder, low: Any, high: Any, factor: Any, *vectors: Any) -> None:
    """Store factor * sum of four vectors, two at `low` and two at `high`; adds in the order of `sum_f`."""

    def shuffled(a: Any, b: Any, order: list[int]) -> Any:
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(WORD, len(order)), order))

    quarters = []
    for vector in vectors:
        for width in (8, 4):
            first = shuffled(vector, vector, list(range(width)))
            vector = builder.fadd(first, shuffled(vector, vector, list(range(width, 2 * width))))
        quarters.append(vector)
    halves = []
    for a, b in (quarters[:2], quarters[2:]):
        halves.append(builder.fadd(shuffled(a, b, [0, 4, 1, 5]), shuffled(a, b, [2, 6, 3, 7])))
    first, second = halves
    even, odd = shuffled(first, second, [0, 1, 4, 5]), shuffled(first, second, [2, 3, 6, 7])
    sums = builder.fmul(builder.fadd(even, odd), splat(builder, factor, ir.VectorType(FLOAT, 4)))
    store(builder, low, shuffled(sums, sums, [0, 1]))
    store(builder, high, shuffled(sums, sums, [2, 3]))


_store_sums = operation(types.void, (ADDRESS, ADDRESS, types.float32, F16, F16, F16, F16), _emit_store_sums)


@helper
def _rest_of_score(q: int, key: int, whole: int, size: int) -> Any:
    total = np.float32(0.0)
    for i in range(whole, size):
        total += load_float(q + 4 * i) * load_float(key + 4 * i)
    return total


@helper
def _score(q: int, keys: int, first: int, count: int, size: int, factor: Any, scores: int) -> None:
    """Write factor * q . key for the keys `first` .. `count` that lie side by side."""
    whole = size - size % LANES
    for key in range(first, count):
        place = keys + 4 * size * key
        total = zero_f()
        for i in range(0, 4 * whole, 4 * LANES):
            total = fma_f(load_f(q + i), load_f(place + i), total)
        result = sum_f(total)
        if whole < size:
            result += _rest_of_score(q, place, whole, size)
        store_float(scores + 4 * key, result * factor)


@helper
def _score_fours(q: int, keys: int, count: int, size: int, factor: Any, scores: int) -> None:
    """Write factor * q . key for `count` keys, a multiple of four, of whole vectors."""
    stride = 4 * size
    for key in range(0, count, 4):
        place = keys + stride * key
        a, b, c, d = zero_f(), zero_f(), zero_f(), zero_f()
        for i in range(0, stride, 4 * LANES):
            part = load_f(q + i)
            a = fma_f(part, load_f(place + i), a)
            b = fma_f(part, load_f(place + stride + i), b)
            c = fma_f(part, load_f(place + 2 * stride + i), c)
            d = fma_f(part, load_f(place + 3 * stride + i), d)
        _store_sums(scores + 4 * key, scores + 4 * key + 8, factor, a, b, c, d)


@helper
def _score_twos(q: int, p: int, keys: int, count: int, size: int, factor: Any, scores: int) -> None:
    """Do this for q and p, whose scores lie CHUNK behind those of q, and an even number of keys."""
    stride = 4 * size
    for key in range(0, count, 2):
        place = keys + stride * key
        a, b, c, d = zero_f(), zero_f(), zero_f(), zero_f()
        for i in range(0, stride, 4 * LANES):
            first, second = load_f(place + i), load_f(place + stride + i)
            part = load_f(q + i)
            a = fma_f(part, first, a)
            b = fma_f(part, second, b)
            part = load_f(p + i)
            c = fma_f(part, first, c)
            d = fma_f(part, second, d)
        _store_sums(scores + 4 * key, scores + 4 * (CHUNK + key), factor, a, b, c, d)


@helper
def _soften(scores: int, count: int) -> tuple[Any, Any]:
    """Turn scores, up to whole vectors, into e^(score - largest); returns the largest and the sum."""
    padded = -(-count // LANES) * LANES
    for i in range(count, padded):
        store_float(scores + 4 * i, LOWEST)
    top = splat_f(LOWEST)
    for i in range(0, padded, LANES):
        top = max_f(load_f(scores + 4 * i), top)
    largest = top_f(top)
    for i in range(0, padded, LANES):
        store_f(scores + 4 * i, exp_f(sub_f(load_f(scores + 4 * i), splat_f(largest))))
    for i in range(count, padded):
        store_float(scores + 4 * i, np.float32(0.0))
    total = zero_f()
    for i in range(0, padded, LANES):
        total = add_f(total, load_f(scores + 4 * i))
    return largest, sum_f(total)


@helper
def _weigh(weights: int, count: int, values: int, size: int, out: int) -> None:
    """Write the sum of weight * value over `count` values that lie side by side."""
    stride = 4 * size
    i = 0
    while i + 4 * LANES <= size:
        a, b, c, d = zero_f(), zero_f(), zero_f(), zero_f()
        place = values + 4 * i
        for key in range(count):
            weight = splat_at(weights + 4 * key)
            a = fma_f(weight, load_f(place), a)
            b = fma_f(weight, load_f(place + 4 * LANES), b)
            c = fma_f(weight, load_f(place + 8 * LANES), c)
            d = fma_f(weight, load_f(place + 12 * LANES), d)
            place += stride
        store_f(out + 4 * i, a)
        store_f(out + 4 * (i + LANES), b)
        store_f(out + 4 * (i + 2 * LANES), c)
        store_f(out + 4 * (i + 3 * LANES), d)
        i += 4 * LANES
    while i + LANES <= size:
        sums = zero_f()
        for key in range(count):
            sums = fma_f(splat_at(weights + 4 * key), load_f(values + 4 * i + stride * key), sums)
        store_f(out + 4 * i, sums)
        i += LANES
    while i < size:
        total = np.float32(0.0)
        for key in range(count):
            total += load_float(weights + 4 * key) * load_float(values + 4 * i + stride * key)
        store_float(out + 4 * i, total)
        i += 1


@helper
def _weigh_two(weights: int, count: int, values: int, size: int, out: int, apart: int) -> None:
    """Do what `_weigh` does for two queries: CHUNK weights and `apart` bytes of results from each other."""
    stride = 4 * size
    for i in range(0, size, 2 * LANES):
        a, b, c, d = zero_f(), zero_f(), zero_f(), zero_f()
        place = values + 4 * i
        for key in range(count):
            first, second = load_f(place), load_f(place + 4 * LANES)
            weight = splat_at(weights + 4 * key)
            a = fma_f(weight, first, a)
            b = fma_f(weight, second, b)
            weight = splat_at(weights + 4 * (CHUNK + key))
            c = fma_f(weight, first, c)
            d = fma_f(weight, second, d)
            place += stride
        store_f(out + 4 * i, a)
        store_f(out + 4 * (i + LANES), b)
        store_f(out + apart + 4 * i, c)
        store_f(out + apart + 4 * (i + LANES), d)


@helper
def _exp(x: Any) -> Any:
    # all sixteen lanes are equal, so their sum is exact
    return sum_f(exp_f(splat_f(x))) * np.float32(0.0625)


@helper
def fold(state: int, part: int, size: int) -> None:
    """Fold the partial result `part` into `state`; both are D sums, the largest score, the sum of weights."""
    old, new = load_float(state + 4 * size), load_float(part + 4 * size)
    top = max(old, new)
    keep, take = _exp(old - top), _exp(new - top)
    whole = size - size % LANES
    for i in range(0, whole, LANES):
        kept = mul_f(load_f(state + 4 * i), splat_f(keep))
        store_f(state + 4 * i, fma_f(load_f(part + 4 * i), splat_f(take), kept))
    for i in range(whole, size):
        store_float(state + 4 * i, load_float(state + 4 * i) * keep + load_float(part + 4 * i) * take)
    total = load_float(state + 4 * size + 4) * keep + load_float(part + 4 * size + 4) * take
    store_float(state + 4 * size, top)
    store_float(state + 4 * size + 4, total)


@helper
def finish(state: int, size: int, out: int) -> None:
    """Write the weighted mean of the values."""
    inverse = np.float32(1.0) / load_float(state + 4 * size + 4)
    whole = size - size % LANES
    for i in range(0, whole, LANES):
        store_f(out + 4 * i, mul_f(load_f(state + 4 * i), splat_f(inverse)))
    for i in range(whole, size):
        store_float(out + 4 * i, load_float(state + 4 * i) * inverse)


@helper
def _attend_one(q: int, keys: int, count: int, size: int, factor: Any, scores: int, out: int) -> None:
    fours = count - count % 4 if size % LANES == 0 else 0
    _score_fours(q, keys, fours, size, factor, scores)
    _score(q, keys, fours, count, size, factor, scores)
    largest, total = _soften(scores, count)
    _weigh(scores, count, keys + 4 * CHUNK * size, size, out)
    store_float(out + 4 * size, largest)
    store_float(out + 4 * size + 4, total)


@helper
def _attend_two(
    q: int, keys: int, count: int, size: int, factor: Any, scores: int, out: int, apart: int
) -> None:
    second = q + 4 * size
    twos = count - count % 2
    _score_twos(q, second, keys, twos, size, factor, scores)
    _score(q, keys, twos, count, size, factor, scores)
    _score(second, keys, twos, count, size, factor, scores + 4 * CHUNK)
    for i in range(2):
        largest, total = _soften(scores + 4 * CHUNK * i, count)
        store_float(out + apart * i + 4 * size, largest)
        store_float(out + apart * i + 4 * size + 4, total)
    _weigh_two(scores, count, keys + 4 * CHUNK * size, size, out, apart)


@helper
def attend_group(
    q: int, group: int, keys: int, count: int, size: int, factor: Any, scores: int, out: int, apart: int
) -> None:
    """Write the partial results of `group` queries over the `count` first keys of a chunk.

    Queries lie side by side, results `apart` bytes from each other, values CHUNK rows behind the keys.
    `scores` has room for two chunks.
    """
    j = 0
    if size % (2 * LANES) == 0:
        while j + 2 <= group:
            _attend_two(q + 4 * size * j, keys, count, size, factor, scores, out + apart * j, apart)
            j += 2
    while j < group:
        _attend_one(q + 4 * size * j, keys, count, size, factor, scores, out + apart * j)
        j += 1
