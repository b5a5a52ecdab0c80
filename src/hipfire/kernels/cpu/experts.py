"""Products with the experts that tokens have chosen: pair by pair for one token, by experts for many.

Kernels read the numbers of experts when they run, so a recorded step serves whatever its router chooses. A
pair is a place of a token. For every output the arithmetic is the same both ways, that of `linear`.
"""

from __future__ import annotations

from typing import Any

from hipfire.kernels.cpu import dense
from hipfire.kernels.cpu.jit import argument, helper, kernel, share
from hipfire.kernels.cpu.layouts import CODE_LAYOUTS, SUB_COLUMNS, Layout
from hipfire.kernels.cpu.linear import (
    SMALL_TILE,
    TILE,
    VECTOR_BYTES,
    panel_unpacker,
    row_product,
    scratch_nbytes,
    tile_product,
)
from hipfire.kernels.cpu.rows import META_BYTES, gelu_times, silu_times
from hipfire.kernels.cpu.simd import fma_f, load_f, load_int, load_long, splat_at, store_f, zero_f

# results of a tile's rows for a panel of the gate, then for one of up
_TILE_BYTES = TILE * VECTOR_BYTES


def many_scratch_nbytes(cols: int) -> int:
    """Return the bytes of scratch that a thread needs for products of many pairs with `cols` columns."""
    return 2 * (scratch_nbytes(cols) + _TILE_BYTES)


@helper
def _combine(gate: Any, up: Any, activation: int) -> Any:
    return silu_times(gate, up) if activation == 0 else gelu_times(gate, up)


@helper
def _first_panel(edge: int, base: int, count: int, panels: int) -> int:
    """Return the first panel of an expert whose work, `count` for each from `base` on, begins at `edge`."""
    return min(panels, max(0, -((base - edge) // count)))


def _gated_pairs(layout: Layout) -> Any:
    """Make the kernel that gates pairs one by one.

    Arguments: experts, pairs, panels of a section, bytes of an expert, of a section, of a panel, columns
    / 32, places, numbers of experts (int32), codes of x, numbers of x, y, bytes of a row of y, activation.
    """
    product = row_product(layout)

    @kernel(f"expert-gated-one-{layout.name}")
    def gated(arguments: int, thread: int, threads: int) -> None:
        experts, panels = argument(arguments, 0), argument(arguments, 2)
        expert_bytes, section_bytes = argument(arguments, 3), argument(arguments, 4)
        panel_bytes, subs, places = argument(arguments, 5), argument(arguments, 6), argument(arguments, 7)
        ids, x, meta = argument(arguments, 8), argument(arguments, 9), argument(arguments, 10)
        y, y_stride, activation = argument(arguments, 11), argument(arguments, 12), argument(arguments, 13)
        first, last = share(argument(arguments, 1) * panels, thread, threads)
        for unit in range(first, last):
            pair, p = unit // panels, unit % panels
            panel = experts + load_int(ids + 4 * pair) * expert_bytes + p * panel_bytes
            codes = x + pair // places * SUB_COLUMNS * subs
            numbers = meta + pair // places * META_BYTES * subs
            gate = product(panel, codes, numbers, subs)
            up = product(panel + section_bytes, codes, numbers, subs)
            store_f(y + pair * y_stride + VECTOR_BYTES * p, _combine(gate, up, activation))

    return gated


def _down_pairs(layout: Layout) -> Any:
    """Make the kernel that adds up the weighted products of every token's places.

    Arguments: experts, tokens, panels, bytes of an expert, of a panel, columns / 32, places, numbers of
    experts (int32), weights, codes of x, numbers of x, y, bytes of a row of y.
    """
    product = row_product(layout)

    @kernel(f"expert-down-one-{layout.name}")
    def down(arguments: int, thread: int, threads: int) -> None:
        experts, panels = argument(arguments, 0), argument(arguments, 2)
        expert_bytes, panel_bytes = argument(arguments, 3), argument(arguments, 4)
        subs, places = argument(arguments, 5), argument(arguments, 6)
        ids, weights = argument(arguments, 7), argument(arguments, 8)
        x, meta = argument(arguments, 9), argument(arguments, 10)
        y, y_stride = argument(arguments, 11), argument(arguments, 12)
        first, last = share(argument(arguments, 1) * panels, thread, threads)
        for unit in range(first, last):
            token, p = unit // panels, unit % panels
            total = zero_f()
            for pair in range(token * places, (token + 1) * places):
                panel = experts + load_int(ids + 4 * pair) * expert_bytes + p * panel_bytes
                codes, numbers = x + pair * SUB_COLUMNS * subs, meta + pair * META_BYTES * subs
                value = product(panel, codes, numbers, subs)
                total = fma_f(splat_at(weights + 4 * pair), value, total)
            store_f(y + token * y_stride + VECTOR_BYTES * p, total)

    return down


def _products_of_rows(layout: Layout) -> Any:
    """Make `products(panel, words, x, meta, subs, count, out)`: up to TILE rows times one panel.

    `words` is the same panel unpacked; results of the rows lie side by side at `out`.
    """
    product = row_product(layout)
    tile, small_tile = tile_product(layout, TILE), tile_product(layout, SMALL_TILE)

    @helper
    def products(panel: int, words: int, x: int, meta: int, subs: int, count: int, out: int) -> None:
        row = 0
        if count == TILE:
            tile(words, x, meta, subs, out, VECTOR_BYTES)
            row = TILE
        while count - row >= SMALL_TILE:
            codes, numbers = x + row * SUB_COLUMNS * subs, meta + row * META_BYTES * subs
            small_tile(words, codes, numbers, subs, out + row * VECTOR_BYTES, VECTOR_BYTES)
            row += SMALL_TILE
        while row < count:
            codes, numbers = x + row * SUB_COLUMNS * subs, meta + row * META_BYTES * subs
            store_f(out + row * VECTOR_BYTES, product(panel, codes, numbers, subs))
            row += 1

    return products


def _grouped(layout: Layout, *, gated: bool) -> Any:
    """Make the kernel for pairs in order of their experts; each thread takes as much work, in whole panels.

    Arguments: experts, their number, panels of a section, bytes of an expert, of a section, of a panel,
    columns / 32, pairs in order (int64), where those of each expert begin (int64), codes of x and numbers of
    x in that order, y, bytes of a row of y, activation, scratch, scratch bytes of a thread.
    """
    unpack, products = panel_unpacker(layout), _products_of_rows(layout)

    @kernel(f"expert-{'gated' if gated else 'down'}-{layout.name}")
    def grouped(arguments: int, thread: int, threads: int) -> None:
        experts, number, panels = argument(arguments, 0), argument(arguments, 1), argument(arguments, 2)
        expert_bytes, section_bytes = argument(arguments, 3), argument(arguments, 4)
        panel_bytes, subs = argument(arguments, 5), argument(arguments, 6)
        order, starts = argument(arguments, 7), argument(arguments, 8)
        x, meta = argument(arguments, 9), argument(arguments, 10)
        y, y_stride, activation = argument(arguments, 11), argument(arguments, 12), argument(arguments, 13)
        results = argument(arguments, 14) + thread * argument(arguments, 15)
        words = results + 2 * _TILE_BYTES
        more_words = words + (argument(arguments, 15) - 2 * _TILE_BYTES) // 2 // 64 * 64
        low, high = share(load_long(starts + 8 * number) * panels, thread, threads)
        for expert in range(number):
            start, end = load_long(starts + 8 * expert), load_long(starts + 8 * expert + 8)
            if start == end:
                continue
            first = _first_panel(low, start * panels, end - start, panels)
            last = _first_panel(high, start * panels, end - start, panels)
            for p in range(first, last):
                panel = experts + expert * expert_bytes + p * panel_bytes
                unpack(panel, words, subs)
                if gated:
                    unpack(panel + section_bytes, more_words, subs)
                for begin in range(start, end, TILE):
                    count = min(TILE, end - begin)
                    codes, numbers = x + begin * SUB_COLUMNS * subs, meta + begin * META_BYTES * subs
                    products(panel, words, codes, numbers, subs, count, results)
                    if gated:
                        other = panel + section_bytes
                        products(other, more_words, codes, numbers, subs, count, results + _TILE_BYTES)
                    for row in range(count):
                        out = y + load_long(order + 8 * (begin + row)) * y_stride + VECTOR_BYTES * p
                        value = load_f(results + VECTOR_BYTES * row)
                        if gated:
                            up = load_f(results + _TILE_BYTES + VECTOR_BYTES * row)
                            value = _combine(value, up, activation)
                        store_f(out, value)

    return grouped


def _grouped_dense(name: str, load_weights: Any, itemsize: int, *, gated: bool) -> Any:
    """Make the kernel for experts of floats.

    Arguments: experts, their number, panels of a section, bytes of an expert, of a section, of a panel,
    columns, pairs in order (int64), where those of each expert begin (int64), x, bytes of a row of x, how
    many pairs share a row of x, y, bytes of a row of y, activation.
    """
    product = dense.row_product(load_weights, itemsize)

    @kernel(f"expert-{'gated' if gated else 'down'}-{name}")
    def grouped(arguments: int, thread: int, threads: int) -> None:
        experts, number, panels = argument(arguments, 0), argument(arguments, 1), argument(arguments, 2)
        expert_bytes, section_bytes = argument(arguments, 3), argument(arguments, 4)
        panel_bytes, columns = argument(arguments, 5), argument(arguments, 6)
        order, starts = argument(arguments, 7), argument(arguments, 8)
        x, x_stride, shared_by = argument(arguments, 9), argument(arguments, 10), argument(arguments, 11)
        y, y_stride, activation = argument(arguments, 12), argument(arguments, 13), argument(arguments, 14)
        low, high = share(load_long(starts + 8 * number) * panels, thread, threads)
        for expert in range(number):
            start, end = load_long(starts + 8 * expert), load_long(starts + 8 * expert + 8)
            if start == end:
                continue
            first = _first_panel(low, start * panels, end - start, panels)
            last = _first_panel(high, start * panels, end - start, panels)
            for p in range(first, last):
                panel = experts + expert * expert_bytes + p * panel_bytes
                for index in range(start, end):
                    pair = load_long(order + 8 * index)
                    row = x + pair // shared_by * x_stride
                    value = product(panel, row, columns)
                    if gated:
                        value = _combine(value, product(panel + section_bytes, row, columns), activation)
                    store_f(y + pair * y_stride + VECTOR_BYTES * p, value)

    return grouped


GATED_PAIRS = tuple(_gated_pairs(layout) for layout in CODE_LAYOUTS)
DOWN_PAIRS = tuple(_down_pairs(layout) for layout in CODE_LAYOUTS)
GATED_GROUPS = tuple(_grouped(layout, gated=True) for layout in CODE_LAYOUTS)
DOWN_GROUPS = tuple(_grouped(layout, gated=False) for layout in CODE_LAYOUTS)
GATED_DENSE = tuple(_grouped_dense(*load, gated=True) for load in dense.LOADS)
DOWN_DENSE = tuple(_grouped_dense(*load, gated=False) for load in dense.LOADS)
