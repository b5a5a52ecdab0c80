"""Causal attention of one sequence's new queries over its cached keys and values, with an optional window."""

from __future__ import annotations

import torch

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
    queries = q.float().reshape(T, kv_heads, H // kv_heads, D)
    out = torch.empty(T, kv_heads, H // kv_heads, D, dtype=torch.float32, device=q.device)
    for begin in range(0, T, QUERY_ROWS):
        end = min(begin + QUERY_ROWS, T)
        first_seen = 0 if window is None else max(0, S - T + begin - window + 1)
        last_seen = S - T + end
        rows = torch.arange(S - T + begin, last_seen, device=q.device)
        columns = torch.arange(first_seen, last_seen, device=q.device)
        hidden = columns[None, :] > rows[:, None]
        if window is not None:
            hidden |= columns[None, :] <= rows[:, None] - window
        block = queries[begin:end].permute(1, 2, 0, 3).reshape(kv_heads, -1, D)  # [KV, G * rows, D]
        scores = torch.matmul(block, keys[:, first_seen:last_seen].transpose(1, 2)) * scale
        scores = scores.view(kv_heads, H // kv_heads, end - begin, -1).masked_fill_(hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1).view(kv_heads, -1, last_seen - first_seen)
        mixed = torch.matmul(weights, values[:, first_seen:last_seen])
        out[begin:end] = mixed.view(kv_heads, H // kv_heads, end - begin, D).permute(2, 0, 1, 3)
    return out.view(T, H, D)


ATTENTION = Op("attention", attention_ref)
