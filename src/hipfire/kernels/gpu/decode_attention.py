"""Attention of single tokens over blocked caches: flash decoding, split over positions.

A program takes all query heads of one key head, and one range of positions; ranges are computed on the device
from the token's position. This file does not know how caches are laid out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

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
from hipfire.kernels.gpu.prepare import empty_prepared, store_units
from hipfire.kernels.gpu.rowwise import GEMV_ROWS, ROWS_FLOAT32
from hipfire.kernels.gpu.target import TargetName, begin_launch, matmul
from hipfire.kernels.packed import UNIT

_LOG2E = tl.constexpr(1.4426950408889634)
MAX_SPLITS = 64


@triton.jit
def _span(position, SPLITS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return what a token at `position` sees, begin and end, and how many positions a split takes."""
    end = position + 1
    begin = tl.maximum(end - WINDOW, 0) if WINDOW > 0 else end * 0
    start = begin // TILE * TILE
    tiles = tl.cdiv(end - start, TILE)
    return begin, end, tl.cdiv(tiles, SPLITS) * TILE


@triton.jit
def _attend(
    q_ptr, places, shown, scale, width, keys_ptr, values_ptr, key_base, value_base,
    key_block_stride, value_block_stride, first, last, begin, end, kv,
    KV: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, TILE: tl.constexpr, Q8: tl.constexpr,
    EXACT: tl.constexpr, CHUNKED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Return peak, sum and result of the positions from `first`, where a tile begins, to `last`."""
    ROWS: tl.constexpr = places.shape[0]
    peaks = query_peaks(q_ptr, places, shown, D, D_PADDED, Q8, EXACT)
    if not CHUNKED:
        k, k_scales = load_tile(
            keys_ptr, key_base, key_block_stride, first, begin, end, kv, 0, KV, D, D_PADDED, TILE, Q8
        )
        v, v_scales = load_tile(
            values_ptr, value_base, value_block_stride, first, begin, end, kv, 0,
            KV, D, D_PADDED, TILE, Q8,
        )  # fmt: skip
        q = query_tile(q_ptr, places, shown, peaks, 0, D, D_PADDED, Q8, EXACT)
    factor = peaks * (scale * _LOG2E)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    # summed over positions only once, at the end
    totals = tl.zeros((ROWS, TILE), tl.float32)
    acc = tl.zeros((ROWS, D_PADDED), tl.float32)
    line = tl.arange(0, TILE)
    for at in range(first, last, TILE):
        # the next tile is on its way while this one is worked on
        ahead = at + TILE
        if CHUNKED:
            scores = chunked_scores(
                q_ptr, places, shown, peaks, keys_ptr, key_base, key_block_stride, at, begin,
                end, kv, width, KV, D, TILE, Q8, EXACT, TARGET,
            )  # fmt: skip
        else:
            keys = expand_tile(k, k_scales, Q8, EXACT, TARGET)
            scores = matmul(q, tl.trans(keys), tl.zeros((ROWS, TILE), tl.float32))
            k, k_scales = load_tile(
                keys_ptr, key_base, key_block_stride, ahead, begin, last, kv, 0, KV, D, D_PADDED, TILE, Q8
            )
        seen = (at + line >= begin) & (at + line < end)
        scores = tl.where(seen[None, :], scores * factor[:, None], float("-inf"))
        best = tl.maximum(peak, tl.max(scores, 1))
        fade = tl.exp2(peak - best)
        weights = tl.exp2(scores - best[:, None])
        totals = totals * fade[:, None] + weights
        if CHUNKED:
            v, v_scales = load_tile(
                values_ptr, value_base, value_block_stride, at, begin, last, kv, 0,
                KV, D, D_PADDED, TILE, Q8,
            )  # fmt: skip
        values = expand_tile(v, v_scales, Q8, EXACT, TARGET)
        if not CHUNKED:
            v, v_scales = load_tile(
                values_ptr, value_base, value_block_stride, ahead, begin, last, kv, 0,
                KV, D, D_PADDED, TILE, Q8,
            )  # fmt: skip
        acc = matmul(weights.to(values.dtype), values, acc * fade[:, None])
        peak = best
    return peak, tl.sum(totals, 1), acc


@triton.jit
def decode_attention_kernel(
    q_ptr, keys_ptr, values_ptr, rows_ptr, out_ptr, stats_ptr, scale, width,
    key_slot_stride, key_block_stride, value_slot_stride, value_block_stride,
    KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    SPLITS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, Q8: tl.constexpr, EXACT: tl.constexpr,
    CHUNKED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    token = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    slot = tl.load(rows_ptr + 2 * token)
    position = tl.load(rows_ptr + 2 * token + 1).to(tl.int32)
    begin, end, chunk = _span(position, SPLITS, TILE, WINDOW)
    first = begin // TILE * TILE + split * chunk
    last = tl.minimum(first + chunk, end)
    if first < last:
        row = tl.arange(0, ROWS)
        column = tl.arange(0, D_PADDED)
        place = (token * KV + kv) * GROUP + row
        shown = (row[:, None] < GROUP) & (column[None, :] < D)
        peak, total, acc = _attend(
            q_ptr, place * D, row < GROUP, scale, width, keys_ptr, values_ptr,
            slot * key_slot_stride, slot * value_slot_stride, key_block_stride, value_block_stride,
            first, last, begin, end, kv, KV, D, D_PADDED, TILE, Q8, EXACT, CHUNKED, TARGET,
        )  # fmt: skip
        if SPLITS == 1:
            out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + place[:, None] * D + column[None, :], out, mask=shown)
        else:
            part = place * SPLITS + split
            tl.store(out_ptr + part[:, None] * D + column[None, :], acc, mask=shown)
            tl.store(stats_ptr + 2 * part, peak, mask=row < GROUP)
            tl.store(stats_ptr + 2 * part + 1, total, mask=row < GROUP)


@triton.jit
def combine_splits_kernel(
    partial_ptr, stats_ptr, rows_ptr, out_ptr, values_ptr, scales_ptr, sums_ptr,
    H: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr,
    PARTS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    token = tl.program_id(0).to(tl.int64)
    place = token * H + tl.program_id(1)
    position = tl.load(rows_ptr + 2 * token + 1).to(tl.int32)
    begin, end, chunk = _span(position, SPLITS, TILE, WINDOW)
    used = tl.cdiv(end - begin // TILE * TILE, chunk)
    split = tl.arange(0, PADDED)
    stats = stats_ptr + (place * SPLITS + split) * 2
    peaks = tl.load(stats, mask=split < used, other=float("-inf"))
    totals = tl.load(stats + 1, mask=split < used, other=0.0)
    best = tl.max(peaks, 0)
    total = tl.sum(tl.exp2(peaks - best) * totals, 0)
    column = tl.arange(0, D_PADDED)
    part = tl.arange(0, PARTS)
    acc = tl.zeros((PARTS, D_PADDED), tl.float32)
    for at in range(0, used, PARTS):
        shown = at + part < used
        index = place * SPLITS + at + part
        peak = tl.load(stats_ptr + index * 2, mask=shown, other=float("-inf"))
        inside = shown[:, None] & (column[None, :] < D)
        rows = tl.load(partial_ptr + index[:, None] * D + column[None, :], mask=inside, other=0.0)
        acc += rows * tl.exp2(peak - best)[:, None]
    seen = tl.sum(acc, 0) / total
    tl.store(out_ptr + place * D + column, seen.to(out_ptr.dtype.element_ty), mask=column < D)
    if values_ptr is not None:
        # the product that follows reads int8: a head is whole units
        unit = tl.arange(0, D_PADDED // 32)
        store_units(
            tl.reshape(seen, (D_PADDED // 32, 32)), token,
            tl.program_id(1) * (D // 32) + unit, unit < D // 32,
            values_ptr, scales_ptr, sums_ptr, H * D // 32, UNITS=D_PADDED // 32, INT8=True,
        )  # fmt: skip


@dataclass(frozen=True)
class _Config:
    """How decode attention is started: positions in a tile, splits, warps.

    `chunked` says whether products with keys take a head in chunks.
    """

    tile: int
    splits: int
    warps: int
    chunked: bool


def _config(
    target: TargetName,
    processors: int,
    programs: int,
    capacity: int,
    d_padded: int,
    itemsize: int,
    exact: bool,
) -> _Config:
    """Choose for `programs` pairs of token and key head, `capacity` positions, elements of `itemsize` bytes.

    Everything here is the same at all positions, so that a captured step stays valid.
    """
    if exact:
        warps = 8 if target == "hip" or d_padded > 256 else 4
    else:
        warps = 4 if d_padded <= 128 else 8
    chunked = exact or (target == "hip" and d_padded > 128)
    if target == "plain":
        tile = 64
    elif exact or target == "hip":
        # products of float32, and of RDNA's matrix units, hold all of their operands in registers
        tile = 16
    else:
        # tiles of keys and values lie in registers on their way, each 64 bytes in a thread; heads of more
        # than 128 bytes leave room for half of that
        room = 32 * warps * (32 if itemsize == 1 and d_padded > 128 else 64)
        tile = max(16, min(64, room // (d_padded * itemsize)))
    resident = 2 * processors
    return _Config(tile, _splits(programs, capacity, tile, resident), warps, chunked)


def _splits(programs: int, capacity: int, tile: int, resident: int) -> int:
    """Return into how many parts each sequence is cut, so that about `resident` programs are there."""
    return min(MAX_SPLITS, -(-capacity // tile), max(1, -(-resident // programs)))


def decode_attention(
    engine: GpuEngine,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    window: int | None,
    *,
    kv: int,
    q8: bool,
) -> torch.Tensor:
    """Return what single tokens see, [T, H, D]; q is contiguous, `kv` the number of key heads."""
    tokens, heads, d = q.shape
    d_padded = max(triton.next_power_of_2(d), 16)
    group = heads // kv
    exact = engine.exact or keys.dtype == torch.float32
    capacity = keys.shape[1] * keys.shape[2]
    narrow = tokens > ROWS_FLOAT32 and not engine.exact
    out = engine.empty("attended", q.shape, torch.bfloat16 if narrow else torch.float32)
    config = _config(engine.target, engine.processors, tokens * kv, capacity, d_padded, keys.itemsize, exact)
    partial, stats = out, out
    if config.splits > 1:
        partial = engine.empty("attention_parts", (tokens, heads, config.splits, d))
        stats = engine.empty("attention_stats", (tokens, heads, config.splits, 2))
    engine.launch(
        decode_attention_kernel,
        (tokens, kv, config.splits),
        reads=(q, keys, values, rows),
        writes=(partial, stats) if config.splits > 1 else (out,),
        constants={
            "KV": kv,
            "GROUP": group,
            "ROWS": max(16, triton.next_power_of_2(group)),
            "D": d,
            "D_PADDED": d_padded,
            "SPLITS": config.splits,
            "TILE": config.tile,
            "WINDOW": window or 0,
            "Q8": q8,
            "EXACT": exact,
            "CHUNKED": config.chunked,
            "TARGET": engine.target,
        },
        warps=config.warps,
        q_ptr=q,
        keys_ptr=keys,
        values_ptr=values,
        rows_ptr=rows,
        out_ptr=partial,
        stats_ptr=stats,
        scale=float(scale),
        width=d,
        **cache_strides(keys, values),
    )
    if config.splits > 1:
        _combine(engine, partial, stats, rows, out, config, window or 0, d_padded)
    return out


def _combine(
    engine: GpuEngine,
    partial: torch.Tensor,
    stats: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    config: _Config,
    window: int,
    d_padded: int,
) -> None:
    tokens, heads, d = out.shape
    padded = triton.next_power_of_2(config.splits)
    units = None
    if tokens <= GEMV_ROWS and d % UNIT == 0 and out.dtype == torch.float32 and not engine.exact:
        units = empty_prepared(engine, tokens, heads * d, "int8")
        engine.prepare("int8", out, units)
    made = () if units is None or units.scales is None else (units.values, units.scales, units.sums)
    engine.launch(
        combine_splits_kernel,
        (tokens, heads),
        reads=(partial, stats, rows),
        writes=(out, *made),
        constants={
            "H": heads,
            "D": d,
            "D_PADDED": d_padded,
            "SPLITS": config.splits,
            "PADDED": padded,
            "PARTS": min(padded, max(1, 4096 // d_padded)),
            "TILE": config.tile,
            "WINDOW": window,
            "TARGET": engine.target,
        },
        warps=4,
        values_ptr=units and units.values,
        scales_ptr=units and units.scales,
        sums_ptr=units and units.sums,
        partial_ptr=partial,
        stats_ptr=stats,
        rows_ptr=rows,
        out_ptr=out,
    )


_ARGUMENTS = {
    "q_ptr": "*fp32",
    "rows_ptr": "*i64",
    "out_ptr": "*fp32",
    "stats_ptr": "*fp32",
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
    itemsize = {"*u8": 1, "*bf16": 2, "*fp32": 4}[cache]
    config = _config(backend, 132, 8, 16384, padded, itemsize, exact)
    constants = {
        "KV": 8,
        "GROUP": group,
        "ROWS": max(16, triton.next_power_of_2(group)),
        "D": d,
        "D_PADDED": padded,
        "SPLITS": config.splits,
        "TILE": config.tile,
        "WINDOW": window,
        "Q8": cache == "*u8",
        "EXACT": exact,
        "CHUNKED": config.chunked,
    }
    arguments = {**_ARGUMENTS, "keys_ptr": cache, "values_ptr": cache}
    needs = frozenset() if exact else frozenset({"matrix"})
    return Offline(
        decode_attention_kernel,
        arguments,
        constants,
        config.warps,
        name=f"{name} {backend}",
        needs=needs,
        aligned=_ALIGNED,
        on=frozenset({backend}),
    )


def _all_offline() -> tuple[Offline, ...]:
    entries = []
    backends: tuple[TargetName, ...] = ("cuda", "hip")
    for backend in backends:
        entries += [
            _offline("q8 64", backend, "*u8", 64),
            _offline("q8 128", backend, "*u8", 128),
            _offline("q8 256 window", backend, "*u8", 256, group=2, window=512),
            _offline("q8 512", backend, "*u8", 512),
            _offline("bf16 80", backend, "*bf16", 80, group=1),
            _offline("bf16 128", backend, "*bf16", 128, group=24),
            _offline("bf16 256", backend, "*bf16", 256),
            _offline("q8 128 exact", backend, "*u8", 128, exact=True),
            _offline("fp32 128", backend, "*fp32", 128),
            _offline("fp32 256", backend, "*fp32", 256),
        ]
    combine = Offline(
        combine_splits_kernel,
        {"partial_ptr": "*fp32", "stats_ptr": "*fp32", "rows_ptr": "*i64", "out_ptr": "*fp32"},
        {
            "H": 32,
            "D": 128,
            "D_PADDED": 128,
            "SPLITS": 64,
            "PADDED": 64,
            "PARTS": 32,
            "TILE": 64,
            "WINDOW": 0,
            "values_ptr": None,
            "scales_ptr": None,
            "sums_ptr": None,
        },
    )
    prepared = {"values_ptr": "*i8", "scales_ptr": "*fp32", "sums_ptr": "*fp32"}
    constants = {name: value for name, value in combine.constants.items() if name not in prepared}
    int8 = Offline(combine_splits_kernel, {**combine.arguments, **prepared}, constants, name="int8")
    return (*entries, combine, int8)


OFFLINE = _all_offline()
