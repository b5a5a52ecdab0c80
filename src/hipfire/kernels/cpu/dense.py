"""Products of float32 activations with weights of a floating type, and rows of such weights.

Every output adds its products in one order, four partial sums taken in turn, whatever the number of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hipfire.kernels.cpu.jit import argument, helper, kernel, share
from hipfire.kernels.cpu.layouts import PANEL_ROWS
from hipfire.kernels.cpu.simd import (
    add_f,
    fma_f,
    load_bfloat,
    load_f,
    load_float,
    load_half,
    load_one_bfloat,
    load_one_half,
    prefetch,
    splat_at,
    store_f,
    store_float,
    zero_f,
)

PREFETCH_BYTES = 4096


def row_product(load_weights: Any, itemsize: int) -> Any:
    """Make `product(panel, x, columns)`: sixteen results of one row of activations."""
    step = PANEL_ROWS * itemsize

    @helper
    def product(panel: int, x: int, columns: int) -> Any:
        first, second, third, fourth = zero_f(), zero_f(), zero_f(), zero_f()
        whole = columns - columns % 4
        for k in range(0, whole, 4):
            prefetch(panel + PREFETCH_BYTES)
            prefetch(panel + PREFETCH_BYTES + 2 * step)
            first = fma_f(load_weights(panel), splat_at(x + 4 * k), first)
            second = fma_f(load_weights(panel + step), splat_at(x + 4 * k + 4), second)
            third = fma_f(load_weights(panel + 2 * step), splat_at(x + 4 * k + 8), third)
            fourth = fma_f(load_weights(panel + 3 * step), splat_at(x + 4 * k + 12), fourth)
            panel += 4 * step
        for k in range(whole, columns):
            first = fma_f(load_weights(panel), splat_at(x + 4 * k), first)
            panel += step
        return add_f(add_f(first, second), add_f(third, fourth))

    return product


def _linear(name: str, load_weights: Any, itemsize: int) -> Any:
    """Make y = x W^T.

    Arguments: panels, rows, panel count, panel bytes, columns, x, bytes of a row of x, y, of a row of y.
    """
    product = row_product(load_weights, itemsize)

    @kernel(f"linear-{name}")
    def linear(arguments: int, thread: int, threads: int) -> None:
        panels, rows = argument(arguments, 0), argument(arguments, 1)
        panel_bytes, columns = argument(arguments, 3), argument(arguments, 4)
        x, x_stride = argument(arguments, 5), argument(arguments, 6)
        y, y_stride = argument(arguments, 7), argument(arguments, 8)
        first, last = share(argument(arguments, 2), thread, threads)
        for p in range(first, last):
            for row in range(rows):
                value = product(panels + p * panel_bytes, x + row * x_stride, columns)
                store_f(y + row * y_stride + 4 * PANEL_ROWS * p, value)

    return linear


def _select(name: str, load_one: Any, itemsize: int) -> Any:
    """Make the kernel that copies rows out of panels as float32.

    Arguments: row numbers (int64), their count, panels, panel bytes, columns, out.
    """

    @kernel(f"select-{name}")
    def select(arguments: int, thread: int, threads: int) -> None:
        numbers, panels = argument(arguments, 0), argument(arguments, 2)
        panel_bytes, columns, out = argument(arguments, 3), argument(arguments, 4), argument(arguments, 5)
        first, last = share(argument(arguments, 1), thread, threads)
        for index in range(first, last):
            number = argument(numbers, index)
            place = panels + number // PANEL_ROWS * panel_bytes + number % PANEL_ROWS * itemsize
            for k in range(columns):
                value = load_one(place + PANEL_ROWS * itemsize * k)
                store_float(out + 4 * (index * columns + k), np.float32(value))

    return select


# names of layouts, how their weights are loaded, and bytes of a weight
LOADS = (("f32", load_f, 4), ("f16", load_half, 2), ("bf16", load_bfloat, 2))
LINEAR_KERNELS = tuple(_linear(*load) for load in LOADS)
SELECT_KERNELS = (
    _select("f32", load_float, 4),
    _select("f16", load_one_half, 2),
    _select("bf16", load_one_bfloat, 2),
)
