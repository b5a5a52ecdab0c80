"""Products of one or a few rows of activations with packed weights: the matrix is read once, at memory speed.

Activations are int8 with a scale for 32 columns, and are multiplied by 4-way integer dots, so that sums
within such a unit are exact. A program is one warp that walks over blocks of rows; while it multiplies a
tile, the next one is on its way. This file does not know formats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hipfire.base.errors import InternalError
from hipfire.kernels.gpu.elementwise import gelu_tanh, silu
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.expert_matrix import layout_constants
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.prepare import Prepared
from hipfire.kernels.gpu.target import TargetName, begin_launch, dot4
from hipfire.kernels.packed import PACKED_LAYOUTS, UNIT, PackedLayout, PackedMatrix

ACTIVATIONS = {None: 0, "silu": 1, "gelu_pytorch_tanh": 2}


@triton.jit
def gate(x, ACTIVATION: tl.constexpr):
    """Return silu(x) for activation 1, gelu(x) in its tanh form for 2."""
    if ACTIVATION == 1:
        return silu(x)
    else:
        return gelu_tanh(x)


@triton.jit
def _bytes(both, high, BITS: tl.constexpr, OFFSET: tl.constexpr):
    """Return the even and the odd codes as the bytes of int32 words.

    For 8 bits `both` holds even codes and `high` odd ones; else `both` holds four bits of each, and `high`
    the upper two bits of codes of six.
    """
    if BITS == 8:
        even = both
        odd = high
    else:
        even = both & 0x0F0F0F0F
        odd = (both >> 4) & 0x0F0F0F0F
    if BITS == 6:
        high = high.to(tl.int32) & 0xFFFF
        high = (high | (high << 8)) & 0x00FF00FF
        high = (high | (high << 4)) & 0x0F0F0F0F
        even |= (high & 0x03030303) << 4
        odd |= (high & 0x0C0C0C0C) << 2
    if OFFSET != 0:
        # bytes minus the offset without a borrow between them: the top bit is lent, then taken back
        even = ((even | -2139062144) - OFFSET * 0x01010101) ^ -2139062144
        odd = ((odd | -2139062144) - OFFSET * 0x01010101) ^ -2139062144
    return even, odd


@triton.jit
def _word(codes_ptr, high_ptr, row, word: tl.constexpr, unit, mask, units, BITS: tl.constexpr):
    """Load what `_bytes` takes of word number `word` of the units; for 4 bits both are the same."""
    if BITS == 8:
        at = codes_ptr + row * (units * 8) + word * units + unit
        return tl.load(at, mask=mask, other=0), tl.load(at + 4 * units, mask=mask, other=0)
    else:
        both = tl.load(codes_ptr + row * (units * 4) + word * units + unit, mask=mask, other=0)
        if BITS == 6:
            return both, tl.load(high_ptr + row * (units * 4) + word * units + unit, mask=mask, other=0)
        else:
            return both, both


@triton.jit
def _headers(
    scales_ptr, minima_ptr, row, quad, valid, units, groups, GROUP: tl.constexpr, MINIMUM: tl.constexpr
):
    """Load scales, minima, and for groups of 16 the scales of the units' second halves.

    They are [QUADS, 1, ROWS, 1] for groups that hold the four units of a quad, else [QUADS, 1, ROWS, 4].
    """
    if GROUP >= 128:
        unit = quad * 4
    else:
        unit = quad * 4 + tl.arange(0, 4)[None, None, None, :]
    group = unit * 32 // GROUP
    mask = (unit < units) & valid
    at = row * groups + group
    scale = tl.load(scales_ptr + at, mask=mask, other=0.0)
    minimum = scale
    second = scale
    if MINIMUM:
        minimum = tl.load(minima_ptr + at, mask=mask, other=0.0)
    if GROUP == 16:
        second = tl.load(scales_ptr + at + 1, mask=mask & (group + 1 < groups), other=0.0)
    return scale, minimum, second


@triton.jit
def _fetch(
    codes_ptr, high_ptr, scales_ptr, minima_ptr, row, quad, valid, units, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, MINIMUM: tl.constexpr,
):  # fmt: skip
    """Load all of a tile of weights: rows [1, 1, ROWS, 1], four units to each quad [QUADS, 1, 1, 1].

    Quads come first, for then the compiler gives them to the lanes, and all rows of a quad to one of them.
    """
    unit = quad * 4 + tl.arange(0, 4)[None, None, None, :]
    mask = (unit < units) & valid
    a0, b0 = _word(codes_ptr, high_ptr, row, 0, unit, mask, units, BITS=BITS)
    a1, b1 = _word(codes_ptr, high_ptr, row, 1, unit, mask, units, BITS=BITS)
    a2, b2 = _word(codes_ptr, high_ptr, row, 2, unit, mask, units, BITS=BITS)
    a3, b3 = _word(codes_ptr, high_ptr, row, 3, unit, mask, units, BITS=BITS)
    scale, minimum, second = _headers(
        scales_ptr, minima_ptr, row, quad, valid, units, groups, GROUP=GROUP, MINIMUM=MINIMUM
    )
    return a0, b0, a1, b1, a2, b2, a3, b3, scale, minimum, second


@triton.jit
def _pair(x_ptr, m, word: tl.constexpr, unit, mask, units):
    at = m * (units * 8) + word * units + unit
    return tl.load(x_ptr + at, mask=mask, other=0), tl.load(x_ptr + at + units * 4, mask=mask, other=0)


@triton.jit
def _activations(
    x_ptr, x_scales_ptr, x_sums_ptr, quad, tokens, units,
    MINIMUM: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Load activations of four units to each quad: words and floats [QUADS, M, ROWS, 4].

    They are the same for all rows. Where lanes share out rows, each loads its own: the compiler would move
    what it loads once through shared memory.
    """
    m = tl.arange(0, M)[None, :, None, None]
    unit = quad * 4 + tl.arange(0, 4)[None, None, None, :] + tl.zeros((1, 1, ROWS, 1), tl.int32)
    here = (unit < units) & (m < tokens)
    e0, o0 = _pair(x_ptr, m, 0, unit, here, units)
    e1, o1 = _pair(x_ptr, m, 1, unit, here, units)
    e2, o2 = _pair(x_ptr, m, 2, unit, here, units)
    e3, o3 = _pair(x_ptr, m, 3, unit, here, units)
    scale = tl.load(x_scales_ptr + m * units + unit, mask=here, other=0.0)
    total = scale
    if MINIMUM:
        total = tl.load(x_sums_ptr + m * units + unit, mask=here, other=0.0)
    return e0, o0, e1, o1, e2, o2, e3, o3, scale, total


@triton.jit
def _word_dot(x_even, x_odd, a, b, products, BITS: tl.constexpr, OFFSET: tl.constexpr, TARGET: tl.constexpr):
    even, odd = _bytes(a, b, BITS, OFFSET)
    shape: tl.constexpr = products.shape
    products = dot4(tl.broadcast_to(even, shape), tl.broadcast_to(x_even, shape), products, TARGET)
    return dot4(tl.broadcast_to(odd, shape), tl.broadcast_to(x_odd, shape), products, TARGET)


@triton.jit
def _multiply(
    x, tile, zero,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, MINIMUM: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Return what a tile adds to the products: float32 [QUADS, M, ROWS]; `zero` int32 [QUADS, M, ROWS, 4]."""
    a0, b0, a1, b1, a2, b2, a3, b3, scale, minimum, second = tile
    e0, o0, e1, o1, e2, o2, e3, o3, x_scale, x_sum = x
    products = _word_dot(e0, o0, a0, b0, zero, BITS, OFFSET, TARGET)
    products = _word_dot(e1, o1, a1, b1, products, BITS, OFFSET, TARGET)
    if GROUP == 16:
        first = products
        products = zero
    products = _word_dot(e2, o2, a2, b2, products, BITS, OFFSET, TARGET)
    products = _word_dot(e3, o3, a3, b3, products, BITS, OFFSET, TARGET)
    if GROUP == 16:
        scaled = first.to(tl.float32) * scale.to(tl.float32) + products.to(tl.float32) * second.to(tl.float32)
        total = tl.sum(scaled * x_scale, axis=3)
    elif GROUP >= 128:
        # one scale for the quad: it is applied to the sum
        total = tl.sum(products.to(tl.float32) * x_scale, axis=3) * tl.sum(scale.to(tl.float32), axis=3)
    else:
        total = tl.sum(products.to(tl.float32) * (x_scale * scale.to(tl.float32)), axis=3)
    if MINIMUM:
        if GROUP >= 128:
            total += tl.sum(x_sum, axis=3) * tl.sum(minimum.to(tl.float32), axis=3)
        else:
            total += tl.sum(x_sum * minimum.to(tl.float32), axis=3)
    return total


@triton.jit
def _store_rows(
    out_ptr, acc, block, tokens, rows, out_stride,
    ACTIVATION: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add up what the lanes have of a block of rows, activate it, and store it."""
    total = tl.sum(acc, axis=0)
    if ACTIVATION != 0:
        first, second = tl.split(tl.permute(tl.reshape(total, (M, 2, ROWS)), (0, 2, 1)))
        total = gate(first, ACTIVATION) * second
    row = block * ROWS + tl.arange(0, ROWS)
    m = tl.arange(0, M)[:, None]
    tl.store(out_ptr + m * out_stride + row[None, :], total, mask=(m < tokens) & (row < rows)[None, :])


@triton.jit
def _gemv(
    x_ptr, x_scales_ptr, x_sums_ptr, codes_ptr, high_ptr, scales_ptr, minima_ptr, out_ptr,
    tokens, rows, units, groups, out_stride,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, MINIMUM: tl.constexpr,
    ACTIVATION: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, QUADS: tl.constexpr, SINGLE: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    # the gate's rows are followed by as many of up; a program takes both of the same number
    SIDES: tl.constexpr = 2 if ACTIVATION != 0 else 1
    TILE: tl.constexpr = ROWS * SIDES
    SHARES: tl.constexpr = 1 if SINGLE or QUADS == 32 else TILE
    lane = tl.arange(0, TILE)
    chunks = tl.cdiv(units, 4 * QUADS)
    blocks = tl.cdiv(rows, ROWS)
    programs = tl.num_programs(0)
    block = tl.program_id(0)
    chunk = block * 0
    in_block = block * ROWS + lane % ROWS
    row = (in_block + lane // ROWS * rows).to(tl.int64)[None, None, :, None]
    valid = (in_block < rows)[None, None, :, None]
    quad = tl.arange(0, QUADS)[:, None, None, None]
    tile = _fetch(
        codes_ptr, high_ptr, scales_ptr, minima_ptr, row, quad, valid, units, groups,
        BITS=BITS, GROUP=GROUP, MINIMUM=MINIMUM,
    )  # fmt: skip
    # the first weights are on their way: only now is it time to wait for the activations
    begin_launch(TARGET)
    x = _activations(x_ptr, x_scales_ptr, x_sums_ptr, quad, tokens, units, MINIMUM, M, SHARES)
    zero = tl.zeros((QUADS, M, TILE, 4), tl.int32)
    acc = tl.zeros((QUADS, M, TILE), tl.float32)
    while block < blocks:
        # neither is larger, which bounds offsets
        block = tl.minimum(tl.maximum(block, 0), blocks)
        chunk = tl.minimum(tl.maximum(chunk, 0), chunks)
        if not SINGLE:
            # before the next weights, behind which they would have to wait
            quad = chunk * QUADS + tl.arange(0, QUADS)[:, None, None, None]
            x = _activations(x_ptr, x_scales_ptr, x_sums_ptr, quad, tokens, units, MINIMUM, M, SHARES)
        # the next tile is asked for before this one is used, so that memory is never idle
        next_chunk = chunk + 1
        ends = next_chunk == chunks
        next_chunk = tl.where(ends, 0, next_chunk)
        next_block = tl.where(ends, tl.minimum(block + programs, blocks), block)
        next_in_block = next_block * ROWS + lane % ROWS
        next_row = (next_in_block + lane // ROWS * rows).to(tl.int64)[None, None, :, None]
        next_valid = (next_in_block < rows)[None, None, :, None]
        next_quad = next_chunk * QUADS + tl.arange(0, QUADS)[:, None, None, None]
        next_tile = _fetch(
            codes_ptr, high_ptr, scales_ptr, minima_ptr, next_row, next_quad, next_valid, units, groups,
            BITS=BITS, GROUP=GROUP, MINIMUM=MINIMUM,
        )  # fmt: skip
        acc += _multiply(x, tile, zero, BITS, GROUP, OFFSET, MINIMUM, TARGET)
        if ends:
            _store_rows(out_ptr, acc, block, tokens, rows, out_stride, ACTIVATION, M, ROWS)
            acc = tl.zeros((QUADS, M, TILE), tl.float32)
        tile = next_tile
        block = next_block
        chunk = next_chunk


# one-warp programs to a multiprocessor at most; more of them take turns at several blocks of rows each
_RESIDENT = 32
# the share of lanes that must have work in all tiles of a row together
_FILLED = 0.9
# the interpreter takes as long for a program of few rows as for one of many
_INTERPRETED = (64, 8)


def _tile(target: TargetName, layout: PackedLayout, sides: int, units: int) -> tuple[int, int]:
    """Return (rows of one side, quads) of a warp's tile: its lanes share out the quads, then the rows.

    Two rows of a lane read the activations once; other codes than of four bits, and small groups, leave no
    registers for a second one. Lanes without a quad in a row's last tile are lost, so few may be.
    """
    if target == "plain":
        return _INTERPRETED[0] // sides, _INTERPRETED[1]
    needed = -(-units // 4)
    filled = {quads: needed / (-(-needed // quads) * quads) for quads in (32, 16, 8)}
    quads = next((quads for quads, share in filled.items() if share >= _FILLED), 8)
    shared = quads == 32 or needed <= quads
    in_lane = 2 if layout.bits == 4 and layout.group >= 128 and shared else 1
    return max(1, in_lane * 32 // (quads * sides)), quads


def _programs(blocks: int, processors: int) -> int:
    """Return how many programs share the blocks of rows, such that all have about as many."""
    turns = -(-blocks // (processors * _RESIDENT))
    return -(-blocks // turns)


def gemv(
    engine: GpuEngine,
    x: Prepared,
    matrix: PackedMatrix,
    out: torch.Tensor,
    activation: str | None = None,
) -> None:
    """Write the product of a few rows of int8 activations with `matrix` to `out` float32 [T, N].

    With an activation the first half of the matrix's rows makes the gate and the second half what it is
    multiplied by, and N is half its rows.
    """
    tokens, rows = out.shape
    layout = matrix.layout
    if x.scales is None:
        raise InternalError("activations are not in int8")
    block, quads = _tile(engine.target, layout, 2 if activation else 1, matrix.units)
    engine.launch(
        _gemv,
        (_programs(-(-rows // block), engine.processors),),
        reads=(x.values, x.scales, x.sums, *matrix.tensors),
        writes=(out,),
        x_ptr=x.values.view(torch.int32),
        x_scales_ptr=x.scales,
        x_sums_ptr=x.sums,
        codes_ptr=matrix.codes.view(torch.int32),
        high_ptr=None if matrix.high is None else matrix.high.view(torch.int16),
        scales_ptr=matrix.scales,
        minima_ptr=matrix.minima,
        out_ptr=out,
        tokens=tokens,
        rows=rows,
        units=matrix.units,
        groups=matrix.scales.shape[1],
        out_stride=out.stride(0),
        constants={
            **layout_constants(layout),
            "ACTIVATION": ACTIVATIONS[activation],
            "M": triton.next_power_of_2(tokens),
            "ROWS": block,
            "QUADS": quads,
            "SINGLE": matrix.units <= 4 * quads,
            "TARGET": engine.target,
        },
        warps=1,
    )


_TYPES = {
    **{"x_ptr": "*i32", "x_scales_ptr": "*fp32", "x_sums_ptr": "*fp32", "codes_ptr": "*i32"},
    **{"out_ptr": "*fp32", "rows": "i32", "units": "i32", "groups": "i32", "out_stride": "i32"},
}


def _offline(layout: PackedLayout, tokens: int, cols: int, activation: int = 0) -> Offline:
    rows, quads = _tile("cuda", layout, 2 if activation else 1, cols // UNIT)
    header = "*fp16" if layout.half else "*fp32"
    types = {**_TYPES, "scales_ptr": header}
    constants: dict[str, object] = {
        **layout_constants(layout),
        "ACTIVATION": activation,
        "M": tokens,
        "ROWS": rows,
        "QUADS": quads,
        "SINGLE": cols <= 4 * UNIT * quads,
    }
    for name, kind, there in (
        ("high_ptr", "*i16", layout.bits == 6),
        ("minima_ptr", header, layout.minimum),
        ("tokens", "i32", tokens > 1),
    ):
        if there:
            types[name] = kind
        else:
            constants[name] = 1 if name == "tokens" else None
    return Offline(
        _gemv,
        types,
        constants,
        1,
        name=f"{layout.name} {tokens} {cols}{' gated' if activation else ''}",
        needs=frozenset({"dot4"}),
        aligned=frozenset({"rows", "units", "groups", "out_stride"}),
    )


# rows of one tile and of several, and rows that fill lanes only in narrow ones
OFFLINE: tuple[Offline, ...] = (
    *(_offline(layout, 1, cols) for layout in PACKED_LAYOUTS.values() for cols in (4096, 12288)),
    *(_offline(PACKED_LAYOUTS[name], 1, cols) for name in ("u4g256", "u4g128h") for cols in (2048, 5120)),
    *(_offline(PACKED_LAYOUTS[name], 1, 640) for name in ("u4g32", "o6g16", "i8g32")),
    *(_offline(PACKED_LAYOUTS[name], 2, 5120) for name in ("u4g256", "u4g128h", "u4g32", "o6g16", "i8g32")),
    *(
        _offline(PACKED_LAYOUTS[name], tokens, cols, 1)
        for name in ("u4g256", "u4g128h")
        for tokens, cols in ((1, 4096), (2, 4096), (1, 5120))
    ),
)
