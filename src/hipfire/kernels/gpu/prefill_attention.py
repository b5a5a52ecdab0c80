"""Attention of tiles of tokens over blocked caches: flash attention, causal or windowed, of a ragged batch.

A tile is some consecutive tokens of one sequence. A program takes some tokens of a tile and some query heads
of one key head. This file does not know how caches are laid out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hipfire.kernels.block_cache import TILE
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.kv_tiles import (
    STRIDE_TYPES,
    cache_strides,
    chunked_scores,
    expand_tile,
    load_tile,
    query_peaks,
    query_tile,
)
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.rowwise import ROWS_FLOAT32
from hipfire.kernels.gpu.target import TargetName, begin_launch, matmul

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    q_ptr, q_at, q_shown, q, peaks, factor, peak, total, acc, places,
    keys_ptr, values_ptr, key_base, value_base, key_block_stride, value_block_stride,
    first, last, begin, end, kv, width,
    KV: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, Q8: tl.constexpr, EXACT: tl.constexpr, CHUNKED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Take the positions from `first`, where a tile begins, to `last` into a softmax under way."""
    ROWS: tl.constexpr = places.shape[0]
    line = tl.arange(0, COLUMNS)
    for at in range(first, last, COLUMNS):
        if CHUNKED:
            scores = chunked_scores(
                q_ptr, q_at, q_shown, peaks, keys_ptr, key_base, key_block_stride, at, begin, end, kv,
                width, KV, D, COLUMNS, Q8, EXACT, TARGET,
            )  # fmt: skip
        else:
            k, k_scales = load_tile(
                keys_ptr, key_base, key_block_stride, at, begin, end, kv, 0, KV, D, D_PADDED, COLUMNS, Q8
            )
            keys = expand_tile(k, k_scales, Q8, EXACT, TARGET)
            scores = matmul(q, tl.trans(keys), tl.zeros((ROWS, COLUMNS), tl.float32))
        scores = scores * factor[:, None]
        if MASKED:
            seen = (at + line)[None, :] <= places[:, None]
            if WINDOW > 0:
                seen = seen & ((at + line)[None, :] > places[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        best = tl.maximum(peak, tl.max(scores, 1))
        pivot = best
        if MASKED and WINDOW > 0:
            # a row may not have come to its window yet
            pivot = tl.where(best == float("-inf"), 0.0, best)
        fade = tl.exp2(peak - pivot)
        weights = tl.exp2(scores - pivot[:, None])
        total = total * fade + tl.sum(weights, 1)
        v, v_scales = load_tile(
            values_ptr, value_base, value_block_stride, at, begin, end, kv, 0, KV, D, D_PADDED, COLUMNS, Q8
        )
        values = expand_tile(v, v_scales, Q8, EXACT, TARGET)
        acc = matmul(weights.to(values.dtype), values, acc * fade[:, None])
        peak = best
    return peak, total, acc


@triton.jit
def prefill_attention_kernel(
    q_ptr, keys_ptr, values_ptr, rows_ptr, tiles_ptr, out_ptr, scale, width,
    key_slot_stride, key_block_stride, value_slot_stride, value_block_stride,
    KV: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr, Q8: tl.constexpr,
    EXACT: tl.constexpr, CHUNKED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    # the last tiles of a prompt see most and take longest: they begin first
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = index // PARTS
    skipped = (index % PARTS) * TOKENS
    head = tl.program_id(1) * HEADS
    kv = head // GROUP
    first_token = tl.load(tiles_ptr + 2 * tile).to(tl.int64) + skipped
    count = tl.load(tiles_ptr + 2 * tile + 1) - skipped
    if count > 0:
        slot = tl.load(rows_ptr + 2 * first_token)
        position = tl.load(rows_ptr + 2 * first_token + 1).to(tl.int32)
        row = tl.arange(0, TOKENS * HEADS)
        column = tl.arange(0, D_PADDED)
        token = row % TOKENS
        places = position + token
        shown = (token[:, None] < count) & (column[None, :] < D)
        q_at = ((first_token + token) * (KV * GROUP) + head + row // TOKENS) * D
        peaks = query_peaks(q_ptr, q_at, token < count, D, D_PADDED, Q8, EXACT)
        factor = peaks * (scale * _LOG2E)
        q = peaks
        if not CHUNKED:
            q = query_tile(q_ptr, q_at, token < count, peaks, 0, D, D_PADDED, Q8, EXACT)
        end = position + tl.minimum(count, TOKENS)
        begin = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0
        start = begin // COLUMNS * COLUMNS
        # before it, every token sees every position of a tile
        middle = start if WINDOW > 0 else (position + 1) // COLUMNS * COLUMNS
        peak = tl.full((TOKENS * HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((TOKENS * HEADS,), tl.float32)
        acc = tl.zeros((TOKENS * HEADS, D_PADDED), tl.float32)
        key_base = slot * key_slot_stride
        value_base = slot * value_slot_stride
        if WINDOW == 0:
            peak, total, acc = _attend(
                q_ptr, q_at, token < count, q, peaks, factor, peak, total, acc, places,
                keys_ptr, values_ptr, key_base, value_base,
                key_block_stride, value_block_stride, start, middle, begin, end, kv, width,
                KV, D, D_PADDED, COLUMNS, WINDOW, False, Q8, EXACT, CHUNKED, TARGET,
            )  # fmt: skip
        peak, total, acc = _attend(
            q_ptr, q_at, token < count, q, peaks, factor, peak, total, acc, places,
            keys_ptr, values_ptr, key_base, value_base,
            key_block_stride, value_block_stride, middle, end, begin, end, kv, width,
            KV, D, D_PADDED, COLUMNS, WINDOW, True, Q8, EXACT, CHUNKED, TARGET,
        )  # fmt: skip
        # rows past the tile's end may have seen nothing
        out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out_ptr + q_at[:, None] + column[None, :], out.to(out_ptr.dtype.element_ty), mask=shown)


@dataclass(frozen=True)
class _Config:
    """How prefill attention is started: tokens and heads of a program, positions in a tile, warps, stages.

    `chunked` says whether products with keys take a head in chunks.
    """

    tokens: int
    heads: int
    columns: int
    warps: int
    stages: int
    chunked: bool


def _config(target: TargetName, group: int, d_padded: int, q8: bool, exact: bool) -> _Config:
    """Choose by the group of query heads, the padded head dimension and the type of products."""
    if target == "plain":
        # few large programs, in parts of a tile and in pairs of heads
        return _Config(TILE // 2, 2 if group % 2 == 0 else 1, 64, 4, 1, exact)
    if exact:
        return _Config(16, 1, 16, 8, 1, True)
    if target == "hip":
        # matrix units of RDNA hold all of their operands in registers
        if d_padded <= 64:
            return _Config(64, 1, 32, 4, 1, False)
        return _Config(32 if d_padded <= 256 else 16, 1, 16, 4 if d_padded <= 128 else 8, 1, d_padded > 128)
    if d_padded <= 128:
        heads = 2 if group % 2 == 0 else 1
        return _Config(TILE, heads, 64, 4 * heads, 2, False)
    columns = 32 if q8 or d_padded > 256 else 64
    return _Config(TILE, 1, columns, 8, 1 if q8 or d_padded > 256 else 2, d_padded > 256)


def prefill_attention(
    engine: GpuEngine,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    window: int | None,
    *,
    kv: int,
    q8: bool,
) -> torch.Tensor:
    """Return what the tokens of `tiles` see, [T, H, D]; q is contiguous, `kv` the number of key heads."""
    tokens, heads, d = q.shape
    d_padded = max(triton.next_power_of_2(d), 16)
    group = heads // kv
    exact = engine.exact or keys.dtype == torch.float32
    config = _config(engine.target, group, d_padded, q8, exact)
    narrow = tokens > ROWS_FLOAT32 and not engine.exact
    out = engine.empty("attended", q.shape, torch.bfloat16 if narrow else torch.float32)
    parts = TILE // config.tokens
    engine.launch(
        prefill_attention_kernel,
        (tiles.shape[0] * parts, heads // config.heads),
        reads=(q, keys, values, rows, tiles),
        writes=(out,),
        constants={
            "KV": kv,
            "GROUP": group,
            "HEADS": config.heads,
            "TOKENS": config.tokens,
            "PARTS": parts,
            "D": d,
            "D_PADDED": d_padded,
            "COLUMNS": config.columns,
            "WINDOW": window or 0,
            "Q8": q8,
            "EXACT": exact,
            "CHUNKED": config.chunked,
            "TARGET": engine.target,
        },
        warps=config.warps,
        stages=config.stages,
        q_ptr=q,
        keys_ptr=keys,
        values_ptr=values,
        rows_ptr=rows,
        tiles_ptr=tiles,
        out_ptr=out,
        scale=float(scale),
        width=d,
        **cache_strides(keys, values),
    )
    return out


_ARGUMENTS = {
    "q_ptr": "*bf16",
    "rows_ptr": "*i64",
    "tiles_ptr": "*i32",
    "out_ptr": "*bf16",
    "scale": "fp32",
    "width": "i32",
    **STRIDE_TYPES,
}
_ALIGNED = frozenset(name for name in _ARGUMENTS if name.endswith(("_stride", "width")))


def _offline(
    name: str,
    backend: TargetName,
    cache: str,
    d: int,
    *,
    group: int = 4,
    window: int = 0,
    exact: bool = False,
) -> Offline:
    padded = triton.next_power_of_2(d)
    exact = exact or cache == "*fp32"
    config = _config(backend, group, padded, cache == "*u8", exact)
    constants = {
        "KV": 8,
        "GROUP": group,
        "HEADS": config.heads,
        "TOKENS": config.tokens,
        "PARTS": TILE // config.tokens,
        "D": d,
        "D_PADDED": padded,
        "COLUMNS": config.columns,
        "WINDOW": window,
        "Q8": cache == "*u8",
        "EXACT": exact,
        "CHUNKED": config.chunked,
    }
    floats = dict.fromkeys(("q_ptr", "out_ptr"), "*fp32") if exact else {}
    return Offline(
        prefill_attention_kernel,
        {**_ARGUMENTS, **floats, "keys_ptr": cache, "values_ptr": cache},
        constants,
        config.warps,
        config.stages,
        name=f"{name} {backend}",
        needs=frozenset() if exact else frozenset({"matrix"}),
        aligned=_ALIGNED,
        on=frozenset({backend}),
    )


def _all_offline() -> tuple[Offline, ...]:
    entries = []
    backends: tuple[TargetName, ...] = ("cuda", "hip")
    for backend in backends:
        entries += [
            _offline("q8 64", backend, "*u8", 64, group=3),
            _offline("q8 128", backend, "*u8", 128),
            _offline("q8 256 window", backend, "*u8", 256, window=512),
            _offline("q8 512", backend, "*u8", 512),
            _offline("bf16 80", backend, "*bf16", 80, group=1),
            _offline("bf16 128", backend, "*bf16", 128),
            _offline("bf16 256", backend, "*bf16", 256),
            _offline("q8 128 exact", backend, "*u8", 128, exact=True),
            _offline("fp32 128", backend, "*fp32", 128),
            _offline("fp32 256", backend, "*fp32", 256),
        ]
    return tuple(entries)


OFFLINE = _all_offline()
