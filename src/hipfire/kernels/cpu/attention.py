"""Causal attention over caches of float32, bfloat16 and q8, with an optional window.

The keys of a query are taken in chunks at fixed positions of the sequence. A chunk's keys and values are
first written out as float32, for all queries that see it; it then gives each query its largest score, the
sum of its weights and the weighted sum of its values, and chunks are folded together in their order. So a
query's result depends on its position and window alone, not on the batch, the prefill chunk, or on threads.
"""

from __future__ import annotations

from typing import Any

from hipfire.kernels.cpu.attention_parts import CHUNK, attend_group, finish, fold, partial, partial_nbytes
from hipfire.kernels.cpu.jit import Kernel, argument, helper, kernel, number
from hipfire.kernels.cpu.kv import Q8_BYTES, Q8_ELEMENTS
from hipfire.kernels.cpu.rows import copy_row
from hipfire.kernels.cpu.simd import (
    LANES,
    load_bfloat,
    load_bytes,
    load_one_bfloat,
    load_one_half,
    mul_f,
    splat_f,
    store_f,
    store_float,
)

# tokens whose queries share a chunk that was written out
TOKENS = 16


def scratch_nbytes(head_dim: int, group: int) -> int:
    """Return the bytes of scratch of a thread where `group` query heads share a key.

    They hold a chunk's keys and values, scores and partial results of two queries, and the states of a
    block of queries.
    """
    return 8 * CHUNK * (head_dim + 1) + partial_nbytes(head_dim) * (TOKENS * group + 2)


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
def _first_key(position: int, window: int) -> int:
    return max(0, position - window + 1) if window > 0 else 0


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
        part = scores + 8 * CHUNK
        states = part + 2 * partial(size)
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
                state, query = states + partial(size) * i * group, q + i * argument(arguments, 5)
                if starts:
                    attend_group(query, group, keys, seen, size, factor, scores, state, partial(size))
                    continue
                for j in range(0, group, 2):
                    some = min(2, group - j)
                    attend_group(
                        query + 4 * size * j, some, keys, seen, size, factor, scores, part, partial(size)
                    )
                    for k in range(some):
                        fold(state + partial(size) * (j + k), part + partial(size) * k, size)
        heads = argument(arguments, 2) * group
        for i in range(count):
            for j in range(group):
                out = argument(arguments, 14) + 4 * size * ((token + i) * heads + head * group + j)
                finish(states + partial(size) * (i * group + j), size, out)

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
                    query = token * heads * group + head * group
                    q = argument(arguments, 0) + token * argument(arguments, 5) + 4 * size * head * group
                    out = argument(arguments, 17) + partial(size) * (query * room + index - start // CHUNK)
                    attend_group(q, group, scratch, seen, size, factor, scores, out, partial(size) * room)

    return attend_chunks


@kernel("merge-chunks")
def merge_chunks(arguments: int, thread: int, threads: int) -> None:
    """Fold the partial results of `attend_chunks`, whose arguments it takes, into its output."""
    heads, size = argument(arguments, 2) * argument(arguments, 3), argument(arguments, 4)
    rows, window, room = argument(arguments, 6), argument(arguments, 12), argument(arguments, 18)
    for unit in range(thread, argument(arguments, 1) * heads, threads):
        position = argument(rows, 2 * (unit // heads) + 1)
        count = position // CHUNK - _first_key(position, window) // CHUNK + 1
        state = argument(arguments, 17) + partial(size) * unit * room
        for index in range(1, count):
            fold(state, state + partial(size) * index, size)
        finish(state, size, argument(arguments, 14) + 4 * size * unit)


def _kernels(mode: str, copy: Any) -> tuple[Kernel, Kernel]:
    write_out = _writer(copy)
    return _attend(mode, write_out), _attend_chunks(mode, write_out)


# by mode: whole queries, single chunks
ATTEND_KERNELS = {
    "f32": _kernels("f32", copy_row),
    "bf16": _kernels("bf16", _copy_bf16),
    "q8": _kernels("q8", _copy_q8),
}
