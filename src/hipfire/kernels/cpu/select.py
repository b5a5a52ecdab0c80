"""Rows of packed weights as float32: the token embedding. weight = scale * (code - offset) + minimum."""

from __future__ import annotations

from typing import Any

import numpy as np

from hipfire.kernels.cpu.dots import QUADS, WORD_BYTES, unpack_codes
from hipfire.kernels.cpu.jit import argument, helper, kernel, share
from hipfire.kernels.cpu.layouts import CODE_LAYOUTS, PANEL_ROWS, SUB_COLUMNS, Layout
from hipfire.kernels.cpu.simd import load_byte, load_float, load_one_half, load_unsigned, store_float

# a group's codes, as one thread needs them at a time
SCRATCH_BYTES = QUADS * WORD_BYTES


def _select(layout: Layout) -> Any:
    """Make the kernel of one layout.

    Arguments: row numbers (int64), their count, panels, panel bytes, columns, out, scratch, scratch bytes
    of a thread.
    """
    unpack = unpack_codes(layout.bits)
    load_code = load_byte if layout.signed else load_unsigned
    load_scale = load_one_half if layout.half else load_float
    itemsize = 2 if layout.half else 4
    header, sub_bytes, per_group = layout.header_bytes, layout.sub_bytes, layout.subs
    minimum, offset, part_columns = layout.minimum, layout.offset, SUB_COLUMNS // layout.parts
    minimum_place = PANEL_ROWS * itemsize * layout.parts

    @helper
    def select_row(panel: int, lane: int, columns: int, out: int, words: int) -> None:
        head = panel
        place = panel
        for sub in range(-(-columns // SUB_COLUMNS)):
            if sub % per_group == 0:
                head = place
                place += header
            unpack(place, words)
            place += sub_bytes
            for i in range(min(SUB_COLUMNS, columns - SUB_COLUMNS * sub)):
                code = load_code(words + WORD_BYTES * (i // 4) + 4 * lane + i % 4)
                scale = load_scale(head + itemsize * (lane + PANEL_ROWS * (i // part_columns)))
                value = np.float32(code - np.int32(offset)) * scale
                if minimum:
                    value += load_scale(head + minimum_place + itemsize * lane)
                store_float(out + 4 * (SUB_COLUMNS * sub + i), value)

    @kernel(f"select-{layout.name}")
    def select(arguments: int, thread: int, threads: int) -> None:
        numbers, panels = argument(arguments, 0), argument(arguments, 2)
        panel_bytes, columns, out = argument(arguments, 3), argument(arguments, 4), argument(arguments, 5)
        words = argument(arguments, 6) + thread * argument(arguments, 7)
        first, last = share(argument(arguments, 1), thread, threads)
        for index in range(first, last):
            number = argument(numbers, index)
            panel = panels + number // PANEL_ROWS * panel_bytes
            select_row(panel, number % PANEL_ROWS, columns, out + 4 * columns * index, words)

    return select


SELECT_KERNELS = tuple(_select(layout) for layout in CODE_LAYOUTS)
