"""Packing the matrices of a checkpoint into panels for the CPU kernels, on the engine's threads.

This file does not know which tensors a model wants.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hipfire.base.types import TensorInfo
from hipfire.kernels.cpu.engine import CpuEngine, aligned_bytes
from hipfire.kernels.cpu.layouts import LAYOUTS, PANEL_ROWS
from hipfire.kernels.cpu.pack import PACKERS, Packer, worst_fault
from hipfire.kernels.cpu.pack_kernels import MISFIT, SOUND
from hipfire.kernels.panels import Panels
from hipfire.quant.format import WeightFormat
from hipfire.quant.registry import format_of

# rows that are decoded at a time where a format has no packer
DECODED_ELEMENTS = 1 << 22
# stored bytes that are packed before their pages may leave memory again
PIECE_BYTES = 1 << 24
PLAIN = PACKERS["F32"]


def packer_of(fmt: WeightFormat, nbytes: int, rows: int, cols: int) -> Packer | None:
    """Return what packs a stored matrix, or None if it must be decoded to float32 first."""
    packer = PACKERS.get(fmt.name)
    if packer is None or not fmt.has_whole_rows(nbytes, rows, cols):
        return None
    return None if packer.whole and cols % packer.block_elements else packer


def panels_nbytes(info: TensorInfo) -> int:
    """Return the bytes that a tensor takes in panels."""
    rows, cols = info.rows_cols
    layout = (packer_of(format_of(info.qtype), info.nbytes, rows, cols) or PLAIN).layout
    if len(info.shape) < 3 or info.shape[1] == 1 or info.shape[1] % (2 * PANEL_ROWS) == 0:
        return layout.nbytes(rows, cols)
    # a stack of experts, of each of which two sections are filled up
    return info.shape[0] * (layout.nbytes(info.shape[1], cols) + layout.panel_bytes(cols))


def pack(
    engine: CpuEngine,
    packer: Packer,
    data: torch.Tensor,
    rows: int,
    cols: int,
    order: torch.Tensor | None,
    *,
    packed: Callable[[int], None] = lambda _: None,
) -> tuple[Panels | None, int | None]:
    """Pack rows of uint8 `data`, in `order` int64 [rows] if given.

    Returns the panels, and None; or None and the number of the first block that is not finite; or None
    twice if the layout cannot hold the scales of this matrix. `packed` is told how many of the first bytes of
    the data are not needed any more.
    """
    panels = Panels(packer.layout, rows, cols, aligned_bytes(packer.layout.nbytes(rows, cols)))
    row_bytes, panel_bytes = packer.row_nbytes(cols), packer.layout.panel_bytes(cols)
    faults = torch.empty(engine.pool.parts, dtype=torch.int64)
    step = rows if order is not None else max(1, PIECE_BYTES // row_bytes // PANEL_ROWS) * PANEL_ROWS
    for first in range(0, rows, step):
        last = min(rows, first + step)
        source, target = data[first * row_bytes :], panels.data[first // PANEL_ROWS * panel_bytes :]
        where = 0 if order is None else order
        engine.launch(packer.kernel, source, row_bytes, last - first, cols, where, target, faults)
        fault = worst_fault(faults.tolist())
        if fault == MISFIT:
            return None, None
        if fault != SOUND:
            return None, first * (row_bytes // packer.block_bytes) + fault
        packed(last * row_bytes)
    return panels, None


def pack_rows(engine: CpuEngine, packer: Packer, data: torch.Tensor, cols: int, target: torch.Tensor) -> int:
    """Pack uint8 `data` [rows, bytes of a row] into the whole panels `target`.

    Returns SOUND, MISFIT where the layout cannot hold the scales, or the number of the first damaged block.
    """
    faults = torch.empty(engine.pool.parts, dtype=torch.int64)
    engine.launch(packer.kernel, data, packer.row_nbytes(cols), data.shape[0], cols, 0, target, faults)
    return worst_fault(faults.tolist())


def pack_floats(engine: CpuEngine, values: torch.Tensor, target: torch.Tensor) -> None:
    """Pack float32 `values` [rows, cols] into the whole panels `target`."""
    faults = torch.empty(engine.pool.parts, dtype=torch.int64)
    rows, cols = values.shape
    engine.launch(PLAIN.kernel, values.contiguous(), 4 * cols, rows, cols, 0, target, faults)


def pack_decoded(
    engine: CpuEngine, decode: Callable[[int, int], torch.Tensor], rows: int, cols: int
) -> Panels:
    """Pack a matrix as float32: `decode(first, last)` returns rows as float32 [last - first, cols]."""
    layout = LAYOUTS["f32"]
    panels = Panels(layout, rows, cols, aligned_bytes(layout.nbytes(rows, cols)))
    # whole panels at a time, so that each run of rows is a piece of the result
    step = max(1, DECODED_ELEMENTS // max(1, cols) // PANEL_ROWS) * PANEL_ROWS
    faults = torch.empty(engine.pool.parts, dtype=torch.int64)
    for first in range(0, rows, step):
        last = min(rows, first + step)
        source = decode(first, last).contiguous()
        target = panels.data[first // PANEL_ROWS * layout.panel_bytes(cols) :]
        engine.launch(PLAIN.kernel, source, 4 * cols, last - first, cols, 0, target, faults)
    return panels
