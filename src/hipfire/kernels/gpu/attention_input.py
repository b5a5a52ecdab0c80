"""What happens to queries, keys and values before attention, in one launch: norms, rotation, cache writes.

Each program takes some heads of one token. The caches are blocked, see `kernels/block_cache.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hipfire.kernels.block_cache import BLOCK
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.offline import Offline
from hipfire.kernels.gpu.rowwise import ROWS_FLOAT32, product_type
from hipfire.kernels.gpu.target import begin_launch

_BLOCK = tl.constexpr(BLOCK)
# adding and subtracting this rounds a float32 of less than 2^22 to the nearest integer, halves to even
_ROUND = tl.constexpr(12582912.0)
# steps of at most so many tokens have a program for every head
_FEW_TOKENS = 32


@triton.jit
def _heads(x_ptr, weight_ptr, at, head, column, inside, eps, offset, D: tl.constexpr):
    """Load heads [HEADS, D_PADDED] and their norm's factor, which is 1 for heads without a norm."""
    x = tl.load(x_ptr + at + head[:, None] * D + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        norm = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
        weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32) + offset
        x = x * norm[:, None] * weight[None, :]
    else:
        norm = tl.full((x.shape[0],), 1.0, tl.float32)
    return x, norm


@triton.jit
def _rotated(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, token, at, head, column, inside, eps, offset,
    D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Load heads, normalize and rotate them. An element's partner is loaded once more: it is in the cache."""
    x, norm = _heads(x_ptr, weight_ptr, at, head, column, inside, eps, offset, D)
    turned = column < 2 * HALF
    angle = tl.where(column < HALF, column, column - HALF)
    partner = tl.where(column < HALF, column + HALF, column - HALF)
    partner = tl.where(turned, partner, column)
    other = tl.load(x_ptr + at + head[:, None] * D + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + partner, mask=column < D, other=0.0).to(tl.float32) + offset
        other = other * norm[:, None] * weight[None, :]
    cos = tl.load(cos_ptr + token * HALF + angle, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + token * HALF + angle, mask=turned, other=0.0)
    sin = tl.where(column < HALF, -sin, sin)
    return x * cos[None, :] + other * sin[None, :]


@triton.jit
def _write(
    cache_ptr, row, x, head, column, inside, KV: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    Q8: tl.constexpr,
):  # fmt: skip
    """Store heads of one position in the cache's row that begins at `row`."""
    place = head[:, None] * D + column[None, :]
    if Q8:
        GROUPS: tl.constexpr = D_PADDED // 32
        heads: tl.constexpr = x.shape[0]
        grouped = tl.reshape(x, (heads, GROUPS, 32))
        peak = tl.max(tl.abs(grouped), 2)
        # below this the half-precision scale is zero whatever the codes are
        full = tl.full(peak.shape, 127.0, tl.float32)
        inverse = tl.where(peak > 1e-30, tl.div_rn(full, tl.maximum(peak, 1e-30)), 0.0)
        codes = tl.minimum(tl.maximum(grouped * inverse[:, :, None], -127.0), 127.0)
        codes = tl.reshape((codes + _ROUND) - _ROUND, (heads, D_PADDED)).to(tl.int8)
        tl.store(cache_ptr + row + place, codes.to(tl.uint8, bitcast=True), mask=inside)
        scale = tl.div_rn(peak, full).to(tl.float16)
        group = tl.arange(0, GROUPS)
        scale_ptr = (cache_ptr + row + KV * D).to(tl.pointer_type(tl.float16))
        shown = (head[:, None] < KV) & (group[None, :] < D // 32)
        tl.store(scale_ptr + head[:, None] * (D // 32) + group[None, :], scale, mask=shown)
    else:
        tl.store(cache_ptr + row + place, x.to(cache_ptr.dtype.element_ty), mask=inside)


@triton.jit
def block_input_kernel(
    q_ptr, k_ptr, v_ptr, rows_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr,
    q_weight_ptr, k_weight_ptr, out_ptr, eps, offset, q_stride, k_stride, v_stride,
    key_slot_stride, key_block_stride, value_slot_stride, value_block_stride,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, Q8: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    begin_launch(TARGET)
    Q_PARTS: tl.constexpr = (H + HEADS - 1) // HEADS
    K_PARTS: tl.constexpr = (KV + HEADS - 1) // HEADS
    ROW: tl.constexpr = KV * D // 32 * 34 if Q8 else KV * D
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    head = tl.arange(0, HEADS)
    column = tl.arange(0, D_PADDED)
    slot = tl.load(rows_ptr + 2 * token)
    position = tl.load(rows_ptr + 2 * token + 1)
    block = position // _BLOCK
    row = (position % _BLOCK) * ROW
    if part < Q_PARTS:
        head += part * HEADS
        inside = (head[:, None] < H) & (column[None, :] < D)
        x = _rotated(
            q_ptr, q_weight_ptr, cos_ptr, sin_ptr, token, token * q_stride, head, column, inside, eps, offset,
            D, HALF,
        )  # fmt: skip
        place = out_ptr + token * (H * D) + head[:, None] * D + column[None, :]
        tl.store(place, x.to(out_ptr.dtype.element_ty), mask=inside)
    elif part < Q_PARTS + K_PARTS:
        head += (part - Q_PARTS) * HEADS
        inside = (head[:, None] < KV) & (column[None, :] < D)
        x = _rotated(
            k_ptr, k_weight_ptr, cos_ptr, sin_ptr, token, token * k_stride, head, column, inside, eps, offset,
            D, HALF,
        )  # fmt: skip
        row += slot * key_slot_stride + block * key_block_stride
        _write(keys_ptr, row, x, head, column, inside, KV, D, D_PADDED, Q8)
    else:
        head += (part - Q_PARTS - K_PARTS) * HEADS
        inside = (head[:, None] < KV) & (column[None, :] < D)
        at = token * v_stride
        x = tl.load(v_ptr + at + head[:, None] * D + column[None, :], mask=inside, other=0.0).to(tl.float32)
        row += slot * value_slot_stride + block * value_block_stride
        _write(values_ptr, row, x, head, column, inside, KV, D, D_PADDED, Q8)


def _config(tokens: int, d_padded: int) -> tuple[int, int]:
    """Return (heads of a program, warps): many small programs for few tokens, larger ones for many."""
    if tokens <= _FEW_TOKENS:
        return 1, 1 if d_padded <= 256 else 2
    heads = max(1, 1024 // d_padded)
    return heads, 4


def _enter(
    engine: GpuEngine,
    q8: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    offset: float,
) -> torch.Tensor:
    (tokens, heads, d), kv = q.shape, k.shape[1]
    d_padded = triton.next_power_of_2(d)
    out = engine.empty("queries", (tokens, heads, d), product_type(engine, tokens))
    per_program, warps = _config(tokens, d_padded)
    parts = triton.cdiv(heads, per_program) + 2 * triton.cdiv(kv, per_program)
    weights = tuple(weight for weight in (q_weight, k_weight) if weight is not None)
    engine.launch(
        block_input_kernel,
        (tokens, parts),
        reads=(q, k, v, rows, cos, sin, *weights),
        writes=(out, keys, values),
        constants={
            "H": heads,
            "KV": kv,
            "D": d,
            "D_PADDED": d_padded,
            "HALF": cos.shape[1],
            "HEADS": per_program,
            "Q8": q8,
            "TARGET": engine.target,
        },
        warps=warps,
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        rows_ptr=rows,
        cos_ptr=cos,
        sin_ptr=sin,
        keys_ptr=keys,
        values_ptr=values,
        q_weight_ptr=q_weight,
        k_weight_ptr=k_weight,
        out_ptr=out,
        eps=float(eps),
        offset=float(offset),
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        key_slot_stride=keys.stride(0),
        key_block_stride=keys.stride(1),
        value_slot_stride=values.stride(0),
        value_block_stride=values.stride(1),
    )
    return out


def block_input(
    engine: GpuEngine,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> torch.Tensor:
    """Do what `block_input_ref` does; rows, cos, sin and weights are contiguous, and so is each token."""
    return _enter(engine, False, q, k, v, rows, cos, sin, keys, values, q_weight, k_weight, eps, offset)


def block_input_q8(
    engine: GpuEngine,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> torch.Tensor:
    """Do what `block_input_q8_ref` does, under the same conditions."""
    return _enter(engine, True, q, k, v, rows, cos, sin, keys, values, q_weight, k_weight, eps, offset)


_POINTERS = {
    **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "cos_ptr", "sin_ptr"), "*fp32"),
    "rows_ptr": "*i64",
    **dict.fromkeys(("eps", "offset"), "fp32"),
    **dict.fromkeys(
        (
            "q_stride",
            "k_stride",
            "v_stride",
            "key_slot_stride",
            "key_block_stride",
            "value_slot_stride",
            "value_block_stride",
        ),
        "i32",
    ),
}
_ALIGNED = frozenset(name for name in _POINTERS if name.endswith("_stride"))


def _offline(name: str, d: int, cache: str, tokens: int, *, norms: bool) -> Offline:
    padded = triton.next_power_of_2(d)
    heads, warps = _config(tokens, padded)
    weights = dict.fromkeys(("q_weight_ptr", "k_weight_ptr"), "*fp32" if norms else None)
    arguments = {
        **_POINTERS,
        **dict.fromkeys(("keys_ptr", "values_ptr"), cache),
        "out_ptr": "*fp32" if tokens <= ROWS_FLOAT32 else "*bf16",
        **{key: kind for key, kind in weights.items() if kind is not None},
    }
    constants = {
        **{key: None for key, kind in weights.items() if kind is None},
        "H": 32,
        "KV": 8,
        "D": d,
        "D_PADDED": padded,
        "HALF": d // 2,
        "HEADS": heads,
        "Q8": cache == "*u8",
    }
    return Offline(block_input_kernel, arguments, constants, warps, name=name, aligned=_ALIGNED)


OFFLINE = (
    _offline("decode q8", 128, "*u8", 1, norms=True),
    _offline("decode q8 256", 256, "*u8", 1, norms=True),
    _offline("decode bf16 80", 80, "*bf16", 1, norms=False),
    _offline("prefill q8", 128, "*u8", 512, norms=True),
    _offline("prefill bf16", 64, "*bf16", 512, norms=False),
    _offline("prefill q8 512", 512, "*u8", 512, norms=True),
)
