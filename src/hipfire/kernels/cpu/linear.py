"""Products of quantized activations with packed weights, for one row (decode) and for many (prefill).

For every output the arithmetic is the same however many rows there are: the sums of 32 products are exact
integers, and what follows them are float32 operations in the order of the columns. So a token's results do
not depend on the batch around it, on chunks, or on threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hipfire.kernels.cpu import tile_dots
from hipfire.kernels.cpu.dots import dot_of_codes, signed_bias
from hipfire.kernels.cpu.jit import argument, helper, kernel, share
from hipfire.kernels.cpu.layouts import CODE_LAYOUTS, PANEL_ROWS, SUB_COLUMNS, Layout
from hipfire.kernels.cpu.rows import META_BYTES
from hipfire.kernels.cpu.simd import (
    fma_f,
    load_f,
    load_float,
    load_half,
    load_int,
    prefetch,
    splat_at,
    splat_f,
    splat_i,
    store_f,
    sub_i,
    to_f,
    zero_f,
)
from hipfire.kernels.cpu.target import cpu_path
from hipfire.kernels.cpu.tile_dots import dots_of_words, unpack_for_tile, unpacked_bytes
from hipfire.kernels.cpu.tiles import add_multiples, add_products, add_scaled_sums, sums_along, zeros

VECTOR_BYTES = 4 * PANEL_ROWS
# how far ahead of the codes in use memory is asked for
PREFETCH_BYTES = 4096
# activations that are multiplied with one unpacked panel before the next: they stay in the L2 cache
ROW_BLOCK_BYTES = 192 * 1024
# rows multiplied at a time with unpacked codes: as many as the registers hold the sums of, and two for what
# remains
TILE = {"vnni512": 8, "avx2": 4}.get(cpu_path(), 2)
SMALL_TILE = 2


def scratch_nbytes(cols: int) -> int:
    """Return the bytes of scratch that a thread needs for products with `cols` columns."""
    subs = -(-cols // SUB_COLUMNS)
    # codes of one panel, and scales and minima for groups as small as 16 columns
    return subs * (unpacked_bytes(8) + 4 * VECTOR_BYTES)


def row_product(layout: Layout) -> Any:
    """Make `product(panel, x, meta, subs)`: sixteen results of one row of activations."""
    dot = dot_of_codes(layout.bits, layout.parts, signed=layout.signed)
    load_scale = load_half if layout.half else load_f
    scale_bytes = layout.header_bytes // layout.parts // (2 if layout.minimum else 1)
    header, sub_bytes, per_group = layout.header_bytes, layout.sub_bytes, layout.subs
    bias = np.int32(layout.offset + (signed_bias() if layout.signed else 0))
    minimum, halves = layout.minimum, layout.parts == 2
    lines = (header + sub_bytes + 63) // 64 if per_group == 1 else sub_bytes // 64

    @helper
    def product(panel: int, x: int, meta: int, subs: int) -> Any:
        result = zero_f()
        place = panel
        for first in range(0, subs, per_group):
            head = place
            place += header
            if halves:
                low, high = dot(place, x)
                low = sub_i(low, splat_i(bias * load_int(meta + 8)))
                high = sub_i(high, splat_i(bias * load_int(meta + 12)))
                step = splat_at(meta)
                result = fma_f(load_scale(head), fma_f(step, to_f(low), zero_f()), result)
                result = fma_f(load_scale(head + scale_bytes), fma_f(step, to_f(high), zero_f()), result)
                for line in range(lines):
                    prefetch(place + PREFETCH_BYTES + 64 * line)
                place += sub_bytes
                x += SUB_COLUMNS
                meta += META_BYTES
            else:
                total = zero_f()
                weight_of_minimum = np.float32(0.0)
                for _ in range(1 if per_group == 1 else min(per_group, subs - first)):
                    for line in range(lines):
                        prefetch(place + PREFETCH_BYTES + 64 * line)
                    (sums,) = dot(place, x)
                    if bias != 0:
                        sums = sub_i(sums, splat_i(bias * (load_int(meta + 8) + load_int(meta + 12))))
                    total = fma_f(splat_at(meta), to_f(sums), total)
                    weight_of_minimum += load_float(meta + 4)
                    place += sub_bytes
                    x += SUB_COLUMNS
                    meta += META_BYTES
                result = fma_f(load_scale(head), total, result)
                if minimum:
                    lowest = load_scale(head + scale_bytes)
                    result = fma_f(lowest, splat_f(weight_of_minimum), result)
        return result

    return product


def panel_unpacker(layout: Layout) -> Any:
    """Make `unpack(panel, target, subs)`: codes as words, then all scales and minima as float32 vectors."""
    unpack, unpacked = unpack_for_tile(layout.bits), unpacked_bytes(layout.bits)
    load_scale = load_half if layout.half else load_f
    vectors = layout.parts * (2 if layout.minimum else 1)
    header, sub_bytes, per_group = layout.header_bytes, layout.sub_bytes, layout.subs
    scale_bytes = header // vectors

    @helper
    def unpack_panel(panel: int, target: int, subs: int) -> None:
        scales = target + subs * unpacked
        for first in range(0, subs, per_group):
            for vector in range(vectors):
                store_f(scales, load_scale(panel + scale_bytes * vector))
                scales += VECTOR_BYTES
            panel += header
            for _ in range(min(per_group, subs - first)):
                unpack(panel, target)
                panel += sub_bytes
                target += unpacked

    return unpack_panel


def tile_product(layout: Layout, rows: int) -> Any:
    """Make `tile(words, x, meta, subs, out, out_stride)`: `rows` rows times an unpacked panel."""
    parts, per_group, minimum = layout.parts, layout.subs, layout.minimum
    bias = layout.offset + (tile_dots.signed_bias() if layout.signed else 0)
    dots = dots_of_words(rows, layout.bits, parts, signed=layout.signed)
    none, add_totals, add_minimum = zeros(rows), add_products(rows), add_multiples(rows)
    scaled_sums = sums_along(rows, META_BYTES, 4)
    add_low = add_scaled_sums(rows, parts, 0, bias)
    add_high = add_scaled_sums(rows, parts, parts - 1, bias)
    vectors = parts * (2 if minimum else 1)
    unpacked = unpacked_bytes(layout.bits)

    @helper
    def tile(words: int, x: int, meta: int, subs: int, out: int, out_stride: int) -> None:
        x_stride, meta_stride = SUB_COLUMNS * subs, META_BYTES * subs
        scales = words + subs * unpacked
        results = none()
        for first in range(0, subs, per_group):
            count = 1 if per_group == 1 else min(per_group, subs - first)
            start = meta
            totals = none()
            for _ in range(count):
                sums = dots(words, x, x_stride)
                totals = add_low(totals, sums, meta, meta_stride)
                if parts == 2:
                    results = add_totals(results, load_f(scales), totals)
                    totals = add_high(none(), sums, meta, meta_stride)
                words += unpacked
                x += SUB_COLUMNS
                meta += META_BYTES
            results = add_totals(results, load_f(scales + VECTOR_BYTES * (parts - 1)), totals)
            if minimum:
                lowest = load_f(scales + VECTOR_BYTES * parts)
                results = add_minimum(results, lowest, scaled_sums(start, meta_stride, count))
            scales += VECTOR_BYTES * vectors
        for row in range(rows):
            store_f(out + out_stride * row, results[row])

    return tile


def _linear(layout: Layout) -> Any:
    """Make the kernel of one layout: y = x W^T, panels of sixteen rows of W shared out among the threads.

    Arguments: panels, rows of x, panel count, panel bytes, columns / 32, codes of x, numbers of x, y, bytes
    of a row of y, scratch, scratch bytes of a thread.
    """
    product, unpack_panel = row_product(layout), panel_unpacker(layout)
    tile, small_tile = tile_product(layout, TILE), tile_product(layout, SMALL_TILE)

    @kernel(f"linear-{layout.name}")
    def linear(arguments: int, thread: int, threads: int) -> None:
        panels, rows = argument(arguments, 0), argument(arguments, 1)
        panel_bytes, subs = argument(arguments, 3), argument(arguments, 4)
        x, meta = argument(arguments, 5), argument(arguments, 6)
        y, y_stride = argument(arguments, 7), argument(arguments, 8)
        words = argument(arguments, 9) + thread * argument(arguments, 10)
        first, last = share(argument(arguments, 2), thread, threads)
        x_stride, meta_stride = SUB_COLUMNS * subs, META_BYTES * subs
        block = max(TILE, ROW_BLOCK_BYTES // (x_stride + meta_stride) // TILE * TILE)
        for begin in range(0, rows, block):
            end = min(rows, begin + block)
            tiled = begin + (end - begin) // TILE * TILE
            in_tiles = end - (end - tiled) % SMALL_TILE
            for p in range(first, last):
                panel = panels + p * panel_bytes
                column = y + VECTOR_BYTES * p
                if in_tiles > begin:
                    unpack_panel(panel, words, subs)
                for row in range(begin, tiled, TILE):
                    out = column + row * y_stride
                    tile(words, x + row * x_stride, meta + row * meta_stride, subs, out, y_stride)
                for row in range(tiled, in_tiles, SMALL_TILE):
                    out = column + row * y_stride
                    small_tile(words, x + row * x_stride, meta + row * meta_stride, subs, out, y_stride)
                for row in range(in_tiles, end):
                    value = product(panel, x + row * x_stride, meta + row * meta_stride, subs)
                    store_f(column + row * y_stride, value)

    return linear


LINEAR_KERNELS = tuple(_linear(layout) for layout in CODE_LAYOUTS)
