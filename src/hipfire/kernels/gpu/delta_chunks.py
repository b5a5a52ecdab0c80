"""The recurrence of gated DeltaNet for prompts: chunks of tokens, on matrix units.

Within a chunk of a head let G be the running sum of the log decays, b the write strengths, and A the strictly
lower triangle of b_i exp(G_i - G_j) k_i.k_j. What token i writes is then

    u = (1 + A)^-1 (b v) - (1 + A)^-1 (b exp(G) k) S

with the state S before the chunk. One kernel makes the two products of the inverse for all chunks at once;
another goes through the chunks of a sequence with the state, and keeps what each begins with; a third lets
queries see that and what their chunk wrote, and normalizes. A chunk begins where its piece of a sequence
does, so no chunk mixes two. This file does not know the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from hipfire.base.errors import InternalError
from hipfire.kernels.gpu.delta_input import DeltaCall, DeltaSizes, key_head, move_tails, padded
from hipfire.kernels.gpu.delta_step import gated_norm, log_decay
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.target import INTERPRETED, TargetName, begin_launch, matmul

# products of float32 on matrix units that keep sixteen bits of each factor; the interpreter has no such thing
_PRECISION = tl.constexpr("ieee" if INTERPRETED else "bf16x3")


@triton.jit
def _find_piece(pieces_ptr, pieces, chunk, CHUNK: tl.constexpr):
    """Return first token and length of the piece that a chunk belongs to, and the chunk's place in it.

    The chunks of piece i, which begins at token f, are those from f // CHUNK + i on. There may be numbers
    between pieces that no chunk has: their place is behind the piece.
    """
    index = chunk * 0 - 1
    line = tl.arange(0, 64)
    for start in range(0, pieces, 64):
        there = start + line < pieces
        first = tl.load(pieces_ptr + 2 * (start + line), mask=there, other=0)
        index += tl.sum((there & (first // CHUNK + start + line <= chunk)).to(tl.int32))
    first = tl.load(pieces_ptr + 2 * index)
    count = tl.load(pieces_ptr + 2 * index + 1)
    return first, count, (chunk - first // CHUNK - index) * CHUNK


@triton.jit
def _join(inverse, lower, row, column, SIZE: tl.constexpr):
    """Return the inverse of blocks of 2 SIZE, of one that is right for blocks of SIZE."""
    joined = (row // (2 * SIZE) == column // (2 * SIZE)) & (row // SIZE != column // SIZE)
    below = tl.dot(inverse, tl.where(joined, lower, 0.0), input_precision=_PRECISION)
    return inverse - tl.dot(below, inverse, input_precision=_PRECISION)


@triton.jit
def unit_inverse(lower, CHUNK: tl.constexpr):
    """Return the inverse of 1 + `lower`, float32 [CHUNK, CHUNK] and zero on and above the diagonal.

    Blocks of 16 on the diagonal are solved row by row, all at a time. Pairs of blocks are then joined, and
    pairs of pairs: the inverse of [[X, 0], [L, Y]] has -Y^-1 L X^-1 below the inverses of X and Y.
    """
    BLOCKS: tl.constexpr = CHUNK // 16
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    near = tl.where(row // 16 == column // 16, lower, 0.0)
    blocks = tl.sum(tl.reshape(near, (BLOCKS, 16, BLOCKS, 16)), 2)
    line = tl.arange(0, 16)
    place = line[None, :, None]
    inverse = tl.where(place == line[None, None, :], 1.0, 0.0) + blocks * 0.0
    for at in tl.static_range(1, 16):
        factors = tl.sum(tl.where(place == at, blocks, 0.0), 1)
        change = tl.sum(factors[:, :, None] * inverse, 1)
        inverse -= tl.where(place == at, change[:, None, :], 0.0)
    wide = tl.broadcast_to(inverse[:, :, None, :], (BLOCKS, 16, BLOCKS, 16))
    whole = tl.where(row // 16 == column // 16, tl.reshape(wide, (CHUNK, CHUNK)), 0.0)
    whole = _join(whole, lower, row, column, 16)
    if CHUNK > 32:
        whole = _join(whole, lower, row, column, 32)
    return whole


@triton.jit
def delta_chunk_kernel(
    x_ptr, b_ptr, a_ptr, factor_ptr, bias_ptr, pieces_ptr, keys_ptr, decays_ptr,
    pieces, b_stride, a_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr, CHUNK: tl.constexpr, TILED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    CHANNELS: tl.constexpr = 2 * KEYS * DK + VALUES * DV
    head = tl.program_id(0)
    first, count, skipped = _find_piece(pieces_ptr, pieces, tl.program_id(1), CHUNK)
    if skipped < count:
        line = tl.arange(0, CHUNK)
        shown = skipped + line < count
        token = first.to(tl.int64) + skipped + line
        a = tl.load(a_ptr + token * a_stride + head, mask=shown, other=0.0).to(tl.float32)
        beta = tl.load(b_ptr + token * b_stride + head, mask=shown, other=0.0).to(tl.float32)
        beta = tl.where(shown, 1.0 / (1.0 + tl.exp(-beta)), 0.0)
        decay = log_decay(a, tl.load(factor_ptr + head), tl.load(bias_ptr + head))
        decay = tl.cumsum(tl.where(shown, decay, 0.0), 0)
        tl.store(decays_ptr + token * VALUES + head, decay, mask=shown)
        key = tl.arange(0, DK_PADDED)
        mask = shown[:, None] & (key < DK)[None, :]
        at = x_ptr + token[:, None] * CHANNELS
        k = tl.load(
            at + (KEYS + key_head(head, KEYS, VALUES, TILED)) * DK + key[None, :], mask=mask, other=0.0
        )
        lower = line[:, None] > line[None, :]
        same = matmul(k, tl.trans(k), tl.zeros((CHUNK, CHUNK), tl.float32))
        same *= beta[:, None] * tl.exp(tl.where(lower, decay[:, None] - decay[None, :], float("-inf")))
        inverse = unit_inverse(same, CHUNK) * beta[None, :]
        value = tl.arange(0, DV_PADDED)
        v_mask = shown[:, None] & (value < DV)[None, :]
        v_at = at + 2 * KEYS * DK + head * DV + value[None, :]
        v = tl.load(v_at, mask=v_mask, other=0.0)
        v = matmul(inverse.to(v.dtype), v, tl.zeros((CHUNK, DV_PADDED), tl.float32))
        tl.store(v_at, v.to(x_ptr.dtype.element_ty), mask=v_mask)
        inverse = (inverse * tl.exp(decay)[None, :]).to(k.dtype)
        written = matmul(inverse, k, tl.zeros((CHUNK, DK_PADDED), tl.float32))
        k_at = keys_ptr + (token[:, None] * VALUES + head) * DK + key[None, :]
        tl.store(k_at, written.to(keys_ptr.dtype.element_ty), mask=mask)


@triton.jit
def delta_scan_kernel(
    x_ptr, keys_ptr, decays_ptr, states_ptr, mixed_ptr, tail_ptr, matrix_ptr, rows_ptr, pieces_ptr,
    mixed_stride, tail_stride, matrix_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PADDED: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, TILED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    CHANNELS: tl.constexpr = 2 * KEYS * DK + VALUES * DV
    head, part, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(pieces_ptr + 2 * piece).to(tl.int64)
    count = tl.load(pieces_ptr + 2 * piece + 1)
    slot = tl.load(rows_ptr + 2 * first)
    position = tl.load(rows_ptr + 2 * first + 1)
    key = tl.arange(0, DK_PADDED)
    value = part * BLOCK + tl.arange(0, BLOCK)
    is_key, is_value = key < DK, value < DV
    inside = is_key[:, None] & is_value[None, :]
    place = tl.cast(head, tl.int64) * (DK * DV) + key[:, None] * DV + value[None, :]
    state = matrix_ptr + slot * matrix_stride + place
    matrix = tl.load(state, mask=inside & (position > 0), other=0.0)
    chunk = first // CHUNK + piece
    line = tl.arange(0, CHUNK)
    for start in range(0, count, CHUNK):
        shown = start + line < count
        token = first + start + line
        mask = shown[:, None] & is_key[None, :]
        v_mask = shown[:, None] & is_value[None, :]
        at = x_ptr + token[:, None] * CHANNELS
        k = tl.load(
            at + (KEYS + key_head(head, KEYS, VALUES, TILED)) * DK + key[None, :], mask=mask, other=0.0
        )
        k_at = keys_ptr + (token[:, None] * VALUES + head) * DK + key[None, :]
        written = tl.load(k_at, mask=mask, other=0.0)
        v_at = at + 2 * KEYS * DK + head * DV + value[None, :]
        change = tl.load(v_at, mask=v_mask, other=0.0).to(tl.float32)
        decay = tl.load(decays_ptr + token * VALUES + head, mask=shown, other=0.0)
        last = first + tl.minimum(start + CHUNK, count) - 1
        whole = tl.load(decays_ptr + last * VALUES + head)
        before = matrix.to(k.dtype)
        tl.store(states_ptr + chunk * (VALUES * DK * DV) + place, before, mask=inside)
        chunk += 1
        change -= matmul(written, before, tl.zeros((CHUNK, BLOCK), tl.float32))
        tl.store(v_at, change.to(k.dtype), mask=v_mask)
        change *= tl.exp(whole - decay)[:, None]
        matrix = matmul(tl.trans(k), change.to(k.dtype), matrix * tl.exp(whole))
    tl.store(state, matrix, mask=inside)
    move_tails(
        mixed_ptr, tail_ptr + slot * tail_stride, first, count, position, head, value, mixed_stride,
        KEYS, VALUES, DK, DV, DK_PADDED, WIDTH, TILED,
    )  # fmt: skip


@triton.jit
def delta_output_kernel(
    x_ptr, decays_ptr, states_ptr, z_ptr, weight_ptr, pieces_ptr, out_ptr, pieces, z_stride, eps,
    KEYS: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr, CHUNK: tl.constexpr, TILED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    CHANNELS: tl.constexpr = 2 * KEYS * DK + VALUES * DV
    head, chunk = tl.program_id(0), tl.program_id(1)
    first, count, skipped = _find_piece(pieces_ptr, pieces, chunk, CHUNK)
    if skipped < count:
        line = tl.arange(0, CHUNK)
        shown = skipped + line < count
        token = first.to(tl.int64) + skipped + line
        key = tl.arange(0, DK_PADDED)
        value = tl.arange(0, DV_PADDED)
        is_key, is_value = key < DK, value < DV
        mask = shown[:, None] & is_key[None, :]
        at = x_ptr + token[:, None] * CHANNELS
        q_at = at + key_head(head, KEYS, VALUES, TILED) * DK + key[None, :]
        q = tl.load(q_at, mask=mask, other=0.0)
        k = tl.load(q_at + KEYS * DK, mask=mask, other=0.0)
        decay = tl.load(decays_ptr + token * VALUES + head, mask=shown, other=0.0)
        scores = matmul(q, tl.trans(k), tl.zeros((CHUNK, CHUNK), tl.float32))
        seen = (line[:, None] >= line[None, :]) & shown[:, None]
        scores *= tl.exp(tl.where(seen, decay[:, None] - decay[None, :], float("-inf")))
        place = (tl.cast(chunk, tl.int64) * VALUES + head) * (DK * DV)
        inside = is_key[:, None] & is_value[None, :]
        before = tl.load(states_ptr + place + key[:, None] * DV + value[None, :], mask=inside, other=0.0)
        out = matmul(q, before, tl.zeros((CHUNK, DV_PADDED), tl.float32)) * tl.exp(decay)[:, None]
        v_mask = shown[:, None] & is_value[None, :]
        column = head * DV + value[None, :]
        change = tl.load(at + 2 * KEYS * DK + column, mask=v_mask, other=0.0)
        out = matmul(scores.to(change.dtype), change, out)
        z = tl.load(z_ptr + token[:, None] * z_stride + column, mask=v_mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + value, mask=is_value, other=0.0)
        out = gated_norm(out, z, weight, eps, DV).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token[:, None] * (VALUES * DV) + column, out, mask=v_mask)


def delta_chunks(engine: GpuEngine, call: DeltaCall, x: torch.Tensor, out: torch.Tensor) -> None:
    """Write to `out` [T, Hv * Dv] what x [T, C] of `delta_input` makes of the states, and move them on.

    Values in `x` are overwritten. InternalError without pieces.
    """
    if call.pieces is None:
        raise InternalError("chunks are made of pieces")
    sizes, pieces = call.sizes, call.pieces
    config = _config(engine.target, sizes)
    # more chunks than there can be: pieces that end within a chunk leave numbers out
    grid = (sizes.values, call.tokens // config.chunk + pieces.shape[0])
    written = engine.empty("delta_keys", (call.tokens, sizes.values * sizes.dk), x.dtype)
    decays = engine.empty("delta_decays", (call.tokens, sizes.values))
    states = engine.empty("delta_states", (grid[1], sizes.values, sizes.dk, sizes.dv), x.dtype)
    engine.launch(
        delta_chunk_kernel,
        grid,
        reads=(x, call.b, call.a, call.decay, call.dt_bias, pieces),
        writes=(x, written, decays),
        x_ptr=x,
        b_ptr=call.b,
        a_ptr=call.a,
        factor_ptr=call.decay,
        bias_ptr=call.dt_bias,
        pieces_ptr=pieces,
        keys_ptr=written,
        decays_ptr=decays,
        pieces=pieces.shape[0],
        b_stride=call.b.stride(0),
        a_stride=call.a.stride(0),
        constants={**config.chunk_constants(), "TARGET": engine.target},
        warps=config.chunk_warps,
    )
    _scan(engine, call, config, x, written, decays, states)
    engine.launch(
        delta_output_kernel,
        grid,
        reads=(x, decays, states, call.z, call.norm_weight, pieces),
        writes=(out,),
        x_ptr=x,
        decays_ptr=decays,
        states_ptr=states,
        z_ptr=call.z,
        weight_ptr=call.norm_weight,
        pieces_ptr=pieces,
        out_ptr=out,
        pieces=pieces.shape[0],
        z_stride=call.z.stride(0),
        eps=float(call.eps),
        constants={**config.chunk_constants(), "TARGET": engine.target},
        warps=config.output_warps,
    )


def _scan(
    engine: GpuEngine,
    call: DeltaCall,
    config: _Config,
    x: torch.Tensor,
    written: torch.Tensor,
    decays: torch.Tensor,
    states: torch.Tensor,
) -> None:
    """Go through the chunks of every piece, and leave in `states` what each begins with."""
    assert call.pieces is not None
    sizes = config.sizes
    engine.launch(
        delta_scan_kernel,
        (sizes.values, -(-sizes.dv // config.block), call.pieces.shape[0]),
        reads=(x, written, decays, call.mixed, call.tail, call.matrix, call.rows, call.pieces),
        writes=(x, states, call.tail, call.matrix),
        x_ptr=x,
        keys_ptr=written,
        decays_ptr=decays,
        states_ptr=states,
        mixed_ptr=call.mixed,
        tail_ptr=call.tail,
        matrix_ptr=call.matrix,
        rows_ptr=call.rows,
        pieces_ptr=call.pieces,
        mixed_stride=call.mixed.stride(0),
        tail_stride=call.tail.stride(0),
        matrix_stride=call.matrix.stride(0),
        constants={**config.scan_constants(), "TARGET": engine.target},
        warps=config.scan_warps,
        stages=config.scan_stages,
    )


@dataclass(frozen=True)
class _Config:
    """How the kernels are started: a layer's sizes, tokens of a chunk, value columns of a scan."""

    sizes: DeltaSizes
    chunk: int
    block: int
    chunk_warps: int
    output_warps: int
    scan_warps: int
    scan_stages: int

    def chunk_constants(self) -> dict[str, Any]:
        """Return the compile-time parameters of `delta_chunk_kernel` and `delta_output_kernel`."""
        own = {"DV_PADDED": padded(self.sizes.dv), "CHUNK": self.chunk, "TILED": self.sizes.tiled}
        return {**self.sizes.constants(), **own}

    def scan_constants(self) -> dict[str, Any]:
        """Return the compile-time parameters of `delta_scan_kernel`."""
        own = {"CHUNK": self.chunk, "BLOCK": self.block, "TILED": self.sizes.tiled}
        return {**self.sizes.constants(), "WIDTH": self.sizes.width, **own}


def _config(target: TargetName, sizes: DeltaSizes) -> _Config:
    """Choose by the machine; matrix units of RDNA hold all of their operands in registers."""
    columns = padded(sizes.dv)
    if target == "hip":
        block = min(columns, 16)
        return _Config(sizes, 32, block, chunk_warps=8, output_warps=8, scan_warps=8, scan_stages=1)
    block = min(columns, 32 if target == "cuda" else 128)
    return _Config(sizes, 64, block, chunk_warps=4, output_warps=4, scan_warps=4, scan_stages=2)


_TYPES = {
    **{"x_ptr": "*bf16", "b_ptr": "*bf16", "a_ptr": "*bf16", "factor_ptr": "*fp32", "bias_ptr": "*fp32"},
    **{"pieces_ptr": "*i32", "keys_ptr": "*bf16", "decays_ptr": "*fp32", "states_ptr": "*bf16"},
    **{"mixed_ptr": "*bf16", "tail_ptr": "*fp32", "matrix_ptr": "*fp32", "rows_ptr": "*i64"},
    **{"z_ptr": "*bf16", "weight_ptr": "*fp32", "out_ptr": "*bf16", "eps": "fp32"},
}


def _entry(name: str, backend: TargetName, kernel: Any, constants: dict[str, Any], **options: Any) -> Offline:
    fixed = (*constants, "TARGET")
    names = [each for each in kernel.arg_names if each not in fixed]
    arguments = {each: options["types"].get(each, _TYPES.get(each, "i32")) for each in names}
    return Offline(
        kernel,
        arguments,
        constants,
        options["warps"],
        options.get("stages", 1),
        name=f"{name} {backend}",
        needs=frozenset({"matrix"}),
        aligned=frozenset({"z_stride", "mixed_stride", "tail_stride", "matrix_stride"} & set(names)),
        unaligned=frozenset({"a_ptr", "b_ptr"} & set(names)),
        on=frozenset({backend}),
    )


def _offline(name: str, backend: TargetName, values: int, types: dict[str, str]) -> tuple[Offline, ...]:
    """Return the entries of the three kernels for heads of 128 and 16 key heads."""
    config = _config(backend, DeltaSizes(16, values, 128, 128))
    chunk, scan = config.chunk_constants(), config.scan_constants()
    stages = {"warps": config.scan_warps, "stages": config.scan_stages}
    return (
        _entry(name, backend, delta_chunk_kernel, chunk, types=types, warps=config.chunk_warps),
        _entry(name, backend, delta_scan_kernel, scan, types=types, **stages),
        _entry(name, backend, delta_output_kernel, chunk, types=types, warps=config.output_warps),
    )


_FLOATS = dict.fromkeys(("a_ptr", "b_ptr", "mixed_ptr", "z_ptr", "out_ptr"), "*fp32")
OFFLINE: tuple[Offline, ...] = (
    *_offline("27b", "cuda", 48, {}),
    *_offline("27b short", "cuda", 48, _FLOATS),
    *_offline("a3b", "cuda", 32, {}),
    *_offline("27b", "hip", 48, {}),
    *_offline("27b short", "hip", 48, _FLOATS),
)
