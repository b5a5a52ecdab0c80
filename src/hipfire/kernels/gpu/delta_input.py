"""What happens to the inputs of a gated DeltaNet layer before its recurrence: convolution, SiLU, norms.

Each program takes one head of queries, keys or values of some tokens. A token finds those before it in the
step where they are of its sequence, and in the layer's tail where not: the last inputs of each channel before
the step. This file does not know the recurrence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.target import begin_launch

_TOKENS = 16
# as the norm of queries and keys has it
_L2_EPS = tl.constexpr(1e-6)


@triton.jit
def _earlier(rows_ptr, token, slot, position, BACK: tl.constexpr, mask):
    """Tell for each token whether the one BACK places before it is of its sequence."""
    before = token - BACK
    there = mask & (before >= 0)
    other = tl.load(rows_ptr + 2 * before, mask=there, other=-1)
    place = tl.load(rows_ptr + 2 * before + 1, mask=there, other=-1)
    return there & (other == slot) & (place == position - BACK)


@triton.jit
def delta_input_kernel(
    mixed_ptr, weight_ptr, tail_ptr, rows_ptr, out_ptr, tokens, mixed_stride, tail_stride, query_scale,
    KEYS: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PADDED: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, SINGLE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    CHANNELS: tl.constexpr = 2 * KEYS * DK + VALUES * DV
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    shown = token < tokens
    is_value = head >= 2 * KEYS
    start = tl.where(is_value, 2 * KEYS * DK + (head - 2 * KEYS) * DV, head * DK)
    column = tl.arange(0, PADDED)
    inside = column < tl.where(is_value, DV, DK)
    channel = start + column
    mask = shown[:, None] & inside[None, :]
    slot = tl.load(rows_ptr + 2 * token, mask=shown, other=0)
    position = tl.load(rows_ptr + 2 * token + 1, mask=shown, other=0)
    # how many of the tokens that the convolution reaches back to are in this step
    known = tl.zeros((TOKENS,), tl.int32)
    if not SINGLE:
        for back in tl.static_range(1, WIDTH):
            known += _earlier(rows_ptr, token, slot, position, back, shown).to(tl.int32)
    at = mixed_ptr + token[:, None] * mixed_stride + channel[None, :]
    tail = tail_ptr + slot[:, None] * tail_stride + channel[None, :] * (WIDTH - 1)
    weights = weight_ptr + channel * WIDTH
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    total = x * tl.load(weights + WIDTH - 1, mask=inside, other=0.0)[None, :]
    # from the oldest on, so that a tail can be moved on place by place
    for step in tl.static_range(1, WIDTH):
        kept = mask & (known < WIDTH - step)[:, None] & (position >= WIDTH - step)[:, None]
        old = tl.load(tail + (step - 1 + known)[:, None], mask=kept, other=0.0)
        if not SINGLE:
            there = mask & (known >= WIDTH - step)[:, None]
            before = (token - (WIDTH - step))[:, None] * mixed_stride
            old += tl.load(mixed_ptr + before + channel[None, :], mask=there, other=0.0).to(tl.float32)
        elif step > 1:
            tl.store(tail + step - 2, old, mask=mask)
        total += old * tl.load(weights + step - 1, mask=inside, other=0.0)[None, :]
    if SINGLE:
        tl.store(tail + WIDTH - 2, x, mask=mask)
    out = total / (1.0 + tl.exp(-total))
    if head < 2 * KEYS:
        norm = tl.rsqrt(tl.sum(out * out, 1) + _L2_EPS)
        norm = tl.where(head < KEYS, norm * query_scale, norm)
        out = out * norm[:, None]
    place = out_ptr + token[:, None] * CHANNELS + channel[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _move_tail(
    mixed_ptr, tail_ptr, first, count, position, channel, inside, mixed_stride, WIDTH: tl.constexpr
):  # fmt: skip
    """Let a sequence's tail of some channels be its last inputs."""
    for place in tl.static_range(WIDTH - 1):
        # counted from the piece's first token; what is before it stands in the tail still
        offset = count - (WIDTH - 1) + place
        kept = inside & (offset < 0) & (position + offset >= 0)
        x = tl.load(tail_ptr + channel * (WIDTH - 1) + place + count, mask=kept, other=0.0)
        new = inside & (offset >= 0)
        x += tl.load(mixed_ptr + (first + offset) * mixed_stride + channel, mask=new, other=0.0).to(
            tl.float32
        )
        tl.store(tail_ptr + channel * (WIDTH - 1) + place, x, mask=inside)


@triton.jit
def key_head(head, KEYS: tl.constexpr, VALUES: tl.constexpr, TILED: tl.constexpr):
    """Return the key head that a value head reads."""
    if TILED:
        return head % KEYS
    else:
        return head // (VALUES // KEYS)


@triton.jit
def move_tails(
    mixed_ptr, tail_ptr, first, count, position, head, value, mixed_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PADDED: tl.constexpr,
    WIDTH: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Move the tail [C, W - 1] at `tail_ptr` on past a piece, for columns `value` of a value head.

    The first value head of a key head sees to that too, with its first columns. No program may read a tail
    that another one moves on.
    """
    inside = value < DV
    channel = 2 * KEYS * DK + head * DV + value
    _move_tail(mixed_ptr, tail_ptr, first, count, position, channel, inside, mixed_stride, WIDTH)
    is_first = head < KEYS if TILED else head % (VALUES // KEYS) == 0
    column = tl.arange(0, DK_PADDED)
    inside = (column < DK) & is_first & (tl.min(value) == 0)
    channel = key_head(head, KEYS, VALUES, TILED) * DK + column
    _move_tail(mixed_ptr, tail_ptr, first, count, position, channel, inside, mixed_stride, WIDTH)
    channel += KEYS * DK
    _move_tail(mixed_ptr, tail_ptr, first, count, position, channel, inside, mixed_stride, WIDTH)


@dataclass(frozen=True, eq=False)
class DeltaCall:
    """What `delta_net_ref` is given, by the same names."""

    mixed: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    conv_weight: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    tail: torch.Tensor
    matrix: torch.Tensor
    rows: torch.Tensor
    pieces: torch.Tensor | None
    eps: float
    tiled: bool

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return self.mixed.shape[0]

    @property
    def sizes(self) -> DeltaSizes:
        """Return the layer's sizes."""
        _, values, dk, dv = self.matrix.shape
        channels, width = self.conv_weight.shape
        return DeltaSizes((channels - values * dv) // (2 * dk), values, dk, dv, width, self.tiled)


@dataclass(frozen=True)
class DeltaSizes:
    """Key and value heads of a layer, their dimensions, and the width of the convolution."""

    keys: int
    values: int
    dk: int
    dv: int
    width: int = 4
    tiled: bool = False

    @property
    def channels(self) -> int:
        """Return the columns of queries, keys and values."""
        return 2 * self.keys * self.dk + self.values * self.dv

    def constants(self) -> dict[str, Any]:
        """Return the compile-time parameters that tell a kernel of heads."""
        sizes = {"KEYS": self.keys, "VALUES": self.values, "DK": self.dk, "DV": self.dv}
        return {**sizes, "DK_PADDED": padded(self.dk)}


def padded(dim: int) -> int:
    """Return the columns in which kernels hold a head."""
    return max(16, 1 << (dim - 1).bit_length())


def delta_input(engine: GpuEngine, call: DeltaCall, dtype: torch.dtype) -> torch.Tensor:
    """Return queries, keys and values [T, C] side by side, of type `dtype`, as the recurrence takes them.

    Where all sequences have a single token, tails are moved on as well.
    """
    sizes, single = call.sizes, call.pieces is None
    out = engine.empty("delta_input", call.mixed.shape, dtype)
    constants = _constants(sizes, single=single)
    block = constants["TOKENS"]
    engine.launch(
        delta_input_kernel,
        (2 * sizes.keys + sizes.values, -(-call.tokens // block)),
        reads=(call.mixed, call.conv_weight, call.tail, call.rows),
        writes=(out, call.tail) if single else (out,),
        mixed_ptr=call.mixed,
        weight_ptr=call.conv_weight,
        tail_ptr=call.tail,
        rows_ptr=call.rows,
        out_ptr=out,
        tokens=call.tokens,
        mixed_stride=call.mixed.stride(0),
        tail_stride=call.tail.stride(0),
        query_scale=float(sizes.dk**-0.5),
        constants={**constants, "TARGET": engine.target},
        warps=_warps(constants),
    )
    return out


def _constants(sizes: DeltaSizes, *, single: bool) -> dict[str, Any]:
    heads = {"KEYS": sizes.keys, "VALUES": sizes.values, "DK": sizes.dk, "DV": sizes.dv}
    shape = {"PADDED": padded(max(sizes.dk, sizes.dv)), "WIDTH": sizes.width}
    return {**heads, **shape, "TOKENS": 1 if single else _TOKENS, "SINGLE": single}


def _warps(constants: dict[str, Any]) -> int:
    """Return the warps for a program's elements, about four or eight in each thread."""
    elements: int = constants["TOKENS"] * constants["PADDED"]
    return max(1, min(8, elements // 256))


_TYPES = {
    **{"mixed_ptr": "*fp32", "weight_ptr": "*fp32", "tail_ptr": "*fp32", "rows_ptr": "*i64"},
    **{"out_ptr": "*fp32", "tokens": "i32", "mixed_stride": "i32", "tail_stride": "i32"},
    "query_scale": "fp32",
}


def _offline(name: str, values: int, *, single: bool, types: dict[str, str]) -> Offline:
    constants = _constants(DeltaSizes(16, values, 128, 128), single=single)
    aligned = frozenset({"mixed_stride", "tail_stride"})
    return Offline(
        delta_input_kernel, {**_TYPES, **types}, constants, _warps(constants), name=name, aligned=aligned
    )


OFFLINE: tuple[Offline, ...] = (
    _offline("27b step", 48, single=True, types={}),
    _offline("a3b step", 32, single=True, types={}),
    _offline("27b prompt", 48, single=False, types={"mixed_ptr": "*bf16", "out_ptr": "*bf16"}),
    _offline("27b short prompt", 48, single=False, types={"out_ptr": "*bf16"}),
    _offline("27b exact prompt", 48, single=False, types={}),
)
