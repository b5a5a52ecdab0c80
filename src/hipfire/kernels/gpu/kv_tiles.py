"""Tiles of cached keys and values, as attention kernels load them from blocked caches, and queries to match.

A tile is some consecutive positions of one block and one head. This file knows how caches are laid out, and
nothing of softmax.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hipfire.kernels.block_cache import BLOCK
from hipfire.kernels.gpu.target import matmul

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _byte(words, INDEX: tl.constexpr):
    return ((words << (24 - 8 * INDEX)) >> 24).to(tl.float16)


@triton.jit
def _half(pair, INDEX: tl.constexpr):
    return (pair >> (16 * INDEX)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def signed_bytes_to_half(words, TARGET: tl.constexpr):
    """Return the signed bytes of int32 words [N, M] as float16 [N, 4 M], the lowest byte of a word first.

    On CUDA two at a time: a byte plus 128 becomes the low bits of the half 1024 + byte + 128.
    """
    if TARGET == "cuda":
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 bytes;
            xor.b32 bytes, $2, 0x80808080;
            prmt.b32 $0, bytes, 0x64646464, 0x4140;
            prmt.b32 $1, bytes, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, $3;
            sub.f16x2 $1, $1, $3;
            }
            """,
            "=r,=r,r,r",
            [words, tl.full(words.shape, 0x64806480, tl.int32)],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        even = tl.join(_half(low, 0), _half(high, 0))
        odd = tl.join(_half(low, 1), _half(high, 1))
    else:
        even = tl.join(_byte(words, 0), _byte(words, 2))
        odd = tl.join(_byte(words, 1), _byte(words, 3))
    return tl.reshape(tl.join(even, odd), (words.shape[0], 4 * words.shape[1]))


@triton.jit
def _scaled(values, scales, TARGET: tl.constexpr):
    """Return values * scales, float16. Impure assembly hides from the compiler how the values were made.

    It would choose a layout for the product by the way that they were loaded, which takes many moves.
    """
    if TARGET == "cuda":
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;",
            "=r,r,r",
            [values, scales],
            dtype=tl.float16,
            is_pure=False,
            pack=2,
        )
    else:
        return values * scales


@triton.jit
def load_tile(
    cache_ptr, base, block_stride, first, begin, end, head, skipped,
    KV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, Q8: tl.constexpr,
):  # fmt: skip
    """Load positions from `first` on, and WIDTH columns of a head from `skipped` on, a multiple of 32.

    Returns [TILE, WIDTH] elements; or codes, and scales [TILE, WIDTH / 8] of them. Codes are words of four
    where rows of the cache are words, else bytes. `base` is where the slot begins, int64. Positions before
    `begin` and from `end` on, and columns past D, are zero. Without scales the second result means nothing.
    """
    ROW: tl.constexpr = KV * D // 32 * 34 if Q8 else KV * D
    # codes in an element of a load
    PACK: tl.constexpr = 4 if Q8 and ROW % 4 == 0 else 1
    block = first // _BLOCK
    row_ptr = cache_ptr + (base + block.to(tl.int64) * block_stride + (first - block * _BLOCK) * ROW)
    line = tl.arange(0, TILE)
    column = tl.arange(0, WIDTH // PACK)
    seen = (first + line >= begin) & (first + line < end)
    inside = seen[:, None] & (skipped // PACK + column[None, :] < D // PACK)
    data_ptr = row_ptr
    if PACK == 4:
        data_ptr = row_ptr.to(tl.pointer_type(tl.int32))
        # eight codes in a thread become one store of 16 bytes to shared memory without bank conflicts
        column = tl.max_contiguous(column, 2)
    place = line[:, None] * (ROW // PACK) + (head * (D // PACK) + skipped // PACK + column)[None, :]
    data = tl.load(data_ptr + place, mask=inside, other=0)
    scales = data
    if Q8:
        part = tl.arange(0, WIDTH // 8)
        scale_ptr = (row_ptr + KV * D).to(tl.pointer_type(tl.float16))
        place = line[:, None] * (ROW // 2) + (head * (D // 32) + skipped // 32 + part // 4)[None, :]
        inside = seen[:, None] & (skipped // 8 + part[None, :] < D // 8)
        scales = tl.load(scale_ptr + place, mask=inside, other=0.0)
    return data, scales


@triton.jit
def expand_tile(data, scales, Q8: tl.constexpr, EXACT: tl.constexpr, TARGET: tl.constexpr):
    """Return a loaded tile in the type of products: float32 if exact, float16 for codes, else as it is."""
    if Q8:
        LINES: tl.constexpr = data.shape[0]
        PARTS: tl.constexpr = scales.shape[1]
        if data.dtype == tl.int32:
            values = signed_bytes_to_half(data, TARGET)
        else:
            values = data.to(tl.int8, bitcast=True).to(tl.float16)
        values = tl.reshape(values, (LINES, PARTS, 8))
        if EXACT:
            values = values.to(tl.float32) * scales.to(tl.float32)[:, :, None]
        else:
            values = _scaled(values, tl.broadcast_to(scales[:, :, None], values.shape), TARGET)
        return tl.reshape(values, (LINES, PARTS * 8))
    elif EXACT:
        return data.to(tl.float32)
    else:
        return data


@triton.jit
def query_peaks(
    q_ptr, places, shown, D: tl.constexpr, D_PADDED: tl.constexpr, Q8: tl.constexpr, EXACT: tl.constexpr
):
    """Return what queries that begin at `places` [M] are divided by: halves by the largest of a row.

    So none is out of the range of halves. Others are divided by one.
    """
    if Q8 and not EXACT:
        column = tl.arange(0, D_PADDED)
        inside = shown[:, None] & (column[None, :] < D)
        q = tl.load(q_ptr + places[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        return tl.maximum(tl.max(tl.abs(q), 1), 1e-30)
    else:
        return tl.full((places.shape[0],), 1.0, tl.float32)


@triton.jit
def query_tile(
    q_ptr, places, shown, peaks, skipped,
    D: tl.constexpr, WIDTH: tl.constexpr, Q8: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return WIDTH columns, from `skipped` on, of queries over their peaks, in the type of expanded tiles."""
    column = skipped + tl.arange(0, WIDTH)
    inside = shown[:, None] & (column[None, :] < D)
    q = tl.load(q_ptr + places[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if EXACT:
        return q
    elif Q8:
        return (q / peaks[:, None]).to(tl.float16)
    else:
        return q.to(tl.bfloat16)


@triton.jit
def chunked_scores(
    q_ptr, places, shown, peaks, cache_ptr, base, block_stride, first, begin, end, head, width,
    KV: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, Q8: tl.constexpr, EXACT: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Return the products [M, TILE] of queries and keys, taking 32 columns at a time.

    For products that hold all of their operands in registers, which whole heads would overflow. `width` is D
    as a run-time value, so that the loop is not unrolled.
    """
    scores = tl.zeros((places.shape[0], TILE), tl.float32)
    for skipped in range(0, width, 32):
        q = query_tile(q_ptr, places, shown, peaks, skipped, D, 32, Q8, EXACT)
        data, scales = load_tile(
            cache_ptr, base, block_stride, first, begin, end, head, skipped, KV, D, 32, TILE, Q8
        )
        keys = expand_tile(data, scales, Q8, EXACT, TARGET)
        scores = matmul(q, tl.trans(keys), scores)
    return scores


# the names that kernels have for the strides of caches, with their types for OFFLINE
STRIDE_TYPES = dict.fromkeys(
    ("key_slot_stride", "key_block_stride", "value_slot_stride", "value_block_stride"), "i32"
)


def cache_strides(keys: torch.Tensor, values: torch.Tensor) -> dict[str, int]:
    """Return the strides of slots and blocks of caches, by the names that kernels have for them."""
    return {
        "key_slot_stride": keys.stride(0),
        "key_block_stride": keys.stride(1),
        "value_slot_stride": values.stride(0),
        "value_block_stride": values.stride(1),
    }
