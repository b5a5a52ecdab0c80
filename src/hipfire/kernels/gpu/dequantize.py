"""Packed weights decoded into a matrix of floats: for library products of long prompts, and for embeddings.

This file does not know formats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.target import begin_launch
from hipfire.kernels.packed import PACKED_LAYOUTS, PackedLayout, PackedMatrix

_COLUMNS = 1024
_ROWS = 4


@triton.jit
def _dequantize(
    codes_ptr, high_ptr, scales_ptr, minima_ptr, ids_ptr, out_ptr, rows, cols, units, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, MINIMUM: tl.constexpr,
    SELECT: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    out_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = out_row < rows
    if SELECT:
        row = tl.load(ids_ptr + out_row, mask=valid, other=0).to(tl.int64)
    else:
        row = out_row
    # eight columns to a word of codes
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = valid[:, None] & (word * 8 < cols)[None, :]
    row = row[:, None]
    place = (word % 4 * units + word // 4)[None, :]
    if BITS == 8:
        even = tl.load(codes_ptr + row * (units * 8) + place, mask=mask, other=0)
        odd = tl.load(codes_ptr + row * (units * 8) + units * 4 + place, mask=mask, other=0)
    else:
        both = tl.load(codes_ptr + row * (units * 4) + place, mask=mask, other=0)
        even = both & 0x0F0F0F0F
        odd = (both >> 4) & 0x0F0F0F0F
    if BITS == 6:
        high = tl.load(high_ptr + row * (units * 4) + place, mask=mask, other=0).to(tl.int32) & 0xFFFF
        high = (high | (high << 8)) & 0x00FF00FF
        high = (high | (high << 4)) & 0x0F0F0F0F
        even |= (high & 0x03030303) << 4
        odd |= (high & 0x0C0C0C0C) << 2
    group = row * groups + (word * 8 // GROUP)[None, :]
    scale = tl.load(scales_ptr + group, mask=mask, other=0.0).to(tl.float32)[:, :, None]
    shift = (tl.arange(0, 4) * 8)[None, None, :]
    if BITS == 8:
        even = (even[:, :, None] << (24 - shift)) >> 24
        odd = (odd[:, :, None] << (24 - shift)) >> 24
    else:
        even = ((even[:, :, None] >> shift) & 0xFF) - OFFSET
        odd = ((odd[:, :, None] >> shift) & 0xFF) - OFFSET
    even = even.to(tl.float32) * scale
    odd = odd.to(tl.float32) * scale
    if MINIMUM:
        low = tl.load(minima_ptr + group, mask=mask, other=0.0).to(tl.float32)[:, :, None]
        even += low
        odd += low
    values = tl.reshape(tl.join(even, odd), (ROWS, WORDS * 8))
    column = tl.program_id(1) * (WORDS * 8) + tl.arange(0, WORDS * 8)
    out_at = out_ptr + out_row[:, None] * cols + column[None, :]
    values = values.to(out_ptr.dtype.element_ty)
    tl.store(out_at, values, mask=valid[:, None] & (column < cols)[None, :])


def dequantize(
    engine: GpuEngine, matrix: PackedMatrix, out: torch.Tensor, ids: torch.Tensor | None = None
) -> None:
    """Decode `matrix`, or its rows `ids` int64 [T], into a contiguous `out` of any float type."""
    rows = matrix.rows if ids is None else ids.shape[0]
    layout = matrix.layout
    high, minima = matrix.high, matrix.minima
    block = 1 if ids is not None else _ROWS
    engine.launch(
        _dequantize,
        (-(-rows // block), -(-matrix.cols // _COLUMNS)),
        reads=(*matrix.tensors, *(() if ids is None else (ids,))),
        writes=(out,),
        codes_ptr=matrix.codes.view(torch.int32),
        high_ptr=None if high is None else high.view(torch.int16),
        scales_ptr=matrix.scales,
        minima_ptr=minima,
        ids_ptr=ids,
        out_ptr=out,
        rows=rows,
        cols=matrix.cols,
        units=matrix.units,
        groups=matrix.scales.shape[1],
        constants={
            "BITS": layout.bits,
            "GROUP": layout.group,
            "OFFSET": layout.offset,
            "MINIMUM": layout.minimum,
            "SELECT": ids is not None,
            "ROWS": block,
            "WORDS": _COLUMNS // 8,
            "TARGET": engine.target,
        },
    )


def _offline(layout: PackedLayout, out: str, *, select: bool = False) -> Offline:
    header = "*fp16" if layout.half else "*fp32"
    types = {
        **{"codes_ptr": "*i32", "scales_ptr": header, "out_ptr": out, "rows": "i32", "cols": "i32"},
        **{"units": "i32", "groups": "i32"},
    }
    constants: dict[str, object] = {
        "BITS": layout.bits,
        "GROUP": layout.group,
        "OFFSET": layout.offset,
        "MINIMUM": layout.minimum,
        "SELECT": select,
        "ROWS": 1 if select else _ROWS,
        "WORDS": _COLUMNS // 8,
    }
    for name, kind, there in (
        ("high_ptr", "*i16", layout.bits == 6),
        ("minima_ptr", header, layout.minimum),
        ("ids_ptr", "*i64", select),
    ):
        if there:
            types[name] = kind
        else:
            constants[name] = None
    aligned = frozenset({"rows", "cols", "units", "groups"})
    name = f"{layout.name}{' rows' if select else ''}"
    return Offline(_dequantize, types, constants, name=name, aligned=aligned)


OFFLINE: tuple[Offline, ...] = tuple(
    _offline(layout, "*fp32" if select else "*bf16", select=select)
    for layout in PACKED_LAYOUTS.values()
    for select in (False, True)
)
