"""What happens to queries, keys and values before attention, as one operation: norms, rotation, caching."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hipfire.kernels.kv_cache import kv_write_q8_ref, kv_write_ref
from hipfire.kernels.launch import Op
from hipfire.kernels.rms_norm import rms_norm_ref
from hipfire.kernels.rope import rope_ref

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def attention_input_ref(
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
    """Write keys and values into their caches and return the queries, float32 [T, H, D], ready for attention.

    q [T, H, D], k and v [T, KV, D] may be strided in their first dimension. Where there are weights [D],
    queries and keys are RMS-normalized per head first; then both are rotated by cos and sin [T, R/2]. `rows`
    int64 [T, 2] holds the slot and position of every token; `keys` and `values` are caches of a plain type,
    as `kv_write_ref` takes them.
    """
    return enter_ref(kv_write_ref, q, k, v, rows, cos, sin, keys, values, q_weight, k_weight, eps, offset)


def attention_input_q8_ref(
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
    """Do the same for caches in q8."""
    return enter_ref(kv_write_q8_ref, q, k, v, rows, cos, sin, keys, values, q_weight, k_weight, eps, offset)


def enter_ref(
    write: Write,
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
    """Do what `attention_input_ref` says; `write(cache, rows, x)` stores x [T, KV, D] in a cache."""
    if q_weight is not None:
        q = rms_norm_ref(q, q_weight, eps, offset)
    if k_weight is not None:
        k = rms_norm_ref(k, k_weight, eps, offset)
    write(keys, rows, rope_ref(k, cos, sin))
    write(values, rows, v)
    return rope_ref(q, cos, sin)


ATTENTION_INPUT = Op(
    "attention_input",
    attention_input_ref,
    {"numba": "hipfire.kernels.cpu.ops.attention_input"},
    writes=("keys", "values"),
)
ATTENTION_INPUT_Q8 = Op(
    "attention_input_q8",
    attention_input_q8_ref,
    {"numba": "hipfire.kernels.cpu.ops.attention_input"},
    writes=("keys", "values"),
)
