"""Attention over blocked caches: which kernel takes a step.

Without tiles, tokens are decoded. This file does not know how either kernel works.
"""

from __future__ import annotations

import torch

from hipfire.kernels.gpu.decode_attention import decode_attention
from hipfire.kernels.gpu.engine import GpuEngine
from hipfire.kernels.gpu.prefill_attention import prefill_attention
from hipfire.kernels.kv_cache import Q8_BYTES, Q8_ELEMENTS


def block_attention(
    engine: GpuEngine,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    window: int | None = None,
    tiles: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `block_attention_ref` does; q, rows and tiles are contiguous."""
    kv = keys.shape[3] // q.shape[2]
    return _attention(engine, q, keys, values, rows, scale, window, tiles, kv=kv, q8=False)


def block_attention_q8(
    engine: GpuEngine,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    window: int | None = None,
    tiles: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `block_attention_q8_ref` does, under the same conditions."""
    kv = keys.shape[3] // Q8_BYTES * Q8_ELEMENTS // q.shape[2]
    return _attention(engine, q, keys, values, rows, scale, window, tiles, kv=kv, q8=True)


def _attention(
    engine: GpuEngine,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    window: int | None,
    tiles: torch.Tensor | None,
    *,
    kv: int,
    q8: bool,
) -> torch.Tensor:
    if tiles is None:
        return decode_attention(engine, q, keys, values, rows, scale, window, kv=kv, q8=q8)
    return prefill_attention(engine, q, keys, values, rows, tiles, scale, window, kv=kv, q8=q8)
