"""Products of some dozens of rows with packed weights on matrix units, decoding codes in the tile.

Codes are small integers and exact in bfloat16, so groups of 128 and more columns are multiplied as they are
and scaled once for each group, in float32. Smaller groups are scaled before they are multiplied. Where the
matrix has too few rows to fill the device, its columns are shared out too, and a second kernel adds up the
parts in a fixed order. This file does not know formats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.expert_matrix import layout_constants
from hipfire.kernels.gpu.gemv import ACTIVATIONS, gate
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.prepare import Prepared
from hipfire.kernels.gpu.target import TargetName, begin_launch
from hipfire.kernels.gpu.tile_codes import Tile, add_step, step_bytes
from hipfire.kernels.packed import PACKED_LAYOUTS, UNIT, PackedLayout, PackedMatrix


@triton.jit
def _gemm(
    x_ptr, x_sums_ptr, codes_ptr, high_ptr, scales_ptr, minima_ptr, out_ptr,
    tokens, rows, units, groups, split_stride,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, MINIMUM: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr,
    WHOLE: tl.constexpr, EVEN: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    # no larger number is there, which bounds offsets
    split = tl.minimum(tl.program_id(2), SPLITS - 1)
    valid = row < rows
    shown = token < tokens
    row64 = tl.where(valid, row, 0).to(tl.int64)[:, None]
    token64 = token.to(tl.int64)[None, :]
    count = tl.cdiv(units * 32, STEP)
    steps = tl.cdiv(count, SPLITS)
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in range(split * steps, tl.minimum((split + 1) * steps, count)):
        byte, column, inside = step_bytes(step, units, STEP, EVEN)
        x_at = x_ptr + token64 * (units * 32) + byte[:, None]
        x_mask = inside[:, None] & shown[None, :]
        x_even = tl.load(x_at, mask=x_mask, other=0.0)
        x_odd = tl.load(x_at + units * 16, mask=x_mask, other=0.0)
        acc = add_step(
            acc, x_even, x_odd, x_sums_ptr, token64, shown[None, :], codes_ptr, high_ptr, scales_ptr,
            minima_ptr, row64, valid[:, None], byte, column, inside, step, units, groups,
            BITS, GROUP, OFFSET, MINIMUM, STEP, WHOLE, TARGET,
        )  # fmt: skip
    out_at = out_ptr + split.to(tl.int64) * split_stride + token64 * rows + row[:, None]
    tl.store(out_at, acc, mask=valid[:, None] & shown[None, :])


@triton.jit
def _finish(
    parts_ptr, out_ptr, columns, total_columns, split_stride,
    SPLITS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    at = parts_ptr + token * total_columns + column
    up_at = at + columns
    result = tl.zeros((BLOCK,), tl.float32)
    # addresses are added up, for the last part may be further away than 32 bits can tell
    for _ in tl.static_range(SPLITS):
        result += tl.load(at, mask=mask, other=0.0)
        at += split_stride
    if ACTIVATION != 0:
        up = tl.zeros((BLOCK,), tl.float32)
        for _ in tl.static_range(SPLITS):
            up += tl.load(up_at, mask=mask, other=0.0)
            up_at += split_stride
        result = gate(result, ACTIVATION) * up
    tl.store(out_ptr + token * columns + column, result, mask=mask)


# columns of the result to a program of `_finish`
_FINISH = 1024
# programs that fill the device well, in multiples of its multiprocessors
_WAVES = 2
_MOST_SPLITS = 8


def _tile(target: TargetName, layout: PackedLayout, tokens: int, columns: int, *, exact: bool) -> Tile:
    """Choose by the machine, the layout and the numbers of tokens and of the matrix's columns."""
    whole = layout.bits == 4 and layout.group >= 128 and not exact
    block = 16 if tokens <= 16 else 32 if tokens <= 32 or exact else 64
    rows, step, warps, stages = 64, min(layout.group, 256) if whole else 64, 4, 1
    if target == "cuda":
        stages = 3
        if whole and step == 128:
            # steps are short, so tiles are high; by measurement
            rows, warps = 128, 8
        elif whole and block == 16:
            # two warps multiply without warp groups, which take weights from shared memory in larger pieces
            warps = 2
        if columns % step and step == 256:
            # bytes are loaded one by one, and each takes a register for its address
            block = min(block, 32)
    elif target == "hip":
        # matrix units of RDNA, and products of float32, hold all of their operands in registers
        if exact:
            rows, step = 32, 32
        else:
            step, warps = 64 if block <= 32 else 32, 4 if block == 16 else 8
    return Tile(rows, block, step, whole, columns % max(step, 4 * UNIT) == 0, warps, stages)


def _splits(tile: Tile, tokens: int, matrix: PackedMatrix, processors: int) -> int:
    """Return into how many parts the columns are cut."""
    programs = -(-matrix.rows // tile.rows) * -(-tokens // tile.tokens)
    steps = -(-matrix.cols // tile.step)
    return max(1, min(_MOST_SPLITS, steps, round(_WAVES * processors / programs)))


def gemm(
    engine: GpuEngine,
    x: Prepared,
    matrix: PackedMatrix,
    out: torch.Tensor,
    activation: str | None = None,
) -> None:
    """Write the product of float activations with `matrix` to `out` float32 [T, N]; see `gemv`."""
    tokens, layout = out.shape[0], matrix.layout
    tile = _tile(engine.target, layout, tokens, matrix.cols, exact=x.values.dtype == torch.float32)
    splits = _splits(tile, tokens, matrix, engine.processors)
    direct = splits == 1 and activation is None
    parts = out if direct else engine.empty("product.parts", (splits, tokens, matrix.rows))
    engine.launch(
        _gemm,
        (-(-matrix.rows // tile.rows), -(-tokens // tile.tokens), splits),
        reads=(x.values, x.sums, *matrix.tensors),
        writes=(parts,),
        x_ptr=x.values,
        x_sums_ptr=x.sums,
        codes_ptr=matrix.codes,
        high_ptr=matrix.high,
        scales_ptr=matrix.scales,
        minima_ptr=matrix.minima,
        out_ptr=parts,
        tokens=tokens,
        rows=matrix.rows,
        units=matrix.units,
        groups=matrix.scales.shape[1],
        split_stride=tokens * matrix.rows,
        constants={
            **layout_constants(layout),
            **tile.constants(),
            "SPLITS": splits,
            "TARGET": engine.target,
        },
        warps=tile.warps,
        stages=tile.stages,
    )
    if not direct:
        _finished(engine, parts, out, activation)


def _finished(engine: GpuEngine, parts: torch.Tensor, out: torch.Tensor, activation: str | None) -> None:
    splits, tokens, total = parts.shape
    columns = out.shape[1]
    engine.launch(
        _finish,
        (tokens, -(-columns // _FINISH)),
        reads=(parts,),
        writes=(out,),
        parts_ptr=parts,
        out_ptr=out,
        columns=columns,
        total_columns=total,
        split_stride=tokens * total,
        constants={
            "SPLITS": splits,
            "ACTIVATION": ACTIVATIONS[activation],
            "BLOCK": _FINISH,
            "TARGET": engine.target,
        },
    )


def _offline(
    layout: PackedLayout, target: TargetName, tokens: int, *, exact: bool = False, even: bool = True
) -> Offline:
    header = "*fp16" if layout.half else "*fp32"
    tile = _tile(target, layout, tokens, 4096 if even else 4000, exact=exact)
    types = {
        **{"x_ptr": "*fp32" if exact else "*bf16", "x_sums_ptr": "*fp32", "codes_ptr": "*u8"},
        **{"scales_ptr": header, "out_ptr": "*fp32", "tokens": "i32", "rows": "i32", "units": "i32"},
        **{"groups": "i32", "split_stride": "i32"},
    }
    constants = {**layout_constants(layout), **tile.constants(), "SPLITS": 4}
    for name, kind, there in (("high_ptr", "*u8", layout.bits == 6), ("minima_ptr", header, layout.minimum)):
        if there:
            types[name] = kind
        else:
            constants[name] = None
    return Offline(
        _gemm,
        types,
        constants,
        tile.warps,
        tile.stages,
        name=f"{layout.name} {tokens}{' exact' if exact else ''}{'' if even else ' uneven'} {target}",
        needs=frozenset() if exact else frozenset({"matrix"}),
        aligned=frozenset({"rows", "units", "groups", "split_stride"}),
        on=frozenset({target}),
    )


def _all_offline() -> tuple[Offline, ...]:
    targets: tuple[TargetName, ...] = ("cuda", "hip")
    products = [
        _offline(layout, target, tokens)
        for target in targets
        for layout in PACKED_LAYOUTS.values()
        for tokens in (16, 32, 64)
        if tokens == 16 or layout.name in ("u4g256", "u4g128h")
    ]
    exact = [
        _offline(PACKED_LAYOUTS[name], target, tokens, exact=True)
        for target in targets
        for name, tokens in (("u4g256", 32), ("o6g16", 16))
    ]
    uneven = [
        _offline(PACKED_LAYOUTS[name], target, tokens, even=False)
        for target in targets
        for name, tokens in (("u4g256", 64), ("i8g32", 16))
    ]
    finish = [
        Offline(
            _finish,
            {
                **{"parts_ptr": "*fp32", "out_ptr": "*fp32", "columns": "i32", "total_columns": "i32"},
                **{"split_stride": "i32"},
            },
            {"SPLITS": splits, "ACTIVATION": activation, "BLOCK": _FINISH},
            name=f"{splits} {activation}",
            aligned=frozenset({"columns", "total_columns", "split_stride"}),
        )
        for splits, activation in ((4, 0), (1, 1), (8, 2))
    ]
    return (*products, *exact, *uneven, *finish)


OFFLINE = _all_offline()
