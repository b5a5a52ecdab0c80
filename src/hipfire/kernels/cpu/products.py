"""Operations on packed weights, as the CPU engine runs them. This file does not know what is in a panel."""

from __future__ import annotations

import torch

from hipfire.kernels.cpu import dense, linear, select
from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.cpu.layouts import CODE_LAYOUTS, PANEL_ROWS, SUB_COLUMNS, DenseLayout
from hipfire.kernels.cpu.rows import META_BYTES, quantize
from hipfire.kernels.panels import Panels

FIRST_DENSE = len(CODE_LAYOUTS)


def quantized(engine: CpuEngine, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes [T, K in whole groups of 32] of float32 x [T, K], and the numbers of each group."""
    known = engine.remembered(x)
    if known is not None:
        return known
    rows, cols = x.shape
    groups = -(-cols // SUB_COLUMNS)
    codes = torch.empty(rows, groups * SUB_COLUMNS, dtype=torch.int8)
    numbers = torch.empty(rows, groups, META_BYTES // 4)
    engine.launch(
        quantize,
        *(x, rows, cols, 4 * x.stride(0), codes, numbers),
        reads=(x,),
        writes=(codes, numbers),
        units=("groups", rows, groups),
    )
    engine.remember(x, (codes, numbers))
    return codes, numbers


def panel_linear(engine: CpuEngine, x: torch.Tensor, panels: Panels) -> torch.Tensor:
    """Run `panel_linear_ref` with activations rounded to int8 where the layout has codes."""
    x = float_rows(x)
    count = -(-panels.rows // PANEL_ROWS)
    y = torch.empty(x.shape[0], count * PANEL_ROWS)
    size = panels.layout.panel_bytes(panels.cols)
    if isinstance(panels.layout, DenseLayout):
        engine.launch(
            dense.LINEAR_KERNELS[panels.layout.index - FIRST_DENSE],
            *(panels.data, x.shape[0], count, size, panels.cols, x, 4 * x.stride(0), y, 4 * y.shape[1]),
            reads=(x,),
            writes=(y,),
        )
    else:
        codes, numbers = quantized(engine, x)
        scratch, each = engine.scratch(linear.scratch_nbytes(panels.cols))
        groups = numbers.shape[1]
        engine.launch(
            linear.LINEAR_KERNELS[panels.layout.index],
            *(panels.data, x.shape[0], count, size, groups, codes, numbers),
            *(y, 4 * y.shape[1], scratch, each),
            reads=(codes, numbers),
            writes=(y,),
        )
    return y[:, : panels.rows]


def panel_select(engine: CpuEngine, panels: Panels, rows: torch.Tensor) -> torch.Tensor:
    """Run `panel_select_ref`; `rows` is int64 in one piece."""
    out = torch.empty(rows.shape[0], panels.cols)
    size = panels.layout.panel_bytes(panels.cols)
    common = (rows, rows.shape[0], panels.data, size, panels.cols, out)
    if isinstance(panels.layout, DenseLayout):
        kernel = dense.SELECT_KERNELS[panels.layout.index - FIRST_DENSE]
        engine.launch(kernel, *common, reads=(rows,), writes=(out,))
    else:
        scratch, each = engine.scratch(select.SCRATCH_BYTES)
        kernel = select.SELECT_KERNELS[panels.layout.index]
        engine.launch(kernel, *common, scratch, each, reads=(rows,), writes=(out,))
    return out


def float_rows(x: torch.Tensor) -> torch.Tensor:
    """Return float32 [T, K] whose rows lie in one piece each."""
    return x if x.dtype == torch.float32 and x.stride(1) == 1 else x.float().contiguous()
