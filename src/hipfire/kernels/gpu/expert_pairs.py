"""Products of a few tokens with their experts, pair by pair: chosen weights are read once, at memory speed.

Activations are int8 with a scale for 32 columns, as those of `gemv`. A program takes the number of its expert
from the device. This file does not know formats.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from hipfire.base.errors import InternalError
from hipfire.kernels.experts import PackedExperts
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.expert_matrix import SIZES, layout_constants, matrix_arguments, offline_layout
from hipfire.kernels.gpu.gemv import ACTIVATIONS, gate
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.prepare import prepare
from hipfire.kernels.gpu.target import TargetName, begin_launch
from hipfire.kernels.gpu.tile_codes import row_products, stack_row
from hipfire.kernels.packed import PACKED_LAYOUTS, Activation, PackedLayout

# lanes of a program, each with four units of a row, and the most quads along a row
_LANES: Final = 128
_QUADS: Final = 16
# the interpreter takes as long for a program of few rows as for one of many
_INTERPRETED_LANES: Final = 1024


@triton.jit
def _pair_gated(
    x_ptr, x_scales_ptr, x_sums_ptr, ids_ptr, codes_ptr, high_ptr, scales_ptr, minima_ptr, out_ptr,
    rows, units, groups,
    PLACES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr,
    MINIMUM: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, QUADS: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids_ptr + pair)
    # the rows of a gate, and as many of up
    lane = tl.arange(0, 2 * ROWS)
    own = tl.program_id(0) * ROWS + lane % ROWS
    valid = own < rows
    row = stack_row(expert, rows * 2, tl.where(valid, own + lane // ROWS * rows, 0))
    x_row = pair // PLACES + tl.zeros((2 * ROWS,), tl.int64)
    acc = tl.zeros((2 * ROWS, QUADS), tl.float32)
    for quad in range(0, tl.cdiv(units, 4), QUADS):
        acc += row_products(
            x_ptr, x_scales_ptr, x_sums_ptr, x_row, codes_ptr, high_ptr, scales_ptr, minima_ptr, row, valid,
            quad, units, groups, BITS=BITS, GROUP=GROUP, OFFSET=OFFSET, MINIMUM=MINIMUM,
            ROWS=2 * ROWS, QUADS=QUADS, TARGET=TARGET,
        )  # fmt: skip
    both = tl.reshape(tl.sum(acc, axis=1), (2, ROWS))
    first, up = tl.split(tl.permute(both, (1, 0)))
    out = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out_ptr + pair * rows + out, gate(first, ACTIVATION) * up, mask=out < rows)


@triton.jit
def _pair_down(
    x_ptr, x_scales_ptr, x_sums_ptr, ids_ptr, weights_ptr, codes_ptr, high_ptr, scales_ptr, minima_ptr,
    out_ptr, rows, units, groups,
    PLACES: tl.constexpr, ROOM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr,
    MINIMUM: tl.constexpr, ROWS: tl.constexpr, QUADS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    token = tl.program_id(1).to(tl.int64)
    # all places of a token at once: the same rows of every expert
    lane = tl.arange(0, ROOM * ROWS)
    place = lane // ROWS
    own = tl.program_id(0) * ROWS + lane % ROWS
    pair = token * PLACES + tl.where(place < PLACES, place, 0)
    valid = (place < PLACES) & (own < rows)
    expert = tl.load(ids_ptr + pair)
    weight = tl.load(weights_ptr + pair)
    row = stack_row(expert, rows, tl.where(valid, own, 0))
    acc = tl.zeros((ROOM * ROWS, QUADS), tl.float32)
    for quad in range(0, tl.cdiv(units, 4), QUADS):
        acc += row_products(
            x_ptr, x_scales_ptr, x_sums_ptr, pair, codes_ptr, high_ptr, scales_ptr, minima_ptr, row, valid,
            quad, units, groups, BITS=BITS, GROUP=GROUP, OFFSET=OFFSET, MINIMUM=MINIMUM,
            ROWS=ROOM * ROWS, QUADS=QUADS, TARGET=TARGET,
        )  # fmt: skip
    weighted = tl.where(valid, tl.sum(acc, axis=1) * weight, 0.0)
    total = tl.sum(tl.reshape(weighted, (ROOM, ROWS)), axis=0)
    out = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out_ptr + token * rows + out, total, mask=out < rows)


def _shares(units: int, room: int, target: TargetName) -> tuple[int, int]:
    """Return (rows, quads) of a program whose rows are taken `room` times, and which has _LANES lanes."""
    lanes = _INTERPRETED_LANES if target == "plain" else _LANES
    quads = min(triton.next_power_of_2(-(-units // 4)), _QUADS, max(1, lanes // room))
    return max(1, lanes // (room * quads)), quads


def gate_pairs(
    engine: GpuEngine,
    x: torch.Tensor,
    ids: torch.Tensor,
    experts: PackedExperts,
    out: torch.Tensor,
    activation: Activation,
) -> None:
    """Write the gated products of every pair to `out` float32 [T * places, rows / 2]."""
    form, matrix, rows = prepare(engine, x, "int8"), experts.matrix, out.shape[1]
    if form.scales is None:
        raise InternalError("activations are not in int8")
    block, quads = _shares(matrix.units, 2, engine.target)
    engine.launch(
        _pair_gated,
        (-(-rows // block), ids.numel()),
        reads=(form.values, form.scales, form.sums, ids, *matrix.tensors),
        writes=(out,),
        x_ptr=form.values.view(torch.int32),
        x_scales_ptr=form.scales,
        x_sums_ptr=form.sums,
        ids_ptr=ids,
        out_ptr=out,
        rows=rows,
        **matrix_arguments(matrix, words=True),
        constants={
            **layout_constants(matrix.layout),
            "PLACES": ids.shape[1],
            "ACTIVATION": ACTIVATIONS[activation],
            "ROWS": block,
            "QUADS": quads,
            "TARGET": engine.target,
        },
    )


def sum_pairs(
    engine: GpuEngine,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: PackedExperts,
    out: torch.Tensor,
) -> None:
    """Write the weighted sums of every token's products to `out` float32 [T, rows]."""
    form, matrix, (tokens, rows) = prepare(engine, hidden, "int8"), experts.matrix, out.shape
    if form.scales is None:
        raise InternalError("activations are not in int8")
    room = triton.next_power_of_2(ids.shape[1])
    block, quads = _shares(matrix.units, room, engine.target)
    engine.launch(
        _pair_down,
        (-(-rows // block), tokens),
        reads=(form.values, form.scales, form.sums, ids, weights, *matrix.tensors),
        writes=(out,),
        x_ptr=form.values.view(torch.int32),
        x_scales_ptr=form.scales,
        x_sums_ptr=form.sums,
        ids_ptr=ids,
        weights_ptr=weights,
        out_ptr=out,
        rows=rows,
        **matrix_arguments(matrix, words=True),
        constants={
            **layout_constants(matrix.layout),
            "PLACES": ids.shape[1],
            "ROOM": room,
            "ROWS": block,
            "QUADS": quads,
            "TARGET": engine.target,
        },
    )


_PAIR_TYPES = {
    **{"x_ptr": "*i32", "x_scales_ptr": "*fp32", "x_sums_ptr": "*fp32", "ids_ptr": "*i32"},
    **{"codes_ptr": "*i32", "out_ptr": "*fp32", **SIZES},
}


def _offline_pairs(layout: PackedLayout, places: int) -> list[Offline]:
    """The two products of one token with experts of 512 in a model of width 2048."""
    entries = []
    room = triton.next_power_of_2(places)
    block, quads = _shares(64, 2, "cuda")
    own: dict[str, object] = {"PLACES": places, "ACTIVATION": 1, "ROWS": block, "QUADS": quads}
    entries.append((_pair_gated, _PAIR_TYPES, own))
    block, quads = _shares(16, room, "cuda")
    own = {"PLACES": places, "ROOM": room, "ROWS": block, "QUADS": quads}
    entries.append((_pair_down, {**_PAIR_TYPES, "weights_ptr": "*fp32"}, own))
    found = []
    for kernel, base, constants in entries:
        types, constants = offline_layout(base, constants, layout, "*i16")
        name = f"{layout.name} {places}"
        needs = frozenset({"dot4"})
        found.append(Offline(kernel, types, constants, name=name, needs=needs, aligned=frozenset(SIZES)))
    return found


OFFLINE: tuple[Offline, ...] = (
    *(entry for layout in PACKED_LAYOUTS.values() for entry in _offline_pairs(layout, 9)),
    *_offline_pairs(PACKED_LAYOUTS["u4g256"], 8),
)
