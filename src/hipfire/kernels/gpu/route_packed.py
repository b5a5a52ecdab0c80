"""The logits of a router out of packed weights, and the choice that follows.

Which experts run hangs on small differences, so for a few tokens activations are used as they are, and need
no other form first. This file does not know experts.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.experts import PAIR_TOKENS
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.products import packed_linear
from hipfire.kernels.gpu.route import route
from hipfire.kernels.gpu.target import begin_launch
from hipfire.kernels.packed import PackedMatrix

# rows of a program, and the units of 32 columns that it takes together: a unit to each thread
_ROWS: Final = 2
_UNITS: Final = 64
_INTERPRETED_ROWS: Final = 64


@triton.jit
def _logits(
    x_ptr, codes_ptr, scales_ptr, out_ptr, rows, cols, units, x_stride, out_stride,
    ROWS: tl.constexpr, UNITS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    row64 = tl.where(row < rows, row, 0).to(tl.int64)
    acc = tl.zeros((ROWS, UNITS), tl.float32)
    for first in range(0, units, UNITS):
        # in every row anew: sharing activations among the threads would cost more
        unit = first + tl.arange(0, UNITS)[None, :] + tl.zeros((ROWS, UNITS), tl.int32)
        mask = (unit < units) & (row < rows)
        total = tl.zeros((ROWS, UNITS), tl.float32)
        for word in tl.static_range(4):
            at = codes_ptr + row64 * (units * 8) + (word * units + unit)
            even = tl.load(at, mask=mask, other=0)
            odd = tl.load(at + 4 * units, mask=mask, other=0)
            for byte in tl.static_range(4):
                column = unit * 32 + word * 8 + byte * 2
                x = x_ptr + token * x_stride + column
                first_x = tl.load(x, mask=column < cols, other=0.0).to(tl.float32)
                second_x = tl.load(x + 1, mask=column + 1 < cols, other=0.0).to(tl.float32)
                total += ((even << (24 - 8 * byte)) >> 24).to(tl.float32) * first_x
                total += ((odd << (24 - 8 * byte)) >> 24).to(tl.float32) * second_x
        acc += total * tl.load(scales_ptr + row64 * units + unit, mask=mask, other=0.0).to(tl.float32)
    out = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out_ptr + token * out_stride + out, tl.sum(acc, axis=1), mask=out < rows)


def route_packed(
    engine: GpuEngine, x: torch.Tensor, matrix: PackedMatrix, experts: int, count: int, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `route_packed_ref`; logits of more than a few tokens are those of `packed_linear`."""
    tokens = x.shape[0]
    if tokens <= PAIR_TOKENS and matrix.layout.name == "i8g32":
        logits = engine.empty("route.logits", (tokens, matrix.rows))
        block = _INTERPRETED_ROWS if engine.target == "plain" else _ROWS
        engine.launch(
            _logits,
            (-(-matrix.rows // block), tokens),
            reads=(x, *matrix.tensors),
            writes=(logits,),
            x_ptr=x,
            codes_ptr=matrix.codes.view(torch.int32),
            scales_ptr=matrix.scales,
            out_ptr=logits,
            rows=matrix.rows,
            cols=matrix.cols,
            units=matrix.units,
            x_stride=x.stride(0),
            out_stride=matrix.rows,
            constants={"ROWS": block, "UNITS": _UNITS, "TARGET": engine.target},
            warps=_UNITS // 32,
        )
    else:
        logits = packed_linear(engine, x, matrix)
    shared = logits[:, experts:] if matrix.rows > experts else None
    return route(engine, logits[:, :experts], count, normalize, shared)


_TYPES = {
    **{"codes_ptr": "*i32", "scales_ptr": "*fp16", "out_ptr": "*fp32", "rows": "i32", "cols": "i32"},
    **{"units": "i32", "x_stride": "i32", "out_stride": "i32"},
}
OFFLINE: tuple[Offline, ...] = (
    Offline(
        _logits,
        {**_TYPES, "x_ptr": "*fp32"},
        {"ROWS": _ROWS, "UNITS": _UNITS},
        _UNITS // 32,
        aligned=frozenset({"cols", "units", "x_stride"}),
    ),
)
