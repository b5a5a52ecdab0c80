"""The operations of a model as the CPU engine runs them, with the signatures of their references.

This file does not know weights, nor how a kernel does its work.
"""

from __future__ import annotations

import torch

from hipfire.kernels.cpu import attention as attention_kernels
from hipfire.kernels.cpu import attention_parts, kv
from hipfire.kernels.cpu import fwht as fwht_kernels
from hipfire.kernels.cpu import rope as rope_kernels
from hipfire.kernels.cpu import rows as row_kernels
from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.cpu.jit import Kernel
from hipfire.kernels.cpu.rows import GROUP
from hipfire.kernels.fwht import SEED_IN, SEED_OUT, sign_column

# below this many tokens times key heads per thread, chunks of keys are shared out instead of tokens
FEW_QUERIES = 8


def rms_norm(
    engine: CpuEngine, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Run `rms_norm_ref` on [T, D], or on the heads of [T, H, D]."""
    heads, columns = (x.shape[1] if x.ndim == 3 else 1), x.shape[-1]
    out = torch.empty(x.shape)
    rows = x.shape[0] * heads
    engine.launch(
        row_kernels.rms_norm,
        *(x, rows, heads, columns, 4 * x.stride(0), weight, float(eps), float(offset), out, 0, 0),
        reads=(x, weight),
        writes=(out,),
        units=("rows", rows),
    )
    return out


def residual_norm(
    engine: CpuEngine,
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    delta_weight: torch.Tensor | None = None,
    *,
    rotated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `residual_norm_ref` on [T, D]; a rotation is a launch of its own here."""
    del rotated
    if delta_weight is not None:
        delta = rms_norm(engine, delta, delta_weight, eps, offset)
    total = add(engine, x, delta)
    return total, rms_norm(engine, total, weight, eps, offset)


def _elementwise(engine: CpuEngine, kernel: Kernel, a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    rows, columns = a.shape
    out = torch.empty(rows, columns)
    scratch, each = engine.scratch(64)
    stride = 0 if isinstance(b, float) else 4 * b.stride(0)
    engine.launch(
        kernel,
        *(a, b, rows, columns, 4 * a.stride(0), stride, out, scratch, each),
        reads=(a,) if isinstance(b, float) else (a, b),
        writes=(out,),
        units=("groups", rows, -(-columns // GROUP)),
    )
    return out


def add(engine: CpuEngine, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Run `add_ref` on [T, D]."""
    return _elementwise(engine, row_kernels.add, x, y)


def silu_mul(engine: CpuEngine, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Run `silu_mul_ref` on [T, D]."""
    return _elementwise(engine, row_kernels.silu_mul, gate, up)


def gelu_tanh_mul(engine: CpuEngine, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Run `gelu_tanh_mul_ref` on [T, D]."""
    return _elementwise(engine, row_kernels.gelu_mul, gate, up)


def mul_sigmoid(engine: CpuEngine, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Run `mul_sigmoid_ref` on [T, D]."""
    return _elementwise(engine, row_kernels.mul_sigmoid, x, gate)


def scale(engine: CpuEngine, x: torch.Tensor, factor: float) -> torch.Tensor:
    """Run `scale_ref` on [T, D]."""
    return _elementwise(engine, row_kernels.scale, x, float(factor))


def softcap(engine: CpuEngine, x: torch.Tensor, cap: float) -> torch.Tensor:
    """Run `softcap_ref` on [T, D]."""
    return _elementwise(engine, row_kernels.softcap, x, float(cap))


def rope_angles(
    engine: CpuEngine, rows: torch.Tensor, frequencies: torch.Tensor, attention_scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `rope_angles_ref`."""
    shape = rows.shape[0], frequencies.shape[0]
    cos, sin = torch.empty(shape), torch.empty(shape)
    engine.launch(
        rope_kernels.rope_angles,
        *(rows, shape[0], frequencies, shape[1], float(attention_scale), cos, sin),
        reads=(rows, frequencies),
        writes=(cos, sin),
    )
    return cos, sin


def rope(engine: CpuEngine, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Run `rope_ref` on [T, H, D]."""
    tokens, heads, size = x.shape
    out = torch.empty(x.shape)
    engine.launch(
        rope_kernels.rope,
        *(x, tokens, heads, size, 4 * x.stride(0), cos.shape[-1], cos, sin, out),
        reads=(x, cos, sin),
        writes=(out,),
        units=("heads", tokens, heads),
    )
    return out


def fwht(engine: CpuEngine, x: torch.Tensor) -> torch.Tensor:
    """Run `fwht256` on [T, K]."""
    return _rotate(engine, x, SEED_IN, SEED_OUT)


def inverse_fwht(engine: CpuEngine, x: torch.Tensor) -> torch.Tensor:
    """Run `inverse_fwht256` on [T, K]."""
    return _rotate(engine, x, SEED_OUT, SEED_IN)


def _rotate(engine: CpuEngine, x: torch.Tensor, first: int, last: int) -> torch.Tensor:
    before, after = (
        sign_column(seed, factor, x.device) for seed, factor in ((first, 1.0), (last, 1.0 / 16.0))
    )
    out = torch.empty(x.shape)
    engine.launch(
        fwht_kernels.fwht,
        *(x, x.shape[0], x.shape[1], 4 * x.stride(0), before, after, out),
        reads=(x, before, after),
        writes=(out,),
    )
    return out


def _mode(cache: torch.Tensor) -> str:
    return {torch.float32: "f32", torch.bfloat16: "bf16", torch.uint8: "q8"}[cache.dtype]


def _cache_strides(cache: torch.Tensor) -> tuple[int, int, int]:
    size = cache.element_size()
    return cache.stride(0) * size, cache.stride(1) * size, cache.stride(2) * size


def kv_write(engine: CpuEngine, cache: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> None:
    """Run `kv_write_ref` or `kv_write_q8_ref`."""
    tokens, heads, size = x.shape
    engine.launch(
        kv.KV_WRITE_KERNELS[_mode(cache)],
        *(x, tokens, heads, size, 4 * x.stride(0), rows, cache, *_cache_strides(cache)),
        reads=(x, rows),
        writes=(cache,),
        units=("heads", tokens, heads),
    )


def attention_input(
    engine: CpuEngine,
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
    """Run `attention_input_ref` or `attention_input_q8_ref`."""
    if q_weight is not None:
        q = rms_norm(engine, q, q_weight, eps, offset)
    if k_weight is not None:
        k = rms_norm(engine, k, k_weight, eps, offset)
    queries = rope(engine, q, cos, sin)
    kv_write(engine, keys, rows, rope(engine, k, cos, sin))
    kv_write(engine, values, rows, v)
    return queries


def attend(
    engine: CpuEngine,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Run `attend_ref` or `attend_q8_ref`."""
    tokens, heads, size = q.shape
    whole, chunks = attention_kernels.ATTEND_KERNELS[_mode(keys)]
    out = torch.empty(q.shape)
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    scratch, each = engine.scratch(attention_kernels.scratch_nbytes(size, group))
    arguments = (
        *(q, tokens, kv_heads, group, size, 4 * q.stride(0), rows, keys, values),
        *_cache_strides(keys),
        *(window or 0, float(scale), out, scratch, each),
    )
    reads = (q, rows, keys, values)
    if tokens * kv_heads >= FEW_QUERIES * engine.threads:
        engine.launch(whole, *arguments, reads=reads, writes=(out,))
        return out
    room = -(-keys.shape[1] // attention_parts.CHUNK) + 1
    if window is not None:
        room = min(room, -(-window // attention_parts.CHUNK) + 1)
    partial = torch.empty(tokens * heads * room * attention_parts.partial_nbytes(size), dtype=torch.uint8)
    engine.launch(chunks, *arguments, partial, room, reads=reads, writes=(partial,))
    merged = (out, partial)
    engine.launch(
        attention_kernels.merge_chunks, *arguments, partial, room, reads=(partial, rows), writes=merged
    )
    return out
