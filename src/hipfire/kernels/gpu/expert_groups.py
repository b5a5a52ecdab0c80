"""Products of tiles of tokens with one expert each, on matrix units, and the sums of tokens' experts.

Pairs come in order of their experts, and programs take their tile from the device. Weights are decoded in
the tile. This file does not know formats.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from hipfire.kernels.experts import PackedExperts
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.expert_matrix import SIZES, layout_constants, matrix_arguments, offline_layout
from hipfire.kernels.gpu.expert_sort import SMALLEST_TILE, SortedPairs
from hipfire.kernels.gpu.gemv import ACTIVATIONS, gate
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.prepare import prepare
from hipfire.kernels.gpu.target import TargetName, begin_launch
from hipfire.kernels.gpu.tile_codes import Tile, add_step, stack_row, step_bytes
from hipfire.kernels.packed import PACKED_LAYOUTS, Activation, PackedLayout

_SUM: Final = 1024


@triton.jit
def _grouped(
    x_ptr, x_sums_ptr, order_ptr, tiles_ptr, codes_ptr, high_ptr, scales_ptr, minima_ptr, out_ptr,
    rows, units, groups,
    SHARED_BY: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr,
    MINIMUM: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    STEP: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    tile = tiles_ptr + tl.program_id(1).to(tl.int64) * 4
    count = tl.load(tile + 2)
    if count == 0:
        return
    expert = tl.load(tile)
    first = tl.load(tile + 1)
    lane = tl.arange(0, TOKENS)
    shown = (lane < count)[None, :]
    pair = tl.load(order_ptr + first + lane, mask=lane < count, other=0).to(tl.int64)[None, :]
    # a row of activations is shared by so many pairs
    x_row = pair // SHARED_BY
    # with an activation a program takes rows of the gate and as many of up
    SIDES: tl.constexpr = 2 if ACTIVATION != 0 else 1
    OWN: tl.constexpr = ROWS // SIDES
    item = tl.arange(0, ROWS)
    own = tl.program_id(0) * OWN + item % OWN
    valid = (own < rows)[:, None]
    row = stack_row(expert, rows * SIDES, tl.where(own < rows, own + item // OWN * rows, 0))[:, None]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in range(0, tl.cdiv(units * 32, STEP)):
        byte, column, inside = step_bytes(step, units, STEP, EVEN)
        x_at = x_ptr + x_row * (units * 32) + byte[:, None]
        x_mask = inside[:, None] & shown
        x_even = tl.load(x_at, mask=x_mask, other=0.0)
        x_odd = tl.load(x_at + units * 16, mask=x_mask, other=0.0)
        acc = add_step(
            acc, x_even, x_odd, x_sums_ptr, x_row, shown, codes_ptr, high_ptr, scales_ptr, minima_ptr, row,
            valid, byte, column, inside, step, units, groups,
            BITS, GROUP, OFFSET, MINIMUM, STEP, WHOLE, TARGET,
        )  # fmt: skip
    if ACTIVATION != 0:
        first, up = tl.split(tl.permute(tl.reshape(acc, (2, OWN, TOKENS)), (1, 2, 0)))
        acc = gate(first, ACTIVATION) * up
    out = tl.program_id(0) * OWN + tl.arange(0, OWN)[:, None]
    tl.store(out_ptr + pair * rows + out, acc.to(out_ptr.dtype.element_ty), mask=(out < rows) & shown)


@triton.jit
def _sum_places(
    products_ptr, weights_ptr, out_ptr, rows,
    PLACES: tl.constexpr, BLOCK: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < rows
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(PLACES):
        pair = token * PLACES + place
        value = tl.load(products_ptr + pair * rows + column, mask=mask, other=0.0).to(tl.float32)
        total += value * tl.load(weights_ptr + pair)
    tl.store(out_ptr + token * rows + column, total, mask=mask)


def _tile(target: TargetName, layout: PackedLayout, columns: int, tokens: int, *, exact: bool) -> Tile:
    """Choose by the machine, the layout, the matrix's columns and the tokens of a tile."""
    whole = layout.bits == 4 and layout.group >= 128 and not exact
    rows, step, warps, stages = 64, 128 if whole else 64, 4, 1
    if target == "cuda":
        if exact:
            rows, step = 32, 32
        elif tokens == 64:
            rows, warps, stages = 128, 8, 3
        else:
            stages = 3
    elif target == "hip":
        # matrix units of RDNA hold all of their operands in registers
        rows, step, warps = (32, 32, 4) if exact else (64, 32, 8)
    return Tile(rows, tokens, step, whole, columns % max(step, 128) == 0, warps, stages)


def tile_tokens(pairs: int, experts: int, *, exact: bool) -> int:
    """Return how many tokens of an expert a tile takes, by how many an expert has in the mean."""
    mean = pairs / experts
    return SMALLEST_TILE if mean <= 16 else 32 if mean <= 48 or exact else 64


def multiply_tiles(
    engine: GpuEngine,
    x: torch.Tensor,
    pairs: SortedPairs,
    experts: PackedExperts,
    out: torch.Tensor,
    shared_by: int,
    tokens: int,
    activation: Activation | None,
) -> None:
    """Write the products of all pairs to `out` [pairs, N]; `shared_by` pairs in a row have one row of x."""
    form = prepare(engine, x, "f32" if engine.exact else "bf16")
    matrix, rows = experts.matrix, out.shape[1]
    tile = _tile(engine.target, matrix.layout, matrix.cols, tokens, exact=engine.exact)
    block = tile.rows if activation is None else tile.rows // 2
    engine.launch(
        _grouped,
        (-(-rows // block), pairs.tiles.shape[0]),
        reads=(form.values, form.sums, pairs.order, pairs.tiles, *matrix.tensors),
        writes=(out,),
        x_ptr=form.values,
        x_sums_ptr=form.sums,
        order_ptr=pairs.order,
        tiles_ptr=pairs.tiles,
        out_ptr=out,
        rows=rows,
        **matrix_arguments(matrix, words=False),
        constants={
            **layout_constants(matrix.layout),
            **tile.constants(),
            "SHARED_BY": shared_by,
            "ACTIVATION": ACTIVATIONS[activation],
            "TARGET": engine.target,
        },
        warps=tile.warps,
        stages=tile.stages,
    )


def sum_places(engine: GpuEngine, products: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Write every token's weighted sum of its places' products [T * places, N] to `out` float32 [T, N]."""
    tokens, rows = out.shape
    engine.launch(
        _sum_places,
        (tokens, -(-rows // _SUM)),
        reads=(products, weights),
        writes=(out,),
        products_ptr=products,
        weights_ptr=weights,
        out_ptr=out,
        rows=rows,
        constants={"PLACES": weights.shape[1], "BLOCK": _SUM, "TARGET": engine.target},
    )


_GROUPED_TYPES = {
    **{"x_sums_ptr": "*fp32", "order_ptr": "*i32", "tiles_ptr": "*i32", "codes_ptr": "*u8", **SIZES},
}


def _offline_grouped(
    layout: PackedLayout, target: TargetName, tokens: int, *, gated: bool, exact: bool = False
) -> Offline:
    tile = _tile(target, layout, 2048 if gated else 512, tokens, exact=exact)
    float_type = "*fp32" if exact else "*bf16"
    base = {**_GROUPED_TYPES, "x_ptr": float_type, "out_ptr": float_type if tokens > 16 else "*fp32"}
    own = {**tile.constants(), "SHARED_BY": 9 if gated else 1, "ACTIVATION": int(gated)}
    types, constants = offline_layout(base, own, layout, "*u8")
    kind = "gated" if gated else "down"
    return Offline(
        _grouped,
        types,
        constants,
        tile.warps,
        tile.stages,
        name=f"{layout.name} {kind} {tokens}{' exact' if exact else ''} {target}",
        needs=frozenset() if exact else frozenset({"matrix"}),
        aligned=frozenset(SIZES),
        on=frozenset({target}),
    )


def _all_offline() -> tuple[Offline, ...]:
    targets: tuple[TargetName, ...] = ("cuda", "hip")
    grouped = [
        _offline_grouped(layout, target, tokens, gated=gated)
        for target in targets
        for layout in PACKED_LAYOUTS.values()
        for tokens in (16, 32, 64)
        for gated in (True, False)
        if tokens == 64 or layout.name == "u4g256"
    ]
    exact = [
        _offline_grouped(PACKED_LAYOUTS[name], target, 32, gated=True, exact=True)
        for target in targets
        for name in ("u4g256", "o6g16")
    ]
    types = {"weights_ptr": "*fp32", "out_ptr": "*fp32", "rows": "i32"}
    sums = [
        Offline(
            _sum_places,
            {**types, "products_ptr": kind},
            {"PLACES": 9, "BLOCK": _SUM},
            name=kind[1:],
            aligned=frozenset({"rows"}),
        )
        for kind in ("*fp32", "*bf16")
    ]
    return (*grouped, *exact, *sums)


OFFLINE = _all_offline()
