"""Which experts tokens take, pairs in order of their experts, and sums over places.

A pair is a place of a token. This file does not know weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hipfire.kernels.cpu.jit import argument, helper, kernel, share
from hipfire.kernels.cpu.rows import META_BYTES, ONE, copy_row
from hipfire.kernels.cpu.simd import (
    LANES,
    add_f,
    exp_f,
    fma_f,
    load_f,
    load_float,
    load_int,
    load_long,
    splat_at,
    splat_f,
    store_f,
    store_float,
    store_int,
    store_long,
    sub_f,
    sum_f,
    top_f,
    zero_f,
)

LOWEST = np.float32(-np.inf)
NOT_A_NUMBER = np.float32(np.nan)
VECTOR_BYTES = 4 * LANES


@helper
def _exp(x: Any) -> Any:
    return top_f(exp_f(splat_f(x)))


@helper
def _sigmoid(x: Any) -> Any:
    return ONE / (ONE + _exp(-x))


@helper
def _sum_of_exp(keys: int, experts: int, peak: Any) -> Any:
    """Return the sum of exp(key - peak) over float32 keys."""
    total, top = zero_f(), splat_f(peak)
    whole = experts - experts % LANES
    for i in range(0, whole, LANES):
        total = add_f(total, exp_f(sub_f(load_f(keys + 4 * i), top)))
    result = sum_f(total)
    for i in range(whole, experts):
        result += _exp(load_float(keys + 4 * i) - peak)
    return result


@helper
def _best(keys: int, experts: int) -> int:
    """Return the number of the largest key, the lowest of equal ones; keys that are NaN are taken."""
    best, largest = -1, LOWEST
    for i in range(experts):
        key = load_float(keys + 4 * i)
        if key > largest or (best < 0 and key == key):
            best, largest = i, key
    return best


@kernel("route")
def route(arguments: int, thread: int, threads: int) -> None:
    """Choose experts.

    Arguments: logits, tokens, experts, bytes of a row, how many are chosen, whether weights are divided by
    their sum, shared gates or 0, bytes of a row of these, places, ids (int32), weights, scratch, scratch
    bytes of a thread: 4 for each expert.
    """
    logits, experts, stride = argument(arguments, 0), argument(arguments, 2), argument(arguments, 3)
    count, normalize = argument(arguments, 4), argument(arguments, 5)
    shared, shared_stride, places = argument(arguments, 6), argument(arguments, 7), argument(arguments, 8)
    keys = argument(arguments, 11) + thread * argument(arguments, 12)
    first, last = share(argument(arguments, 1), thread, threads)
    for token in range(first, last):
        ids = argument(arguments, 9) + 4 * token * places
        weights = argument(arguments, 10) + 4 * token * places
        peak, damaged = LOWEST, False
        for i in range(experts):
            key = load_float(logits + token * stride + 4 * i)
            if key != key:
                key, damaged = LOWEST, True
            store_float(keys + 4 * i, key)
            peak = max(peak, key)
        total = NOT_A_NUMBER if damaged else _sum_of_exp(keys, experts, peak)
        chosen = np.float32(0.0)
        for place in range(count):
            best = _best(keys, experts)
            weight = _exp(load_float(keys + 4 * best) - peak) / total
            store_float(keys + 4 * best, NOT_A_NUMBER)
            chosen += weight
            store_int(ids + 4 * place, np.int32(best))
            store_float(weights + 4 * place, weight)
        if normalize != 0:
            for place in range(count):
                store_float(weights + 4 * place, load_float(weights + 4 * place) / chosen)
        if shared != 0:
            store_int(ids + 4 * count, np.int32(experts))
            store_float(weights + 4 * count, _sigmoid(load_float(shared + token * shared_stride)))


@kernel("order-pairs")
def order_pairs(arguments: int, thread: int, threads: int) -> None:
    """Put pairs in order of their experts, those of one in their own order; one thread does it.

    Arguments: numbers of experts (int32), pairs, experts, pairs in order (int64), where those of each expert
    begin and the last ones end (int64 [experts + 1]).
    """
    ids, pairs, experts = argument(arguments, 0), argument(arguments, 1), argument(arguments, 2)
    order, starts = argument(arguments, 3), argument(arguments, 4)
    if thread != 0:
        return
    for expert in range(experts + 1):
        store_long(starts + 8 * expert, 0)
    for pair in range(pairs):
        behind = starts + 8 * load_int(ids + 4 * pair) + 8
        store_long(behind, load_long(behind) + 1)
    for expert in range(experts):
        behind = starts + 8 * expert + 8
        store_long(behind, load_long(behind) + load_long(behind - 8))
    for pair in range(pairs):
        own = starts + 8 * load_int(ids + 4 * pair)
        store_long(order + 8 * load_long(own), pair)
        store_long(own, load_long(own) + 1)
    # each has moved to where the next one begins
    for expert in range(experts, 0, -1):
        store_long(starts + 8 * expert, load_long(starts + 8 * expert - 8))
    store_long(starts, 0)


@kernel("order-codes")
def order_codes(arguments: int, thread: int, threads: int) -> None:
    """Copy quantized rows in the order of pairs.

    Arguments: pairs in order (int64), pairs, how many share a row, columns / 32, codes, numbers, codes in
    order, numbers in order.
    """
    order, shared_by, groups = argument(arguments, 0), argument(arguments, 2), argument(arguments, 3)
    codes, meta = argument(arguments, 4), argument(arguments, 5)
    first, last = share(argument(arguments, 1), thread, threads)
    for index in range(first, last):
        row = load_long(order + 8 * index) // shared_by
        copy_row(codes + row * 32 * groups, 8 * groups, argument(arguments, 6) + index * 32 * groups)
        target = argument(arguments, 7) + index * META_BYTES * groups
        copy_row(meta + row * META_BYTES * groups, META_BYTES // 4 * groups, target)


@kernel("sum-places")
def sum_places(arguments: int, thread: int, threads: int) -> None:
    """Add up the weighted products of every token's places, in their order.

    Arguments: products, tokens, panels of sixteen columns, bytes of a row, places, weights, y.
    """
    products, panels, stride = argument(arguments, 0), argument(arguments, 2), argument(arguments, 3)
    places, weights, y = argument(arguments, 4), argument(arguments, 5), argument(arguments, 6)
    first, last = share(argument(arguments, 1) * panels, thread, threads)
    for unit in range(first, last):
        token, column = unit // panels, unit % panels * VECTOR_BYTES
        total = zero_f()
        for pair in range(token * places, (token + 1) * places):
            total = fma_f(splat_at(weights + 4 * pair), load_f(products + pair * stride + column), total)
        store_f(y + token * stride + column, total)


@kernel("add-gated")
def add_gated(arguments: int, thread: int, threads: int) -> None:
    """Add rows times the sigmoid of their gate: x + sigmoid(gate) y.

    Arguments: x, y, gates, tokens, columns, bytes of a row of x, of y, of the gates, out.
    """
    x, y, gates = argument(arguments, 0), argument(arguments, 1), argument(arguments, 2)
    columns = argument(arguments, 4)
    first, last = share(argument(arguments, 3), thread, threads)
    for token in range(first, last):
        a, b = x + token * argument(arguments, 5), y + token * argument(arguments, 6)
        out = argument(arguments, 8) + 4 * token * columns
        gate = _sigmoid(load_float(gates + token * argument(arguments, 7)))
        whole = columns - columns % LANES
        for i in range(0, whole, LANES):
            store_f(out + 4 * i, fma_f(splat_f(gate), load_f(b + 4 * i), load_f(a + 4 * i)))
        for i in range(whole, columns):
            store_float(out + 4 * i, load_float(a + 4 * i) + gate * load_float(b + 4 * i))
