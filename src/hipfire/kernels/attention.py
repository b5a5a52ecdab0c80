"""Causal attention of new queries over cached keys and values, with an optional window."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hipfire.kernels.kv_cache import q8_decode, runs
from hipfire.kernels.launch import Op

# query rows handled at once, so that the score matrix of a long prompt stays small
QUERY_ROWS = 256


def attention_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Return softmax(scale * q k^T + mask) v as float32 [T, H, D].

    q [T, H, D] are the last T positions of a sequence whose S keys and values are k, v [S, KV, D], S >= T;
    H is a multiple of KV. A query at position p sees the keys at positions (p - window, p], or all of [0, p]
    without a window.
    """
    T, H, D = q.shape
    S, kv_heads, _ = k.shape
    keys = k.float().transpose(0, 1)  # [KV, S, D]
    values = v.float().transpose(0, 1)
    queries = q.float().reshape(T, kv_heads, H // kv_heads, D).permute(1, 2, 0, 3)  # [KV, G, T, D]
    out = torch.empty(kv_heads, H // kv_heads, T, D, dtype=torch.float32, device=q.device)
    for begin in range(0, T, QUERY_ROWS):
        end = min(begin + QUERY_ROWS, T)
        first = 0 if window is None else max(0, S - T + begin - window + 1)
        last = S - T + end
        out[:, :, begin:end] = _attend_rows(
            queries[:, :, begin:end],
            keys[:, first:last],
            values[:, first:last],
            S - T + begin - first,
            scale,
            window,
        )
    return out.permute(2, 0, 1, 3).reshape(T, H, D)


def _attend_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int, scale: float, window: int | None
) -> torch.Tensor:
    """Attend q [KV, G, R, D], the first of them at row `offset` of k and v [KV, S, D]; returns q's shape."""
    groups, rows = q.shape[1], q.shape[2]
    positions = torch.arange(offset, offset + rows, device=q.device)[:, None]
    columns = torch.arange(k.shape[1], device=q.device)[None, :]
    hidden = columns > positions
    if window is not None:
        hidden |= columns <= positions - window
    scores = torch.matmul(q.flatten(1, 2), k.transpose(1, 2)) * scale
    scores.view(-1, groups, rows, k.shape[1]).masked_fill_(hidden, float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1), v).view(q.shape)


def attend_ref(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Return what every token sees in the caches, float32 [T, H, D].

    `keys` and `values` are caches [slots, S, KV, D], `rows` int64 [T, 2] the slot and position of each
    query in q [T, H, D]; its own key and those before it are in place.
    """
    return _attend(q, keys, values, rows, scale, window, torch.Tensor.float)


def attend_q8_ref(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Do the same for caches in q8, [slots, S, KV, D / 32 * 34] bytes."""
    return _attend(q, keys, values, rows, scale, window, q8_decode)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    window: int | None,
    read: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for part, slot, start in runs(rows):
        seen = start + part.stop - part.start
        k, v = read(keys[slot, :seen]), read(values[slot, :seen])
        out[part] = attention_ref(q[part], k, v, scale, window)
    return out


ATTENTION = Op("attention", attend_ref, {"numba": "hipfire.kernels.cpu.ops.attend"})
ATTENTION_Q8 = Op("attention_q8", attend_q8_ref, {"numba": "hipfire.kernels.cpu.ops.attend"})
