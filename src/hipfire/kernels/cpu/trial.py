"""A small product on the path in use, compared with exact integers; `build` runs it as a process."""

from __future__ import annotations

import sys

import numpy as np

from hipfire.kernels.cpu.layouts import LAYOUTS, PANEL_ROWS, SUB_COLUMNS, Layout
from hipfire.kernels.cpu.linear import LINEAR_KERNELS, TILE, scratch_nbytes

COLUMNS = 2 * SUB_COLUMNS
ROWS = TILE + 1


def product_is_exact() -> bool:
    """Multiply int8 codes by int8 codes with all scales 1, through the tile and the single row."""
    layout = LAYOUTS["i8g32"]
    if not isinstance(layout, Layout):
        return False
    codes = np.arange(PANEL_ROWS * COLUMNS, dtype=np.int64).reshape(2, 8, PANEL_ROWS, 4) % 255 - 127
    panel = np.concatenate(
        [
            part
            for group in codes
            for part in (
                np.ones(PANEL_ROWS, np.float16).view(np.uint8),
                group.astype(np.int8).reshape(-1).view(np.uint8),
            )
        ]
    )
    x = (np.arange(ROWS * COLUMNS, dtype=np.int64).reshape(ROWS, COLUMNS) * 7 % 255 - 127).astype(np.int8)
    numbers = np.ones((ROWS, 2, 4), np.float32)
    numbers.view(np.int32)[..., 2:] = x.reshape(ROWS, 2, 2, 16).sum(-1, dtype=np.int32)
    y = np.full((ROWS, PANEL_ROWS), np.nan, np.float32)
    scratch = np.zeros(scratch_nbytes(COLUMNS), np.uint8)
    arrays = (panel, x, numbers, y, scratch)
    places = [array.ctypes.data for array in arrays]
    arguments = np.array(
        [places[0], ROWS, 1, layout.panel_bytes(COLUMNS), 2, *places[1:4], 4 * PANEL_ROWS, places[4], 0]
    )
    LINEAR_KERNELS[layout.index](arguments.ctypes.data, 0, 1)
    weights = codes.transpose(2, 0, 1, 3).reshape(PANEL_ROWS, COLUMNS)
    return bool((y == x.astype(np.int64) @ weights.T).all())


if __name__ == "__main__":
    sys.exit(0 if product_is_exact() else "the product is wrong")
