"""Causal attention over caches of float32, bfloat16 and q8, with an optional window.

The keys of a query are taken in chunks at fixed positions of the sequence. A chunk's keys and values are
first written out as float32, for all queries that see it; it then gives each query its largest score, the
sum of its weights and the weighted sum of its values, and chunks are folded together in their order. So a
query's result depends on its position and window alone, not on the batch, the prefill chunk, or on threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hipfire.kernels.cpu.jit import Kernel, argument, helper, kernel, number
from hipfire.kernels.cpu.kv import Q8_BYTES, Q8_ELEMENTS
from hipfire.kernels.cpu.rows import copy_row
from hipfire.kernels.cpu.simd import (
    LANES,
    add_f,
    exp_f,
    fma_f,
    load_bfloat,
    load_bytes,
    load_f,
    load_float,
    load_one_bfloat,
    load_one_half,
    max_f,
    mul_f,
    splat_at,
    splat_f,
    store_f,
    store_float,
    sub_f,
    sum_f,
    top_f,
    zero_f,
)

# keys of a chunk: with their values they stay in the cache of a core
CHUNK = 64
# tokens whose queries share a chunk that was written out
TOKENS = 16
LOWEST = np.float32(-3.0e38)
LINE = 64


def partial_nbytes(head_dim: int) -> int:
    """Return the bytes of a partial result: D sums, the largest score, the sum of weights; whole lines."""
    return -(-4 * (head_dim + 2) // LINE) * LINE


def scratch_nbytes(head_dim: int, group: int) -> int:
    """Return the bytes of scratch of a thread where `group` query heads share a key.

    They hold a chunk's keys and values, its scores, one partial result, and the states of a block of queries.
    """
    return 4 * CHUNK * (2 * head_dim + 1) + partial_nbytes(head_dim) * (TOKENS * group + 1)


_partial = helper(partial_nbytes)


@helper
def _copy_bf16(row: int, size: int, out: int) -> None:
    whole = size - size % LANES
    for i in range(0, whole, LANES):
        store_f(out + 4 * i, load_bfloat(row + 2 * i))
    for i in range(whole, size):
        store_float(out + 4 * i, load_one_bfloat(row + 2 * i))


@helper
def _copy_q8(row: int, size: int, out: int) -> None:
    for block in range(size // Q8_ELEMENTS):
        place, target = row + Q8_BYTES * block, out + 4 * Q8_ELEMENTS * block
        scale = splat_f(load_one_half(place))
        store_f(target, mul_f(scale, load_bytes(place + 2)))
        store_f(target + 4 * LANES, mul_f(scale, load_bytes(place + 2 + LANES)))


@helper
def _rest_of_score(q: int, key: int, whole: int, size: int) -> Any:
    total = np.float32(0.0)
    for i in range(whole, size):
        total += load_float(q + 4 * i) * load_float(key + 4 * i)
    return total


@helper
def _score(q: int, keys: int, count: int, size: int, factor: Any, scores: int) -> None:
    """Write factor * q . key for `count` keys that lie side by side; every key by the same arithmetic."""
    whole, stride = size - size % LANES, 4 * size
    fours = count - count % 4
    for key in range(0, fours, 4):
        place = keys + stride * key
        a, b, c, d = zero_f(), zero_f(), zero_f(), zero_f()
        for i in range(0, 4 * whole, 4 * LANES):
            part = load_f(q + i)
            a = fma_f(part, load_f(place + i), a)
            b = fma_f(part, load_f(place + stride + i), b)
            c = fma_f(part, load_f(place + 2 * stride + i), c)
            d = fma_f(part, load_f(place + 3 * stride + i), d)
        rest_a = _rest_of_score(q, place, whole, size)
        rest_b = _rest_of_score(q, place + stride, whole, size)
        rest_c = _rest_of_score(q, place + 2 * stride, whole, size)
        rest_d = _rest_of_score(q, place + 3 * stride, whole, size)
        store_float(scores + 4 * key, (sum_f(a) + rest_a) * factor)
        store_float(scores + 4 * key + 4, (sum_f(b) + rest_b) * factor)
        store_float(scores + 4 * key + 8, (sum_f(c) + rest_c) * factor)
        store_float(scores + 4 * key + 12, (sum_f(d) + rest_d) * factor)
    for key in range(fours, count):
        place = keys + stride * key
        a = zero_f()
        for i in range(0, 4 * whole, 4 * LANES):
            a = fma_f(load_f(q + i), load_f(place + i), a)
        store_float(scores + 4 * key, (sum_f(a) + _rest_of_score(q, place, whole, size)) * factor)


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
def _exp(x: Any) -> Any:
    # all sixteen lanes are equal, so their sum is exact
    return sum_f(exp_f(splat_f(x))) * np.float32(0.0625)


@helper
def _fold(state: int, part: int, size: int) -> None:
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
def _finish(state: int, size: int, out: int) -> None:
    """Write the weighted mean of the values."""
    inverse = np.float32(1.0) / load_float(state + 4 * size + 4)
    whole = size - size % LANES
    for i in range(0, whole, LANES):
        store_f(out + 4 * i, mul_f(load_f(state + 4 * i), splat_f(inverse)))
    for i in range(whole, size):
        store_float(out + 4 * i, load_float(state + 4 * i) * inverse)


@helper
def _first_key(position: int, window: int) -> int:
    return max(0, position - window + 1) if window > 0 else 0


@helper
def _attend_part(
    q: int, keys: int, values: int, count: int, size: int, factor: Any, scores: int, out: int
) -> None:
    """Write the partial result of one query over keys and values in float32."""
    _score(q, keys, count, size, factor, scores)
    largest, total = _soften(scores, count)
    _weigh(scores, count, values, size, out)
    store_float(out + 4 * size, largest)
    store_float(out + 4 * size + 4, total)


@helper
def _length_of_run(rows: int, first: int, last: int) -> int:
    """Return how many of the tokens first .. last follow each other in one sequence."""
    token = first + 1
    while token < last:
        step = argument(rows, 2 * token + 1) - argument(rows, 2 * token - 1)
        if step != 1 or argument(rows, 2 * token) != argument(rows, 2 * token - 2):
            break
        token += 1
    return token - first


# Arguments of the kernels below: q [T, H, D], T, KV, H / KV, D, bytes of a token of q, rows of (slot,
# position), keys, values, bytes of a slot, of a position, of a head, window or 0, the score's factor, out,
# scratch, scratch bytes of a thread; for single chunks also partial results, and how many of them a query has
# room for.


def _writer(copy: Any) -> Any:
    """Make what writes a chunk out as float32, from rows that `copy` reads."""

    @helper
    def write_out(arguments: int, slot: int, first: int, count: int, head: int, target: int) -> None:
        """Write `count` keys from position `first` on, and behind a whole chunk the values, as float32."""
        size, stride = argument(arguments, 4), argument(arguments, 10)
        place = slot * argument(arguments, 9) + first * stride + head * argument(arguments, 11)
        keys, values = argument(arguments, 7) + place, argument(arguments, 8) + place
        for key in range(count):
            copy(keys + stride * key, size, target + 4 * size * key)
            copy(values + stride * key, size, target + 4 * size * (CHUNK + key))

    return write_out


def _attend_block(write_out: Any) -> Any:
    """Make what attends the queries of some tokens, chunk by chunk."""

    @helper
    def attend_block(arguments: int, token: int, count: int, head: int, scratch: int) -> None:
        """Attend the queries of `count` tokens that follow each other to one key head."""
        group, size, rows = argument(arguments, 3), argument(arguments, 4), argument(arguments, 6)
        window, factor = argument(arguments, 12), number(arguments, 13)
        slot, position = argument(rows, 2 * token), argument(rows, 2 * token + 1)
        q = argument(arguments, 0) + token * argument(arguments, 5) + 4 * size * group * head
        scores = scratch + 8 * CHUNK * size
        part = scores + 4 * CHUNK
        states = part + _partial(size)
        last_position = position + count - 1
        for index in range(_first_key(position, window) // CHUNK, last_position // CHUNK + 1):
            begin = max(CHUNK * index, _first_key(position, window))
            end = min(CHUNK * (index + 1), last_position + 1)
            write_out(arguments, slot, begin, end - begin, head, scratch)
            for i in range(count):
                low = max(begin, _first_key(position + i, window))
                seen = min(end, position + i + 1) - low
                if seen <= 0:
                    continue
                keys = scratch + 4 * size * (low - begin)
                starts = _first_key(position + i, window) // CHUNK == index
                for j in range(group):
                    state = states + _partial(size) * (i * group + j)
                    query = q + i * argument(arguments, 5) + 4 * size * j
                    target = state if starts else part
                    values = keys + 4 * CHUNK * size
                    _attend_part(query, keys, values, seen, size, factor, scores, target)
                    if not starts:
                        _fold(state, part, size)
        heads = argument(arguments, 2) * group
        for i in range(count):
            for j in range(group):
                out = argument(arguments, 14) + 4 * size * ((token + i) * heads + head * group + j)
                _finish(states + _partial(size) * (i * group + j), size, out)

    return attend_block


def _attend(mode: str, write_out: Any) -> Kernel:
    """Make the kernel for many rows: every thread takes whole queries."""
    attend_block = _attend_block(write_out)

    @kernel(f"attend-{mode}")
    def attend(arguments: int, thread: int, threads: int) -> None:
        heads, rows, tokens = argument(arguments, 2), argument(arguments, 6), argument(arguments, 1)
        scratch = argument(arguments, 15) + thread * argument(arguments, 16)
        # neighbouring blocks differ little in cost, so taking them in turn balances the threads
        turn = 0
        token = 0
        while token < tokens:
            count = _length_of_run(rows, token, min(tokens, token + TOKENS))
            for head in range(heads):
                if turn % threads == thread:
                    attend_block(arguments, token, count, head, scratch)
                turn += 1
            token += count

    return attend


def _attend_chunks(mode: str, write_out: Any) -> Kernel:
    """Make the kernel for few rows: every thread takes chunks, which `merge_chunks` folds together."""

    @kernel(f"attend-chunks-{mode}")
    def attend_chunks(arguments: int, thread: int, threads: int) -> None:
        heads, group, size = argument(arguments, 2), argument(arguments, 3), argument(arguments, 4)
        rows, window, room = argument(arguments, 6), argument(arguments, 12), argument(arguments, 18)
        factor = number(arguments, 13)
        scratch = argument(arguments, 15) + thread * argument(arguments, 16)
        scores = scratch + 8 * CHUNK * size
        turn = 0
        for token in range(argument(arguments, 1)):
            slot, position = argument(rows, 2 * token), argument(rows, 2 * token + 1)
            start = _first_key(position, window)
            for head in range(heads):
                for index in range(start // CHUNK, position // CHUNK + 1):
                    turn += 1
                    if turn % threads != thread:
                        continue
                    begin = max(CHUNK * index, start)
                    seen = min(CHUNK * (index + 1), position + 1) - begin
                    write_out(arguments, slot, begin, seen, head, scratch)
                    for j in range(group):
                        query = head * group + j
                        q = argument(arguments, 0) + token * argument(arguments, 5) + 4 * size * query
                        place = (token * heads * group + query) * room + index - start // CHUNK
                        out = argument(arguments, 17) + _partial(size) * place
                        values = scratch + 4 * CHUNK * size
                        _attend_part(q, scratch, values, seen, size, factor, scores, out)

    return attend_chunks


@kernel("merge-chunks")
def merge_chunks(arguments: int, thread: int, threads: int) -> None:
    """Fold the partial results of `attend_chunks`, whose arguments it takes, into its output."""
    heads, size = argument(arguments, 2) * argument(arguments, 3), argument(arguments, 4)
    rows, window, room = argument(arguments, 6), argument(arguments, 12), argument(arguments, 18)
    for unit in range(thread, argument(arguments, 1) * heads, threads):
        position = argument(rows, 2 * (unit // heads) + 1)
        count = position // CHUNK - _first_key(position, window) // CHUNK + 1
        state = argument(arguments, 17) + _partial(size) * unit * room
        for index in range(1, count):
            _fold(state, state + _partial(size) * index, size)
        _finish(state, size, argument(arguments, 14) + 4 * size * unit)


def _kernels(mode: str, copy: Any) -> tuple[Kernel, Kernel]:
    write_out = _writer(copy)
    return _attend(mode, write_out), _attend_chunks(mode, write_out)


# by mode: whole queries, single chunks
ATTEND_KERNELS = {
    "f32": _kernels("f32", copy_row),
    "bf16": _kernels("bf16", _copy_bf16),
    "q8": _kernels("q8", _copy_q8),
}
